"""Reversible residual layers: the backward pass computes activations again from the end of the stack, and none is kept.

A layer has two streams and two branches, `y1 = x1 + f(x2)` and `y2 = x2 + g(y1)`, and its inputs follow from its outputs:
`x2 = y2 - g(y1)` and `x1 = y1 - f(x2)`.

References:
  Gomez et al. 2017, "The reversible residual network", eq. 6 to 8.
  Kitaev et al. 2020, "Reformer: the efficient transformer", sec. 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.helpers.stacks import StackOrder, layer_count, single_stack
from hpnlp.types import InputError

# (parameters of a layer, stream, *operands) -> (output that is added to the other stream, report)
Branch = Callable[..., tuple[Array, Any]]
Layers = Sequence[tuple[Branch, Branch]]
# The leaves of each stack, by its name.
Stacks = dict[str, list[Any]]
# (value that branches read, rounding error of the value)
Stream = tuple[Array, Array]


@array_op("... | ... |", x1="...")
def reversible(
    layers: Layers,
    params: PyTree,
    x1: Float[Array, "*x"],
    x2: Float[Array, "*x"],
    *operands: PyTree,
    order: StackOrder | None = None,
) -> tuple[Float[Array, "*x"], Float[Array, "*x"], list[tuple[Any, Any]]]:
    """Passes two streams through a stack of layers, the i-th of which has the branches `layers[i % len(layers)]`.

    `(x + a) - a` is not x in floating-point arithmetic. Each stream therefore carries the rounding error of its sums, so that
    the streams are recomputed exactly if the branches repeat their results bit for bit. Where the compiler fuses a branch
    differently in the backward pass, recomputed streams differ by units in the last place of the branches' outputs. The first
    branch reads an input x2 that may be much smaller than these outputs, such as an embedding; it is kept.

    Differentiated twice, the streams of all layers are kept. There is no forward-mode derivative.

    Args:
      layers: Pairs of branches (f, g), `branch(params, x, *operands) -> (output, report)`. A branch must return the same when
        it is called again: pass random keys among params or operands. Values that need a gradient are passed there too; for a
        value that a branch closes over, jax raises an error.
      params: Tree of arrays with a first axis of layers; with `order`, a dict of such trees, the stacks of layers by name.
          Integers and keys have no gradient.
      x1: First stream, of any shape, float32 or float64. Branches may compute in 16 bits.
      x2: Second stream, of the same shape.
      *operands: Trees of arrays, the same for all layers.
      order: The stack that holds the layers of each pair of branches; None for a single one.

    Returns:
      (y1, y2, reports). reports holds for each pair of branches the pair of the reports of f and g, stacked over the layers
      that use it; more follow for the layers beyond the last multiple of `len(layers)`. They have gradients.

    Raises:
      InputError: A stream has 16 bits.

    Cost:
      Each branch runs once more than in a stack that keeps activations. Params, operands and five arrays like x1 are kept, or
      ten if the number of layers is no multiple of `len(layers)`; the backward pass also needs the memory of one branch.
    """
    if min(x1.dtype.itemsize, x2.dtype.itemsize) < 4:
        raise InputError(
            f"x1 and x2 are {x1.dtype} and {x2.dtype}, whose rounding errors are too large to invert the layers: pass float32, "
            "and cast inside the branches"
        )
    x1, x2 = vary_alike(x1, x2)
    order, stacks = (single_stack(len(layers)), {"all": params}) if order is None else (order, params)
    # Trees become lists of leaves, in which leaves without a gradient can be None; not every container allows None.
    flat = {name: jax.tree.flatten(stack) for name, stack in stacks.items()}
    leaves = {name: stack_leaves for name, (stack_leaves, _) in flat.items()}
    operand_leaves, operand_treedef = jax.tree.flatten(operands)

    def flattened_branch(branch: Branch, treedef: Any) -> Branch:
        def call(leaves: list[Any], x: Array, operand_leaves: list[Any]) -> tuple[Array, Any]:
            operands = jax.tree.unflatten(operand_treedef, operand_leaves)
            return branch(jax.tree.unflatten(treedef, leaves), x, *operands)

        return call

    layers = [
        (flattened_branch(f, flat[name][1]), flattened_branch(g, flat[name][1]))
        for (f, g), name in zip(layers, order.names, strict=True)
    ]
    periods, count = divmod(layer_count(leaves), order.period)
    segments = [(layers, order, leaves, periods)] if periods else []
    if count:
        segments.append((layers[:count], *order.remaining(leaves, periods, count), 1))
    reports: list[Any] = []
    for branches, segment_order, stacks, length in segments:
        slices = segment_order.by_period(stacks, length)
        outputs: Any = _run(tuple(branches), segment_order, slices, x1, x2, operand_leaves)
        x1, x2, segment_reports = outputs
        reports += segment_reports
    return x1, x2, reports


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(
    layers: Layers, order: StackOrder, params: Stacks, x1: Array, x2: Array, operands: list[Any]
) -> tuple[Array, Array, Any]:
    """`reversible` of lists of leaves in place of trees; `params` is a result of `StackOrder.by_period`."""
    (y1, _), (y2, _), reports = _forward_pass(layers, order, params, x1, x2, operands)
    return y1, y2, reports


@accepts_numpy
def _run_forward(
    layers: Layers, order: StackOrder, params: Stacks, x1: Array, x2: Array, operands: list[Any]
) -> tuple[tuple[Array, Array, Any], Any]:
    # Branches run in the form that they have in the backward pass: a branch with a custom derivative may round differently
    # when it is not differentiated.
    layers = [(_as_in_backward(f), _as_in_backward(g)) for f, g in layers]
    y1, y2, reports = _forward_pass(layers, order, params, x1, x2, operands)
    return (y1[0], y2[0], reports), (params, x2, y1, y2, operands)


def _as_in_backward(branch: Branch) -> Branch:
    return lambda *arguments: jax.vjp(branch, *arguments)[0]


def _forward_pass(
    layers: Layers, order: StackOrder, params: Stacks, x1: Array, x2: Array, operands: list[Any]
) -> tuple[Stream, Stream, Any]:
    """Both streams after all layers, as compensated sums, and the reports of the branches, stacked over periods."""

    def period(streams: tuple[Stream, Stream], params: PyTree) -> tuple[tuple[Stream, Stream], Any]:
        (x1, x2), reports = streams, []
        for index, (f, g) in enumerate(layers):
            layer = order.layer_of_period(params, index)
            output, f_report = f(layer, x2[0], operands)
            x1 = _add(x1, output.astype(x1[0].dtype))
            output, g_report = g(layer, x1[0], operands)
            x2 = _add(x2, output.astype(x2[0].dtype))
            reports.append((f_report, g_report))
        return (x1, x2), tuple(reports)

    (y1, y2), reports = lax.scan(period, ((x1, jnp.zeros_like(x1)), (x2, jnp.zeros_like(x2))), params)
    return y1, y2, reports


def _run_backward(
    layers: Layers, order: StackOrder, saved: PyTree, cotangents: tuple[Array, Array, Any]
) -> tuple[Any, ...]:
    """Gradients of the parameters, both input streams and the operands; recomputes each layer's inputs from its outputs."""
    params, x2, y1, y2, operands = saved
    d1, d2, d_reports = cotangents

    def period(carry: PyTree, slices: PyTree) -> tuple[Any, Any]:
        y1, y2, d1, d2, d_operands = carry
        params, d_reports, number = slices
        d_params = []
        for index, (f, g) in reversed(list(enumerate(layers))):
            layer, (d_f_report, d_g_report) = order.layer_of_period(params, index), d_reports[index]
            output, by_y1, by_g, by_operands = _vjp_of_branch(g, layer, y1[0], operands, d2, d_g_report)
            y2, d1, d_operands = _add(y2, -output), d1 + by_y1, _sum_lists(d_operands, by_operands)
            if index == 0:
                # The input of the first branch of the stack is not recomputed, but kept.
                y2 = jnp.where(number == 0, x2, y2[0]), jnp.where(number == 0, 0.0, y2[1])
            output, by_y2, by_f, by_operands = _vjp_of_branch(f, layer, y2[0], operands, d1, d_f_report)
            y1, d2, d_operands = _add(y1, -output), d2 + by_y2, _sum_lists(d_operands, by_operands)
            d_params.insert(0, _sum_lists(by_g, by_f))
        return (y1, y2, d1, d2, d_operands), order.period_of_layers(d_params)

    d_operands = [jnp.zeros_like(x, dtype=jnp.promote_types(x.dtype, jnp.float32)) for x in _real_leaves(operands)]
    numbers = jnp.arange(jax.tree.leaves(params)[0].shape[0], dtype=jnp.int32)
    slices = params, jax.tree.map(lambda d: None if d.dtype == jax.dtypes.float0 else d, d_reports), numbers
    (_, _, d1, d2, d_operands), d_params = lax.scan(period, (y1, y2, d1, d2, d_operands), slices, reverse=True)
    by_params = {name: _with_none(stack, d_params[name]) for name, stack in params.items()}
    return by_params, d1, d2, _with_none(operands, d_operands)


