"""Dynamic tree quantization: 8 bits for each number and a float32 scale for each row, over a range of seven decades.

A row is scaled to a largest magnitude of 1. Some bits of a code hold the decade of a number below 1, and the other bits the
position between two powers of ten: the larger the number, the more bits remain for the position. A row of the last axis is a
block with its own scale, so that the scales of a sharded array are computed on the devices that hold the rows.

References:
  Dettmers 2016, "8-bit approximations for parallelism in deep learning": the levels.
  Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", sec. 2: blocks with a scale each.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from hpnlp.ops.helpers.array_op import array_op

# Decades below 1 that the 7 or 8 bits of a magnitude cover.
DECADES = 7


class Quantized(NamedTuple):
    """A quantized array.

    Attributes:
      codes: [..., n] uint8, indices into `levels`.
      scales: [..., 1] float32, largest magnitude of each row.
    """

    codes: UInt8[Array, "*rows n"]
    scales: Float[Array, "*rows 1"]


class _Grid(NamedTuple):
    """Magnitudes of the levels, in nine segments: 0, the seven decades from 1e-7 to 1, and 1.

    Attributes:
      magnitudes: Rising, from 0 to 1.
      edges: Least magnitude that is rounded into each segment but the first.
      starts: Index of the first level of each segment.
      counts: Number of levels of each segment.
      powers: Factor that scales each segment to 0.1 to 1.
    """

    magnitudes: np.ndarray
    edges: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    powers: np.ndarray


def is_quantized(node: Any) -> bool:
    """Whether a node of a tree is a Quantized."""
    return isinstance(node, Quantized)


@functools.cache
def _grid(signed: bool) -> _Grid:
    # Without a sign bit, each decade has one bit more.
    sizes = 2 ** np.arange(0 if signed else 1, DECADES + (0 if signed else 1))
    decades = [10.0 ** (i - DECADES + 1) * (0.1 + 0.9 * (np.arange(n) + 0.5) / n) for i, n in enumerate(sizes)]
    magnitudes = np.concatenate([[0.0], *decades, [1.0]])
    counts = np.array([1, *sizes, 1])
    starts = np.cumsum(counts) - counts
    edges = (magnitudes[starts[1:] - 1] + magnitudes[starts[1:]]) / 2
    powers = np.array([1.0, *10.0 ** np.arange(DECADES - 1, -1, -1), 1.0])
    return _Grid(magnitudes, edges.astype(np.float32), starts, counts, powers.astype(np.float32))


@functools.cache
def levels(signed: bool) -> np.ndarray:
    """Values of the codes, before scaling.

    Args:
      signed: False for levels from 0 to 1.

    Returns:
      [256] float32, rising; the last is 1.
    """
    magnitudes = _grid(signed).magnitudes
    return np.concatenate([-magnitudes[-2:0:-1] if signed else [], magnitudes]).astype(np.float32)


@array_op("... n | ...", x="... n")
def quantize(x: Float[Array, "*rows n"], *, signed: bool) -> Quantized:
    """Rounds each number to the nearest level of its row.

    The error is at most 0.0071 of the largest magnitude of the row. Relative to the number, it is at most 7.1 % for numbers
    over 1/10 of the largest magnitude, twice that for numbers over 1/100, and so on; unsigned, half of all these. Rows with a
    number that is not finite are dequantized to NaN.

    Args:
      x: [..., n] floating-point numbers.
      signed: False for x of at least 0; no positive number is then rounded to 0.

    Returns:
      The quantized array.

    Cost:
      Two passes over x, about 20 operations a number.
    """
    grid = _grid(signed)
    scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32)
    y = x.astype(jnp.float32) / jnp.where(scales == 0, 1.0, scales)
    magnitude = jnp.abs(y)
    # A binary search among 255 levels takes about 10 times as long as counting the edges.
    segment = sum((magnitude >= edge).astype(jnp.int32) for edge in grid.edges)
    counts = jnp.asarray(grid.counts, jnp.float32)[segment]
    within = jnp.floor((magnitude * jnp.asarray(grid.powers)[segment] - 0.1) / 0.9 * counts)
    code = jnp.asarray(grid.starts, jnp.int32)[segment] + jnp.clip(within, 0.0, counts - 1.0).astype(jnp.int32)
    if signed:
        zero = len(grid.magnitudes) - 2  # index of level 0; -1 is no level, so that there are 256
        code = jnp.maximum(zero + jnp.where(y < 0, -code, code), 0)
    else:
        code = jnp.where(x > 0, jnp.maximum(code, 1), code)
    return Quantized(code.astype(jnp.uint8), scales)


@array_op("...", x="...")
def dequantize(x: Quantized, *, signed: bool) -> Float[Array, "*rows n"]:
    """The rounded numbers.

    Args:
      x: Result of `quantize`.
      signed: As in `quantize`.

    Returns:
      [..., n] float32.
    """
    return jnp.asarray(levels(signed))[x.codes.astype(jnp.int32)] * x.scales
