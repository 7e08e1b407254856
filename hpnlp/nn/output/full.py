"""The full output layer: exact softmax over the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.nn.output.base import OutputLayer
from hpnlp.ops.softmax import linear_cross_entropy, logits, partial_cross_entropy
from hpnlp.types import LossOut


class FullOutput(OutputLayer):
    """Softmax over all rows of the table.

    Cost:
      As `linear_cross_entropy`.
    """

    @property
    def bias(self) -> Float[Array, " V"] | None:
        """[V] added to the scores of the words, for subclasses with a bias."""
        return None

    def loss(
        self,
        table: Float[Array, "V D"],
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        options = {"bias": self.bias, "weights": weights, "ignore_index": None, "reduction": "sum"}
        total = linear_cross_entropy(h, table, labels, **options)
        return LossOut(total, weights.astype(jnp.float32).sum())

    def nll(self, table: Float[Array, "V D"], h: Float[Array, "N D"], labels: Int[Array, " N"]) -> Float[Array, " N"]:
        return linear_cross_entropy(h, table, labels, bias=self.bias, ignore_index=None, reduction="none")

    def merges(self, rng: jax.Array | None) -> bool:
        return True

    def partial(
        self, table: Float[Array, "v D"], start: int | Int[Array, ""], h: Float[Array, "N D"], labels: Int[Array, " N"]
    ) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
        """Statistics of a slice of the vocabulary, from which `hpnlp.parallel.vocab_parallel` merges the loss lse - logit.

        Args:
          table: [v, D] rows of the words start to start + v - 1.
          start: Id of the first word.
          h: [N, D] hidden states.
          labels: [N] ids of words, in this slice or another.

        Returns:
          (lse [N], logit of the label [N] or 0 where another slice has it): see `partial_cross_entropy`.
        """
        bias = None if self.bias is None else lax.dynamic_slice_in_dim(self.bias, start, table.shape[0])
        return partial_cross_entropy(h, table, labels, start, bias=bias)[:2]

    def logits(self, table: Float[Array, "V D"], h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        return logits(h, table, bias=self.bias)
