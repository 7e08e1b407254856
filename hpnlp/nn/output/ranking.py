"""Output layers that rank words, or place them, and give no probabilities: margin losses and embedding prediction."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.nn.layers import Dense
from hpnlp.nn.output.base import OutputLayer
from hpnlp.ops.search import exact_search
from hpnlp.ops.softmax import logits, without_silent
from hpnlp.ops.softmax.margin import hardest, margin_loss
from hpnlp.ops.softmax.proposals import Uniform, sample
from hpnlp.ops.softmax.sampled_losses import scores
from hpnlp.ops.softmax.vmf import vmf_loss
from hpnlp.types import InputError, LossOut, TableRows


class RankingOutput(OutputLayer):
    """Scores of words that are no log-probabilities: `nll` and `log_prob` say so, `top_k` gives scores."""

    is_normalized: ClassVar[bool] = False
    why: ClassVar[str] = ""

    def nll(self, table: Array, h: Array, labels: Array) -> Float[Array, " N"]:
        raise InputError(self.why)

    def log_prob(self, table: Array, h: Array) -> Float[Array, "N V"]:
        raise InputError(self.why)

    def top_k(self, table: Array, h: Array, k: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """The k best scores of each token, best first: `(scores, ids)`."""
        return exact_search(h, table.astype(h.dtype), k)

    def logits(self, table: Array, h: Array) -> Float[Array, "N V"]:
        """Float32 scores."""
        return logits(h, table)


class MarginOutput(RankingOutput):
    """The margin between a label's score and those of the hardest negatives: see `ops.softmax.margin`.

    hardest: how many of them. samples: from how many words, drawn for each batch without repetition, they are taken; 0
    for all words, by exact search, at the cost of the full softmax's logits. Without an rng, the same samples every
    time.
    An index that finds candidates in less is kept outside, and its ids go to `hardest` and `margin_loss` directly.
    """

    hardest: int = 8
    samples: int = 1024
    margin: int | float = 1

    why: ClassVar[str] = "a margin loss gives no probabilities, only an order of words: compare them by `top_k`"

    def setup(self) -> None:
        if self.samples < 0:
            raise InputError(f"samples={self.samples}: expected at least 1, or 0 for all words")
        if self.hardest < 1:
            raise InputError(f"hardest={self.hardest}: expected at least 1 negative")
        if 0 < self.samples < min(self.hardest, self.vocab):
            raise InputError(f"hardest={self.hardest} of samples={self.samples}: lower hardest, or raise samples to it")
        if self.vocab == 1:
            raise InputError(
                f"hardest={self.hardest}: a vocabulary of one word has no negatives: choose another output layer"
            )

    def loss(
        self,
        table: Any,
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        """The weighted sum of the margin losses, by the table or, with samples, `TableRows` of it."""
        h, labels = without_silent(h, labels, weights)
        if self.samples:
            ids = self._samples(labels, jax.random.key(0) if rng is None else rng)
            target, noise = scores(h, table[labels], table[ids])
            negatives, _ = hardest(noise, ids, labels, min(self.hardest, self.vocab))
        else:
            most = min(self.hardest + 1, self.vocab)
            found, ids = exact_search(*jax.lax.stop_gradient((h, table)), most)
            _, ids = hardest(found, ids, labels, most - 1)
            target, noise = scores(h, table[labels], table[jnp.maximum(ids, 0)])
            negatives = jnp.where(ids < 0, -jnp.inf, noise)
        return self.weighted(margin_loss(target, negatives, margin=self.margin), labels, weights)

    def rows(self, labels: Int[Array, " N"], rng: jax.Array) -> Int[Array, " R"] | None:
        return jnp.concatenate([labels, self._samples(labels, rng)]) if self.samples else None

    def _samples(self, labels: Int[Array, " N"], rng: jax.Array) -> Int[Array, " S"]:
        return sample(Uniform(self.vocab), rng, min(self.samples, self.vocab), labels, unique=True).ids


class VMFOutput(RankingOutput):
    """Embedding prediction: a direction and how sure of it, by the von Mises-Fisher loss (`ops.softmax.vmf`).

    The table's rows are where words are; they are not trained by this layer, so they should say something of the words: load
    vectors trained elsewhere, or share the embedding. norm_penalty, product_scale: the two regularised forms.
    Cost: 6 D^2 operations a token, whatever the vocabulary; predictions are the nearest rows.
    """

    norm_penalty: int | float = 0
    product_scale: int | float = 1

    why: ClassVar[str] = (
        "vmf gives a density over directions, no probabilities of words: its loss is that of `log_density`; compare words by "
        "`top_k`"
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
        """The weighted sum of the regularised loss; without an rng, of the negative log-density."""
        h, labels = without_silent(h, labels, weights)
        if rng is None:
            return self.weighted(-self.log_density(table, h, labels), labels, weights)
        place, words = self.project(h.astype(jnp.float32)), jax.lax.stop_gradient(table)[labels]
        each = vmf_loss(place, words, norm_penalty=self.norm_penalty, product_scale=self.product_scale)
        return self.weighted(
            each, labels, weights, {"concentration": jnp.linalg.norm(jax.lax.stop_gradient(place), axis=1)}
        )

    def rows(self, labels: Int[Array, " N"], rng: jax.Array) -> Int[Array, " R"]:
        return labels

    def log_density(
        self, table: Float[Array, "V D"] | TableRows, h: Float[Array, "N D"], labels: Int[Array, " N"]
    ) -> Float[Array, " N"]:
        """log of the density, over the unit sphere in D dimensions, at each label's direction."""
        return -vmf_loss(self.project(h.astype(jnp.float32)), jax.lax.stop_gradient(table)[labels])

    def logits(self, table: Float[Array, "V D"], h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        """Float32 scores: the log-density at each word's direction, up to a number that all words share."""
        return logits(self.project(h.astype(jnp.float32)), self._directions(table))

    def top_k(
        self, table: Float[Array, "V D"], h: Float[Array, "N D"], k: int
    ) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        return exact_search(self.project(h.astype(jnp.float32)), self._directions(table), k)

    def _directions(self, table: Float[Array, "V D"]) -> Float[Array, "V D"]:
        return table / jnp.maximum(jnp.linalg.norm(table, axis=1, keepdims=True), 1e-30)
