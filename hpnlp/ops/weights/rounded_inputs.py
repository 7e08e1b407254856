"""Matrices whose products round their inputs, in training."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.linear import product
from hpnlp.ops.weight import Weight
from hpnlp.ops.weights.straight_through import round_through


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundedInputsWeight(Weight):
    """A matrix whose products round their inputs to 8 bits, each row by its largest magnitude, as `IntegerWeight` does.

    Gradients pass the rounding. Ranges follow each row, so that no moving averages of them are needed, which Zafrir et al.
    2019, "Q8BERT", section 3, use instead.

    Attributes:
      matrix: [D, F].
    """

    matrix: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[-2:]

    def dense(self) -> Float[Array, "D F"]:
        return self.matrix

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        return product(round_through(x, jnp.abs(x).max(axis=-1, keepdims=True)), self.matrix)

    def axes(self, names: tuple[str | None, ...]) -> Any:
        return RoundedInputsWeight(names)
