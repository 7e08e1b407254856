"""Ranking losses: a label is to score above the words that are mistaken for it, by a margin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.types import InputError


@array_op("N", scores="N")
def hardest(
    scores: Float[Array, "N C"], ids: Int[Array, "..."], labels: Int[Array, " N"], count: int
) -> tuple[Float[Array, "N n"], Int[Array, "N n"]]:
    """(scores, ids) of the `count` candidates of each token that score highest and are not its label, best first.

    ids: the candidates' words, [C] for all tokens or [N, C]; -1 is none, as searches give it. Where candidates do not suffice,
    scores are -inf and ids -1. A word that stands among them twice is given twice.
    Raises InputError where count is not 1 to C. Cost: O(N C).
    """
    if not 1 <= count <= scores.shape[1]:
        raise InputError(f"count {count}: expected 1 to {scores.shape[1]}, the number of candidates")
    each = jnp.broadcast_to(ids if ids.ndim == 2 else ids[None], scores.shape)
    values, at = lax.top_k(jnp.where((each == labels[:, None]) | (each < 0), -jnp.inf, scores), count)
    return values, jnp.where(jnp.isneginf(values), -1, jnp.take_along_axis(each, at, axis=1))


@array_op("N", target="N")
def margin_loss(
    target: Float[Array, " N"], negatives: Float[Array, "N n"], *, margin: int | float = 1
) -> Float[Array, " N"]:
    """The mean over the negatives of max(0, margin + s(negative) - s(label)); float32. A negative of -inf is none, and 0.

    Source: Collobert and Weston 2008, "A unified architecture for natural language processing", eq. 3.
    """
    return _mean(margin + negatives.astype(jnp.float32) - target.astype(jnp.float32)[:, None])


@array_op("N", h="N")
def triplet_loss(
    h: Float[Array, "N D"], label: Float[Array, "N D"], negatives: Float[Array, "N n D"], *, margin: int | float = 1
) -> Float[Array, " N"]:
    """The mean over the negatives of max(0, margin + |h - label|^2 - |h - negative|^2); float32.

    Source: Schroff et al. 2015, "FaceNet", eq. 3.
    """
    h, label, negatives = (x.astype(jnp.float32) for x in (h, label, negatives))
    near = ((h - label) ** 2).sum(axis=1)
    return _mean(margin + near[:, None] - ((h[:, None] - negatives) ** 2).sum(axis=2))


def _mean(each: Array) -> Array:
    some = ~jnp.isneginf(each)
    return jax.nn.relu(jnp.where(some, each, 0.0)).sum(axis=1) / jnp.maximum(some.sum(axis=1), 1).astype(jnp.float32)
