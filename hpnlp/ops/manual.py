"""What an operation with a derivative of its own needs inside `jax.shard_map`."""

from __future__ import annotations

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
