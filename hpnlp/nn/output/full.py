"""The full output layer: exact softmax over the vocabulary."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.nn.layers import param
from hpnlp.nn.output.base import OutputLayer
from hpnlp.ops.softmax import linear_cross_entropy, logits, partial_cross_entropy
from hpnlp.ops.weight import Weight
from hpnlp.types import LossOut, option


class SoftmaxOutput(OutputLayer):
    """Softmax over all rows of the table. Its loss can be computed from slices of the table.

    Cost:
      As `linear_cross_entropy`.
    """

    @property
    def bias(self) -> Float[Array, " V"] | None:
        """[V] added to the scores of the words, for subclasses with a bias."""
        return None

    @property
    def cap(self) -> float | None:
        """Logits are cap * tanh(logit / cap), for subclasses with such a cap; None for no cap."""
        return None

    def loss(
        self,
        table: PyTree,
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        options = {
            "bias": self.bias,
            "soft_cap": self.cap,
            "weights": weights,
            "ignore_index": None,
            "reduction": "sum",
        }
        total = linear_cross_entropy(h, table, labels, label_smoothing=self.smoothing(rng), **options)
        return LossOut(total, weights.astype(jnp.float32).sum())

    def smoothing(self, rng: jax.Array | None) -> float:
        """Share of the target distribution that is spread evenly over all words.

        Args:
          rng: The key of `loss`, or None.

        Returns:
          The share; 0 for the loss that is reported.
        """
        return 0.0

    def nll(self, table: PyTree, h: Float[Array, "N D"], labels: Int[Array, " N"]) -> Float[Array, " N"]:
        options = {"bias": self.bias, "soft_cap": self.cap, "ignore_index": None, "reduction": "none"}
        return linear_cross_entropy(h, table, labels, **options)

    def merges(self, rng: jax.Array | None) -> bool:
        return True

    def partial(
        self,
        table: PyTree,
        start: int | Int[Array, ""],
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        rng: jax.Array | None = None,
    ) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
        """Statistics of a slice of the vocabulary, from which `hpnlp.parallel.vocab_parallel` merges the loss lse - score.

        Args:
          table: [v, D] rows of the words start to start + v - 1.
          start: Id of the first word.
          h: [N, D] hidden states.
          labels: [N] ids of words, in this slice or another.
          rng: The key of `loss`, or None.

        Returns:
          (lse [N], score [N]): the log-sum-exp of the slice, and the sum of its logits, each times its share of the target
          distribution. Without smoothing, that is the logit of the label, or 0 where another slice has the label.
        """
        lse, target, total = partial_cross_entropy(
            h, table, labels, start, bias=self._bias_slice(table, start), soft_cap=self.cap
        )
        share = self.smoothing(rng)
        return lse, target if share == 0 else (1 - share) * target + (share / self.vocab) * total

    def best(
        self, table: PyTree, h: Float[Array, "N D"], start: int | Int[Array, ""] = 0
    ) -> tuple[Float[Array, " N"], Int[Array, " N"]]:
        """The most probable word of each token, among all words or those of a slice of the table.

        Args:
          table: [v, D] rows of the words start to start + v - 1.
          h: [N, D] hidden states.
          start: Id of the first word.

        Returns:
          (logit [N] float32, id [N] int32).

        Cost:
          2 N V D operations; the logits of all tokens are not stored.
        """
        bias = self._bias_slice(table, start)
        no_labels = jnp.zeros(h.shape[:1], jnp.int32)
        _, _, row = linear_cross_entropy(
            h, table, no_labels, bias=bias, ignore_index=None, reduction="none", return_stats=True
        )
        logit = (h.astype(jnp.float32) * table[row].astype(h.dtype).astype(jnp.float32)).sum(axis=1)
        return self._capped(logit if bias is None else logit + bias[row]), row + start

    def logits(self, table: PyTree, h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        return self._capped(logits(h, table, bias=self.bias))

    def _capped(self, x: jax.Array) -> jax.Array:
        return x if self.cap is None else self.cap * jnp.tanh(x / self.cap)

    def _bias_slice(self, table: jax.Array | Weight, start: int | Int[Array, ""]) -> Float[Array, " v"] | None:
        """The bias of the words start to start + v - 1."""
        return None if self.bias is None else lax.dynamic_slice_in_dim(self.bias, start, table.shape[0])


class FullOutput(SoftmaxOutput):
    """Exact softmax, with a bias of each word, capped logits and smoothed labels if wanted."""

    use_bias: bool = option(False, "Adds a learned bias to the score of each word.")
    label_smoothing: int | float = option(
        0.0,
        "Share of the target distribution that is spread evenly over all words in training (Szegedy et al. 2016). The reported "
        "loss is -log p(label).",
        least=0,
        below=1,
    )
    soft_cap: int | float | None = option(
        None, 'Logits become soft_cap * tanh(logit / soft_cap) (Gemma Team 2024, "Gemma 2"); None for no cap.', above=0
    )

    def setup(self) -> None:
        if self.use_bias:
            self.word_bias = param(self, "bias", nn.initializers.zeros, (self.vocab,), (self.axis,))

    @property
    def bias(self) -> Float[Array, " V"] | None:
        return self.word_bias if self.use_bias else None

    @property
    def cap(self) -> float | None:
        return None if self.soft_cap is None else float(self.soft_cap)

    def smoothing(self, rng: jax.Array | None) -> float:
        return 0.0 if rng is None else float(self.label_smoothing)
