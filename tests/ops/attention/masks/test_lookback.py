"""Bounds on the keys that queries see, against dense masks."""

import pytest

from hpnlp.ops.attention import (
    Blockwise,
    Causal,
    Dilated,
    Fixed,
    Full,
    Global,
    GlobalAt,
    PerHead,
    Prefix,
    RandomBlocks,
    Sinks,
    Strided,
    Window,
    bigbird,
    longformer,
    sparse_transformer_fixed,
)  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Full(), (0, None)),
        (Causal(), (0, None)),
        (Strided(4), (0, None)),
        (Causal() & Fixed(6, 2), (0, None)),
        (~Window(4), (0, None)),
        (Window(5, 2), (0, 5)),
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
        (PerHead((Window(3), Sinks(2))) & Causal(), (2, 3)),
        (longformer(8, 3), (3, 4)),
        (bigbird(4, random=0), (8, 7)),
        (sparse_transformer_fixed(6, 2), (0, None)),
    ],
    ids=str,
)
def test_lookback_equals_expected_slots(mask, expected):
    assert mask.lookback().slots() == expected
