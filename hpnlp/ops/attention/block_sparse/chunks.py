"""Chunks of the batch and of the heads that the scan executor computes after one another, so that tiles fit the caches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from hpnlp.ops.attention.block_sparse.array_blocks import SLICE
from hpnlp.ops.attention.block_sparse.decomposition import cost_model
from hpnlp.ops.attention.block_sparse.operands import ExecutorOperands
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule
from hpnlp.ops.helpers.custom_vjp import tied

_NO_AXIS = 9  # more axes than any operand has


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some examples and key heads of a call.

    Attributes:
      example: int32 [], index of the first example; None if the chunk is the whole call.
      head: int32 [], index of the first key head; None if the chunk is the whole call.
      examples: Number of examples.
      heads: Number of key heads.
    """

    example: Any
    head: Any
    examples: int
    heads: int

    def cut(self, x: Array, per_head: int = 1, axis: int = 2) -> Array:
        """The chunk of an array.

        Args:
          x: [B or 1, ...].
          per_head: Number of indices of `axis` that belong to one key head.
          axis: The axis of the heads, whose size may be 1; an axis that x lacks if x has no heads.

        Returns:
          x with the examples and heads of the chunk; an axis of 1 stays.
        """
        return x if self.example is None else lax.dynamic_slice(x, *self._slice(x, per_head, axis), **SLICE)

    def put(self, x: Array, new: Array, per_head: int = 1, axis: int = 2) -> Array:
        """Replaces the chunk of an array; undoes `cut`.

        Args:
          x: As for `cut`.
          new: The result of `cut` in shape.
          per_head: As for `cut`.
          axis: As for `cut`.

        Returns:
          The updated x.
        """
        if self.example is None:
            return new
        return lax.dynamic_update_slice(x, new, self._slice(x, per_head, axis)[0], **SLICE)

    def cut_operands(self, operands: ExecutorOperands, group: int) -> ExecutorOperands:
        """The chunk of all operands but the bias.

        Args:
          operands: Operands of all examples and heads.
          group: Query heads for each key head.

        Returns:
          The operands of the chunk, with the bias of the whole call.
        """
        if self.example is None:
            return operands
        by_example = {name: getattr(operands, name) for name in ("queries", "keys", "lengths")}
        by_head = {name: getattr(operands, name) for name in ("streams", "heads", "dense")}
        by_example = jax.tree.map(lambda x: self.cut(x, axis=_NO_AXIS), by_example)
        by_head = jax.tree.map(lambda x: self.cut(x, group, 1), by_head)
        return dataclasses.replace(operands, **by_example, **by_head)

    def _slice(self, x: Array, per_head: int, axis: int) -> tuple[list[Any], list[int]]:
        """Start indices and sizes of the chunk of an array."""
        start, size = [jnp.int32(0)] * x.ndim, list(x.shape)
        if x.shape[0] > 1:
            start[0], size[0] = self.example, self.examples
        if axis < x.ndim and x.shape[axis] > 1:
            start[axis], size[axis] = self.head * per_head, self.heads * per_head
        return start, size


@dataclasses.dataclass(frozen=True)
class ChunkGrid:
    """The chunks of a call.

    Attributes:
      batch: Number of examples of the call.
      heads: Number of key heads of the call.
      chunk_examples: Number of examples of a chunk.
      chunk_heads: Number of key heads of a chunk.
    """

    batch: int
    heads: int
    chunk_examples: int
    chunk_heads: int

    def numbers(self, q: Array) -> Array | None:
        """Numbers of the chunks for a scan, tied to the queries; None if the call is a single chunk."""
        if (self.chunk_examples, self.chunk_heads) == (self.batch, self.heads):
            return None
        count = self.batch // self.chunk_examples * (self.heads // self.chunk_heads)
        return tied(jnp.arange(count, dtype=jnp.int32), q)

    def chunk(self, number: Array | None) -> Chunk:
        """The chunk of a number, int32 []; the whole call for None."""
        if number is None:
            return Chunk(None, None, self.batch, self.heads)
        per_example = self.heads // self.chunk_heads
        example, head = number // per_example * self.chunk_examples, number % per_example * self.chunk_heads
        return Chunk(example, head, self.chunk_examples, self.chunk_heads)


def chunk_grid(q: Array, k: Array, schedule: BlockSchedule) -> ChunkGrid:
    """Divides a call into chunks.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      schedule: Schedule of the tiles; the size of its groups decides the size of a chunk.

    Returns:
      The chunks.
    """
    group = q.shape[2] // k.shape[2]
    pairs = max((g.keys[0].size for g in schedule.groups), default=1) * schedule.block * schedule.key_block
    return ChunkGrid(q.shape[0], k.shape[2], *_chunk_size(q, k, cost_model.STEP_SCORES // (group * pairs)))


def heads_at_a_time(q: Array, k: Array) -> int:
    """Number of (example, query head) pairs in a chunk as far as memory decides, for the choice of a schedule.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].

    Returns:
      At most B * N.
    """
    examples, heads = _chunk_size(q, k, q.shape[0] * k.shape[2])
    return examples * heads * (q.shape[2] // k.shape[2])


def _chunk_size(q: Array, k: Array, most: int) -> tuple[int, int]:
    """Examples and key heads in a chunk: divisors of B and K, at most `most` pairs and at most LAID copied numbers."""
    batch, heads, group = q.shape[0], k.shape[2], q.shape[2] // k.shape[2]
    mesh = jax.sharding.get_abstract_mesh()
    sharded = mesh.size > 1 and not all(kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types)
    # A scan cannot run along an axis that is sharded over devices, and accelerators need all examples and heads at once.
    if sharded or jax.default_backend() != "cpu":
        return batch, heads
    most = min(most, cost_model.MAX_COPIED_ELEMENTS // (group * max(q.shape[1], k.shape[1]) * q.shape[3]))
    return _largest_divisor(batch, most // heads), _largest_divisor(heads, most)


def _largest_divisor(n: int, bound: int) -> int:
    """The largest divisor of n that is at most `bound`, at least 1."""
    return max(i for i in range(1, n + 1) if n % i == 0 and i <= max(bound, 1))
