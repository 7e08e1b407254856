"""Slots of caches: the tokens of a prompt, and generated tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from hpnlp.types import InputError


def check_capacity(length: int, capacity: int) -> None:
    """Checks that a cache has room for a prompt.

    Args:
      length: Number of tokens of the longest prompt.
      capacity: Largest number of tokens of an example, prompt included.

    Raises:
      InputError: The prompt is longer.
    """
    if length > capacity:
        raise InputError(f"capacity {capacity} for {length} tokens: expected a capacity of at least {length}")


def prompt_slots(x: Shaped[Array, "BK T ..."], lengths: Int[Array, " B"], slots: int) -> Shaped[Array, "BK S ..."]:
    """Arrays of the tokens of prompts, in the first slots of a cache.

    Args:
      x: [B * K, T, ...].
      lengths: int [B], number of tokens of each prompt; later ones are padding.
      slots: Number of slots S, at least T.

    Returns:
      [B * K, S, ...], 0 in slots without a token.
    """
    is_token = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    is_token = jnp.repeat(is_token, x.shape[0] // lengths.shape[0], axis=0)
    filled = jnp.where(is_token.reshape(*is_token.shape, *[1] * (x.ndim - 2)), x, jnp.zeros((), x.dtype))
    return jnp.pad(filled, ((0, 0), (0, slots - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))


def write_slots(
    slots: Shaped[Array, "BK S H"], new: Shaped[Array, "BK T H"], at: Int[Array, " B"]
) -> Shaped[Array, "BK S H"]:
    """Writes consecutive tokens.

    Args:
      slots: [B * K, S, H].
      new: [B * K, T, H].
      at: int [B], slot of the first of the T tokens.

    Returns:
      [B * K, S, H] in the dtype of `slots`.
    """
    batch, new = at.shape[0], new.astype(slots.dtype)
    heads = new.shape[0] // batch
    if batch > 8:
        grouped = slots.reshape(batch, heads, *slots.shape[1:])
        write = jax.vmap(lambda example, x, at: jax.lax.dynamic_update_slice(example, x, (0, at, 0)))
        return write(grouped, new.reshape(batch, heads, *new.shape[1:]), at).reshape(slots.shape)
    for i in range(batch):  # a scatter would take 10 % of the time of a token on a CPU
        slots = jax.lax.dynamic_update_slice(slots, new[i * heads : (i + 1) * heads], (i * heads, at[i], 0))
    return slots
