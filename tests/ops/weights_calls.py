"""Calls of `hpnlp.ops.weight` and `hpnlp.ops.weights` for test_numpy.py."""

import numpy as np

from hpnlp.ops import linear, weight
from hpnlp.ops.weights import IntegerWeight, factorize, quantize

W = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
CODES = np.round(W * 40).astype(np.int8)
INTEGERS = IntegerWeight(CODES, np.ones((1, 6), np.float32), integer_products=False)

CALLS = {
    "weight.dense": ((weight.dense, (W,)), (weight.dense, (INTEGERS,))),
    "weight.dense_tree": ((weight.dense_tree, ({"kernel": INTEGERS, "bias": W},)),),
    "linear.product_transposed": ((linear.product_transposed, (W, W)), (linear.product_transposed, (W, INTEGERS))),
    "weights.integer.quantize": (
        (lambda w: quantize(w).dense(), (W,)),
        (lambda w, limits: quantize(w, 4, group=4, limits=limits).dense(), (W, np.ones((2, 6), np.float32))),
    ),
    "weights.low_rank.factorize": (
        (lambda w: factorize(w, 3).dense(), (W,)),
        (lambda w, c: factorize(w, 3, covariance=c).dense(), (W, np.eye(8, dtype=np.float32))),
    ),
}
# Functions that return no arrays.
ON_HOST = {"weight.is_weight", "weight.axes_of", "weights.low_rank.rank_of", "weights.low_rank.rank_by_energy"}
