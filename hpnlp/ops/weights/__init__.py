"""Kinds of `Weight`: representations of a matrix of parameters that take less memory or less time than an array."""

from hpnlp.ops.weight import Weight, dense, dense_tree, is_weight
from hpnlp.ops.weights.integer import IntegerWeight, quantize
from hpnlp.ops.weights.low_rank import LowRankWeight, factorize
from hpnlp.ops.weights.observed import ObservedWeight

__all__ = [
    "IntegerWeight",
    "LowRankWeight",
    "ObservedWeight",
    "Weight",
    "dense",
    "dense_tree",
    "factorize",
    "is_weight",
    "quantize",
]
