"""ZeRO: the training state divided over the mesh axis `fsdp` (Rajbhandari et al. 2020, "ZeRO", sec. 5).

    stage  divided                                   held in full by every device
    0      nothing                                   everything
    1      optimizer state                           gradients, parameters
    2      optimizer state, gradients                parameters (`Zero2Parameter` inside the loss)
    3      optimizer state, gradients, parameters    nothing

`fsdp_dimension` chooses the dimension of an array that is divided. `gather_parameter` makes a full parameter from a device's
shard, and its derivative reduce-scatters the gradient. `Layout` applies both to trees of parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from hpnlp.model_interfaces.model_parallel import is_zero2
from hpnlp.parallel.varying import vary

AXIS = "fsdp"
NOT_DIVIDED = -1  # in place of None, which is no leaf of a pytree


def fsdp_dimension(
    names: Sequence[str | None],
    shape: Sequence[int],
    mesh_axes: Sequence[tuple[str, ...]],
    mesh_shape: Mapping[str, int],
) -> int:
    """Chooses the dimension of a parameter, gradient or optimizer statistic that ZeRO divides.

    The model dimension ("embed") is preferred, then the first other dimension that divides. The stacked dimension "layers" is
    never divided over `fsdp`. Vectors are not divided either: they are too small to be worth the messages. Nor are arrays that
    `fsdp` divides already, such as those with an axis "batch".

    Args:
      names: Logical names of the array's axes.
      shape: Shape of the array.
      mesh_axes: For each dimension, the mesh axes that divide it already.
      mesh_shape: Mesh axis -> size.

    Returns:
      The dimension, or NOT_DIVIDED.
    """
    if sum(name != "layers" for name in names) <= 1 or any(AXIS in axes for axes in mesh_axes):
        return NOT_DIVIDED
    for dim in sorted(range(len(names)), key=lambda dim: names[dim] != "embed"):
        shards = math.prod(mesh_shape[axis] for axis in (*mesh_axes[dim], AXIS))
        if names[dim] != "layers" and shape[dim] % shards == 0:
            return dim
    return NOT_DIVIDED


def full_shape(leaf: PyTree) -> tuple[int, ...]:
    """Shape of a parameter.

    Args:
      leaf: An array, or a `Zero2Parameter`.

    Returns:
      The shape of the array, or of the full parameter.
    """
    return leaf.full.shape if is_zero2(leaf) else leaf.shape


def gather_parameter(leaf: Any, dim: int, token_axes: tuple[str, ...]) -> jax.Array:
    """Makes a full parameter inside `shard_map`; the derivative reduce-scatters its gradient over `fsdp`.

    Args:
      leaf: The device's shard (stage 3, or a parameter that is not divided), or a `Zero2Parameter` (stage 2).
      dim: The dimension that is divided over `fsdp`, or NOT_DIVIDED.
      token_axes: Mesh axes whose devices have different tokens. The gradient is summed over the axes other than `fsdp`
          after the reduce-scatter, when it is a shard.

    Returns:
      The full parameter.
    """
    if dim == NOT_DIVIDED:
        return leaf.shard if is_zero2(leaf) else leaf
    if is_zero2(leaf):
        return _full_with_gradient_of_shard(leaf.full, vary(leaf.shard, token_axes), dim)
    return lax.all_gather(vary(leaf, token_axes), AXIS, axis=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _full_with_gradient_of_shard(full: jax.Array, shard: jax.Array, dim: int) -> jax.Array:
    """Returns `full`; the cotangent is summed over devices, and each device's slice along `dim` goes to `shard`."""
    axes = jax.typeof(shard).manual_axis_type.varying
    return vary(full, tuple(sorted(axes)))


def _forward(full: jax.Array, shard: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return _full_with_gradient_of_shard(full, shard, dim), full


def _backward(dim: int, full: jax.Array, d_full: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros_like(full), lax.psum_scatter(d_full, AXIS, scatter_dimension=dim, tiled=True)


_full_with_gradient_of_shard.defvjp(_forward, _backward)
