"""Functions of complete matrices, as optimizers such as Muon need them, where each device holds a shard of every matrix."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

# Collectives that assemble a matrix: (mesh axis, dimension of the matrix that it divides, -2 or -1).
_Exchanges = list[tuple[str, int]]


def apply_to_matrices(
    function: Callable[[jax.Array], jax.Array], x: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec
) -> jax.Array:
    """Computes `function(x)` where each matrix of x is divided over devices.

    The n devices that hold shards of a stack of L matrices exchange them by all-to-alls, so that each has ceil(L / n) complete
    matrices, and exchange the results back. A single matrix is gathered, and all devices compute the same result.

    Args:
      function: Maps each matrix of a stack `[L, A, B]` to another matrix of the same shape.
      x: `[..., A, B]`.
      mesh: The mesh.
      spec: The layout of x, and of the result, on the mesh.

    Returns:
      `function(x)`, `[..., A, B]`, laid out by `spec`.

    Cost: for each mesh axis that divides matrices, every device sends (n - 1) / n of its shards, once forth and once back.
    Where n does not divide L, the cost is that of the next multiple of n.
    """
    axes = [(axis,) if isinstance(axis, str) else axis or () for axis in (*spec, *[None] * (x.ndim - len(spec)))]
    if not any(axes):
        return function(x)
    exchanges = [(axis, dim) for dim in (-2, -1) for axis in reversed(axes[dim])]

    def apply_to_shards(shards: jax.Array) -> jax.Array:
        stack = shards.reshape(-1, *shards.shape[-2:])
        apply = _apply_gathered if len(stack) == 1 else _apply_exchanged
        return apply(function, stack, exchanges).reshape(shards.shape)

    return jax.shard_map(apply_to_shards, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def _apply_exchanged(function: Callable[[jax.Array], jax.Array], stack: jax.Array, exchanges: _Exchanges) -> jax.Array:
    """Applies the function to the matrices of a stack, of which each device takes an equal number."""
    count, devices = len(stack), math.prod(lax.axis_size(axis) for axis, _ in exchanges)
    matrices = jnp.pad(stack, ((0, -count % devices), (0, 0), (0, 0)))
    for axis, dim in exchanges:
        matrices = lax.all_to_all(matrices, axis, split_axis=0, concat_axis=3 + dim, tiled=True)
    results = function(matrices)
    for axis, dim in reversed(exchanges):
        results = lax.all_to_all(results, axis, split_axis=3 + dim, concat_axis=0, tiled=True)
    return results[:count]


def _apply_gathered(function: Callable[[jax.Array], jax.Array], stack: jax.Array, exchanges: _Exchanges) -> jax.Array:
    """Applies the function to a single matrix `[1, A, B]` on every device, each of which keeps its shard of the result."""
    matrix = stack
    for axis, dim in exchanges:
        matrix = lax.all_gather(matrix, axis, axis=3 + dim, tiled=True)
    result = function(matrix)
    for axis, dim in reversed(exchanges):
        size = result.shape[dim] // lax.axis_size(axis)
        result = lax.dynamic_slice_in_dim(result, lax.axis_index(axis) * size, size, 3 + dim)
    return result
