"""The patterns that mixers are named after, with defaults; the mask of the model (causal, or not) comes on top of them."""

from __future__ import annotations

from hpnlp.ops import attention
from hpnlp.ops.attention import Blockwise, Dilated, Global, Mask, PerHead, RandomBlocks, Window


def blockwise(block: int = 64) -> Mask:
    """Blocks of the sequence see themselves (Qiu et al. 2020, "BlockBERT")."""
    return Blockwise(block)


def window(left: int = 256, right: int | None = None) -> Mask:
    """The last `left` tokens, the next `right` (as many where None), and the token itself."""
    return Window(left, right)


def dilated(width: int = 63, dilation: int = 4) -> Mask:
    """`width` tokens to each side, `dilation` apart (Beltagy et al. 2020, "Longformer", sec. 3.1)."""
    return Dilated(width, dilation)


def strided(stride: int = 64, heads: int | None = None) -> Mask | PerHead:
    """See `sparse_transformer_strided`."""
    return attention.sparse_transformer_strided(stride, heads=heads, causal=False)


def fixed(block: int = 64, columns: int = 8, heads: int | None = None) -> Mask | PerHead:
    """See `sparse_transformer_fixed`."""
    return attention.sparse_transformer_fixed(block, columns, heads=heads, causal=False)


def random(block: int = 64, count: int = 3, seed: int = 0, among: int | None = None) -> Mask:
    """The token itself, and `count` blocks at random, the same for a block of queries; see `RandomBlocks` for `among`."""
    return RandomBlocks(block, count, seed, among) | Window(0)


def global_(count: int = 64) -> Mask:
    """The first `count` tokens, which see all and are seen by all, and the token itself: otherwise no neighbours."""
    return Global(count) | Window(0)


def longformer(window: int = 512, global_tokens: int = 0, dilation: int = 1) -> Mask:
    """See `ops.attention.longformer`."""
    return attention.longformer(window, global_tokens, dilation)


def bigbird(
    block: int = 64, window: int = 3, global_blocks: int = 2, random: int = 3, seed: int = 0, among: int | None = None
) -> Mask:
    """See `ops.attention.bigbird`; where `among` is None, random blocks are drawn from those up to the token's own."""
    mask = attention.bigbird(block, window, global_blocks, random=0)
    return mask | RandomBlocks(block, random, seed, among) if random else mask
