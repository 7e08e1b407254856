"""Kinds of `Weight`: representations of a matrix of parameters that take less memory or less time than an array."""

from hpnlp.ops.weight import Weight, dense, dense_tree, is_weight
from hpnlp.ops.weights.balanced import BalancedWeight, keep_balanced
from hpnlp.ops.weights.calibrated.observed import ObservedWeight
from hpnlp.ops.weights.calibrated.row_scaled import RowScaledWeight, search_row_factors, smoothing_factors
from hpnlp.ops.weights.calibrated.second_order import (
    balanced_by_moments,
    inverse_factor,
    output_error,
    prune_by_moments,
    quantize_by_moments,
    two_of_four_by_moments,
)
from hpnlp.ops.weights.codebook import CodebookWeight, cluster
from hpnlp.ops.weights.floats import FloatWeight, to_floats
from hpnlp.ops.weights.integer import IntegerWeight, quantize
from hpnlp.ops.weights.low_rank import LowRankWeight, factorize
from hpnlp.ops.weights.packed import PackedWeight, pack
from hpnlp.ops.weights.rounded_inputs import RoundedInputsWeight
from hpnlp.ops.weights.sparse import (
    BlockSparseWeight,
    MaskedWeight,
    TwoFourWeight,
    keep_blocks,
    keep_two_of_four,
    masked,
)
from hpnlp.ops.weights.ternary import binarize, round_to_powers, ternarize
from hpnlp.ops.weights.xnor import BinaryProductWeight, binarize_products

__all__ = [
    "BalancedWeight",
    "BinaryProductWeight",
    "BlockSparseWeight",
    "CodebookWeight",
    "FloatWeight",
    "IntegerWeight",
    "LowRankWeight",
    "MaskedWeight",
    "ObservedWeight",
    "PackedWeight",
    "RoundedInputsWeight",
    "RowScaledWeight",
    "TwoFourWeight",
    "Weight",
    "balanced_by_moments",
    "binarize",
    "binarize_products",
    "cluster",
    "dense",
    "dense_tree",
    "factorize",
    "inverse_factor",
    "is_weight",
    "keep_balanced",
    "keep_blocks",
    "keep_two_of_four",
    "masked",
    "output_error",
    "pack",
    "prune_by_moments",
    "quantize",
    "quantize_by_moments",
    "round_to_powers",
    "search_row_factors",
    "smoothing_factors",
    "ternarize",
    "to_floats",
    "two_of_four_by_moments",
]
