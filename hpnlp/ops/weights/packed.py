"""Matrices of codes of 1, 2 or 4 bits, several to a byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.weight import Weight, scale_axes
from hpnlp.ops.weights.integer import IntegerWeight
from hpnlp.types import InputError

# Bits of a code, by the integers that the codes stand for.
LEVELS = {"binary": 1, "ternary": 2, "int4": 4, "powers": 4}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedWeight(Weight):
    """Integers of few bits times scales, 2, 4 or 8 to a byte: an `IntegerWeight` that is unpacked in each product.

    Arrays and files take 1/32 (binary), 1/16 (ternary) or 1/8 (powers of two, int4) of float32. Unpacking is a pass over the
    matrix in each product: integers of 8 bits are faster. int4 is faster here than as an `IntegerWeight`, whose 4-bit integers
    XLA:CPU keeps in a byte each and converts slowly: 0.4 of the time for one row and 384 x 1536 in groups of 32.
    Products treat numbers that are not finite as `IntegerWeight` does.

    Attributes:
      codes: uint8 [ceil(D / n), F], n codes to a byte. The k-th bits of row i are the code of row i + k ceil(D / n).
      scales: As in `IntegerWeight`.
      rows: D.
      levels: Integers of the codes: "binary", -1 and 1; "ternary", -1 to 1; "int4", -8 to 7; "powers", 0 and -64, -32, ... -1,
        1, ... 32, 64.
      integer_products: As in `IntegerWeight`.
    """

    codes: Any
    scales: Any
    rows: int = dataclasses.field(metadata={"static": True})
    levels: str = dataclasses.field(metadata={"static": True})
    integer_products: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.codes.shape[-1]

    def unpack(self) -> IntegerWeight:
        """The same matrix with int8 codes.

        Returns:
          The matrix.
        """
        bits = LEVELS[self.levels]
        fields = [self.codes >> (bits * k) for k in range(8 // bits)]
        codes = jnp.concatenate([_integers(x & (2**bits - 1), self.levels) for x in fields])[: self.rows]
        return IntegerWeight(codes, self.scales, integer_products=self.integer_products)

    @property
    def stages(self) -> set[str]:
        return {"pow2" if self.levels == "powers" else self.levels}

    def dense(self) -> Float[Array, "D F"]:
        return self.unpack().dense()

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        return self.unpack().matmul(x)

    def matmul_transposed(self, x: Float[Array, "M F"]) -> Float[Array, "M D"]:
        return self.unpack().matmul_transposed(x)

    def take(self, ids: Array) -> Float[Array, "*tokens F"]:
        bits, stride = LEVELS[self.levels], self.codes.shape[0]
        shifts = (bits * (ids // stride)).astype(jnp.uint8)[..., None]
        fields = jax.lax.shift_right_logical(*jnp.broadcast_arrays(self.codes[ids % stride], shifts))
        rows = _integers(fields & (2**bits - 1), self.levels).astype(jnp.float32)
        return rows * self.scales[ids // (self.rows // self.scales.shape[0])]

    def parameter_count(self) -> int:
        return self.codes.size // self.codes.shape[-2] * self.rows + self.scales.size

    def axes(self, names: tuple[str | None, ...]) -> Any:
        *leading, _, column = names
        scales = scale_axes(self.scales, names)
        return dataclasses.replace(self, codes=(*leading, None, column), scales=scales)  # bytes mix rows


@array_op()
def pack(w: IntegerWeight, levels: str) -> PackedWeight:
    """Packs codes of few bits into bytes.

    Args:
      w: A matrix whose codes are integers of `levels`.
      levels: As in `PackedWeight`.

    Returns:
      The packed matrix.

    Raises:
      InputError: `levels` is unknown.
    """
    if levels not in LEVELS:
        raise InputError(f"levels={levels!r}: expected {', '.join(LEVELS)}")
    bits, (d, f) = LEVELS[levels], w.shape
    per_byte = 8 // bits
    codes = w.codes.astype(jnp.int8)
    stride = -(-d // per_byte)
    codes = jnp.pad(codes, ((0, per_byte * stride - d), (0, 0)), constant_values=1)  # 1 is an integer of all levels
    fields = _fields(codes, levels).reshape(per_byte, stride, f)
    packed = fields[0]
    for k in range(1, per_byte):
        packed = packed | (fields[k] << (bits * k))
    return PackedWeight(packed, w.scales, d, levels, w.integer_products)


def _integers(fields: UInt8[Array, "*shape"], levels: str) -> Int8[Array, "*shape"]:
    """The integers of bit fields."""
    x = fields.astype(jnp.int8)
    if levels == "binary":
        return 2 * x - 1
    if levels == "ternary":
        return x - 1
    if levels == "int4":
        return x - 8
    magnitude = jax.lax.shift_right_logical(jax.lax.shift_left(jnp.ones_like(x), x & 7), jnp.ones_like(x))
    return jnp.where(x >= 8, -magnitude, magnitude)


def _fields(codes: Int8[Array, "*shape"], levels: str) -> UInt8[Array, "*shape"]:
    """Bit fields of integers: the inverse of `_integers`."""
    if levels == "binary":
        return (codes > 0).astype(jnp.uint8)
    if levels == "ternary":
        return (codes + 1).astype(jnp.uint8)
    if levels == "int4":
        return (codes + 8).astype(jnp.uint8)
    exponents = sum((jnp.abs(codes) >= 2**k).astype(jnp.uint8) for k in range(7))
    return exponents + jnp.where(codes < 0, 8, 0).astype(jnp.uint8)
