"""Matrices that report the second moments of their inputs, as a gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from hpnlp.ops.linear import product
from hpnlp.ops.weight import Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedWeight(Weight):
    """A matrix whose gradient by `moments` is the sum of x^T x over all inputs x of `matmul`.

    A gradient is the one result of a model that every layer, loop and layout passes on, so that no layer needs to know that its
    inputs are observed.

    Attributes:
      matrix: [D, F].
      moments: float32 [D, D], zeros.
    """

    matrix: Any
    moments: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[-2:]

    def dense(self) -> Float[Array, "D F"]:
        return self.matrix

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        return _observed_product(x, self.matrix, self.moments)

    def axes(self, names: tuple[str | None, ...]) -> Any:
        *leading, row, _ = names
        return ObservedWeight(names, (*leading, row, None))


def is_observed(node: Any) -> bool:
    """Whether a node of a tree of parameters is an ObservedWeight."""
    return isinstance(node, ObservedWeight)


def split_observed(w: Any) -> tuple[Any, Any]:
    """The matrix of a parameter, and the second moments of its inputs; None for a parameter that is not observed."""
    return (w.matrix, w.moments) if isinstance(w, ObservedWeight) else (w, None)


@jax.custom_vjp
def _observed_product(x: Array, w: Array, moments: Array) -> Array:
    return product(x, w)


def _forward(x: Array, w: Array, moments: Array) -> tuple[Array, Any]:
    return product(x, w), (x, w)


def _backward(saved: PyTree, dy: Array) -> tuple[Array, Array, Array]:
    x, w = saved
    _, pull = jax.vjp(product, x, w)
    wide = x.astype(jnp.float32)
    return *pull(dy), product(wide.T, wide)


_observed_product.defvjp(_forward, _backward)
