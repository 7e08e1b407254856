"""Sparse Sinkhorn attention: each block attends to itself and to a mixture of the other blocks, a soft permutation of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PyTree

from hpnlp.ops.attention.block_sparse import tile
from hpnlp.ops.attention.block_sparse.operands import Options
from hpnlp.ops.attention.block_sparse.tile import TileMask
from hpnlp.ops.attention.bucketed import tiles
from hpnlp.ops.attention.masks.base import Full
from hpnlp.ops.dropout import check_rate, keep_mask, seed_words
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.types import InputError

# Stands for -inf, with which the derivatives of a sum without terms would be NaN.
LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class SortSettings:
    """Static settings of the soft permutation.

    Attributes:
      block: Tokens of a block, C.
      iterations: Number of times that rows and columns are normalised.
      temperature: Divides the scores of pairs of blocks.
      causal: Only earlier blocks take part.
    """

    block: int
    iterations: int
    temperature: float
    causal: bool


@array_op("...", scores="...")
def balance(
    scores: Float[Array, "*a n n"], allowed: Bool[Array, "*b n n"], iterations: int, causal: bool
) -> Float[Array, "*a n n"]:
    """Sinkhorn's normalisation of rows and columns in turn, towards a doubly stochastic matrix.

    With `causal`, row i is a result of rows 0 to i alone: a column is divided by the sum of its entries up to that row.

    Args:
      scores: Logits [..., n, n].
      allowed: bool, broadcasts to [..., n, n]; other entries are 0.
      iterations: Number of normalisations of rows and of columns.
      causal: Columns are normalised up to each row.

    Returns:
      float32 [..., n, n], from 0 to 1.

    References: Tay et al. 2020, "Sparse Sinkhorn attention", arXiv 2002.11296, sec. 3.1.2 and 3.3.2, where the causal sums
      extend over all rows, which leaks from later ones.
    """
    s = jnp.where(allowed, scores.astype(jnp.float32), LOWEST)

    def divided(s: Array, total: Array) -> Array:
        # No weight is over 1. The logarithms of large scores can be over 0 by rounding, and their exponentials without bound.
        s = s - total
        return jnp.where(allowed, s - lax.stop_gradient(jnp.maximum(s, 0.0)), LOWEST)

    for _ in range(iterations):
        s = divided(s, jax.nn.logsumexp(s, axis=-1, keepdims=True))
        total = lax.cumlogsumexp(s, axis=s.ndim - 2) if causal else jax.nn.logsumexp(s, axis=-2, keepdims=True)
        s = divided(s, total)
    return jnp.where(allowed, jnp.exp(s), 0.0)


@array_op("B", q_sums="B")
def sort_weights(
    q_sums: Float[Array, "B n N H"],
    q_first: Float[Array, "B n N H"],
    k_sums: Float[Array, "B n K H"],
    counts: Int[Array, "B n"],
    block_segments: Int[Array, "B n"],
    settings: SortSettings,
) -> tuple[Float[Array, "B N n n"], Bool[Array, "B n n"]]:
    """The soft permutation of blocks of each head.

    The score of a pair of blocks is the inner product of a mean query and a mean key. The key is that of the tokens of the
    block. The query is that of the block's tokens; with `causal`, of all tokens of the segment up to the block's first one.

    Args:
      q_sums: float32 [B, n, N, H], sums of the queries of each block.
      q_first: float32 [B, n, N, H], query of the first token of each block.
      k_sums: float32 [B, n, K, H], sums of the keys of each block.
      counts: int32 [B, n], numbers of tokens in these sums.
      block_segments: int32 [B, n]; blocks of different segments do not take part in each other's permutation.
      settings: Settings.

    Returns:
      (float32 weights [B, N, n, n], bool [B, n, n], pairs that take part): entry i, j is the weight of block j beside block i.

    Cost: O(B N n^2 (H + iterations)).
    """
    batch, n, heads, dim = q_sums.shape
    index = np.arange(n)
    alike = block_segments[:, :, None] == block_segments[:, None]
    allowed = alike & (index[:, None] > index[None])[None] if settings.causal else alike
    number = counts.astype(jnp.float32)
    keys = k_sums / jnp.maximum(number, 1.0)[..., None, None]
    if settings.causal:
        before = allowed.astype(jnp.float32)
        total = jnp.einsum("bij,bjnh->binh", before, q_sums) + q_first
        queries = total / (jnp.einsum("bij,bj->bi", before, number) + 1.0)[..., None, None]
    else:
        queries = q_sums / jnp.maximum(number, 1.0)[..., None, None]
    queries = queries.reshape(batch, n, keys.shape[2], -1, dim)
    scores = jnp.einsum("bikgh,bjkh->bkgij", queries, keys).reshape(batch, heads, n, n)
    scores = scores * jnp.float32(dim**-0.5 / settings.temperature)
    return balance(scores, allowed[:, None], settings.iterations, settings.causal), allowed


@array_op("B T N", q="B T N")
def sinkhorn_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B _ K H"],
    v: Float[Array, "B _ K Hv"],
    settings: SortSettings,
    *,
    segment_ids: Int[Array, "_ _"] | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    streams: Int[Array, "B N"] | None = None,
) -> Array:
    """Softmax attention of each block of tokens to itself and to a mixture of the other blocks.

    Slot c of the mixture beside block i has the key `sum_j R[i, j] k[j, c]`, and a value alike, for the soft permutation R of
    `sort_weights`. A block belongs to the segment of its first token: tokens of another segment see tokens of their segment
    within the block only, and take no part in mixtures.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, T, K, H]; K divides N.
      v: Values [B, T, K, Hv].
      settings: Settings of the blocks and of their permutation.
      segment_ids: int32 [B, T]; a query sees the keys of its own segment.
      dropout_rate: Probability of dropping a weight.
      rng: PRNG key of dropout.
      streams: int [B, N], a distinct number for each row and head; b * N + n if None.

    Returns:
      o [B, T, N, Hv] in the dtype of q, accumulated in float32.

    Raises:
      InputError: Shapes or the rate of dropout do not fit.

    Cost:
      O(B N T (C + T / C) H) time for blocks of C tokens, and memory O(B N T H).

    References:
      Tay et al. 2020, "Sparse Sinkhorn attention", arXiv 2002.11296, eq. 1 to 5. Scores of blocks are inner products, for
      sequences of any length; the paper computes them by a layer with one output for each block. No Gumbel noise.
    """
    batch, length, heads, dim = q.shape
    if (
        k.shape[:2] != q.shape[:2]
        or k.shape[2] < 1
        or heads % k.shape[2]
        or k.shape[3] != dim
        or v.shape[:3] != k.shape[:3]
    ):
        raise InputError(
            f"k {k.shape} and v {v.shape} with q {q.shape}: expected equal B, T and H, and K that divides N"
        )
    if segment_ids is not None and segment_ids.shape != (batch, length):
        raise InputError(f"segment_ids has shape {segment_ids.shape}: expected {(batch, length)}")
    check_rate(dropout_rate, rng)
    if 0 in (batch, length, heads):
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    seed = jnp.zeros(1, jnp.uint32) if rng is None else seed_words(rng)
    if streams is None:
        streams = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads)
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, length), jnp.int32)
    k_mixed, v_mixed, mixed_codes = _mixtures(q, k, v, segment_ids, settings)
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], segment_ids.shape)
    lanes = (*(tiles.by_lane(x, heads) for x in (q, k, v)), k_mixed, v_mixed)
    codes = (jnp.repeat(x.astype(jnp.int32), heads, axis=0) for x in (segment_ids, index, *mixed_codes))
    arrays = vary_alike(*lanes, *codes, seed, streams.reshape(-1).astype(jnp.int32))
    o: Any = _attend(settings, Options(Full(), dim**-0.5, dropout_rate=dropout_rate), *arrays)
    return o.reshape(batch, heads, length, -1).transpose(0, 2, 1, 3)


def block_sums(x: Float[Array, "B T K H"], taken: Bool[Array, "B n C"]) -> Float[Array, "B n K H"]:
    """Sums of the vectors of each block.

    Args:
      x: Vectors [B, T, K, H].
      taken: bool [B, n, C], the tokens that are added, for blocks that cover T tokens.

    Returns:
      float32 [B, n, K, H].
    """
    x = in_blocks(x, taken.shape[2]).astype(jnp.float32)
    return jnp.sum(jnp.where(taken[..., None, None], x, 0.0), axis=2)


def in_blocks(x: Array, block: int) -> Array:
    """Blocks of tokens, the last one filled up with zeros.

    Args:
      x: `[B, T, ...]`.
      block: Tokens of a block C.

    Returns:
      `[B, T / C, C, ...]`.
    """
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % block)
    return jnp.pad(x, padding).reshape(x.shape[0], -1, block, *x.shape[2:])


def mixtures(weights: Float[Array, "B N m n"], x: Float[Array, "B n C K H"]) -> Float[Array, "B N m C H"]:
    """Mixtures of blocks, for each head.

    Args:
      weights: float32 [B, N, m, n], weights of the n blocks in each of m mixtures.
      x: Keys or values [B, n, C, K, H], finite.

    Returns:
      [B, N, m, C, H] in the dtype of x.
    """
    (batch, heads, m, n), (block, kv_heads, dim) = weights.shape, x.shape[2:]
    left = weights.reshape(batch * kv_heads, -1, n).astype(x.dtype)
    right = x.transpose(0, 3, 1, 2, 4).reshape(batch * kv_heads, n, block * dim)
    product = lax.dot_general(left, right, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return product.astype(x.dtype).reshape(batch, heads, m, block, dim)


def _mixtures(
    q: Array, k: Array, v: Array, segment_ids: Array, settings: SortSettings
) -> tuple[Float[Array, "L S H"], Float[Array, "L S Hv"], list[Array]]:
    """Keys and values of the slots of all mixtures, S = n C, and codes: segment, whether the slot has a key, number."""
    batch, length, heads, _ = q.shape
    segments = in_blocks(segment_ids, settings.block)
    exists = np.arange(segments.shape[1] * settings.block).reshape(segments.shape[1:]) < length
    taken = (segments == segments[:, :, :1]) & exists[None]
    q_first = in_blocks(q, settings.block)[:, :, 0].astype(jnp.float32)
    counts = jnp.sum(taken, axis=2, dtype=jnp.int32)
    weights, allowed = sort_weights(
        block_sums(q, taken), q_first, block_sums(k, taken), counts, segments[:, :, 0], settings
    )

    def slots(x: Array) -> Array:
        blocks = jnp.where(taken[..., None, None], in_blocks(x, settings.block), jnp.zeros((), x.dtype))
        return mixtures(weights, blocks).reshape(batch * heads, -1, x.shape[3])

    has_key = jnp.einsum("bij,bjc->bic", allowed.astype(jnp.float32), taken.astype(jnp.float32)) > 0
    number = jnp.arange(segments[0].size, dtype=jnp.int32).reshape(segments.shape[1:]) + length
    codes = (segments[:, :, :1], has_key, number[None])
    return slots(k), slots(v), [jnp.broadcast_to(x, segments.shape).reshape(batch, -1) for x in codes]


@dataclasses.dataclass(frozen=True)
class _Visible:
    """Visible pairs of a block and itself (codes: segment, index), or the mixture beside it (codes of `_mixtures`)."""

    causal: bool
    rate: float
    is_mixture: bool

    def __call__(self, queries: Sequence[Array], keys: Sequence[Array], seed: Array, streams: Array) -> TileMask:
        visible = queries[0] == keys[0]
        if self.is_mixture:
            visible = visible & (keys[1] == 1)
        elif self.causal:
            visible = visible & (queries[1] >= keys[1])
        return TileMask(visible, keep_mask(seed, streams, queries[1], keys[-1], self.rate) if self.rate else None)


def _bands(settings: SortSettings, options: Options) -> list[tiles.Band]:
    """The tiles of the blocks with themselves, and with the mixtures."""
    rules = (_Visible(settings.causal, options.dropout_rate, is_mixture) for is_mixture in (False, True))
    return [tiles.Band(settings.block, 0, 0, rule, options) for rule in rules]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(settings: SortSettings, options: Options, *arrays: Array) -> Array:
    """Results [L, T, Hv] of q, k, v, mixed k and v [L, T, H], codes of both [L, T], seed and streams [L]."""
    return _attend_forward(settings, options, *arrays)[0]


def _attend_forward(settings: SortSettings, options: Options, *arrays: Array) -> tuple[Array, Any]:
    block, beside = _bands(settings, options)
    queries, keys, mixtures, streams = _in_whole_blocks(block, *arrays)
    length = arrays[0].shape[1]
    sums = tile.combine(
        tiles.forward(block, length, queries, keys, *streams),
        tiles.forward(beside, length, queries, mixtures, *streams),
    )
    o, lse, lse_low = (x[:, :length] for x in tile.normalize(*sums))
    o, lse, lse_low = (checkpoint_name(x, "mixed") for x in (o.astype(arrays[0].dtype), lse, lse_low))
    return o, (arrays, o, lse, lse_low)


def _attend_backward(settings: SortSettings, options: Options, saved: PyTree[Array], do: Array) -> tuple[Any, ...]:
    arrays, o, lse, lse_low = saved
    block, beside = _bands(settings, options)
    queries, keys, mixtures, streams = _in_whole_blocks(block, *arrays)
    delta = jnp.einsum("lth,lth->lt", do, o, preferred_element_type=jnp.float32)
    residuals = tuple(_padded(x, queries[0].shape[1]) for x in (do, lse, lse_low, delta))
    length = arrays[0].shape[1]
    dq, dk, dv = tiles.backward(block, length, queries, keys, residuals, *streams)
    dq_mixed, dk_mixed, dv_mixed = tiles.backward(beside, length, queries, mixtures, residuals, *streams)
    gradients = zip((dq + dq_mixed, dk, dv, dk_mixed, dv_mixed), arrays[:5], strict=True)
    gradients = (dx[:, : x.shape[1]].astype(x.dtype) for dx, x in gradients)
    return *gradients, *(np.zeros(x.shape, jax.dtypes.float0) for x in arrays[5:])


def _in_whole_blocks(band: tiles.Band, *arrays: Array) -> tuple[tuple[Array, ...], ...]:
    """(queries, keys, mixtures) of `tiles.forward`, each with codes, from the arrays of `_attend`; and (seed, streams)."""
    (_, after), _ = tiles.padding(band, *arrays[0].shape[:2])
    length = arrays[0].shape[1] + after
    q, k, v, k_mixed, v_mixed, *codes = (_padded(x, length) for x in arrays[:-2])
    return (q, *codes[:2]), (k, v, *codes[:2]), (k_mixed, v_mixed, *codes[2:]), arrays[-2:]


def _padded(x: Array, length: int) -> Array:
    """`[L, length, ...]`, with PAD for codes of padding, and 0 for others."""
    widths = [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
    is_code = jnp.issubdtype(x.dtype, jnp.integer)
    return jnp.pad(x, widths, constant_values=jnp.asarray(tiles.PAD if is_code else 0, x.dtype))


_attend.defvjp(_attend_forward, _attend_backward)
