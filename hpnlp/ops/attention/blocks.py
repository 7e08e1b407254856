"""Which blocks of queries meet which blocks of keys, found by interval arithmetic and never through a T x T array."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from hpnlp.ops.attention.algebra import Mask, PerHead
from hpnlp.types import InputError

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
    tiles = Live(rows_[order], columns_[order], every_[order].astype(bool))
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
    partly = Live(*(x[~tiles.every] for x in (tiles.rows, tiles.columns, tiles.every)))
    return whole + sum(int(see.sum()) for _, see in _elements(mask, partly, length, keys, block, block))


def _elements(mask: Mask, tiles: Live, length: int, keys: int, block: int, key_block: int) -> Any:
    """(slice, bool [tiles, block, key_block]) of some tiles after others: what the mask allows, inside T x S."""
    step = max(SLICE // (block * key_block), 1)
    for start in range(0, tiles.rows.size, step):
        part = slice(start, start + step)
        q = tiles.rows[part, None, None] * block + np.arange(block)[None, :, None]
        k = tiles.columns[part, None, None] * key_block + np.arange(key_block)[None, None, :]
        # What pads the last blocks is asked for at the last position: a function may look it up in a table of T x S.
        see = mask.at(np.minimum(q, length - 1), np.minimum(k, keys - 1))
        yield part, see & (q < length) & (k < keys)


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
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
class Blocks:
    """A block plan: which blocks of `key_block` keys each block of `block` queries visits; what no visit holds is not seen.

    The arrays are numpy where a mask decided, and may be made at run time, with static shapes, where data do. once: every
    query block is in exactly one visit (a shortcut).
    """

    visits: tuple[Visits, ...]
    block: int = dataclasses.field(metadata={"static": True})
    key_block: int = dataclasses.field(metadata={"static": True})
    once: bool = dataclasses.field(default=False, metadata={"static": True})


# A tile of so many scores, in all heads together, fills the caches and keeps all cores busy.
TILE = 1 << 20
# At most so many numbers of the queries are copied into blocks at a time, as heads allow: of long sequences, copies of all
# heads would double the memory.
LAID = 1 << 23
# What a visit costs beside its keys, in keys.
OVERHEAD = 48
# At most so many keys a visit.
KEYS = 1024


# What a visit of any size costs, in scores, and what the test of a score costs beside the score.
VISIT, TEST = 1 << 17, 0.08


def plan(tiles: Live, length: int, block: int, key_block: int, heads: int) -> Blocks:
    """The visits that run `tiles`; heads: how many (batch, head) run at a time, at most.

    Rows of blocks with many live tiles come several times and do not widen the others' visits.
    """
    rows = -(-length // block)
    counts = np.bincount(tiles.rows, minlength=rows)
    most = max(KEYS // key_block, 1)
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

    def cost(visits: list[Visits]) -> float:
        size = heads * block * key_block
        lines = ((v.tested.size, np.count_nonzero(v.tested == 1), size * v.keys[0].size) for v in visits)
        return sum((n * (VISIT + scores) + TEST * tested * scores for n, tested, scores in lines), 0.0)

    visits = min(found, key=cost)
    seen = [(v.first[:, None] + np.arange(v.keys.shape[1])).reshape(-1) for v in visits]
    once = bool((np.bincount(np.concatenate([*seen, np.zeros(0, int)]), minlength=rows) == 1).all())
    return Blocks(tuple(visits), block, key_block, once)


def _visits(
    tiles: Live, rows: int, block: int, key_block: int, heads: int, wide: int, narrow: int, apart: bool
) -> list[Visits]:
    """Visits of up to two widths. apart: whether tiles that need no test may have visits of their own, spared its pass."""
    counts = np.bincount(tiles.rows, minlength=rows)
    starts = np.cumsum(counts) - counts
    place = np.arange(tiles.rows.size) - starts[tiles.rows]
    in_wide = place < _wide(counts, wide, narrow, key_block)[tiles.rows]
    visits: list[Visits] = []
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
        run = 1 << max((TILE // max(heads * block * width * key_block, 1)).bit_length() - 1, 0)
        split = apart and 2 * np.count_nonzero(asked) < asked.size >= 16
        for some in (np.flatnonzero(~asked), np.flatnonzero(asked)) if split else (np.arange(asked.size),):
            visits += _runs((lines % rows)[some], keys[some], tested[some], run) if some.size else []
    return visits


def _wide(counts: np.ndarray, wide: int, narrow: int, key_block: int) -> np.ndarray:
    """How many of each row's live tiles go to visits of `wide`: full ones, and the rest where that is cheaper."""
    rest = counts % wide
    in_narrow = -(-rest // narrow) * (narrow * key_block + OVERHEAD) < wide * key_block + OVERHEAD
    return counts - np.where(in_narrow & (narrow < wide), rest, 0)


def _keys(counts: np.ndarray, wide: int, narrow: int, key_block: int) -> np.ndarray:
    """The keys of each row's visits, with what is beside them."""
    first = _wide(counts, wide, narrow, key_block)
    visits = (-(-first // wide), wide), (-(-(counts - first) // narrow), narrow)
    return sum((n * (width * key_block + OVERHEAD) for n, width in visits), np.zeros_like(counts))


def visit_keys(counts: np.ndarray, key_block: int) -> np.ndarray:
    """An estimate of a plan: how many keys rows of blocks with so many live tiles each visit, with what is beside them."""
    return _keys(counts, *_widths(counts, max(KEYS // key_block, 1), key_block), key_block)


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


def _runs(row: np.ndarray, keys: np.ndarray, tested: np.ndarray, run: int) -> list[Visits]:
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
                Visits(first, grouped, np.where((each == 1).any(axis=1), 1, each.max(axis=1)).astype(np.int8))
            )
    return visits
