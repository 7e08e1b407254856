"""Pictures of masks: every pixel and every number against the dense mask, in little memory where that would not fit."""

import dataclasses
import tracemalloc

import matplotlib.image
import numpy as np
import pytest

from hpnlp import mask_plot
from hpnlp.ops import attention
from hpnlp.ops.attention import Blockwise, Causal, Full, Global, Mask, PerHead, Sinks, Strided, Where, Window
from hpnlp.ops.attention.block_sparse.block_mask import density
from hpnlp.types import InputError
from tests.contracts import PATTERNS

DEAD, HIDDEN, ALLOWED, WHOLE = mask_plot.KINDS.values()


def view(mask, length, keys=None, block=None):
    (found,) = mask_plot.look("", mask, length, length if keys is None else keys, block)
    return found


def tiled(dense, block):
    """(some, every) of each tile, an element at a time."""
    rows, columns = (range(0, size, block) for size in dense.shape)
    parts = [[dense[i : i + block, j : j + block] for j in columns] for i in rows]
    return tuple(np.array([[f(part) for part in row] for row in parts]) for f in (np.any, np.all))


@pytest.mark.parametrize("mask", PATTERNS, ids=repr)
def test_a_pixel_a_pair(mask):
    length, keys, block = 37, 29, 5
    found, dense = view(mask, length, keys, block), mask.to_dense(length, keys)
    kind = {color: (found.image == color).all(axis=2) for color in mask_plot.KINDS.values()}
    assert sum(kind.values()).min() == 1  # the colours are told apart, and there are no others
    np.testing.assert_array_equal(kind[ALLOWED] | kind[WHOLE], dense)
    dead, whole = (tiled(kind[color], block)[1] for color in (DEAD, WHOLE))
    some, _ = tiled(dense, block)
    assert not (dead & some).any()
    assert (found.tiles, found.live, found.whole) == (dead.size, (~dead).sum(), whole.sum())
    assert found.exact and found.density == pytest.approx(dense.mean())
    assert found.visited == pytest.approx((~dead).mean())


@pytest.mark.parametrize("mask", [Causal() & Window(40), attention.bigbird(16, causal=True), ~Full(), Strided(7)])
def test_a_pixel_a_square_of_tiles(mask, monkeypatch):
    length, keys, block = 300, 170, 8
    dense = mask.to_dense(length, keys)
    monkeypatch.setattr(mask_plot, "ELEMENTS", 100)
    monkeypatch.setattr(mask_plot, "CELLS", 10)
    found = view(mask, length, keys, block)
    assert found.cell == 32 and found.image.shape == (10, 6, 3)
    assert found.exact and found.density == pytest.approx(dense.mean())
    some, every = tiled(dense, 32)
    drawn = (found.image != DEAD).any(axis=2)
    assert drawn[some].all()
    assert (found.image == WHOLE).all(axis=2)[every].all()
    if mask == ~Full():
        assert not drawn.any() and found.live == 0


def test_sampled_density(monkeypatch):
    """Rows at random: exact where rows of a tile are alike, and near the truth elsewhere."""
    monkeypatch.setattr(mask_plot, "ASKED", 40_000)
    for mask, error in ((Strided(16), 1e-9), (attention.Fixed(8, 3), 1e-9), (Causal(), 0.02), (Global(9), 0.1)):
        found, truth = view(mask, 480, block=32), density(mask, 480)
        assert found.density == pytest.approx(truth, rel=error)
        assert found.exact == (mask in (Causal(), Global(9)))


def test_no_more_pairs_are_asked_for_than_take_a_second():
    found = view(Strided(128), 16384)
    assert not found.exact and found.density == pytest.approx(1 / 128) and found.live == found.tiles


def test_length_65536_never_becomes_an_array():
    mask = Blockwise(1024) & ~Sinks(7)
    tracemalloc.start()
    try:
        found = view(mask, 65536)
        assert tracemalloc.get_traced_memory()[1] < 100e6  # a byte a pair would be 4.3e9
    finally:
        tracemalloc.stop()
    assert found.block == 128 and found.tiles == 512 * 512 and found.live == 64 * 8 * 8
    assert found.exact and found.density == pytest.approx((64 * 1024**2 - 1024 * 7) / 65536**2)
    assert max(found.image.shape) == 128


