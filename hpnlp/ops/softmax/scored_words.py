"""A distribution of words from scored entries, each of which holds a word: the softmax of the scores, summed by word.

A continuous cache and the nearest neighbours of a hidden state give such entries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op


@array_op("...", scores="... S", words="... S", labels="...")
def label_log_prob(
    scores: Float[Array, "*N S"], words: Int[Array, "*N S"], labels: Int[Array, "*N"]
) -> Float[Array, "*N"]:
    """Log of the sum of softmax(scores) over the entries of the label.

    Args:
      scores: Scores of the entries; -inf for an entry without a word.
      words: Word of each entry.
      labels: Ids of words.

    Returns:
      Float32; -inf for a label without an entry.
    """
    scores = scores.astype(jnp.float32)
    hits = _log_sum(jnp.where(words == labels[..., None], scores, -jnp.inf))
    return jnp.where(jnp.isneginf(hits), -jnp.inf, hits - _log_sum(scores))


@array_op("...", scores="... S", words="... S")
def word_distribution(scores: Float[Array, "*N S"], words: Int[Array, "*N S"], vocab: int) -> Float[Array, "*N V"]:
    """Sums of softmax(scores) over the entries of each word.

    Args:
      scores: As for `label_log_prob`.
      words: As for `label_log_prob`.
      vocab: Number of words V.

    Returns:
      Float32 probabilities, which sum to 1; zeros without an entry.
    """
    scores = scores.astype(jnp.float32)
    total = _log_sum(scores)
    shares = jnp.exp(scores - jnp.where(jnp.isneginf(total), 0.0, total)[..., None])
    flat = words.reshape(-1, words.shape[-1])
    ids = jnp.where(jnp.isneginf(scores).reshape(flat.shape), vocab, flat)  # entries without a word are dropped
    empty = jnp.zeros((len(flat), vocab), jnp.float32)
    rows = jnp.arange(len(flat))[:, None]
    return empty.at[rows, ids].add(shares.reshape(flat.shape), mode="drop").reshape(*words.shape[:-1], vocab)


@array_op("...", log_prob="...")
def interpolate(
    log_prob: Float[Array, "*N"], other: Float[Array, "*N"], weight: Float[Array, "*N"]
) -> Float[Array, "*N"]:
    """Log of (1 - weight) p + weight p_other.

    Args:
      log_prob: Log-probabilities log p.
      other: Log-probabilities log p_other, which may be -inf.
      weight: Weight of p_other, 0 to 1.

    Returns:
      Log-probabilities.
    """
    return jnp.logaddexp(log_prob + jnp.log1p(-weight), other + jnp.log(weight))


def _log_sum(scores: jax.Array) -> jax.Array:
    """Log of the sum of exponentials over the last axis; -inf for none, without NaN."""
    largest = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    return jnp.log(jnp.sum(jnp.exp(scores - largest), axis=-1)) + largest[..., 0]
