"""Dropout that depends on a key and on which number it is of a tensor, and nothing else.

A counter-based hash: any block of the pattern can be made anywhere, in any order, so that every backend and every
layout drops the same entries, and a backward pass makes them again instead of keeping them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from hpnlp.ops.array_op import array_op
from hpnlp.ops.arrays import accepts_numpy
from hpnlp.ops.counter_rng import mix


@accepts_numpy
def seed_words(rng: Array) -> UInt32[Array, "words"]:
    """The raw uint32 words of a PRNG key, typed or not."""
    data = jax.random.key_data(rng) if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else rng
    return data.reshape(-1)


@array_op()
def keep_mask(seed: UInt32[Array, "words"], heads: Any, q: Any, k: Any, rate: float) -> Bool[Array, "..."]:
    """True where the attention weight survives; each is dropped with probability `rate`.

    seed: `seed_words(rng)`. heads: numbers that are unique to each (batch, head); q, k: positions; integer arrays that
    broadcast to the shape of the result. O(size) integer operations and no state.
    """
    row = heads.astype(jnp.uint32)
    for i in range(seed.shape[0]):
        row = mix(row ^ seed[i])
    row = mix(row + q.astype(jnp.uint32) * jnp.uint32(0x9E3779B1))
    bits = mix(row + k.astype(jnp.uint32) * jnp.uint32(0x27D4EB2F))
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
