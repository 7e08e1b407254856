"""Exact softmax cross-entropy over a vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def _logits(h: Array, table: Array, bias: Array | None) -> Array:
    logits = jax.lax.dot_general(h, table.astype(h.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return logits if bias is None else logits + bias.astype(jnp.float32)[None, :]


def nll(
    h: Float[Array, "M D"],
    table: Float[Array, "V D"],
    labels: Int[Array, "M"],
    *,
    bias: Float[Array, "V"] | None = None,
) -> Float[Array, "M"]:
    """-log softmax(h table^T + bias)[label] of each token, float32, in nats."""
    logits = _logits(h, table, bias)
    target = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - target


def cross_entropy(
    h: Float[Array, "M D"],
    table: Float[Array, "V D"],
    labels: Int[Array, "M"],
    weights: Float[Array, "M"],
    *,
    bias: Float[Array, "V"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum of weights * nll, sum of weights), both float32."""
    weights = weights.astype(jnp.float32)
    return (weights * nll(h, table, labels, bias=bias)).sum(), weights.sum()
