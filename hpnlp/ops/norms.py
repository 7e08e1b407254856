"""Normalisation over the last axis, with float32 statistics; results have the dtype of the input.

Gradients are written out, because XLA:CPU takes 3 to 10 times as long for those that JAX derives: 33 ms of CPU time at T 4096,
D 512, that of three products with D x D matrices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike


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
    return _rms_norm(eps, *vary_alike(x, scale))


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
    return _layer_norm(eps, *vary_alike(x, scale, bias))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(eps: float, x: Array, scale: Array) -> Array:
    return _rms_forward(eps, x, scale)[0]


@accepts_numpy
def _rms_forward(eps: float, x: Array, scale: Array) -> tuple[Array, Any]:
    h = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * inverse * _row(scale, x)).astype(x.dtype), (x, scale, inverse)


def _rms_backward(_: float, saved: PyTree, dy: Array) -> tuple[Array, Array]:
    x, scale, inverse = saved
    dy, normed = dy.astype(jnp.float32), x.astype(jnp.float32) * inverse
    g = dy * _row(scale, x)
    dx = inverse * (g - normed * _mean_of_products(g, normed))
    return dx.astype(x.dtype), _over_tokens(dy * normed, scale)


_rms_norm.defvjp(_rms_forward, _rms_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(eps: float, x: Array, scale: Array, bias: Array) -> Array:
    return _layer_forward(eps, x, scale, bias)[0]


@accepts_numpy
def _layer_forward(eps: float, x: Array, scale: Array, bias: Array) -> tuple[Array, Any]:
    h = x.astype(jnp.float32)
    mean = jnp.mean(h, axis=-1, keepdims=True)
    h = h - mean
    inverse = lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * inverse * _row(scale, x) + _row(bias, x)).astype(x.dtype), (x, scale, bias, mean, inverse)


def _layer_backward(_: float, saved: PyTree, dy: Array) -> tuple[Array, Array, Array]:
    x, scale, bias, mean, inverse = saved
    dy, normed = dy.astype(jnp.float32), (x.astype(jnp.float32) - mean) * inverse
    g = dy * _row(scale, x)
    mean_g = _mean_of_products(dy, jnp.broadcast_to(_row(scale, x), dy.shape))
    dx = inverse * (g - mean_g - normed * _mean_of_products(g, normed))
    return dx.astype(x.dtype), _over_tokens(dy * normed, scale), _over_tokens(dy, bias)


_layer_norm.defvjp(_layer_forward, _layer_backward)


def _mean_of_products(a: Array, b: Array) -> Array:
    """[..., 1], the mean of a * b over features; as an einsum, which XLA:CPU computes in a tenth of the time of a sum."""
    products = jnp.einsum("...d,...d->...", a, b, precision=lax.Precision.HIGHEST)
    return products[..., None] / a.shape[-1]


def _row(features: Array, x: Array) -> Array:
    """[D] -> [1, ..., 1, D]."""
    return features.reshape((1,) * (x.ndim - 1) + features.shape)


def _over_tokens(x: Array, like: Array) -> Array:
    """The sum over tokens, in the dtype of `like`."""
    return x.sum(axis=tuple(range(x.ndim - 1))).astype(like.dtype)


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

    def weighted_mean(values: Array) -> Array:
        return jnp.sum(per_example * values, axis=axes) / divisor

    h = x.astype(jnp.float32)
    mean = weighted_mean(h)
    return mean, weighted_mean(jnp.square(h - mean.reshape((1,) * (x.ndim - 1) + mean.shape))), count


@array_op("...", x="...")
def normalize_channels(
    x: Float[Array, "*positions C"],
    mean: Float[Array, " C"],
    variance: Float[Array, " C"],
    scale: Float[Array, " C"],
    bias: Float[Array, " C"],
    eps: float,
    powers: bool = False,
) -> Float[Array, "*positions C"]:
    """Batch normalisation with given moments, (x - mean) / sqrt(variance + eps) * scale + bias.

    Args:
      x: [..., C].
      mean: [C], of the batch (`channel_moments`) or a moving average.
      variance: [C].
      scale: [C].
      bias: [C].
      eps: Added to the variance.
      powers: The factors scale / sqrt(variance + eps) are rounded to powers of two with signs, by their logarithms, so that
        hardware without floats may shift. Gradients pass the rounding.

    Returns:
      [..., C].

    References:
      Ioffe and Szegedy 2015, "Batch normalization", algorithms 1 and 2.
      Courbariaux et al. 2016, "Binarized neural networks", shift-based batch normalization, which rounds each factor by itself;
        `powers` rounds their product.
    """
    factor = lax.rsqrt(variance + eps) * scale
    if powers:
        factor = _nearest_powers(lax.stop_gradient(factor)) + (factor - lax.stop_gradient(factor))
    mean, factor, bias = (v.reshape((1,) * (x.ndim - 1) + v.shape) for v in (mean, factor, bias))
    return ((x.astype(jnp.float32) - mean) * factor + bias).astype(x.dtype)


def _nearest_powers(x: Float[Array, " C"]) -> Float[Array, " C"]:
    """Numbers rounded to powers of two with signs; 0 and numbers that are not finite stay."""
    is_power = jnp.isfinite(x) & (x != 0)
    exponents = jnp.round(jnp.log2(jnp.abs(jnp.where(is_power, x, 1.0)))).astype(jnp.int32)
    return jnp.where(is_power, jnp.sign(x) * jnp.ldexp(jnp.ones_like(x), exponents), x)
