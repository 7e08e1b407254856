"""Continuous cache: a distribution of recent words, weighted by the similarity of their hidden states to the present one.

References: Grave, Joulin and Usunier 2017, "Improving neural language models with a continuous cache", arXiv 1612.04426.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.softmax.scored_words import label_log_prob, word_distribution


@array_op("B T", h="B T")
def cache_log_prob(
    h: Float[Array, "B T D"],
    keys: Float[Array, "B S D"],
    words: Int[Array, "B S"],
    visible: Bool[Array, "B T S"],
    labels: Int[Array, "B T"],
    theta: float,
) -> Float[Array, "B T"]:
    """Log-probability of each label under the cache: log of the sum of softmax(theta h_t . k_s) over the entries of its word.

    Args:
      h: Hidden states.
      keys: Hidden states of the entries.
      words: Word that followed each of these states.
      visible: Whether a token reads an entry; entries without a word are visible to none.
      labels: Ids of words.
      theta: Inverse temperature.

    Returns:
      Float32; -inf for a word without a visible entry.

    Cost: 2 B T S D operations, and B T S numbers.
    """
    scores = _scores(h, keys, visible, theta)
    return label_log_prob(scores, jnp.broadcast_to(jnp.asarray(words)[:, None], scores.shape), labels)


@array_op("B T", h="B T")
def cache_distribution(
    h: Float[Array, "B T D"],
    keys: Float[Array, "B S D"],
    words: Int[Array, "B S"],
    visible: Bool[Array, "B T S"],
    vocab: int,
    theta: float,
) -> Float[Array, "B T V"]:
    """Probabilities of all words under the cache.

    Args:
      h: As for `cache_log_prob`.
      keys: As for `cache_log_prob`.
      words: As for `cache_log_prob`.
      visible: As for `cache_log_prob`.
      vocab: Number of words V.
      theta: Inverse temperature.

    Returns:
      Float32 probabilities, which sum to 1; zeros for a token that sees no entry.

    Cost: as `cache_log_prob`, and B T (S + V) numbers.
    """
    scores = _scores(h, keys, visible, theta)
    return word_distribution(scores, jnp.broadcast_to(jnp.asarray(words)[:, None], scores.shape), vocab)


def _scores(h: jax.Array, keys: jax.Array, visible: jax.Array, theta: float) -> jax.Array:
    """Similarities `[B, T, S]` in float32, -inf where an entry is not visible."""
    products = jnp.einsum("btd,bsd->bts", h, keys, preferred_element_type=jnp.float32)
    return jnp.where(visible, theta * products, -jnp.inf)
