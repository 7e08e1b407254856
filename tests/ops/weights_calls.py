"""Calls of `hpnlp.ops.weight` and `hpnlp.ops.weights` for test_numpy.py."""

import jax
import numpy as np

from hpnlp.ops import linear, weight
from hpnlp.ops.weights import (
    IntegerWeight,
    binarize,
    cluster,
    factorize,
    keep_balanced,
    keep_blocks,
    keep_two_of_four,
    masked,
    quantize,
    ranges,
    round_to_powers,
    sparse,
    ternarize,
    to_floats,
    xnor,
)
from hpnlp.ops.weights import integer as integers
from hpnlp.ops.weights import packed as packing
from hpnlp.ops.weights import straight_through as through
from hpnlp.ops.weights.calibrated import row_scaled, second_order

W = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
CODES = np.round(W * 40).astype(np.int8)
MOMENTS = W @ W.T + np.eye(8, dtype=np.float32)
INTEGERS = IntegerWeight(CODES, np.ones((1, 6), np.float32), integer_products=False)

CALLS = {
    "weight.dense": ((weight.dense, (W,)), (weight.dense, (INTEGERS,))),
    "weight.dense_tree": ((weight.dense_tree, ({"kernel": INTEGERS, "bias": W},)),),
    "linear.product_transposed": ((linear.product_transposed, (W, W)), (linear.product_transposed, (W, INTEGERS))),
    "weights.integer.quantize": (
        (lambda w: quantize(w).dense(), (W,)),
        (lambda w, limits: quantize(w, 4, group=4, limits=limits).dense(), (W, np.ones((2, 6), np.float32))),
        (
            lambda w, limit: linear.product(w.T, quantize(w, limits="mse", x_limit=limit)),
            (W, np.array(2.0, np.float32)),
        ),
    ),
    "weights.integer.integer_product": (
        (integers.integer_product, (W.T, CODES, np.ones(6, np.float32))),
        (integers.integer_product, (W.T, CODES, np.ones(1, np.float32), np.array(0.1, np.float32))),
    ),
    "weights.ranges.grouped": ((lambda w: ranges.grouped(w, group=4), (W,)),),
    "weights.ranges.limits": (
        (ranges.limits, (W,)),
        (lambda w: ranges.limits(w, 4, "mse", group=2), (W,)),
        (lambda w: ranges.limits(w, 4, "percentile", by_row=True), (W,)),
    ),
    "weights.ranges.activation_limit": ((ranges.activation_limit, (W,)),),
    "weights.floats.to_floats": (
        (lambda w: to_floats(w, "bfloat16").dense(), (W,)),
        (lambda w, x: linear.product(x, to_floats(w, by_row=True)), (W, W.T)),
        (lambda w, x: linear.product(x, to_floats(w, round_inputs=True)), (W, W.T)),
    ),
    "weights.packed.pack": (
        (
            lambda x, codes, scales: linear.product(x, packing.pack(IntegerWeight(codes, scales), "int4")),
            (W.T, CODES // 40, np.ones((1, 6), np.float32)),
        ),
    ),
    "weights.ternary.ternarize": ((lambda w: ternarize(w).dense(), (W,)),),
    "weights.ternary.binarize": ((lambda w: binarize(w).dense(), (W,)),),
    "weights.ternary.round_to_powers": ((lambda w: round_to_powers(w).dense(), (W,)),),
    "weights.xnor.binarize_products": ((lambda w, x: linear.product(x, xnor.binarize_products(w)), (W, W.T)),),
    "weights.xnor.pack_signs": ((lambda x: xnor.pack_signs(x), (W,)),),
    "weights.xnor.row_scales": ((xnor.row_scales, (W,)),),
    "weights.xnor.binary_product_reference": ((xnor.binary_product_reference, (W.T, W)),),
    "weights.calibrated.second_order.inverse_factor": ((second_order.inverse_factor, (MOMENTS,)),),
    "weights.calibrated.second_order.output_error": ((second_order.output_error, (W, MOMENTS)),),
    "weights.calibrated.second_order.quantize_by_moments": (
        (lambda w, h: second_order.quantize_by_moments(w, h, 4, group=4).dense(), (W, MOMENTS)),
    ),
    "weights.calibrated.second_order.prune_by_moments": (
        (lambda w, h: second_order.prune_by_moments(w, h, 0.5), (W, MOMENTS)),
    ),
    "weights.calibrated.second_order.two_of_four_by_moments": (
        (lambda w, h: second_order.two_of_four_by_moments(w, h).dense(), (W, MOMENTS)),
    ),
    "weights.calibrated.second_order.balanced_by_moments": (
        (lambda w, h: second_order.balanced_by_moments(w, h, 0.5).dense(), (W, MOMENTS)),
    ),
    "weights.calibrated.row_scaled.smoothing_factors": ((row_scaled.smoothing_factors, (W, MOMENTS)),),
    "weights.calibrated.row_scaled.search_row_factors": (
        (lambda w, h: row_scaled.search_row_factors(w, h, lambda w: quantize(w, 4).dense()), (W, MOMENTS)),
    ),
    "weights.codebook.cluster": ((lambda w: jax.lax.stop_gradient(cluster(w, 4).dense()), (W,)),),
    "weights.sparse.masked": ((lambda w: masked(w, 0.5).dense(), (W,)),),
    "weights.sparse.largest": ((sparse.largest, (W, np.array(0.5, np.float32))),),
    "weights.sparse.keep_blocks": ((lambda w, x: linear.product(x, keep_blocks(w, 0.5, 2)), (W, W.T)),),
    "weights.balanced.keep_balanced": ((lambda w, x: linear.product(x, keep_balanced(w, 0.5)), (W, W.T)),),
    "weights.sparse.keep_two_of_four": ((lambda w, x: linear.product(x, keep_two_of_four(w)), (W, W.T)),),
    "weights.straight_through.round_through": ((through.round_through, (W, np.array(0.5, np.float32))),),
    "weights.straight_through.quantize_through": ((through.quantize_through, (W,)),),
    "weights.straight_through.ternary_through": ((through.ternary_through, (W,)),),
    "weights.straight_through.binary_through": ((through.binary_through, (W,)),),
    "weights.straight_through.top_through": ((through.top_through, (W, np.array(0.5, np.float32))),),
    "weights.straight_through.threshold_through": ((through.threshold_through, (W,)),),
    "weights.low_rank.factorize": (
        (lambda w: factorize(w, 3).dense(), (W,)),
        (lambda w, c: factorize(w, 3, covariance=c).dense(), (W, np.eye(8, dtype=np.float32))),
    ),
}
# Functions that return no arrays.
ON_HOST = {
    "weight.is_weight",
    "weight.parameter_count",
    "weight.weight_axes",
    "weight.is_stacked",
    "weight.scale_axes",
    "weights.balanced.kept_count",
    "weights.low_rank.rank_for_share",
    "weights.low_rank.rank_by_energy",
    "weights.ranges.largest_code",
    "weights.sparse.check_share",
}
