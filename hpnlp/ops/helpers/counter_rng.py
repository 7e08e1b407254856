"""Counter-based random bits: a hash of numbers, the same in numpy and in jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.types import AnyArray


def mix(x: AnyArray) -> Any:
    """The finaliser of MurmurHash3 (Appleby, public domain), a bijection of uint32.

    Args:
      x: uint32 array, of numpy or JAX.

    Returns:
      uint32 array of the same shape, in which every bit depends on every bit of x.
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def drawn_blocks(seed: int, row: Any, count: int, among: int | None) -> Sequence[Any]:
    """Draws distinct key blocks for each query block: a function of the seed and the query block only.

    Args:
      seed: Seed of the random bits.
      row: Numbers of query blocks, an integer array of numpy or JAX, of any shape.
      count: Number of blocks to draw.
      among: Draws from the blocks 0 to among - 1; None draws from 0 to row.

    Returns:
      `count` arrays of the shape and dtype of row; -1 where there are fewer blocks to draw from.

    Cost:
      O(count^2) operations a query block, for any number of key blocks.

    References:
      Bentley and Floyd 1987, "A sample of brilliance", algorithm F2.
    """
    where = jnp.where if isinstance(row, jax.Array) else np.where
    with np.errstate(over="ignore"):
        state = mix(mix(row.astype(np.uint32) * np.uint32(0x9E3779B1)) ^ np.uint32(seed & 0xFFFFFFFF))
        drawn: list[Any] = []
        for i in range(count):
            # A random block of 0 to `last`, or `last` itself if that block was drawn before.
            last = (row + 1 if among is None else where(row == row, among, 0).astype(row.dtype)) - count + i
            bits = mix(state ^ np.uint32((i + 1) * 0x27D4EB2F & 0xFFFFFFFF))
            block = (bits % where(last < 0, 1, last + 1).astype(np.uint32)).astype(row.dtype)
            for earlier in tuple(drawn):
                block = where(earlier == block, last, block)
            drawn.append(where(last < 0, -1, block))
    return drawn
