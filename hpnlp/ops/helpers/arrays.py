"""Conversion of numpy arrays to jax arrays at the public edge of an op, and parts of an array."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

P = ParamSpec("P")
R = TypeVar("R")


def as_arrays(tree: PyTree) -> Any:
    """Converts the numpy arrays among the leaves of a tree to jax arrays, in the dtypes that jax gives them.

    Ops would treat numpy arrays differently from jax arrays in three ways: a tracer cannot index them, their dtype may be one
    that jax does not use (float64), and arithmetic among them is numpy's. Other leaves are returned as they are.

    Args:
      tree: Arrays, numbers, functions and None in any containers that are pytrees.

    Returns:
      The tree, with jax arrays for numpy arrays. The zero tangents of integers (float0) stay numpy arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not has_numpy(leaves):
        return tree
    # Concrete even inside jit, so that labels that are known while tracing can be checked. jnp.asarray does not suffice: in a
    # rule that jax.grad calls, it returns a tracer, which hands the numpy array itself to the next rule.
    with jax.ensure_compile_time_eval():
        return jax.tree.unflatten(structure, [jax.device_put(x) if _is_numpy(x) else x for x in leaves])


def accepts_numpy(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator for ops and for rules of `jax.custom_vjp` and `jax.custom_jvp`, which then accept numpy arrays.

    Rules need it as well as ops: if a caller differentiates with respect to numpy arrays, the op receives tracers, and jax
    passes the numpy arrays themselves to the rule.

    Args:
      function: Receives jax arrays in place of numpy arrays.

    Returns:
      The decorated function.
    """

    @functools.wraps(function)
    def converted(*args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = as_arrays((args, kwargs))
        return function(*args, **kwargs)

    return converted


def has_numpy(leaves: Iterable[Any]) -> bool:
    """Whether `as_arrays` would convert a leaf.

    Args:
      leaves: Leaves of a tree.

    Returns:
      True if a leaf is a numpy array other than float0.
    """
    return any(map(_is_numpy, leaves))


def split_examples(x: jax.Array, count: int, axis: int = 0) -> jax.Array:
    """Parts of an array. They are interleaved, so that every device keeps its examples in every part.

    Args:
      x: Array with the examples on `axis`.
      count: Number of parts, which divides the number of examples.
      axis: Axis of the examples.

    Returns:
      The array with a leading axis of parts; part p has the examples p, p + parts, p + 2 parts, ...
    """
    shape = (*x.shape[:axis], -1, count, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _is_numpy(x: object) -> bool:
    return isinstance(x, np.ndarray) and x.dtype != jax.dtypes.float0
