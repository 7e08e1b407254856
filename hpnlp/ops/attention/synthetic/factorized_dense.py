"""Softmax attention with the scores of a Factorized Dense Synthesizer, by blocks of keys."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.operands import Operands
from hpnlp.ops.attention.validate import validate
from hpnlp.ops.custom_vjp import vary_alike
from hpnlp.ops.dropout import keep_mask, seed_words
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class _Options:
    """Static settings: the mask, N heads, S keys and the rate of dropout."""

    mask: Mask
    heads: int
    keys: int
    dropout_rate: float


@array_op("B T N", v="B T")
def factorized_dense_attend(
    v: Float[Array, "B S N H"],
    a: Float[Array, "B T N A"],
    b: Float[Array, "_ _ _ C"],
    mask: Mask = Full(),  # noqa: B008  (frozen)
    *,
    segment_ids: Int[Array, "_ _"] | None = None,
    kv_segment_ids: Int[Array, "_ _"] | None = None,
    positions: Int[Array, "_ _"] | None = None,
    kv_positions: Int[Array, "_ _"] | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    streams: Int[Array, "B N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention with scores `a[t, s % A] * b[t, s // A]`, without an array of all pairs.

    Args:
      v: Values.
      a: Scores within blocks of A keys.
      b: Factors of C blocks.
      mask: The pairs that may influence each other, the same for all heads.
      segment_ids: Segments of the queries; tokens of different segments do not attend to each other.
      kv_segment_ids: Segments of the keys; may be omitted if T == S, and is then segment_ids.
      positions: Positions of the queries for the mask and for dropout; indices in the sequence if None.
      kv_positions: Positions of the keys; may be omitted as kv_segment_ids may.
      dropout_rate: Probability of dropping a weight.
      rng: PRNG key of dropout.
      streams: As for `attend`.

    Returns:
      The mixed values, in the dtype of v; computed in float32. A token that sees none has 0.

    Raises:
      InputError: There are more keys than A C, each head has a mask of its own, or arguments do not fit, as for `attend`.

    Cost: O(B N T S H) time and O(B N (T + S) (A + H)) memory, also in the backward pass.

    References:
      Tay et al. 2020, "Synthesizer", sec. 3.2; the loop over blocks of keys is that of Dao et al. 2022, "FlashAttention".
    """
    (batch, keys, heads, width), (length, block), blocks = v.shape, a.shape[1::2], b.shape[3]
    if a.shape[:3] != (batch, length, heads) or b.shape[:3] != a.shape[:3]:
        raise InputError(f"a {a.shape}, b {b.shape}, v {v.shape}: expected equal B and N, and equal T in a and b")
    if keys > block * blocks:
        raise InputError(f"{keys} keys: expected at most {block} x {blocks}, the sizes of both factors")
    if mask.heads is not None:
        raise InputError(f"{mask}: expected one mask for all heads")
    operands = Operands(
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        positions=positions,
        kv_positions=kv_positions,
        dropout_rate=dropout_rate,
        rng=rng,
    )
    q: Any = jax.ShapeDtypeStruct((batch, length, heads, 1), v.dtype)
    k: Any = jax.ShapeDtypeStruct((batch, keys, heads, 1), v.dtype)
    validate(q, k, v, mask, operands)

    def by_head(x: Array) -> Array:
        return x.astype(jnp.float32).transpose(0, 2, 1, 3).reshape(batch * heads, x.shape[1], x.shape[3])

    def in_blocks(x: Array, value: int) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, block * blocks - keys), *[(0, 0)] * (x.ndim - 2)], constant_values=value)
        return jnp.moveaxis(padded.reshape(x.shape[0], blocks, block, *x.shape[2:]), 1, 0)

    def filled(x: Array | None, count: int, indices: bool) -> Array:
        row = jnp.arange(count, dtype=jnp.int32) if indices else jnp.zeros(count, jnp.int32)
        return jnp.broadcast_to(row, (batch, count)) if x is None else x

    info = (
        filled(positions, length, True),
        filled(segment_ids, length, False),
        in_blocks(filled(operands.kv_positions, keys, True), 0),
        in_blocks(filled(operands.kv_segment_ids, keys, False), 0),
        jnp.arange(batch * heads, dtype=jnp.int32) if streams is None else streams.reshape(-1),
        jnp.zeros(2, jnp.uint32) if rng is None or not dropout_rate else seed_words(rng),
    )
    options = _Options(mask, heads, keys, dropout_rate)
    o: Any = _attend(options, *vary_alike(in_blocks(by_head(v), 0), by_head(a), by_head(b), *info))
    return o.reshape(batch, heads, length, width).transpose(0, 2, 1, 3).astype(v.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, v: Array, a: Array, b: Array, *info: Array) -> Array:
    """[G, T, H] of v [C, G, A, H], a [G, T, A] and b [G, T, C], where G counts sequences and heads."""
    return _forward(options, v, a, b, *info)[0]


