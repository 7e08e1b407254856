"""Matrices of two or three values, and of powers of two, for each column, row or matrix.

All are integers of at most 7 bits with scales, so that products are those of 8-bit integers (`IntegerWeight`): processors
multiply them at the speed of additions and shifts. Packed, they take less memory (`PackedWeight`).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.weights.integer import IntegerWeight
from hpnlp.ops.weights.packed import PackedWeight, pack
from hpnlp.types import InputError

# Axes of the numbers that share a scale.
SHARED = {"matrix": (0, 1), "column": (0,), "row": (1,)}
# Ratio of the largest and the smallest power of two, other than 0, of a scale.
POWERS = 7


@array_op()
def ternarize(w: Float[Array, "D F"], scale: str = "matrix", *, packed: bool = True) -> IntegerWeight | PackedWeight:
    """The values -a, 0 and a: a is the mean magnitude of the numbers over 0.7 of the mean magnitude of all.

    Args:
      w: [D, F]; a NaN makes all numbers that share its scale NaN.
      scale: Numbers that share a scale: "matrix", "column", or "row" for tables.
      packed: Four numbers to a byte; otherwise int8.

    Returns:
      The rounded matrix.

    Raises:
      InputError: `scale` is unknown.

    References:
      Li and Liu 2016, "Ternary weight networks", eq. 6; Zhang et al. 2020, "TernaryBERT", section 3.1.
    """
    axes = _axes(scale)
    w = w.astype(jnp.float32)
    magnitudes = jnp.abs(w)
    kept = magnitudes > 0.7 * magnitudes.mean(axis=axes, keepdims=True)
    sums = jnp.where(kept, magnitudes, 0.0 * magnitudes).sum(axis=axes, keepdims=True)  # 0 * NaN is NaN
    scales = sums / jnp.maximum(kept.sum(axis=axes, keepdims=True), 1).astype(jnp.float32)
    codes = jnp.where(kept, jnp.sign(w), 0.0)
    return _stored(codes, scales, "ternary", packed)


@array_op()
def binarize(w: Float[Array, "D F"], scale: str = "column", *, packed: bool = True) -> IntegerWeight | PackedWeight:
    """The values -a and a, where a is the mean magnitude; 0 becomes a.

    Args:
      w: As in `ternarize`.
      scale: As in `ternarize`.
      packed: Eight numbers to a byte; otherwise int8.

    Returns:
      The rounded matrix.

    Raises:
      InputError: `scale` is unknown.

    References:
      Rastegari et al. 2016, "XNOR-Net", section 3.1.
    """
    axes = _axes(scale)
    w = w.astype(jnp.float32)
    return _stored(jnp.where(w < 0, -1.0, 1.0), jnp.abs(w).mean(axis=axes, keepdims=True), "binary", packed)


@array_op()
def round_to_powers(
    w: Float[Array, "D F"], scale: str = "matrix", *, packed: bool = True
) -> IntegerWeight | PackedWeight:
    """Powers of two: the sign times 2^round(log2 |w|), of the seven largest powers; numbers below are 0.

    Args:
      w: As in `ternarize`.
      scale: Numbers that share the largest power, as in `ternarize`.
      packed: Two numbers to a byte; otherwise int8.

    Returns:
      The rounded matrix.

    Raises:
      InputError: `scale` is unknown.

    References:
      Miyashita et al. 2016, "Convolutional neural networks using logarithmic data representation", section 3.
      Zhou et al. 2017, "Incremental network quantization", section 2.1: codes of 4 bits.
    """
    axes = _axes(scale)
    w = w.astype(jnp.float32)
    magnitudes = jnp.abs(w)
    largest = magnitudes.max(axis=axes, keepdims=True)
    smallest = _exponents(largest) - (POWERS - 1)
    powers = _exponents(magnitudes) - smallest  # exponent of each number's integer
    codes = jnp.where(powers < 0, 0.0, jnp.sign(w) * jnp.ldexp(1.0, jnp.clip(powers, 0, POWERS - 1)))
    # A scale of 0 in place of the smallest normal numbers, and NaN where there is one.
    scales = jnp.where(largest > 2.0**-110, jnp.ldexp(jnp.ones_like(largest), smallest), 0.0 * largest)
    return _stored(codes, scales, "powers", packed)


def _exponents(magnitudes: Array) -> Array:
    """round(log2 of magnitudes), int32; at least -120."""
    return jnp.round(jnp.log2(jnp.maximum(jnp.nan_to_num(magnitudes), 2.0**-120))).astype(jnp.int32)


def _stored(codes: Array, scales: Array, levels: str, packed: bool) -> IntegerWeight | PackedWeight:
    weight = IntegerWeight(jnp.nan_to_num(codes).astype(jnp.int8), scales.astype(jnp.float32))
    return pack(weight, levels) if packed else weight


def _axes(scale: str) -> tuple[int, ...]:
    if scale not in SHARED:
        raise InputError(f"scale={scale!r}: expected {', '.join(SHARED)}")
    return SHARED[scale]
