"""Magnitudes up to which numbers are rounded to integers; larger numbers are clipped.

References:
  Krishnamoorthi 2018, "Quantizing deep convolutional networks for efficient inference", section 2: the largest magnitude.
  McKinstry et al. 2018, "Discovering low-precision networks close to full-precision networks": percentiles.
  Banner et al. 2019, "Post training 4-bit quantization of convolutional networks", section 3: the least squared error.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError

METHODS = ("max", "percentile", "mse")
# Share of the largest magnitude that `mse` tries at least, and the number of shares up to 1.
MIN_SHARE, SHARES = 0.3, 36


def largest_code(bits: int) -> int:
    """The largest integer of a symmetric range.

    Args:
      bits: 2 to 8.

    Returns:
      2^(bits - 1) - 1.

    Raises:
      InputError: `bits` is out of range.
    """
    if not 2 <= bits <= 8:
        raise InputError(f"bits={bits}: expected 2 to 8")
    return 2 ** (bits - 1) - 1


@array_op()
def grouped(w: Float[Array, "D F"], *, group: int = 0, by_row: bool = False) -> Float[Array, "groups size columns"]:
    """A matrix with the numbers that share a scale on the second axis.

    Args:
      w: [D, F].
      group: Rows of a group, of which each column has a scale; 0 for all D rows.
      by_row: Each row has a scale.

    Returns:
      [D / group, group, F]; [1, D, F] without groups; [D, F, 1] by row.

    Raises:
      InputError: `group` does not divide D, or is given together with `by_row`.
    """
    d, f = w.shape
    if group and (by_row or group < 0 or d % group):
        expected = (
            "0, since by_row gives each row a scale" if by_row else f"0 or a divisor of the {d} rows of each matrix"
        )
        raise InputError(f"group={group}: expected {expected}")
    return w.reshape(d, f, 1) if by_row else w.reshape(-1, group or d, f)


def steps(limits: Float[Array, "*shape"], largest: int | float) -> Float[Array, "*shape"]:
    """Distance of neighbouring codes, at least the smallest normal float32, as processors flush smaller ones to 0.

    Args:
      limits: Magnitudes that become the largest code, of any shape.
      largest: The largest code.

    Returns:
      float32 of that shape, 1 where the limit is 0.
    """
    return jnp.where(limits == 0, 1.0, jnp.maximum(limits / largest, jnp.finfo(jnp.float32).tiny)).astype(jnp.float32)


@array_op()
def limits(
    w: Float[Array, "D F"],
    bits: int = 8,
    method: str = "max",
    *,
    percentile: int | float = 99.9,
    group: int = 0,
    by_row: bool = False,
) -> Float[Array, "groups columns"]:
    """Magnitudes that become the largest integer.

    Args:
      w: [D, F].
      bits: 2 to 8; only "mse" depends on it.
      method: "max", the largest magnitude; "percentile" of the magnitudes, interpolated, or the largest where that is 0; or
        "mse", the one of 36 evenly spaced shares of the largest magnitude, from 0.3 to 1, at which rounding has the least
        squared error.
      percentile: Over 0, at most 100.
      group: As in `grouped`.
      by_row: As in `grouped`.

    Returns:
      float32 [D / group, F], [1, F] or [D, 1]: the shape of the scales. NaN where w has a NaN.

    Raises:
      InputError: An argument is out of range.

    Cost:
      One pass over w; a sort for percentiles; 36 passes for "mse".
    """
    top, groups = largest_code(bits), grouped(w.astype(jnp.float32), group=group, by_row=by_row)
    if method not in METHODS:
        raise InputError(f"limits={method!r}: expected {', '.join(METHODS)}, or an array")
    if not 0 < percentile <= 100:
        raise InputError(f"percentile={percentile}: expected over 0 and at most 100")
    magnitudes = jnp.abs(groups)
    largest = magnitudes.max(axis=1)
    if method == "percentile":
        limit = jnp.percentile(magnitudes, percentile, axis=1)
        return jnp.where(limit == 0, largest, limit)  # the percentile is 0 where most numbers of a column are 0
    if method == "max":
        return largest

    def error(share: Array) -> Array:
        step = jnp.where(largest == 0, 1.0, share * largest / top)[:, None]
        rounded = jnp.minimum(jnp.round(magnitudes / step), float(top)) * step
        return ((magnitudes - rounded) ** 2).sum(axis=1)

    shares = jnp.linspace(1.0, MIN_SHARE, SHARES)  # argmin takes the first of equal errors, which is the largest range
    return shares[jax.lax.map(error, shares).argmin(axis=0)] * largest


@array_op()
def activation_limit(
    x: Float[Array, "*tokens D"], method: str = "max", *, percentile: int | float = 99.9
) -> Float[Array, ""]:
    """The magnitude of inputs that becomes the largest 8-bit integer, for products with a fixed range of x.

    Args:
      x: Inputs of a matrix on calibration data, [..., D].
      method: As in `limits`.
      percentile: As in `limits`.

    Returns:
      float32 [].

    Raises:
      InputError: An argument is out of range.
    """
    return limits(x.reshape(-1, 1), 8, method, percentile=percentile)[0, 0]
