"""Results of layers beside their hidden states, and the optional parts of mixers and feed-forward networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from hpnlp.types import InputError, WithBuffers, WithStatistics

CARRY = "carry"  # the collection of variables that layers read, and `LayerReport.carry` replaces


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerReport:
    """Results of layers beside their hidden states.

    Attributes:
      aux: Losses and metrics, as (sum, weight); of several layers, summed over the layers.
      statistics: Sums over tokens, float32, by name; of a layer, by the name of their branch; of several layers, also by the
        name of their stack, and stacked `[n, ...]`.
      carry: Carry of the mixer for the tokens that follow, empty for none; of several layers, by the name of their stack and
        stacked `[n, B, ...]`.
      taps: Arrays that `nn.attention.Context.taps` asks for, `[B, T, ...]` by name; of several layers, by the name of their
        stack and stacked `[n, B, T, ...]`.
    """

    aux: Any = dataclasses.field(default_factory=dict)
    statistics: Any = dataclasses.field(default_factory=dict)
    carry: Any = dataclasses.field(default_factory=dict)
    taps: Any = dataclasses.field(default_factory=dict)

    def of_branch(self, branch: str) -> LayerReport:
        """The report with its statistics under the name of a branch.

        Args:
          branch: Name of the module of the branch in a Block, as "attention".

        Returns:
          The report of the branch, as a part of that of a layer.
        """
        return dataclasses.replace(self, statistics={branch: self.statistics} if self.statistics else {})

    def merged(self, other: LayerReport) -> LayerReport:
        """Joins the reports of two branches of a layer.

        Args:
          other: Report of the other branch, which has no carry.

        Returns:
          The report with the names of both.

        Raises:
          InputError: Both have a loss or metric of the same name.
        """
        if twice := self.aux.keys() & other.aux.keys():
            raise InputError(f"two branches of a layer report {', '.join(sorted(twice))}: rename it in one of the two")
        carry = self.carry if jax.tree.leaves(self.carry) else other.carry  # an array has no truth value
        return LayerReport(
            {**self.aux, **other.aux}, {**self.statistics, **other.statistics}, carry, {**self.taps, **other.taps}
        )


def statistic_axes(module: object) -> Mapping[str, tuple[str | None, ...]]:
    """Statistics that a mixer or feed-forward network returns.

    A statistic with an axis "heads", "kv_heads" or "mlp" holds sums for each of these heads or columns. One without is a
    function of the tokens, the same on all devices that have these tokens and different heads or columns.

    Args:
      module: The mixer or feed-forward network.

    Returns:
      Its attribute `statistic_axes`, the logical axes of each statistic by name; empty without such an attribute.
    """
    return module.statistic_axes if isinstance(module, WithStatistics) else {}


def has_state(module: object) -> bool:
    """Whether a mixer or feed-forward network returns statistics or changes buffers.

    Args:
      module: The mixer or feed-forward network.

    Returns:
      True if it has `statistic_axes` or the method `advance`.
    """
    return bool(statistic_axes(module)) or isinstance(module, WithBuffers)


def check_method(mixer: object, name: str, caller: str, fix: str) -> None:
    """Checks that a mixer's method and its `__call__` come from the same class.

    A subclass that changes `__call__` alone computes another function than the method that it inherits.

    Args:
      mixer: The mixer.
      name: Name of the method that is about to be called in place of `__call__`.
      caller: Caller of the method, for the message.
      fix: Remedy for the user, for the message.

    Raises:
      InputError: The mixer has no such method, or takes it from another class than `__call__`.
    """
    bases = type(mixer).__mro__
    of_call, of_method = (next((base for base in bases if method in vars(base)), None) for method in ("__call__", name))
    if of_method is None:
        raise InputError(f"{type(mixer).__name__} has no `{name}`, which {caller} calls: {fix}")
    if of_call is not of_method:
        called = "none" if of_call is None else of_call.__name__
        raise InputError(
            f"{type(mixer).__name__} takes `{name}` from {of_method.__name__} and `__call__` from {called}, and {caller} "
            f"calls `{name}` alone: define both in one class, or {fix}"
        )
