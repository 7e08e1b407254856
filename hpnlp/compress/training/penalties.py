"""Penalties that make weights exactly 0 in training: of single weights (lasso) and of the norms of groups (group lasso).

A penalty is applied after each update by its proximal operator, with the learning rate of the step as for decoupled weight
decay, so that optimizers with rates for each weight (Adam) keep statistics of the loss alone, and zeros are exact.

References:
  Tibshirani 1996, "Regression shrinkage and selection via the lasso".
  Yuan and Lin 2006, "Model selection and estimation in regression with grouped variables".
  Wen et al. 2016, "Learning structured sparsity in deep neural networks", arXiv 1608.03665.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from hpnlp.compress.layers import check_single_stack
from hpnlp.compress.matrices import KERNELS
from hpnlp.compress.stages.structure import UNITS
from hpnlp.compress.training.training_technique import WeightTechnique
from hpnlp.models.stacks.layer_stack import layer_axes
from hpnlp.types import REQUIRED, InputError, option

if TYPE_CHECKING:
    from hpnlp.models.backbone import BackboneConfig

GROUPS = ("mlp", "heads", "layers", "columns", "rows")
_PREFIX = "layers"  # parameters of layers stand under names that begin with it


@dataclasses.dataclass(frozen=True)
class _Part:
    """The weights of the groups of one kernel.

    Attributes:
      path: Path of the kernel.
      axis: Axis along which its groups lie, -1 or -2; None for one group for each layer.
      count: Number of groups.
    """

    path: str
    axis: int | None
    count: int


@dataclasses.dataclass(frozen=True)
class LassoTechnique(WeightTechnique):
    """The sum of the magnitudes of the weights of all kernels as a penalty; more and more weights become exactly 0.

    Each weight of the kernels moves towards 0 by the same amount; a weight that is smaller becomes 0.
    """

    strength: int | float = option(
        REQUIRED,
        "Factor of the penalty: a weight moves by learning rate x strength towards 0 in each step. It leaves 0 in a step of "
        "the optimizer that is larger; those of Adam are up to about the learning rate.",
        above=0,
    )

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        return w

    def updates(
        self, config: BackboneConfig, kernels: Mapping[str, Any], updates: Mapping[str, Any], rate: ArrayLike
    ) -> dict[str, Any]:
        def step(w: Array, update: Array) -> Array:
            moved = w + update
            return jnp.sign(moved) * jnp.maximum(jnp.abs(moved) - rate * self.strength, 0.0) - w

        return {path: step(w, updates[path]) for path, w in kernels.items()}


@dataclasses.dataclass(frozen=True)
class GroupLassoTechnique(WeightTechnique):
    """The norms of groups of weights as a penalty, times the root of their sizes; whole groups become exactly 0.

    The stages `mlp`, `heads` and `layers` of recipes remove units that are 0 with the share "nonzero".
    """

    strength: int | float = option(
        REQUIRED,
        "Factor of the penalty: the root mean square of a group moves by learning rate x strength towards 0 in each step.",
        above=0,
    )
    groups: str = option(
        "mlp",
        "mlp for columns of the feed-forward networks, heads, layers (all kernels of a layer, which then passes its input on), "
        "columns or rows of each kernel by itself, such as filters and positions of windows of convolutions.",
        among=GROUPS,
    )

    def bind(self, w: Array, scores: PyTree, threshold: Array | None, rng: Array | None) -> Any:
        return w

    def updates(
        self, config: BackboneConfig, kernels: Mapping[str, Any], updates: Mapping[str, Any], rate: ArrayLike
    ) -> dict[str, Any]:
        result = dict(updates)
        for members in self._kernel_lists(config, kernels):
            moved = {part: _grouped(kernels[part.path] + updates[part.path], part) for part in members}
            squares: Any = sum(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1) for x in moved.values())
            size = sum(x.shape[-1] for x in moved.values())
            norms = jnp.sqrt(squares)  # [layers, groups]
            shrunk = jnp.maximum(norms - rate * self.strength * math.sqrt(size), 0.0)
            factors = shrunk / jnp.where(norms > 0, norms, 1.0)
            for part, x in moved.items():
                w = kernels[part.path]
                # The difference to w, so that the sum of both is exactly 0 for a group that vanishes.
                scaled = _ungrouped(x * factors[..., None].astype(x.dtype), part, w.shape)
                result[part.path] = scaled - w
        return result

    def _kernel_lists(self, config: Any, kernels: Mapping[str, Any]) -> Iterable[list[_Part]]:
        """The kernels of the groups: lists whose kernels share groups."""
        if self.groups in ("columns", "rows"):
            axis = -1 if self.groups == "columns" else -2
            return [[_Part(path, axis, w.shape[axis])] for path, w in kernels.items()]
        lists = unit_parts(config, self.groups, kernels)
        if not lists:
            raise InputError(
                f"train.weights: group_lasso(groups={self.groups!r}): the model's layers have no {self.groups}: choose "
                f"another of {', '.join(GROUPS)}"
            )
        return lists


def unit_parts(config: BackboneConfig, unit: str, kernels: Mapping[str, Any]) -> list[list[_Part]]:
    """The kernels of the units of layers.

    Args:
      config: Config of the model.
      unit: "heads", "mlp" or "layers", as for the stages of these names.
      kernels: Kernels by path.

    Returns:
      For each stack of layers, the kernels of which its units consist.

    Raises:
      InputError: The model is not one stack of layers.
    """
    check_single_stack(config)
    forms, order = config.forms(), config.stack_order()
    names = layer_axes(forms, config.layers, config.mask, config.fixed_length() or 1)
    by_stack: dict[str, list[_Part]] = {}
    for stack in order.stack_names:
        form = forms[order.names.index(stack) % len(forms)]
        # The place of the stack among the parameters.
        tree = order.join({name: names[name]["params"] if name == stack else None for name in order.stack_names})
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, tuple))
        for path, axes in leaves:
            name = "/".join([_PREFIX, *(str(key.key) for key in path)])
            if name.rsplit("/", 1)[-1] not in KERNELS or name not in kernels:
                continue
            if unit == "layers":
                by_stack.setdefault(stack, []).append(_Part(name, None, 1))
            for index in (i for i, axis in enumerate(axes) if axis in UNITS.get(unit, {})):
                count = getattr(form, next(iter(UNITS[unit].values())))
                by_stack.setdefault(stack, []).append(_Part(name, index - len(axes), count))
    return list(by_stack.values())


def _grouped(w: Array, part: _Part) -> Float[Array, "layers groups size"]:
    """The weights of each group."""
    layers = w.shape[0] if w.ndim == 3 else 1
    if part.axis is None:
        return w.reshape(layers, 1, -1)
    front = jnp.moveaxis(w.reshape(layers, *w.shape[-2:]), part.axis, 1)
    return front.reshape(layers, part.count, -1)


def _ungrouped(x: Array, part: _Part, shape: tuple[int, ...]) -> Array:
    """The inverse of `_grouped`, for kernels of a shape."""
    if part.axis is None:
        return x.reshape(shape)
    layers = shape[0] if len(shape) == 3 else 1
    matrix = shape[-2:] if part.axis == -2 else shape[:-3:-1]
    return jnp.moveaxis(x.reshape(layers, *matrix), 1, part.axis).reshape(shape)
