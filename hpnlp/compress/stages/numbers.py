"""Stages of recipes that represent matrices by fewer or simpler numbers.

Each function returns a `Conversion`, whose function of a matrix's path, its array, and the second moments of its inputs returns
the matrix as a `Weight`, or as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hpnlp.compress.matrices import is_table
from hpnlp.compress.stages import check_share
from hpnlp.ops import weights
from hpnlp.ops.weights.ranges import METHODS
from hpnlp.types import Array, InputError

BY = "nearest", "inputs"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion of each matrix by itself.

    Attributes:
      convert: Function of a path, an array `[D, F]`, and float32 `[D, D]`, see `ops.weights.quantize_by_moments`, or None: for
        tables, for experts, and if `reads_inputs` is False. It returns an array or a Weight.
      reads_inputs: Whether it needs moments.
    """

    convert: Callable[[str, Any, Any], Any]
    reads_inputs: bool = False


def int8(
    integer_products: bool = True, limits: str = "max", by: str = "nearest", smooth: int | float = 0.0
) -> Conversion:
    """Kernels and tables of 8-bit integers, with a scale for each column of a kernel and each row of a table.

    Args:
      integer_products: Products round their inputs to 8 bits as well.
      limits: Magnitudes that become the largest integer: "max", "percentile" or "mse", see `hpnlp.ops.weights.ranges`.
      by: "nearest" rounds each number by itself; "inputs" so that products with inputs of calibration data change little, see
        `hpnlp.ops.weights.quantize_by_moments`. Tables and experts are rounded to the nearest.
      smooth: Strength of `hpnlp.ops.weights.smoothing_factors`, in [0, 1]; 0 for none, 0.5 in the paper. For inputs of which
        some are much larger than others; products take one more pass over their inputs.

    Returns:
      The conversion.

    Raises:
      InputError: `limits` or `by` is unknown, or `smooth` is out of range.
    """
    _check_rounding("int8", limits, by)
    if not 0 <= smooth <= 1:
        raise InputError(f"int8(smooth={smooth}): expected 0, or a strength up to 1")

    def convert(path: str, w: Array, moments: Array | None) -> Any:
        if moments is None:
            return weights.quantize(w, 8, by_row=is_table(path), limits=limits, integer_products=integer_products)
        factors = weights.smoothing_factors(w, moments, smooth) if smooth else None
        return _rounded(w, moments, factors, 8, 0, limits, by, integer_products)

    return Conversion(convert, by == "inputs" or smooth > 0)


def int4(group: int = 32, limits: str = "max", by: str = "nearest", scaled: bool = False) -> Conversion:
    """Kernels of 4-bit integers with a scale for each group of rows of a column, two to a byte; tables of 8-bit integers.

    Args:
      group: Rows of a group; it must divide the rows of every kernel.
      limits: As in `int8`.
      by: As in `int8`.
      scaled: Rows are scaled before they are rounded, by a power of their inputs' root mean square that is searched, see
        `hpnlp.ops.weights.search_row_factors`; products take one more pass over their inputs.

    Returns:
      The conversion.

    Raises:
      InputError: `group` is below 1, or `limits` or `by` is unknown.
    """
    if group < 1:
        raise InputError(f"int4(group={group}): expected at least 1")
    _check_rounding("int4", limits, by)

    def convert(path: str, w: Array, moments: Array | None) -> Any:
        if is_table(path):
            return weights.quantize(w, 8, by_row=True, limits=limits)
        if w.shape[0] % group:
            raise InputError(f"int4(group={group}) does not divide the {w.shape[0]} rows of {path}: choose a divisor")
        if moments is None:
            return weights.pack(weights.quantize(w, 4, group=group, limits=limits), "int4")
        factors = None
        if scaled:
            factors = weights.search_row_factors(
                w, moments, lambda w: weights.quantize(w, 4, group=group, limits=limits).dense()
            )
        return _rounded(w, moments, factors, 4, group, limits, by, True)

    return Conversion(convert, by == "inputs" or scaled)


def fp8(dtype: str = "e4m3", round_inputs: bool = False) -> Conversion:
    """Kernels and tables of 8-bit floats, with a scale for each column of a kernel and each row of a table.

    Args:
      dtype: "e4m3" or "e5m2".
      round_inputs: Products of kernels round their inputs to 8 bits as well, for devices that multiply 8-bit floats.

    Returns:
      The conversion.

    Raises:
      InputError: `dtype` is unknown.
    """
    if dtype not in ("e4m3", "e5m2"):
        raise InputError(f"fp8({dtype!r}): expected e4m3 or e5m2")

    def convert(path: str, w: Array, moments: Array | None) -> Any:
        table = is_table(path)
        return weights.to_floats(w, dtype, by_row=table, round_inputs=round_inputs and not table)

    return Conversion(convert)


def bf16() -> Conversion:
    """Kernels and tables of bfloat16; products round their inputs as well.

    Returns:
      The conversion.
    """
    return Conversion(lambda path, w, moments: weights.to_floats(w, "bfloat16"))


def fp16() -> Conversion:
    """Kernels and tables of float16, whose largest number is 65,504; products have the dtype of their inputs.

    Returns:
      The conversion. The stage raises InputError for a matrix with larger numbers.
    """
    return Conversion(lambda path, w, moments: weights.to_floats(w, "float16"))


def ternary(packed: bool = True) -> Conversion:
    """Kernels of the values -a, 0 and a, and tables with an a for each row.

    Args:
      packed: Four numbers to a byte; otherwise one, for faster products.

    Returns:
      The conversion.
    """
    return Conversion(
        lambda path, w, moments: weights.ternarize(w, "row" if is_table(path) else "matrix", packed=packed)
    )


