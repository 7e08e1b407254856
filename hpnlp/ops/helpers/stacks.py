"""Stacks of the parameters of layers that take several forms in turn.

Layer i of a model with p forms has the form i % p. A stack holds, on the first axis of its arrays, all layers of one or more of
the forms, in the order of the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.types import AnyArray


@dataclasses.dataclass(frozen=True)
class StackOrder:
    """The stack that holds each layer of a model.

    Attributes:
      names: For each form of a period, the name of the stack that holds the layers of that form.
    """

    names: tuple[str, ...]

    @property
    def period(self) -> int:
        """Number of forms that layers take in turn."""
        return len(self.names)

    @property
    def stack_names(self) -> list[str]:
        """Name of each stack, in the order of their first layers."""
        return list(dict.fromkeys(self.names))

    def members(self, name: str, count: int) -> list[int]:
        """Indices of the layers in a stack.

        Args:
          name: Name of the stack.
          count: Number of layers of the model.

        Returns:
          The indices, ascending.
        """
        return [i for i in range(count) if self.names[i % self.period] == name]

    def layer(self, stacks: Mapping[str, Any], index: int) -> Any:
        """Selects a layer of the model.

        Args:
          stacks: Trees of arrays `[n, ...]` by the names of the stacks.
          index: Index of the layer, static.

        Returns:
          The arrays of the layer.
        """
        name, place = self.place(index)
        return jax.tree.map(lambda leaf: leaf[place], stacks[name])

    def place(self, index: int) -> tuple[str, int]:
        """Finds a layer of the model in the stacks.

        Args:
          index: Index of the layer.

        Returns:
          `(name of the stack, index of the layer on its first axis)`.
        """
        name, periods = self.names[index % self.period], index // self.period
        return name, periods * self.names.count(name) + self._place(index % self.period)

    def by_period(self, stacks: Mapping[str, Any], periods: int) -> dict[str, Any]:
        """Reshapes stacks for a loop over periods.

        Args:
          stacks: Trees of arrays `[n, ...]` by the names of the stacks.
          periods: Number of complete periods, Q.

        Returns:
          Arrays `[Q, m, ...]` without the layers of an incomplete period, where m is the stack's number of layers in one
          period; `[Q, ...]` for stacks of one layer in a period.
        """
        sizes = {name: self.names.count(name) for name in stacks}
        return {
            name: jax.tree.map(functools.partial(_by_period, periods=periods, size=sizes[name]), stack)
            for name, stack in stacks.items()
        }

    def layer_of_period(self, slices: Mapping[str, Any], form: int) -> Any:
        """Selects a layer of one period.

        Args:
          slices: One period of the result of `by_period`.
          form: Index of the layer within the period.

        Returns:
          The arrays of the layer.
        """
        stack, place = slices[self.names[form]], self._place(form)
        return stack if self.names.count(self.names[form]) == 1 else jax.tree.map(lambda leaf: leaf[place], stack)

    def period_of_layers(self, layers: Sequence[Any]) -> dict[str, Any]:
        """The inverse of `layer_of_period`.

        Args:
          layers: The arrays of each layer of a period.

        Returns:
          Stacks of these layers, in the form of one period of the result of `by_period`.
        """
        result = {}
        for stack_name in self.stack_names:
            trees = [layer for name, layer in zip(self.names, layers, strict=True) if name == stack_name]
            result[stack_name] = trees[0] if len(trees) == 1 else jax.tree.map(lambda *x: jnp.stack(x), *trees)
        return result

    def remaining(self, stacks: Mapping[str, Any], periods: int, count: int) -> tuple[StackOrder, dict[str, Any]]:
        """The layers after the complete periods, as a model of one period.

        Args:
          stacks: Trees of arrays `[n, ...]` by the names of the stacks.
          periods: Number of complete periods.
          count: Number of layers after them, less than a period.

        Returns:
          `(order, stacks)` of these layers.
        """
        order = StackOrder(self.names[:count])
        starts = {name: periods * self.names.count(name) for name in order.stack_names}
        return order, {
            name: jax.tree.map(lambda leaf, start=start: leaf[start:], stacks[name]) for name, start in starts.items()
        }

    def stack_layers(self, by_form: Sequence[Any], remaining: Sequence[Any]) -> dict[str, Any]:
        """Stacks results of layers in the order of the model.

        Args:
          by_form: For each form of a period, a tree of arrays `[Q, ...]` of its layers in the Q complete periods; or empty.
          remaining: A tree of arrays for each layer after the complete periods.

        Returns:
          Trees of arrays `[n, ...]` by the name of the stack; stacks whose trees have no arrays are left out.
        """
        result = {}
        for stack_name in self.stack_names:
            periods = []
            trees = [tree for name, tree in zip(self.names, by_form, strict=False) if name == stack_name]
            if trees:
                periods.append(jax.tree.map(_interleave, *trees))
            trees = [tree for i, tree in enumerate(remaining) if self.names[i % self.period] == stack_name]
            if trees:
                periods.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees))
            if jax.tree.leaves(periods):
                result[stack_name] = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *periods)
        return result

    def split(self, tree: PyTree) -> dict[str, Any]:
        """Stacks by name, from the form that a model's parameters have.

        Args:
          tree: The only stack, or a dict of several stacks by name.

        Returns:
          A dict of stacks by name.
        """
        return {self.names[0]: tree} if len(self.stack_names) == 1 else dict(tree)

    def join(self, stacks: Mapping[str, Any]) -> Any:
        """The inverse of `split`.

        Args:
          stacks: Stacks by name.

        Returns:
          The only stack, or a dict of several stacks by name.
        """
        return stacks[self.names[0]] if len(self.stack_names) == 1 else dict(stacks)

    def by_stack(self, collections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Groups collections of variables by stack.

        Args:
          collections: Name of a collection -> its stacks, as `join` returns them; a collection may lack stacks.

        Returns:
          Name of a stack -> name of a collection -> the stack.
        """
        split = {name: self.split(tree) for name, tree in collections.items()}
        return {
            stack: {name: stacks[stack] for name, stacks in split.items() if stack in stacks}
            for stack in self.stack_names
        }

    def _place(self, form: int) -> int:
        """Index of a form among the forms of a period that share its stack."""
        return self.names[:form].count(self.names[form])


def single_stack(period: int) -> StackOrder:
    """The order of a single stack that holds all layers.

    Args:
      period: Number of forms that layers take in turn.

    Returns:
      The order.
    """
    return StackOrder(("all",) * period)


def layer_count(stacks: Mapping[str, Any]) -> int:
    """Number of layers in all stacks.

    Args:
      stacks: Trees of arrays `[n, ...]` by the names of the stacks.

    Returns:
      The sum of the sizes of the first axes.
    """
    return sum(jax.tree.leaves(stack)[0].shape[0] for stack in stacks.values())


def _interleave(*leaves: jax.Array) -> jax.Array:
    """Layers `[Q m, ...]` in the order of the model, from those of m forms `[Q, ...]`."""
    return leaves[0] if len(leaves) == 1 else jnp.stack(leaves, 1).reshape(-1, *leaves[0].shape[1:])


def _by_period(leaf: AnyArray, periods: int, size: int) -> Any:
    """Layers `[Q, size, ...]` of Q complete periods; `[Q, ...]` for a size of 1."""
    leaf = leaf if periods * size == leaf.shape[0] else leaf[: periods * size]
    # With an axis of size 1, XLA chooses another layout, and copies the stack.
    return leaf if size == 1 else leaf.reshape(periods, size, *leaf.shape[1:])
