"""Kinds of `Weight`: representations of a matrix of parameters that take less memory or less time than an array."""

from hpnlp.ops.weight import Weight, dense, dense_tree, is_weight
from hpnlp.ops.weights.integer import IntegerWeight, quantize

__all__ = ["IntegerWeight", "Weight", "dense", "dense_tree", "is_weight", "quantize"]
