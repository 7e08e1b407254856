"""Schedules of the block-sparse executor: in which groups and in which order active tiles are computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from hpnlp.ops.attention.block_sparse import cost_model
from hpnlp.ops.attention.block_sparse.block_mask import BlockMask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileGroup:
    """Meetings of a run of R consecutive query blocks with w key blocks each, to be computed one after the other.

    first: int32 [n], the first query block of the run. keys: int32 [n, R, w], key blocks in any order, -1 for none. A query
    block meets a key block in one visit at most. tested: integer or bool [n]. 0: all of it is
    allowed, and nothing lies beyond the sequences' ends; 1: the mask has to be asked for each element; 2: as 0, but where
    keys are -1.
    """

    first: Any
    keys: Any
    tested: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockSchedule:
    """A block plan: which blocks of `key_block` keys each block of `block` queries visits; what no visit holds is not seen.

    The arrays are numpy where a mask decided, and may be made at run time, with static shapes, where data do. once: every
    query block is in exactly one visit (a shortcut).
    """

    visits: tuple[TileGroup, ...]
    block: int = dataclasses.field(metadata={"static": True})
    key_block: int = dataclasses.field(metadata={"static": True})
    once: bool = dataclasses.field(default=False, metadata={"static": True})


def plan(tiles: BlockMask, length: int, block: int, key_block: int, heads: int) -> BlockSchedule:
    """The visits that run `tiles`; heads: how many (batch, head) run at a time, at most.

    Rows of blocks with many live tiles come several times and do not widen the others' visits.
    """
    rows = -(-length // block)
    counts = np.bincount(tiles.rows, minlength=rows)
    most = max(cost_model.KEYS // key_block, 1)
    # One width for all may leave more rows side by side, which then run together; so may visits of tested and other tiles. It
    # may have a third more to compute.
    widest = max(min(most, int(counts.max(initial=1))), 1)
    found = [
        _visits(tiles, rows, block, key_block, heads, wide, narrow, apart)
        for wide, narrow in dict.fromkeys((_widths(counts, most, key_block), (widest, widest)))
        for apart in (True, False)
    ]
    least = min(sum(v.keys.size for v in visits) for visits in found)
    found = [visits for visits in found if 3 * sum(v.keys.size for v in visits) <= 4 * least]

    def cost(visits: list[TileGroup]) -> float:
        size = heads * block * key_block
        lines = ((v.tested.size, np.count_nonzero(v.tested == 1), size * v.keys[0].size) for v in visits)
        return sum(
            (n * (cost_model.VISIT + scores) + cost_model.TEST * tested * scores for n, tested, scores in lines), 0.0
        )

    visits = min(found, key=cost)
    seen = [(v.first[:, None] + np.arange(v.keys.shape[1])).reshape(-1) for v in visits]
    once = bool((np.bincount(np.concatenate([*seen, np.zeros(0, int)]), minlength=rows) == 1).all())
    return BlockSchedule(tuple(visits), block, key_block, once)


def _visits(
    tiles: BlockMask, rows: int, block: int, key_block: int, heads: int, wide: int, narrow: int, apart: bool
) -> list[TileGroup]:
    """Visits of up to two widths. apart: whether tiles that need no test may have visits of their own, spared its pass."""
    counts = np.bincount(tiles.rows, minlength=rows)
    starts = np.cumsum(counts) - counts
    place = np.arange(tiles.rows.size) - starts[tiles.rows]
    in_wide = place < _wide(counts, wide, narrow, key_block)[tiles.rows]
    visits: list[TileGroup] = []
    for width in dict.fromkeys((wide, narrow)):
        chosen = in_wide if width == wide else ~in_wide
        if not chosen.any():
            continue
        row, at = tiles.rows[chosen], place[chosen]
        at = at if width == wide else at - _wide(counts, wide, narrow, key_block)[row]
        # One line for each (n-th visit of a row, row), so that runs of rows stand together.
        lines, line = np.unique(at // width * rows + row, return_inverse=True)
        keys = np.full((lines.size, width), -1, np.int32)
        keys[line, at % width] = tiles.columns[chosen]
        asked = np.bincount(line, ~tiles.every[chosen], lines.size) > 0
        tested = np.where(asked, 1, np.where((keys < 0).any(axis=1), 2, 0)).astype(np.int8)
        run = 1 << max((cost_model.TILE // max(heads * block * width * key_block, 1)).bit_length() - 1, 0)
        split = apart and 2 * np.count_nonzero(asked) < asked.size >= 16
        for some in (np.flatnonzero(~asked), np.flatnonzero(asked)) if split else (np.arange(asked.size),):
            visits += _runs((lines % rows)[some], keys[some], tested[some], run) if some.size else []
    return visits


def _wide(counts: np.ndarray, wide: int, narrow: int, key_block: int) -> np.ndarray:
    """How many of each row's live tiles go to visits of `wide`: full ones, and the rest where that is cheaper."""
    rest = counts % wide
    in_narrow = -(-rest // narrow) * (narrow * key_block + cost_model.OVERHEAD) < wide * key_block + cost_model.OVERHEAD
    return counts - np.where(in_narrow & (narrow < wide), rest, 0)


def _keys(counts: np.ndarray, wide: int, narrow: int, key_block: int) -> np.ndarray:
    """The keys of each row's visits, with what is beside them."""
    first = _wide(counts, wide, narrow, key_block)
    visits = (-(-first // wide), wide), (-(-(counts - first) // narrow), narrow)
    return sum((n * (width * key_block + cost_model.OVERHEAD) for n, width in visits), np.zeros_like(counts))


def visit_keys(counts: np.ndarray, key_block: int) -> np.ndarray:
    """An estimate of a plan: how many keys rows of blocks with so many live tiles each visit, with what is beside them."""
    return _keys(counts, *_widths(counts, max(cost_model.KEYS // key_block, 1), key_block), key_block)


def _widths(counts: np.ndarray, most: int, key_block: int) -> tuple[int, int]:
    """The widths of visits, in key blocks: one for all, or two where that saves a thirtieth."""
    values, often = np.unique(counts[counts > 0], return_counts=True)
    if not values.size:
        return 1, 1

    def cost(wide: int, narrow: int) -> int:
        return int((often * _keys(values, wide, narrow, key_block)).sum())

    most = min(most, int(values[-1]))
    single = min((cost(w, w), w) for w in range(1, most + 1))
    double = min(((cost(w, n), w, n) for w in range(2, most + 1) for n in range(1, w)), default=(single[0], 1, 1))
    return double[1:] if double[0] < 0.97 * single[0] else (single[1], single[1])


def _runs(row: np.ndarray, keys: np.ndarray, tested: np.ndarray, run: int) -> list[TileGroup]:
    """Lines of one query block each, put together in runs of `run` consecutive ones; what is left over, one by one."""
    run = min(run, 1 << (row.size.bit_length() - 1))
    breaks = np.flatnonzero(np.diff(row) != 1) + 1
    together, alone = [], []
    for part in np.split(np.arange(row.size), breaks):
        whole = part.size // run * run
        together.append(part[:whole])
        alone.append(part[whole:])
    visits = []
    for lines, size in ((np.concatenate(together), run), (np.concatenate(alone), 1)):
        if lines.size:
            first = row[lines].reshape(-1, size)[:, 0].astype(np.int32)
            grouped = keys[lines].reshape(-1, size, keys.shape[1])
            each = tested[lines].reshape(-1, size)
            visits.append(
                TileGroup(first, grouped, np.where((each == 1).any(axis=1), 1, each.max(axis=1)).astype(np.int8))
            )
    return visits
