"""Checksums of the arrays in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


@jax.jit
def _word_sums(tree: PyTree) -> Any:
    """A uint32 checksum of each array: `ops.helpers.checksum.word_sum` on devices, which does not depend on the sharding."""

    def word_sum(x: jax.Array) -> jax.Array:
        x = jax.device_put(x, jax.memory.Space.Device)  # arrays may rest in the host's memory
        words = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        index = jnp.zeros(x.shape, jnp.uint32)
        for axis, size in enumerate(x.shape):
            index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        return jnp.sum(words * (2 * index + 1), dtype=jnp.uint32)

    return jax.tree.map(word_sum, tree)


def shape_text(leaf: Any) -> str:
    """Shape of an array as text, such as `[264, 16]`."""
    return str(list(leaf.shape))


def type_text(leaf: Any) -> str:
    """Dtype and shape of an array as text, such as `float32[264, 16]`.

    Args:
      leaf: An array or its shape.

    Returns:
      The text.
    """
    return f"{leaf.dtype}{list(leaf.shape)}"


def first_difference(expected: Any, actual: Any, form: Callable[[Any], str] = type_text) -> tuple[str, str, str] | None:
    """Compares the names, dtypes and shapes of two trees.

    Args:
      expected: A tree of arrays or shapes.
      actual: Another one.
      form: Text of a leaf: `type_text`, or `shape_text` to ignore dtypes.

    Returns:
      `(path, type in expected, type in actual)` of the first leaf that differs, with "nothing" for an absent one; None if the
      trees are alike.
    """
    first, second = (
        {jax.tree_util.keystr(path): form(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (expected, actual)
    )
    names = (name for name in [*first, *second] if first.get(name) != second.get(name))
    return next(((name, first.get(name, "nothing"), second.get(name, "nothing")) for name in names), None)


def checksum(tree: PyTree) -> dict[str, str]:
    """Checksums of the arrays of a tree.

    Args:
      tree: A tree of arrays.

    Returns:
      Path of each array -> `TYPE:SUM`, where TYPE is its `type_text`, and SUM is a uint32 in which a flipped bit of the
      array always shows.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get(_word_sums(tree))
    pairs = zip(leaves, jax.tree.leaves(sums), strict=True)
    # The dtype is included because orbax casts silently to the dtype that a restore asks for.
    return {jax.tree_util.keystr(path): f"{type_text(leaf)}:{int(word_sum)}" for (path, leaf), word_sum in pairs}


def verify(expected: Mapping[str, Mapping[str, Any]], actual: Mapping[str, Mapping[str, Any]]) -> None:
    """Compares checksums.

    Args:
      expected: Item of a checkpoint -> checksums that were saved.
      actual: Item -> checksums of what was read; items that were not read may be absent.

    Raises:
      ValueError: A checksum differs, or is absent on one side.
    """
    for item, sums in actual.items():
        for name in sums.keys() | expected[item].keys():
            if sums.get(name) != expected[item].get(name):
                raise ValueError(
                    f"{item}{name} is not what was saved: {sums.get(name)}, saved {expected[item].get(name)}"
                )
