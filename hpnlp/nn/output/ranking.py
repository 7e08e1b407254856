"""Output layers that rank words without probabilities: margin losses and embedding prediction."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.nn.layers import Dense
from hpnlp.nn.output.base import OutputLayer
from hpnlp.ops.search import exact_search
from hpnlp.ops.softmax import logits, zero_ignored_tokens
from hpnlp.ops.softmax.margin import hardest, margin_loss
from hpnlp.ops.softmax.proposals import Uniform, sample
from hpnlp.ops.softmax.sampled_losses import scores
from hpnlp.ops.softmax.vmf import vmf_loss
from hpnlp.ops.table_rows import TableRows
from hpnlp.types import InputError, LossOut, option


class RankingOutput(OutputLayer):
    """A layer whose scores are no log-probabilities: `nll` and `log_prob` raise InputError, `top_k` returns scores."""

    is_normalized: ClassVar[bool] = False
    # Error message of `nll` and `log_prob`.
    no_probabilities: ClassVar[str] = ""

    def nll(self, table: Array, h: Array, labels: Array) -> Float[Array, " N"]:
        raise InputError(self.no_probabilities)

    def log_prob(self, table: Array, h: Array) -> Float[Array, "N V"]:
        raise InputError(self.no_probabilities)

    def top_k(self, table: Array, h: Array, k: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        return exact_search(h, table.astype(h.dtype), k)

    def logits(self, table: Array, h: Array) -> Float[Array, "N V"]:
        return logits(h, table)


class MarginOutput(RankingOutput):
    """Margin between the score of the label and those of the hardest negatives: see `hpnlp.ops.softmax.margin`.

    Without an rng, the loss uses the same samples every time. To take candidates from an index of `hpnlp.retrieval`, call
    `hpnlp.ops.softmax.margin.hardest` and `margin_loss` with its ids.
    """

    hardest: int = option(8, "Number of negatives.", least=1)
    samples: int = option(
        1024,
        "Number of words, drawn for each batch without repetition, among which the negatives are; 0 for all words, by exact "
        "search, at the cost of the logits of a full softmax.",
        least=0,
    )
    margin: int | float = option(1, "Difference by which the label's score must exceed that of a negative.")

    no_probabilities: ClassVar[str] = "a margin loss gives no probabilities, only a ranking: compare words by `top_k`"

    def setup(self) -> None:
        if 0 < self.samples < min(self.hardest, self.vocab):
            raise InputError(f"hardest={self.hardest} of samples={self.samples}: lower hardest, or raise samples")
        if self.vocab == 1:
            raise InputError(
                f"hardest={self.hardest}: a vocabulary of one word has no negatives: choose another output layer"
            )

    def loss(
        self,
        table: PyTree,
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        h, labels = zero_ignored_tokens(h, labels, weights)
        if self.samples:
            ids = self._samples(labels, jax.random.key(0) if rng is None else rng)
            target, noise = scores(h, table[labels], table[ids])
            negatives, _ = hardest(noise, ids, labels, min(self.hardest, self.vocab))
        else:
            count = min(self.hardest + 1, self.vocab)  # one of them may be the label
            candidate_scores, ids = exact_search(*jax.lax.stop_gradient((h, table)), count)
            _, ids = hardest(candidate_scores, ids, labels, count - 1)
            target, noise = scores(h, table[labels], table[jnp.maximum(ids, 0)])
            negatives = jnp.where(ids < 0, -jnp.inf, noise)
        return self.weighted(margin_loss(target, negatives, margin=self.margin), labels, weights)

    def rows(self, labels: Int[Array, " N"], rng: jax.Array) -> Int[Array, " R"] | None:
        return jnp.concatenate([labels, self._samples(labels, rng)]) if self.samples else None

    def _samples(self, labels: Int[Array, " N"], rng: jax.Array) -> Int[Array, " S"]:
        return sample(Uniform(self.vocab), rng, min(self.samples, self.vocab), labels, unique=True).ids


class VMFOutput(RankingOutput):
    """Embedding prediction by the von Mises-Fisher loss: the direction and the concentration of the vector of the next word.

    The rows of the table are the vectors of the words. This layer does not train them: load vectors trained elsewhere, or share
    the embedding. Predictions are the nearest rows. See `hpnlp.ops.softmax.vmf`.

    Cost:
      6 D^2 operations a token, for any vocabulary.
    """

    norm_penalty: int | float = option(0, "See `vmf_loss`.")
    product_scale: int | float = option(1, "See `vmf_loss`.")

    no_probabilities: ClassVar[str] = (
        "vmf gives a density over directions, no probabilities of words: compare losses by `log_density`, words by `top_k`"
    )

    def setup(self) -> None:
        self.project = Dense(self.dim, ("embed", "hidden"), use_bias=True)

    def loss(
        self,
        table: Float[Array, "V D"] | TableRows,
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        # The regularised loss is trained; without an rng, the negative log-density is reported.
        h, labels = zero_ignored_tokens(h, labels, weights)
        if rng is None:
            return self.weighted(-self.log_density(table, h, labels), labels, weights)
        states, words = self.project(h.astype(jnp.float32)), jax.lax.stop_gradient(table)[labels]
        losses = vmf_loss(states, words, norm_penalty=self.norm_penalty, product_scale=self.product_scale)
        concentration = jnp.linalg.norm(jax.lax.stop_gradient(states), axis=1)
        return self.weighted(losses, labels, weights, {"concentration": concentration})

    def rows(self, labels: Int[Array, " N"], rng: jax.Array) -> Int[Array, " R"]:
        return labels

    def log_density(
        self, table: Float[Array, "V D"] | TableRows, h: Float[Array, "N D"], labels: Int[Array, " N"]
    ) -> Float[Array, " N"]:
        """Log-density at the direction of each label, over the unit sphere in D dimensions.

        Args:
          table: [V, D] vectors of the words, or `TableRows` with those of the labels.
          h: [N, D] hidden states.
          labels: [N] ids of words.

        Returns:
          [N] float32, in nats.
        """
        return -vmf_loss(self.project(h.astype(jnp.float32)), jax.lax.stop_gradient(table)[labels])

    def logits(self, table: Float[Array, "V D"], h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        # The log-density at the direction of each word, up to a constant that all words share.
        return logits(self.project(h.astype(jnp.float32)), self._directions(table))

    def top_k(
        self, table: Float[Array, "V D"], h: Float[Array, "N D"], k: int
    ) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        return exact_search(self.project(h.astype(jnp.float32)), self._directions(table), k)

    def _directions(self, table: Float[Array, "V D"]) -> Float[Array, "V D"]:
        return table / jnp.maximum(jnp.linalg.norm(table, axis=1, keepdims=True), 1e-30)
