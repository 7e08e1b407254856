"""Tiles of a `PairBias`, cut from its arrays where they are, without a copy in blocks, and sums of their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from hpnlp.ops.attention.block_sparse.array_blocks import SLICE, zeros
from hpnlp.ops.attention.block_sparse.chunks import Chunk
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule
from hpnlp.ops.attention.pair_bias import PairBias, Span
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.types import AnyArray

# Most tiles of a step that are computed by operations of their own; more are computed in a loop.
UNROLLED_TILES = 4


class BiasTiles:
    """A bias in the tiles of a schedule."""

    def __init__(
        self, bias: PairBias, schedule: BlockSchedule, heads: tuple[int, int], tokens: tuple[int, int]
    ) -> None:
        """Sets the arrays.

        Args:
          bias: The bias of all examples and heads.
          schedule: The steps.
          heads: (K, G).
          tokens: (T, S).
        """
        self._bias, self._heads = bias, heads
        self._block, self._key_block = schedule.block, schedule.key_block
        self._joined = bias.joins_blocks and _reads_consecutive_blocks(schedule)
        widest = max((self._tiles(group.keys)[1] for group in schedule.groups), default=self._key_block)
        queries, keys = (
            [(start, size) for start in (0, (count - 1) // block * block)]
            for count, block, size in zip(tokens, (self._block, self._key_block), (self._block, widest), strict=True)
        )
        corners = [bias.windows(*spans) for spans in itertools.product(queries, keys)]
        # Arrays keep their four axes: with one for the query heads of a key head, XLA:CPU would copy all numbers to change the
        # order of axes.
        self._arrays = [_padded(x, windows) for x, windows in zip(bias.arrays, zip(*corners, strict=True), strict=True)]

    def zeros(self) -> list[Array]:
        """float32 zeros for the gradients of all arrays."""
        return [zeros(*x.shape) for x in self._arrays]

    def gradient(self, sums: list[Array]) -> PairBias:
        """The gradient of the bias.

        Args:
          sums: Sums over all steps and chunks.

        Returns:
          The gradient, with float32 arrays.
        """
        pairs = zip(sums, self._bias.arrays, strict=True)
        return self._bias.with_arrays(tuple(x[..., : like.shape[2], : like.shape[3]] for x, like in pairs))

    def take(self, chunk: Chunk, first: Array, keys: Array) -> Float[Array, "R B K G r c"]:
        """The bias of a step.

        Args:
          chunk: The examples and heads.
          first: int32 [], index of the first query block.
          keys: int32 [R, w], indices of key blocks; of a block -1 the values are arbitrary.

        Returns:
          float32 [R, B, K, G, r, w * c]; axes from B on may be 1.
        """
        keys, key_block = self._tiles(keys)
        run, width = keys.shape

        def tile(number: Any) -> Array:
            return self._bias.combine(*self._array_tiles(self._corners(chunk, first, keys, key_block, number)))

        if run * width <= UNROLLED_TILES:
            rows = [[tile(i * width + j) for j in range(width)] for i in range(run)]
            # A tile with fewer columns than keys has one, for all keys of the query block.
            is_shared = width == 1 or rows[0][0].shape[-1] < key_block
            joined = [row[0] if is_shared else jnp.concatenate(row, axis=-1) for row in rows]
            return self._split(jnp.stack(joined))
        tiles = lax.map(tile, jnp.arange(run * width, dtype=jnp.int32))
        tiles = tiles.reshape(run, width, *tiles.shape[1:])
        if tiles.shape[-1] < key_block:
            return self._split(tiles[:, 0])
        return self._split(jnp.moveaxis(tiles, 1, -2).reshape(run, *tiles.shape[2:-1], -1))

    def add(self, sums: list[Array], chunk: Chunk, first: Array, keys: Array, db: Array) -> list[Array]:
        """Adds the gradients of a step.

        Args:
          sums: As `zeros`.
          chunk: The examples and heads.
          first: int32 [], index of the first query block.
          keys: int32 [R, w], indices of key blocks.
          db: float32 [R, B, K, G, r, w * c], 0 where keys is -1.

        Returns:
          The new sums.
        """
        keys, key_block = self._tiles(keys)
        run, width = keys.shape
        db = db.reshape(*db.shape[:2], -1, db.shape[4], width, key_block)  # [R, B, N, r, w, c]

        def add(row: Array | int, column: Array | int, sums: list[Array]) -> list[Array]:
            tile_db = lax.dynamic_index_in_dim(lax.dynamic_index_in_dim(db, row, 0, False), column, 3, False)
            corners = self._corners(chunk, first, keys, key_block, row * width + column)
            gradients = self._bias.gradients(tile_db, *self._array_tiles(corners))
            added = []
            for x, gradient, (corner, size) in zip(sums, gradients, corners, strict=True):
                before = lax.dynamic_slice(x, corner, size, **SLICE)
                added.append(lax.dynamic_update_slice(x, before + gradient, corner, **SLICE))
            return added

        if run * width <= UNROLLED_TILES:
            for row in range(run):
                for column in range(width):
                    sums = add(row, column, sums)
            return sums
        return lax.fori_loop(0, run * width, lambda i, sums: add(i // width, i % width, sums), sums)

    def _tiles(self, keys: AnyArray) -> tuple[Any, int]:
        """Key blocks [..., R, w], where joined blocks are one, and the number of their keys."""
        return (keys[..., :1], self._key_block * keys.shape[-1]) if self._joined else (keys, self._key_block)

    def _corners(
        self, chunk: Chunk, first: Array, keys: Array, key_block: int, number: Array | int
    ) -> list[tuple[Any, list[int]]]:
        """The first index and the size of the part of each array for a tile of a step, by its number row by row."""
        row, column = number // keys.shape[1], number % keys.shape[1]
        first_query, first_key = (first + row) * self._block, jnp.maximum(keys[row, column], 0) * self._key_block
        windows = self._bias.windows((first_query, self._block), (first_key, key_block))
        corners = []
        for x, window in zip(self._arrays, windows, strict=True):
            start: list[Any] = [0, 0, *(begin for begin, _ in window)]
            size = [*x.shape[:2], *(count for _, count in window)]
            if chunk.example is not None:
                group = self._heads[1]
                bounds = (chunk.example, chunk.examples), (chunk.head * group, chunk.heads * group)
                for axis, (index, count) in enumerate(bounds):
                    if x.shape[axis] > 1:
                        start[axis], size[axis] = index, count
            corners.append((vary_alike(*(jnp.asarray(i, jnp.int32) for i in start)), size))
        return corners

    def _array_tiles(self, corners: list[tuple[Any, list[int]]]) -> list[Array]:
        """The parts of the arrays for a tile."""
        return [lax.dynamic_slice(x, *corner, **SLICE) for x, corner in zip(self._arrays, corners, strict=True)]

    def _split(self, x: Array) -> Array:
        """[R, B, K * G, r, c] -> [R, B, K, G, r, c]; [R, B, 1, r, c] -> [R, B, 1, 1, r, c]."""
        heads = (1, 1) if x.shape[2] == 1 else (-1, self._heads[1])
        return x.reshape(*x.shape[:2], *heads, *x.shape[3:])


def _padded(x: Array, windows: Sequence[Sequence[Span]]) -> Array:
    """An array with zeros after its end, so that all windows are inside."""
    needed = [max(window[axis][0] + window[axis][1] for window in windows) for axis in range(2)]
    padding = [(0, max(0, count - size)) for count, size in zip(needed, x.shape[2:], strict=True)]
    return jnp.pad(x, [(0, 0), (0, 0), *padding]) if any(after for _, after in padding) else x


def _reads_consecutive_blocks(schedule: BlockSchedule) -> bool:
    """Whether each query block reads consecutive key blocks in each step, and the schedule is known on the host."""
    keys = [group.keys for group in schedule.groups]
    return all(
        isinstance(x, np.ndarray) and bool(((x < 0) | (x == x[..., :1] + np.arange(x.shape[2]))).all()) for x in keys
    )
