"""Losses over a vocabulary."""

from hpnlp.ops.softmax.cross_entropy import cross_entropy, logits, nll
from hpnlp.ops.softmax.linear_cross_entropy import linear_cross_entropy, partial_cross_entropy

__all__ = ["cross_entropy", "linear_cross_entropy", "logits", "nll", "partial_cross_entropy"]
