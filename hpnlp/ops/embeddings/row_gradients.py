"""Gradients of rows of a table, scaled by the frequency of the rows' ids."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.types import InputError


@array_op("...", x="...")
def scale_gradient(x: Float[Array, "*n D"], factors: Float[Array, "*n"]) -> Float[Array, "*n D"]:
    """Returns x; its gradient is multiplied by factors.

    As all lookups of a row have the factor of its id, `scale_gradient(table[ids], factors[ids])` multiplies the gradients of
    the table's rows by `factors`, whether the table is dense or a subset of rows.

    Args:
      x: [..., D] vectors.
      factors: [...] one factor of each vector, which has no gradient.

    Returns:
      x.

    Raises:
      InputError: Shapes that do not fit.
    """
    if factors.shape != x.shape[:-1]:
        raise InputError(f"factors {factors.shape}: expected {x.shape[:-1]}, one factor of each vector")
    return _scale_gradient(x, factors)


@jax.custom_vjp
def _scale_gradient(x: Array, factors: Array) -> Array:
    return x


@accepts_numpy
def _forward(x: Array, factors: Array) -> tuple[Any, Any]:
    return x, factors


@accepts_numpy
def _backward(factors: Array, d: Array) -> tuple[Any, None]:
    return (d.astype(jnp.float32) * factors.astype(jnp.float32)[..., None]).astype(d.dtype), None


_scale_gradient.defvjp(_forward, _backward)


def frequency_factors(counts: Int[np.ndarray, " V"], power: int | float = 1.0) -> Float[np.ndarray, " V"]:
    """Factors of gradients that fall with the frequency of an id: count^-power, with the mean 1 over occurrences.

    With power 1, the gradients of a rare and of a frequent row have the same size over an epoch. Their mean over occurrences is
    that of gradients that are not scaled, so that learning rates compare. An id that never occurs has the factor of one that
    occurs once.

    Args:
      counts: [V] numbers of occurrences in the training data.
      power: 0 for factors of 1, 1 for the inverse frequency, 0.5 for its square root.

    Returns:
      [V] float32.

    Raises:
      InputError: A count is negative, all are 0, or power is not 0 to 1.
    """
    counts = np.asarray(counts, np.float64)
    if counts.ndim != 1 or not counts.sum() > 0 or counts.min() < 0:
        raise InputError(f"counts {counts.shape}: expected numbers of occurrences [V], at least 0 and not all 0")
    if not 0 <= power <= 1:
        raise InputError(f"power {power}: expected 0 (all rows alike) to 1 (inverse frequency)")
    factors = np.maximum(counts, 1) ** -float(power)
    return (factors * (counts.sum() / (counts * factors).sum())).astype(np.float32)


@array_op("...", ids="...")
def share_of_occurrences(ids: Int[Array, "*n"], rows: int) -> Float[Array, "*n"]:
    """1 / number of occurrences of each id in a batch, the factors of torch's `Embedding(scale_grad_by_freq=True)`.

    Args:
      ids: [...] ids of a batch, 0 to rows - 1; other numbers have the factor 0.
      rows: Number of rows of the table.

    Returns:
      [...] float32 factors for `scale_gradient`: the gradient of a row becomes the mean over its occurrences.

    Cost:
      `rows` counts, and two passes over the ids.
    """
    is_row = (ids >= 0) & (ids < rows)
    safe = jnp.where(is_row, ids, 0)
    counts = jnp.zeros((rows,), jnp.float32).at[safe].add(is_row.astype(jnp.float32))
    return jnp.where(is_row, 1 / jnp.maximum(counts[safe], 1), 0.0)
