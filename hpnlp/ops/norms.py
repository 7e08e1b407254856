"""Normalisation over the last axis: float32 statistics, the input's dtype out."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hpnlp.ops.array_op import array_op


@array_op("...", x="...")
def rms_norm(x: Float[Array, "*tokens D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*tokens D"]:
    """`x / sqrt(mean(x^2) + eps) * scale` (Zhang and Sennrich 2019, eq. 4)."""
    h = x.astype(jnp.float32)
    h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


@array_op("...", x="...")
def layer_norm(
    x: Float[Array, "*tokens D"], scale: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> Float[Array, "*tokens D"]:
    """`(x - mean) / sqrt(var + eps) * scale + bias` (Ba et al. 2016, eq. 4)."""
    ones = (1,) * (x.ndim - 1)
    h = x.astype(jnp.float32)
    h = h - jnp.mean(h, axis=-1, keepdims=True)
    h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * scale.reshape(ones + scale.shape) + bias.reshape(ones + bias.shape)).astype(x.dtype)
