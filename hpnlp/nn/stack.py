"""A stack of layers that take a few forms in turn, over parameters that are stacked or apart; plain or reversible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hpnlp.ops.reversible import by_period, layer_of_period, reversible
from hpnlp.types import Aux

# (x, (parameters, number of the layer, cache or None)) -> (x, (cache or None, aux)); x is an array, or a tree of them
Layer = Callable[[Any, tuple[Any, jax.Array, Any]], tuple[Any, tuple[Any, Aux]]]
Streams = tuple[jax.Array, jax.Array]
# A layer's branches: mix((parameters, number of the layer), x, *operands[, cache]) -> (y, (cache or None, aux)), and
# feed((parameters, number), x, *operands) -> (y, aux).
Pair = tuple[Callable[..., tuple[jax.Array, tuple[Any, Aux]]], Callable[..., tuple[jax.Array, Aux]]]


def through(
    layers: Sequence[Layer], x: Any, params: Any, caches: Any, count: int, unroll: int, first: Any = 0
) -> tuple[Any, Any, Aux]:
    """x through `count` layers, of which the i-th is `layers[i % len(layers)]`: `(x, caches, aux)`.

    params: stacked on a first axis, or a tuple of each layer's own. Stacked ones run as a loop over turns, one layer after
    another within a turn, and what is left of a turn after it; apart, the layers run one by one. unroll: how many layers
    one step of the loop holds, rounded up to whole turns. first: the number of the first layer.
    caches: None, or as an earlier call returned them: a tuple as `params` is one; else (of each layer of a turn, its caches
    stacked over turns; of each layer that is left, its own). None stands for those of a layer that has made none.
    aux: summed over layers.
    """
    numbers = _numbers(count, first)
    if isinstance(params, tuple):
        x, ends = _each(layers, x, [(p, numbers[i], caches and caches[i]) for i, p in enumerate(params)])
        return x, tuple(cache for cache, _ in ends), _total([aux for _, aux in ends])

    period = len(layers)
    turns = count // period
    stacked, left = caches or ((None,) * period, (None,) * (count % period))

    def turn(x: Any, slices: tuple[Any, Any]) -> tuple[Any, Any]:
        own, caches = slices
        return _each(layers, x, [(*layer_of_period(own, place, period), cache) for place, cache in enumerate(caches)])

    own = by_period((params, numbers), period)
    x, ends = lax.scan(turn, x, (own, stacked), unroll=-(-unroll // period))
    stacked = tuple(cache for cache, _ in ends)
    reports = [_summed(aux) for _, aux in ends]

    rest = [jax.tree.map(lambda leaf, i=i: leaf[i], (params, numbers)) for i in range(turns * period, count)]
    x, ends = _each(layers, x, [(*own, cache) for own, cache in zip(rest, left, strict=True)])
    left = tuple(cache for cache, _ in ends)
    return x, (stacked, left), _total([*reports, *(aux for _, aux in ends)])


def through_reversibly(
    pairs: Sequence[Pair], x: Streams, params: Any, count: int, operands: tuple[Any, ...], first: Any = 0
) -> tuple[Streams, Aux]:
    """Two streams through `count` reversible layers, of which nothing is kept for a backward pass: `(x, aux)`.

    pairs: the branches of the layers, in turn. params: stacked. first, aux: as in `through`.
    """
    x1, x2, reports = reversible(pairs, (params, _numbers(count, first)), *x, *operands)
    return (x1, x2), _total([_summed(aux) for (_, mixed), fed in reports for aux in (mixed, fed)])


def coupled(pair: Pair, operands: tuple[Any, ...]) -> Layer:
    """A layer for `through` that does what it does in `through_reversibly`, and fills a cache."""
    mix, feed = pair

    def layer(x: Streams, slices: tuple[Any, jax.Array, Any]) -> tuple[Streams, tuple[Any, Aux]]:
        (x1, x2), (*own, cache) = x, slices
        y, (cache, mixed) = mix(own, x2, *operands, cache)
        x1 = x1 + y.astype(x1.dtype)
        y, fed = feed(own, x1, *operands)
        return (x1, x2 + y.astype(x2.dtype)), (cache, {**mixed, **fed})

    return layer


def _numbers(count: int, first: Any) -> jax.Array:
    return jnp.arange(count, dtype=jnp.uint32) + jnp.asarray(first, jnp.uint32)


def _each(layers: Sequence[Layer], x: Any, slices: Sequence[Any]) -> tuple[Any, list[tuple[Any, Aux]]]:
    """The first layers, one by one."""
    ends = []
    for i, own in enumerate(slices):
        x, end = layers[i % len(layers)](x, own)
        ends.append(end)
    return x, ends


def _summed(aux: Aux) -> Aux:
    """Over layers, along which it is stacked."""
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), aux)


def _total(reports: Sequence[Aux]) -> Aux:
    """What several layers report, added up name by name; not all report the same."""
    total: dict[str, Any] = {}
    for name, pair in ((name, pair) for aux in reports for name, pair in aux.items()):
        total[name] = pair if name not in total else tuple(map(jnp.add, total[name], pair))
    return total
