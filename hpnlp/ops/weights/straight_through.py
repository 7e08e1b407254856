"""Straight-through estimators: forward, a rounded or masked matrix; backward, the gradient that passes the rounding.

References:
  Bengio et al. 2013, "Estimating or propagating gradients through stochastic neurons for conditional computation".
  Jacob et al. 2018, "Quantization and training of neural networks for efficient integer-arithmetic-only inference".
  Courbariaux et al. 2015, "BinaryConnect"; Rastegari et al. 2016, "XNOR-Net".
  Zhang et al. 2020, "TernaryBERT: distillation-aware ultra-low bit BERT".
  Sanh et al. 2020, "Movement pruning: adaptive sparsity by fine-tuning", section 4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.weights import ranges
from hpnlp.ops.weights.sparse import largest
from hpnlp.ops.weights.ternary import binarize, ternarize


@array_op("...", x="...")
def round_through(x: Float[Array, "*shape"], limits: ArrayLike, bits: int = 8) -> Float[Array, "*shape"]:
    """Rounds to integers of a range times a step, as quantized matrices and their inputs are ("fake quantization").

    Args:
      x: [...].
      limits: Magnitudes that become the largest integer 2^(bits - 1) - 1, broadcast against x; no gradient reaches them.
      bits: 2 to 8.

    Returns:
      [...] in the dtype of x. The gradient is that of the identity for numbers that are rounded to an integer of the range,
      and 0 for larger ones, which are clipped. NaN stays NaN.

    Raises:
      InputError: `bits` is out of range.
    """
    top = ranges.largest_code(bits)
    limits = jax.lax.stop_gradient(jnp.asarray(limits, jnp.float32))
    integers = x.astype(jnp.float32) / jnp.where(limits == 0, 1.0, limits / top)
    steps = jnp.where(limits == 0, 1.0, limits / top)
    rounded = (jnp.clip(jnp.round(integers), -top, top) * steps).astype(x.dtype)
    return _through(x, rounded, jnp.abs(jnp.round(jax.lax.stop_gradient(integers))) <= top)


@array_op("...", w="...")
def quantize_through(
    w: Float[Array, "D F"], bits: int = 8, *, group: int = 0, by_row: bool = False, method: str = "max"
) -> Float[Array, "D F"]:
    """The matrix of `quantize(w, bits)`, with gradients as in `round_through`.

    Args:
      w: [D, F].
      bits: 2 to 8.
      group: As in `quantize`.
      by_row: As in `quantize`.
      method: How `ranges.limits` chooses the range.

    Returns:
      [D, F] in the dtype of w.

    Raises:
      InputError: An argument is out of range.
    """
    limits = ranges.limits(jax.lax.stop_gradient(w), bits, method, group=group, by_row=by_row)
    groups = ranges.grouped(w, group=group, by_row=by_row)
    return round_through(groups, limits[:, None], bits).reshape(w.shape)


@array_op("...", w="...")
def ternary_through(w: Float[Array, "D F"], scale: str = "matrix", clip: float = 2.5) -> Float[Array, "D F"]:
    """The matrix of `ternarize(w, scale)`; the gradient is that of the identity, and 0 for magnitudes over `clip`.

    Args:
      w: [D, F].
      scale: As in `ternarize`.
      clip: Over 0. TernaryBERT takes 2.5.

    Returns:
      [D, F] in the dtype of w.

    Raises:
      InputError: `scale` is unknown.
    """
    rounded = ternarize(jax.lax.stop_gradient(w), scale, packed=False).dense().astype(w.dtype)
    return _through(w, rounded, jnp.abs(w) <= clip)


@array_op("...", w="...")
def binary_through(w: Float[Array, "D F"], scale: str | None = "column", clip: float = 1.0) -> Float[Array, "D F"]:
    """The signs of a matrix, 1 for 0; the gradient is that of the identity, and 0 for magnitudes over `clip`.

    Args:
      w: [D, F].
      scale: Signs are multiplied by mean magnitudes as in `binarize` (XNOR-Net); None for 1 (BinaryConnect).
      clip: Over 0. Weights that are clipped to [-1, 1] after each step, as BinaryConnect does, always have a gradient.

    Returns:
      [D, F] in the dtype of w.

    Raises:
      InputError: `scale` is unknown.
    """
    constant = jax.lax.stop_gradient(w)
    if scale is None:
        rounded = jnp.where(constant < 0, -1.0, 1.0) + 0.0 * constant.astype(jnp.float32)  # NaN stays NaN
    else:
        rounded = binarize(constant, scale, packed=False).dense()
    return _through(w, rounded.astype(w.dtype), jnp.abs(w) <= clip)


@array_op("...", scores="...")
def top_through(scores: Float[Array, "D F"], share: float | Float[Array, ""]) -> Float[Array, "D F"]:
    """A mask of the largest scores, 1 and 0, whose gradient is passed to the scores as it is.

    For w * top_through(scores, share) and a loss, the gradient of the scores is that of the product times w: scores rise where
    weights move away from 0 (movement pruning).

    Args:
      scores: [D, F].
      share: Share of ones, in [0, 1]; may be traced, as a schedule computes it.

    Returns:
      [D, F] in the dtype of the scores.
    """
    constant = jax.lax.stop_gradient(scores)
    return _through(scores, largest(constant, share).astype(scores.dtype), jnp.ones(scores.shape, bool))


@array_op("...", scores="...")
def threshold_through(
    scores: Float[Array, "D F"], threshold: float | Float[Array, ""] = 0.1, floor: float = 0.005
) -> Float[Array, "D F"]:
    """A mask of the scores whose sigmoid exceeds a threshold, with the gradient of `top_through` (soft movement pruning).

    The penalty of soft movement pruning is the mean of sigmoid(scores), which the caller adds to the loss.

    Args:
      scores: [D, F].
      threshold: In (0, 1); may be traced.
      floor: The largest scores, of at least this share, are 1 whatever the threshold.

    Returns:
      [D, F] in the dtype of the scores.
    """
    constant = jax.lax.stop_gradient(scores)
    mask = (jax.nn.sigmoid(constant.astype(jnp.float32)) > threshold) | largest(constant, floor)
    return _through(scores, mask.astype(scores.dtype), jnp.ones(scores.shape, bool))


def _through(x: Array, value: Array, passes: Array) -> Array:
    """`value`, with the gradient of the identity of x where `passes` is set."""
    return _identity_gradient(*vary_alike(x, jax.lax.stop_gradient(value), passes))


@jax.custom_vjp
def _identity_gradient(x: Array, value: Array, passes: Array) -> Array:
    return value


@accepts_numpy
def _forward(x: Array, value: Array, passes: Array) -> tuple[Array, Array]:
    return value, passes


def _backward(passes: Array, dy: Array) -> tuple[Array, None, None]:
    return jnp.where(passes, dy, jnp.zeros_like(dy)), None, None


_identity_gradient.defvjp(_forward, _backward)
