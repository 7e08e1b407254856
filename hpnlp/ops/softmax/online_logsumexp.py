"""Log-sum-exp of logits that arrive block by block (the online softmax)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class OnlineLogSumExp(NamedTuple):
    """Running log-sum-exp of each token, over the blocks of logits that were added so far.

    Attributes:
      maximum: [N] largest logit, -inf before the first.
      sum_exp: [N] sum of exp(logit - maximum).
    """

    maximum: Float[Array, " N"]
    sum_exp: Float[Array, " N"]

    @classmethod
    def empty(cls, zeros: Float[Array, " N"]) -> OnlineLogSumExp:
        """The state before the first block.

        Args:
          zeros: [N] zeros, float32, which vary over the same manual mesh axes as the logits to come.

        Returns:
          The state of a sum of no terms.
        """
        return cls(zeros - jnp.inf, zeros)

    def add(self, s: Float[Array, "N c"]) -> OnlineLogSumExp:
        """The state with one more block of logits.

        Args:
          s: [N, c] logits; those of -inf add nothing.

        Returns:
          The new state.
        """
        maximum = jnp.maximum(self.maximum, s.max(axis=1))
        # If all logits are -inf, differences to the maximum would be NaN.
        base = jnp.where(jnp.isneginf(maximum), 0.0, maximum)
        sum_exp = self.sum_exp * jnp.exp(self.maximum - base) + jnp.exp(s - base[:, None]).sum(axis=1)
        return OnlineLogSumExp(maximum, sum_exp)

    def value(self) -> Float[Array, " N"]:
        """The log-sum-exp of all logits that were added.

        Returns:
          [N] float32; -inf where nothing was added, or only -inf.
        """
        nonzero = self.sum_exp != 0  # True for NaN, which must reach the result
        return jnp.where(nonzero, self.maximum + jnp.log(jnp.where(nonzero, self.sum_exp, 1.0)), -jnp.inf)
