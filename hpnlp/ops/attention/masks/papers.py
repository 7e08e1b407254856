"""The published patterns, with their papers' parameters, put together from masks."""

from __future__ import annotations

from hpnlp.ops.attention.masks.base import Full, Mask, PerHead
from hpnlp.ops.attention.masks.patterns import Blockwise, Causal, Dilated, Fixed, Global, RandomBlocks, Strided, Window
from hpnlp.types import InputError


def sparse_transformer_strided(stride: int, *, heads: int | None = None, causal: bool = True) -> Mask | PerHead:
    """A row of `stride` tokens, and every stride-th token.

    heads: None for the union of both in every head ("merged"); a number for the first in one half of the heads and the
    second in the other. Source: Child et al. 2019, "Generating long sequences with sparse transformers", sec. 4.3, A(1)
    and A(2) of strided attention, with l = stride.
    """
    return _factorized(Window(stride), Strided(stride), heads, causal)


def sparse_transformer_fixed(
    block: int, columns: int, *, heads: int | None = None, causal: bool = True
) -> Mask | PerHead:
    """The token's own block, and the last `columns` tokens of every block; `heads` as in the strided pattern.

    Source: Child et al. 2019, sec. 4.3, A(1) and A(2) of fixed attention, with l = block and c = columns.
    """
    return _factorized(Blockwise(block), Fixed(block, columns), heads, causal)


def longformer(window: int = 512, global_tokens: int = 0, dilation: int = 1, *, causal: bool = False) -> Mask:
    """window / 2 tokens to each side, `dilation` apart, and the first `global_tokens`, which see all and are seen by all.

    window: even, as in the paper, where it counts both sides. Question tokens that differ from example to example are the
    operand `global_tokens` of the call. Source: Beltagy et al. 2020, "Longformer", sec. 3.1.
    """
    if window % 2 or window < 0:
        raise InputError(f"longformer window {window}: expected an even number from 0 on, half of it to each side")
    near = Window(window // 2) if dilation == 1 else Dilated(window // 2, dilation)
    mask = near | Global(global_tokens) if global_tokens else near
    return mask & Causal() if causal else mask


def bigbird(
    block: int = 64,
    window: int = 3,
    global_blocks: int = 2,
    random: int = 3,
    *,
    seed: int = 0,
    among: int | None = None,
    causal: bool = False,
) -> Mask:
    """`window` blocks around the token's own, the first `global_blocks`, which see all and are seen by all, and `random`.

    among: how many blocks there are to draw from, T / block; needed where `causal` is False and `random` is not 0. A
    causal pattern draws from the blocks up to the token's own. Source: Zaheer et al. 2020, "Big Bird", sec. 2 and app. D.
    """
    if window % 2 == 0:
        raise InputError(f"bigbird window {window}: expected an odd number of blocks, the own one in the middle")
    if random and among is None and not causal:
        raise InputError(
            "bigbird draws random blocks from among the T / block that there are: pass among=T // block, or causal=True"
        )
    mask: Mask = Blockwise(block)
    for n in range(1, window // 2 + 1):
        mask = mask | Blockwise(block).shift(n * block) | Blockwise(block).shift(-n * block)
    if global_blocks:
        mask = mask | Global(global_blocks * block)
    if random:
        mask = mask | RandomBlocks(block, random, seed, None if causal else among)
    return mask & Causal() if causal else mask


def _factorized(first: Mask, second: Mask, heads: int | None, causal: bool) -> Mask | PerHead:
    order = Causal() if causal else Full()
    if heads is None:
        return order & (first | second) if causal else first | second
    if heads % 2:
        raise InputError(f"{heads} heads: expected an even number, one half for each of the two patterns")
    return PerHead((order & first,) * (heads // 2) + (order & second,) * (heads // 2))
