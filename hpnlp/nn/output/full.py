"""The full output layer: the exact softmax over the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.nn.output.base import OutputLayer
from hpnlp.ops.softmax import linear_cross_entropy, logits, partial_cross_entropy
from hpnlp.types import LossOut


class FullOutput(OutputLayer):
    """Softmax over all rows of the table. Cost: as `linear_cross_entropy`.

    bias: what is added to the words' scores `[V]`, for layers that have such.
    """

    @property
    def bias(self) -> Float[Array, " V"] | None:
        return None

    def loss(
        self,
        table: Float[Array, "V D"],
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        """The weighted sum of -log p(label) in nats. `rng` is not used: nothing here is random."""
        options = {"bias": self.bias, "weights": weights, "ignore_index": None, "reduction": "sum"}
        total = linear_cross_entropy(h, table, labels, **options)
        return LossOut(total, weights.astype(jnp.float32).sum())

    def nll(self, table: Float[Array, "V D"], h: Float[Array, "N D"], labels: Int[Array, " N"]) -> Float[Array, " N"]:
        """-log p(label) of each token, in nats."""
        return linear_cross_entropy(h, table, labels, bias=self.bias, ignore_index=None, reduction="none")

    def merges(self, rng: jax.Array | None) -> bool:
        """Whether `loss` with this rng is the weighted sum of lse - logit, merged over what `partial` gives of slices."""
        return True

    def partial(
        self, table: Float[Array, "v D"], start: int | Int[Array, ""], h: Float[Array, "N D"], labels: Int[Array, " N"]
    ) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
        """(lse, label's logit or 0) of the words from `start` on, which merge over slices: see `partial_cross_entropy`."""
        bias = None if self.bias is None else lax.dynamic_slice_in_dim(self.bias, start, table.shape[0])
        return partial_cross_entropy(h, table, labels, start, bias=bias)[:2]

    def logits(self, table: Float[Array, "V D"], h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        """Unnormalised float32 log-probabilities."""
        return logits(h, table, bias=self.bias)
