"""Layers with reversible residuals, whose backward pass recomputes activations from the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.nn.stack import Layer, indexed_stacks, join_reports
from hpnlp.ops.helpers.stacks import StackOrder, layer_count
from hpnlp.ops.reversible import reversible

# The two streams of a reversible stack.
Streams = tuple[jax.Array, jax.Array]
# The branches (mix, feed) of a reversible layer: mix((parameters, index), x, *operands[, cache]) -> (y, (cache or None,
# report)), and feed((parameters, index), x, *operands) -> (y, report).
BranchPair = tuple[
    Callable[..., tuple[jax.Array, tuple[Any, LayerReport]]], Callable[..., tuple[jax.Array, LayerReport]]
]


def run_reversible_layers(
    branches: Sequence[BranchPair],
    x: Streams,
    params: PyTree,
    operands: tuple[Any, ...],
    first: ArrayLike = 0,
    order: StackOrder | None = None,
) -> tuple[Streams, LayerReport]:
    """Runs a stack of reversible layers, whose backward pass recomputes activations from the output.

    Args:
      branches: The branches of each form, of one period.
      x: The two streams.
      params: Parameters of all layers, stacked on a first axis; with `order`, a dict of stacks by name.
      operands: Passed to every branch.
      first: Index of the first layer, which has the first form.
      order: The stack that holds the layers of each form; None for a single one.

    Returns:
      `(x, report)` of all layers.
    """
    stacks, order = indexed_stacks(params, first, order, len(branches))
    x1, x2, reports = reversible(branches, stacks, *x, *operands, order=order)
    joined = [mix_report.merged(feed_report) for (_, mix_report), feed_report in reports]
    by_form, remaining = joined[: len(branches)], joined[len(branches) :]
    if layer_count(stacks) < len(branches):
        by_form, remaining = [], joined
    remaining = [jax.tree.map(lambda leaf: leaf[0], report) for report in remaining]
    return (x1, x2), join_reports(order, by_form, remaining)


def reversible_layer(branches: BranchPair, operands: tuple[Any, ...]) -> Layer:
    """A layer that computes in `run_layers`, with a cache, the same function as its branches in `run_reversible_layers`.

    Args:
      branches: (mix, feed).
      operands: Passed to both branches.

    Returns:
      The layer. Its backward pass keeps activations.
    """
    mix, feed = branches

    def layer(x: Streams, slices: tuple[Any, jax.Array, Any]) -> tuple[Streams, tuple[Any, LayerReport]]:
        (x1, x2), (*params_and_index, cache) = x, slices
        y, (cache, mix_report) = mix(params_and_index, x2, *operands, cache)
        x1 = x1 + y.astype(x1.dtype)
        y, feed_report = feed(params_and_index, x1, *operands)
        return (x1, x2 + y.astype(x2.dtype)), (cache, mix_report.merged(feed_report))

    return layer
