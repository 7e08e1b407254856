"""Mixers of exact attention over a pattern, with default arguments. The model's mask (such as causality) is applied on top."""

from __future__ import annotations

from hpnlp.nn.mixers.exact import exact_mixer
from hpnlp.ops import attention
from hpnlp.ops.attention import Blockwise, Dilated, Full, Global, Mask, PerHead, RandomBlocks, Window

full = exact_mixer(Full)
blockwise = exact_mixer(Blockwise, block=64)
window = exact_mixer(Window, left=256)
dilated = exact_mixer(Dilated, width=63, dilation=4)


@exact_mixer
def strided(stride: int = 64, heads: int | None = None) -> Mask | PerHead:
    """Strided attention of the Sparse Transformer.

    Args:
      stride: Distance of the strided tokens, and length of the window.
      heads: As for `ops.attention.sparse_transformer_strided`.

    Returns:
      The mask.
    """
    return attention.sparse_transformer_strided(stride, heads=heads, causal=False)


@exact_mixer
def fixed(block: int = 64, columns: int = 8, heads: int | None = None) -> Mask | PerHead:
    """Fixed attention of the Sparse Transformer.

    Args:
      block: Tokens per block.
      columns: Number of tokens at the end of each block that all later tokens attend to.
      heads: As for `ops.attention.sparse_transformer_fixed`.

    Returns:
      The mask.
    """
    return attention.sparse_transformer_fixed(block, columns, heads=heads, causal=False)


@exact_mixer
def random(block: int = 64, count: int = 3, seed: int = 0, among: int | None = None) -> Mask:
    """Random blocks, the same for all queries of a block, and the token itself.

    Args:
      block: Tokens per block.
      count: Number of random blocks.
      seed: Seed of the draw.
      among: As for `ops.attention.RandomBlocks`.

    Returns:
      The mask.
    """
    return RandomBlocks(block, count, seed, among) | Window(0)


@exact_mixer
def global_(count: int = 64) -> Mask:
    """Global tokens, which attend to all tokens and are attended to by all; other tokens attend to themselves too.

    Args:
      count: Number of global tokens, at the beginning of the sequence.

    Returns:
      The mask.
    """
    return Global(count) | Window(0)


@exact_mixer
def longformer(window: int = 512, global_tokens: int = 0, dilation: int = 1) -> Mask:
    """Window and global tokens of Longformer.

    Args:
      window: Number of tokens to both sides together, even.
      global_tokens: Number of global tokens at the beginning of the sequence.
      dilation: Distance between the tokens of the window.

    Returns:
      The mask.
    """
    return attention.longformer(window, global_tokens, dilation)


@exact_mixer
def bigbird(
    block: int = 64, window: int = 3, global_blocks: int = 2, random: int = 3, seed: int = 0, among: int | None = None
) -> Mask:
    """Window, global and random blocks of Big Bird.

    Args:
      block: Tokens per block.
      window: Number of blocks around the token's block, odd.
      global_blocks: Number of global blocks at the beginning of the sequence.
      random: Number of random blocks.
      seed: Seed of the draw.
      among: Number of blocks to draw from; None to draw from the blocks up to the token's own.

    Returns:
      The mask.
    """
    mask = attention.bigbird(block, window, global_blocks, random=0)
    return mask | RandomBlocks(block, random, seed, among) if random else mask
