"""Normalisation over the last axis, with float32 statistics; results have the dtype of the input."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hpnlp.ops.array_op import array_op


@array_op("...", x="...")
def rms_norm(x: Float[Array, "*tokens D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*tokens D"]:
    """RMS normalisation, x / sqrt(mean(x^2) + eps) * scale.

    Args:
      x: [..., D].
      scale: [D].
      eps: Added to the mean square.

    Returns:
      [..., D].

    References:
      Zhang and Sennrich 2019, "Root mean square layer normalization", eq. 4.
    """
    h = x.astype(jnp.float32)
    h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


@array_op("...", x="...")
def layer_norm(
    x: Float[Array, "*tokens D"], scale: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> Float[Array, "*tokens D"]:
    """Layer normalisation, (x - mean) / sqrt(variance + eps) * scale + bias.

    Args:
      x: [..., D].
      scale: [D].
      bias: [D].
      eps: Added to the variance.

    Returns:
      [..., D].

    References:
      Ba et al. 2016, "Layer normalization", eq. 4.
    """
    ones = (1,) * (x.ndim - 1)
    h = x.astype(jnp.float32)
    h = h - jnp.mean(h, axis=-1, keepdims=True)
    h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * scale.reshape(ones + scale.shape) + bias.reshape(ones + bias.shape)).astype(x.dtype)


@array_op("...", x="...")
def group_norm(
    x: Float[Array, "B *positions C"], scale: Float[Array, " C"], bias: Float[Array, " C"], groups: int, eps: float
) -> Float[Array, "B *positions C"]:
    """Group normalisation: as `layer_norm`, over the positions of an example and the channels of one group.

    Args:
      x: [B, ..., C].
      scale: [C].
      bias: [C].
      groups: Number of groups of consecutive channels, a divisor of C.
      eps: Added to the variance.

    Returns:
      [B, ..., C].

    References:
      Wu and He 2018, "Group normalization", eq. 7.
    """
    ones = (1,) * (x.ndim - 1)
    h = x.astype(jnp.float32).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    h = h - jnp.mean(h, axis=(1, 3), keepdims=True)
    h = h * lax.rsqrt(jnp.mean(h * h, axis=(1, 3), keepdims=True) + eps)
    return (h.reshape(x.shape) * scale.reshape(ones + scale.shape) + bias.reshape(ones + bias.shape)).astype(x.dtype)


@array_op(x="B", weights="B")
def channel_moments(
    x: Float[Array, "B *positions C"], weights: Float[Array, " B"]
) -> tuple[Float[Array, " C"], Float[Array, " C"], Float[Array, ""]]:
    """Mean and variance of each channel over the examples of a batch and their positions.

    Args:
      x: [B, ..., C].
      weights: [B] weight of each example.

    Returns:
      (mean [C], variance [C] with the divisor count, count), float32. Count is the sum of the weights times the number of
      positions; mean and variance are 0 where it is 0.
    """
    per_example = weights.astype(jnp.float32).reshape(-1, *(1,) * (x.ndim - 1))
    axes, positions = tuple(range(x.ndim - 1)), x.size // max(1, x.shape[0] * x.shape[-1])
    count = jnp.sum(weights.astype(jnp.float32)) * positions
    divisor = jnp.where(count > 0, count, 1.0)

    def mean_of(values: Array) -> Array:
        return jnp.sum(per_example * values, axis=axes) / divisor

    h = x.astype(jnp.float32)
    mean = mean_of(h)
    return mean, mean_of(jnp.square(h - mean.reshape((1,) * (x.ndim - 1) + mean.shape))), count


@array_op("...", x="...")
def normalize_channels(
    x: Float[Array, "*positions C"],
    mean: Float[Array, " C"],
    variance: Float[Array, " C"],
    scale: Float[Array, " C"],
    bias: Float[Array, " C"],
    eps: float,
) -> Float[Array, "*positions C"]:
    """Batch normalisation with given moments, (x - mean) / sqrt(variance + eps) * scale + bias.

    Args:
      x: [..., C].
      mean: [C], of the batch (`channel_moments`) or a moving average.
      variance: [C].
      scale: [C].
      bias: [C].
      eps: Added to the variance.

    Returns:
      [..., C].

    References:
      Ioffe and Szegedy 2015, "Batch normalization", algorithms 1 and 2.
    """
    mean, factor, bias = (
        v.reshape((1,) * (x.ndim - 1) + v.shape) for v in (mean, lax.rsqrt(variance + eps) * scale, bias)
    )
    return ((x.astype(jnp.float32) - mean) * factor + bias).astype(x.dtype)
