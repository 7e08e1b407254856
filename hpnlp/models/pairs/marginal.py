"""Probability of hidden tokens with the retrieved document as a latent variable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.spec import did_you_mean
from hpnlp.types import InputError

MARGINALS = ("token", "sequence")


def check_marginal(marginal: str) -> None:
    """Checks the name of a marginal.

    Args:
      marginal: An entry of MARGINALS.

    Raises:
      InputError: Unknown name.
    """
    if marginal not in MARGINALS:
        raise InputError(f"marginal={marginal!r}: {did_you_mean(marginal, MARGINALS)}")


def log_marginal(
    scores: Float[Array, "B K"],
    log_probs: Float[Array, "B K M"],
    weights: Float[Array, "B M"],
    marginal: str = "token",
) -> tuple[Float[Array, "B *M"], Float[Array, "B *M"]]:
    """The logarithm of p(y | x), the sum over documents z of p(z | x) p(y | x, z), where p(z | x) is the softmax of the scores.

    The gradient by a score is the weighted sum of p(z | y, x) - p(z | x). The order of the documents has no influence.

    Args:
      scores: Scores of the K documents of each text; -inf for a document that cannot be the source.
      log_probs: log p(y | x, z) of each hidden token with each document.
      weights: Weights of the hidden tokens; 0 for padding, whose log_probs have no influence.
      marginal: "token" chooses a document for each hidden token; "sequence" one for all hidden tokens of a text.

    Returns:
      `(log p, weights)` of each hidden token, `[B, M]`, or of each text, `[B]`, whose weights are those of `text_weights`.
      log p is 0 where the weight is 0.

    Raises:
      InputError: Unknown marginal.

    References:
      Guu et al. 2020, "REALM: retrieval-augmented language model pre-training", equation 1. The authors' code has the sum for
      each token, as RAG-Token of Lewis et al. 2020, "Retrieval-augmented generation for knowledge-intensive NLP tasks".
    """
    check_marginal(marginal)
    scores, log_probs, weights = (x.astype(jnp.float32) for x in (scores, log_probs, weights))
    prior = jax.nn.log_softmax(scores, axis=1)
    log_probs = jnp.where(weights[:, None] != 0, log_probs, 0.0)
    if marginal == "sequence":
        weights, joint = text_weights(weights), prior + log_probs.sum(axis=2)
    else:
        joint = prior[:, :, None] + log_probs
    return jnp.where(weights != 0, jax.nn.logsumexp(joint, axis=1), 0.0), weights


def text_weights(weights: Float[Array, "B M"]) -> Float[Array, " B"]:
    """Weights of texts: the mean of the weights of their hidden tokens, 0 for texts without hidden tokens.

    Args:
      weights: Weights of the hidden tokens; 0 for padding.

    Returns:
      Float32.
    """
    return weights.sum(axis=1) / jnp.maximum(1, (weights != 0).sum(axis=1)).astype(jnp.float32)
