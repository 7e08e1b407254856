"""Schedules compute every active tile once, and the example of their documentation is what is computed."""

import random

import numpy as np
import pytest

from hpnlp.ops.attention import Causal, Full, Window
from hpnlp.ops.attention.block_sparse.block_mask import active_tiles
from hpnlp.ops.attention.block_sparse.schedule import TileState, make_schedule
from tests.ops.attention.block_sparse.test_block_mask import draw_tree

EXAMPLE_KEYS = [[0, -1, -1], [0, 1, -1], [0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize(("heads", "steps"), [(1, 1), (2**18, 4)])
def test_example_of_the_documentation(heads, steps):
    tiles = active_tiles(Causal() & Window(3), 8, 8, 2, 2)
    assert tiles.rows.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3] and tiles.columns.tolist() == [0, 0, 1, 0, 1, 2, 1, 2, 3]
    assert np.flatnonzero(tiles.every).tolist() == [1, 4, 7]
    schedule = make_schedule(tiles, 8, 2, 2, heads)
    (group,) = schedule.groups
    assert group.first.tolist() == [[0], [0, 1, 2, 3]][steps > 1]
    assert group.keys.tolist() == [[EXAMPLE_KEYS], [[keys] for keys in EXAMPLE_KEYS]][steps > 1]
    assert group.state.tolist() == [TileState.EVALUATE_MASK] * steps and schedule.once


def test_steps_need_no_evaluation_where_all_is_allowed():
    full = make_schedule(active_tiles(Full(), 64, 64, 8, 8), 64, 8, 8, 1)
    assert [group.state.tolist() for group in full.groups] == [[TileState.ALL_ALLOWED]] and full.once
    diagonal = active_tiles(Causal(), 64, 64, 8, 8)
    diagonal = diagonal.select(diagonal.every)
    states = {state for group in make_schedule(diagonal, 64, 8, 8, 1 << 20).groups for state in group.state.tolist()}
    assert TileState.EVALUATE_MASK not in states and TileState.HIDE_PADDING in states


def test_each_active_tile_is_computed_once_and_evaluated_where_needed():
    rng = random.Random(0)
    for _ in range(200):
        mask, length, keys = draw_tree(rng, 3), rng.randint(1, 90), rng.randint(1, 90)
        block, key_block = rng.randint(1, 9), rng.randint(1, 9)
        tiles = active_tiles(mask, length, keys, block, key_block)
        schedule = make_schedule(tiles, length, block, key_block, rng.choice([1, 64, 1 << 20]))
        computed = []
        for group in schedule.groups:
            rows = group.first[:, None, None] + np.arange(group.keys.shape[1])[None, :, None]
            assert rows.max() < -(-length // block)
            places = np.stack(np.broadcast_arrays(rows, group.keys, group.state[:, None, None]), axis=-1).reshape(-1, 3)
            computed += places[places[:, 1] >= 0].tolist()
            assert (group.state != TileState.ALL_ALLOWED)[(group.keys < 0).any(axis=(1, 2))].all()
        assert sorted(tile[:2] for tile in computed) == list(map(list, zip(tiles.rows, tiles.columns, strict=True)))
        every = dict(zip(zip(tiles.rows.tolist(), tiles.columns.tolist(), strict=True), tiles.every, strict=True))
        assert all(state == TileState.EVALUATE_MASK or every[row, column] for row, column, state in computed)