def test_heads_with_the_same_mask_share_a_panel(tmp_path):
    heads = PerHead((Causal(), Window(3), Causal(), Causal(), Full()))
    views = mask_plot.look("mine", heads, 16, 16)
    assert [(v.which, v.heads) for v in views] == [("heads 0, 2-3", 3), ("head 1", 1), ("head 4", 1)]
    table = mask_plot.draw({"mine": heads}, tmp_path / "a.png", length=16, block=4)
    (mean,) = [line for line in table.splitlines() if "mean of 5 heads" in line]
    assert f"{100 * density(heads, 16):.3g} %" in mean


def test_gallery(tmp_path):
    masks = {"one | two": Causal() | Global(1), "cos($x$)": Where(lambda i, j: i * j % 3 == 0), "wide": Window(2)}
    table = mask_plot.draw(masks, tmp_path / "a.png", length=8, keys=90)
    assert table.count("\n") == 5 and "| one \\| two | 8 x 90 |" in table
    image = matplotlib.image.imread(tmp_path / "a.png")
    assert min(image.shape[:2]) > 400 and np.unique(image.reshape(-1, image.shape[2]), axis=0).shape[0] > 10


@dataclasses.dataclass(frozen=True)
class Wrong(Mask):
    """Causal, but for what `tile` says."""

    some: bool
    every: bool

    def at(self, q, k):
        return k <= q

    def tile(self, q0, q1, k0, k1):
        return (k0 <= q1) & self.some, (k0 <= q1) & self.every


def test_a_tile_that_contradicts_at_is_found():
    with pytest.raises(
        InputError, match="Wrong: query 0 and key 0 are allowed by `at`, but `tile` says .* nothing of it"
    ):
        view(Wrong(False, False), 8)
    with pytest.raises(InputError, match="Wrong: query 0 and key 1 are not allowed by `at`, but .* that all of it is"):
        view(Wrong(True, True), 8, block=4)
    for wrong in (Wrong(False, False), Wrong(True, True)):  # beyond what is drawn pair by pair
        with pytest.raises(InputError, match="mend one of them"):
            view(wrong, 5000, 3000)


@dataclasses.dataclass(frozen=True)
class Untiled(Mask):
    """Of which nothing is known but its elements."""

    reach: int

    def at(self, q, k):
        return abs(q - k) <= self.reach


def test_a_mask_without_tile_is_asked_for_every_pair(tmp_path):
    found, twin = view(Untiled(9), 300, block=32), view(Window(9), 300, block=32)
    assert (found.live, found.density) == (twin.live, twin.density)
    assert "| Window(left=9, right=9) | 64 x 64 |" in mask_plot.draw(Window(9), tmp_path / "one.png", length=64)


@dataclasses.dataclass(frozen=True)
class Tall(Mask):
    """Right for tiles of up to 128 queries."""

    def at(self, q, k):
        return abs(q - k) < 9

    def tile(self, q0, q1, k0, k1):
        some, every = Window(8).tile(q0, q1, k0, k1)
        return some & (q1 - q0 < 128), every


@pytest.mark.parametrize("length", [600, 5000])
def test_tiles_of_other_sizes_than_those_drawn_are_tried(length):
    with pytest.raises(InputError, match="Tall: .* nothing of it is allowed"):
        view(Tall(), length, block=64)


@dataclasses.dataclass(frozen=True)
class OneAtATime(Mask):
    def at(self, q, k):
        return k <= q

    def tile(self, q0, q1, k0, k1):
        return k0 <= q1 and q0 >= 0, False


def test_a_tile_that_takes_no_arrays_is_said():
    with pytest.raises(InputError, match="OneAtATime.*write & and"):
        view(OneAtATime(), 64)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"length": 0}, "length=0: expected at least 1"),
        ({"keys": -1}, "keys=-1: expected at least 1"),
        ({"block": 0}, "block=0: expected at least 1"),
        ({"length": 2**20}, "1048576 x 1048576 in blocks of 128 are 67,108,864 tiles: pass block=1024 or more"),
    ],
)
def test_sizes_that_cannot_be_drawn(sizes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        mask_plot.draw({"": Causal()}, tmp_path / "a.png", **sizes)
    assert not list(tmp_path.iterdir())
