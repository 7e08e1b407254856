"""Fourier transforms of a sequence, over tokens and features, as a mixer without parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op


@array_op("B T D", x="B T D")
def fourier_mix(x: Float[Array, "B T D"], scale: float = 1.0) -> Float[Array, "B T D"]:
    """Real part of the two-dimensional discrete Fourier transform over tokens and features.

    `y[t, d] = scale * sum_{s, e} cos(2 pi (t s / T + d e / D)) x[s, e]` is a symmetric linear map, so that its gradient is the
    transform of the cotangent, and nothing is kept for it.

    Args:
      x: Hidden states.
      scale: Factor of the result: 1 as in the paper, or (T D) ** -0.5 for values of the size of those in x.

    Returns:
      The transformed states, in the dtype of x; computed in float32.

    Cost: O(B T D (log T + log D)) time.

    References:
      Lee-Thorp et al. 2021, "FNet: mixing tokens with Fourier transforms", eq. 3.
    """
    mixed: Any = _mix(x.astype(jnp.float32))
    return (scale * mixed).astype(x.dtype)


@array_op("B T D", x="B T D")
def fourier_mix_reference(x: Float[Array, "B T D"], scale: float = 1.0) -> Float[Array, "B T D"]:
    """`fourier_mix` by its definition, with the matrices of both transforms.

    Args:
      x: Hidden states.
      scale: Factor of the result.

    Returns:
      The transformed states, in the dtype of x.
    """
    matrices = []
    for size in x.shape[1:]:
        index = jnp.arange(size)
        # Angles of reduced products: float32 does not hold large ones.
        angle = 2 * jnp.pi * ((index[:, None] * index[None]) % size).astype(jnp.float32) / size
        matrices.append((jnp.cos(angle), jnp.sin(angle)))
    (cos_t, sin_t), (cos_d, sin_d) = matrices
    states = x.astype(jnp.float32)
    of_cosines = jnp.einsum("ts,bse,ed->btd", cos_t, states, cos_d, precision="highest")
    of_sines = jnp.einsum("ts,bse,ed->btd", sin_t, states, sin_d, precision="highest")
    return (scale * (of_cosines - of_sines)).astype(x.dtype)


@jax.custom_vjp
def _mix(x: Array) -> Array:
    # XLA:CPU may order axes of size 1 differently in memory, and then refuses the transform ("IsMonotonicWithDim0Major").
    sizes = [size for size in x.shape if size > 1]
    transformed = sum(size > 1 for size in x.shape[1:])
    if not transformed:
        return x
    y = jnp.fft.fftn(x.reshape(sizes), axes=range(len(sizes) - transformed, len(sizes)))
    return y.real.reshape(x.shape)


def _forward(x: Array) -> tuple[Array, None]:
    return _mix(x), None


def _backward(_: None, cotangent: Array) -> tuple[Array]:
    return (_mix(cotangent),)


_mix.defvjp(_forward, _backward)