def binary(packed: bool = True, inputs: bool = False) -> Conversion:
    """Kernels of the values -a and a, with an a for each column; tables of 8-bit integers.

    Args:
      packed: Eight numbers to a byte; otherwise one, for faster products.
      inputs: Products round their inputs to the mean magnitude of each row with a sign as well, and compare bits in place of
        multiplications (Rastegari et al. 2016, "XNOR-Net"). It is for models that are trained with
        `train.weights=binary(inputs=True)`.

    Returns:
      The conversion.

    Raises:
      InputError: `inputs` without `packed`.
    """
    if inputs and not packed:
        raise InputError(
            "binary(packed=False, inputs=True): products of bits need packed bits: leave out packed=False or inputs=True"
        )

    def convert(path: str, w: Array, moments: Array | None) -> Any:
        if is_table(path):
            return weights.quantize(w, by_row=True)
        return weights.binarize_products(w) if inputs else weights.binarize(w, packed=packed)

    return Conversion(convert)


def pow2(packed: bool = True) -> Conversion:
    """Kernels and tables of 0 and seven powers of two with signs; the largest power is that of a kernel or of a table's row.

    Args:
      packed: Two numbers to a byte; otherwise one, for faster products.

    Returns:
      The conversion.
    """
    return Conversion(
        lambda path, w, moments: weights.round_to_powers(w, "row" if is_table(path) else "matrix", packed=packed)
    )


def codebook(bits: int = 4, table_bits: int = 8) -> Conversion:
    """Matrices of few shared values, one of which is 0, by k-means.

    Args:
      bits: Kernels have 2^bits values: 1 to 8.
      table_bits: Tables have 2^table_bits: 1 to 8.

    Returns:
      The conversion.

    Raises:
      InputError: A number of bits is out of range.
    """
    for name, value in (("bits", bits), ("table_bits", table_bits)):
        if not 1 <= value <= 8:
            raise InputError(f"codebook({name}={value}): expected 1 to 8")
    return Conversion(
        lambda path, w, moments: weights.cluster(w, 2 ** (table_bits if is_table(path) else bits), keep_zeros=True)
    )


def two_four(by: str = "magnitude") -> Conversion:
    """Kernels with two numbers of each four rows of a column; tables stay.

    Args:
      by: "magnitude" keeps the two largest; "inputs" those with which products with inputs of calibration data change little,
        and changes them, see `hpnlp.ops.weights.two_of_four_by_moments`.

    Returns:
      The conversion; it raises InputError for kernels whose rows are no multiple of 4.

    Raises:
      InputError: `by` is unknown.
    """
    if by not in ("magnitude", "inputs"):
        raise InputError(f"two_four(by={by!r}): expected magnitude or inputs")

    def convert(path: str, w: Array, moments: Array | None) -> Any:
        if is_table(path):
            return w
        if w.shape[0] % 4:
            raise InputError(f"two_four: {path} has {w.shape[0]} rows: expected a multiple of 4")
        return weights.keep_two_of_four(w) if moments is None else weights.two_of_four_by_moments(w, moments)

    return Conversion(convert, by == "inputs")


def blocks(share: int | float, block: int = 64) -> Conversion:
    """Kernels of square blocks, of which those of the largest norm stay, equally many in each column of blocks; tables stay.

    Args:
      share: Share of the blocks that stays, in (0, 1].
      block: Rows and columns of a block; it must divide those of every kernel.

    Returns:
      The conversion; it raises InputError for kernels that `block` does not divide.

    Raises:
      InputError: `share` or `block` is out of range.
    """
    check_share("blocks", share)
    if block < 1:
        raise InputError(f"blocks(block={block}): expected at least 1")

    def convert(path: str, w: Array, moments: Array | None) -> Any:
        if is_table(path):
            return w
        if w.shape[0] % block or w.shape[1] % block:
            raise InputError(
                f"blocks(block={block}) does not divide {path} of {w.shape[0]} x {w.shape[1]}: choose a common divisor"
            )
        return weights.keep_blocks(w, share, block)

    return Conversion(convert)


def balanced(share: int | float, by: str = "magnitude") -> Conversion:
    """Kernels with equally many weights in each column, whose products skip the zeros; tables stay.

    Args:
      share: Share of the weights of each column that stays, in (0, 1]; the number is rounded up to a multiple of 4.
      by: "magnitude" keeps the largest weights of each column; "inputs" chooses and changes weights so that products with
        inputs of calibration data change little, see `hpnlp.ops.weights.balanced_by_moments`.

    Returns:
      The conversion.

    Raises:
      InputError: `share` is out of range, or `by` is unknown.
    """
    if by not in ("magnitude", "inputs"):
        raise InputError(f"balanced(by={by!r}): expected magnitude or inputs")
    check_share("balanced", share)

    def convert(path: str, w: Array, moments: Array | None) -> Any:
        if is_table(path):
            return w
        return weights.keep_balanced(w, share) if moments is None else weights.balanced_by_moments(w, moments, share)

    return Conversion(convert, by == "inputs")


# Conversions by the name of their stage.
CONVERSIONS: dict[str, Callable[..., Conversion]] = {
    "int8": int8,
    "int4": int4,
    "fp8": fp8,
    "bf16": bf16,
    "fp16": fp16,
    "ternary": ternary,
    "binary": binary,
    "pow2": pow2,
    "codebook": codebook,
    "two_four": two_four,
    "blocks": blocks,
    "balanced": balanced,
}


def _check_rounding(name: str, limits: str, by: str) -> None:
    if limits not in METHODS:
        raise InputError(f"{name}(limits={limits!r}): expected {', '.join(METHODS)}")
    if by not in BY:
        raise InputError(f"{name}(by={by!r}): expected {' or '.join(BY)}")


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
