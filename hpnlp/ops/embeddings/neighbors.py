"""Nearest neighbours over unit vectors, which predict a class and explain the prediction."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.embeddings.bags import unit_norm
from hpnlp.ops.search import exact_search
from hpnlp.types import InputError


class Neighbors(NamedTuple):
    """The nearest examples of queries, nearest first.

    Attributes:
      similarities: [Q, k] float32 cosines.
      ids: [Q, k] int32 numbers of the examples.
    """

    similarities: Float[Array, "Q k"]
    ids: Int[Array, "Q k"]


@array_op("Q", q="Q")
def find_neighbors(q: Float[Array, "Q D"], x: Float[Array, "N D"], k: int) -> Neighbors:
    """The examples with the largest cosine similarity to each query, by exact search.

    Args:
      q: [Q, D] queries of any length.
      x: [N, D] examples of any length.
      k: Number of neighbours.

    Returns:
      The neighbours; of equal similarities, the lower number first.

    Raises:
      InputError: Shapes do not fit, or k is not 1 to N.

    Cost:
      2 Q N D operations (`exact_search`).
    """
    return Neighbors(*exact_search(unit_norm(q), unit_norm(x), k))


@array_op("Q", similarities="Q")
def neighbor_probabilities(
    similarities: Float[Array, "Q k"],
    labels: Int[Array, "Q k"],
    classes: int,
    *,
    temperature: int | float | None = None,
) -> Float[Array, "Q C"]:
    """Probabilities of classes by the votes of neighbours.

    Args:
      similarities: [Q, k] of `find_neighbors`; -inf is no neighbour.
      labels: [Q, k] classes of the neighbours; a number that is no class is no neighbour.
      classes: Number of classes, C.
      temperature: A neighbour has the weight exp(similarity / temperature); None for equal weights.

    Returns:
      [Q, C] float32, which sum to 1; 0 for a query without neighbours.

    Raises:
      InputError: Shapes differ, classes is less than 1, or the temperature is not positive.
    """
    if labels.shape != similarities.shape:
        raise InputError(f"similarities {similarities.shape}, labels {labels.shape}: expected [Q, k] both")
    if classes < 1:
        raise InputError(f"classes is {classes}: expected at least 1")
    if temperature is not None and not temperature > 0:
        raise InputError(f"temperature {temperature}: expected a number over 0, such as 0.1, or None for equal votes")
    is_neighbor = ~jnp.isneginf(similarities) & (labels >= 0) & (labels < classes)
    if temperature is None:
        votes = is_neighbor.astype(jnp.float32)
    else:
        scores = jnp.where(is_neighbor, similarities.astype(jnp.float32), 0.0) / temperature
        largest = jnp.where(is_neighbor, scores, -jnp.inf).max(axis=1, keepdims=True)
        votes = jnp.where(is_neighbor, jnp.exp(scores - jax.lax.stop_gradient(jnp.maximum(largest, -1e30))), 0.0)
    votes = votes / jnp.maximum(votes.sum(axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    query = jnp.arange(len(labels), dtype=jnp.int32)[:, None]
    to = jnp.where(is_neighbor, labels, 0).astype(jnp.int32)
    return jnp.zeros((len(labels), classes), jnp.float32).at[query, to].add(votes)
