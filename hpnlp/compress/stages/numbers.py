"""Stages of recipes that represent matrices by fewer or simpler numbers."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from jaxtyping import PyTree

from hpnlp.compress.matrices import is_table, map_matrices
from hpnlp.compress.stages import NUMBERS, Calibration, Stage
from hpnlp.compress.stages.moments import listed_matrices, map_arrays, with_input_moments
from hpnlp.ops import weights
from hpnlp.ops.weight import is_weight
from hpnlp.ops.weights.calibrated.observed import split_observed
from hpnlp.ops.weights.ranges import METHODS
from hpnlp.types import REQUIRED, Array, InputError, option

if TYPE_CHECKING:
    from hpnlp.models.shared.body import ConfigOfModel

BY = "nearest", "inputs"


@dataclasses.dataclass(frozen=True)
class Conversion(Stage):
    """A conversion of each matrix by itself."""

    changes = NUMBERS

    @property
    def reads_inputs(self) -> bool:
        """Whether it needs the second moments of the inputs of matrices."""
        return False

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        """Converts a matrix.

        Args:
          path: Its path.
          w: `[D, F]`.
          moments: float32 `[D, D]`, see `ops.weights.quantize_by_moments`; None for tables, for experts, and if `reads_inputs`
            is False.

        Returns:
          An array or a Weight.

        Raises:
          InputError: The format does not fit the matrix.
        """
        raise NotImplementedError

    def compress(self, config: ConfigOfModel, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        def convert(path: str, w: Any) -> Any:
            return self.convert(path, *split_observed(w))

        if self.reads_inputs:
            weights = with_input_moments(self.text, config, weights, calibration)
        result = map_matrices(functools.partial(map_arrays, convert), weights, experts=True)
        if calibration is None or not calibration.is_outline:
            self._check_range(result)
        return config, result

    def _check_range(self, weights: PyTree) -> None:
        """Raises InputError for a matrix whose numbers are beyond the range of a format without scales."""
        for path, w in listed_matrices(weights, experts=True):
            if is_weight(w) and not w.is_in_range():
                raise InputError(f"{self.text}: {path} has numbers beyond the range of {w.codes.dtype}: use bf16")


def _limits_option() -> Any:
    text = "Magnitudes that become the largest integer: max, percentile or mse, see `hpnlp.ops.weights.ranges`."
    return option("max", text, among=METHODS)


def _by_option() -> Any:
    text = (
        "nearest rounds each number by itself; inputs so that products with inputs of calibration data change little, see "
        "`hpnlp.ops.weights.quantize_by_moments`. Tables and experts are rounded to the nearest."
    )
    return option("nearest", text, among=BY)


@dataclasses.dataclass(frozen=True)
class Int8Conversion(Conversion):
    """Kernels and tables of 8-bit integers, with a scale for each column of a kernel and each row of a table."""

    integer_products: bool = option(True, "Products round their inputs to 8 bits as well.")
    limits: str = _limits_option()
    by: str = _by_option()
    smooth: int | float = option(
        0.0,
        "Strength of `hpnlp.ops.weights.smoothing_factors`; 0 for none, 0.5 in the paper. For inputs of which some are much "
        "larger than others; products take one more pass over their inputs.",
        least=0,
        most=1,
    )

    @property
    def reads_inputs(self) -> bool:
        return self.by == "inputs" or self.smooth > 0

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        limits, products = self.limits, self.integer_products
        if moments is None:
            return weights.quantize(w, 8, by_row=is_table(path), limits=limits, integer_products=products)
        factors = weights.smoothing_factors(w, moments, self.smooth) if self.smooth else None
        return _rounded(w, moments, factors, 8, 0, limits, self.by, products)


@dataclasses.dataclass(frozen=True)
class Int4Conversion(Conversion):
    """Kernels of 4-bit integers with a scale for each group of rows of a column, two to a byte; tables of 8-bit integers."""

    group: int = option(32, "Rows of a group; it must divide the rows of every kernel.", least=1)
    limits: str = _limits_option()
    by: str = _by_option()
    scaled: bool = option(
        False,
        "Rows are scaled before they are rounded, by a power of their inputs' root mean square that is searched, see "
        "`hpnlp.ops.weights.search_row_factors`; products take one more pass over their inputs.",
    )

    @property
    def reads_inputs(self) -> bool:
        return self.by == "inputs" or self.scaled

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        group, limits = self.group, self.limits
        if is_table(path):
            return weights.quantize(w, 8, by_row=True, limits=limits)
        if w.shape[0] % group:
            raise InputError(f"int4(group={group}) does not divide the {w.shape[0]} rows of {path}: choose a divisor")
        if moments is None:
            return weights.pack(weights.quantize(w, 4, group=group, limits=limits), "int4")
        factors = None
        if self.scaled:
            factors = weights.search_row_factors(
                w, moments, lambda w: weights.quantize(w, 4, group=group, limits=limits).dense()
            )
        return _rounded(w, moments, factors, 4, group, limits, self.by, True)


@dataclasses.dataclass(frozen=True)
class Float8Conversion(Conversion):
    """Kernels and tables of 8-bit floats, with a scale for each column of a kernel and each row of a table."""

    dtype: str = option("e4m3", "e4m3 or e5m2.", among=("e4m3", "e5m2"))
    round_inputs: bool = option(
        False, "Products of kernels round their inputs to 8 bits as well, for devices that multiply 8-bit floats."
    )

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        table = is_table(path)
        return weights.to_floats(w, self.dtype, by_row=table, round_inputs=self.round_inputs and not table)


@dataclasses.dataclass(frozen=True)
class BFloat16Conversion(Conversion):
    """Kernels and tables of bfloat16; products round their inputs as well."""

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        return weights.to_floats(w, "bfloat16")


@dataclasses.dataclass(frozen=True)
class Float16Conversion(Conversion):
    """Kernels and tables of float16, up to 65,504, beyond which the stage raises; products have the dtype of their inputs."""

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        return weights.to_floats(w, "float16")


@dataclasses.dataclass(frozen=True)
class TernaryConversion(Conversion):
    """Kernels of the values -a, 0 and a, and tables with an a for each row."""

    packed: bool = option(True, "Four numbers to a byte; otherwise one, for faster products.")

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        return weights.ternarize(w, "row" if is_table(path) else "matrix", packed=self.packed)


@dataclasses.dataclass(frozen=True)
class BinaryConversion(Conversion):
    """Kernels of the values -a and a, with an a for each column; tables of 8-bit integers."""

    packed: bool = option(True, "Eight numbers to a byte; otherwise one, for faster products.")
    inputs: bool = option(
        False,
        "Products round their inputs to the mean magnitude of each row with a sign as well, and compare bits in place of "
        'multiplications (Rastegari et al. 2016, "XNOR-Net"). It is for models that are trained with '
        "train.weights=binary(inputs=True).",
    )

    def __post_init__(self) -> None:
        if self.inputs and not self.packed:
            raise InputError(
                "binary(packed=False, inputs=True): products of bits need packed bits: leave out packed=False or inputs=True"
            )

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        if is_table(path):
            return weights.quantize(w, by_row=True)
        return weights.binarize_products(w) if self.inputs else weights.binarize(w, packed=self.packed)


@dataclasses.dataclass(frozen=True)
class PowersConversion(Conversion):
    """Kernels and tables of 0 and seven powers of two with signs; the largest power is that of a kernel or of a table's row."""

    packed: bool = option(True, "Two numbers to a byte; otherwise one, for faster products.")

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        return weights.round_to_powers(w, "row" if is_table(path) else "matrix", packed=self.packed)


