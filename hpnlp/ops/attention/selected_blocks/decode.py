"""Decoding with chosen blocks: a cache of all keys and values with sums of each block, and attention to listed positions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.block_sparse.tile import FLOOR
from hpnlp.ops.attention.decoding.kv_cache import by_head
from hpnlp.ops.attention.decoding.slots import check_capacity, prompt_slots, write_slots
from hpnlp.ops.attention.selected_blocks.blocks import DocumentBlocks, block_summaries, document_blocks
from hpnlp.ops.helpers.array_op import array_op


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCache:
    """Keys and values of all tokens of each sequence, one document, and summaries of its blocks.

    Attributes:
      k: [B * K, S, H] for S tokens; zeros after the last token.
      v: [B * K, S, Hv].
      k_summaries: float32 [B, M, K, H], weighted sums of the keys of each block so far.
      v_summaries: float32 [B, M, K, Hv], or None where they are not read.
      lengths: int32 [B], number of tokens.
      block: Number of tokens of a block.
    """

    k: Any
    v: Any
    k_summaries: Any
    v_summaries: Any
    lengths: Any
    block: int = dataclasses.field(metadata={"static": True})

    def positions(self, count: int) -> Int[Array, "B T"]:
        """Positions of the next tokens.

        Args:
          count: Number of tokens T.

        Returns:
          int32 [B, T].
        """
        return self.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None]

    def blocks(self) -> DocumentBlocks:
        """The blocks of the sequence, as `choose_blocks` reads them; those after the last token are included.

        Returns:
          Blocks from index 0 on.
        """
        batch, count = self.lengths.shape[0], self.k_summaries.shape[1]
        starts = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None] * self.block, (batch, count))
        return DocumentBlocks(starts, starts == 0, None, starts, self.block)

    def extended(
        self, k: Array, v: Array, k_weights: Array | None = None, v_weights: Array | None = None
    ) -> BlockCache:
        """The cache with new tokens.

        Args:
          k: Keys [B, T, K, H].
          v: Values [B, T, K, Hv].
          k_weights: Weights of `block_summaries` for keys, [K, block]; None for means.
          v_weights: The same for values.

        Returns:
          The cache.
        """
        positions = self.positions(k.shape[1])
        is_in = positions[..., None] // self.block == jnp.arange(self.k_summaries.shape[1], dtype=jnp.int32)[None, None]

        def add(sums: Array | None, new: Array, weights: Array | None) -> Array | None:
            if sums is None:
                return None
            factor = jnp.float32(1 / self.block)
            if weights is not None:
                factor = jnp.moveaxis(weights.astype(jnp.float32)[:, positions % self.block], 0, 2)[..., None]
            return sums + jnp.einsum("btm,btkh->bmkh", is_in.astype(jnp.float32), new.astype(jnp.float32) * factor)

        return dataclasses.replace(
            self,
            k=write_slots(self.k, by_head(k), self.lengths),
            v=write_slots(self.v, by_head(v), self.lengths),
            k_summaries=add(self.k_summaries, k, k_weights),
            v_summaries=add(self.v_summaries, v, v_weights),
            lengths=self.lengths + k.shape[1],
        )


@array_op("B", k="B")
def start_block_cache(
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    lengths: Int[Array, " B"],
    block: int,
    capacity: int,
    k_weights: Float[Array, "K block"] | None = None,
    v_weights: Float[Array, "K block"] | None = None,
    has_v_summaries: bool = False,
) -> BlockCache:
    """The cache after a pass over the prompts.

    Args:
      k: Keys.
      v: Values.
      lengths: Number of tokens of each prompt; later ones are padding.
      block: Number of tokens of a block.
      capacity: Largest number of tokens of a sequence, prompt included.
      k_weights: Weights of `block_summaries` for keys; None for means.
      v_weights: The same for values.
      has_v_summaries: Also keep summaries of the values.

    Returns:
      The cache.

    Raises:
      InputError: T is over the capacity.

    Cost: O(B K H capacity).
    """
    batch, length = k.shape[:2]
    check_capacity(length, capacity)
    k, v = (prompt_slots(x, lengths, capacity) for x in (k, v))
    blocks = document_blocks(None, batch, capacity, block)
    return BlockCache(
        by_head(k),
        by_head(v),
        block_summaries(k, blocks, k_weights),
        block_summaries(v, blocks, v_weights) if has_v_summaries else None,
        lengths,
        block,
    )


@array_op("B T", chosen="B T")
def block_positions(chosen: Int[Array, "B T P C"], positions: Int[Array, "B T"], block: int) -> Int[Array, "B T P L"]:
    """Positions of the keys of the chosen blocks, and of the query's own block up to the query.

    Args:
      chosen: Numbers of earlier blocks, -1 for none.
      positions: Positions of the queries.
      block: Number of tokens of a block.

    Returns:
      int32, L = (C + 1) block positions; -1 for none.

    Cost: O(B T P L).
    """
    last = jnp.broadcast_to((positions // block)[:, :, None, None], (*chosen.shape[:3], 1))
    first = jnp.concatenate([chosen, last], axis=3)[..., None]
    listed = first * block + jnp.arange(block, dtype=jnp.int32)[None, None, None, None]
    listed = jnp.where((first >= 0) & (listed <= positions[:, :, None, None, None]), listed, -1)
    return listed.reshape(*chosen.shape[:3], -1)


@array_op("B T N", q="B T N")
def attend_positions(
    q: Float[Array, "B T N H"],
    k: Float[Array, "BK S H"],
    v: Float[Array, "BK S Hv"],
    listed: Int[Array, "B T P L"],
) -> Float[Array, "B T N Hv"]:
    """Softmax attention of a few queries to the listed positions of a cache.

    Args:
      q: Queries.
      k: Keys, key heads of an example side by side.
      v: Values.
      listed: L distinct positions for each query and each of P groups of N / P query heads; -1 for none.

    Returns:
      o in q's dtype; 0 for a query without keys.

    Cost: O(B T P L H) memory for copies of the keys, O(B T N L H) time.
    """
    (batch, length, heads, size), groups = q.shape, listed.shape[2]
    kv_heads = k.shape[0] // batch
    # [B K, T P / K, ...]: the rows of each key head.
    listed = listed.reshape(batch, length, kv_heads, -1, listed.shape[3]).swapaxes(1, 2)
    listed = listed.reshape(batch * kv_heads, -1, listed.shape[4])
    queries = q.reshape(batch, length, kv_heads, -1, size).swapaxes(1, 2)
    queries = queries.reshape(batch * kv_heads, -1, heads // groups, size)
    taken = jnp.maximum(listed, 0).reshape(listed.shape[0], -1, 1)
    # In float32, because XLA:CPU has no products of these shapes for 16 bits.
    keys, values = (
        jnp.take_along_axis(x, taken, axis=1).astype(jnp.float32).reshape(*listed.shape, -1) for x in (k, v)
    )
    scores = jnp.einsum("brgh,brlh->brgl", queries.astype(jnp.float32), keys) * jnp.float32(size**-0.5)
    scores = jnp.where((listed >= 0)[:, :, None], scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.maximum(jnp.max(scores, axis=3, keepdims=True), FLOOR))
    total = jnp.sum(weights, axis=3, keepdims=True)
    o = jnp.einsum("brgl,brlh->brgh", weights, values)
    o = (o / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
    return o.reshape(batch, kv_heads, length, -1, v.shape[2]).swapaxes(1, 2).reshape(batch, length, heads, -1)
