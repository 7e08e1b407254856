"""Attention of a few new tokens over a cache: one small product for each example and head, without tiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.block_sparse.tile import FLOOR
from hpnlp.ops.attention.masks.base import Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.helpers.array_op import array_op


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoreTerms:
    """Terms of the scores of queries and the keys of a cache, beside their products.

    Attributes:
      scale: Factor of the products; H ** -0.5 if None.
      soft_cap: Scaled products become soft_cap * tanh(product / soft_cap); None for no cap.
      by_distance: float32 [B, T, N, R], added to the scores of the keys at distances 0 to R - 1 before each query; the mask
        hides all others.
    """

    scale: float | int | None = dataclasses.field(default=None, metadata={"static": True})
    soft_cap: float | int | None = dataclasses.field(default=None, metadata={"static": True})
    by_distance: Any = None


@array_op("B T N", q="B T N")
def attend_cache(
    q: Float[Array, "B T N H"],
    k: Float[Array, "BK S H"],
    v: Float[Array, "BK S Hv"],
    mask: Mask | PerHead,
    positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B *queries S"],
    terms: ScoreTerms = ScoreTerms(),  # noqa: B008  (frozen)
) -> Float[Array, "B T N Hv"]:
    """softmax(q k^T * scale) v over a cache, for a few queries.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B * K, S, H], key heads of an example side by side. Three axes, because XLA:CPU copies a cache of four axes
        that is written and read in one step; a product takes three axes as they are.
      v: Values [B * K, S, Hv], as k; finite also where keys are hidden.
      mask: Mask over `positions` for queries and `kv_positions` for keys.
      positions: int [B, T].
      kv_positions: int [B, S], in any order; keys at negative positions are hidden. Or int [B, T, S], for each query.
      terms: Scale, soft cap and scores by distance.

    Returns:
      o [B, T, N, Hv] in q's dtype, accumulated in float32; 0 in rows that may see nothing.

    Raises:
      InputError: A PerHead has another number of masks than N.

    Cost:
      O(B N T S H) time and O(B N T S) memory.

    References:
      Vaswani et al. 2017, "Attention is all you need", eq. 1.
    """
    (b, t, n, h), s = q.shape, k.shape[1]
    if s == 0:
        return jnp.zeros((b, t, n, v.shape[-1]), q.dtype)
    kv_heads = k.shape[0] // b
    group = n // kv_heads
    queries = q.reshape(b, t, kv_heads, group, h).transpose(0, 2, 1, 3, 4).reshape(b * kv_heads, t * group, h)
    scores = _scores(queries, k) * jnp.float32(h**-0.5 if terms.scale is None else terms.scale)
    if terms.soft_cap is not None:
        scores = terms.soft_cap * jnp.tanh(scores / terms.soft_cap)

    def as_scores(x: Array) -> Array:
        x = jnp.broadcast_to(x, (b, t, n, s)).reshape(b, t, kv_heads, group, s)
        return x.transpose(0, 2, 1, 3, 4).reshape(scores.shape)

    keys = kv_positions if kv_positions.ndim == 3 else kv_positions[:, None, :]
    if terms.by_distance is not None:
        distance = jnp.clip(positions[:, :, None] - keys, 0, terms.by_distance.shape[3] - 1)
        scores += as_scores(jnp.take_along_axis(terms.by_distance, distance[:, :, None], axis=3))
    visible = _visible(mask, positions[:, :, None], keys, n)
    scores = jnp.where(as_scores(visible), scores, -jnp.inf)
    # Finite, because a row without visible keys would otherwise subtract infinity from itself.
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), FLOOR)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    o = _mixed(weights.astype(v.dtype), v) / jnp.where(total > 0, total, 1.0)
    return o.astype(q.dtype).reshape(b, kv_heads, t, group, -1).transpose(0, 2, 1, 3, 4).reshape(b, t, n, -1)


def _visible(mask: Mask | PerHead, queries: Array, keys: Array, heads: int) -> Array:
    """The pairs that the mask allows, bool [B, T, N or 1, S]."""
    groups = mask.by_head(heads)
    visible = [group_mask.at(queries, keys) & (keys >= 0) for group_mask in groups]
    if len(visible) == 1:
        return visible[0][:, :, None]
    group_of = {head: number for number, members in enumerate(groups.values()) for head in members}
    return jnp.stack([visible[group_of[head]] for head in range(heads)], axis=2)


# With a few queries XLA:CPU is 20 % faster if the queries or weights, the smaller side, are in memory as the transpose of what
# they are elsewhere. Barriers keep it from moving the transposes into the products.


def _scores(queries: Array, k: Array) -> Array:
    """float32 products of `[n, M, H]` with `[n, S, H]`: `[n, M, S]`."""
    if queries.shape[1] == 1:
        return _product(queries, k, 2, 2)
    columns = jax.lax.optimization_barrier(jnp.swapaxes(queries, 1, 2))
    return jnp.swapaxes(jax.lax.optimization_barrier(_product(k, columns, 2, 1)), 1, 2)


def _mixed(weights: Array, v: Array) -> Array:
    """float32 products of `[n, M, S]` with `[n, S, H]`: `[n, M, H]`."""
    if weights.shape[1] == 1:
        return _product(weights, v, 2, 1)
    return _product(jax.lax.optimization_barrier(jnp.swapaxes(weights, 1, 2)), v, 1, 1)


def _product(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    """float32 product over an axis of each, batched over the first axis."""
    return jax.lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((0,), (0,))), preferred_element_type=jnp.float32)