def _forward(options: _Options, v: Array, a: Array, b: Array, *info: Array) -> tuple[Array, tuple[Array, ...]]:
    shape = a.shape[:2]
    start = (jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape), jnp.zeros((*shape, v.shape[-1])))
    start = vary_alike(*start, a)[:3]

    def step(carry: Any, index: Array) -> tuple[Any, None]:
        top, total, o = carry
        scores, kept = _block(options, a, b, info, index)
        new_top = jnp.maximum(top, scores.max(axis=2))
        shift = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
        weights = jnp.exp(scores - shift[:, :, None])
        scale = jnp.exp(top - shift)
        o = o * scale[:, :, None] + jnp.einsum("gta,gah->gth", weights * kept, v[index])
        return (new_top, total * scale + weights.sum(axis=2), o), None

    (top, total, o), _ = lax.scan(step, start, jnp.arange(v.shape[0]))
    seen = total > 0
    top, total = jnp.where(seen, top, 0.0), jnp.where(seen, total, 1.0)
    o = jnp.where(seen[:, :, None], o / total[:, :, None], 0.0)
    # Both, because top + log(total) rounds the logarithm away where scores are large.
    return o, (v, a, b, o, top, total, *info)


def _backward(options: _Options, residuals: tuple[Array, ...], do: Array) -> tuple[Array | None, ...]:
    v, a, b, o, top, total, *info = residuals
    product = (do * o).sum(axis=2)

    def step(da: Array, index: Array) -> tuple[Array, tuple[Array, Array]]:
        scores, kept = _block(options, a, b, info, index)
        weights = jnp.exp(scores - top[:, :, None]) / total[:, :, None]
        dv = jnp.einsum("gta,gth->gah", weights * kept, do)
        dweights = jnp.einsum("gth,gah->gta", do, v[index]) * kept
        dscores = weights * (dweights - product[:, :, None])
        return da + dscores * _column(b, index), (dv, (dscores * a).sum(axis=2))

    start = vary_alike(jnp.zeros_like(a), a, do)[0]
    da, (dv, db) = lax.scan(step, start, jnp.arange(v.shape[0]))
    return dv, da, jnp.moveaxis(db, 0, 2), *(None for _ in info)


_attend.defvjp(_forward, _backward)


def _column(b: Array, index: Array) -> Array:
    """[G, T, 1]: the factors of one block."""
    return lax.dynamic_slice_in_dim(b, index, 1, axis=2)


def _block(options: _Options, a: Array, b: Array, info: Any, index: Array) -> tuple[Array, Array]:
    """Scores of one block of keys [G, T, A], -inf for pairs that are not visible, and the factors of dropout."""
    q_pos, q_ids, k_pos, k_ids, streams, seed = info
    keys = (index * a.shape[2] + jnp.arange(a.shape[2]))[None, None] < options.keys
    visible = keys & (q_ids[:, :, None] == k_ids[index][:, None])
    if not options.mask.allows_all:
        visible &= options.mask.at(q_pos[:, :, None], k_pos[index][:, None])
    visible = jnp.repeat(visible, options.heads, axis=0)
    # With a selection after the product, XLA:CPU cannot multiply and subtract the maximum in one rounded operation in one of
    # the passes only. The weights of large scores would then differ between the passes.
    scores = jnp.where(visible, a * _column(b, index), -jnp.inf)
    if not options.dropout_rate:
        return scores, jnp.float32(1)
    q_pos, k_pos = (jnp.repeat(x, options.heads, axis=0) for x in (q_pos, k_pos[index]))
    keep = keep_mask(seed, streams[:, None, None], q_pos[:, :, None], k_pos[:, None], options.dropout_rate)
    return scores, jnp.where(keep, 1 / (1 - options.dropout_rate), 0.0).astype(jnp.float32)
