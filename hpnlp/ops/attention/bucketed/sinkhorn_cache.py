"""Decoding of sparse Sinkhorn attention: keys and values of all earlier tokens, and sums of queries by block."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.bucketed.sinkhorn import SortSettings, block_sums, in_blocks, mixtures, sort_weights
from hpnlp.ops.attention.decoding.slots import check_capacity, prompt_slots
from hpnlp.ops.helpers.array_op import array_op


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SinkhornCache:
    """Tokens of each example; slot s holds the token at index s.

    Attributes:
      k: Keys [B, S, K, H], 0 in empty slots; S is a multiple of the block.
      v: Values [B, S, K, Hv], 0 in empty slots.
      q_sums: float32 [B, n, N, H], sums of the queries of each block.
      q_first: float32 [B, n, N, H], query of the first token of each block.
      lengths: int32 [B], number of tokens of each example.
    """

    k: Any
    v: Any
    q_sums: Any
    q_first: Any
    lengths: Any


@array_op("B", q="B")
def start_sinkhorn_cache(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    lengths: Int[Array, " B"],
    settings: SortSettings,
    capacity: int,
) -> SinkhornCache:
    """The cache after a pass over the prompts.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, T, K, H].
      v: Values [B, T, K, Hv].
      lengths: int32 [B], number of tokens of each prompt; later ones are padding.
      settings: Settings of `sinkhorn_attention`, causal.
      capacity: Largest number of tokens of an example, prompt included.

    Returns:
      The cache.

    Raises:
      InputError: T is over the capacity.

    Cost: O(B S (K + N / C) H) memory.
    """
    length = k.shape[1]
    check_capacity(length, capacity)
    slots = -(-capacity // settings.block) * settings.block
    is_token = jnp.arange(slots, dtype=jnp.int32)[None] < lengths[:, None]
    q, k, v = (prompt_slots(x, lengths, slots) for x in (q, k, v))
    q_sums = block_sums(q, in_blocks(is_token, settings.block))
    q_first = in_blocks(q, settings.block)[:, :, 0].astype(jnp.float32)
    return SinkhornCache(k, v, q_sums, q_first, lengths)


@array_op("B T N", q="B T N")
def extend_sinkhorn_cache(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    cache: SinkhornCache,
    settings: SortSettings,
) -> tuple[Float[Array, "B T N Hv"], SinkhornCache]:
    """Causal `sinkhorn_attention` of T new tokens of each example over the cache and themselves.

    The caller ensures that the cache has free slots.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, T, K, H].
      v: Values [B, T, K, Hv].
      cache: Cache of the earlier tokens.
      settings: Settings with which the cache was made.

    Returns:
      (o [B, T, N, Hv], the cache with the T tokens).

    Cost: O(B N T S H) time: the permutation is computed again, and all slots are read.
    """
    batch, count, heads, dim = q.shape
    longer = _with_tokens(q, k, v, cache, settings)
    blocks, size = longer.q_sums.shape[1], settings.block
    index = cache.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    is_token = in_blocks(jnp.arange(longer.k.shape[1], dtype=jnp.int32)[None] < longer.lengths[:, None], size)
    counts = jnp.sum(is_token, axis=2, dtype=jnp.int32)
    # Row i is a result of rows 0 to i and blocks 0 to i - 1, which are complete; later rows are not read.
    weights, _ = sort_weights(
        longer.q_sums,
        longer.q_first,
        block_sums(longer.k, is_token),
        counts,
        jnp.zeros((batch, blocks), jnp.int32),
        settings,
    )
    rows = jnp.take_along_axis(weights, (index // size)[:, None, :, None], axis=2)
    k_mixed, v_mixed = (mixtures(rows, in_blocks(x, size)) for x in (longer.k, longer.v))

    slots = jnp.arange(longer.k.shape[1], dtype=jnp.int32)[None, None]
    within = (slots <= index[..., None]) & (slots // size == (index // size)[..., None])
    beside = jnp.broadcast_to((index >= size)[..., None], (batch, count, size))
    queries = q.reshape(batch, count, k.shape[2], -1, dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", queries, longer.k, preferred_element_type=jnp.float32)
    of_mixed = jnp.einsum("btnh,bntch->bntc", q, k_mixed, preferred_element_type=jnp.float32)
    scores = jnp.concatenate([scores.reshape(batch, heads, count, -1), of_mixed], axis=-1) * jnp.float32(dim**-0.5)
    visible = jnp.concatenate([within, beside], axis=-1)[:, None]
    p = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
    p_own, p_mixed = p[..., : slots.shape[2]], p[..., slots.shape[2] :]
    grouped = p_own.reshape(batch, k.shape[2], -1, count, slots.shape[2])
    o = jnp.einsum("bkgts,bskh->bkgth", grouped, longer.v, preferred_element_type=jnp.float32)
    o = o.reshape(batch, heads, count, -1)
    o = o + jnp.einsum("bntc,bntch->bnth", p_mixed, v_mixed, preferred_element_type=jnp.float32)
    return o.transpose(0, 2, 1, 3).astype(q.dtype), longer


def _with_tokens(q: Array, k: Array, v: Array, cache: SinkhornCache, settings: SortSettings) -> SinkhornCache:
    """The cache with new tokens."""
    batch, count = q.shape[:2]
    write = jax.vmap(lambda x, new, at: lax.dynamic_update_slice(x, new.astype(x.dtype), (at, 0, 0)))
    index = cache.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    example = jnp.arange(batch, dtype=jnp.int32)[:, None]
    block, is_first, q = index // settings.block, index % settings.block == 0, q.astype(jnp.float32)
    return SinkhornCache(
        write(cache.k, k, cache.lengths),
        write(cache.v, v, cache.lengths),
        cache.q_sums.at[example, block].add(q),
        cache.q_first.at[example, block].add(jnp.where(is_first[..., None, None], q, 0.0)),
        cache.lengths + count,
    )
