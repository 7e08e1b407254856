"""The layers of a model one by one, and the model of other layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.models.stacks.layer_forms import PROJECTION_FIELDS, build_mixers
from hpnlp.models.stacks.layer_stack import layer_axes
from hpnlp.models.variables import BUFFERS
from hpnlp.nn.block import BlockConfig
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.models.backbone import BackboneConfig

# Fields of a Block that pruning changes. Everything else is the same in all layers of a form.
WIDTHS = ("heads", "kv_heads", "mlp_dim", "mlp")


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
      form: Its Block.
      variables: Its parameters under "params", and its buffers under "buffers" if it has any.
      axes: Logical axes of the variables, a tree like them.
    """

    form: BlockConfig
    variables: Mapping[str, Any]
    axes: Mapping[str, Any]


def split_layers(config: BackboneConfig, weights: PyTree) -> list[Layer]:
    """The layers of a model.

    Args:
      config: Config of the model, a `BackboneConfig` with at least one layer.
      weights: Weights of the model.

    Returns:
      The layers, from the first to the last.

    Raises:
      InputError: The model is not a single Backbone with layers.
    """
    check_single_stack(config)
    forms, order = config.forms(), config.stack_order()
    collections = {"params": weights["layers"]}
    if "layers" in weights.get(BUFFERS, {}):
        collections[BUFFERS] = weights[BUFFERS]["layers"]
    stacks = order.by_stack(collections)
    axes = layer_axes(forms, config.layers, config.mask, config.fixed_length() or 1)
    result = []
    for index in range(config.layers):
        name = order.names[index % order.period]
        of_layer = jax.tree.map(lambda names: names[1:], axes[name], is_leaf=lambda x: isinstance(x, tuple))
        result.append(Layer(forms[index % len(forms)], order.layer(stacks, index), of_layer))
    return result


def join_layers(config: Any, weights: Any, layers: Sequence[Layer]) -> tuple[Any, Any]:
    """Makes a model of the given layers.

    Args:
      config: Config of the model that the layers were taken from.
      weights: Weights of that model; all but the layers are kept.
      layers: The layers, whose forms may differ in heads, kv_heads, head_dim, mlp_dim and the number of experts.

    Returns:
      `(config, weights)` of the model with these layers.

    Raises:
      InputError: There are no layers.
    """
    if not layers:
        raise InputError("all layers would be removed: keep at least one")
    new_config = _with_forms(config, [layer.form for layer in layers])
    order, stacks = new_config.stack_order(), {}
    for name in order.stack_names:
        members = [layers[i].variables for i in order.members(name, len(layers))]
        stacks[name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    result = {**weights, "layers": order.join({name: stack["params"] for name, stack in stacks.items()})}
    with_buffers = {name: stack[BUFFERS] for name, stack in stacks.items() if BUFFERS in stack}
    if with_buffers:
        result[BUFFERS] = {**weights[BUFFERS], "layers": order.join(with_buffers)}
    return new_config, result


def check_single_stack(config: BackboneConfig) -> None:
    """Checks that a model has layers that can be pruned.

    Args:
      config: Config of the model.

    Raises:
      InputError: It has none, or several Backbones.
    """
    if not config.is_single_stack:
        raise InputError(
            f"a model of {type(config).__name__} with {config.layers} layers is not one stack of layers, whose "
            "heads, columns and layers could be removed: use stages that change matrices only, such as int8, or filters(0.5) "
            "for convolutions of images"
        )


def _with_forms(config: Any, forms: Sequence[BlockConfig]) -> Any:
    """The config of a model whose layers have these forms."""
    first = forms[0]
    shared = {name: getattr(first, name) for name in WIDTHS}
    entries, mixers = [], []
    for form in forms:
        arguments = ", ".join(f"{name}={value!r}" for name, value in _changed(config, first, form).items())
        entries.append(f"block({arguments})" if arguments else "block")
        mixers.append(str(form.mixer))
    sizes = _period(entries), _period(mixers)
    if math.lcm(*sizes) > len(forms):  # a period of the model is at most its number of layers
        sizes = len(forms), len(forms)
    return dataclasses.replace(
        config,
        layers=len(forms),
        head_dim=config.head_size,
        form=join_entries(entries[: sizes[0]]),
        mixer=join_entries(mixers[: sizes[1]]),
        **shared,
    )


def _changed(config: Any, first: BlockConfig, form: BlockConfig) -> dict[str, Any]:
    """Field -> value, where a layer differs from the model's Block, which has the widths of the first layer."""
    defaults = {field.name: getattr(config, field.name) for field in dataclasses.fields(BlockConfig)}
    defaults |= {name: getattr(first, name) for name in WIDTHS} | {"head_dim": config.head_size}
    # The size of a layer's heads is written out, because it would otherwise follow from their new number.
    values = {name: getattr(form, name) for name in defaults} | {"head_dim": form.head_size}
    skipped = {"mixer", "dropout", "dim", "memory_dim", "norm_placement"}
    (mixer,) = build_mixers(str(form.mixer))
    if not mixer.needs:  # without projections, these fields have no effect, and a form may not set them
        skipped.update(PROJECTION_FIELDS)
    return {name: values[name] for name, value in defaults.items() if name not in skipped and values[name] != value}


def _period(entries: Sequence[str]) -> int:
    """Length of the shortest period of the entries."""
    return next(n for n in range(1, len(entries) + 1) if all(entries[i] == entries[i % n] for i in range(len(entries))))


def join_entries(entries: Sequence[str]) -> str:
    """Joins entries to the spec of a list.

    Args:
      entries: Specs of its entries, without repeats.

    Returns:
      The spec, in which equal neighbours are one entry with a repeat.
    """
    runs: list[tuple[str, int]] = []
    for entry in entries:
        if runs and runs[-1][0] == entry:
            runs[-1] = entry, runs[-1][1] + 1
        else:
            runs.append((entry, 1))
    return ",".join(entry + (f"*{count}" if count > 1 else "") for entry, count in runs)
