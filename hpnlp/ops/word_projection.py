"""Ternary features of words, computed from their hashes (PRADO), and the product of the features with a matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.linear import product
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.ops.weight import Weight

HASH_WORDS = 4  # 32-bit words of a hash
BLOCK = 64  # features of 128 bits
_ROWS = 2048  # words whose features are in memory at once
_STEP = 0x9E3779B9


@array_op("B T", hashes="B T")
def ternary_features(hashes: Int[Array, "..."], features: int) -> Int[Array, "B T F"]:
    """Features of words: -1, 0 and 1 with the probabilities 1/4, 1/2 and 1/4, of which two bits of a hash decide each.

    The bits 00, 01, 10 and 11 stand for 0, 1, -1 and 0. 64 features have 128 bits, which are a bijection of the hash, another
    one for each 64 features.

    Args:
      hashes: 128 bits of each word (`data.tokenizers.word_hashes`), as int32.
      features: Number of features F, a multiple of 64.

    Returns:
      int8.

    Raises:
      InputError: F is not a multiple of 64, or hashes have another shape.

    Cost: about 5 integer operations for each feature, and no parameters.

    References:
      Kaliamoorthi et al. 2019, "PRADO: projection attention networks for document classification on-device", sec. 3.1;
      MurmurHash3 (Appleby 2011), whose finalizer mixes.
    """
    check_features(features)
    if hashes.ndim != 3 or hashes.shape[-1] != HASH_WORDS:
        raise InputError(f"ternary_features of hashes {hashes.shape}: expected [B, T, {HASH_WORDS}]")
    return _features(_bits(hashes, features)).astype(jnp.int8)


def check_features(features: int) -> None:
    """Checks a number of features.

    Args:
      features: The number.

    Raises:
      InputError: It is not a multiple of 64.
    """
    if features < BLOCK or features % BLOCK:
        near = max(BLOCK, round(features / BLOCK) * BLOCK)
        raise InputError(
            f"{features} ternary features: 128 bits give {BLOCK} of them: pass a multiple of {BLOCK}, such as {near}"
        )


@array_op("B T", hashes="B T")
def projected_product(hashes: Int[Array, "..."], w: Array | Weight) -> Float[Array, "B T D"]:
    """Product of the ternary features of words with a matrix, which holds the features of a part of the words at a time.

    Args:
      hashes: As for `ternary_features`.
      w: [F, D], an array or a Weight.

    Returns:
      float32.

    Raises:
      InputError: As `ternary_features`.

    Cost: a product of O(B T F D). Features of at most 2048 words (or of one position of all sequences) are in memory, and the
    backward pass computes them again; a length or batch of symbolic size has all of them in memory.
    """
    check_features(w.shape[0])
    batch, length = hashes.shape[:2]

    def multiply(part: Array) -> Array:
        x = _features(part).astype(jnp.int8).astype(jnp.float32)
        return product(x.reshape(-1, w.shape[0]), w).reshape(*part.shape[:-1], w.shape[-1])

    multiply, bits = jax.checkpoint(multiply), _bits(hashes, w.shape[0])
    if not isinstance(batch, int) or not isinstance(length, int) or length == 1:
        return multiply(bits)
    # Along the length, so that a batch may be divided over devices. There are at least two parts: without a loop after it, the
    # mixture of the hashes would be fused with the features and computed 16 times (12 ms in place of 1 for 4096 words).
    count = min(length, max(2, -(-batch * length // _ROWS)))
    step = -(-length // count)
    padded = jnp.pad(bits, ((0, 0), (0, count * step - length), (0, 0)))
    result = jax.lax.map(multiply, padded.reshape(batch, count, step, -1).swapaxes(0, 1))
    return result.swapaxes(0, 1).reshape(batch, count * step, -1)[:, :length]


def _bits(hashes: Array, features: int) -> Array:
    """Two bits for each feature, int32 `[B, T, F / 16]`."""
    blocks = features // BLOCK
    # Word i of block b is combined with a number of its own; wrapping products of int32 are those of uint32.
    numbers = (np.arange(1, HASH_WORDS * blocks + 1, dtype=np.uint64) * _STEP).astype(np.uint32).view(np.int32)
    numbers = numbers.reshape(blocks, HASH_WORDS)
    state = [hashes[..., i, None].astype(jnp.int32) ^ jnp.asarray(numbers[None, None, :, i]) for i in range(HASH_WORDS)]
    mixed = _summed([_mixed(word) for word in _summed(state)])
    words = jnp.concatenate([word[..., None] for word in mixed], axis=-1)
    return words.reshape(*hashes.shape[:2], blocks * HASH_WORDS)


def _features(bits: Array) -> Array:
    """int32 `[B, T, F]`."""
    shifts = np.arange(0, 32, 2, dtype=np.int32)[None, None, None]
    pairs = jax.lax.shift_right_logical(*jnp.broadcast_arrays(bits[..., None], jnp.asarray(shifts)))
    low, high = pairs & 1, jax.lax.shift_right_logical(pairs, jnp.ones_like(pairs)) & 1
    return (low - high).reshape(*bits.shape[:2], 16 * bits.shape[2])


def _summed(words: list[Array]) -> list[Array]:
    first = words[0] + words[1] + words[2] + words[3]
    return [first, *(word + first for word in words[1:])]


def _mixed(word: Array) -> Array:
    """A bijection in which each bit of the result depends on every bit of the word (fmix32 of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = _shifted(word, shift) * jnp.asarray(np.uint32(factor).view(np.int32))
    return _shifted(word, 16)


def _shifted(word: Array, bits: int) -> Array:
    return word ^ jax.lax.shift_right_logical(word, jnp.full_like(word, bits))
