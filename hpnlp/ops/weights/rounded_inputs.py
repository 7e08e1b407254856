"""Matrices whose products round their inputs, in training."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.linear import product
from hpnlp.ops.weight import Weight
from hpnlp.ops.weights.straight_through import binary_through, round_through


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundedInputsWeight(Weight):
    """A matrix whose products round their inputs, each row by its own range, with straight-through gradients.

    With 8 bits, rounds as `IntegerWeight` does, by the largest magnitude of a row. Ranges follow each row, so that no moving
    averages of them are needed, which Zafrir et al. 2019, "Q8BERT", section 3, use instead. With one bit, rounds as
    `BinaryProductWeight` does, to the sign times the mean magnitude of the row; numbers beyond 1 have no gradient
    (Courbariaux et al. 2016).

    Attributes:
      matrix: [D, F].
      bits: 8 or 1.
    """

    matrix: Any
    bits: int = dataclasses.field(default=8, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[-2:]

    def dense(self) -> Float[Array, "D F"]:
        return self.matrix

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        if self.bits == 1:
            return product(binary_through(x, "row"), self.matrix)
        return product(round_through(x, jnp.abs(x).max(axis=-1, keepdims=True)), self.matrix)

    def axes(self, names: tuple[str | None, ...]) -> Any:
        return RoundedInputsWeight(names, self.bits)
