"""Active tiles against the dense mask, on random mask expressions."""

import random

import numpy as np
import pytest

from hpnlp.ops.attention import (
    Blockwise,
    Causal,
    Dilated,
    Fixed,
    Full,
    Global,
    GlobalAt,
    Prefix,
    RandomBlocks,
    Sinks,
    Strided,
    Where,
    Window,
)  # fmt: skip
from hpnlp.ops.attention.block_sparse.block_mask import active_tiles
from hpnlp.ops.attention.masks.table import MASKS

EXAMPLES = [mask for pattern in MASKS.values() for mask in pattern.examples if mask.heads is None]


def draw_tree(rng, depth):
    """A random mask expression, `depth` combinations deep at most: of elementary patterns, and of the table's examples."""
    if depth == 0 or rng.random() < 0.2:
        leaves = (
            Full, Causal, lambda: Window(rng.randint(0, 20), rng.randint(0, 20)),
            lambda: Dilated(rng.randint(0, 9), rng.randint(1, 7)), lambda: Blockwise(rng.randint(1, 20)),
            lambda: Strided(rng.randint(1, 12)), lambda: Fixed(12, rng.randint(0, 12)), lambda: Global(rng.randint(0, 9)),
            lambda: GlobalAt(tuple(rng.randint(0, 80) for _ in range(3))), lambda: Sinks(rng.randint(0, 9)),
            lambda: Prefix(rng.randint(0, 30)), lambda: Where(lambda i, j: (i * j) % 3 == 0),
            lambda: RandomBlocks(rng.randint(1, 9), rng.randint(0, 4), rng.randint(0, 99), rng.choice([None, 5, 20])),
            lambda: rng.choice(EXAMPLES),
        )  # fmt: skip
        return rng.choice(leaves)()
    kind = rng.randint(0, 4)
    if kind == 0:
        return ~draw_tree(rng, depth - 1)
    if kind == 1:
        return draw_tree(rng, depth - 1).shift(rng.randint(-9, 9))
    left, right = draw_tree(rng, depth - 1), draw_tree(rng, depth - 1)
    return left & right if kind == 2 else left | right


def check(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        mask, length, keys = draw_tree(rng, 4), rng.randint(1, 90), rng.randint(1, 90)
        block, key_block = rng.randint(1, 20), rng.randint(1, 20)
        dense, tiles = mask.to_dense(length, keys), active_tiles(mask, length, keys, block, key_block)
        covered = np.zeros_like(dense)
        for row, column, every in zip(tiles.rows, tiles.columns, tiles.every, strict=True):
            tile = np.s_[row * block : (row + 1) * block, column * key_block : (column + 1) * key_block]
            assert not covered[tile].any() and covered[tile].size and (dense[tile].all() or not every), mask
            covered[tile] = True
        assert not (dense & ~covered).any(), (mask, length, keys, block, key_block)
        np.testing.assert_array_equal(np.lexsort((tiles.columns, tiles.rows)), np.arange(tiles.rows.size))


def test_active_tiles_cover_all_allowed_pairs():
    check(0, 250)


@pytest.mark.slow
def test_active_tiles_cover_all_allowed_pairs_of_5000_expressions():
    check(1, 5000)


def twice(i, j):
    return i // 256 == 2 * (j // 256)


@pytest.mark.parametrize(
    ("mask", "tiles"),
    [
        (Causal(), 136),
        (Window(256), 16 + 2 * 15),
        (Causal() & Window(256), 16 + 15),
        (Window(256) | Global(16), 16 + 2 * 15 + 2 * 14),
        (Blockwise(512), 32),
        (RandomBlocks(256, 3, among=16), 48),
        (Window(0) & ~Window(0), 16),
        (Window(8) & Prefix(0), 0),
        (Where(twice), 8),
    ],
    ids=lambda value: type(value).__name__,
)
def test_number_of_active_tiles(mask, tiles):
    assert active_tiles(mask, 4096, 4096, 256, 256).rows.size == tiles


def test_active_tiles_of_a_million_tokens_are_found_without_the_others():
    tiles = active_tiles(Causal() & (Window(256) | Global(16)), 2**20, 2**20, 256, 256)
    assert tiles.rows.size == 4096 + 4095 + 4094


def test_drawn_blocks_are_distinct_and_uniform():
    """A chi-squared test of 16 cells, with 3 draws in each of 4096 rows."""
    mask = RandomBlocks(1, 3, seed=5, among=16)
    dense = mask.to_dense(4096, 20)
    assert (dense.sum(axis=1) == 3).all() and not dense[:, 16:].any()
    expected = 4096 * 3 / 16
    assert ((dense[:, :16].sum(axis=0) - expected) ** 2 / expected).sum() < 37.7  # 0.1 % of 15 degrees of freedom
    causal = RandomBlocks(2, 3).to_dense(64, 64)
    assert (causal.sum(axis=1) == np.minimum(np.arange(64) // 2 + 1, 3) * 2).all()
    assert not (causal & ~np.kron(np.tri(32), np.ones((2, 2))).astype(bool)).any()
    assert not np.array_equal(causal, RandomBlocks(2, 3, seed=1).to_dense(64, 64))
