"""Dynamic tree quantization: numbers of very different sizes in 8 bits each, with a float32 scale to a row.

A row is scaled to a largest magnitude of 1. Then of the bits of a code some say how many decades below 1 a number is, and the
rest where it is between two powers of ten: the larger the number, the more digits it has.
Sources: Dettmers 2016, "8-bit approximations for parallelism in deep learning", for the levels; Dettmers et al. 2022, "8-bit
optimizers via block-wise quantization", sec. 2, for blocks with a scale each. Here a block is a row of the last axis, so that
the scales of an array that is divided over devices are made where the rows are.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from hpnlp.ops.array_op import array_op

DECADES = 7


class Quantized(NamedTuple):
    """An array at rest. codes: places in `levels`. scales: the largest magnitude of each row."""

    codes: UInt8[Array, "*rows n"]
    scales: Float[Array, "*rows 1"]


class _Grid(NamedTuple):
    """Magnitudes in nine segments: 0, the seven decades from 1e-7 to 1, and 1.

    edges: where each segment but the first begins, half-way from the level before. starts, counts: the place of its first
    level, and how many it has. powers: what lifts it to 0.1..1.
    """

    magnitudes: np.ndarray
    edges: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    powers: np.ndarray


@functools.cache
def _grid(signed: bool) -> _Grid:
    # Without a sign, each decade has one bit more.
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
    """The 256 numbers from -1 or 0 to 1 that codes stand for, rising, float32."""
    magnitudes = _grid(signed).magnitudes
    return np.concatenate([-magnitudes[-2:0:-1] if signed else [], magnitudes]).astype(np.float32)


@array_op("... n | ...", x="... n")
def quantize(x: Float[Array, "*rows n"], *, signed: bool) -> Quantized:
    """x to its nearest levels. signed: False for x of at least 0, of which no positive number becomes 0.

    A number is off by at most 0.0071 of the largest magnitude of its row, and by 7.1% of itself where it is over a tenth of
    that, by twice as much over a hundredth, and so on; unsigned by half of it all. Rows with what is not finite come back as
    NaN.
    Cost: two passes over x, some 20 operations a number.
    """
    grid = _grid(signed)
    scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32)
    y = x.astype(jnp.float32) / jnp.where(scales == 0, 1.0, scales)
    size = jnp.abs(y)
    # A search among 255 levels takes some ten times as long as counting edges.
    segment = sum((size >= edge).astype(jnp.int32) for edge in grid.edges)
    counts = jnp.asarray(grid.counts, jnp.float32)[segment]
    within = jnp.floor((size * jnp.asarray(grid.powers)[segment] - 0.1) / 0.9 * counts)
    code = jnp.asarray(grid.starts, jnp.int32)[segment] + jnp.clip(within, 0.0, counts - 1.0).astype(jnp.int32)
    if signed:
        zero = len(grid.magnitudes) - 2  # -1 is no level
        code = jnp.maximum(zero + jnp.where(y < 0, -code, code), 0)
    else:
        code = jnp.where(x > 0, jnp.maximum(code, 1), code)
    return Quantized(code.astype(jnp.uint8), scales)


@array_op("...", x="...")
def dequantize(x: Quantized, *, signed: bool) -> Float[Array, "*rows n"]:
    """The float32 numbers that `quantize` has rounded to."""
    return jnp.asarray(levels(signed))[x.codes.astype(jnp.int32)] * x.scales
