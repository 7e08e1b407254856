"""The patterns of published models, composed of masks and named with the parameters of their papers."""

from __future__ import annotations

from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.masks.patterns import Blockwise, Causal, Dilated, Fixed, Global, RandomBlocks, Strided, Window
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.types import InputError

_MAX_WINDOW_BLOCKS = 129  # limit of bigbird: each block of the window is a separate mask
_MAX_HEADS = 1 << 14


def sparse_transformer_strided(stride: int, *, heads: int | None = None, causal: bool = True) -> Mask | PerHead:
    """The previous `stride` tokens, and every stride-th token.

    Args:
      stride: Number of previous tokens and distance of the others, at least 1.
      heads: None for the union of both patterns in every head ("merged heads"); an even number N of heads for the first pattern
        in the first N / 2 heads and the second pattern in the others.
      causal: Whether keys after the query are hidden. If not, the first pattern is symmetric.

    Returns:
      The mask, a PerHead if `heads` is given.

    Raises:
      InputError: `stride` is below 1, or `heads` is odd.

    References:
      Child et al. 2019, "Generating long sequences with sparse transformers", section 4.3, A(1) and A(2) of strided attention
      with l = stride.
    """
    return _factorized(Window(stride), Strided(stride), heads, causal)


def sparse_transformer_fixed(
    block: int, columns: int, *, heads: int | None = None, causal: bool = True
) -> Mask | PerHead:
    """The block of the query, and the last `columns` tokens of every block.

    Args:
      block: Tokens in a block, at least 1.
      columns: Summary tokens at the end of each block, 0 to `block`.
      heads: None for the union of both patterns in every head; an even number of heads for one pattern in each half of them.
      causal: Whether keys after the query are hidden.

    Returns:
      The mask, a PerHead if `heads` is given.

    Raises:
      InputError: A number is out of its range, or `heads` is odd.

    References:
      Child et al. 2019, section 4.3, A(1) and A(2) of fixed attention with l = block and c = columns.
    """
    return _factorized(Blockwise(block), Fixed(block, columns), heads, causal)


def longformer(window: int = 512, global_tokens: int = 0, dilation: int = 1, *, causal: bool = False) -> Mask:
    """A window around the query, and the first `global_tokens`, which see and are seen by all tokens.

    Args:
      window: Number of tokens on both sides together, even.
      global_tokens: Number of global tokens. Global tokens that differ between examples, such as those of a question, are the
        operand `global_tokens` of `attend`.
      dilation: Distance between the tokens of the window.
      causal: Whether keys after the query are hidden.

    Returns:
      The mask.

    Raises:
      InputError: `window` is odd or negative, or another number is out of its range.

    References:
      Beltagy et al. 2020, "Longformer", section 3.1.
    """
    if window % 2 or window < 0:
        raise InputError(f"longformer window={window}: expected an even number from 0 on, half of it for each side")
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
    """A window of blocks around the query's, global blocks at the start, and random blocks.

    Args:
      block: Tokens in a block.
      window: Number of blocks in the window, odd: the query's block is in the middle.
      global_blocks: Number of first blocks, which see and are seen by all tokens.
      random: Number of random key blocks of each query block.
      seed: Seed of the random blocks.
      among: Number of blocks from which random ones are drawn, T / block. Required unless `causal` or `random=0`; a causal
        pattern draws from the blocks up to the query's and ignores `among`.
      causal: Whether keys after the query are hidden.

    Returns:
      The mask.

    Raises:
      InputError: `window` is even or out of its range, `among` is missing, or another number is out of its range.

    References:
      Zaheer et al. 2020, "Big Bird", section 2 and appendix D.
    """
    if window % 2 == 0 or not 0 < window <= _MAX_WINDOW_BLOCKS:
        raise InputError(
            f"bigbird window={window}: expected an odd number of blocks, the query's block in the middle, at most "
            f"{_MAX_WINDOW_BLOCKS}"
        )
    if random and among is None and not causal:
        raise InputError(
            f"bigbird among=None: expected T // block, from which random={random} blocks are drawn, or causal=True"
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
    """The union of two patterns, or one pattern in each half of the heads."""
    order = Causal() if causal else Full()
    if heads is None:
        return order & (first | second) if causal else first | second
    if heads % 2 or not 0 < heads <= _MAX_HEADS:
        raise InputError(
            f"heads={heads}: expected an even number, one half for each of the two patterns, at most {_MAX_HEADS}"
        )
    return PerHead((order & first,) * (heads // 2) + (order & second,) * (heads // 2))
