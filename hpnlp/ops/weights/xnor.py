"""Products of signs: matrices of one bit whose products round their inputs to one bit as well.

For two vectors of D signs, of which n differ, the sum of the products is D - 2 n. Signs are bits of uint32 words, so that an
exclusive or and a count of bits take the place of 32 multiplications.

References:
  Courbariaux et al. 2016, "Binarized neural networks": arXiv 1602.02830.
  Rastegari et al. 2016, "XNOR-Net", section 3.2: arXiv 1603.05279.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree, UInt32

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike, zeros_alike
from hpnlp.ops.weight import Weight

BITS = 32
# XLA:CPU reads a block of words for each row of x: 32 words of 128 columns are 16 kB, half of the fastest cache. Blocks that
# are not contiguous, and blocks of all columns, take more than twice as long.
COLUMNS = 128
WORDS = 32
# Blocks in one step of a loop. XLA:CPU computes a step of one block on one core, and several blocks on all cores. Waking the
# cores costs more than it saves below some 256 rows: 16 rows take 2.2 times as long. XLA compiles a block in 0.1 s.
BLOCKS, MANY_ROWS = 8, 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BinaryProductWeight(Weight):
    """Signs times a scale for each column, one bit for each number; products take the signs of their inputs.

    The product of a row x is mean |x| times the product of sign(x) with the matrix, where sign(0) is 1. A row with a number
    that is not finite gives NaN. The gradient of x is that of the exact product where |x| <= 1, and 0 elsewhere.
    `matmul_transposed` and `take` are those of the dense matrix.

    Attributes:
      codes: uint32 [ceil(F / n), W, n] with W = ceil(D / 32), blocks of n columns, at most 128. Bit j of word k is 1 where row
        j W + k is negative. Bits and columns beyond the matrix are 0.
      scales: float32 [1, F].
      rows: D.
    """

    stage: ClassVar[str] = "binary"
    takes_signs: ClassVar[bool] = True

    codes: Any
    scales: Any
    rows: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.scales.shape[-1]

    def dense(self) -> Float[Array, "D F"]:
        blocks, words, columns = self.codes.shape
        bits = self.codes[:, None] >> jnp.arange(BITS, dtype=jnp.uint32)[None, :, None, None] & 1
        signs = jnp.moveaxis(bits.reshape(blocks, BITS * words, columns), 0, 1).reshape(BITS * words, -1)
        return (1.0 - 2.0 * signs[: self.rows, : self.shape[1]].astype(jnp.float32)) * self.scales

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        return _binary_product(*vary_alike(x, self.codes, self.scales))

    def axes(self, names: tuple[str | None, ...]) -> Any:
        *leading, _, column = names
        codes, scales = (*leading, None, None, None), (*leading, None, column)  # blocks mix columns, and words mix rows
        return dataclasses.replace(self, codes=codes, scales=scales)

    def parameter_count(self) -> int:
        layers = self.scales.size // self.shape[1]
        return layers * self.rows * self.shape[1] + self.scales.size


@array_op()
def binarize_products(w: Float[Array, "D F"]) -> BinaryProductWeight:
    """The signs of a matrix times the mean magnitude of each column, for products with signs of inputs.

    Args:
      w: [D, F]; a NaN makes its column NaN.

    Returns:
      The matrix of `binarize(w, "column")`, whose products take the signs of their inputs.
    """
    d, f = w.shape
    blocks = -(-f // COLUMNS)
    columns = min(f, 8 * -(-f // (8 * blocks)))  # a multiple of the numbers of a vector
    words = pack_signs(w.T)
    padded = jnp.pad(words, ((0, blocks * columns - f), (0, 0)))
    codes = jnp.swapaxes(padded.reshape(blocks, columns, -1), 1, 2)
    return BinaryProductWeight(codes, jnp.abs(w.astype(jnp.float32)).mean(axis=0, keepdims=True), d)


@array_op("M", x="M")
def pack_signs(x: Float[Array, "M D"]) -> UInt32[Array, "M W"]:
    """Signs of rows as bits of words.

    Args:
      x: [M, D].

    Returns:
      uint32 [M, W] with W = ceil(D / 32). Bit j of word k is 1 where x[:, j W + k] is negative; bits beyond D are 0.
    """
    words = -(-x.shape[1] // BITS)
    padded = jnp.pad(x, ((0, 0), (0, BITS * words - x.shape[1])))
    result = jnp.zeros((x.shape[0], words), jnp.uint32)
    # XLA:CPU vectorizes slices of W numbers; a sum over 32 bits beside each other takes 1.7 times as long.
    for j in range(BITS):
        negative = padded[:, j * words : (j + 1) * words] < 0
        result = result | jnp.where(negative, jnp.uint32(1 << j), jnp.uint32(0))
    return result


@array_op("M F", x="M", w="_ F")
def binary_product_reference(x: Float[Array, "M D"], w: Float[Array, "D F"]) -> Float[Array, "M F"]:
    """The product of `binarize_products(w)` by its definition: products of floats.

    Args:
      x: [M, D].
      w: [D, F].

    Returns:
      [M, F] float32: mean |x| of the row, times mean |w| of the column, times the product of the signs.
    """
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    x_signs, w_signs = (jnp.where(side < 0, -1.0, 1.0) for side in (x, w))
    products = lax.dot_general(x_signs, w_signs, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return products * row_scales(x) * jnp.abs(w).mean(axis=0, keepdims=True)


@array_op("M", x="M")
def row_scales(x: Float[Array, "M D"]) -> Float[Array, "M 1"]:
    """The mean magnitude of each row, of which XNOR-Net computes a map over an image (its eq. 11).

    Args:
      x: [M, D].

    Returns:
      float32 [M, 1]; NaN for a row with a number that is not finite.
    """
    means = jnp.abs(x.astype(jnp.float32)).mean(axis=1, keepdims=True)
    return jnp.where(jnp.isfinite(means), means, jnp.nan)


@jax.custom_vjp
def _binary_product(x: Array, codes: Array, scales: Array) -> Array:
    """The product of `BinaryProductWeight`, x [M, D]."""
    d, f = x.shape[1], scales.shape[1]
    count, _, columns = codes.shape
    is_many = not isinstance(x.shape[0], int) or x.shape[0] >= MANY_ROWS  # an exported function may have a symbol
    groups = -(-count // (BLOCKS if is_many else 1))
    size = -(-count // groups)
    codes = jnp.pad(codes, ((0, groups * size - count), (0, 0), (0, 0)))
    scales = jnp.pad(scales[0], (0, groups * size * columns - f)).reshape(-1, columns)
    words, rows = pack_signs(x), row_scales(x)
    if groups == 1:
        return _columns(words, codes, scales, rows, d)[:, :f]
    by_group = codes.reshape(groups, size, *codes.shape[1:]), scales.reshape(groups, size, columns)
    results = lax.map(lambda group: _columns(words, group[0], group[1], rows, d), by_group)
    return jnp.moveaxis(results, 0, 1).reshape(x.shape[0], -1)[:, :f]


def _columns(
    words: UInt32[Array, "M W"],
    codes: UInt32[Array, "B W n"],
    scales: Float[Array, "B n"],
    rows: Float[Array, "M 1"],
    d: int,
) -> Float[Array, "M columns"]:
    """Products with some blocks of columns."""
    count = codes.shape[1]
    steps = -(-count // WORDS)
    if steps == 1:  # scaled before the blocks are joined: a pass less over the result
        return jnp.concatenate(
            [_products(n, d) * rows * s[None] for n, s in zip(_differing(words, codes), scales, strict=True)], axis=1
        )
    size = -(-count // steps)
    missing = steps * size - count
    words = jnp.pad(words, ((0, 0), (0, missing))).reshape(-1, steps, size)
    codes = jnp.pad(codes, ((0, 0), (0, missing), (0, 0))).reshape(codes.shape[0], steps, size, -1)

    def step(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        return total + jnp.concatenate(_differing(*pair), axis=1), None

    zeros = zeros_alike(words, (words.shape[0], scales.size), jnp.uint32)
    differing, _ = lax.scan(step, zeros, (jnp.moveaxis(words, 1, 0), jnp.moveaxis(codes, 1, 0)))
    return _products(differing, d) * rows * scales.reshape(1, -1)


def _differing(words: UInt32[Array, "M W"], codes: UInt32[Array, "B W n"]) -> list[UInt32[Array, "M n"]]:
    """Number of signs that differ, for each block of columns."""
    counts = []
    for block in codes:
        bits = [lax.population_count(words[:, k, None] ^ block[None, k]) for k in range(words.shape[1])]
        counts.append(functools.reduce(jnp.add, bits))
    return counts


def _products(differing: UInt32[Array, "M n"], d: int) -> Float[Array, "M n"]:
    """Sums of d products of signs."""
    return (d - 2 * differing.astype(jnp.int32)).astype(jnp.float32)


@accepts_numpy
def _forward(x: Array, codes: Array, scales: Array) -> tuple[Array, Any]:
    return _binary_product(x, codes, scales), (x, codes, scales)


def _backward(saved: PyTree, dy: Array) -> tuple[Array, None, Array]:
    x, codes, scales = saved
    matrix = BinaryProductWeight(codes, scales, x.shape[1]).dense()
    dx = lax.dot_general(dy, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    sums = _binary_product(x, codes, jnp.ones_like(scales))
    return jnp.where(jnp.abs(x) <= 1, dx, 0.0).astype(x.dtype), None, (dy * sums).sum(axis=0, keepdims=True)


_binary_product.defvjp(_forward, _backward)
