"""Bounds on the keys that queries see, against dense masks."""

import dataclasses
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
    Mask,
    PerHead,
    Prefix,
    RandomBlocks,
    Sinks,
    Strided,
    Where,
    Window,
    bigbird,
    longformer,
    sparse_transformer_fixed,
)  # fmt: skip
from tests.ops.attention.block_sparse.test_block_mask import draw_tree


@dataclasses.dataclass(frozen=True)
class UserMask(Mask):
    """A pattern without hints."""

    def at(self, q, k):
        return k == q

    def tile(self, q0, q1, k0, k1):
        return True, False


def check(seed, count, length=70):
    """Asserts that random masks allow no key beyond their bounds, and returns the number of masks that have a bound."""
    rng, bounded = random.Random(seed), 0
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    for _ in range(count):
        mask = draw_tree(rng, 3) & Causal() if rng.random() < 0.5 else draw_tree(rng, 4)
        pinned, back = mask.lookback().slots()
        bounded += back is not None
        assert back is None or not (mask.to_dense(length) & (j >= pinned) & (i - j > back)).any(), mask
    return bounded


def test_lookback_bounds_the_allowed_keys():
    assert check(0, 400) > 100


@pytest.mark.slow
def test_lookback_bounds_the_allowed_keys_of_20000_expressions():
    assert check(1, 20000) > 5000


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Full(), (0, None)),
        (Causal(), (0, None)),
        (UserMask(), (0, None)),
        (Where(lambda i, j: i == j), (0, None)),
        (Strided(4), (0, None)),
        (Causal() & Fixed(6, 2), (0, None)),
        (Causal() & RandomBlocks(4, 2), (0, None)),
        (~Window(4), (0, None)),
        (Window(5, 2), (0, 5)),
        (Window(0), (0, 0)),
        (Causal() & Window(5), (0, 5)),
        (Dilated(3, 4), (0, 12)),
        (Blockwise(7), (0, 6)),
        (Blockwise(7).shift(-7), (0, 13)),
        (Window(5).shift(3), (0, 2)),
        (Sinks(4), (4, 0)),
        (Sinks(4).shift(2), (6, 0)),
        (Prefix(9), (9, 0)),
        (Global(3), (3, 0)),
        (GlobalAt((2, 7)), (8, 0)),
        (RandomBlocks(4, 2, among=3), (12, 0)),
        (Window(8) | Sinks(4), (4, 8)),
        ((Window(8) | Sinks(4)) & Window(6), (0, 6)),
        ((Window(8) | Sinks(4)) & (Window(6) | Sinks(2)), (2, 6)),
        ((Window(8) | Sinks(4)) & Strided(3), (4, 8)),
        (~~Window(4), (0, 4)),
        (~Causal(), (0, 0)),
        (~(Causal() | ~Window(4)), (0, 0)),
        (~(~Window(4) & ~Sinks(2)), (2, 4)),
        (~Full(), (0, 0)),
        (PerHead((Window(3), Sinks(2))) & Causal(), (2, 3)),
        (PerHead((Window(3), Causal())), (0, None)),
        (longformer(8, 3), (3, 4)),
        (bigbird(4, among=9), (36, 7)),
        (bigbird(4, random=0), (8, 7)),
        (sparse_transformer_fixed(6, 2), (0, None)),
    ],
    ids=str,
)
def test_lookback_equals_expected_slots(mask, expected):
    assert mask.lookback().slots() == expected
