"""Matrices whose rows are scaled before they are rounded, and inputs by the inverse: for inputs some of which are much larger.

References:
  Xiao et al. 2023, "SmoothQuant: accurate and efficient post-training quantization for large language models", 2211.10438.
  Lin et al. 2024, "AWQ: activation-aware weight quantization for on-device LLM compression and acceleration", 2306.00978.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.weight import Weight, dense, is_weight, weight_axes
from hpnlp.ops.weights.calibrated.second_order import output_error

EXPONENTS = 21  # exponents from 0 to 1 that `search_row_factors` tries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowScaledWeight(Weight):
    """w[i, j] = factors[i] * inner[i, j]; a product multiplies x by the factors first, in one more pass over x.

    Attributes:
      inner: The matrix [D, F], a Weight.
      factors: float32 [D].
    """

    inner: Any
    factors: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.shape

    @property
    def stages(self) -> set[str]:
        return self.inner.stages if is_weight(self.inner) else set()

    def dense(self) -> Float[Array, "D F"]:
        return dense(self.inner) * self.factors[:, None]

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        return self.inner.matmul((x * self.factors[None]).astype(x.dtype))

    def matmul_transposed(self, x: Float[Array, "M F"]) -> Float[Array, "M D"]:
        return self.inner.matmul_transposed(x) * self.factors[None]

    def take(self, ids: Array) -> Float[Array, "*tokens F"]:
        return self.inner.take(ids) * self.factors[ids][..., None]

    def axes(self, names: tuple[str | None, ...]) -> Any:
        return RowScaledWeight(weight_axes(self.inner, names), names[:-1])


@array_op()
def smoothing_factors(
    w: Float[Array, "D F"], moments: Float[Array, "D D"], strength: float | int = 0.5
) -> Float[Array, " D"]:
    """Factors of rows that move a part of the range of the inputs to the matrix (SmoothQuant, eq. 4).

    The root mean square of an input stands for its largest magnitude, since it is what the moments hold.

    Args:
      w: [D, F].
      moments: Sum or mean of x^T x over the inputs x of the matrix.
      strength: 0 gives all rows the same largest magnitude, 1 all inputs the same root mean square.

    Returns:
      float32 [D], the factors of `RowScaledWeight`, of geometric mean 1: round `w / factors[:, None]`.
    """
    inputs = _roots(moments)
    rows = jnp.max(jnp.abs(w), axis=1).astype(jnp.float32)
    # A row of zeros gets the smallest magnitude of the others, so that its input, which has no effect, does not become large
    # beside inputs that are rounded together with it.
    least = jnp.min(jnp.where(rows > 0, rows, jnp.inf))
    rows = jnp.where(rows > 0, rows, jnp.where(jnp.isfinite(least), least, 1.0))
    return _normalized(rows ** (1 - strength) / inputs**strength)


@array_op()
def search_row_factors(
    w: Float[Array, "D F"], moments: Float[Array, "D D"], rounded: Callable[[Array], Array]
) -> Float[Array, " D"]:
    """Factors of rows with which rounding changes the products least, powers of the inputs' root mean square (AWQ, eq. 5).

    Args:
      w: [D, F].
      moments: As in `smoothing_factors`.
      rounded: Rounds a matrix [D, F].

    Returns:
      float32 [D], as `smoothing_factors`; ones if no other factors are better.

    Cost:
      `EXPONENTS` roundings and products with the moments.
    """
    inputs = _roots(moments)

    def error(exponent: Array) -> Array:
        factors = _normalized(inputs**-exponent)[:, None]
        return output_error(rounded(w / factors) * factors - w, moments)

    exponents = jnp.linspace(0.0, 1.0, EXPONENTS)
    return _normalized(inputs ** -exponents[jnp.argmin(jax.lax.map(error, exponents))])


def _roots(moments: Array) -> Array:
    """Root mean square of each input up to a common factor; of inputs that are 0, the mean of all."""
    diagonal = jnp.diagonal(moments).astype(jnp.float32)
    mean = jnp.mean(diagonal)
    diagonal = jnp.where(diagonal > 0, diagonal, jnp.where(mean > 0, mean, 1.0))
    return jnp.sqrt(jnp.maximum(diagonal, 1e-8 * diagonal.max()))


def _normalized(factors: Array) -> Array:
    return factors / jnp.exp(jnp.mean(jnp.log(factors)))
