"""Stages that add units which compute next to nothing to a trained model, so that their removal is free."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.compress.layers import Layer, join_layers, split_layers
from hpnlp.compress.stages import Calibration, Stage
from hpnlp.types import REQUIRED, option

IDLE = 1e-6  # weights that lead from added units to the residual stream, over those of other units


@dataclasses.dataclass(frozen=True)
class AddColumns(Stage):
    """Adds columns, whose output weights are nearly 0, to feed-forward networks that are not gated."""

    width: int = option(REQUIRED, "Columns of the larger networks.")

    def compress(self, config: Any, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        return join_layers(config, weights, [self._widened(layer) for layer in split_layers(config, weights)])

    def _widened(self, layer: Layer) -> Layer:
        leaves, structure = jax.tree.flatten(layer.variables["params"])
        axes = jax.tree.leaves(layer.axes["params"], is_leaf=lambda x: isinstance(x, tuple))
        larger = [
            _extended(leaf, names, self.width, seed)
            for seed, (leaf, names) in enumerate(zip(leaves, axes, strict=True))
        ]
        variables = {**layer.variables, "params": jax.tree.unflatten(structure, larger)}
        return Layer(dataclasses.replace(layer.form, mlp_dim=self.width), variables, layer.axes)


def _extended(leaf: jax.Array, names: tuple[str | None, ...], width: int, seed: int) -> jax.Array:
    """An array with as many columns: random ones, which are nearly 0 in the matrix that reads them."""
    if "mlp" not in names:
        return leaf
    axis = names.index("mlp")
    shape = (*leaf.shape[:axis], width - leaf.shape[axis], *leaf.shape[axis + 1 :])
    scale = jnp.std(leaf) * (IDLE if axis == 0 and leaf.ndim > 1 else 1.0)
    return jnp.concatenate([leaf, scale * jax.random.normal(jax.random.key(seed), shape, leaf.dtype)], axis)


@dataclasses.dataclass(frozen=True)
class AddLayers(Stage):
    """Adds layers after the first one, whose weights are nearly 0."""

    count: int = option(REQUIRED, "Number of layers to add.")

    def compress(self, config: Any, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        first, *others = split_layers(config, weights)
        idle = dataclasses.replace(first, variables=jax.tree.map(lambda x: IDLE * x, first.variables))
        return join_layers(config, weights, [first, *[idle] * self.count, *others])
