"""Caches of keys and values that keep what later queries can see: everything, or the first keys and a ring of the last.

Where a mask reaches a bounded way back (`Mask.lookback`), neither the memory of a cache nor the time of a step grows with the
sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.attention.decoding.decode import attend_cache
from hpnlp.ops.attention.masks.base import Mask, PerHead
from hpnlp.types import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The keys and values of the tokens that came before, as arrays or their shapes.

    k, v: `[B * K, S, H]`, as `attend_cache` wants them, finite everywhere. lengths `[B]`: how many tokens each row has
    seen. pinned: None where slot s holds position s; else the first `pinned` slots do, and the other slots are a ring in
    which each position stands in for the one that came so many before.
    """

    k: Any
    v: Any
    lengths: Any
    pinned: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def ring(self) -> int:
        """The slots of the ring, 0 where there is none."""
        return 0 if self.pinned is None else self.k.shape[1] - self.pinned

    def positions(self) -> Int[Array, "B S"]:
        """What each slot holds, -1 for nothing."""
        slots, lengths = jnp.arange(self.k.shape[1], dtype=jnp.int32)[None], self.lengths[:, None]
        held = slots
        if self.pinned is not None:
            turns = jnp.maximum(lengths - 1 - slots, 0) // self.ring
            held = jnp.where(slots < self.pinned, slots, slots + turns * self.ring)
        return jnp.where(slots < lengths, held, -1)


@array_op("B", k="B")
def start_cache(
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    lengths: Int[Array, " B"],
    mask: Mask | PerHead,
    capacity: int,
) -> KVCache:
    """The cache after a pass over rows whose first `lengths` tokens count, for rows of up to `capacity` tokens.

    It holds what later queries can see by `mask`: pinned + back + 1 slots a row where that is bounded and less than
    `capacity`. Raises InputError where T is over `capacity`. Cost: O(B K H (T + slots)).
    """
    length, (pinned, back) = k.shape[1], mask.lookback().slots()
    if length > capacity:
        raise InputError(f"a cache of capacity {capacity} after {length} tokens: expected room for as many or more")
    if back is None or pinned + back + 1 >= capacity:
        filled = (jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None])[:, :, None, None]

        def store(x: Array) -> Array:
            x = _rows(jnp.where(filled, x, jnp.zeros((), x.dtype)))
            return jnp.pad(x, ((0, 0), (0, capacity - length), (0, 0)))

        return KVCache(store(k), store(v), lengths)

    def empty(x: Array) -> Array:
        return jnp.zeros((x.shape[0] * x.shape[2], pinned + back + 1, x.shape[3]), x.dtype)

    return _refill(KVCache(empty(k), empty(v), jnp.zeros_like(lengths), pinned), k, v, lengths)


@array_op("B T N | C S | C S | B", q="B T N", cache="C S")
def extend_cache(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    mask: Mask | PerHead,
    cache: KVCache,
) -> tuple[Float[Array, "B T N Hv"], KVCache]:
    """Attention of T further tokens a row, one segment, over the cache and themselves: `(o, the longer cache)`.

    The caller sees to it that a cache without a ring has room. Raises InputError where `mask` reaches further back than
    what the cache keeps. Cost: O(B N T (T + S) H) time, O(B N T (T + S)) memory; no T where T = 1 or there is no ring.
    """
    pinned, back = mask.lookback().slots()
    if cache.pinned is not None and (back is None or back >= cache.ring or pinned > cache.pinned):
        raise InputError(
            f"a cache of {cache.pinned} pinned keys and the last {cache.ring} under mask {mask}, which reaches further "
            "back: make the cache with the mask that extends it"
        )
    count = k.shape[1]
    positions = cache.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    if cache.ring and count > 1:
        # Before the new keys take the places of some that their queries still see.
        keys, values = (jnp.concatenate([x, _rows(new)], axis=1) for x, new in ((cache.k, k), (cache.v, v)))
        o = attend_cache(q, keys, values, mask, positions, jnp.concatenate([cache.positions(), positions], axis=1))
        return o, _refill(cache, k, v, cache.lengths + count)
    at = cache.lengths
    if cache.ring:
        at = jnp.where(at < cache.pinned, at, cache.pinned + (at - cache.pinned) % cache.ring)
    longer = KVCache(_write(cache.k, k, at), _write(cache.v, v, at), cache.lengths + count, cache.pinned)
    return attend_cache(q, longer.k, longer.v, mask, positions, longer.positions()), longer


def _write(rows: Array, new: Array, at: Array) -> Array:
    """`rows [B * K, S, H]` with `new [B, T, K, H]` from the slots `at [B]` on."""
    batch, count, heads = new.shape[:3]
    new = _rows(new)
    if batch > 8:
        grouped = rows.reshape(batch, heads, *rows.shape[1:])
        write = jax.vmap(lambda row, x, at: jax.lax.dynamic_update_slice(row, x, (0, at, 0)))
        return write(grouped, new.reshape(batch, heads, count, -1), at).reshape(rows.shape)
    for row in range(batch):  # no scatter, which takes a tenth of the time of a token on a CPU
        rows = jax.lax.dynamic_update_slice(rows, new[row * heads : (row + 1) * heads], (row * heads, at[row], 0))
    return rows


def _refill(cache: KVCache, k: Array, v: Array, lengths: Array) -> KVCache:
    """The cache of rows that grew to `lengths`, each slot from `k, v [B, T, K, H]` where its position is new."""
    longer = dataclasses.replace(cache, lengths=lengths)
    held = longer.positions()
    place = held - cache.lengths[:, None]
    fresh = jnp.repeat(place >= 0, k.shape[2], axis=0)[:, :, None]
    place = jnp.clip(place, 0, k.shape[1] - 1)[:, :, None, None]

    def take(old: Array, new: Array) -> Array:
        return jnp.where(fresh, _rows(jnp.take_along_axis(new, place, axis=1)), old)

    return dataclasses.replace(longer, k=take(cache.k, k), v=take(cache.v, v))


def _rows(x: Array) -> Array:
    """`[B, T, K, H]` as `[B * K, T, H]`."""
    batch, length, heads, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch * heads, length, size)
