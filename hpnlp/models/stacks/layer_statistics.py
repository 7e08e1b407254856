"""Statistics of a model's layers, and the auxiliary losses and buffers that are functions of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.models.shared.model import BaseModel
from hpnlp.models.stacks.layer_forms import branch_modules
from hpnlp.types import Aux, Statistics

if TYPE_CHECKING:
    from hpnlp.models.backbone import BackboneConfig

# Place of a module's buffers among those of its layer, by the name of its branch.
PLACES = {"attention": ("attention", "mixer"), "mlp": ("mlp",)}


def from_report(config: Any, report: LayerReport) -> Statistics:
    """The statistics of a Backbone.

    Args:
      config: Config of the Backbone.
      report: Report of its layers.

    Returns:
      Under "layers", the statistics `[L, ...]` of each layer by branch and name; by the name of the stack, branch and name if
      layers have several stacks. Empty without statistics.
    """
    return {"layers": config.stack_order().join(report.statistics)} if report.statistics else {}


def auxiliary_loss(config: BackboneConfig, statistics: Statistics) -> dict[str, jax.Array]:
    """Auxiliary losses of a Backbone's mixers and feed-forward networks.

    Args:
      config: Config of the Backbone.
      statistics: As `from_report` returns them, summed over the whole batch.

    Returns:
      Name -> the mean of the loss over the modules that report it, float32.
    """
    if not statistics:
        return {}
    losses: dict[str, list[jax.Array]] = {}
    for stack, branches in config.stack_order().split(statistics["layers"]).items():
        modules = _modules(config, stack)
        for branch, sums in branches.items():
            for name, values in jax.vmap(modules[branch].auxiliary_loss)(sums).items():
                losses.setdefault(name, []).append(values)
    return {name: jnp.mean(jnp.concatenate(values)) for name, values in losses.items()}


def advance(config: BackboneConfig, buffers: PyTree, statistics: Statistics, step: jax.Array, rng: jax.Array) -> Any:
    """Buffers of a Backbone for the next step, from the `advance` of each layer's mixer and feed-forward network.

    Args:
      config: Config of the Backbone.
      buffers: Its buffers.
      statistics: As `from_report` returns them, summed over the whole batch.
      step: Number of steps done, int32.
      rng: Key; each layer and branch folds in its index.

    Returns:
      A tree like `buffers`.
    """
    order = config.stack_order()
    sums, stacks = order.split(statistics.get("layers", {})), order.split(buffers["layers"])
    for stack in stacks:
        members = jnp.asarray(order.members(stack, config.layers), jnp.uint32)
        for index, (branch, module) in enumerate(_modules(config, stack).items()):
            held, place = stacks[stack], PLACES[branch]
            own_buffers = functools.reduce(lambda tree, key: tree.get(key, {}), place, held)
            if own_buffers:
                key = jax.random.fold_in(rng, index)
                rngs = jax.vmap(functools.partial(jax.random.fold_in, key))(members)
                of_layers = jax.vmap(module.advance, in_axes=(0, 0, None, 0))
                new = of_layers(own_buffers, sums.get(stack, {}).get(branch, {}), step, rngs)
                stacks[stack] = _replaced(held, place, new)
    return {**buffers, "layers": order.join(stacks)}


class OfSeveralStacks(BaseModel):
    """Statistics of models that consist of several Backbones, which are their submodules.

    Attributes:
      config: Config of the model. Its method `stacks` returns the configs of the Backbones by the names of the submodules.
      prefixes: For each submodule, the beginning of the names of its losses and metrics.
    """

    config: Any
    prefixes: ClassVar[Mapping[str, str]]

    def join_reports(self, reports: Mapping[str, LayerReport]) -> tuple[Aux, Statistics]:
        """Joins the reports of the Backbones.

        Args:
          reports: The report of the layers of each submodule.

        Returns:
          `(aux, statistics)` of the model.
        """
        aux, statistics = {}, {}
        for name, report in reports.items():
            aux |= {f"{self.prefixes[name]}{key}": pair for key, pair in report.aux.items()}
            if sums := from_report(getattr(self, name).config, report):
                statistics[name] = sums
        return aux, statistics

    def auxiliary_loss(self, statistics: Statistics) -> dict[str, jax.Array]:
        """Auxiliary losses of the layers of all Backbones.

        Args:
          statistics: As `join_reports` returns them, summed over the whole batch.

        Returns:
          Name, with the prefix of the submodule -> float32 scalar.
        """
        return {
            f"{self.prefixes[stack]}{name}": value
            for stack, config in self.config.stacks().items()
            for name, value in auxiliary_loss(config, statistics.get(stack, {})).items()
        }

    def advance(self, buffers: PyTree, statistics: Statistics, step: jax.Array, rng: jax.Array) -> Any:
        """Buffers for the next step.

        Args:
          buffers: The model's buffers, by submodule.
          statistics: As for `auxiliary_loss`.
          step: Number of steps done, int32.
          rng: Key.

        Returns:
          A tree like `buffers`.
        """
        new = dict(buffers)
        for index, (name, config) in enumerate(self.config.stacks().items()):
            if name in buffers:
                key = jax.random.fold_in(rng, index)
                new[name] = advance(config, buffers[name], statistics.get(name, {}), step, key)
        return new


def _modules(config: BackboneConfig, stack: str) -> dict[str, Any]:
    """The modules of the layers of a stack, by branch."""
    return branch_modules(config.forms()[config.stack_order().names.index(stack)])


def _replaced(tree: Mapping[str, Any], place: tuple[str, ...], new: PyTree) -> Any:
    """Nested dicts with another value at a place."""
    return {**tree, place[0]: _replaced(tree[place[0]], place[1:], new)} if place else new
