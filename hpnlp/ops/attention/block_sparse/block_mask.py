"""Which blocks of queries meet which blocks of keys, found by interval arithmetic and never through a T x T array."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hpnlp.ops.attention.masks.base import Mask, PerHead
from hpnlp.types import InputError

# How many pairs of a query and a key are asked for at a time, where a mask has to be asked element by element.
SLICE = 1 << 22


@dataclasses.dataclass(frozen=True)
class BlockMask:
    """The pairs of a query block and a key block that a mask does not rule out, by row and then by column.

    rows, columns: int64 [pairs]. every: bool [pairs], the mask allows all of the tile.
    """

    rows: np.ndarray
    columns: np.ndarray
    every: np.ndarray


def live(mask: Mask, length: int, keys: int, block: int, key_block: int, rows: np.ndarray | None = None) -> BlockMask:
    """The live tiles of a T x S mask, in all rows of blocks or in `rows`.

    Every row's keys are halved until a part is ruled out, wholly allowed, or one block: O(rows x live spans x
    log(S / key_block)) calls of `tile`, made for all rows at once.
    """
    row = np.arange(-(-length // block)) if rows is None else np.asarray(rows)
    last = -(-keys // key_block)
    size = 1 << max(last - 1, 0).bit_length()
    start = np.zeros_like(row)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray, int]] = []
    while row.size and last:
        q0, k0 = row * block, start * key_block
        q1, k1 = np.minimum(q0 + block, length) - 1, np.minimum(k0 + size * key_block, keys) - 1
        some, every = ask_tile(mask, row.shape, q0, q1, k0, k1)
        ends = some & (every | (size == 1))
        found.append((row[ends], start[ends], every[ends], size))
        split = some & ~ends
        size //= 2
        row, start = np.repeat(row[split], 2), (start[split][:, None] + np.array([0, size])).reshape(-1)
        row, start = row[start < last], start[start < last]
    spans = [np.repeat(x, size) for x, _, _, size in found], [np.repeat(x, size) for _, _, x, size in found]
    columns = [(x[:, None] + np.arange(size)).reshape(-1) for _, x, _, size in found]
    rows_, every_, columns_ = (np.concatenate([*x, np.zeros(0, int)]) for x in (*spans, columns))
    order = np.lexsort((columns_, rows_))
    order = order[columns_[order] < last]
    tiles = BlockMask(rows_[order], columns_[order], every_[order].astype(bool))
    return _searched(mask, tiles, length, keys, block, key_block) if mask.needs_search() else tiles


def ask_tile(mask: Mask, shape: tuple[int, ...], *bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(some, every), each of `shape`. Raises InputError where `tile` takes no arrays."""
    try:
        some, every = mask.tile(*bounds)
        return np.broadcast_to(some, shape), np.broadcast_to(every, shape)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{mask!r:.200}: `tile` did not answer for many tiles at once ({error}): it is asked with arrays, so write & and "
            "|, not `and` and `or`, and abs or numpy.minimum, not `min`"
        ) from error


def density(mask: Mask | PerHead, length: int, keys: int | None = None) -> float:
    """Share of the T x S pairs that a mask allows, with S = T where `keys` is None; the mean over heads for PerHead.

    Cost: evaluates `at` for the pairs of partly allowed blocks.
    """
    keys, heads = length if keys is None else keys, mask.heads or 1
    counts = [len(of) * pairs(each, length, keys) for each, of in mask.by_head(heads).items()]
    return sum(counts) / max(heads * length * keys, 1)


def pairs(mask: Mask, length: int, keys: int) -> int:
    """How many of the T x S pairs a mask allows; elements are asked for in partly allowed tiles only."""
    block = 64
    tiles = live(mask, length, keys, block, block)
    height = np.minimum((tiles.rows + 1) * block, length) - tiles.rows * block
    width = np.minimum((tiles.columns + 1) * block, keys) - tiles.columns * block
    whole = int((height * width)[tiles.every].sum())
    partly = BlockMask(*(x[~tiles.every] for x in (tiles.rows, tiles.columns, tiles.every)))
    return whole + sum(int(see.sum()) for _, see in _elements(mask, partly, length, keys, block, block))


def _elements(mask: Mask, tiles: BlockMask, length: int, keys: int, block: int, key_block: int) -> Any:
    """(slice, bool [tiles, block, key_block]) of some tiles after others: what the mask allows, inside T x S."""
    step = max(SLICE // (block * key_block), 1)
    for start in range(0, tiles.rows.size, step):
        part = slice(start, start + step)
        q = tiles.rows[part, None, None] * block + np.arange(block)[None, :, None]
        k = tiles.columns[part, None, None] * key_block + np.arange(key_block)[None, None, :]
        # What pads the last blocks is asked for at the last position: a function may look it up in a table of T x S.
        see = mask.at(np.minimum(q, length - 1), np.minimum(k, keys - 1))
        yield part, see & (q < length) & (k < keys)


def _searched(mask: Mask, tiles: BlockMask, length: int, keys: int, block: int, key_block: int) -> BlockMask:
    """The tiles that really hold a pair, asked for element by element."""
    some, every = tiles.every.copy(), tiles.every.copy()
    unsure = np.flatnonzero(~tiles.every)
    asked = BlockMask(*(x[unsure] for x in (tiles.rows, tiles.columns, tiles.every)))
    for part, see in _elements(mask, asked, length, keys, block, key_block):
        rows, columns = asked.rows[part], asked.columns[part]
        size = np.minimum(block, length - rows * block) * np.minimum(key_block, keys - columns * key_block)
        count = see.sum(axis=(1, 2))
        some[unsure[part]], every[unsure[part]] = count > 0, count == size
    return BlockMask(tiles.rows[some], tiles.columns[some], every[some])
