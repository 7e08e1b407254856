"""Pictures of masks: every pixel and every number equals that of the dense mask, also where it would not fit in memory."""

import dataclasses
import tracemalloc

import numpy as np
import pytest

from hpnlp import mask_plot
from hpnlp.ops import attention
from hpnlp.ops.attention import Blockwise, Causal, Full, Global, Mask, Sinks, Strided, Window
from hpnlp.ops.attention.block_sparse.block_mask import density
from hpnlp.types import InputError
from tests.contracts import PATTERNS
from tests.messages import raises

SKIPPED, HIDDEN, EVALUATED, FULL_TILE = mask_plot.COLORS.values()


def view_of(mask, length, keys=None, block=None):
    (view,) = mask_plot.make_views("", mask, length, length if keys is None else keys, block)
    return view


def tiled(dense, block):
    """Whether each tile of a dense mask allows some pair, and whether it allows every pair."""
    rows, columns = (range(0, size, block) for size in dense.shape)
    tiles = [[dense[i : i + block, j : j + block] for j in columns] for i in rows]
    return tuple(np.array([[reduce(tile) for tile in row] for row in tiles]) for reduce in (np.any, np.all))


@pytest.mark.parametrize("mask", PATTERNS, ids=repr)
def test_pixels_of_pairs_equal_the_dense_mask(mask):
    length, keys, block = 37, 29, 5
    view, dense = view_of(mask, length, keys, block), mask.to_dense(length, keys)
    kind = {color: (view.image == color).all(axis=2) for color in mask_plot.COLORS.values()}
    assert sum(kind.values()).min() == 1  # every pixel has exactly one of the colors
    np.testing.assert_array_equal(kind[EVALUATED] | kind[FULL_TILE], dense)
    inactive, full = (tiled(kind[color], block)[1] for color in (SKIPPED, FULL_TILE))
    some_pair, _ = tiled(dense, block)
    assert not (inactive & some_pair).any()
    assert (view.tiles, view.active, view.full) == (inactive.size, (~inactive).sum(), full.sum())
    assert view.exact and view.density == pytest.approx(dense.mean())
    assert view.visited == pytest.approx((~inactive).mean())


@pytest.mark.parametrize("mask", [Causal() & Window(40), attention.bigbird(16, causal=True), ~Full(), Strided(7)])
def test_pixels_of_cells_show_every_active_tile(mask, monkeypatch):
    length, keys, block = 300, 170, 8
    dense = mask.to_dense(length, keys)
    monkeypatch.setattr(mask_plot, "MAX_PIXEL_PAIRS", 100)
    monkeypatch.setattr(mask_plot, "MAX_CELLS", 10)
    view = view_of(mask, length, keys, block)
    assert view.cell == 32 and view.image.shape == (10, 6, 3)
    assert view.exact and view.density == pytest.approx(dense.mean())
    some_pair, every_pair = tiled(dense, 32)
    drawn = (view.image != SKIPPED).any(axis=2)
    assert drawn[some_pair].all()
    assert (view.image == FULL_TILE).all(axis=2)[every_pair].all()
    if mask == ~Full():
        assert not drawn.any() and view.active == 0


def test_density_from_random_rows_is_near_the_exact_one(monkeypatch):
    """It is exact where all rows of a tile have as many pairs."""
    monkeypatch.setattr(mask_plot, "MAX_COUNTED_PAIRS", 40_000)
    for mask, error in ((Strided(16), 1e-9), (attention.Fixed(8, 3), 1e-9), (Causal(), 0.02), (Global(9), 0.1)):
        view = view_of(mask, 480, block=32)
        assert view.density == pytest.approx(density(mask, 480), rel=error)
        assert view.exact == (mask in (Causal(), Global(9)))


def test_length_65536_never_becomes_an_array():
    mask = Blockwise(1024) & ~Sinks(7)
    tracemalloc.start()
    try:
        view = view_of(mask, 65536)
        assert tracemalloc.get_traced_memory()[1] < 100e6  # a byte per pair would be 4.3e9
    finally:
        tracemalloc.stop()
    assert view.block == 128 and view.tiles == 512 * 512 and view.active == 64 * 8 * 8
    assert view.exact and view.density == pytest.approx((64 * 1024**2 - 1024 * 7) / 65536**2)
    assert max(view.image.shape) == 128


@dataclasses.dataclass(frozen=True)
class Wrong(Mask):
    """The pairs of Causal, with a `tile` that returns (False, False) or (True, True) for the active tiles."""

    some: bool
    every: bool

    def at(self, q, k):
        return k <= q

    def tile(self, q0, q1, k0, k1):
        return (k0 <= q1) & self.some, (k0 <= q1) & self.every


def test_tile_that_contradicts_at_raises():
    raises("Wrong: `at` allows query 0 and key 0, but `tile` returns", lambda: view_of(Wrong(False, False), 8))
    raises("Wrong: `at` does not allow query 0 and key 1, but `tile`", lambda: view_of(Wrong(True, True), 8, block=4))
    for wrong in (Wrong(False, False), Wrong(True, True)):  # too many pairs to check all of them
        raises("correct one of them", view_of, wrong, 5000, 3000)


@dataclasses.dataclass(frozen=True)
class Untiled(Mask):
    """A window that defines `at` alone."""

    reach: int

    def at(self, q, k):
        return abs(q - k) <= self.reach


def test_mask_without_tile_has_the_active_tiles_of_its_twin(tmp_path):
    untiled, twin = view_of(Untiled(9), 300, block=32), view_of(Window(9), 300, block=32)
    assert (untiled.active, untiled.density) == (twin.active, twin.density)
    assert "| Window(left=9, right=9) | 64 x 64 |" in mask_plot.draw(Window(9), tmp_path / "one.png", length=64)


@dataclasses.dataclass(frozen=True)
class Tall(Mask):
    """A window whose `tile` is wrong for tiles of more than 128 queries."""

    def at(self, q, k):
        return abs(q - k) < 9

    def tile(self, q0, q1, k0, k1):
        some_pair, every_pair = Window(8).tile(q0, q1, k0, k1)
        return some_pair & (q1 - q0 < 128), every_pair


def test_tiles_of_all_sizes_that_attend_may_choose_are_checked():
    for length in (600, 5000):
        with pytest.raises(InputError, match="Tall: .* returns some=False"):
            view_of(Tall(), length, block=64)


@dataclasses.dataclass(frozen=True)
class OneAtATime(Mask):
    def at(self, q, k):
        return k <= q

    def tile(self, q0, q1, k0, k1):
        return k0 <= q1 and q0 >= 0, False


def test_tile_that_accepts_no_arrays_raises():
    raises("OneAtATime.*write & and", lambda: view_of(OneAtATime(), 64))


def test_invalid_sizes_raise(tmp_path):
    for sizes, message in (
        ({"length": 0}, "length=0: expected at least 1"),
        ({"keys": -1}, "keys=-1: expected at least 1"),
        ({"block": 0}, "block=0: expected at least 1"),
        ({"length": 2**20}, "1048576 x 1048576 in blocks of 128 are 67,108,864 tiles: pass block=1024 or more"),
    ):
        raises(message, mask_plot.draw, {"": Causal()}, tmp_path / "a.png", **sizes)
        assert not list(tmp_path.iterdir())
