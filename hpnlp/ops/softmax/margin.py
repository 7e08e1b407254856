"""Ranking losses: the label must score higher than the hardest negatives, by a margin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError


@array_op("N", scores="N")
def hardest(
    scores: Float[Array, "N C"], ids: Int[Array, "..."], labels: Int[Array, " N"], count: int
) -> tuple[Float[Array, "N n"], Int[Array, "N n"]]:
    """The candidates of each token that score highest and are not its label.

    Args:
      scores: [N, C] scores of the candidates.
      ids: [C] words that are candidates of all tokens, or [N, C]; -1 is no candidate, as in the results of searches. A word
        that occurs twice is returned twice.
      labels: [N] word of each token.
      count: Number n of negatives.

    Returns:
      (scores [N, n], ids [N, n]), best first; -inf and -1 where there are fewer candidates.

    Raises:
      InputError: count is not 1 to C.

    Cost:
      O(N C).
    """
    if not 1 <= count <= scores.shape[1]:
        raise InputError(f"count {count}: expected 1 to {scores.shape[1]}, the number of candidates")
    candidates = jnp.broadcast_to(ids if ids.ndim == 2 else ids[None], scores.shape)
    excluded = (candidates == labels[:, None]) | (candidates < 0)
    values, at = lax.top_k(jnp.where(excluded, -jnp.inf, scores), count)
    return values, jnp.where(jnp.isneginf(values), -1, jnp.take_along_axis(candidates, at, axis=1))


@array_op("N", target="N")
def margin_loss(
    target: Float[Array, " N"], negatives: Float[Array, "N n"], *, margin: int | float = 1
) -> Float[Array, " N"]:
    """Mean over the negatives of max(0, margin + s(negative) - s(label)).

    Args:
      target: [N] score of each token's label.
      negatives: [N, n] scores of the negatives; -inf is no negative.
      margin: Difference by which the label's score must exceed the others.

    Returns:
      [N] float32 losses; 0 for a token without negatives.

    References:
      Collobert and Weston 2008, "A unified architecture for natural language processing", eq. 3.
    """
    return _mean_hinge(margin + negatives.astype(jnp.float32) - target.astype(jnp.float32)[:, None])


@array_op("N", h="N")
def triplet_loss(
    h: Float[Array, "N D"], label: Float[Array, "N D"], negatives: Float[Array, "N n D"], *, margin: int | float = 1
) -> Float[Array, " N"]:
    """Mean over the negatives of max(0, margin + |h - label|^2 - |h - negative|^2).

    Args:
      h: [N, D] hidden states.
      label: [N, D] vector of each token's label.
      negatives: [N, n, D] vectors of the negatives.
      margin: Difference of squared distances by which the label must be nearer than the others.

    Returns:
      [N] float32 losses.

    References:
      Schroff et al. 2015, "FaceNet", eq. 3.
    """
    h, label, negatives = (x.astype(jnp.float32) for x in (h, label, negatives))
    label_distance = ((h - label) ** 2).sum(axis=1)
    return _mean_hinge(margin + label_distance[:, None] - ((h[:, None] - negatives) ** 2).sum(axis=2))


def _mean_hinge(violations: Array) -> Array:
    """Mean of max(0, violation) over those that are not -inf, which are no negatives."""
    counts = ~jnp.isneginf(violations)
    total = jax.nn.relu(jnp.where(counts, violations, 0.0)).sum(axis=1)
    return total / jnp.maximum(counts.sum(axis=1), 1).astype(jnp.float32)
