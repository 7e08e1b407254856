"""Weights in the form whose products ONNX runtimes have kernels for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.ops.linear import product
from hpnlp.ops.weight import Weight, dense, is_weight
from hpnlp.ops.weights.balanced import BalancedWeight
from hpnlp.ops.weights.integer import IntegerWeight
from hpnlp.ops.weights.xnor import BinaryProductWeight, row_scales


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RuntimeIntegerWeight(IntegerWeight):
    """An IntegerWeight whose inputs are rounded as DynamicQuantizeLinear does: 8 bits over the range of all inputs."""

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        if self.scales.shape[0] > 1:
            return super().matmul(x)
        return dynamic_integer_product(x.astype(jnp.float32), self.codes.astype(jnp.int8), self.scales[0])

    def matmul_transposed(self, x: Float[Array, "M F"]) -> Float[Array, "M D"]:
        if self.scales.shape[1] > 1:
            return super().matmul_transposed(x)
        return dynamic_integer_product(x.astype(jnp.float32), self.codes.astype(jnp.int8).T, self.scales[:, 0])


@jax.jit
def dynamic_integer_product(
    x: Float[Array, "M D"], codes: Int[Array, "D F"], scales: Float[Array, "F"]
) -> Float[Array, "M F"]:
    """Product of rounded inputs with integers; a function of its own, which the exporter finds by its name.

    Args:
      x: [M, D] float32.
      codes: int8 [D, F].
      scales: float32 [F] or [1].

    Returns:
      [M, F] float32.
    """
    low, high = jnp.minimum(x.min(), 0.0), jnp.maximum(x.max(), 0.0)
    step = jnp.maximum((high - low) / 255.0, jnp.finfo(jnp.float32).tiny)
    zero = jnp.clip(jnp.round(-low / step), 0, 255)
    rounded = jnp.clip(jnp.round(x / step) + zero, 0, 255).astype(jnp.int32) - zero.astype(jnp.int32)
    sums = jax.lax.dot_general(
        rounded, codes.astype(jnp.int32), (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
    )
    return sums.astype(jnp.float32) * step * scales[None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RuntimeBinaryWeight(Weight):
    """A BinaryProductWeight with a sign in each byte: ONNX has no operation that counts bits.

    Attributes:
      codes: int8 [D, F], -1 and 1.
      scales: float32 [1, F].
    """

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[-2:]

    def dense(self) -> Float[Array, "D F"]:
        return self.codes.astype(jnp.float32) * self.scales

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        signs = jnp.where(x < 0, -1.0, 1.0).astype(jnp.float32)
        return product(signs, self.codes.astype(jnp.float32)) * row_scales(x) * self.scales

    def axes(self, names: tuple[str | None, ...]) -> Any:
        return RuntimeBinaryWeight(names, (*names[:-2], None, names[-1]))


def for_runtimes(weights: PyTree) -> Any:
    """Weights in the form whose products ONNX runtimes have kernels for.

    Args:
      weights: Weights of a model.

    Returns:
      The tree, with a RuntimeIntegerWeight in place of each IntegerWeight that multiplies integers and rounds each input by
      its own range, a RuntimeBinaryWeight in place of each BinaryProductWeight, and the dense matrix in place of each
      BalancedWeight, whose product would be several nodes for each of its steps.
    """
    return jax.tree.map(_converted, weights, is_leaf=is_weight)


def _converted(leaf: PyTree) -> Any:
    """The weight of a leaf whose product runtimes have."""
    if isinstance(leaf, BalancedWeight):
        return dense(leaf)
    if isinstance(leaf, BinaryProductWeight):
        signs = dataclasses.replace(leaf, scales=jnp.ones_like(leaf.scales))
        return RuntimeBinaryWeight(dense(signs).astype(jnp.int8), leaf.scales)
    if type(leaf) is not IntegerWeight or not leaf.integer_products or leaf.x_scale is not None:
        return leaf
    if leaf.codes.dtype != jnp.int8 or 1 not in leaf.scales.shape[-2:]:
        return leaf
    return RuntimeIntegerWeight(leaf.codes, leaf.scales, leaf.integer_products, leaf.x_scale)
