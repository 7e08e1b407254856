"""What an operation with a derivative of its own needs inside `jax.shard_map`, and in a loop over layers."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jaxtyping import Array


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, each marked as varying over every manual mesh axis that one of them varies over.

    Plain operations do this by themselves, and sum the cotangents of what was the same everywhere; `jax.custom_vjp`
    demands it of its caller. Outside `shard_map` this does nothing.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset().union(*varying)
    return tuple(
        lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(arrays, varying, strict=True)
    )


def tied(tree: Any, x: Array) -> Any:
    """The arrays of a tree, as if they were computed from x, of which a number is read.

    What is the same for all layers, as masks of tiles are, JAX would else compute ahead of a loop over layers that is
    differentiated, for all turns of the loops within it at once, and keep: all pairs of tokens, in float32.
    """
    leaves, form = jax.tree.flatten(tree)
    *leaves, _ = lax.optimization_barrier((*leaves, lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)))
    return jax.tree.unflatten(form, leaves)
