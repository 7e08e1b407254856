"""Losses over a vocabulary: exact (`cross_entropy`), and cheaper ones, one module for each technique."""

from hpnlp.ops.softmax.cross_entropy import (
    linear_cross_entropy,
    logits,
    merged_lse,
    partial_cross_entropy,
    zero_ignored_tokens,
)

__all__ = ["linear_cross_entropy", "logits", "merged_lse", "partial_cross_entropy", "zero_ignored_tokens"]
