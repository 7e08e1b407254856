"""Rotary position embedding (RoPE) with its scalings to longer contexts, and sinusoidal embeddings."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Scaling of a rotary embedding to a longer context.

    Dynamic NTK (Peng et al. 2023, section 3.3) is "ntk" with factor * length / original_length - (factor - 1) in place of
    `factor`. It has no kind, because cached keys would have to be rotated again as the length grows.

    Attributes:
      kind: "none"; "linear" (Chen et al. 2023, "Position Interpolation": frequencies divided by `factor`); "ntk" (Peng et al.
        2023, "YaRN", section 3.1: theta grows so that the lowest frequency is divided by `factor` and the highest kept);
        "llama3" (the Llama 3.1 rule: wavelengths above original_length / low_freq_factor are divided by `factor`, those below
        original_length / high_freq_factor are kept, those between are interpolated); or "yarn", see the function `yarn`.
      factor: Ratio of the new context length to the original one.
      low_freq_factor: See "llama3".
      high_freq_factor: See "llama3".
      original_length: Context length that the model was trained with, of "llama3" and "yarn".
      beta_fast: See the function `yarn`.
      beta_slow: See the function `yarn`.
      truncate: See the function `yarn`.
      magnitude: Factor of rotated vectors, so that scores grow by its square.
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_length", "magnitude"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(
                    f"rope scaling {self.kind!r} with {name}={getattr(self, name)}: expected a finite number over 0"
                )
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise InputError(
                f"rope scaling 'llama3' with low_freq_factor={self.low_freq_factor} and high_freq_factor="
                f"{self.high_freq_factor}: expected the former below the latter"
            )


def yarn(
    factor: int | float,
    original_length: int,
    *,
    beta_fast: int | float = 32.0,
    beta_slow: int | float = 1.0,
    truncate: bool = True,
    magnitude: int | float | None = None,
) -> Scaling:
    """The YaRN scaling of a rotary embedding.

    Feature pairs that rotate more than beta_fast times within original_length positions keep their frequency, pairs that
    rotate less than beta_slow times have it divided by `factor`, and pairs between are interpolated. The interpolation is
    linear in the index of the pair, as in the authors' code and in checkpoints; section 3.2 of the paper makes it linear in
    the number of rotations, as "llama3" does.

    Args:
      factor: Ratio of the new context length to the original one.
      original_length: Context length that the model was trained with, in tokens.
      beta_fast: Number of rotations within original_length above which a pair keeps its frequency.
      beta_slow: Number of rotations within original_length below which a frequency is divided by `factor`.
      truncate: Round the indices of both limiting pairs outwards, as in the authors' code.
      magnitude: sqrt(1 / t) for the paper's attention temperature t; None is the paper's fit, 0.1 ln(factor) + 1.

    Returns:
      A Scaling of kind "yarn".

    Raises:
      InputError: A number is not positive, or beta_slow is not below beta_fast.

    References:
      Peng et al. 2023, "YaRN", section 3.4.
    """
    if magnitude is None:
        magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if not (factor > 0 and original_length > 0 and magnitude > 0 and beta_fast > beta_slow > 0):
        raise InputError(
            f"yarn(factor={factor}, original_length={original_length}, beta_fast={beta_fast}, beta_slow={beta_slow}, "
            f"magnitude={magnitude}): expected positive numbers, and beta_slow below beta_fast"
        )
    return Scaling(
        "yarn",
        float(factor),
        original_length=original_length,
        beta_fast=float(beta_fast),
        beta_slow=float(beta_slow),
        truncate=truncate,
        magnitude=float(magnitude),
    )


def frequencies(dim: int, theta: float = 10000.0, scaling: Scaling = Scaling()) -> np.ndarray:  # noqa: B008  (frozen)
    """Frequencies of the feature pairs of a rotary embedding.

    Args:
      dim: Head size, even.
      theta: Base of the frequencies.
      scaling: Scaling to a longer context.

    Returns:
      float64 [dim / 2], the angle per position of each pair.

    Raises:
      InputError: dim is odd, or 2 with "ntk", or the kind of scaling is unknown.
    """
    if dim % 2:
        raise InputError(
            f"head size {dim} is odd: rotary embedding rotates pairs of features, choose an even head size"
        )
    inv = theta ** -(np.arange(0, dim, 2) / dim)
    if scaling.kind == "none":
        return inv
    if scaling.kind == "linear":
        return inv / scaling.factor
    if scaling.kind == "ntk":
        if dim < 4:
            raise InputError(
                "head size 2 with rope scaling 'ntk': expected an even head size of at least 4, or another scaling"
            )
        return inv * scaling.factor ** -(np.arange(0, dim, 2) / (dim - 2))
    if scaling.kind == "yarn" and theta <= 1:
        raise InputError(f"rope theta {theta} with rope scaling 'yarn': expected a number over 1")
    if scaling.kind in ("llama3", "yarn"):
        kept = _llama3_share(inv, scaling) if scaling.kind == "llama3" else _yarn_share(dim, theta, scaling)
        return inv * kept + inv / scaling.factor * (1 - kept)
    raise InputError(f"rope scaling {scaling.kind!r}: expected none, linear, ntk, llama3 or yarn")


def _llama3_share(inv: np.ndarray, scaling: Scaling) -> np.ndarray:
    """Share of each original frequency in "llama3", linear in the rotations within the original length."""
    rotations = scaling.original_length * inv / (2 * math.pi)
    return np.clip(
        (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0
    )


def _yarn_share(dim: int, theta: float, scaling: Scaling) -> np.ndarray:
    """Share of each original frequency in "yarn", linear in the index of the pair."""
    first, last = (
        dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 * (first == last)  # a step, as in the authors' code
    return 1 - np.clip((np.arange(dim // 2) - first) / (last - first), 0.0, 1.0)


@array_op("...", x="...")
def rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "#B T"],
    theta: float = 10000.0,
    scaling: Scaling = Scaling(),  # noqa: B008  (frozen)
) -> Float[Array, "B T N H"]:
    """Rotates feature pairs (i, i + H/2) by an angle proportional to the position.

    The pairs are those of Llama checkpoints in the Hugging Face layout (first half with second half).

    Args:
      x: Queries or keys [B, T, N, H].
      positions: int [B, T], or [1, T] if all examples share them.
      theta: Base of the frequencies.
      scaling: Scaling to a longer context; its magnitude multiplies the result.

    Returns:
      [B, T, N, H] in x's dtype, computed in float32.

    Raises:
      InputError: H is odd, or the scaling is invalid.

    Cost:
      O(B T N H).

    References:
      Su et al. 2021, "RoFormer", eq. 34.
    """
    half = x.shape[-1] // 2
    inv = jnp.asarray(frequencies(x.shape[-1], theta, scaling), jnp.float32)
    angle = positions.astype(jnp.float32)[:, :, None, None] * inv[None, None, None, :]
    cos, sin = jnp.cos(angle) * scaling.magnitude, jnp.sin(angle) * scaling.magnitude
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@array_op("...", positions="...")
def sinusoids(positions: Int[Array, "..."], dim: int) -> Float[Array, "... dim"]:
    """Sinusoidal embeddings of positions: the sines at dim / 2 wavelengths, then the cosines.

    This is the order of Transformer-XL's code; Vaswani et al. 2017, section 3.5, alternate sines and cosines.

    Args:
      positions: int [...], may be negative, as relative positions are.
      dim: Size of an embedding, even.

    Returns:
      float32 [..., dim].

    Raises:
      InputError: dim is odd.
    """
    angle = jnp.multiply.outer(positions.astype(jnp.float32), jnp.asarray(frequencies(dim), jnp.float32))
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
