"""Collections of a model's variables: "params", which the optimizer changes, and "buffers", which `Model.advance` changes.

A third one, "carry", is not part of a model's weights: it holds what the sequences of a batch need of the batch before.

Functions that only apply a model take its weights: the parameters, and under the key BUFFERS the buffers, if the model has
some. A model without buffers has weights that are its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax

from hpnlp.layer_report import CARRY, statistic_axes
from hpnlp.types import InputError, Mixer, Model, Statistics

BUFFERS = "buffers"


def join(params: Any, buffers: Any) -> Any:
    """Weights of a model.

    Args:
      params: Parameters, a dict; or a tree like them, of shapes or shardings.
      buffers: Buffers, or a tree like them; None or empty if the model has none.

    Returns:
      The weights.
    """
    return {**params, BUFFERS: buffers} if buffers else params


def split(weights: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The inverse of `join`.

    Args:
      weights: Weights of a model.

    Returns:
      `(parameters, buffers)`; None for no buffers.
    """
    return {name: value for name, value in weights.items() if name != BUFFERS}, weights.get(BUFFERS)


def collections(weights: Mapping[str, Any], carry: Any = None) -> dict[str, Any]:
    """The variables that `Model.apply` takes.

    Args:
      weights: Weights of a model.
      carry: Carry of the batch before, or None.

    Returns:
      "params", and BUFFERS and CARRY if there are some.
    """
    params, buffers = split(weights)
    trees = {"params": params, BUFFERS: buffers, CARRY: carry}
    return {name: tree for name, tree in trees.items() if tree is not None}


def initial_carry(model: Model, batch_size: int) -> Any:
    """The carry before the first batch of a stream.

    Args:
      model: A model.
      batch_size: Sequences of a batch.

    Returns:
      The collection CARRY, `Model.initial_carry`; None for a model that carries nothing.
    """
    make = getattr(model, "initial_carry", None)
    return None if make is None else make(batch_size)


class WithoutStatistics:
    """Base of models whose layers have neither statistics nor buffers; `check_without_statistics` refuses those that have."""

    def auxiliary_loss(self, statistics: Statistics) -> dict[str, jax.Array]:
        """There are no auxiliary losses.

        Args:
          statistics: Empty.

        Returns:
          An empty dict.
        """
        return {}

    def advance(self, buffers: Any, statistics: Statistics, step: jax.Array, rng: jax.Array) -> Any:
        """Leaves buffers as they are.

        Args:
          buffers: Buffers of the model.
          statistics: Empty.
          step: Number of steps done.
          rng: Key.

        Returns:
          `buffers`.
        """
        return buffers


def check_without_statistics(mixers: Iterable[Mixer], model: str) -> None:
    """Checks that mixers have neither statistics nor buffers.

    Args:
      mixers: The mixers of a model.
      model: Name of the model, for the message.

    Raises:
      InputError: A mixer has statistics, or changes buffers.
    """
    for mixer in mixers:
        if statistic_axes(mixer) or hasattr(mixer, "advance"):
            raise InputError(
                f"model.mixer: {type(mixer).__name__} has statistics or buffers, which a {model} does not keep: choose another "
                "mixer"
            )


def axes_of(model: Model) -> Any:
    """Logical axis names of a model's weights. Allocates nothing.

    Args:
      model: A model.

    Returns:
      A tree like the weights of tuples of names.
    """
    return axes_and_shapes(model)[0]


def axes_and_shapes(model: Model) -> tuple[Any, Any]:
    """Logical axis names and shapes of a model's weights. Allocates nothing.

    Args:
      model: A model.

    Returns:
      `(axes, shapes)`: trees like the weights of tuples of names (None for an array without names) and of shapes.

    Raises:
      InputError: A buffer is not float32.
    """
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), model.example_batch(1, 8)))
    boxed = join(variables["params"], variables.get(BUFFERS))

    def is_boxed(node: Any) -> bool:
        return isinstance(node, nn.LogicallyPartitioned)

    axes = jax.tree.map(lambda node: tuple(node.names) if is_boxed(node) else None, boxed, is_leaf=is_boxed)
    shapes = nn.meta.unbox(boxed)
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.get(BUFFERS, {})):
        if leaf.dtype != "float32":
            raise InputError(f"buffer {jax.tree_util.keystr(path)} is {leaf.dtype}: make it float32")
    return axes, shapes
