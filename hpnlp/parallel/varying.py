"""Arrays inside `jax.shard_map` that vary over mesh axes: marking, summing and creating them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hpnlp.ops.custom_vjp import vary_alike


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


def zeros_like(shape: Any) -> jax.Array:
    """Creates zeros that vary over the same mesh axes as a traced array.

    Args:
      shape: A result of `jax.eval_shape`.

    Returns:
      Zeros of that shape and dtype.
    """
    axes = tuple(sorted(shape.manual_axis_type.varying)) if hasattr(shape, "manual_axis_type") else ()
    zeros = jnp.zeros(shape.shape, shape.dtype)
    return lax.pcast(zeros, axes, to="varying") if axes else zeros
