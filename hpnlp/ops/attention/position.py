"""Rotary position embedding."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How a model's rotary frequencies were stretched to a longer context.

    kind: "none"; "linear" (Chen et al. 2023, "Position Interpolation": positions divided by `factor`); "llama3" (the
    Llama 3.1 rule: wavelengths above original_length / low_freq_factor are divided by `factor`, those below
    original_length / high_freq_factor are kept, those between are blended).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


def frequencies(dim: int, theta: float = 10000.0, scaling: Scaling = Scaling()) -> np.ndarray:  # noqa: B008  (frozen)
    """float64 [dim / 2]: the angle per position of each pair of features."""
    if dim % 2:
        raise InputError(f"head dim {dim} is odd: rotary embedding turns pairs of features, choose an even one")
    inv = theta ** -(np.arange(0, dim, 2) / dim)
    if scaling.kind == "none":
        return inv
    if scaling.kind == "linear":
        return inv / scaling.factor
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / inv
        blend = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blend = np.clip(blend, 0.0, 1.0)
        return inv * blend + inv / scaling.factor * (1 - blend)
    raise InputError(f"rope scaling {scaling.kind!r}: expected none, linear or llama3")


def rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    theta: float = 10000.0,
    scaling: Scaling = Scaling(),  # noqa: B008  (frozen)
) -> Float[Array, "B T N H"]:
    """Turns feature pairs (i, i + H/2) by an angle that grows with the position.

    The half-split pairing of Llama checkpoints in the Hugging Face layout. positions: int32 [B, T], or [1, T] where all
    rows share them. Computed in float32, returned in x's dtype. O(B T N H). Raises InputError where H is odd.
    Source: Su et al. 2021, "RoFormer", eq. 34.
    """
    half = x.shape[-1] // 2
    inv = jnp.asarray(frequencies(x.shape[-1], theta, scaling), jnp.float32)
    angle = positions.astype(jnp.float32)[:, :, None, None] * inv[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
