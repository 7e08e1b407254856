"""Compressed memories: fewer vectors in place of the oldest memories of a sequence, and the loss that trains them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.attend import attend
from hpnlp.ops.attention.masks.base import Full
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.linear import linear
from hpnlp.types import InputError

# Usages are compared in steps of 2 ** -USAGE_BITS, so that differences of rounding do not decide between equal ones.
USAGE_BITS = 16


@array_op("B G", x="B", ids="B")
def pool_memories(
    x: Float[Array, "B E D"], ids: Int[Array, "B E"], rate: int, how: str, kernel: Float[Array, "cD D"] | None = None
) -> tuple[Float[Array, "B G D"], Int[Array, "B G"]]:
    """Compresses each `rate` consecutive memories to one.

    A compressed memory belongs to the segment of the last of its memories, and depends on its memories of that segment only.

    Args:
      x: Memories [B, E, D], oldest first; E is a multiple of the rate.
      ids: int [B, E], their segments.
      rate: Memories per compressed memory, c.
      how: "mean"; "max", of each feature; or "conv", a product of the memories' features side by side with the kernel, a
        convolution of width and stride c, where memories of other segments count as zeros.
      kernel: [c D, D], for "conv".

    Returns:
      `(compressed memories [B, E / c, D] in the dtype of x, their segments [B, E / c])`.

    Raises:
      InputError: The rate is less than 1, E is not a multiple of it, or `how` is another word.

    Cost:
      O(B E D); for "conv" O(B E D^2).

    References:
      Rae et al. 2020, "Compressive Transformers for long-range sequence modelling", section 3.2.
    """
    batch, count, size = x.shape
    _check_count(count, rate)
    x, ids = x.reshape(batch, count // rate, rate, size), ids.reshape(batch, count // rate, rate)
    last = ids[:, :, -1]
    same = (ids == last[:, :, None])[..., None]
    if how == "max":
        return jnp.max(jnp.where(same, x, -jnp.inf), axis=2).astype(x.dtype), last
    x = jnp.where(same, x, jnp.zeros((), x.dtype))
    if how == "mean":
        total = jnp.sum(x, axis=2, dtype=jnp.float32)
        return (total / jnp.sum(same, axis=2, dtype=jnp.float32)).astype(x.dtype), last
    if how != "conv" or kernel is None:
        raise InputError(f"pool_memories(how={how!r}): expected 'mean', 'max', or 'conv' with a kernel")
    return linear(x.reshape(batch, count // rate, rate * size), kernel), last


@array_op("B G", usage="B", ids="B")
def most_used(usage: Float[Array, "B E"], ids: Int[Array, "B E"], rate: int) -> Int[Array, "B G"]:
    """Indices of the most used memories, 1 / rate of all, oldest first.

    Memories of the segment of the last memory come before others, so that what is kept of a segment does not depend on the
    usage of another one. Equal memories are kept from the newest on.

    Args:
      usage: Mean attention that each memory received, [B, E], from 0 to 1.
      ids: int [B, E], segments of the memories.
      rate: c; E is a multiple of it.

    Returns:
      int32 [B, E / c].

    Raises:
      InputError: The rate is less than 1, or E is not a multiple of it.

    Cost:
      A sort of E numbers.

    References:
      Rae et al. 2020, "Compressive Transformers for long-range sequence modelling", section 3.2, "most-used".
    """
    count = usage.shape[1]
    _check_count(count, rate)
    same = ids == ids[:, -1:]
    # Tokens of other segments rank last, newest first.
    steps = jnp.where(same, jnp.round(usage.astype(jnp.float32) * 2**USAGE_BITS).astype(jnp.int32), -1)
    newest_first = jnp.argsort(-jnp.flip(steps, 1), axis=1, stable=True)[:, : count // rate]
    return jnp.sort(count - 1 - newest_first, axis=1).astype(jnp.int32)


@array_op("N | ", q="B T N")
def reconstruction_errors(
    q: Float[Array, "B T N H"],
    old: tuple[Float[Array, "B E K H"], Float[Array, "B E K H"], Int[Array, "B E"]],
    new: tuple[Float[Array, "B G K H"], Float[Array, "B G K H"], Int[Array, "B G"]],
    segment_ids: Int[Array, "B T"],
) -> tuple[Float[Array, "N"], Float[Array, ""]]:
    """Squared differences between attention to memories and attention to their compressed form, by content alone.

    No gradient reaches the queries, nor the keys and values of the old memories.

    Args:
      q: Queries of the current tokens.
      old: Keys, values and segments of the memories.
      new: Keys, values and segments of the compressed memories.
      segment_ids: int [B, T], segments of the queries; 0 is padding.

    Returns:
      `(float32 [N], the sum of squared differences over tokens and their mean over H; float32, the number of tokens)`. Tokens
      count that see a compressed memory of their segment.

    Cost:
      O(B T N (E + G) H), and memory linear in T, E and G.

    References:
      Rae et al. 2020, "Compressive Transformers for long-range sequence modelling", algorithm 2, with the mean square in place
      of the norm.
    """
    q, old = jax.lax.stop_gradient((q, old))

    def read(keys: Array, values: Array, ids: Array) -> Array:
        o: Any = attend(q, keys, values, Full(), segment_ids=segment_ids, kv_segment_ids=ids)
        return o.astype(jnp.float32)

    sees = (segment_ids > 0) & (segment_ids[:, :, None] == new[2][:, None]).any(axis=2)
    errors = jnp.mean(jnp.square(read(*new) - read(*old)), axis=3)
    return jnp.sum(jnp.where(sees[..., None], errors, 0.0), axis=(0, 1)), jnp.sum(sees, dtype=jnp.float32)


def _check_count(count: int, rate: int) -> None:
    if rate < 1 or count % rate:
        raise InputError(
            f"{count} memories to compress at rate {rate}: expected a multiple of the rate, which is at least 1"
        )
