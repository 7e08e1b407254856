"""Attention with Transformer-XL's relative positions to tokens in a memory and in the sequence."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.attention.block_sparse.flash import flash
from hpnlp.ops.attention.masks.base import Full
from hpnlp.ops.attention.masks.patterns import Causal, Window
from hpnlp.ops.attention.memory.relative_bias import RelativeBias
from hpnlp.ops.attention.operands import Operands
from hpnlp.ops.attention.validate import validate
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError

# Most queries of a tile.
QUERIES = 256


@array_op("B T N R", q="B T N", r="R")
def distance_scores(
    q: Float[Array, "B T N H"], r: Float[Array, "R N H"], bias: Float[Array, "N H"], *, scale: float | None = None
) -> Float[Array, "B T N R"]:
    """Position scores of each query by distance: (q + bias) . r[distance] * scale.

    Args:
      q: Queries [B, T, N, H].
      r: Projected embeddings of the distances 0 to R - 1, [R, N, H].
      bias: Learned bias of the position scores, v in the paper, [N, H].
      scale: H ** -0.5 if None.

    Returns:
      float32 [B, T, N, R].

    Cost:
      O(B T N R H).

    References:
      Dai et al. 2019, "Transformer-XL", section 3.3, terms b and d of A^rel.
    """
    return _by_head(q, r, bias, scale).transpose(0, 2, 1, 3)


@array_op("B T N", q="B T N")
def relative_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    r: Float[Array, "R N H"],
    content_bias: Float[Array, "N H"],
    position_bias: Float[Array, "N H"],
    operands: Operands = Operands(),  # noqa: B008  (frozen)
    *,
    block_size: int | None = None,
) -> Float[Array, "B T N Hv"]:
    """Softmax attention with the scores ((q + u) . k + (q + v) . r[distance]) * scale, to the last R keys of each query.

    Keys are consecutive: the last T of them are those of the queries, and S - T come before. The distance of query i and key j
    is therefore i + S - T - j. A query sees the keys at distances 0 to R - 1; all keys at or before it for R >= S.

    Tiles of queries and keys are computed one after another, and again in the backward pass, so that the scores of one tile are
    in memory at a time. Tiles without visible pairs are skipped.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H]. K divides N.
      v: Values [B, S, K, Hv].
      r: Projected embeddings of the distances 0 to R - 1, [R, N, H]; those of S and more are not read.
      content_bias: Learned bias u of the content scores [N, H].
      position_bias: Learned bias v of the position scores [N, H].
      operands: Segments, with ids of at least 0, a scale that is a number, and dropout, as for `attend`.
      block_size: Number of queries and keys of a tile; None chooses by the number of keys that a query sees.

    Returns:
      o [B, T, N, Hv] in q's dtype, accumulated in float32; 0 in rows that see nothing.

    Raises:
      InputError: There are fewer keys than queries, `block_size` is below 1, there are other operands, or arguments do not fit,
        as for `attend`.

    Cost:
      O(B N H) time for each visible pair, with 1.6 times the products of `attend`; O(B N (T + S + R) H) memory.

    References:
      Dai et al. 2019, "Transformer-XL", sections 3.2 and 3.3 and appendix B.
    """
    length, keys = q.shape[1], k.shape[1]
    if keys < length:
        raise InputError(f"relative_attention of {length} queries and {keys} keys: expected at least one key per query")
    if block_size is not None and block_size < 1:
        raise InputError(f"block_size {block_size}: expected a positive number, or None")
    operands.check_only("relative_attention", "segment_ids", "kv_segment_ids", "scale", "dropout_rate")
    validate(q, k, v, Full(), operands)
    offset, last = keys - length, min(r.shape[0], keys) - 1
    block = _block_size(length, last) if block_size is None else block_size
    # Distances of a tile with visible pairs: at most those of the first query to the first key.
    top = min(offset + -(-length // block) * block - 1, last + 2 * block - 2)
    by_content, by_distance = (q + bias.astype(q.dtype)[None, None] for bias in (content_bias, position_bias))
    embeddings = jnp.pad(jnp.flip(r[: last + 1], 0), ((top - last, 0), (0, 0), (0, 0)))
    by_head = by_distance.transpose(0, 2, 1, 3), embeddings.astype(q.dtype).transpose(1, 0, 2)[None]
    bias = RelativeBias(*by_head, top, offset, q.shape[-1] ** -0.5 if operands.scale is None else float(operands.scale))
    operands = dataclasses.replace(operands, bias=bias)
    mask = Causal().shift(offset) if last + 1 == keys else Window(last, 0).shift(offset)
    o: Any = flash(by_content, k, v, mask, operands, block_size=(block, block))
    return o


@array_op("B S", q="B T N", k="B S K")
def received_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    r: Float[Array, "R N H"],
    content_bias: Float[Array, "N H"],
    position_bias: Float[Array, "N H"],
    operands: Operands = Operands(),  # noqa: B008  (frozen)
    *,
    block_size: int | None = None,
) -> Float[Array, "B S"]:
    """The weight that `relative_attention` gives each key, summed over the queries and averaged over the heads.

    Arguments: see `relative_attention`.

    Returns:
      float32 [B, S].

    Cost:
      A forward and a backward pass of `relative_attention` with values of one feature.
    """
    q, k = (x.astype(jnp.float32) for x in (q, k))

    def attend_to(values: Array) -> Array:
        return relative_attention(q, k, values, r, content_bias, position_bias, operands, block_size=block_size)

    # The sum of a key's weights is the gradient of the sum of the outputs with respect to a value of one feature. Made of q and
    # k, so that zeros and ones differ over devices inside a shard_map as these do.
    o, pull = jax.vjp(attend_to, jnp.where(False, k[..., :1], 0.0))
    (received,) = pull(jnp.where(True, jnp.ones_like(o), o))
    return jnp.sum(received, axis=(2, 3)) / q.shape[2]


@array_op("B T N", q="B T N")
def reference_relative_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    r: Float[Array, "R N H"],
    content_bias: Float[Array, "N H"],
    position_bias: Float[Array, "N H"],
    operands: Operands = Operands(),  # noqa: B008  (frozen)
) -> Float[Array, "B T N Hv"]:
    """`relative_attention` by its definition, with an embedding for each pair: slow and in O(T S N H) memory.

    Arguments: see `relative_attention`; there is no dropout.

    Returns:
      As `relative_attention`.
    """
    operands.check_only("reference_relative_attention", "segment_ids", "kv_segment_ids", "scale")
    (_, length, heads, size), keys = q.shape, k.shape[1]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2).astype(jnp.float32) for x in (k, v))
    distance = jnp.arange(length)[:, None] + keys - length - jnp.arange(keys)[None]
    visible = ((distance >= 0) & (distance < r.shape[0]))[None]
    if operands.segment_ids is not None:
        visible &= operands.segment_ids[:, :, None] == operands.kv_segment_ids[:, None]
    pairs = r[jnp.clip(distance, 0, r.shape[0] - 1)].astype(jnp.float32)
    queries = q.astype(jnp.float32)
    by_content = jnp.einsum("btnh,bsnh->bnts", queries + content_bias[None, None], k)
    by_position = jnp.einsum("btnh,tsnh->bnts", queries + position_bias[None, None], pairs)
    scores = (by_content + by_position) * (size**-0.5 if operands.scale is None else operands.scale)
    weights = jax.nn.softmax(scores, axis=-1, where=visible[:, None])
    weights = jnp.where(visible.any(axis=-1)[:, None, :, None], weights, 0.0)
    return jnp.einsum("bnts,bsnh->btnh", weights, v).astype(q.dtype)


def _by_head(q: Array, r: Array, bias: Array, scale: float | None) -> Array:
    """`distance_scores` as float32 [B, N, T, R]."""
    queries = q + bias.astype(q.dtype)[None, None]
    product = jnp.einsum("btnh,rnh->bntr", queries, r.astype(q.dtype), preferred_element_type=jnp.float32)
    return product * (q.shape[-1] ** -0.5 if scale is None else scale)


def _block_size(length: int, last: int) -> int:
    """Queries and keys of a tile, where a query sees the distances up to `last`.

    Tiles of more queries than half a window have many hidden pairs, and tiles of fewer than 64 much overhead. Key blocks are as
    small, because the executor joins those that a query block reads, and small ones follow the border of the mask.
    """
    half = 1 << (max(64, last // 2).bit_length() - 1)
    return min(QUERIES, half, 1 << (length - 1).bit_length())
