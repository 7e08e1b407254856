"""Nearest neighbours over unit vectors, which predict a class, explain the prediction, and extend hidden vectors."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.embeddings.bags import unit_norm
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.search import exact_search
from hpnlp.ops.search.exact import top_k
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


@array_op("Q", h="Q", is_hidden="Q")
def concat_nearest(
    h: Float[Array, "_ _"],
    entries: Float[Array, "_ _"],
    k: int = 1,
    *,
    temperature: int | float = 0.1,
    is_hidden: Bool[Array, "_ _"] | None = None,
) -> Float[Array, "_ _"]:
    """Hidden vectors, each followed by the mean of the nearest entries of a memory: h || nn(mem, h).

    The mean is weighted by exp(cosine / temperature) of the k entries of the largest cosine; for k = 1 it is the nearest entry.
    Gradients reach `h`, also through the weights, and the entries that are found.

    Args:
      h: [Q, D] hidden vectors of any length.
      entries: [N, D] entries of any length; an entry of zeros is empty, and never found.
      k: Number of entries.
      temperature: Divisor of the cosines in the weights.
      is_hidden: [Q, N] entries that a query does not find, such as its own; None for none.

    Returns:
      [Q, 2 D] of the dtype of `h`; the second half is 0 for a query without entries.

    Raises:
      InputError: Shapes do not fit, k is not 1 to N, or the temperature is not positive.

    Cost:
      2 Q N D operations, and Q N cosines.

    References:
      Kaiser et al. 2017, "Learning to remember rare events", add a memory that is read by nearest neighbours to a net.
    """
    if h.ndim != 2 or entries.ndim != 2 or h.shape[1] != entries.shape[1]:
        raise InputError(f"h {h.shape}, entries {entries.shape}: expected [Q, D] and [N, D]")
    if is_hidden is not None and is_hidden.shape != (len(h), len(entries)):
        raise InputError(f"is_hidden {is_hidden.shape}: expected {(len(h), len(entries))}, each query and entry")
    if not 1 <= k <= len(entries):
        raise InputError(f"k is {k}: expected 1 to {len(entries)}, the number of entries")
    if not temperature > 0:
        raise InputError(f"temperature {temperature}: expected a number over 0, such as 0.1")
    unit, keys = unit_norm(h.astype(jnp.float32)), unit_norm(entries.astype(jnp.float32))
    is_found = jnp.any(entries != 0, axis=1)[None]
    is_found = is_found if is_hidden is None else is_found & ~is_hidden
    cosines = jnp.einsum("qd,nd->qn", unit, keys, precision=jax.lax.Precision.HIGHEST)
    best, ids = top_k(jax.lax.stop_gradient(jnp.where(is_found, cosines, -jnp.inf)), k)
    exists = ~jnp.isneginf(best)
    scores = jnp.where(exists, jnp.take_along_axis(cosines, ids, axis=1), 0.0) / temperature
    largest = jax.lax.stop_gradient(jnp.where(exists, scores, -jnp.inf).max(axis=1, keepdims=True))
    weights = jnp.where(exists, jnp.exp(scores - jnp.where(jnp.isneginf(largest), 0.0, largest)), 0.0)
    weights = weights / jnp.maximum(weights.sum(axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    mean = jnp.einsum("qk,qkd->qd", weights, entries.astype(jnp.float32)[ids], precision=jax.lax.Precision.HIGHEST)
    return jnp.concatenate([h, mean.astype(h.dtype)], axis=1)
