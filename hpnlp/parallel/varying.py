"""Arrays inside `jax.shard_map` that vary over mesh axes: marking, summing and creating them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hpnlp.ops.helpers.custom_vjp import vary_alike


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Marks an array as varying over mesh axes. Its cotangent is summed over these axes.

    Args:
      x: An array of any shape.
      axes: Names of mesh axes; those that x varies over already are ignored.

    Returns:
      x, marked.
    """
    new_axes = tuple(sorted(set(axes) - jax.typeof(x).manual_axis_type.varying))
    return lax.pcast(x, new_axes, to="varying") if new_axes else x


def sum_over_devices(value: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums a value and its weight over all mesh axes that at least one of them varies over.

    Args:
      value: An array of any shape.
      weight: An array of any shape.

    Returns:
      The two sums, the same on all devices.
    """
    value, weight = vary_alike(value, weight)
    axes = tuple(sorted(jax.typeof(value).manual_axis_type.varying))
    return (lax.psum(value, axes), lax.psum(weight, axes)) if axes else (value, weight)


def total_over_devices(x: jax.Array) -> jax.Array:
    """Sums an array over all mesh axes that it varies over.

    Args:
      x: An array of any shape.

    Returns:
      The sum, the same on all devices.
    """
    axes = tuple(sorted(jax.typeof(x).manual_axis_type.varying))
    return lax.psum(x, axes) if axes else x


def shard_in_place(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """The device's shard of an array in its place, with 0 for other shards: the sum over devices is the complete array.

    Args:
      x: The shard.
      dim: The divided dimension.
      axes: The mesh axes that divide it.

    Returns:
      An array of the complete size.
    """
    shards = math.prod(lax.axis_size(axis) for axis in axes)
    owners = np.arange(shards, dtype=np.int32).repeat(x.shape[dim])
    owners = np.expand_dims(owners, [d for d in range(x.ndim) if d != dim])
    is_local = jnp.asarray(owners) == lax.axis_index(axes)
    return jnp.where(is_local, jnp.concatenate([x] * shards, dim), 0.0)


def on_first_device(x: jax.Array, axis: str) -> jax.Array:
    """An array that all devices of a mesh axis have, with 0 on all but the first: the sum over devices counts it once.

    Args:
      x: The array.
      axis: The mesh axis.

    Returns:
      An array of the same shape.
    """
    return jnp.where(lax.axis_index(axis) == 0, x, 0.0)


def zeros_like(shape: Any) -> jax.Array:
    """Creates zeros that vary over the same mesh axes as a traced array.

    Args:
      shape: A result of `jax.eval_shape`.

    Returns:
      Zeros of that shape and dtype.
    """
    axes = tuple(sorted(shape.manual_axis_type.varying))
    zeros = jnp.zeros(shape.shape, shape.dtype)
    return lax.pcast(zeros, axes, to="varying") if axes else zeros
