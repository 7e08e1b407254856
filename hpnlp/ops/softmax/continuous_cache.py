"""Continuous cache: a distribution of recent words, weighted by the similarity of their hidden states to the present one.

References: Grave, Joulin and Usunier 2017, "Improving neural language models with a continuous cache", arXiv 1612.04426.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.array_op import array_op


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
    same = visible & (words[:, None, :] == labels[:, :, None])
    hits = _log_sum(jnp.where(same, scores, -jnp.inf))
    return jnp.where(jnp.isneginf(hits), -jnp.inf, hits - _log_sum(scores))


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
    total = _log_sum(scores)
    shares = jnp.where(visible, jnp.exp(scores - jnp.where(jnp.isneginf(total), 0.0, total)[..., None]), 0.0)
    rows, columns = jnp.arange(h.shape[0])[:, None, None], jnp.arange(h.shape[1])[None, :, None]
    found = jnp.where(visible, jnp.asarray(words)[:, None, :], vocab)  # entries without a word are dropped
    empty = jnp.zeros((h.shape[0], h.shape[1], vocab), jnp.float32)
    return empty.at[rows, columns, found].add(shares, mode="drop")


@array_op("...", log_prob="...")
def interpolate(
    log_prob: Float[Array, "*N"], cached: Float[Array, "*N"], has_entries: Bool[Array, "*N"], weight: float
) -> Float[Array, "*N"]:
    """Log of (1 - weight) p + weight p_cache.

    Args:
      log_prob: Log-probabilities log p of the model.
      cached: Log-probabilities log p_cache, which may be -inf.
      has_entries: Whether the token sees an entry; otherwise the result is log p.
      weight: Weight of the cache, 0 to 1.

    Returns:
      Log-probabilities.
    """
    if weight == 0:
        return jnp.asarray(log_prob)
    mixed = jnp.logaddexp(log_prob + jnp.log1p(-weight), cached + jnp.log(weight))
    return jnp.where(has_entries, mixed, log_prob)


def _scores(h: jax.Array, keys: jax.Array, visible: jax.Array, theta: float) -> jax.Array:
    """Similarities `[B, T, S]` in float32, -inf where an entry is not visible."""
    products = jnp.einsum("btd,bsd->bts", h, keys, preferred_element_type=jnp.float32)
    return jnp.where(visible, theta * products, -jnp.inf)


def _log_sum(scores: jax.Array) -> jax.Array:
    """Log of the sum of exponentials over the last axis; -inf for none, without NaN."""
    largest = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
    return jnp.log(jnp.sum(jnp.exp(scores - largest), axis=-1)) + largest[..., 0]