@dataclasses.dataclass(frozen=True)
class CodebookConversion(Conversion):
    """Matrices of few shared values, one of which is 0, by k-means."""

    bits: int = option(4, "Kernels have 2^bits values.", least=1, most=8)
    table_bits: int = option(8, "Tables have 2^table_bits values.", least=1, most=8)

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        return weights.cluster(w, 2 ** (self.table_bits if is_table(path) else self.bits), keep_zeros=True)


@dataclasses.dataclass(frozen=True)
class TwoFourConversion(Conversion):
    """Kernels with two numbers of each four rows of a column; tables stay."""

    by: str = option(
        "magnitude",
        "magnitude keeps the two largest; inputs those with which products with inputs of calibration data change little, and "
        "changes them, see `hpnlp.ops.weights.two_of_four_by_moments`.",
        among=("magnitude", "inputs"),
    )

    @property
    def reads_inputs(self) -> bool:
        return self.by == "inputs"

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        if is_table(path):
            return w
        if w.shape[0] % 4:
            raise InputError(f"two_four: {path} has {w.shape[0]} rows: expected a multiple of 4")
        return weights.keep_two_of_four(w) if moments is None else weights.two_of_four_by_moments(w, moments)


@dataclasses.dataclass(frozen=True)
class BlocksConversion(Conversion):
    """Kernels of square blocks, of which those of the largest norm stay, equally many in each column of blocks; tables stay."""

    share: int | float = option(REQUIRED, "Share of the blocks that stays.", above=0, most=1)
    block: int = option(64, "Rows and columns of a block; it must divide those of every kernel.", least=1)

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        if is_table(path):
            return w
        if w.shape[0] % self.block or w.shape[1] % self.block:
            raise InputError(
                f"blocks(block={self.block}) does not divide {path} of {w.shape[0]} x {w.shape[1]}: choose a common divisor"
            )
        return weights.keep_blocks(w, self.share, self.block)


