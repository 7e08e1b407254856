"""Blocks of the tokens of each document, their summaries, and the choice of blocks for each query."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.ops.attention.attend import attend
from hpnlp.ops.attention.masks.patterns import Blockwise, Causal, Window
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError

# Queries whose scores with all blocks are computed at once.
CHUNK = 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DocumentBlocks:
    """The complete blocks of the tokens of each document.

    A document is a run of consecutive tokens with the same segment id, and its blocks are counted from its first token, so that
    a document has the same blocks alone and packed with others. There are at most M = ceil(T / block) complete blocks.

    Attributes:
      starts: int32 [B, M], index of the first token of each complete block, ascending; -1 for none.
      is_first: bool [B, M], whether it is the first block of its document.
      segment_ids: int32 [B, M], the segment of each block; None without segments.
      own: int32 [B, T], index of the first token of each token's block, complete or not.
      block: Number of tokens of a block.
    """

    starts: Any
    is_first: Any
    segment_ids: Any
    own: Any
    block: int = dataclasses.field(metadata={"static": True})


@array_op("B", segment_ids="B")
def document_blocks(segment_ids: Int[Array, "B T"] | None, batch: int, length: int, block: int) -> DocumentBlocks:
    """Divides documents into blocks.

    Args:
      segment_ids: Segment of each token, in any order; None for one document per sequence.
      batch: Number of sequences B.
      length: Number of tokens T.
      block: Number of tokens of a block.

    Returns:
      The blocks.

    Raises:
      InputError: `block` is less than 1.

    Cost: O(B T).
    """
    if block < 1:
        raise InputError(f"block {block}: expected at least 1 token")
    count = -(-length // block)
    index = jnp.arange(length, dtype=jnp.int32)[None]
    if segment_ids is None:
        starts = jnp.arange(count, dtype=jnp.int32)[None] * block
        starts = jnp.broadcast_to(jnp.where(starts + block <= length, starts, -1), (batch, count))
        return DocumentBlocks(
            starts, starts == 0, None, jnp.broadcast_to(index // block * block, (batch, length)), block
        )
    begins = jnp.concatenate([jnp.ones((batch, 1), bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    begin = lax.cummax(jnp.where(begins, index, 0), axis=1)
    block_begin = index - (index - begin) % block
    ends = index - block_begin == block - 1

    def at_ends(x: Array, other: int) -> Array:
        # Ends are at least `block` tokens apart, so that `block` tokens contain at most one.
        x = jnp.pad(jnp.where(ends, x, other), ((0, 0), (0, count * block - length)), constant_values=other)
        return jnp.max(x.reshape(batch, count, block), axis=2)

    starts, lowest = at_ends(block_begin, -1), jnp.iinfo(jnp.int32).min
    return DocumentBlocks(starts, at_ends(begin, -1) == starts, at_ends(segment_ids, lowest), block_begin, block)


@array_op("B M K", x="B T K")
def block_summaries(
    x: Float[Array, "B T K H"], blocks: DocumentBlocks, weights: Float[Array, "K block"] | None = None
) -> Float[Array, "B M K H"]:
    """Weighted sums of the tokens of each complete block.

    Args:
      x: Keys or values.
      blocks: Blocks of the T tokens.
      weights: Weight of each token of a block for each head; None for means.

    Returns:
      float32 sums; for a block that does not exist, finite numbers without meaning.

    Cost: a pass over x.
    """
    (batch, length, heads, size), count, block = x.shape, blocks.starts.shape[1], blocks.block
    x = jnp.pad(x, ((0, 0), (0, count * block - length), (0, 0), (0, 0)))
    if blocks.segment_ids is None:
        windows = x.reshape(batch, count, block, heads, size)
    else:
        take = jax.vmap(jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, block), (None, 0)))
        windows = take(x, jnp.maximum(blocks.starts, 0))
    if weights is None:
        return jnp.mean(windows.astype(jnp.float32), axis=2)
    return jnp.einsum("bmskh,ks->bmkh", windows.astype(jnp.float32), weights.astype(jnp.float32))


@array_op("B T", q="B T")
def choose_blocks(
    q: Float[Array, "B T N H"],
    summaries: Float[Array, "B M K H"],
    blocks: DocumentBlocks,
    count: int,
    *,
    indices: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    lse: Float[Array, "B T N"] | None = None,
) -> Int[Array, "B T P C"]:
    """The complete blocks before the query, of its segment, whose summaries have the highest scores.

    Without `lse`, each of P = N query heads has the blocks with the highest q . summary. With `lse`, the P = K groups of query
    heads have the first block of the document, and those with the highest sum over the heads of exp(q . summary / sqrt(H) -
    lse).

    Args:
      q: Queries.
      summaries: Summaries of the keys of each block.
      blocks: The blocks.
      count: Largest number of blocks for a query.
      indices: Index of each query in the sequence; from 0 if None.
      segment_ids: Segment of each query; None without segments.
      lse: Log-sum-exp of the scaled scores of each query.

    Returns:
      int32, C = min(count, M) numbers of blocks; -1 for none. They have no gradient.

    Raises:
      InputError: `count` is negative.

    Cost: O(B T N M H) time, and memory for the scores of CHUNK queries.

    References:
      Lu et al. 2025, "MoBA", eq. 5 and 6. Yuan et al. 2025, "Native sparse attention", arXiv 2502.11089, eq. 8 to 12.
    """
    if count < 0:
        raise InputError(f"count {count}: expected 0 or more blocks")
    q, summaries = lax.stop_gradient(q), lax.stop_gradient(summaries)
    if indices is None:
        indices = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32)[None], q.shape[:2])
    lse = None if lse is None else lax.stop_gradient(lse)

    def choose(queries: PyTree) -> Array:
        q, indices, segment_ids, lse = queries
        return _choose(q, summaries, blocks, min(count, blocks.starts.shape[1]), indices, segment_ids, lse)

    queries, length = (q, indices, segment_ids, lse), q.shape[1]
    if length <= CHUNK:
        return choose(queries)

    def chunks(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -length % CHUNK), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]).swapaxes(0, 1)

    chosen = lax.map(choose, jax.tree.map(chunks, queries)).swapaxes(0, 1)
    return chosen.reshape(q.shape[0], -1, *chosen.shape[3:])[:, :length]


def _choose(
    q: Array,
    summaries: Array,
    blocks: DocumentBlocks,
    count: int,
    indices: Array,
    segment_ids: Array | None,
    lse: Array | None,
) -> Array:
    """`choose_blocks` of some of the queries."""
    (batch, length, heads, size), kv_heads = q.shape, summaries.shape[2]
    starts = blocks.starts[:, None]
    allowed = (starts >= 0) & (starts + blocks.block <= indices[..., None])
    if segment_ids is not None and blocks.segment_ids is not None:
        allowed = allowed & (segment_ids[..., None] == blocks.segment_ids[:, None])
    queries = q.astype(jnp.float32).reshape(batch, length, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("btkgh,bmkh->btkgm", queries, summaries)
    if lse is None:
        scores = scores.reshape(batch, length, heads, -1)
    else:
        lse = jnp.where(jnp.isneginf(lse), 0.0, lse).reshape(batch, length, kv_heads, -1, 1)
        scores = jnp.where(allowed[:, :, None, None], scores * jnp.float32(size**-0.5) - lse, -jnp.inf)
        scores = jnp.sum(jnp.exp(scores), axis=3)
        scores = jnp.where(blocks.is_first[:, None, None], jnp.inf, scores)
    best, chosen = lax.top_k(jnp.where(allowed[:, :, None], scores, -jnp.inf), count)
    return jnp.where(jnp.isneginf(best), -1, chosen.astype(jnp.int32))


@array_op("B T N", q="B T N")
def own_block_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    blocks: DocumentBlocks,
    **dropout: Any,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Causal attention of each token to its own block.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      blocks: Blocks of the T tokens.
      **dropout: dropout_rate, rng and streams of `attend`.

    Returns:
      (o, lse), as `attend(..., return_lse=True)`.

    Cost: as `attend` over Blockwise(block).
    """
    if blocks.segment_ids is None:
        mask, ids = Blockwise(blocks.block) & Causal(), None
    else:
        mask, ids = Window(blocks.block - 1, 0), blocks.own
    result: Any = attend(q, k, v, mask, segment_ids=ids, kv_segment_ids=ids, return_lse=True, **dropout)
    return result
