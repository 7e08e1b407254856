"""Schedules of the block-sparse executor: in which steps active tiles are computed."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hpnlp.ops.attention.block_sparse.block_mask import BlockMask
from hpnlp.ops.attention.block_sparse.decomposition import cost_model


class TileState(enum.IntEnum):
    """Work that is needed to hide the pairs of a step that the mask does not allow. Run-time operands may hide more."""

    ALL_ALLOWED = 0  # no pair is hidden: every key block is used, and every query sees every key
    EVALUATE_MASK = 1  # the mask is evaluated for each pair
    HIDE_PADDING = 2  # only the keys of unused entries (key block -1) are hidden


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileGroup:
    """Steps of equal shape, which one loop of the executor computes one after the other.

    A step computes R consecutive query blocks at once. Each query block reads w key blocks of its own, which need not be
    consecutive. BlockSchedule has an example.

    Attributes:
      first: int32 `[steps]`, the first query block of each step; the step computes blocks first to first + R - 1.
      keys: int32 `[steps, R, w]`, the key blocks that each query block reads, in any order; -1 marks an unused entry. A query
        block reads a key block in at most one step of a schedule.
      state: int8 `[steps]`, the TileState of each step; bool or another integer type in schedules made at run time.
    """

    first: Any
    keys: Any
    state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockSchedule:
    """The steps that compute the active tiles of a mask. The pairs of all other tiles are hidden.

    The arrays are numpy where the schedule follows from a mask. Data (hashing, routing) may also determine a schedule at run
    time: its arrays are then jax arrays of static shapes.

    Example: `Causal() & Window(3)` over 8 tokens in blocks of 2 queries and 2 keys. Query 4 sees keys 1 to 4, query 5 sees keys
    2 to 5. Nine of the 16 tiles are active, and three of them allow every pair:

        query block   key blocks   every
        0             0            False
        1             0, 1         True, False
        2             0, 1, 2      False, True, False
        3             1, 2, 3      False, True, False

    With one head, the four query blocks are far less work than a step should have, so that one step computes all (R = 4,
    w = 3). Query blocks 0 and 1 have unused entries. The mask is evaluated, because some tiles are partly allowed:

        TileGroup(first=[0], keys=[[[0, -1, -1], [0, 1, -1], [0, 1, 2], [1, 2, 3]]], state=[EVALUATE_MASK])

    With very many heads, every query block is a step of its own (R = 1):

        TileGroup(first=[0, 1, 2, 3], keys=[[[0, -1, -1]], [[0, 1, -1]], [[0, 1, 2]], [[1, 2, 3]]],
                  state=[EVALUATE_MASK, EVALUATE_MASK, EVALUATE_MASK, EVALUATE_MASK])

    Attributes:
      groups: The steps, grouped by shape.
      block: Queries in a block.
      key_block: Keys in a block.
      once: True only if every query block is in exactly one step. Its result is then final after the step, and no running
        sums are kept.
    """

    groups: tuple[TileGroup, ...]
    block: int = dataclasses.field(metadata={"static": True})
    key_block: int = dataclasses.field(metadata={"static": True})
    once: bool = dataclasses.field(default=False, metadata={"static": True})


def make_schedule(tiles: BlockMask, length: int, block: int, key_block: int, heads: int) -> BlockSchedule:
    """The cheapest of a few schedules that compute `tiles`, by the cost model.

    Query blocks with many active tiles take part in several steps, so that they do not widen the steps of the others.

    Args:
      tiles: The active tiles.
      length: Number of queries, T.
      block: Queries in a block.
      key_block: Keys in a block.
      heads: Number of (batch, head) pairs that run together, at most.

    Returns:
      The schedule, with numpy arrays.
    """
    counts = np.bincount(tiles.rows, minlength=-(-length // block))
    max_width = max(cost_model.MAX_STEP_KEYS // key_block, 1)
    widest = max(min(max_width, int(counts.max(initial=1))), 1)
    # Candidates have the widths that read the fewest keys or one width for all, and loops that are split by evaluation or not.
    # One width and loops that are not split read more, but may leave longer runs of query blocks, which share steps.
    candidates = [
        _tile_groups(tiles, counts, widths, block, key_block, heads, split)
        for widths in dict.fromkeys((_choose_widths(counts, max_width, key_block), (widest, widest)))
        for split in (True, False)
    ]
    most_tiles = cost_model.MAX_SCORES_RATIO * min(map(_computed_tiles, candidates))
    candidates = [groups for groups in candidates if _computed_tiles(groups) <= most_tiles]
    groups = min(candidates, key=lambda groups: _cost(groups, heads * block * key_block))
    return BlockSchedule(tuple(groups), block, key_block, _computes_each_query_block_once(groups, counts.size))


def estimate_keys_read(counts: np.ndarray, key_block: int) -> np.ndarray:
    """Estimate of the keys that each query block of a schedule reads, including padding and overhead per step.

    Args:
      counts: int `[blocks]`, the number of active tiles of each query block.
      key_block: Keys in a block.

    Returns:
      int `[blocks]`.
    """
    widths = _choose_widths(counts, max(cost_model.MAX_STEP_KEYS // key_block, 1), key_block)
    return _keys_read(counts, widths, key_block)


def _computed_tiles(groups: Sequence[TileGroup]) -> int:
    """Number of tiles that the steps compute, unused entries included."""
    return sum(group.keys.size for group in groups)


def _cost(groups: Sequence[TileGroup], tile_scores: int) -> float:
    """Cost of all steps, where a tile has `tile_scores` scores in all heads together."""
    costs = (
        cost_model.tile_group_cost(
            group.state.size,
            int(np.count_nonzero(group.state == TileState.EVALUATE_MASK)),
            tile_scores * group.keys[0].size,
        )
        for group in groups
    )
    return sum(costs, 0.0)


def _computes_each_query_block_once(groups: Sequence[TileGroup], query_blocks: int) -> bool:
    """Whether every query block is in exactly one step."""
    blocks = [(group.first[:, None] + np.arange(group.keys.shape[1])).reshape(-1) for group in groups]
    return bool((np.bincount(np.concatenate([*blocks, np.zeros(0, int)]), minlength=query_blocks) == 1).all())


# Widths: the number of key blocks that a query block reads in one step. A schedule has steps of one width or of two, wide and
# narrow. `counts`, int [blocks], is the number of active tiles of each query block throughout.


def _choose_widths(counts: np.ndarray, max_width: int, key_block: int) -> tuple[int, int]:
    """The widths (wide, narrow) with which the fewest keys are read; equal unless two widths save enough."""
    values, repeats = np.unique(counts[counts > 0], return_counts=True)
    if not values.size:
        return 1, 1

    def keys_read(wide: int, narrow: int) -> int:
        return int((repeats * _keys_read(values, (wide, narrow), key_block)).sum())

    max_width = min(max_width, int(values[-1]))
    single, width = min((keys_read(width, width), width) for width in range(1, max_width + 1))
    pairs = ((wide, narrow) for wide in range(2, max_width + 1) for narrow in range(1, wide))
    double, *widths = min(((keys_read(*pair), *pair) for pair in pairs), default=(single, 1, 1))
    return (widths[0], widths[1]) if double < cost_model.MAX_TWO_WIDTHS_RATIO * single else (width, width)


def _tiles_in_wide_steps(counts: np.ndarray, widths: tuple[int, int], key_block: int) -> np.ndarray:
    """Number of active tiles of each query block that go to wide steps, int `[blocks]`.

    Wide steps take as many tiles as fill them, and the remainder where one more wide step costs no more than narrow ones.
    """
    wide, narrow = widths
    remainder = counts % wide
    narrow_cost = -(-remainder // narrow) * cost_model.step_keys(narrow, key_block)
    in_narrow = narrow_cost < cost_model.step_keys(wide, key_block)
    return counts - np.where(in_narrow & (narrow < wide), remainder, 0)


def _keys_read(counts: np.ndarray, widths: tuple[int, int], key_block: int) -> np.ndarray:
    """Keys that each query block reads in all of its steps, including padding and overhead, int `[blocks]`."""
    wide, narrow = widths
    in_wide = _tiles_in_wide_steps(counts, widths, key_block)
    wide_steps, narrow_steps = -(-in_wide // wide), -(-(counts - in_wide) // narrow)
    return wide_steps * cost_model.step_keys(wide, key_block) + narrow_steps * cost_model.step_keys(narrow, key_block)


# Construction of tile groups.


def _tile_groups(
    tiles: BlockMask,
    counts: np.ndarray,
    widths: tuple[int, int],
    block: int,
    key_block: int,
    heads: int,
    split: bool,
) -> list[TileGroup]:
    """Groups of steps of the given widths. split: steps that do not evaluate the mask may have loops of their own."""
    wide, narrow = widths
    in_wide = _tiles_in_wide_steps(counts, widths, key_block)
    # The number of each tile within its query block, and among the tiles of the same width there.
    rank = np.arange(tiles.rows.size) - (np.cumsum(counts) - counts)[tiles.rows]
    is_wide = rank < in_wide[tiles.rows]
    rank = np.where(is_wide, rank, rank - in_wide[tiles.rows])
    groups: list[TileGroup] = []
    for width, chosen in ((wide, is_wide), (narrow, ~is_wide)):
        if chosen.any():
            steps = _single_block_steps(tiles.select(chosen), rank[chosen], width, counts.size)
            run = cost_model.query_blocks_per_step(heads * block * width * key_block)
            for part in _split_by_evaluation(*steps) if split else [steps]:
                groups += _joined_into_runs(*part, run)
    return groups


# Steps of one query block each: (query block int [n], key blocks int32 [n, w], TileState int8 [n]).
_Steps = tuple[np.ndarray, np.ndarray, np.ndarray]


def _single_block_steps(tiles: BlockMask, ranks: np.ndarray, width: int, query_blocks: int) -> _Steps:
    """Steps of one query block with up to `width` of its tiles; `ranks` numbers the tiles of each query block.

    The first steps of all query blocks come first, then the second steps, and so on, so that consecutive query blocks stand
    together and can be joined into runs.
    """
    numbers, step = np.unique(ranks // width * query_blocks + tiles.rows, return_inverse=True)
    keys = np.full((numbers.size, width), -1, np.int32)
    keys[step, ranks % width] = tiles.columns
    evaluate = np.bincount(step, ~tiles.every, numbers.size) > 0
    padded = np.where((keys < 0).any(axis=1), TileState.HIDE_PADDING, TileState.ALL_ALLOWED)
    return numbers % query_blocks, keys, np.where(evaluate, TileState.EVALUATE_MASK, padded).astype(np.int8)


def _split_by_evaluation(rows: np.ndarray, keys: np.ndarray, states: np.ndarray) -> list[_Steps]:
    """Divides steps into those that evaluate the mask and the others; keeps all together where a second loop does not pay."""
    evaluate = states == TileState.EVALUATE_MASK
    if 2 * np.count_nonzero(evaluate) >= evaluate.size or evaluate.size < cost_model.MIN_STEPS_TO_SPLIT:
        return [(rows, keys, states)]
    return [(rows[part], keys[part], states[part]) for part in (~evaluate, evaluate) if part.any()]


def _joined_into_runs(rows: np.ndarray, keys: np.ndarray, states: np.ndarray, run: int) -> list[TileGroup]:
    """Steps of `run` consecutive query blocks each (fewer if there are not as many), and single steps for the remainder."""
    run = min(run, 1 << (rows.size.bit_length() - 1))
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    joined, single = [], []
    for consecutive in np.split(np.arange(rows.size), breaks):
        full = consecutive.size // run * run
        joined.append(consecutive[:full])
        single.append(consecutive[full:])
    groups = []
    for steps, size in ((np.concatenate(joined), run), (np.concatenate(single), 1)):
        if steps.size:
            first = rows[steps].reshape(-1, size)[:, 0].astype(np.int32)
            state = _joint_state(states[steps].reshape(-1, size))
            groups.append(TileGroup(first, keys[steps].reshape(-1, size, keys.shape[1]), state))
    return groups


def _joint_state(states: np.ndarray) -> np.ndarray:
    """The TileState of steps that each join R steps, int8 `[n]`, from the states `[n, R]` of these."""
    evaluate = (states == TileState.EVALUATE_MASK).any(axis=1)
    return np.where(evaluate, TileState.EVALUATE_MASK, states.max(axis=1)).astype(np.int8)
