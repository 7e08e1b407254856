"""Tiles of bias arrays, cut from the arrays where they are, without a copy in blocks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hpnlp.ops.attention.block_sparse.array_blocks import SLICE, zeros
from hpnlp.ops.attention.block_sparse.chunks import Chunk
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule
from hpnlp.ops.attention.operands import BiasArrays, weighted
from hpnlp.ops.custom_vjp import vary_alike

# Most tiles of a step that are cut by operations of their own; more are cut in a loop.
UNROLLED_TILES = 4


class BiasTiles:
    """Tiles of the arrays of a bias, and sums of their gradients, for the steps of a schedule."""

    def __init__(self, bias: BiasArrays, schedule: BlockSchedule, heads: tuple[int, int]) -> None:
        """Sets the arrays.

        Args:
          bias: The bias of all examples and heads.
          schedule: The steps.
          heads: (K, G).
        """
        self._bias, self._block, self._heads = bias, (schedule.block, schedule.key_block), heads
        # [B, N, T, S], padded to whole blocks. With an axis for G, XLA:CPU would copy all numbers to change the order of axes.
        self._arrays = [self._padded(x) for x in bias.arrays]

    def zeros(self) -> Any:
        """float32 zeros for the gradients of all arrays and weights."""
        weights = [None if weight is None else zeros() for weight in self._bias.weights]
        return [zeros(*x.shape) for x in self._arrays], weights

    def gradient(self, sums: Any) -> BiasArrays:
        """The gradient of the bias.

        Args:
          sums: Sums over all steps and chunks.

        Returns:
          float32 arrays in the shapes of the arrays of the bias.
        """
        arrays, weights = sums
        arrays = (x[..., : like.shape[2], : like.shape[3]] for x, like in zip(arrays, self._bias.arrays, strict=True))
        return BiasArrays(tuple(arrays), tuple(weights))

    def take(self, chunk: Chunk, first: Array, keys: Array) -> Float[Array, "R B K G r c"]:
        """The bias of a step.

        Args:
          chunk: The examples and heads.
          first: int32 [], index of the first query block.
          keys: int32 [R, w], indices of key blocks; of a block -1 the values are arbitrary.

        Returns:
          float32 [R, B, K, G, r, w * c], with axes of 1 where those of all arrays are.
        """
        total: Any = 0.0
        for x, weight in zip(self._arrays, self._bias.weights, strict=True):
            total = total + weighted(self._take(x, chunk, first, keys), weight)
        return total

    def add(self, sums: Any, chunk: Chunk, first: Array, keys: Array, db: Array) -> Any:
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
        arrays, weights = list(sums[0]), list(sums[1])
        for i, (x, weight) in enumerate(zip(self._arrays, self._bias.weights, strict=True)):
            if weight is not None:
                weights[i] = weights[i] + jnp.sum(db * self._take(x, chunk, first, keys).astype(jnp.float32))
            arrays[i] = self._add(arrays[i], chunk, first, keys, weighted(db, weight))
        return arrays, weights

    def _padded(self, x: Array) -> Array:
        after = [0 if x.shape[2 + i] == 1 else -x.shape[2 + i] % block for i, block in enumerate(self._block)]
        return jnp.pad(x, [(0, 0), (0, 0), *((0, n) for n in after)]) if any(after) else x

    def _window(self, x: Array, chunk: Chunk, first: Array, keys: Array) -> tuple[Any, list[int]]:
        """The corner of a tile as a function of its number in a step, row by row; and the size of a tile."""
        zero, width = first * 0, keys.shape[1]
        start, size = [zero, zero], [*x.shape[:2], *(min(*pair) for pair in zip(x.shape[2:], self._block, strict=True))]
        if chunk.example is not None:
            group = self._heads[1]
            bounds = (chunk.example, chunk.examples), (chunk.head * group, chunk.heads * group)
            for axis, (index, count) in enumerate(bounds):
                if x.shape[axis] > 1:
                    start[axis], size[axis] = index, count

        def corner(number: Any) -> tuple[Array, ...]:
            row, column = number // width, number % width
            query = (first + row) * self._block[0] if x.shape[2] > 1 else zero
            key = jnp.maximum(keys[row, column], 0) * self._block[1] if x.shape[3] > 1 else zero
            return vary_alike(*start, query, key)

        return corner, size

    def _split(self, x: Array) -> Array:
        """[..., K * G, r, c] -> [..., K, G, r, c]; [..., 1, r, c] -> [..., 1, 1, r, c]."""
        heads = (1, 1) if x.shape[-3] == 1 else (-1, self._heads[1])
        return x.reshape(*x.shape[:-3], *heads, *x.shape[-2:])

    def _take(self, x: Array, chunk: Chunk, first: Array, keys: Array) -> Array:
        """[R, B, K, G, r, w * c]; axes of 1 stay."""
        corner, size = self._window(x, chunk, first, keys)
        run, width = keys.shape
        # Query blocks of a step read different key blocks.
        run, columns = 1 if x.shape[2] == x.shape[3] == 1 else run, 1 if x.shape[3] == 1 else width

        def tile(number: Any) -> Array:
            return lax.dynamic_slice(x, corner(number), size, **SLICE)

        if run * columns <= UNROLLED_TILES:
            rows = [[tile(i * width + j) for j in range(columns)] for i in range(run)]
            return self._split(jnp.stack([row[0] if len(row) == 1 else jnp.concatenate(row, axis=-1) for row in rows]))
        numbers = jnp.asarray([i * width + j for i in range(run) for j in range(columns)], jnp.int32)
        tiles = jnp.moveaxis(lax.map(tile, numbers).reshape(run, columns, *size), 1, -2)
        return self._split(tiles.reshape(run, *size[:-1], -1))

    def _add(self, sums: Array, chunk: Chunk, first: Array, keys: Array, db: Array) -> Array:
        """Adds a step's gradient [R, B, K, G, r, w * c], summed over axes where the array has 1."""
        corner, size = self._window(sums, chunk, first, keys)
        db = db.reshape(*db.shape[:2], -1, db.shape[4], keys.shape[1], db.shape[5] // keys.shape[1])
        over = [i + 1 for i in range(3) if size[i] == 1 != db.shape[i + 1]]
        over += [0] if sums.shape[2] == sums.shape[3] == 1 else []
        over += [4, 5] if sums.shape[3] == 1 else []
        db = db.sum(axis=tuple(over), keepdims=True) if over else db  # [R, B, N, r, w, c]
        run, columns = db.shape[0], db.shape[4]

        def add(row: Any, column: Any, sums: Array) -> Array:
            new = lax.dynamic_index_in_dim(lax.dynamic_index_in_dim(db, row, 0, False), column, 3, False)
            at = corner(row * keys.shape[1] + column)
            old = lax.dynamic_slice(sums, at, size, **SLICE)
            return lax.dynamic_update_slice(sums, old + new, at, **SLICE)

        if run * columns <= UNROLLED_TILES:
            for row in range(run):
                for column in range(columns):
                    sums = add(row, column, sums)
            return sums
        return lax.fori_loop(0, run * columns, lambda i, sums: add(i // columns, i % columns, sums), sums)
