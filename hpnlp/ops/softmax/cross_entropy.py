"""Exact softmax cross-entropy over a vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.linear import product


def logits(
    h: Float[Array, "M D"], table: Float[Array, "V D"], *, bias: Float[Array, "V"] | None = None
) -> Float[Array, "M V"]:
    """h table^T + bias, accumulated and returned in float32. Cost: O(M V D) time, O(M V) memory."""
    out = product(h, table.T)
    return out if bias is None else out + bias.astype(jnp.float32)[None, :]


def nll(
    h: Float[Array, "M D"],
    table: Float[Array, "V D"],
    labels: Int[Array, "M"],
    *,
    bias: Float[Array, "V"] | None = None,
) -> Float[Array, "M"]:
    """-log softmax(h table^T + bias)[label] of each token, float32, in nats. Labels are in [0, V); others give NaN."""
    scores = logits(h, table, bias=bias)
    target = jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(scores, axis=1) - target


def cross_entropy(
    h: Float[Array, "M D"],
    table: Float[Array, "V D"],
    labels: Int[Array, "M"],
    weights: Float[Array, "M"],
    *,
    bias: Float[Array, "V"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum of weights * nll, sum of weights), both float32. What stands at a token of weight 0, label or NaN, is nothing.

    Cost: O(M V D) time, O(M V) memory.
    """
    weights = weights.astype(jnp.float32)
    counts = weights != 0
    h = jnp.where(counts[:, None], h, jnp.zeros((), h.dtype))
    each = nll(h, table, jnp.where(counts, labels, 0), bias=bias)
    return (weights * each).sum(), weights.sum()