@dataclasses.dataclass(frozen=True)
class BalancedConversion(Conversion):
    """Kernels with equally many weights in each column, whose products skip the zeros; tables stay."""

    share: int | float = option(
        REQUIRED,
        "Share of the weights of each column that stays; the number is rounded up to a multiple of 4.",
        above=0,
        most=1,
    )
    by: str = option(
        "magnitude",
        "magnitude keeps the largest weights of each column; inputs chooses and changes weights so that products with inputs "
        "of calibration data change little, see `hpnlp.ops.weights.balanced_by_moments`.",
        among=("magnitude", "inputs"),
    )

    @property
    def reads_inputs(self) -> bool:
        return self.by == "inputs"

    def convert(self, path: str, w: Array, moments: Array | None) -> Any:
        if is_table(path):
            return w
        share = self.share
        return weights.keep_balanced(w, share) if moments is None else weights.balanced_by_moments(w, moments, share)


# Conversions by the name of their stage.
CONVERSIONS: dict[str, type[Conversion]] = {
    "int8": Int8Conversion,
    "int4": Int4Conversion,
    "fp8": Float8Conversion,
    "bf16": BFloat16Conversion,
    "fp16": Float16Conversion,
    "ternary": TernaryConversion,
    "binary": BinaryConversion,
    "pow2": PowersConversion,
    "codebook": CodebookConversion,
    "two_four": TwoFourConversion,
    "blocks": BlocksConversion,
    "balanced": BalancedConversion,
}


def _rounded(
    w: Array,
    moments: Array,
    factors: Array | None,
    bits: int,
    group: int,
    limits: str,
    by: str,
    integer_products: bool,
) -> Any:
    """Rounds a matrix to integers, after its rows are divided by the factors, if there are any."""
    if factors is not None:
        w, moments = w / factors[:, None], moments * factors[:, None] * factors[None]
    if by == "inputs":
        rounded = weights.quantize_by_moments(
            w, moments, bits, group=group, limits=limits, integer_products=integer_products
        )
    else:
        rounded = weights.quantize(w, bits, group=group, limits=limits, integer_products=integer_products)
    rounded = weights.pack(rounded, "int4") if bits == 4 else rounded
    return rounded if factors is None else weights.RowScaledWeight(rounded, factors)
