"""The table of all attention patterns.

To add a pattern, write a class in `patterns.py` (or a function in `papers.py`) and a line in MASKS. The parser of mask
expressions, the drawing command, the feature matrix, the notebook's test and the contract tests read the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hpnlp.ops.attention.masks.base import Full, Mask, Places
from hpnlp.ops.attention.masks.papers import bigbird, longformer, sparse_transformer_fixed, sparse_transformer_strided
from hpnlp.ops.attention.masks.patterns import (
    Blockwise,
    Causal,
    Dilated,
    Fixed,
    Global,
    GlobalAt,
    Prefix,
    RandomBlocks,
    Sinks,
    Strided,
    Where,
    Window,
)
from hpnlp.ops.attention.masks.per_head import PerHead

__all__ = ["MASKS", "Pattern"]


class Pattern(NamedTuple):
    """An entry of MASKS.

    Attributes:
      make: The class, or the function of a paper's parameters.
      examples: Masks that test every contract over some 40 tokens; the first one represents the pattern in the feature matrix.
      in_text: Whether an expression in text can contain the pattern: not if an argument is a function.
    """

    make: Callable[..., Mask | PerHead]
    examples: tuple[Mask | PerHead, ...]
    in_text: bool = True


def _sum_divisible_by_3(i: Places, j: Places) -> Any:
    return (i + j) % 3 == 0


MASKS: dict[str, Pattern] = {
    "Full": Pattern(Full, (Full(),)),
    "Causal": Pattern(Causal, (Causal(),)),
    "Window": Pattern(Window, (Window(5, 2),)),
    "Dilated": Pattern(Dilated, (Dilated(3, 4),)),
    "Blockwise": Pattern(Blockwise, (Blockwise(7),)),
    "Strided": Pattern(Strided, (Strided(5),)),
    "Fixed": Pattern(Fixed, (Fixed(6, 2), Fixed(6, 0))),
    "Global": Pattern(Global, (Global(3),)),
    "GlobalAt": Pattern(GlobalAt, (GlobalAt((2, 11, 30)),)),
    "Sinks": Pattern(Sinks, (Sinks(4),)),
    "Prefix": Pattern(Prefix, (Prefix(9),)),
    "RandomBlocks": Pattern(
        RandomBlocks, (RandomBlocks(4, 3, seed=1), RandomBlocks(4, 2, seed=2, among=9), RandomBlocks(4, 9, among=3))
    ),
    "Where": Pattern(Where, (Where(_sum_divisible_by_3),), in_text=False),
    "PerHead": Pattern(PerHead, (PerHead((Causal(), Window(3), Causal(), Full())),)),
    "sparse_transformer_strided": Pattern(sparse_transformer_strided, (sparse_transformer_strided(6),)),
    "sparse_transformer_fixed": Pattern(sparse_transformer_fixed, (sparse_transformer_fixed(6, 2),)),
    "longformer": Pattern(longformer, (longformer(8, 3), longformer(4, 2, dilation=3, causal=True))),
    "bigbird": Pattern(bigbird, (bigbird(4, among=9), bigbird(4, causal=True))),
}
