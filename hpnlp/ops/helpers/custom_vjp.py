"""Helpers for operations with custom VJPs inside `jax.shard_map`, and inside loops over layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """Marks arrays as varying over every manual mesh axis that at least one of them varies over.

    Other operations do this themselves, and sum the cotangents of arrays that were equal on all devices; `jax.custom_vjp`
    requires it of its caller. Outside `shard_map` the arrays are returned as they are.

    Args:
      *arrays: Arrays of any shapes.

    Returns:
      The arrays in the same order.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset().union(*varying)
    return tuple(
        lax.pcast(x, tuple(sorted(union - axes)), to="varying") if union - axes else x
        for x, axes in zip(arrays, varying, strict=True)
    )


def zeros_alike(x: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zeros that vary over the same manual mesh axes as an array.

    Args:
      x: The array.
      shape: Shape of the zeros.
      dtype: Their dtype.

    Returns:
      The zeros.
    """
    zeros = jnp.zeros(shape, dtype)
    axes = tuple(sorted(jax.typeof(x).manual_axis_type.varying))
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def tied(tree: PyTree[Array], x: Array) -> Any:
    """Makes the arrays of a tree depend on x, so that JAX does not move their computation out of a loop.

    JAX computes values that are equal for all layers, such as the masks of tiles, before a differentiated loop over layers,
    for all iterations of the loops within it at once, and keeps them: all pairs of tokens, in float32.

    Args:
      tree: Tree of arrays.
      x: An array with at least one element that changes in each iteration.

    Returns:
      The tree with equal values.
    """
    leaves, structure = jax.tree.flatten(tree)
    *leaves, _ = lax.optimization_barrier((*leaves, lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)))
    return jax.tree.unflatten(structure, leaves)
