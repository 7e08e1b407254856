"""Active tiles of a mask: pairs of a query block and a key block, found by interval arithmetic without a T x S array."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpnlp.ops.attention.block_sparse.decomposition import cost_model
from hpnlp.ops.attention.masks.base import Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.types import InputError

# Queries and keys of the tiles in which the allowed pairs of a mask are counted.
_COUNTING_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class BlockMask:
    """The active tiles of a mask, ordered by query block and then by key block. A tile that is not listed allows no pair.

    Attributes:
      rows: int `[tiles]`, the number of the query block.
      columns: int `[tiles]`, the number of the key block.
      every: bool `[tiles]`, True only if the mask allows every pair of the tile.
    """

    rows: np.ndarray
    columns: np.ndarray
    every: np.ndarray

    def select(self, tiles: np.ndarray) -> BlockMask:
        """Some of the tiles.

        Args:
          tiles: int, the indices of the tiles; or bool `[tiles]`, True for the tiles.

        Returns:
          The block mask of these tiles.
        """
        return BlockMask(self.rows[tiles], self.columns[tiles], self.every[tiles])


def active_tiles(
    mask: Mask, length: int, keys: int, block: int, key_block: int, query_blocks: np.ndarray | None = None
) -> BlockMask:
    """The tiles of a T x S mask that may allow a pair.

    The keys of every query block are halved until a span is ruled out, wholly allowed, or a single block. If `Mask.tile`
    bounds nothing for a part of the mask, the tiles that are left are searched pair by pair.

    Args:
      mask: The mask.
      length: Number of queries, T.
      keys: Number of keys, S.
      block: Queries in a block; the last block may be shorter.
      key_block: Keys in a block; the last block may be shorter.
      query_blocks: int `[blocks]`, ascending: the query blocks whose tiles are returned; None for all.

    Returns:
      The active tiles. Without a search, a tile that allows no pair may be listed, and a tile may lack `every` although all of
      its pairs are allowed.

    Raises:
      InputError: `mask.tile` accepts no arrays.

    Cost: O(query blocks x active spans x log(S / key_block)) evaluations of `tile`, in log2(S / key_block) calls with arrays.
    """
    row = np.arange(-(-length // block)) if query_blocks is None else np.asarray(query_blocks)
    count = -(-keys // key_block)
    size = 1 << max(count - 1, 0).bit_length()
    start = np.zeros_like(row)
    spans: list[BlockMask] = []
    while row.size and count:
        q0, k0 = row * block, start * key_block
        q1, k1 = np.minimum(q0 + block, length) - 1, np.minimum(k0 + size * key_block, keys) - 1
        some_pair, every_pair = evaluate_tiles(mask, row.shape, q0, q1, k0, k1)
        decided = some_pair & (every_pair | (size == 1))
        spans.append(_expanded(row[decided], start[decided], every_pair[decided], size))
        undecided = some_pair & ~decided
        size //= 2
        row = np.repeat(row[undecided], 2)
        start = (start[undecided][:, None] + np.array([0, size])).reshape(-1)
        row, start = row[start < count], start[start < count]
    none = np.zeros(0, int)
    rows, columns, every = (
        np.concatenate([*(getattr(span, name) for span in spans), none]) for name in ("rows", "columns", "every")
    )
    order = np.lexsort((columns, rows))
    tiles = BlockMask(rows, columns, every.astype(bool)).select(order[columns[order] < count])
    return _searched(mask, tiles, length, keys, block, key_block) if mask.needs_search() else tiles


def _expanded(rows: np.ndarray, starts: np.ndarray, every: np.ndarray, size: int) -> BlockMask:
    """The tiles of spans of `size` key blocks each, which begin at `starts`."""
    columns = (starts[:, None] + np.arange(size)).reshape(-1)
    return BlockMask(np.repeat(rows, size), columns, np.repeat(every, size))


def evaluate_tiles(mask: Mask, shape: tuple[int, ...], *bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Calls `Mask.tile` for many tiles at once.

    Args:
      mask: The mask.
      shape: Shape of the result.
      *bounds: First query, last query, first key and last key of each tile, arrays that broadcast to `shape`.

    Returns:
      `(some, every)` as `Mask.tile` defines them, bool, each of `shape`.

    Raises:
      InputError: `tile` accepts no arrays.
    """
    try:
        some_pair, every_pair = mask.tile(*bounds)
        return np.broadcast_to(some_pair, shape), np.broadcast_to(every_pair, shape)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(
            f"{mask!r:.200}: `tile` failed for arrays of bounds ({error}): it is called for many tiles at once, so write & "
            "and |, not `and` and `or`, and abs or numpy.minimum, not `min`"
        ) from error


