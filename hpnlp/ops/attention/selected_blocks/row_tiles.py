"""Rows sorted by group and cut into tiles, so that all rows of a tile read the same keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Tiles of W rows of one group each, of n independent problems with R rows and M groups.

    Attributes:
      rows: int32 [n, Z, W], numbers of rows; -1 for none. Z = R // W + M tiles are enough for every distribution.
      groups: int32 [n, Z], the group of each tile; M for a tile without rows.
      places: int32 [n, R], index of each row in the tiles, from 0 to Z W - 1; -1 for a row without a group.
    """

    rows: Array
    groups: Array
    places: Array


def row_tiles(groups: Int[Array, "n R"], count: int, width: int) -> RowTiles:
    """Sorts rows by group, stably, and begins a new tile for each group.

    Args:
      groups: The group of each row, -1 for none.
      count: Number of groups M.
      width: Rows of a tile W.

    Returns:
      The tiles. The tile of a row, and its index there, do not depend on later rows of its group.

    Cost: a sort of each problem's R numbers.
    """
    problems, rows = groups.shape
    keys = jnp.where(groups < 0, count, groups)
    order = jnp.argsort(keys, axis=1, stable=True).astype(jnp.int32)
    ordered = jnp.take_along_axis(keys, order, axis=1)
    # The first row of each group in the order, and after the last group.
    bounds = jax.vmap(lambda x: jnp.searchsorted(x, jnp.arange(count + 1, dtype=jnp.int32)))(ordered).astype(jnp.int32)
    tiles = (bounds[:, 1:] - bounds[:, :-1] + width - 1) // width
    ends = jnp.cumsum(tiles, axis=1, dtype=jnp.int32)
    first = ends - tiles

    numbers = jnp.arange(rows // width + count, dtype=jnp.int32)
    of_tile = jax.vmap(lambda x: jnp.searchsorted(x, numbers, side="right"))(ends).astype(jnp.int32)
    group = jnp.minimum(of_tile, count - 1)
    within = (numbers[None] - jnp.take_along_axis(first, group, axis=1)) * width
    index = jnp.take_along_axis(bounds, group, axis=1) + within
    index = index[:, :, None] + jnp.arange(width, dtype=jnp.int32)[None, None]
    is_row = (index < jnp.take_along_axis(bounds, group + 1, axis=1)[..., None]) & (of_tile < count)[..., None]
    flat = jnp.minimum(index, rows - 1).reshape(problems, -1)
    taken = jnp.take_along_axis(order, flat, axis=1).reshape(index.shape)

    clipped = jnp.minimum(ordered, count - 1)
    place = jnp.take_along_axis(first, clipped, axis=1) * width + jnp.arange(rows, dtype=jnp.int32)[None]
    place = jnp.where(ordered < count, place - jnp.take_along_axis(bounds, clipped, axis=1), -1)
    # The inverse permutation: a second sort takes less time than a scatter on a CPU.
    inverse = jnp.argsort(order, axis=1).astype(jnp.int32)
    return RowTiles(jnp.where(is_row, taken, -1), of_tile, jnp.take_along_axis(place, inverse, axis=1))
