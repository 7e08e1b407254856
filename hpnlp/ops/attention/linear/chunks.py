"""Chunks of tokens in the layout of the products of linear attention, with the borders of segments.

Arrays have the axes `[Y, C, ...]`, where Y = n B K counts the chunks of all sequences and key heads, chunk by chunk, and C the
tokens of a chunk. Queries have `[Y, G C, ...]` for the G = N / K query heads of a key head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hpnlp.ops.helpers.custom_vjp import vary_alike


@dataclasses.dataclass(frozen=True)
class ChunkShape:
    """Sizes of arrays in chunks.

    Attributes:
      batch: Number of sequences B.
      length: Number of tokens of a sequence T.
      heads: Number of key heads K.
      size: Tokens of a chunk C.
    """

    batch: int
    length: int
    heads: int
    size: int

    @property
    def count(self) -> int:
        """Number of chunks of a sequence; the last one may be padded."""
        return -(-self.length // self.size)

    def split(self, x: jax.Array) -> jax.Array:
        """Splits float32 tokens into chunks.

        Args:
          x: `[B, T, N or K, ...]`.

        Returns:
          float32 `[Y, C N / K, ...]`, padded with zeros.
        """
        x = x.astype(jnp.float32)
        if padding := self.count * self.size - self.length:
            x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        n, features = x.shape[2], x.shape[3:]
        x = x.reshape(self.batch, self.count, self.size, n, *features)
        x = x.transpose(1, 0, 3, 2, *range(4, x.ndim))
        return x.reshape(-1, n // self.heads * self.size, *features)

    def join(self, x: jax.Array, heads: int) -> jax.Array:
        """Joins the chunks of queries to sequences.

        Args:
          x: `[Y, C N / K, H]`.
          heads: Number of query heads N.

        Returns:
          `[B, T, N, H]`.
        """
        x = x.reshape(self.count, self.batch, heads, self.size, -1).transpose(1, 0, 3, 2, 4)
        return x.reshape(self.batch, -1, heads, x.shape[-1])[:, : self.length]


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Tokens whose segments cross the borders between chunks, for states that run over the chunks in one direction.

    Attributes:
      reads: bool `[Y, C]`, tokens of the segment that the state at the side where it enters the chunk belongs to.
      writes: bool `[Y, C]`, tokens of the segment that the state at the other side belongs to.
      continues: bool `[Y]`, whether both sides belong to the same segment.
    """

    reads: jax.Array
    writes: jax.Array
    continues: jax.Array


@dataclasses.dataclass(frozen=True)
class Borders:
    """Borders of segments in chunks.

    Attributes:
      same: bool `[Y or 1, C, C]`, pairs (query, key) of a chunk that may influence each other.
      forward: Segments that reach into later chunks; None if each sequence is one segment.
      backward: Segments that reach into earlier chunks; None as above, and for causal attention.
    """

    same: jax.Array
    forward: Crossing | None = None
    backward: Crossing | None = None


def find_borders(shape: ChunkShape, segment_ids: jax.Array | None, causal: bool) -> Borders:
    """Finds the borders of segments.

    Args:
      shape: Sizes of the chunks.
      segment_ids: int32 `[B, T]`; each segment is contiguous. None for one segment per sequence.
      causal: Whether tokens influence later tokens only.

    Returns:
      The borders. The state before the first chunk belongs to the segment of the first token.
    """
    size = shape.size
    order = np.tril(np.ones((size, size), bool)) if causal else np.ones((size, size), bool)
    if segment_ids is None:
        return Borders(jnp.asarray(order)[None])
    begins = jnp.pad(_changes(segment_ids), ((0, 0), (1, 0)))
    runs = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    padding = shape.count * size - shape.length
    runs = jnp.pad(runs, ((0, 0), (0, padding)), mode="edge").reshape(shape.batch, shape.count, size)
    first, last = runs[:, :, 0], runs[:, :, -1]
    by_head = _by_head(shape, runs)
    return Borders(
        same=(by_head[:, :, None] == by_head[:, None, :]) & jnp.asarray(order)[None],
        forward=_crossing(shape, runs, jnp.concatenate([first[:, :1], last[:, :-1]], axis=1), last),
        backward=None
        if causal
        else _crossing(shape, runs, jnp.concatenate([first[:, 1:], last[:, -1:]], axis=1), first),
    )


def _crossing(shape: ChunkShape, runs: jax.Array, enters: jax.Array, leaves: jax.Array) -> Crossing:
    """Compares the runs [B, n, C] with the run at the side where the state enters a chunk, and where it leaves it, [B, n]."""
    flags = runs == enters[..., None], runs == leaves[..., None], enters == leaves
    return Crossing(*(_by_head(shape, x) for x in flags))


def _by_head(shape: ChunkShape, x: jax.Array) -> jax.Array:
    """[B, n, ...] -> [Y, ...]."""
    x = jnp.repeat(jnp.moveaxis(x, 1, 0)[:, :, None], shape.heads, axis=2)
    return x.reshape(-1, *x.shape[3:])


def select(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Replaces entries by zeros.

    Args:
      flags: bool, of the leading axes of x.
      x: An array.

    Returns:
      x where the flags are True, and 0 elsewhere, also in place of NaN.
    """
    return jnp.where(flags.reshape(*flags.shape, *[1] * (x.ndim - flags.ndim)), x, jnp.zeros((), x.dtype))


def contiguous(segment_ids: jax.Array, *tokens: jax.Array | None) -> tuple[jax.Array, list[Any], jax.Array]:
    """Brings the tokens of each segment together, in their order, if they are apart.

    Args:
      segment_ids: int32 `[B, T]`.
      *tokens: Arrays `[B, T, ...]`, or None.

    Returns:
      (segment ids, the arrays, the indices `[B, T]` of the tokens in the new order for `scattered`).

    Cost: an argsort of the ids, and a copy of the arrays. Where a segment is in parts, a gather.
    """
    order = jnp.argsort(segment_ids, axis=1, stable=True).astype(jnp.int32)
    ids = jnp.take_along_axis(segment_ids, order, axis=1)
    is_apart = _changes(segment_ids).sum() != _changes(ids).sum()
    # Segments that are contiguous keep their order, so that no array is gathered.
    identity = jnp.broadcast_to(jnp.arange(order.shape[1], dtype=jnp.int32)[None], order.shape)
    order = jnp.where(is_apart, order, identity)
    ids = jnp.where(is_apart, ids, segment_ids)
    return ids, [None if x is None else _taken(is_apart, x, order) for x in tokens], order


def scattered(x: jax.Array, order: jax.Array) -> jax.Array:
    """Undoes the order of `contiguous`.

    Args:
      x: `[B, T, ...]`, in the order of `contiguous`.
      order: int32 `[B, T]`.

    Returns:
      The array in the order of the sequences.
    """
    inverse = jnp.argsort(order, axis=1).astype(jnp.int32)
    return _taken((order[:, 1:] < order[:, :-1]).any(), x, inverse)


def _changes(segment_ids: jax.Array) -> jax.Array:
    return segment_ids[:, 1:] != segment_ids[:, :-1]


def _taken(is_apart: jax.Array, x: jax.Array, order: jax.Array) -> jax.Array:
    def take(x: jax.Array, order: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)

    return lax.cond(is_apart, take, lambda x, order: x, *vary_alike(x, order))
