"""FLOPs of the matrix products and convolutions of a program, counted from its jaxpr."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

from hpnlp.cost.parts import operation_part
from hpnlp.types import Equation, InputError

# Name of a scope that states how often the `while` loops in it run; the jaxpr of a loop does not.
_ITERATIONS = "iterations_expected_"
# Name of a scope that states the FLOPs of the kernel in it.
_KERNEL = "kernel_flops_"


def expected_iterations(count: int) -> contextlib.AbstractContextManager[Any]:
    """A scope for a loop whose length depends on data, which states the length that counts of FLOPs and plans assume.

    Args:
      count: Number of iterations.

    Returns:
      A context manager, under which the loop is traced.
    """
    return jax.named_scope(f"{_ITERATIONS}{count}")


def kernel_flops(count: int) -> contextlib.AbstractContextManager[Any]:
    """A scope for the call of a Pallas kernel for GPUs, whose jaxpr does not show its FLOPs.

    Args:
      count: FLOPs that counts assume.

    Returns:
      A context manager, under which the kernel is traced.
    """
    return jax.named_scope(f"{_KERNEL}{count}")


def iteration_count(equation: Any) -> int | None:
    """Number of iterations of a `while` loop by its scope.

    Args:
      equation: Equation of a jaxpr.

    Returns:
      The number that `expected_iterations` stated; None without one.
    """
    return _stated(_ITERATIONS, equation)


def _stated(scope: str, equation: Equation) -> int | None:
    """The number after `scope` in an equation's innermost scope that has it, as 12 in `kernel_flops_12`; None without one."""
    numbers = re.findall(rf"{scope}(\d+)", str(equation.source_info.name_stack))
    return int(numbers[-1]) if numbers else None


def count_flops(fn: Callable[..., Any], *args: Any, while_trips: int | None = None, **kwargs: Any) -> int:
    """Counts the FLOPs of the matrix products and convolutions of a function, two per multiply-add.

    A loop counts once per iteration (as `expected_iterations` states, where data decide), a `cond` by its most expensive
    branch, a `shard_map` by the work of all its devices, and a Pallas kernel by its cost estimate or `kernel_flops`, or
    else by its body times its grid. Products of a convolution with padding, or with the zeros of dilation, do not count.
    The function is counted as traced, so products whose result is not used are included. Elementwise operations,
    reductions, factorizations and calls into libraries (cuDNN attention) are not included.

    Args:
      fn: A function, jitted or not.
      *args: Arguments of the function, arrays or `jax.ShapeDtypeStruct`s.
      while_trips: Assumed number of iterations of each loop whose length is unknown.
      **kwargs: Keyword arguments of the function.

    Returns:
      The number of FLOPs.

    Raises:
      InputError: A loop of unknown length contains products, and `while_trips` is None.

    Cost: one trace; nothing is compiled.
    """
    return jaxpr_flops(jitted(fn).trace(*args, **kwargs).jaxpr, while_trips)


def jitted(fn: Callable[..., Any], **options: Any) -> Any:
    """A function that has `trace` and `lower`: `fn` itself if it is jitted, else `jax.jit(fn, **options)`."""
    return fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn, **options)


def flops_by_part(fn: Callable[..., Any], *args: Any, while_trips: int | None = None, **kwargs: Any) -> dict[str, int]:
    """Counts the FLOPs of each part of a function; see `count_flops`, and `parts.shares` for shares.

    Arguments: see `count_flops`.

    Returns:
      FLOPs by entry of `parts.PARTS`, and by "" outside of all parts. Their sum is the result of `count_flops`.
    """
    return _flops_by_part(jitted(fn).trace(*args, **kwargs).jaxpr, while_trips)


def jaxpr_flops(jaxpr: core.Jaxpr | core.ClosedJaxpr, while_trips: int | None) -> int:
    """FLOPs of a jaxpr."""
    return sum(_flops_by_part(jaxpr, while_trips).values())


