"""Losses of single pairs of vectors, by a label or a grade of the pair (Reimers and Gurevych 2019, section 3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def pair_features(u: Float[Array, "B D"], v: Float[Array, "B D"]) -> Float[Array, "B F"]:
    """Input of the classifier of pairs, [u; v; |u - v|].

    Args:
      u: Vectors of the first texts.
      v: Vectors of the second texts.

    Returns:
      F = 3 D features of each pair.
    """
    return jnp.concatenate([u, v, jnp.abs(u - v)], axis=-1)


def softmax_losses(logits: Float[Array, "B C"], labels: Int[Array, " B"]) -> Float[Array, " B"]:
    """Cross-entropy of the label of each pair.

    Args:
      logits: Logits of C labels.
      labels: The labels.

    Returns:
      -log p(label), in nats.
    """
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)[:, 0]


def cosine_losses(u: Float[Array, "B D"], v: Float[Array, "B D"], grades: Float[Array, " B"]) -> Float[Array, " B"]:
    """Squared difference of the cosine and the grade of each pair.

    Args:
      u: Vectors of the first texts, of length 1.
      v: Vectors of the second texts, of length 1.
      grades: Numbers that the cosines should be.

    Returns:
      The squares.
    """
    return jnp.square((u * v).sum(axis=-1) - grades)