def density(mask: Mask | PerHead, length: int, keys: int | None = None) -> float:
    """Share of the T x S pairs that a mask allows.

    Args:
      mask: The mask; for PerHead, the result is the mean over heads.
      length: Number of queries, T.
      keys: Number of keys, S; None, the default, for T.

    Returns:
      The share, from 0 to 1.

    Cost: evaluates `at` for every pair of the partly allowed tiles of 64 x 64.
    """
    keys, heads = length if keys is None else keys, mask.heads or 1
    counts = [len(members) * count_pairs(head, length, keys) for head, members in mask.by_head(heads).items()]
    return sum(counts) / max(heads * length * keys, 1)


def count_pairs(mask: Mask, length: int, keys: int) -> int:
    """Number of pairs that a mask allows.

    Args:
      mask: The mask.
      length: Number of queries, T.
      keys: Number of keys, S.

    Returns:
      The number, from 0 to T S. `at` is evaluated in partly allowed tiles only.
    """
    block = _COUNTING_BLOCK
    tiles = active_tiles(mask, length, keys, block, block)
    area = _tile_area(tiles.select(tiles.every), length, keys, block, block)
    partial = tiles.select(~tiles.every)
    return int(area.sum()) + sum(
        int(allowed.sum()) for _, allowed in _evaluated_pairs(mask, partial, length, keys, block, block)
    )


def _tile_area(tiles: BlockMask, length: int, keys: int, block: int, key_block: int) -> np.ndarray:
    """Number of pairs in each tile, int `[tiles]`; less where blocks end early."""
    height = np.minimum(block, length - tiles.rows * block)
    width = np.minimum(key_block, keys - tiles.columns * key_block)
    return height * width


def _evaluated_pairs(
    mask: Mask, tiles: BlockMask, length: int, keys: int, block: int, key_block: int
) -> Iterator[tuple[slice, Any]]:
    """Yields (slice of the tiles, bool `[tiles of the slice, block, key_block]`): the pairs that the mask allows.

    Each slice has about `cost_model.MAX_EVALUATED_PAIRS` pairs. Pairs beyond T x S are False.
    """
    step = max(cost_model.MAX_EVALUATED_PAIRS // (block * key_block), 1)
    for start in range(0, tiles.rows.size, step):
        part = slice(start, start + step)
        q = tiles.rows[part, None, None] * block + np.arange(block)[None, :, None]
        k = tiles.columns[part, None, None] * key_block + np.arange(key_block)[None, None, :]
        # Positions in the padding are replaced by the last position: `at` may look positions up in a table of T x S.
        allowed = mask.at(np.minimum(q, length - 1), np.minimum(k, keys - 1))
        yield part, allowed & (q < length) & (k < keys)


def _searched(mask: Mask, tiles: BlockMask, length: int, keys: int, block: int, key_block: int) -> BlockMask:
    """The tiles that allow a pair, and exactly which allow every pair, by evaluating `at` for the undecided ones."""
    some_pair, every_pair = tiles.every.copy(), tiles.every.copy()
    undecided = np.flatnonzero(~tiles.every)
    searched = tiles.select(undecided)
    area = _tile_area(searched, length, keys, block, key_block)
    for part, allowed in _evaluated_pairs(mask, searched, length, keys, block, key_block):
        count = allowed.sum(axis=(1, 2))
        some_pair[undecided[part]], every_pair[undecided[part]] = count > 0, count == area[part]
    return dataclasses.replace(tiles, every=every_pair).select(some_pair)