def open_jaxpr(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.Jaxpr:
    """The jaxpr with the equations.

    Args:
      jaxpr: A jaxpr, closed or not.

    Returns:
      The open jaxpr; from JAX 0.12 on the two are the same.
    """
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def called_jaxpr(equation: Equation) -> Any:
    """The body of an equation that only calls it, such as `jit`, `checkpoint` or a custom derivative.

    Args:
      equation: Equation of a jaxpr.

    Returns:
      An open jaxpr with the operands and results of the equation; None for other equations.
    """
    bodies = list(core.jaxprs_in_params(equation.params))
    if not bodies:
        return None
    body = open_jaxpr(bodies[0])
    same = len(body.invars) == len(equation.invars) and len(body.outvars) == len(equation.outvars)
    return body if same else None


def _flops_by_part(jaxpr: core.Jaxpr | core.ClosedJaxpr, while_trips: int | None) -> dict[str, int]:
    """FLOPs of a jaxpr by part; those outside of the jaxpr's own scopes belong to "", until the part of its call is known."""
    result: dict[str, int] = {}
    for equation in open_jaxpr(jaxpr).eqns:
        flops = _equation_flops(equation, while_trips)
        outer = operation_part(equation.source_info.name_stack) if "" in flops else ""
        for name, count in flops.items():
            result[name or outer] = result.get(name or outer, 0) + count
    return result


def _equation_flops(equation: Equation, while_trips: int | None) -> dict[str, int]:
    """FLOPs of an equation, and of the jaxprs among its parameters, by the parts inside of it."""
    name, params = equation.primitive.name, equation.params
    if name in PRODUCTS:
        return {"": PRODUCTS[name](equation)}
    if name == "pallas_call" and params["cost_estimate"] is not None:
        return {"": int(params["cost_estimate"].flops)}
    # plgpu.kernel calls its kernel by this primitive, and has no cost estimate.
    if name == "custom_vmap_call" and (flops := _stated(_KERNEL, equation)) is not None:
        return {"": flops}
    if name == "cond":
        branches = [_flops_by_part(branch, while_trips) for branch in params["branches"]]
        return max(branches, key=lambda flops: sum(flops.values()))
    if name == "custom_linear_solve":  # its other jaxprs are for derivatives only
        return _flops_by_part(params["jaxprs"].solve, while_trips)

    bodies = [_flops_by_part(jaxpr, while_trips) for jaxpr in core.jaxprs_in_params(params)]
    inner = {part: sum(body.get(part, 0) for body in bodies) for body in bodies for part in body}
    if not any(inner.values()):
        return {}
    times = _repeats(name, params)
    if name == "while":
        trips = iteration_count(equation)
        times = while_trips if trips is None else trips
        if times is None:
            raise InputError(
                "count_flops: a while loop of unknown length contains matrix products: pass while_trips=, or give "
                "lax.fori_loop Python ints as bounds"
            )
    return {part: times * count for part, count in inner.items()}


def _repeats(name: str, params: Mapping[str, Any]) -> int:
    """Number of times that the jaxprs among an equation's parameters run."""
    if name == "scan":
        return params["length"]
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid)
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1


def _dot_general(equation: Equation) -> int:
    (contracting, _), _ = equation.params["dimension_numbers"]
    lhs = equation.invars[0].aval.shape
    return 2 * equation.outvars[0].aval.size * math.prod(lhs[i] for i in contracting)


def _ragged_dot(equation: Equation) -> int:
    """FLOPs of a grouped product, where each row is multiplied by the matrix of its group only."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracting, _), _ = numbers.dot_dimension_numbers
    lhs, _, groups = (operand.aval for operand in equation.invars)
    products = equation.outvars[0].aval.size * math.prod(lhs.shape[i] for i in contracting)
    # Where groups divide the contracted dimension, each group has its own result and its share of the products.
    ragged_contraction = set(numbers.lhs_ragged_dimensions) & set(contracting)
    return 2 * products // (groups.shape[-1] if ragged_contraction else 1)


def _conv_general_dilated(equation: Equation) -> int:
    """FLOPs of a convolution; products with padding and with the zeros of a dilated input do not count."""
    params = equation.params
    numbers = params["dimension_numbers"]
    lhs, rhs = (operand.aval.shape for operand in equation.invars)
    out = equation.outvars[0].aval.shape
    taps = 1
    for i, (before, _) in enumerate(params["padding"]):
        n, kernel, positions = lhs[numbers.lhs_spec[2 + i]], rhs[numbers.rhs_spec[2 + i]], out[numbers.out_spec[2 + i]]
        dilation = params["lhs_dilation"][i]
        # Index in the (dilated) input of each tap of the kernel, for each position of the output.
        at = np.arange(positions)[:, None] * params["window_strides"][i]
        at = at + np.arange(kernel) * params["rhs_dilation"][i] - before
        taps *= int(np.sum((at >= 0) & (at <= (n - 1) * dilation) & (at % dilation == 0)))
    in_features = rhs[numbers.rhs_spec[1]]  # per feature group
    return 2 * out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * in_features * taps


# Primitives that count -> FLOPs of an equation.
PRODUCTS: dict[str, Callable[[Any], int]] = {
    "conv_general_dilated": _conv_general_dilated,
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
}
