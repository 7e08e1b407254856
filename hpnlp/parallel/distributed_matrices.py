"""Operations on whole matrices, as optimizers have them, where devices hold parts: each device takes some of a stack."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec


def of_whole(function: Callable[[jax.Array], jax.Array], x: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """`function(x)`, which makes of each matrix of a stack [..., A, B], or of one [A, B], another of that shape.

    spec: how x, and what is made of it, lies on the mesh. The n devices that have parts of a stack exchange them, so that each
    has ceil(L / n) matrices whole, and exchange back what it made of them. A single matrix is gathered, and all devices make
    the same.
    Cost: each device sends its own parts (n - 1) / n times, once and back, for each axis of the mesh that divides matrices;
    where n does not divide L, as if L were a multiple of it.
    """
    axes = [(axis,) if isinstance(axis, str) else axis or () for axis in (*spec, *[None] * (x.ndim - len(spec)))]
    if not any(axes):
        return function(x)
    moves = [(axis, dim) for dim in (-2, -1) for axis in reversed(axes[dim])]

    def local(x: jax.Array) -> jax.Array:
        stack = x.reshape(-1, *x.shape[-2:])  # all leading axes are axes of the stack
        made = _alone(function, stack, moves) if len(stack) == 1 else _dealt(function, stack, moves)
        return made.reshape(x.shape)

    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def _dealt(function: Callable[[jax.Array], jax.Array], stack: jax.Array, moves: list[tuple[str, int]]) -> jax.Array:
    count, devices = len(stack), math.prod(lax.axis_size(axis) for axis, _ in moves)
    whole = jnp.pad(stack, ((0, -count % devices), (0, 0), (0, 0)))
    for axis, dim in moves:
        whole = lax.all_to_all(whole, axis, split_axis=0, concat_axis=3 + dim, tiled=True)
    made = function(whole)
    for axis, dim in reversed(moves):
        made = lax.all_to_all(made, axis, split_axis=3 + dim, concat_axis=0, tiled=True)
    return made[:count]


def _alone(function: Callable[[jax.Array], jax.Array], stack: jax.Array, moves: list[tuple[str, int]]) -> jax.Array:
    whole = stack
    for axis, dim in moves:
        whole = lax.all_gather(whole, axis, axis=3 + dim, tiled=True)
    made = function(whole)
    for axis, dim in reversed(moves):
        size = made.shape[dim] // lax.axis_size(axis)
        made = lax.dynamic_slice_in_dim(made, lax.axis_index(axis) * size, size, 3 + dim)
    return made
