"""Where a token stands: rotary embedding, and relative positions as terms of the attention scores.

A term that depends on head, query position and key position alone is a function of these three (`alibi`, `t5_bias`), which
attention evaluates where it needs it. One that depends on the query too is an array [B, N, T, S] (`shaw`,
`transformer_xl`). Both are the `bias` of the attention call: they are added to the scaled scores.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How a model's rotary embedding was stretched to a longer context.

    kind: "none"; "linear" (Chen et al. 2023, "Position Interpolation": positions divided by `factor`); "ntk" (Peng et al.
    2023, "YaRN", sec. 3.1: theta grows so that the slowest pair is divided by `factor` and the fastest kept); "llama3"
    (the Llama 3.1 rule: wavelengths above original_length / low_freq_factor are divided by `factor`, those below
    original_length / high_freq_factor are kept, those between are blended); "yarn", which the function `yarn` makes.
    magnitude: what turned vectors are multiplied by, so that scores grow by its square.

    Dynamic NTK (Peng et al. 2023, sec. 3.3) is "ntk" with factor * length / original_length - (factor - 1) in place of
    `factor`. It is no kind of its own, because cached keys would have to be turned anew as the length grows.
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
    """Pairs that turn more than beta_fast times in original_length positions are kept, those that turn less than beta_slow
    times are divided by `factor`, and those between are blended.

    The blend is linear in the pair's number, from the pair of beta_fast to that of beta_slow, as in the authors' code and
    the checkpoints; sec. 3.2 of the paper makes it linear in the number of turns, which is what "llama3" does.
    truncate: both pairs are rounded outwards, as in the authors' code.
    magnitude: sqrt(1 / t) for the paper's attention temperature t; None is its fit, 0.1 ln(factor) + 1.

    Raises InputError on numbers that are not positive, and where beta_slow is not below beta_fast.
    Source: Peng et al. 2023, "YaRN", sec. 3.4.
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
    """float64 [dim / 2]: the angle per position of each pair of features."""
    if dim % 2:
        raise InputError(f"head dim {dim} is odd: rotary embedding turns pairs of features, choose an even one")
    inv = theta ** -(np.arange(0, dim, 2) / dim)
    if scaling.kind == "none":
        return inv
    if scaling.kind == "linear":
        return inv / scaling.factor
    if scaling.kind == "ntk":
        if dim < 4:
            raise InputError(
                "head dim 2 with rope scaling 'ntk': its only pair is the fastest, choose an even one from 4"
            )
        return inv * scaling.factor ** -(np.arange(0, dim, 2) / (dim - 2))
    if scaling.kind == "yarn" and theta <= 1:
        raise InputError(f"rope theta {theta} with rope scaling 'yarn': expected a number over 1")
    if scaling.kind in ("llama3", "yarn"):
        kept = _kept_by_turns(inv, scaling) if scaling.kind == "llama3" else _kept_by_pair(dim, theta, scaling)
        return inv * kept + inv / scaling.factor * (1 - kept)
    raise InputError(f"rope scaling {scaling.kind!r}: expected none, linear, ntk, llama3 or yarn")


def _kept_by_turns(inv: np.ndarray, scaling: Scaling) -> np.ndarray:
    """How much of each frequency "llama3" keeps: linear in the turns that it makes in the original length."""
    turns = scaling.original_length * inv / (2 * math.pi)
    return np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)


def _kept_by_pair(dim: int, theta: float, scaling: Scaling) -> np.ndarray:
    """How much of each frequency "yarn" keeps: linear in the number of the pair."""
    first, last = (
        dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
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
    """Turns feature pairs (i, i + H/2) by an angle that grows with the position, and multiplies by scaling.magnitude.

    The half-split pairing of Llama checkpoints in the Hugging Face layout. positions: int32 [B, T], or [1, T] where all
    rows share them. Computed in float32, returned in x's dtype. O(B T N H). Raises InputError where H is odd.
    Source: Su et al. 2021, "RoFormer", eq. 34.
    """
    half = x.shape[-1] // 2
    inv = jnp.asarray(frequencies(x.shape[-1], theta, scaling), jnp.float32)
    angle = positions.astype(jnp.float32)[:, :, None, None] * inv[None, None, None, :]
    cos, sin = jnp.cos(angle) * scaling.magnitude, jnp.sin(angle) * scaling.magnitude
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@array_op("...", positions="...")
def sinusoids(positions: Int[Array, "..."], dim: int) -> Float[Array, "... dim"]:
    """float32: the sines of a position at each of dim / 2 wavelengths, then the cosines.

    The order of Transformer-XL's code; Vaswani et al. 2017, sec. 3.5, take the same numbers in turns. positions may be
    negative, as relative ones are. Raises InputError where dim is odd.
    """
    angle = jnp.multiply.outer(positions.astype(jnp.float32), jnp.asarray(frequencies(dim), jnp.float32))
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
