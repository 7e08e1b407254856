"""Attention of a few new tokens over a cache: one small product a row and head, with nothing to block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.attention.block_sparse.tile import FLOOR
from hpnlp.ops.attention.masks.base import Mask, PerHead


@array_op("B T N", q="B T N")
def attend_cache(
    q: Float[Array, "B T N H"],
    k: Float[Array, "BK S H"],
    v: Float[Array, "BK S Hv"],
    mask: Mask | PerHead,
    positions: Int[Array, "B T"],
    kv_positions: Int[Array, "B S"],
    *,
    scale: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """softmax(q k^T * scale) v over a cache, for T of a few tokens.

    k, v: row-major over (batch, kv head). Three dimensions, because XLA:CPU copies a cache of four that is written and
    read in one step; a product takes this form as it is.
    mask: over `positions` for queries and `kv_positions` for keys, which may stand in any order. Keys at negative
    positions are hidden; the values there must be finite.
    scale: H ** -0.5 where None.

    Returns o in q's dtype, accumulated in float32; a row that may see nothing gives 0. Raises InputError where PerHead
    has not N masks. Cost: O(B N T S H) time and O(B N T S) memory. Source: Vaswani et al. 2017, eq. 1.
    """
    (b, t, n, h), s = q.shape, k.shape[1]
    kv_heads = k.shape[0] // b
    group = n // kv_heads
    rows = q.reshape(b, t, kv_heads, group, h).transpose(0, 2, 1, 3, 4).reshape(b * kv_heads, t * group, h)
    scores = _product(rows, k, contract=2) * jnp.float32(h**-0.5 if scale is None else scale)

    see = _visible(mask, positions[:, :, None], kv_positions[:, None, :], n)
    see = jnp.broadcast_to(see, (b, t, n, s)).reshape(b, t, kv_heads, group, s).transpose(0, 2, 1, 3, 4)
    scores = jnp.where(see.reshape(scores.shape), scores, -jnp.inf)
    # Finite, so that a row of which all is hidden has no infinity to subtract from itself.
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), FLOOR)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    o = _product(weights.astype(v.dtype), v, contract=1) / jnp.where(total > 0, total, 1.0)
    return o.astype(q.dtype).reshape(b, kv_heads, t, group, -1).transpose(0, 2, 1, 3, 4).reshape(b, t, n, -1)


def _visible(mask: Mask | PerHead, queries: Array, keys: Array, heads: int) -> Array:
    """bool `[B, T, N or 1, S]`."""
    groups = mask.by_head(heads)
    seen = [each.at(queries, keys) & (keys >= 0) for each in groups]
    if len(seen) == 1:
        return seen[0][:, :, None]
    group_of = {head: number for number, of in enumerate(groups.values()) for head in of}
    return jnp.stack([seen[group_of[head]] for head in range(heads)], axis=2)


def _product(x: Array, y: Array, contract: int) -> Array:
    """x's last axis with y's axis `contract`, batched over the first."""
    return jax.lax.dot_general(x, y, (((2,), (contract,)), ((0,), (0,))), preferred_element_type=jnp.float32)