_run.defvjp(_run_forward, _run_backward)


def _vjp_of_branch(
    branch: Branch, params: list[Any], x: Array, operands: list[Any], d_output: Array, d_report: PyTree
) -> tuple[Array, Array, list[Any], list[Any]]:
    """(output of a branch, gradients by x, by its parameters and by the operands)."""

    def real_outputs(x: Array, params: list[Any], operands: list[Any]) -> tuple[Array, list[Any]]:
        output, report = branch(params, x, operands)
        return vary_alike(output.astype(x.dtype), x)[0], _real_leaves(report)

    (output, _), pull = jax.vjp(real_outputs, x, params, operands)
    by_x, by_params, by_operands = pull((d_output, jax.tree.leaves(d_report)))
    return output, by_x, _real_leaves(by_params), _real_leaves(by_operands)


def _add(x: Stream, output: Array) -> Stream:
    """Adds an output to a stream, with the rounding error from TwoSum.

    Reference: Knuth, "The art of computer programming" 2, sec. 4.2.2, theorem B.
    """
    high, low = x
    total = high + output
    output_part = total - high
    low = low + ((high - (total - output_part)) + (output - output_part))
    high = total + low
    return high, low - (high - total)


def _sum_lists(sums: list[Any], terms: list[Any]) -> list[Any]:
    return [a + b.astype(a.dtype) for a, b in zip(sums, terms, strict=True)]


def _is_real(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, np.inexact)


def _real_leaves(tree: PyTree) -> list[Any]:
    """The leaves of floating-point dtype: those that have a gradient, or are one."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_real(leaf)]


def _with_none(leaves: list[Any], gradients: Sequence[Array]) -> list[Any]:
    """Gradients of all leaves, from those of the real ones: None for the other leaves."""
    remaining = iter(gradients)
    return [next(remaining).astype(leaf.dtype) if _is_real(leaf) else None for leaf in leaves]
