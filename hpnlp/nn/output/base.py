"""What every output layer is: a loss over a vocabulary, and predictions from it."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.ops.sampling import sample
from hpnlp.ops.softmax import without_silent
from hpnlp.types import InputError, LossOut, WordStats


class OutputLayer(nn.Module, kw_only=True):
    """Hidden states to a loss over a vocabulary, and back to words.

    vocab: how many words there are. dim: features of a hidden state. stats: how the training text uses the words, for layers
    that ask. The model fills these in; what stands in a spec is the layer's own.

    Methods take the table as an argument, because it may be the embedding's, or some of its rows. A layer has `nll` and
    `logits`; what else follows from these by default may be had more cheaply.
    """

    vocab: int = 0
    dim: int = 0
    stats: WordStats | None = None

    # Whether exp(log_prob) sums to one over the vocabulary.
    is_normalized: ClassVar[bool] = True
    # What the table's rows are: "words" by id, which the embedding may share, something else, or "" where there is no table.
    rows_are: ClassVar[str] = "words"

    def loss(
        self,
        table: Any,
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        """The weighted sum of what is trained, in nats; without an rng, of what is reported: -log p(label)."""
        h, labels = without_silent(h, labels, weights)
        return self.weighted(self.nll(table, h, labels), labels, weights)

    def weighted(
        self, each: Float[Array, " N"], labels: Int[Array, " N"], weights: Float[Array, " N"], aux: Any = None
    ) -> LossOut:
        """The record of tokens' losses, NaN where one that counts has a label that is no word.

        aux: name -> what each token reports, to be averaged.
        """
        weights = weights.astype(jnp.float32)
        each = jnp.where((labels >= 0) & (labels < self.vocab), each, jnp.nan)
        total = weights.sum()
        reports = {name: ((weights * value).sum(), total) for name, value in (aux or {}).items()}
        return LossOut((weights * jnp.where(weights == 0, 0.0, each)).sum(), total, reports)

    def rows(self, labels: Int[Array, " N"], rng: jax.Array) -> Int[Array, " R"] | None:
        """The ids, repeated or not, of the table's rows that `loss` with this rng looks up; None where it takes them all.

        Where it names some, `loss` takes `TableRows` of at least these as its table. Tokens of no weight have label 0 here.
        """
        return None

    def merges(self, rng: jax.Array | None) -> bool:
        """Whether the loss with this rng may be had from a `partial` of slices of the table: see `FullOutput`."""
        return False

    def nll(self, table: Any, h: Float[Array, "N D"], labels: Int[Array, " N"]) -> Float[Array, " N"]:
        """-log p(label) of each token, in nats."""
        raise NotImplementedError

    def logits(self, table: Any, h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        """Float32 scores, of which the softmax is the layer's distribution."""
        raise NotImplementedError

    def log_prob(self, table: Any, h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        """log p of every word, float32."""
        return jax.nn.log_softmax(self.logits(table, h), axis=-1)

    def top_k(self, table: Any, h: Float[Array, "N D"], k: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """The k most probable ids of each token, best first: `(log p, ids)`."""
        values, ids = jax.lax.top_k(self.log_prob(table, h), k)
        return values, ids

    def sample(
        self,
        table: Any,
        h: Float[Array, "N D"],
        rng: jax.Array,
        temperature: float | jax.Array = 1.0,
        top_k: int = 0,
        top_p: float | jax.Array = 1.0,
    ) -> Int[Array, " N"]:
        """One id a token; see `ops.softmax.sampling.sample` for the arguments."""
        return sample(self.logits(table, h), rng, temperature=temperature, top_k=top_k, top_p=top_p)


def known_counts(stats: WordStats | None, vocab: int, what: str, instead: str) -> np.ndarray:
    """The counts, at least 1 each: a word that the training text has not may yet be a label. Raises InputError without."""
    if stats is None:
        raise InputError(
            f"{what} needs the words' counts, which data.tokenizer=words(...) keeps: choose that, or {instead}"
        )
    if stats.counts.shape != (vocab,):
        raise InputError(
            f"stats are of {stats.counts.size} words, the vocabulary has {vocab}: pass stats.padded({vocab})"
        )
    return np.maximum(stats.counts, 1)


def known_order(stats: WordStats | None, what: str, instead: str) -> np.ndarray:
    """The ids so that similar words stand side by side; raises InputError where that is not known."""
    if stats is None or stats.order is None:
        raise InputError(
            f"{what} needs to know which words are similar, which data.tokenizer=words(...) finds where it is trained: choose "
            f"that, or {instead}; one that an earlier version trained does not know: train it again"
        )
    return stats.order
