"""Matrices with zeros: by a mask, in blocks, and two of four."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.linear import product
from hpnlp.ops.weight import Weight
from hpnlp.types import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedWeight(Weight):
    """Numbers where a mask is set, and 0 elsewhere.

    Products take the time of the dense matrix, and memory that of both arrays: for training with a mask, and for files. The
    gradient of a masked number is 0. A masked NaN changes nothing; a NaN of x reaches its own row only.

    Attributes:
      values: float [D, F].
      mask: bool [D, F].
    """

    stage: ClassVar[str] = "magnitude"

    values: Any
    mask: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[-2:]

    def dense(self) -> Float[Array, "D F"]:
        return jnp.where(self.mask, self.values, 0.0).astype(jnp.float32)

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        return product(x, self.dense())

    def take(self, ids: Array) -> Float[Array, "*tokens F"]:
        return jnp.where(self.mask[ids], self.values[ids], 0.0).astype(jnp.float32)

    def axes(self, names: tuple[str | None, ...]) -> Any:
        return MaskedWeight(names, names)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockSparseWeight(Weight):
    """Blocks of a matrix, equally many in each column of blocks, and 0 elsewhere.

    `matmul` multiplies the blocks only: its operations are those of the dense matrix times the share of blocks. The other
    methods take the time of the dense matrix. A NaN of x reaches the columns whose blocks read it.

    Attributes:
      blocks: float [J, n, b, c]: n blocks of b rows and c columns for each of the J = F / c columns of blocks.
      indices: int32 [J, n], the rows of blocks, from 0 to D / b - 1, rising.
      rows: D.
    """

    stage: ClassVar[str] = "blocks"

    blocks: Any
    indices: Any
    rows: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        columns, _, _, width = self.blocks.shape[-4:]
        return self.rows, columns * width

    def dense(self) -> Float[Array, "D F"]:
        columns, _, height, width = self.blocks.shape
        grid = jnp.zeros((columns, self.rows // height, height, width), jnp.float32)
        grid = grid.at[jnp.arange(columns)[:, None], self.indices].set(self.blocks.astype(jnp.float32))
        return grid.transpose(1, 2, 0, 3).reshape(self.shape)

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        columns, count, height, width = self.blocks.shape
        by_block = x.reshape(x.shape[0], self.rows // height, height).transpose(1, 0, 2)
        inputs = by_block[self.indices].transpose(0, 2, 1, 3).reshape(columns, x.shape[0], count * height)
        # XLA:CPU takes a half to three quarters of the time of a loop over the columns of blocks.
        out = jax.vmap(product)(inputs, self.blocks.reshape(columns, count * height, width))
        return out.transpose(1, 0, 2).reshape(x.shape[0], -1)

    def axes(self, names: tuple[str | None, ...]) -> Any:
        leading = names[:-2]
        return dataclasses.replace(self, blocks=(*leading, *(None,) * 4), indices=(*leading, None, None))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TwoFourWeight(Weight):
    """At most two numbers of each four consecutive rows of a column, and 0 elsewhere.

    float32 takes 17/32 of the memory of the dense matrix. Products take the time of the dense matrix and of a pass that
    restores it; they do not use the sparse tensor cores of GPUs. A NaN of x reaches its own row only.

    Attributes:
      values: float [D / 2, F], two of each four rows.
      positions: uint8 [ceil(D / 8), F]. Four bits are the positions, 0 to 3, of the two numbers of a group of rows, the first
        position in the lower bits: the lower four bits of row i are those of group i, and the upper four bits those of group
        i + ceil(D / 8).
    """

    stage: ClassVar[str] = "two_four"

    values: Any
    positions: Any

    @property
    def shape(self) -> tuple[int, int]:
        return 2 * self.values.shape[-2], self.values.shape[-1]

    def dense(self) -> Float[Array, "D F"]:
        d, f = self.shape
        both = jnp.concatenate([self.positions & 15, self.positions >> 4])[: d // 4]
        first, second = both & 3, both >> 2
        pairs = self.values.astype(jnp.float32).reshape(d // 4, 2, f)
        rows = [jnp.where(first == k, pairs[:, 0], jnp.where(second == k, pairs[:, 1], 0.0)) for k in range(4)]
        return jnp.stack(rows, axis=1).reshape(d, f)

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        return product(x, self.dense())

    def axes(self, names: tuple[str | None, ...]) -> Any:
        *leading, _, column = names
        return TwoFourWeight((*leading, None, column), (*leading, None, column))


@array_op()
def masked(w: Float[Array, "D F"], share: int | float) -> MaskedWeight:
    """Keeps the numbers of the largest magnitude.

    Args:
      w: [D, F].
      share: Share of the numbers that is kept, in (0, 1]; at least one number is.

    Returns:
      The masked matrix. Of equal magnitudes, the first are kept.

    Raises:
      InputError: `share` is out of range.
    """
    check_share(share)
    return MaskedWeight(w, largest(jnp.abs(w), share))


@array_op()
def largest(scores: Float[Array, "D F"], share: float | Float[Array, ""]) -> Bool[Array, "D F"]:
    """A mask of the largest scores.

    Args:
      scores: [D, F].
      share: Share of the scores in the mask, in [0, 1]; may be traced, as a schedule computes it.

    Returns:
      bool [D, F], true for round(share D F) scores and at least one. Of equal scores, the first are in the mask.

    Cost:
      A sort.
    """
    order = jnp.argsort(-scores.reshape(-1), stable=True)
    count = jnp.maximum(jnp.round(jnp.asarray(share, jnp.float32) * scores.size), 1.0)
    inside = jnp.arange(scores.size) < count.astype(jnp.int32)
    return jnp.zeros(scores.size, bool).at[order].set(inside).reshape(scores.shape)


@array_op()
def keep_blocks(w: Float[Array, "D F"], share: int | float, block: int = 64) -> BlockSparseWeight:
    """Keeps the blocks of the largest norm of each column of blocks.

    Args:
      w: [D, F].
      share: Share of the blocks that is kept, in (0, 1]; at least one of each column of blocks is.
      block: Rows and columns of a block; it divides D and F.

    Returns:
      The block-sparse matrix.

    Raises:
      InputError: `share` is out of range, or `block` does not divide D and F.

    References:
      Gray et al. 2017, "GPU kernels for block-sparse weights".
    """
    check_share(share)
    d, f = w.shape
    if block < 1 or d % block or f % block:
        raise InputError(f"block={block}: expected a common divisor of the {d} rows and {f} columns")
    grid = w.reshape(d // block, block, f // block, block).transpose(2, 0, 1, 3)
    norms = (grid.astype(jnp.float32) ** 2).sum(axis=(2, 3))
    _, kept = jax.lax.top_k(norms, max(1, round(share * (d // block))))
    indices = jnp.sort(kept, axis=1).astype(jnp.int32)
    return BlockSparseWeight(grid[jnp.arange(f // block)[:, None], indices], indices, d)


@array_op()
def keep_two_of_four(w: Float[Array, "D F"]) -> TwoFourWeight:
    """Keeps the two numbers of the largest magnitude of each four consecutive rows of a column.

    Args:
      w: [D, F].

    Returns:
      The sparse matrix. Of equal magnitudes, the first are kept.

    Raises:
      InputError: D is no multiple of 4.

    References:
      Mishra et al. 2021, "Accelerating sparse deep neural networks", section 3.
    """
    d, f = w.shape
    if d % 4:
        raise InputError(f"two of four rows are kept: expected a multiple of 4 rows, not {d}")
    groups = w.reshape(d // 4, 4, f)
    order = jnp.argsort(-jnp.abs(groups), axis=1, stable=True)[:, :2]
    positions = jnp.sort(order, axis=1)
    values = jnp.take_along_axis(groups, positions, axis=1).reshape(d // 2, f)
    both = (positions[:, 0] | (positions[:, 1] << 2)).astype(jnp.uint8)
    both = jnp.pad(both, ((0, -(d // 4) % 2), (0, 0)))
    half = both.shape[0] // 2
    return TwoFourWeight(values, both[:half] | (both[half:] << 4))


def check_share(share: int | float) -> None:
    """Raises InputError unless `share` is a share of numbers that is kept."""
    if not 0 < share <= 1:
        raise InputError(f"share={share}: expected the share that is kept, over 0 and at most 1")
