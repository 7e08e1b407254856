"""Dropout patterns as a counter-based hash of a key and of positions.

Any block of a pattern can be computed anywhere and in any order, so that every implementation and every layout drops the same
entries, and a backward pass computes the pattern again instead of keeping it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.counter_rng import mix
from hpnlp.types import AnyArray, InputError


def check_rate(rate: float, rng: Array | None) -> None:
    """Checks the arguments of dropout.

    Args:
      rate: Probability that a weight is dropped.
      rng: PRNG key, or None.

    Raises:
      InputError: The rate is not in [0, 1), or it is over 0 and there is no key.
    """
    if not 0.0 <= rate < 1.0 or (rate and rng is None):
        raise InputError(f"dropout_rate {rate}: expected 0 <= rate < 1, and a key `rng` unless it is 0")


@accepts_numpy
def seed_words(rng: Array) -> UInt32[Array, "words"]:
    """The raw words of a PRNG key.

    Args:
      rng: A typed key, or uint32 words.

    Returns:
      uint32 [words].
    """
    data = jax.random.key_data(rng) if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else rng
    return data.reshape(-1)


@array_op()
def random_bits(seed: UInt32[Array, "words"], heads: AnyArray, q: AnyArray, k: AnyArray) -> UInt32[Array, "..."]:
    """Random bits as a function of a key and three numbers.

    Args:
      seed: `seed_words(rng)`.
      heads: int array.
      q: int array.
      k: int array; heads, q and k broadcast to the shape of the result.

    Returns:
      uint32.
    """
    state = heads.astype(jnp.uint32)
    for i in range(seed.shape[0]):
        state = mix(state ^ seed[i])
    state = mix(state + q.astype(jnp.uint32) * jnp.uint32(0x9E3779B1))
    return mix(state + k.astype(jnp.uint32) * jnp.uint32(0x27D4EB2F))


@array_op()
def keep_mask(
    seed: UInt32[Array, "words"], heads: AnyArray, q: AnyArray, k: AnyArray, rate: float
) -> Bool[Array, "..."]:
    """Dropout pattern of attention weights.

    Args:
      seed: `seed_words(rng)`.
      heads: int, a distinct number for each (batch, head).
      q: int, query positions.
      k: int, key positions. heads, q and k broadcast to the shape of the result.
      rate: Probability that a weight is dropped.

    Returns:
      bool, True for weights that are kept.

    Cost:
      O(size of the result) integer operations.
    """
    bits = random_bits(seed, heads, q, k)
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
