"""Conversion of numpy arrays to jax arrays at the public edge of an op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def as_arrays(tree: Any) -> Any:
    """Converts the numpy arrays among the leaves of a tree to jax arrays, in the dtypes that jax gives them.

    numpy arrays differ from jax arrays in three ways that ops would meet: a tracer cannot index them, their dtype may be
    one that jax does not use (float64), and arithmetic among them is numpy's. Other leaves are returned as they are.

    Args:
        tree: arrays, numbers, functions and None in any containers that are pytrees.

    Returns:
        The tree, with jax arrays for numpy arrays. The zero tangents of integers (float0) stay numpy arrays.
    """
    leaves, form = jax.tree.flatten(tree)
    if not has_numpy(leaves):
        return tree
    # Concrete also inside jit, so that labels that are known while tracing can still be checked. Not by jnp.asarray: in a
    # rule that jax.grad calls, it returns a tracer, which hands the numpy array itself to the next rule.
    with jax.ensure_compile_time_eval():
        return jax.tree.unflatten(form, [jax.device_put(x) if _is_numpy(x) else x for x in leaves])


def accepts_numpy(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates an op, or a rule of `jax.custom_vjp` or `jax.custom_jvp`, so that its arguments hold no numpy arrays.

    A rule needs it as well as its op: where a caller differentiates with respect to numpy arrays, the op sees tracers, and
    jax passes the numpy arrays themselves to the rule.
    """

    @functools.wraps(function)
    def converted(*args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = as_arrays((args, kwargs))
        return function(*args, **kwargs)

    return converted


def has_numpy(leaves: Iterable[Any]) -> bool:
    """Whether `as_arrays` would convert one of the leaves of a tree."""
    return any(map(_is_numpy, leaves))


def _is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype != jax.dtypes.float0
