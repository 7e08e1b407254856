"""Caches of the keys and values that later queries can see: all of them, or the first ones and a ring of the last ones.

Where a mask reaches back a bounded number of positions (`Mask.lookback`), neither the memory of a cache nor the time of a step
grows with the sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from hpnlp.ops.attention.decoding.decode import ScoreTerms, attend_cache
from hpnlp.ops.attention.decoding.slots import check_capacity, prompt_slots, write_slots
from hpnlp.ops.attention.masks.base import Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError

# Up to this number of continuations of an example, each reads the keys of all (BeamCache): the products that are masked take
# less time than copies of the caches.
MAX_SHARED_BEAMS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of earlier tokens, as arrays or as their shapes.

    Without a ring, slot s holds position s. With one, the first `pinned` slots do, and each position p after them is in slot
    pinned + (p - pinned) % ring, where it replaces position p - ring.

    Attributes:
      k: [B * K, S, H] for S slots, finite everywhere.
      v: [B * K, S, Hv], finite everywhere.
      lengths: int [B], number of tokens that each example has seen.
      pinned: Number of first positions that are never replaced; None without a ring.
    """

    k: Any
    v: Any
    lengths: Any
    pinned: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def slots(self) -> int:
        """Number of slots of a sequence, S."""
        return self.k.shape[1]

    @property
    def ring(self) -> int:
        """Number of slots of the ring, 0 without a ring."""
        return 0 if self.pinned is None else self.slots - self.pinned

    def positions(self) -> Int[Array, "B S"]:
        """The position that each slot holds.

        Returns:
          int [B, S], -1 for empty slots.
        """
        slots, lengths = jnp.arange(self.slots, dtype=jnp.int32)[None], self.lengths[:, None]
        held = slots
        if self.pinned is not None:
            replaced = jnp.maximum(lengths - 1 - slots, 0) // self.ring  # how often the slot has been overwritten
            held = jnp.where(slots < self.pinned, slots, slots + replaced * self.ring)
        return jnp.where(slots < lengths, held, -1)

    def next_slots(self) -> Int[Array, " B"]:
        """The slot of each example's next token."""
        if not self.ring:
            return self.lengths
        return jnp.where(
            self.lengths < self.pinned, self.lengths, self.pinned + (self.lengths - self.pinned) % self.ring
        )

    def extend(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Mask | PerHead,
        terms: ScoreTerms = ScoreTerms(),  # noqa: B008  (frozen)
    ) -> tuple[Array, KVCache]:
        """`extend_cache` of this cache."""
        return extend_cache(q, k, v, mask, self, terms)

    def for_beams(self, beams: int) -> KVCache:
        """Cache of several continuations of each example.

        Args:
          beams: Number of continuations W.

        Returns:
          A BeamCache whose sequences all continue the tokens of this cache; for more than MAX_SHARED_BEAMS continuations, a
          KVCache with a copy for each of them.
        """
        batch, slots = self.lengths.shape[0], self.slots
        if beams > MAX_SHARED_BEAMS:

            def copies(x: Array) -> Array:
                by_example = x.reshape(batch, 1, -1, *x.shape[1:])
                return jnp.repeat(by_example, beams, axis=1).reshape(-1, *x.shape[1:])

            return KVCache(copies(self.k), copies(self.v), jnp.repeat(self.lengths, beams), self.pinned)

        def spread(x: Array) -> Array:
            return jnp.pad(x[:, :, None], ((0, 0), (0, 0), (0, beams - 1), (0, 0))).reshape(x.shape[0], -1, x.shape[2])

        owners = jnp.zeros((batch, beams, slots), jnp.int32)
        return BeamCache(spread(self.k), spread(self.v), self.lengths, self.pinned, owners)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamCache(KVCache):
    """Keys and values of the W continuations of each example in a beam search, which never move.

    Continuation w writes its key of each position to its own part of the slot of that position. When continuations are
    reordered, only the numbers change that state in whose part of each slot the key of a continuation is.

    Attributes:
      k: [B * K, S * W, H]: slot s has the parts s * W to s * W + W - 1.
      v: [B * K, S * W, Hv].
      lengths: int [B], number of tokens of each continuation of an example.
      pinned: As in a KVCache.
      owners: int [B, W, S], the continuation in whose part of slot s the key of continuation w is.
    """

    owners: Any = None

    @property
    def slots(self) -> int:
        """Number of slots, S."""
        return self.owners.shape[2]

    def extend(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Mask | PerHead,
        terms: ScoreTerms = ScoreTerms(),  # noqa: B008  (frozen)
    ) -> tuple[Array, BeamCache]:
        """Attention of the next token of each continuation.

        Args:
          q: Queries [B * W, 1, N, H].
          k: Keys [B * W, 1, K, H].
          v: Values [B * W, 1, K, Hv].
          mask: Mask over positions, with which the cache was made.
          terms: As in `attend_cache`, with by_distance [B * W, 1, N, R].

        Returns:
          (o [B * W, 1, N, Hv], the cache with the tokens).

        Cost:
          O(B N W^2 S H) time and O(B N W^2 S) memory.
        """
        batch, beams, slots = self.owners.shape
        q, k, v = (x.reshape(batch, beams, *x.shape[2:]) for x in (q, k, v))
        at = self.next_slots()
        is_new = (at[:, None] == jnp.arange(slots, dtype=jnp.int32)[None])[:, None]
        owners = jnp.where(is_new, jnp.arange(beams, dtype=jnp.int32)[None, :, None], self.owners)
        longer = dataclasses.replace(
            self,
            k=write_slots(self.k, by_head(k), at * beams),
            v=write_slots(self.v, by_head(v), at * beams),
            lengths=self.lengths + 1,
            owners=owners,
        )
        positions = jnp.broadcast_to(self.lengths[:, None], (batch, beams))
        by_distance = terms.by_distance
        if by_distance is not None:
            by_distance = by_distance.reshape(batch, beams, *by_distance.shape[2:])
            terms = dataclasses.replace(terms, by_distance=by_distance)
        visible = longer.visible_positions()
        o = attend_cache(q, longer.k, longer.v, mask, positions, visible, terms)
        return o.reshape(batch * beams, 1, *o.shape[2:]), longer

    def visible_positions(self) -> Int[Array, "B W SW"]:
        """The position that each part of a slot holds for each continuation.

        Returns:
          int [B, W, S * W], -1 for the keys of other continuations and for empty slots.
        """
        batch, beams, slots = self.owners.shape
        is_own = self.owners[..., None] == jnp.arange(beams, dtype=jnp.int32)[None, None, None]
        return jnp.where(is_own, self.positions()[:, None, :, None], -1).reshape(batch, beams, slots * beams)

    def reordered(self, order: Int[Array, "B W"]) -> BeamCache:
        """The cache after each continuation was replaced by another one of its example.

        Args:
          order: int [B, W], the continuation that takes each place.

        Returns:
          The cache, with the same arrays of keys and values.
        """
        return dataclasses.replace(self, owners=jnp.take_along_axis(self.owners, order[:, :, None], axis=1))


