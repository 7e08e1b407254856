"""Layers whose forms repeat with a period, over stacked or separate parameters.

L layers have one or more forms, such as two mixers in turn: layer i has the form `layers[i % period]`. Forms with equal
parameters share a stack of parameters (`ops.helpers.stacks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.ops.helpers.stacks import StackOrder, layer_count, single_stack
from hpnlp.types import Aux

# (x, (parameters, index of the layer, cache or None)) -> (x, (cache or None, report)); x is an array, or a tree of arrays.
Layer = Callable[[Any, tuple[Any, jax.Array, Any]], tuple[Any, tuple[Any, LayerReport]]]


def run_layers(
    layers: Sequence[Layer],
    x: PyTree,
    params: PyTree,
    caches: PyTree,
    unroll: int,
    first: ArrayLike = 0,
    order: StackOrder | None = None,
) -> tuple[Any, Any, LayerReport]:
    """Runs a stack of layers.

    Stacked parameters run as a loop over periods, with the layers of a period one after another in its body, and the layers
    of the last, incomplete period after the loop. Separate parameters run layer by layer.

    Args:
      layers: The forms of the layers, of one period.
      x: Input of the first layer, an array or a tree of arrays.
      params: Parameters of all layers, stacked on a first axis; with `order`, a dict of stacks by name. Or a tuple of one
          tree per layer.
      caches: None, or caches that an earlier call returned. For separate parameters, a tuple of one cache per layer. For
          stacked ones, `(by form, remaining)`: for each form, its caches stacked over periods; and one cache for each layer
          after the loop.
      unroll: Number of layers in one iteration of the loop, rounded up to complete periods; 0 for all layers.
      first: Index of the first layer, which has the first form.
      order: The stack that holds the layers of each form; None for a single one.

    Returns:
      `(x, caches, report)` of all layers.
    """
    if isinstance(params, tuple):
        return _run_separate(layers, x, params, caches, first, order or single_stack(len(layers)))
    stacks, order = indexed_stacks(params, first, order, len(layers))
    count, period = layer_count(stacks), len(layers)
    looped = count - count % period
    caches_by_form, remaining_caches = caches or ((None,) * period, (None,) * (count % period))

    def run_period(x: Any, slices: tuple[Any, Any]) -> tuple[Any, Any]:
        params_and_indices, caches = slices
        results = []
        for i, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            x, result = layer(x, (*order.layer_of_period(params_and_indices, i), cache))
            results.append(result)
        return x, results

    slices = order.by_period(stacks, count // period)
    x, of_periods = lax.scan(run_period, x, (slices, caches_by_form), unroll=-(-(unroll or count) // period))

    remaining = []
    slices = [(*order.layer(stacks, i), cache) for i, cache in zip(range(looped, count), remaining_caches, strict=True)]
    for layer, layer_slice in zip(layers, slices, strict=False):
        x, result = layer(x, layer_slice)
        remaining.append(result)
    caches = tuple(tuple(cache for cache, _ in results) for results in (of_periods, remaining))
    return x, caches, join_reports(order, *([report for _, report in results] for results in (of_periods, remaining)))


def _run_separate(
    layers: Sequence[Layer], x: PyTree, params: tuple[Any, ...], caches: PyTree, first: ArrayLike, order: StackOrder
) -> tuple[Any, Any, LayerReport]:
    """`run_layers` with separate parameters."""
    indices = _layer_indices(range(len(params)), first)
    results = []
    for i, layer_params in enumerate(params):
        x, result = layers[i % len(layers)](x, (layer_params, indices[i], caches and caches[i]))
        results.append(result)
    return x, tuple(cache for cache, _ in results), join_reports(order, [], [report for _, report in results])


def indexed_stacks(params: Any, first: Any, order: StackOrder | None, period: int) -> tuple[dict[str, Any], StackOrder]:
    """`(stacks, order)`: pairs of the parameters and the indices of the layers of each stack."""
    order, params = (single_stack(period), {"all": params}) if order is None else (order, params)
    count = layer_count(params)
    return {name: (stack, _layer_indices(order.members(name, count), first)) for name, stack in params.items()}, order


def _layer_indices(layers: Sequence[int], first: ArrayLike) -> jax.Array:
    """Indices of layers in the model, from those in a part of it that begins with the layer `first`."""
    is_range = list(layers) == list(range(len(layers)))
    indices = jnp.arange(len(layers), dtype=jnp.uint32) if is_range else jnp.asarray(layers, jnp.uint32)
    return indices + jnp.asarray(first, jnp.uint32)


def join_reports(order: StackOrder, by_form: Sequence[LayerReport], remaining: Sequence[LayerReport]) -> LayerReport:
    """The report of all layers, from those of the forms, stacked over periods, and those of the layers after them."""
    aux = _sum_by_name([*(_sum_over_layers(report.aux) for report in by_form), *(report.aux for report in remaining)])
    statistics = [[report.statistics for report in reports] for reports in (by_form, remaining)]
    carries = [[report.carry for report in reports] for reports in (by_form, remaining)]
    taps = [[report.taps for report in reports] for reports in (by_form, remaining)]
    return LayerReport(aux, *(order.stack_layers(*results) for results in (statistics, carries, taps)))


def _sum_over_layers(aux: Aux) -> Aux:
    """Sums over the first axis, along which layers are stacked."""
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), aux)


def _sum_by_name(reports: Sequence[Aux]) -> Aux:
    """Sums the (sum, weight) pairs of each name; a name may be missing in some of the reports."""
    total: dict[str, Any] = {}
    for name, pair in ((name, pair) for aux in reports for name, pair in aux.items()):
        total[name] = pair if name not in total else tuple(map(jnp.add, total[name], pair))
    return total
