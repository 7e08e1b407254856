"""Axes of the executor's arrays: heads before tokens, tokens cut into blocks, and runs of blocks read and written.

Each change of axes is one transpose, because XLA:CPU makes a pass over the array for each step of a change in several steps.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from hpnlp.ops.helpers.custom_vjp import vary_alike

# Indices are non-negative and -1 is padding, whose values are not used, so JAX's index normalisation can be skipped: it would
# be half of all operations that are traced for the executor.
SLICE: Any = {"allow_negative_indices": False}
IN_BOUNDS: Any = {"mode": "clip", "wrap_negative_indices": False}


def zeros(*shape: int) -> Float[Array, "..."]:
    """Zeros in float32, whatever the default dtype of the process.

    Args:
      *shape: Size of each axis.

    Returns:
      float32 [*shape].
    """
    return jnp.zeros(shape, jnp.float32)


def queries_by_head(x: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B K G T H"]:
    """Moves the heads of queries, or of their cotangents, before the tokens.

    Args:
      x: [B, T, N, H].
      kv_heads: K.

    Returns:
      [B, K, G, T, H].
    """
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[3]).transpose(0, 2, 3, 1, 4)


def queries_from_heads(x: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
    """Undoes `queries_by_head`.

    Args:
      x: [B, K, G, T, H].

    Returns:
      [B, T, N, H].
    """
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[4])


def scalars_by_head(x: Float[Array, "B T N"], kv_heads: int) -> Float[Array, "B K G T"]:
    """`queries_by_head` for one number per query and head.

    Args:
      x: [B, T, N].
      kv_heads: K.

    Returns:
      [B, K, G, T].
    """
    return x.reshape(*x.shape[:2], kv_heads, -1).transpose(0, 2, 3, 1)


def keys_by_head(x: Float[Array, "B S K H"]) -> Float[Array, "B K S H"]:
    """Moves the heads of keys or values before the tokens.

    Args:
      x: [B, S, K, H].

    Returns:
      [B, K, S, H].
    """
    return x.transpose(0, 2, 1, 3)


def keys_from_gradient(x: Float[Array, "B K H S"]) -> Float[Array, "B S K H"]:
    """Gradients of keys or values in the axes of a call; tiles compute them with features before tokens.

    Args:
      x: [B, K, H, S].

    Returns:
      [B, S, K, H].
    """
    return x.transpose(0, 3, 1, 2)


def split_heads(x: Array | None, kv_heads: int) -> Any:
    """Splits query heads into key heads and the query heads that read each.

    Args:
      x: [B, N or 1, ...], or None.
      kv_heads: K.

    Returns:
      [B, K or 1, G or 1, ...], or None.
    """
    if x is None or x.shape[1] == 1:
        return None if x is None else x[:, :, None]
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def to_blocks(x: Array, block: int, heads: tuple[int, ...] = (), fill: ArrayLike = 0) -> Array:
    """Cuts tokens into blocks, the last one padded, with heads before tokens.

    Args:
      x: [B, T, N, ...], or [B, T] with heads=().
      block: Tokens in a block.
      heads: The sizes that N is split into, (K, G) or (K,).
      fill: Value of padding.

    Returns:
      [blocks, B, *heads, block, ...].
    """
    count, n = -(-x.shape[1] // block), len(heads)
    if count * block != x.shape[1]:
        padding = [(0, 0), (0, count * block - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, padding, constant_values=fill)
    x = x.reshape(x.shape[0], count, block, *heads, *x.shape[2 + (n > 0) :])
    return x.transpose(1, 0, *range(3, 3 + n), 2, *range(3 + n, x.ndim))


def from_blocks(x: Array, length: int) -> Array:
    """Undoes `to_blocks` for an array with heads and features.

    Args:
      x: [blocks, B, *heads, block, H].
      length: T.

    Returns:
      [B, T, N, H].
    """
    x = x.transpose(1, 0, x.ndim - 2, *range(2, x.ndim - 2), x.ndim - 1)
    return x.reshape(x.shape[0], -1, math.prod(x.shape[3:-1]), x.shape[-1])[:, :length]


def take_run(tree: PyTree[Array], first: Array, run: int) -> Any:
    """Consecutive blocks of each array of a tree.

    Args:
      tree: Arrays [blocks, ...].
      first: int32 [], index of the first block.
      run: Number of blocks, R.

    Returns:
      The tree of arrays [R, ...].
    """
    start = _start(first, tree)
    return jax.tree.map(lambda x: lax.dynamic_slice(x, start[: x.ndim], (run, *x.shape[1:]), **SLICE), tree)


def put_run(tree: PyTree[Array], first: Array, new: PyTree[Array]) -> Any:
    """Replaces consecutive blocks of each array of a tree.

    Args:
      tree: Arrays [blocks, ...].
      first: int32 [], index of the first block.
      new: Tree of arrays [R, ...].

    Returns:
      The updated tree.
    """
    start = _start(first, tree)
    return jax.tree.map(lambda x, part: lax.dynamic_update_slice(x, part, start[: x.ndim], **SLICE), tree, new)


def _start(first: Array, tree: PyTree[Array]) -> tuple[Array, ...]:
    """Start indices of slices that begin at block `first`, for the array with the most axes."""
    zero, *_ = vary_alike(jnp.int32(0), first)
    return (first, *[zero] * (max(x.ndim for x in jax.tree.leaves(tree)) - 1))


def take_key_blocks(x: Array, keys: Array, axis: int) -> Array:
    """Blocks of keys, side by side.

    Args:
      x: [blocks, ...].
      keys: int32 [R, w], indices of blocks; of a block -1 the values are arbitrary.
      axis: The axis of the keys of a block, -1 or -2.

    Returns:
      [R, ...], with w blocks after one another on `axis`.
    """
    blocks = jnp.moveaxis(x.at[keys].get(**IN_BOUNDS), 1, axis - 1)
    return blocks.reshape(*blocks.shape[: axis - 1], -1, *([] if axis == -1 else blocks.shape[axis + 1 :]))


def add_key_blocks(x: Array, keys: Array, new: Array) -> Array:
    """Adds to blocks of keys.

    This is a scatter-add even where updating a slice would do: for the latter XLA:CPU copies all of x at every other step.

    Args:
      x: [blocks, ..., kb].
      keys: int32 [R, w], indices of blocks, -1 for padding.
      new: [R, ..., w * kb], 0 where keys is -1.

    Returns:
      x with the blocks of new added.
    """
    run, width = keys.shape
    new = jnp.moveaxis(new.reshape(*new.shape[:-1], width, x.shape[-1]), -2, 1)
    return x.at[keys].add(new, **IN_BOUNDS)


class PairBlocks:
    """An operand `[B, K, G, T, S]`, any axis of which may be 1, cut into blocks of queries and of keys.

    Attributes:
      shape: Shape of the operand.
      blocks: [query blocks, key blocks, B, K, G, r, c]; 1 block of 1 token for an axis of 1.
    """

    def __init__(self, x: Array, block: int, key_block: int) -> None:
        self.shape = x.shape
        x = _cut(x, 3, block if x.shape[3] > 1 else 1)
        x = _cut(x, 5, key_block if self.shape[4] > 1 else 1)
        self.blocks = x.swapaxes(0, 1)

    def take(self, first: Array, keys: Array) -> Array:
        """The tiles of a run of query blocks.

        Args:
          first: int32 [], index of the first query block.
          keys: int32 [R, w], indices of key blocks.

        Returns:
          [R, B, K, G, r, w * c], an axis of 1 where the operand has one.
        """
        tiles = jnp.moveaxis(self.blocks.at[self._indices(first, keys)].get(**IN_BOUNDS), 1, -2)
        return tiles.reshape(*tiles.shape[:-2], -1)

    def _indices(self, first: Array, keys: Array) -> tuple[Array, Array]:
        """Indices of the query blocks [R, 1] and of the key blocks [R, w], 0 on an axis of 1."""
        rows = first + jnp.arange(keys.shape[0], dtype=jnp.int32)[:, None]
        return rows if self.shape[3] > 1 else rows * 0, jnp.maximum(keys, 0) if self.shape[4] > 1 else keys[:, :1] * 0


def _cut(x: Array, axis: int, block: int) -> Array:
    """Cuts `axis` into blocks, the last one padded with 0, and puts the block index in front."""
    axis %= x.ndim
    count = -(-x.shape[axis] // block)
    if count * block != x.shape[axis]:
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, count * block - x.shape[axis])
        x = jnp.pad(x, padding)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :]), axis, 0)
