"""Base class of the output layers: a loss over a vocabulary, and predictions from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.ops.softmax import zero_ignored_tokens
from hpnlp.types import InputError, LossOut, WordStats, check_options


class OutputLayer(nn.Module, kw_only=True):
    """A loss over a vocabulary from hidden states, and predictions of words.

    Methods take the table as an argument, because it may be the embedding, or only some rows of it. A subclass implements `nll`
    and `logits`, from which the other methods follow; it overrides those that it can compute more cheaply.

    The model sets vocab, dim, stats and axis; the fields of the subclasses are the arguments of a spec string. The words may be
    the classes of a classifier.
    """

    #: V, the number of words.
    vocab: int = 0
    #: D, the features of a hidden state.
    dim: int = 0
    #: Counts and order of the words in the training text, for layers that need them.
    stats: WordStats | None = None
    #: Logical name of the axis of words, by which a mesh divides the table and parameters of a number per word.
    axis: str = "vocab"

    # Whether exp(log_prob) sums to 1 over the vocabulary.
    is_normalized: ClassVar[bool] = True
    # Meaning of the rows of the table: "words" by id, which the embedding can share; any other text; "" if there is no table.
    rows_are: ClassVar[str] = "words"

    def __post_init__(self) -> None:
        check_options(self)
        super().__post_init__()

    def loss(
        self,
        table: PyTree,
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        """Weighted sum of the tokens' losses, in nats.

        Args:
          table: [V, D], or `TableRows` of it where `rows` returns ids; None for layers without a table.
          h: [N, D] hidden states.
          labels: [N] ids of words.
          weights: [N] factors of the losses; tokens of weight 0 have no loss and no gradient.
          rng: A key for the training loss, which may be random. None for the loss that is reported, -log p(label).

        Returns:
          The sum, the sum of the weights, and averages that the layer reports.
        """
        h, labels = zero_ignored_tokens(h, labels, weights)
        return self.weighted(self.nll(table, h, labels), labels, weights)

    def weighted(
        self,
        losses: Float[Array, " N"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        aux: Mapping[str, Array] | None = None,
    ) -> LossOut:
        """Weighted sum of losses; NaN if a token of a weight other than 0 has a label that is no word.

        Args:
          losses: [N] of the tokens.
          labels: [N] ids of words.
          weights: [N] factors of the losses.
          aux: Name -> [N] values of the tokens, whose weighted mean is reported; None for no such values.

        Returns:
          The record that `loss` returns.
        """
        weights = weights.astype(jnp.float32)
        losses = jnp.where((labels >= 0) & (labels < self.vocab), losses, jnp.nan)
        total = weights.sum()
        reports = {name: ((weights * value).sum(), total) for name, value in (aux or {}).items()}
        return LossOut((weights * jnp.where(weights == 0, 0.0, losses)).sum(), total, reports)

    def rows(self, labels: Int[Array, " N"], rng: jax.Array) -> Int[Array, " R"] | None:
        """Rows of the table that `loss` reads, for row-sparse training.

        Args:
          labels: [N] ids of words; 0 for tokens of weight 0.
          rng: The key of `loss`.

        Returns:
          [R] ids, repeated or not: `loss` then takes `TableRows` of at least these as its table. None if it reads all rows.
        """
        return None

    def merges(self, rng: jax.Array | None) -> bool:
        """Whether `loss` can be computed from `partial` of slices of the table: see `SoftmaxOutput`.

        Args:
          rng: The key of `loss`, or None.

        Returns:
          True if the layer has `partial`, and the loss with this rng follows from it.
        """
        return False

    def nll(self, table: PyTree, h: Float[Array, "N D"], labels: Int[Array, " N"]) -> Float[Array, " N"]:
        """-log p(label) of each token, in nats.

        Args:
          table: As in `loss`.
          h: [N, D] hidden states.
          labels: [N] ids of words.

        Returns:
          [N] float32.
        """
        raise NotImplementedError

    def logits(self, table: PyTree, h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        """Scores of all words, whose softmax is the distribution of the layer.

        Args:
          table: [V, D], or None for layers without a table.
          h: [N, D] hidden states.

        Returns:
          [N, V] float32.
        """
        raise NotImplementedError

    def log_prob(self, table: PyTree, h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        """Log-probabilities of all words.

        Args:
          table: [V, D], or None for layers without a table.
          h: [N, D] hidden states.

        Returns:
          [N, V] float32.
        """
        return jax.nn.log_softmax(self.logits(table, h), axis=-1)

    def top_k(self, table: PyTree, h: Float[Array, "N D"], k: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """The k most probable words of each token.

        Args:
          table: [V, D], or None for layers without a table.
          h: [N, D] hidden states.
          k: Number of words.

        Returns:
          (log-probabilities [N, k] float32, ids [N, k]), best first.
        """
        values, ids = jax.lax.top_k(self.log_prob(table, h), k)
        return values, ids

    def best(self, table: PyTree, h: Float[Array, "N D"]) -> tuple[Float[Array, " N"], Int[Array, " N"]]:
        """The most probable word of each token.

        Args:
          table: [V, D], or None for layers without a table.
          h: [N, D] hidden states.

        Returns:
          (score [N] float32, by which words of several slices of the table compare; id [N] int32).
        """
        scores, ids = self.top_k(table, h, 1)
        return scores[:, 0], ids[:, 0]

    def sample(
        self,
        table: PyTree,
        h: Float[Array, "N D"],
        rng: jax.Array,
        temperature: float | jax.Array = 1.0,
        top_k: int = 0,
        top_p: float | jax.Array = 1.0,
    ) -> Int[Array, " N"]:
        """Draws a word for each token.

        Args:
          table: [V, D], or None for layers without a table.
          h: [N, D] hidden states.
          rng: A PRNG key.
          temperature: As in `hpnlp.ops.sampling.pick`.
          top_k: As in `hpnlp.ops.sampling.restrict`.
          top_p: As in `hpnlp.ops.sampling.restrict`.

        Returns:
          [N] ids.
        """
        from hpnlp.ops.sampling import sample  # of generation, which training does not load

        return sample(self.logits(table, h), rng, temperature=temperature, top_k=top_k, top_p=top_p)


def required_counts(stats: WordStats | None, vocab: int, option: str, alternative: str) -> np.ndarray:
    """Counts of the words, for a layer that cannot do without.

    Args:
      stats: Word counts and order of the training text, or None.
      vocab: V, the number of words.
      option: Setting of the layer that needs the counts, for the error message.
      alternative: Setting that does not need them, for the error message.

    Returns:
      [V] counts, at least 1, because a word that is not in the training text may yet be a label.

    Raises:
      InputError: There are no counts, or their number is not V.
    """
    if stats is None:
        raise InputError(
            f"{option} needs the words' counts, which data.tokenizer=words(...) keeps: choose that, or {alternative}"
        )
    if stats.counts.shape != (vocab,):
        raise InputError(
            f"stats are of {stats.counts.size} words, the vocabulary has {vocab}: pass stats.padded({vocab})"
        )
    return np.maximum(stats.counts, 1)


def required_order(stats: WordStats | None, option: str, alternative: str) -> np.ndarray:
    """The order in which similar words stand side by side, for a layer that cannot do without.

    Args:
      stats: Word counts and order of the training text, or None.
      option: Setting of the layer that needs the order, for the error message.
      alternative: Setting that does not need it, for the error message.

    Returns:
      [V] ids.

    Raises:
      InputError: There is no order.
    """
    if stats is None or stats.order is None:
        raise InputError(
            f"{option} needs to know which words are similar, which data.tokenizer=words(...) computes when it is trained: "
            f"choose that, or {alternative}; if an earlier version trained the tokenizer, train it again"
        )
    return stats.order
