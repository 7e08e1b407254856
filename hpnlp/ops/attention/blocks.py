"""Which blocks of queries meet which blocks of keys, found by interval arithmetic and never through a T x T array."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hpnlp.ops.attention.algebra import Mask
from hpnlp.ops.attention.mask import Where

# How many pairs of a query and a key are asked for at a time, where a mask has to be asked element by element.
SLICE = 1 << 22


@dataclasses.dataclass(frozen=True)
class Live:
    """The pairs of a query block and a key block that a mask does not rule out, by row and then by column.

    rows, columns: int64 [pairs]. every: bool [pairs], the mask allows all of the tile.
    """

    rows: np.ndarray
    columns: np.ndarray
    every: np.ndarray


def live(mask: Mask, length: int, keys: int, block: int, key_block: int, rows: np.ndarray | None = None) -> Live:
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
        some, every = (np.broadcast_to(x, row.shape) for x in mask.tile(q0, q1, k0, k1))
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
    tiles = Live(rows_[order], columns_[order], every_[order].astype(bool))
    return _searched(mask, tiles, length, keys, block, key_block) if _unknown(mask) else tiles


def pairs(mask: Mask, length: int, keys: int) -> int:
    """How many of the T x S pairs a mask allows; elements are asked for in partly allowed tiles only."""
    block = 64
    tiles = live(mask, length, keys, block, block)
    height = np.minimum((tiles.rows + 1) * block, length) - tiles.rows * block
    width = np.minimum((tiles.columns + 1) * block, keys) - tiles.columns * block
    whole = int((height * width)[tiles.every].sum())
    partly = Live(*(x[~tiles.every] for x in (tiles.rows, tiles.columns, tiles.every)))
    return whole + sum(int(see.sum()) for _, see in _elements(mask, partly, length, keys, block, block))


def _unknown(mask: Any) -> bool:
    """Whether there is a part of the mask that only elements tell about."""
    parts = [getattr(mask, field.name) for field in dataclasses.fields(mask)]
    return isinstance(mask, Where) or any(_unknown(part) for part in parts if isinstance(part, Mask))


def _elements(mask: Mask, tiles: Live, length: int, keys: int, block: int, key_block: int) -> Any:
    """(slice, bool [tiles, block, key_block]) of some tiles after others: what the mask allows, inside T x S."""
    step = max(SLICE // (block * key_block), 1)
    for start in range(0, tiles.rows.size, step):
        part = slice(start, start + step)
        q = tiles.rows[part, None, None] * block + np.arange(block)[None, :, None]
        k = tiles.columns[part, None, None] * key_block + np.arange(key_block)[None, None, :]
        yield part, mask.at(q, k) & (q < length) & (k < keys)


def _searched(mask: Mask, tiles: Live, length: int, keys: int, block: int, key_block: int) -> Live:
    """The tiles that really hold a pair, asked for element by element."""
    some, every = tiles.every.copy(), tiles.every.copy()
    unsure = np.flatnonzero(~tiles.every)
    asked = Live(*(x[unsure] for x in (tiles.rows, tiles.columns, tiles.every)))
    for part, see in _elements(mask, asked, length, keys, block, key_block):
        rows, columns = asked.rows[part], asked.columns[part]
        size = np.minimum(block, length - rows * block) * np.minimum(key_block, keys - columns * key_block)
        count = see.sum(axis=(1, 2))
        some[unsure[part]], every[unsure[part]] = count > 0, count == size
    return Live(tiles.rows[some], tiles.columns[some], every[some])
