"""Losses over a vocabulary."""

from hpnlp.ops.softmax.cross_entropy import cross_entropy, logits, nll

__all__ = ["cross_entropy", "logits", "nll"]
