"""Counter-based hashing: random bits that are a function of numbers, the same in numpy and in jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def mix(x: Any) -> Any:
    """The finalizer of MurmurHash3 (Appleby, public domain): a bijection of uint32 in which every bit moves every bit."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def drawn_blocks(seed: int, row: Any, count: int, among: int | None) -> Sequence[Any]:
    """`count` arrays shaped as `row`: distinct blocks drawn for each row, from 0 to among - 1, or to `row` where among is
    None; -1 in place of each that there is no block for.

    O(count ** 2) operations a row, whatever there is to draw from. Source: Bentley & Floyd 1987, "A sample of brilliance",
    algorithm F2.
    """
    where = jnp.where if isinstance(row, jax.Array) else np.where
    with np.errstate(over="ignore"):
        state = mix(mix(row.astype(np.uint32) * np.uint32(0x9E3779B1)) ^ np.uint32(seed & 0xFFFFFFFF))
        drawn: list[Any] = []
        for i in range(count):
            # Of the blocks 0 to `last` one at random, or `last` where that one is taken.
            last = (row + 1 if among is None else where(row == row, among, 0).astype(row.dtype)) - count + i
            bits = mix(state ^ np.uint32((i + 1) * 0x27D4EB2F & 0xFFFFFFFF))
            pick = (bits % where(last < 0, 1, last + 1).astype(np.uint32)).astype(row.dtype)
            for other in tuple(drawn):
                pick = where(other == pick, last, pick)
            drawn.append(where(last < 0, -1, pick))
    return drawn
