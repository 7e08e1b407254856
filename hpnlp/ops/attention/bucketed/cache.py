"""Decoding with buckets: keys, values, buckets and ranks of all earlier tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.bucketed.attend import BucketSettings, without_self
from hpnlp.ops.attention.bucketed.order import bucket_ranks
from hpnlp.ops.attention.decoding.kv_cache import by_head
from hpnlp.ops.attention.decoding.slots import check_capacity, prompt_slots, write_slots
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BucketCache:
    """Tokens of each example; slot s holds the token at index s.

    Attributes:
      k: Keys [B * N, S, H].
      v: Values [B * K, S, Hv].
      buckets: int32 [B * N, S, R].
      ranks: int32 [B * N, S, R], number of earlier tokens of the same bucket.
      lengths: int32 [B], number of tokens of each example.
    """

    k: Any
    v: Any
    buckets: Any
    ranks: Any
    lengths: Any


@array_op("B", k="B")
def start_bucket_cache(
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T K Hv"],
    buckets: Int[Array, "B T N R"],
    lengths: Int[Array, " B"],
    capacity: int,
) -> BucketCache:
    """The cache after a pass over the prompts.

    Args:
      k: Keys [B, T, N, H].
      v: Values [B, T, K, Hv].
      buckets: int32 [B, T, N, R].
      lengths: int32 [B], number of tokens of each prompt; later ones are padding.
      capacity: Largest number of tokens of an example, prompt included.

    Returns:
      The cache.

    Raises:
      InputError: T is over the capacity.

    Cost: O(B N S (H + R)) memory.
    """
    length, heads = k.shape[1:3]
    check_capacity(length, capacity)
    index = jnp.arange(length, dtype=jnp.int32)
    is_token = index[None] < lengths[:, None]
    by_round = by_head(buckets.astype(jnp.int32)).transpose(2, 0, 1)
    # Padding is a segment of its own, so that it has no influence on ranks.
    ranks = bucket_ranks(by_round, jnp.repeat(is_token.astype(jnp.int32), heads, axis=0)[None]).transpose(1, 2, 0)
    tokens = by_head(k), by_head(v), by_head(buckets.astype(jnp.int32)), ranks
    k, v, buckets, ranks = (prompt_slots(x, lengths, capacity) for x in tokens)
    return BucketCache(k, v, buckets, ranks, lengths)


@array_op("B T N", q="B T N")
def extend_bucket_cache(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T K Hv"],
    buckets: Int[Array, "B T N R"],
    cache: BucketCache,
    settings: BucketSettings,
) -> tuple[Float[Array, "B T N Hv"], BucketCache]:
    """Causal `bucketed_attention` of T new tokens of each example over the cache and themselves.

    The caller ensures that the cache has free slots.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, T, N, H].
      v: Values [B, T, K, Hv].
      buckets: int32 [B, T, N, R].
      cache: Cache of the earlier tokens.
      settings: As in `bucketed_attention`, causal.

    Returns:
      (o [B, T, N, Hv], the cache with the T tokens).

    Raises:
      InputError: The settings are not causal.

    Cost: O(B N T S (H + R)) time: all slots are read, whatever their bucket.
    """
    if not settings.causal:
        raise InputError(f"{settings}: expected causal=True, since a cache holds earlier tokens")
    batch, count, heads, _ = q.shape
    at, new_buckets = cache.lengths, by_head(buckets.astype(jnp.int32))
    longer = dataclasses.replace(
        cache,
        k=write_slots(cache.k, by_head(k), at),
        v=write_slots(cache.v, by_head(v), at),
        buckets=write_slots(cache.buckets, new_buckets, at),
    )
    index = jnp.repeat(at, heads)[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    slots = jnp.arange(cache.k.shape[1], dtype=jnp.int32)
    # [B N, T, S, R]: slots of the bucket of a new token, and those before it.
    alike = new_buckets[:, :, None] == longer.buckets[:, None]
    before = (slots[None, None] < index[:, :, None])[..., None]
    new_ranks = jnp.sum(alike & before, axis=2, dtype=jnp.int32)
    longer = dataclasses.replace(longer, ranks=write_slots(cache.ranks, new_ranks, at), lengths=at + count)

    near = new_ranks[:, :, None] - longer.ranks[:, None] <= settings.window
    visible = jnp.any(alike & near, axis=3) & (slots[None, None] <= index[:, :, None])
    scores = jnp.einsum("lth,lsh->lts", by_head(q), longer.k, preferred_element_type=jnp.float32)
    scores = scores * jnp.float32(settings.factor(q.shape[3]))
    if settings.hides_self:
        visible = without_self(visible, slots[None, None] == index[:, :, None])
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
    weights = weights.reshape(longer.v.shape[0], -1, weights.shape[2])  # the query heads of each value head
    o = jnp.einsum("lts,lsh->lth", weights, longer.v, preferred_element_type=jnp.float32).astype(q.dtype)
    return o.reshape(batch, heads, count, -1).transpose(0, 2, 1, 3), longer
