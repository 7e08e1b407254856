"""Structured pruning: heads, columns of feed-forward networks, experts and layers are removed from the arrays.

References:
  Michel et al. 2019, "Are sixteen heads really better than one?", eq. 2: importance |weight x gradient|.
  Sanh et al. 2019, "DistilBERT", section 3: every second layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from hpnlp.compress.layers import Layer
from hpnlp.compress.matrices import EXPERTS, KERNELS
from hpnlp.compress.stages.experts import with_fewer_experts
from hpnlp.nn.block import BlockConfig
from hpnlp.types import AnyArray, InputError

# Logical axes of the units of a kind, with the field of a Block that counts each.
UNITS = {
    "heads": {"kv_heads": "kv_head_count", "heads": "heads"},
    "mlp": {"mlp": "mlp_size"},
    "experts": {"experts": "expert_count", "router": "expert_count"},
}


def importance(layer: Layer, unit: str, gradients: PyTree = None) -> np.ndarray:
    """Importance of each unit of a layer.

    Args:
      layer: The layer.
      unit: "heads" (groups of heads that share a key head), "mlp" (columns of the feed-forward network), or "experts".
      gradients: Gradients of the loss, a tree like the layer's parameters; None for the magnitude of the weights.

    Returns:
      float64 [units]: the sum over the unit's parameters of |weight x gradient|, or of squared weights.
    """
    total = 0.0
    params, axes = layer.variables["params"], layer.axes["params"]
    leaves = jax.tree.leaves(params)
    slopes = [None] * len(leaves) if gradients is None else jax.tree.leaves(gradients)
    count = unit_count(layer, unit)
    for names, leaf, slope in zip(_leaf_axes(axes), leaves, slopes, strict=True):
        for axis in (i for i, name in enumerate(names) if name in UNITS[unit]):
            scores = (
                np.asarray(leaf, np.float64) ** 2 if slope is None else np.abs(np.float64(leaf) * np.float64(slope))
            )
            by_unit = np.moveaxis(scores, axis, 0).reshape(count, -1)
            total = total + by_unit.sum(axis=1)
    return np.asarray(total)


def unit_count(layer: Layer, unit: str) -> int:
    """Number of units of a layer.

    Args:
      layer: The layer.
      unit: As for `importance`.

    Returns:
      The number: of key heads, columns or experts; 0 for a layer without such units.
    """
    first = next(iter(UNITS[unit]))
    has_units = any(set(names) & set(UNITS[unit]) for names in _leaf_axes(layer.axes["params"]))
    return getattr(layer.form, UNITS[unit][first]) if has_units else 0


def keep_units(layer: Layer, unit: str, kept: Sequence[int] | np.ndarray) -> Layer:
    """Removes units from a layer.

    Args:
      layer: The layer.
      unit: As for `importance`.
      kept: Indices of the units that stay, ascending.

    Returns:
      The smaller layer. Its output is that of the layer in which the weights of the other units are 0.

    Raises:
      InputError: Nothing would be left.
    """
    if not len(kept):
        raise InputError(
            f"all {unit} of a layer would be removed: keep at least one, or remove the layer with layers(...)"
        )
    count = unit_count(layer, unit)

    def select(names: tuple[str | None, ...], leaf: AnyArray) -> Any:
        for axis, name in enumerate(names):
            if name in UNITS[unit]:
                shape = leaf.shape
                split = leaf.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])
                leaf = jnp.take(split, jnp.asarray(kept), axis=axis)
                leaf = leaf.reshape(*shape[:axis], -1, *shape[axis + 1 :])
        return leaf

    variables = {
        name: jax.tree.unflatten(
            jax.tree.structure(tree),
            [select(*pair) for pair in zip(_leaf_axes(layer.axes[name]), jax.tree.leaves(tree), strict=True)],
        )
        for name, tree in layer.variables.items()
    }
    return Layer(_with_units(layer.form, unit, len(kept)), variables, layer.axes)


def _with_units(form: BlockConfig, unit: str, count: int) -> BlockConfig:
    """The form with another number of units."""
    if unit == "experts":
        return with_fewer_experts(form, count)
    if unit == "mlp":
        return dataclasses.replace(form, mlp_dim=count)
    groups = form.heads // form.kv_head_count
    key_heads = count if groups > 1 else 0
    return dataclasses.replace(form, heads=groups * count, kv_heads=key_heads, head_dim=form.head_size)


def choose_units(scores: Sequence[np.ndarray], fraction: int | float, *, across_layers: bool) -> list[np.ndarray]:
    """The units that stay.

    Args:
      scores: Importance of the units of each layer.
      fraction: Share of the units that stay, in (0, 1].
      across_layers: The most important units of all layers together stay, and at least one of each layer; otherwise the same
        share of each layer.

    Returns:
      Ascending indices of each layer's units.
    """
    if not across_layers:
        return [_best(layer, max(1, round(fraction * len(layer)))) for layer in scores]
    # Scores of layers differ in scale, so that they are divided by the norm of the layer (Michel et al. 2019, section 3).
    scaled = [layer / max(np.linalg.norm(layer), 1e-30) for layer in scores]
    first = [_best(layer, 1) for layer in scaled]
    ranked = [(value, i, j) for i, layer in enumerate(scaled) for j, value in enumerate(layer) if j not in first[i]]
    total = max(len(scores), round(fraction * sum(map(len, scores))))
    chosen = sorted(ranked, reverse=True)[: total - len(scores)]
    return [np.sort([*first[i], *(j for _, layer, j in chosen if layer == i)]).astype(int) for i in range(len(scores))]


def kernels_only(layer: Layer) -> Layer:
    """Sets all parameters of a layer but kernels and the matrices of experts, such as biases, to 0.

    A unit whose kernels are 0 has no effect, whatever its biases are.

    Returns:
      The layer.
    """

    def kept(path: KeyPath, leaf: PyTree) -> Any:
        return leaf if path[-1].key in (*KERNELS, *EXPERTS) else jnp.zeros_like(leaf)

    params = jax.tree_util.tree_map_with_path(kept, layer.variables["params"])
    return dataclasses.replace(layer, variables={**layer.variables, "params": params})


def has_weights(layer: Layer) -> bool:
    """Whether a kernel of a layer, or a matrix of its experts, has a number other than 0.

    Returns:
      False for a layer that passes its input on, up to biases.
    """
    leaves = jax.tree_util.tree_leaves_with_path(layer.variables["params"])
    return any(bool(jnp.any(leaf != 0)) for path, leaf in leaves if path[-1].key in (*KERNELS, *EXPERTS))


def nonzero_units(squares: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The units with a weight other than 0; the first unit of a layer that has no such unit.

    Args:
      squares: Sums of squared weights of the units of each layer.

    Returns:
      Ascending indices of each layer's units.
    """
    return [np.flatnonzero(layer) if layer.any() else np.zeros(1, int) for layer in squares]


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def _leaf_axes(axes: Any) -> list[tuple[str | None, ...]]:
    return jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
