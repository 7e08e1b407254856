"""Matrices of 8- and 16-bit floating-point numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.linear import product
from hpnlp.ops.weight import Weight, scale_axes
from hpnlp.ops.weights import ranges
from hpnlp.types import InputError

FORMATS = {
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FloatWeight(Weight):
    """Floating-point numbers of few bits, with scales: w = codes * scales.

    Products of bfloat16 and of 8 bits round x to bfloat16, of which every 8-bit number is one, and have float32 sums. XLA:CPU
    has a fast kernel for them from some 8 rows on where the processor multiplies bfloat16; with fewer rows, and with 8 bits,
    whose conversion is a pass over the matrix, they may take longer than those of float32. Products of float16 are those of
    the dtype of x.

    Rows of x with a number that is not finite give rows that are not finite.

    Attributes:
      codes: bfloat16, float16, float8_e4m3fn or float8_e5m2 [D, F]; no gradient reaches those of 8 bits in products.
      scales: float32 [1, F], one for each column; [D, 1], one for each row, as tables have them; None for 1.
      round_inputs: Products scale each row of x to the range of the 8-bit format and round it as well, and multiply 8-bit
        numbers, for devices that do; others convert both sides, and take longer than without.
    """

    codes: Any
    scales: Any = None
    round_inputs: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[-2:]

    def is_in_range(self) -> bool:
        return self.scales is not None or bool(jnp.isfinite(self.codes).all())

    def as_array(self, dtype: DTypeLike) -> Array | None:
        return self.codes if self.scales is None and self.codes.dtype == dtype else None

    @property
    def stages(self) -> set[str]:
        name = jnp.dtype(self.codes.dtype).name
        return {"fp8" if name.startswith("float8") else {"bfloat16": "bf16", "float16": "fp16"}.get(name, name)}

    def dense(self) -> Float[Array, "D F"]:
        numbers = self.codes.astype(jnp.float32)
        return numbers if self.scales is None else numbers * self.scales

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        if self.scales is None:
            return self._product(x, transposed=False)
        if self.scales.shape[0] == 1:
            return self._product(x, transposed=False) * self.scales
        return self._product(x * self.scales.T.astype(x.dtype), transposed=False)

    def matmul_transposed(self, x: Float[Array, "M F"]) -> Float[Array, "M D"]:
        if self.scales is None:
            return self._product(x, transposed=True)
        if self.scales.shape[1] == 1:
            return self._product(x, transposed=True) * self.scales.T
        return self._product(x * self.scales.astype(x.dtype), transposed=True)

    def take(self, ids: Array) -> Float[Array, "*tokens F"]:
        rows = self.codes[ids].astype(jnp.float32)
        if self.scales is None:
            return rows
        return rows * self.scales[jnp.zeros_like(ids) if self.scales.shape[0] == 1 else ids]

    def axes(self, names: tuple[str | None, ...]) -> Any:
        scales = None if self.scales is None else scale_axes(self.scales, names)
        return dataclasses.replace(self, codes=names, scales=scales)

    def _product(self, x: Array, *, transposed: bool) -> Array:
        """Product of x with the codes, or with their transpose."""
        codes = self.codes.T if transposed else self.codes
        if self.codes.dtype == jnp.float16:
            return product(x, codes)
        if self.codes.dtype == jnp.bfloat16:
            return product(x.astype(jnp.bfloat16), codes)
        codes = jax.lax.stop_gradient(codes)
        if self.round_inputs:
            return _float8_product(*vary_alike(x, codes))
        return product(x.astype(jnp.bfloat16), codes.astype(jnp.bfloat16))


@jax.custom_vjp
def _float8_product(x: Array, codes: Array) -> Array:
    """Product of x, rounded to the 8-bit dtype of the codes by row; its gradient is that of exact x."""
    numbers = x.astype(jnp.float32)
    rounded, steps = _rounded(numbers, jnp.abs(numbers).max(axis=1, keepdims=True), codes.dtype)
    return product(rounded, codes) * steps


@accepts_numpy
def _float8_forward(x: Array, codes: Array) -> tuple[Array, tuple[Array, Array]]:
    return _float8_product(x, codes), (x, codes)


def _float8_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, None]:
    x, codes = saved
    return product(dy.astype(jnp.bfloat16), codes.astype(jnp.bfloat16).T).astype(x.dtype), None


_float8_product.defvjp(_float8_forward, _float8_backward)


def _rounded(x: Array, limits: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """x, divided by steps that bring `limits` to the largest number of a dtype, and rounded to it; and the steps."""
    largest = float(jnp.finfo(dtype).max)
    steps = ranges.steps(limits, largest)
    return jnp.clip(x / steps, -largest, largest).astype(dtype), steps


@array_op()
def to_floats(
    w: Float[Array, "D F"], dtype: str = "e4m3", *, by_row: bool = False, round_inputs: bool = False
) -> FloatWeight:
    """Rounds a matrix to floating-point numbers of fewer bits.

    Args:
      w: [D, F].
      dtype: "e4m3" or "e5m2" (8 bits, with scales that bring the largest magnitude to the largest number of the format),
        "bfloat16" or "float16" (without scales; numbers over 65,504 become infinite in float16).
      by_row: A scale for each row in place of each column, as tables need it.
      round_inputs: As in `FloatWeight`; 8 bits only.

    Returns:
      The rounded matrix.

    Raises:
      InputError: `dtype` is unknown, or `round_inputs` is set for 16 bits.

    References:
      Micikevicius et al. 2022, "FP8 formats for deep learning".
    """
    if dtype not in FORMATS:
        raise InputError(f"dtype={dtype!r}: expected {', '.join(FORMATS)}")
    wide = np.dtype(FORMATS[dtype]).itemsize > 1
    if round_inputs and wide:
        raise InputError(f"round_inputs=True with dtype={dtype!r}: expected e4m3 or e5m2, or round_inputs=False")
    if wide:
        return FloatWeight(w.astype(FORMATS[dtype]))
    w = w.astype(jnp.float32)
    codes, scales = _rounded(w, jnp.abs(w).max(axis=1 if by_row else 0, keepdims=True), FORMATS[dtype])
    return FloatWeight(codes, scales, round_inputs)