@array_op("B", k="B")
def start_cache(
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    lengths: Int[Array, " B"],
    mask: Mask | PerHead,
    capacity: int,
) -> KVCache:
    """The cache after a pass over the prompts.

    With (pinned, back) = `mask.lookback().slots()`, an example gets pinned + back + 1 slots, for the keys that later queries
    can see. Where the mask has no such bound, or the capacity is smaller, it gets `capacity` slots.

    Args:
      k: Keys [B, T, K, H].
      v: Values [B, T, K, Hv].
      lengths: int [B], number of tokens of each prompt; later ones are padding.
      mask: Mask of the queries that follow.
      capacity: Largest number of tokens of an example, prompt included.

    Returns:
      The cache.

    Raises:
      InputError: T is over the capacity.

    Cost:
      O(B K H (T + slots)) time.
    """
    length, (pinned, back) = k.shape[1], mask.lookback().slots()
    check_capacity(length, capacity)
    if back is None or pinned + back + 1 >= capacity:
        k, v = (prompt_slots(by_head(x), lengths, capacity) for x in (k, v))
        return KVCache(k, v, lengths)

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
    terms: ScoreTerms = ScoreTerms(),  # noqa: B008  (frozen)
) -> tuple[Float[Array, "B T N Hv"], KVCache]:
    """Attention of T new tokens of each example over the cache and themselves.

    The caller ensures that a cache without a ring has free slots.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, T, K, H].
      v: Values [B, T, K, Hv].
      mask: Mask over positions; the positions of the T tokens continue from the lengths of the cache.
      cache: Cache of the earlier tokens.
      terms: As in `attend_cache`.

    Returns:
      (o [B, T, N, Hv], the cache with the T tokens).

    Raises:
      InputError: The mask reaches back to tokens that the cache no longer keeps.

    Cost:
      O(B N T S H) time and O(B N T S) memory; with a ring and T > 1, T + S in place of S.
    """
    pinned, back = mask.lookback().slots()
    if cache.pinned is not None and (back is None or back >= cache.ring or pinned > cache.pinned):
        raise InputError(
            f"mask {mask} reaches further back than the cache, which keeps {cache.pinned} pinned keys and the last "
            f"{cache.ring}: make the cache with the mask that extends it"
        )
    count = k.shape[1]
    positions = cache.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    if cache.ring and count > 1:
        # Computed before the new keys overwrite keys that the first new queries still see.
        keys, values = (jnp.concatenate([x, by_head(new)], axis=1) for x, new in ((cache.k, k), (cache.v, v)))
        held = jnp.concatenate([cache.positions(), positions], axis=1)
        o = attend_cache(q, keys, values, mask, positions, held, terms)
        return o, _refill(cache, k, v, cache.lengths + count)
    at = cache.next_slots()
    longer = KVCache(
        write_slots(cache.k, by_head(k), at), write_slots(cache.v, by_head(v), at), cache.lengths + count, cache.pinned
    )
    o = attend_cache(q, longer.k, longer.v, mask, positions, longer.positions(), terms)
    return o, longer


def _refill(cache: KVCache, k: Array, v: Array, lengths: Array) -> KVCache:
    """The cache of examples that grew to `lengths`, with `k, v [B, T, K, H]` in the slots whose position is new."""
    longer = dataclasses.replace(cache, lengths=lengths)
    held = longer.positions()
    source = held - cache.lengths[:, None]  # index among the new tokens, negative for old ones
    is_new = jnp.repeat(source >= 0, k.shape[2], axis=0)[:, :, None]
    source = jnp.clip(source, 0, k.shape[1] - 1)[:, :, None, None]

    def take(old: Array, new: Array) -> Array:
        return jnp.where(is_new, by_head(jnp.take_along_axis(new, source, axis=1)), old)

    return dataclasses.replace(longer, k=take(cache.k, k), v=take(cache.v, v))


@array_op("BK", x="B")
def by_head(x: Shaped[Array, "B T K H"]) -> Shaped[Array, "BK T H"]:
    """Keys or values in the layout of a cache.

    Args:
      x: [B, T, K, H].

    Returns:
      [B * K, T, H].

    Cost:
      A copy.
    """
    batch, length, heads, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch * heads, length, size)
