"""Matrices of integers with scales, and products of 8-bit integers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.linear import product
from hpnlp.ops.weight import Weight
from hpnlp.types import InputError

# XLA:CPU has a fast product of 8-bit integers from this number of rows on.
MIN_ROWS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IntegerWeight(Weight):
    """Integers times scales: w[i, j] = codes[i, j] * scales[i // group, j], where group = D / number of rows of `scales`.

    Attributes:
      codes: int8 or int4 [D, F].
      scales: float32 [1, F], one for each column; [D, 1], one for each row, as tables have them; or [D / group, F].
      integer_products: Products round x to 8 bits as well, by the largest magnitude of each of its rows, and multiply
        integers. Needs scales [1, F] in `matmul`, and [D, 1] in `matmul_transposed`; other products are of floats.
    """

    codes: Any
    scales: Any
    integer_products: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[-2:]

    def dense(self) -> Float[Array, "D F"]:
        d, f = self.shape
        groups = self.codes.astype(jnp.float32).reshape(self.scales.shape[0], -1, f)
        return (groups * self.scales[:, None]).reshape(d, f)

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        if self.integer_products and self.scales.shape[0] == 1 and self.codes.dtype == jnp.int8:
            return _integer_product(x, self.codes, self.scales[0])
        return product(x, self.dense())

    def matmul_transposed(self, x: Float[Array, "M F"]) -> Float[Array, "M D"]:
        if self.integer_products and self.scales.shape[1] == 1 and self.codes.dtype == jnp.int8:
            return _integer_product(x, self.codes.T, self.scales[:, 0])
        return super().matmul_transposed(x)

    def take(self, ids: Int[Array, "*tokens"]) -> Float[Array, "*tokens F"]:
        rows = self.codes[ids].astype(jnp.float32)
        return rows * self.scales[ids // (self.shape[0] // self.scales.shape[0])]

    def axes(self, names: tuple[str | None, ...]) -> Any:
        *leading, row, column = names
        rows, columns = self.scales.shape[-2:]
        scales = (*leading, row if rows == self.shape[0] else None, column if columns > 1 else None)
        return dataclasses.replace(self, codes=names, scales=scales)


@jax.custom_vjp
def _integer_product(x: Array, codes: Array, scales: Array) -> Array:
    """Product of x, rounded to 8 bits by row, with codes [D, F] times scales [F]; its gradient is that of exact x."""
    magnitude = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True)
    x_scales = jnp.where(magnitude == 0, 1.0, magnitude / 127.0)
    rounded = jnp.round(x.astype(jnp.float32) / x_scales).astype(jnp.int8)
    rows = rounded.shape[0]
    if rows < MIN_ROWS:
        rounded = jnp.pad(rounded, ((0, MIN_ROWS - rows), (0, 0)))
    sums = jax.lax.dot_general(rounded, codes, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    return sums[:rows].astype(jnp.float32) * x_scales * scales[None]


def _integer_product_forward(x: Array, codes: Array, scales: Array) -> tuple[Array, Any]:
    return _integer_product(x, codes, scales), (x, codes, scales)


def _integer_product_backward(saved: Any, dy: Array) -> tuple[Any, None, Any]:
    x, codes, scales = saved
    matrix = codes.astype(jnp.float32) * scales[None]
    dx = jax.lax.dot_general(dy, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    column_sums = product(x.astype(jnp.float32), codes.astype(jnp.float32))
    return dx.astype(x.dtype), None, (dy * column_sums).sum(axis=0)


_integer_product.defvjp(_integer_product_forward, _integer_product_backward)


@array_op("...", w="...")
def quantize(
    w: Float[Array, "D F"],
    bits: int = 8,
    *,
    group: int = 0,
    by_row: bool = False,
    limits: Float[Array, "..."] | None = None,
    integer_products: bool = True,
) -> IntegerWeight:
    """Rounds a matrix to integers from -(2^(bits - 1) - 1) to 2^(bits - 1) - 1.

    Args:
      w: [D, F].
      bits: 2 to 8; up to 4 bits are stored as int4.
      group: Rows of a group with scales of its own; 0 for one group.
      by_row: A scale for each row in place of each column, as tables need it.
      limits: Magnitudes that become the largest integer, in the shape of the scales; None for the largest magnitudes. Larger
        numbers are clipped.
      integer_products: As in `IntegerWeight`.

    Returns:
      The quantized matrix.

    Raises:
      InputError: `bits` is out of range, or `group` does not divide D.
    """
    d, f = w.shape
    if not 2 <= bits <= 8:
        raise InputError(f"bits={bits}: expected 2 to 8")
    if group and (by_row or d % group):
        raise InputError(f"group={group}: expected 0 or a divisor of the {d} rows, without by_row")
    groups = w.astype(jnp.float32).reshape((d if by_row else d // group if group else 1), -1, f)
    if limits is None:
        limits = jnp.abs(groups).max(axis=(1, 2) if by_row else 1).reshape((d, 1) if by_row else (-1, f))
    top = 2 ** (bits - 1) - 1
    scales = jnp.where(limits == 0, 1.0, limits / top).astype(jnp.float32)
    codes = jnp.clip(jnp.round(groups / scales[:, None]), -top, top).reshape(d, f)
    return IntegerWeight(codes.astype(jnp.int8 if bits > 4 else jnp.int4), scales, integer_products)
