"""Matrices of integers with scales, and products of 8-bit integers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.linear import product
from hpnlp.ops.weight import Weight, scale_axes
from hpnlp.ops.weights import ranges

# XLA:CPU multiplies 8-bit integers of a single row without its fast kernel: 768 x 3072 take 2.8 times as long as in float32, in
# place of 0.73 with a second row of zeros, and 1.8 with 15.
MIN_ROWS = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IntegerWeight(Weight):
    """Integers times scales: w[i, j] = codes[i, j] * scales[i // group, j], where group = D / number of rows of `scales`.

    Products of integers round x to 8 bits. A row of x with a number that is not finite gives NaN if the scale of x is that of
    the row; with a fixed `x_scale`, infinities are clipped and NaN becomes 0. The gradient of x is that of the exact product,
    and 0 where x is clipped.

    Attributes:
      codes: int8 or int4 [D, F].
      scales: float32 [1, F], one for each column; [1, 1], one in all; [D, 1], one for each row, as tables have them; or
        [D / group, F].
      integer_products: Products round x as well. They multiply 8-bit integers where the scales are [1, F] or [1, 1] in
        `matmul`, and [D, 1] or [1, 1] in `matmul_transposed`; with groups, `matmul` multiplies bfloat16. Otherwise products
        are those of the dense matrix.
      x_scale: float32 [], the fixed step to which inputs are rounded, in products of integers; None for 1/127 of the largest
        magnitude of each row of x.
    """

    codes: Any
    scales: Any
    integer_products: bool = dataclasses.field(default=True, metadata={"static": True})
    x_scale: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[-2:]

    @property
    def stages(self) -> set[str]:
        return {jnp.dtype(self.codes.dtype).name}

    def dense(self) -> Float[Array, "D F"]:
        d, f = self.shape
        groups = self.codes.astype(jnp.float32).reshape(self.scales.shape[0], -1, f)
        return (groups * self.scales[:, None]).reshape(d, f)

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        if not self.integer_products:
            return product(x, self.dense())
        if self.scales.shape[0] == 1:
            return integer_product(x, self.codes.astype(jnp.int8), self.scales[0], self.x_scale)
        # Products of integers for each group take 1.4 to 4 times as long on XLA:CPU from 128 rows on, and those of float32 1.8
        # times (group 128, 384 x 1536).
        return product(x.astype(jnp.bfloat16), self.dense().astype(jnp.bfloat16))

    def matmul_transposed(self, x: Float[Array, "M F"]) -> Float[Array, "M D"]:
        # With groups, the scales of a single column are [D / group, 1].
        if self.integer_products and self.scales.shape[1] == 1 and self.scales.shape[0] in (1, self.shape[0]):
            # Over the last axis of the codes, so that XLA:CPU does not transpose them at each call.
            return _integer_product(*vary_alike(x, self.codes.astype(jnp.int8), self.scales[:, 0]), None, 1)
        return super().matmul_transposed(x)

    def take(self, ids: Array) -> Float[Array, "*tokens F"]:
        rows = self.codes[ids].astype(jnp.float32)
        return rows * self.scales[ids // (self.shape[0] // self.scales.shape[0])]

    def axes(self, names: tuple[str | None, ...]) -> Any:
        x_scale = None if self.x_scale is None else names[:-2]
        scales = scale_axes(self.scales, names)
        return dataclasses.replace(self, codes=names, scales=scales, x_scale=x_scale)


@array_op("M F", x="M", codes="_ F")
def integer_product(
    x: Float[Array, "M D"],
    codes: Int[Array, "D F"],
    scales: Float[Array, "columns"],
    x_scale: Float[Array, ""] | None = None,
) -> Float[Array, "M F"]:
    """Product of x, rounded to 8 bits, with integers times scales.

    Args:
      x: [M, D].
      codes: int8 [D, F].
      scales: float32 [F] or [1].
      x_scale: As in `IntegerWeight`.

    Returns:
      [M, F] float32. Gradients reach x and `scales`.

    Cost:
      M D F multiplications of 8-bit integers, and two passes over x.
    """
    if x_scale is None:
        return _integer_product(*vary_alike(x, codes, scales), None, 0)
    return _integer_product(*vary_alike(x, codes, scales, x_scale), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _integer_product(x: Array, codes: Array, scales: Array, x_scale: Array | None, axis: int) -> Array:
    """`integer_product`, of which `axis` of the codes is that of the sum."""
    numbers = x.astype(jnp.float32)
    if x_scale is None:
        magnitude = jnp.max(jnp.abs(numbers), axis=-1, keepdims=True)
        steps = ranges.steps(magnitude, 127.0)
        rounded = jnp.round(numbers / steps).astype(jnp.int8)
    else:
        steps = x_scale
        rounded = jnp.round(jnp.clip(jnp.nan_to_num(numbers / steps), -127.0, 127.0)).astype(jnp.int8)
    rows = rounded.shape[0]
    if isinstance(rows, int) and rows < MIN_ROWS:  # the number of rows of an exported function may be a symbol
        rounded = jnp.pad(rounded, ((0, MIN_ROWS - rows), (0, 0)))
    sums = jax.lax.dot_general(rounded, codes, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.int32)
    return sums[:rows].astype(jnp.float32) * steps * scales[None]


@accepts_numpy
def _integer_product_forward(
    x: Array, codes: Array, scales: Array, x_scale: Array | None, axis: int
) -> tuple[Array, Any]:
    return _integer_product(x, codes, scales, x_scale, axis), (x, codes, scales, x_scale)


def _integer_product_backward(axis: int, saved: PyTree, dy: Array) -> tuple[Any, None, Any, None]:
    x, codes, scales, x_scale = saved
    codes = codes if axis == 0 else codes.T
    matrix = codes.astype(jnp.float32) * scales[None]
    dx = jax.lax.dot_general(dy, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if x_scale is not None:
        dx = jnp.where(jnp.abs(x.astype(jnp.float32)) <= 127.0 * x_scale, dx, 0.0)
    column_sums = product(x.astype(jnp.float32), codes.astype(jnp.float32))
    dscales = (dy * column_sums).sum(axis=0)
    dscales = dscales if scales.size == dscales.size else dscales.sum(keepdims=True)
    return dx.astype(x.dtype), None, dscales.astype(scales.dtype), None


_integer_product.defvjp(_integer_product_forward, _integer_product_backward)


@array_op()
def quantize(
    w: Float[Array, "D F"],
    bits: int = 8,
    *,
    group: int = 0,
    by_row: bool = False,
    limits: Float[Array, "..."] | str | None = None,
    x_limit: Float[Array, ""] | float | None = None,
    integer_products: bool = True,
) -> IntegerWeight:
    """Rounds a matrix to integers from -(2^(bits - 1) - 1) to 2^(bits - 1) - 1.

    Args:
      w: [D, F].
      bits: 2 to 8; up to 4 bits are stored as int4.
      group: Rows of a group with scales of its own; 0 for one group.
      by_row: A scale for each row in place of each column, as tables need it.
      limits: Magnitudes that become the largest integer, in the shape of the scales; or how `ranges.limits` chooses them:
        "max", "percentile" or "mse"; None for the largest magnitudes. Larger numbers are clipped.
      x_limit: Magnitude of inputs that becomes 127 in products of integers, see `ranges.activation_limit`; None for the
        largest magnitude of each row of the inputs.
      integer_products: As in `IntegerWeight`.

    Returns:
      The quantized matrix; NaN where a column, row or group has a NaN.

    Raises:
      InputError: `bits` is out of range, `group` does not divide D, or `limits` is unknown.
    """
    d, f = w.shape
    top, groups = ranges.largest_code(bits), ranges.grouped(w.astype(jnp.float32), group=group, by_row=by_row)
    if limits is None or isinstance(limits, str):
        limits = ranges.limits(w, bits, limits or "max", group=group, by_row=by_row)
    scales = ranges.steps(limits, top)
    codes = jnp.clip(jnp.round(groups / scales[:, None]), -top, top).reshape(d, f)
    x_scale = None if x_limit is None else jnp.asarray(x_limit, jnp.float32) / 127.0
    return IntegerWeight(codes.astype(jnp.int8 if bits > 4 else jnp.int4), scales, integer_products, x_scale)
