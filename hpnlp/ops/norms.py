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
