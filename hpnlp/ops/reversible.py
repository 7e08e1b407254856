"""Reversible residual layers: the backward pass computes activations again from the end, and none of them is kept.

A layer has two streams and two branches, `y1 = x1 + f(x2)` and `y2 = x2 + g(y1)`, and its inputs follow from its outputs:
`x2 = y2 - g(y1)` and `x1 = y1 - f(x2)` (Gomez et al. 2017, "The reversible residual network", eq. 6 to 8; Kitaev et al. 2020,
"Reformer", sec. 3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from hpnlp.ops.array_op import array_op
from hpnlp.ops.arrays import accepts_numpy
from hpnlp.ops.custom_vjp import vary_alike
from hpnlp.types import InputError

# (slice of the layers' parameters, stream, *operands) -> (what the other stream gains, report)
Branch = Callable[..., tuple[Array, Any]]
Layers = Sequence[tuple[Branch, Branch]]
Stream = tuple[Array, Array]  # what branches read, and what rounding has taken from it


@array_op("... | ... |", x1="...")
def reversible(
    layers: Layers, params: Any, x1: Float[Array, "*x"], x2: Float[Array, "*x"], *operands: Any
) -> tuple[Float[Array, "*x"], Float[Array, "*x"], list[tuple[Any, Any]]]:
    """x1 and x2 through a stack of layers, of which the i-th is `layers[i % len(layers)]`: `(y1, y2, reports)`.

    layers: branches (f, g), `branch(params, x, *operands) -> (gain, report)`, which do the same when asked again: keys are
    among params or operands. params: a tree of arrays with a first axis of layers; their numbers may be among them. operands:
    trees of arrays, the same for all layers. What is to have a gradient stands among params and operands; where a branch
    closes over it instead, jax raises an error. Integers and keys have none.
    reports: of each pair, what f and g report, stacked over the layers that are that pair; their gradients count.

    `(x + a) - a` is not x: what rounding has taken, a stream carries along, so that gradients are those of a stack that keeps
    its activations, as far as a branch repeats its bits. Where a compiler fuses it otherwise in the backward pass, streams are
    off by units in the last place of the gains. The first branch reads a stream that may be small beside these, an embedding,
    and which is kept. Branches may compute in 16 bits; the streams may not.
    Cost: each branch runs once more than in a stack that keeps what it needs. Kept are params, operands and five arrays like
    x1, or ten where the layers do not divide by `len(layers)`; besides, the backward pass needs the memory of one branch.
    Differentiated twice, it keeps the streams of all layers; there is no forward-mode derivative.
    Raises InputError on streams of 16 bits.
    """
    if min(x1.dtype.itemsize, x2.dtype.itemsize) < 4:
        raise InputError(
            f"x1 and x2 are {x1.dtype} and {x2.dtype}, from which rounding takes too much to compute them again: pass "
            "float32, which branches may cast"
        )
    x1, x2 = vary_alike(x1, x2)
    # As lists, in which what has no gradient can have None: not every tree takes that.
    leaves, form = jax.tree.flatten(params)
    shared, shared_form = jax.tree.flatten(operands)

    def flat(branch: Branch) -> Branch:
        return lambda own, x, shared: branch(jax.tree.unflatten(form, own), x, *jax.tree.unflatten(shared_form, shared))

    layers = [(flat(f), flat(g)) for f, g in layers]
    count, period = leaves[0].shape[0], len(layers)
    whole = count - count % period
    reports: list[Any] = []
    for some, start, stop in ((layers, 0, whole), (layers[: count - whole], whole, count)):
        if start < stop:
            turns = by_period(jax.tree.map(lambda leaf: leaf[start:stop], leaves), len(some))  # noqa: B023
            made: Any = _run(tuple(some), turns, x1, x2, shared)
            x1, x2 = made[:2]
            reports += made[2]
    return x1, x2, reports


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(layers: Layers, params: list[Any], x1: Array, x2: Array, operands: list[Any]) -> tuple[Array, Array, Any]:
    """params: `by_period`. Reports are stacked over turns."""
    (y1, _), (y2, _), reports = _through(layers, params, x1, x2, operands)
    return y1, y2, reports


@accepts_numpy
def _forward(
    layers: Layers, params: list[Any], x1: Array, x2: Array, operands: list[Any]
) -> tuple[tuple[Array, Array, Any], Any]:
    # Branches in the form that they have in the backward pass: one with a derivative of its own may round in another way.
    as_asked_again = lambda branch: lambda *given: jax.vjp(branch, *given)[0]  # noqa: E731
    pairs = [(as_asked_again(f), as_asked_again(g)) for f, g in layers]
    y1, y2, reports = _through(pairs, params, x1, x2, operands)
    return (y1[0], y2[0], reports), (params, x2, y1, y2, operands)


def _through(
    layers: Layers, params: list[Any], x1: Array, x2: Array, operands: list[Any]
) -> tuple[Stream, Stream, Any]:
    def turn(x: tuple[Stream, Stream], own: Any) -> tuple[tuple[Stream, Stream], Any]:
        (x1, x2), reports = x, []
        for place, (f, g) in enumerate(layers):
            mine = layer_of_period(own, place, len(layers))
            gain, of_f = f(mine, x2[0], operands)
            x1 = _add(x1, gain.astype(x1[0].dtype))
            gain, of_g = g(mine, x1[0], operands)
            x2 = _add(x2, gain.astype(x2[0].dtype))
            reports.append((of_f, of_g))
        return (x1, x2), tuple(reports)

    (y1, y2), reports = lax.scan(turn, ((x1, jnp.zeros_like(x1)), (x2, jnp.zeros_like(x2))), params)
    return y1, y2, reports


def _backward(layers: Layers, saved: Any, d: tuple[Array, Array, Any]) -> tuple[Any, ...]:
    params, x2, y1, y2, operands = saved
    d1, d2, d_reports = d

    def turn(carry: Any, slices: Any) -> tuple[Any, Any]:
        (y1, y2, d1, d2, sums), (own, d_reports, number) = carry, slices
        found = []
        for place, (f, g) in reversed(list(enumerate(layers))):
            mine, (of_f, of_g) = layer_of_period(own, place, len(layers)), d_reports[place]
            gain, by_y1, by_mine, by_operands = _pull(g, mine, y1[0], operands, d2, of_g)
            y2, d1, sums = _add(y2, -gain), d1 + by_y1, _sum(sums, by_operands)
            if place == 0:
                y2 = jnp.where(number == 0, x2, y2[0]), jnp.where(number == 0, 0.0, y2[1])
            gain, by_y2, more, by_operands = _pull(f, mine, y2[0], operands, d1, of_f)
            y1, d2, sums = _add(y1, -gain), d2 + by_y2, _sum(sums, by_operands)
            found.insert(0, _sum(by_mine, more))
        by_own = found[0] if len(layers) == 1 else [jnp.stack(leaves) for leaves in zip(*found, strict=True)]
        return (y1, y2, d1, d2, sums), by_own

    sums = [jnp.zeros_like(x, dtype=jnp.promote_types(x.dtype, jnp.float32)) for x in _real(operands)]
    turns = jnp.arange(jax.tree.leaves(params)[0].shape[0], dtype=jnp.int32)
    slices = params, jax.tree.map(lambda d: None if d.dtype == jax.dtypes.float0 else d, d_reports), turns
    (_, _, d1, d2, sums), by_params = lax.scan(turn, (y1, y2, d1, d2, sums), slices, reverse=True)
    return _gradients(params, by_params), d1, d2, _gradients(operands, sums)


_run.defvjp(_forward, _backward)


def _pull(
    branch: Branch, own: list[Any], x: Array, operands: list[Any], d: Array, d_report: Any
) -> tuple[Array, Array, list[Any], list[Any]]:
    """What a branch gives, and the gradients by x, by its parameters and by the operands."""

    def of(x: Array, own: list[Any], operands: list[Any]) -> tuple[Array, list[Any]]:
        gain, report = branch(own, x, operands)
        return vary_alike(gain.astype(x.dtype), x)[0], _real(report)

    (gain, _), back = jax.vjp(of, x, own, operands)
    by_x, by_own, by_operands = back((d, jax.tree.leaves(d_report)))
    return gain, by_x, _real(by_own), _real(by_operands)


def _add(x: Stream, gain: Array) -> Stream:
    """x + gain. The rounding error of a sum is found by TwoSum (Knuth, "The art of computer programming" 2, 4.2.2, th. B)."""
    high, low = x
    total = high + gain
    of_gain = total - high
    low = low + ((high - (total - of_gain)) + (gain - of_gain))
    high = total + low
    return high, low - (high - total)


def _sum(sums: list[Any], more: list[Any]) -> list[Any]:
    return [a + b.astype(a.dtype) for a, b in zip(sums, more, strict=True)]


def _is_real(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, np.inexact)


def _real(tree: Any) -> list[Any]:
    """The leaves that have gradients, or are some."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_real(leaf)]


def _gradients(leaves: list[Any], real: Sequence[Array]) -> list[Any]:
    """Of all leaves, from those of the real ones."""
    left = iter(real)
    return [next(left).astype(leaf.dtype) if _is_real(leaf) else None for leaf in leaves]


def by_period(tree: Any, period: int) -> Any:
    """Stacked layers `[layers, ...]` as `[layers // period, period, ...]`, for layer forms that are taken in turn.

    Layers beyond the last whole period are cut off.
    """

    def reshape(leaf: jax.Array) -> jax.Array:
        # XLA gives an axis of size 1 another layout, and copies the stack for it.
        periods = leaf.shape[0] // period
        return leaf if period == 1 else leaf[: periods * period].reshape(periods, period, *leaf.shape[1:])

    return jax.tree.map(reshape, tree)


def layer_of_period(tree: Any, index: int, period: int) -> Any:
    """The layer at `index` of one period, of a tree whose leaves are `[period, ...]` (or one layer where period is 1)."""
    return tree if period == 1 else jax.tree.map(lambda leaf: leaf[index], tree)
