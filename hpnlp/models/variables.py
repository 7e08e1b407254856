"""Collections of a model's variables.

The optimizer changes "params" and `Model.advance` changes "buffers". Training does not change "frozen", which the task
provides. The forward pass changes "carry", the state that each sequence of a batch passes to its continuation in the next one.

Functions that only apply a model take its weights: the parameters and, under the keys BUFFERS and FROZEN, the buffers and the
frozen variables that the model has and the function reads. The weights of a model with parameters only are its parameters. A
carry is not part of the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import PyTree

from hpnlp.model_interfaces.layer_report import CARRY
from hpnlp.types import InputError, Model

BUFFERS = "buffers"
FROZEN = "frozen"


def join(params: PyTree, buffers: PyTree, frozen: PyTree = None) -> Any:
    """Joins the collections of a model's weights.

    Args:
      params: Parameters, a dict; or a tree like them, of shapes or shardings.
      buffers: Buffers, or a tree like them; None or empty if the model has none.
      frozen: Frozen variables, or a tree like them; None or empty if the model has none.

    Returns:
      The weights.
    """
    further = {name: tree for name, tree in ((BUFFERS, buffers), (FROZEN, frozen)) if tree}
    return {**params, **further} if further else params


def split(weights: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Splits weights into parameters and buffers; frozen variables are left out.

    Args:
      weights: Weights of a model.

    Returns:
      `(parameters, buffers)`; buffers are None if there are none.
    """
    params = {name: value for name, value in weights.items() if name not in (BUFFERS, FROZEN)}
    return params, weights.get(BUFFERS)


def collections(weights: Mapping[str, Any], carry: PyTree = None) -> dict[str, Any]:
    """The variables that `Model.apply` takes.

    Args:
      weights: Weights of a model.
      carry: Carry of the batch before, or None.

    Returns:
      Collection -> variables: "params", and those of BUFFERS, FROZEN and CARRY that are not None.
    """
    trees = {BUFFERS: weights.get(BUFFERS), FROZEN: weights.get(FROZEN), CARRY: carry}
    return {"params": split(weights)[0], **{name: tree for name, tree in trees.items() if tree is not None}}


def weights_digest(weights: PyTree) -> str:
    """Hashes weights.

    Args:
      weights: Weights of a model.

    Returns:
      32 hexadecimal digits, equal for arrays of equal names, dtypes and values.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape};".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def logical_axes(model: Model) -> Any:
    """Logical axis names of a model's weights. Allocates nothing.

    Returns:
      A tree like the weights of tuples of names.
    """
    return axes_and_shapes(model)[0]


def axes_and_shapes(model: Model) -> tuple[Any, Any]:
    """Logical axis names and shapes of a model's weights. Allocates nothing.

    Returns:
      `(axes, shapes)`: trees like the weights of tuples of names (None for an array without names) and of shapes.

    Raises:
      InputError: A buffer is not float32.
    """
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), model.example_batch(1, 8)))
    boxed = join(variables["params"], variables.get(BUFFERS), variables.get(FROZEN))

    def is_boxed(node: object) -> bool:
        return isinstance(node, nn.LogicallyPartitioned)

    axes = jax.tree.map(lambda node: tuple(node.names) if is_boxed(node) else None, boxed, is_leaf=is_boxed)
    shapes = nn.meta.unbox(boxed)
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.get(BUFFERS, {})):
        if leaf.dtype != "float32":
            raise InputError(f"buffer {jax.tree_util.keystr(path)} is {leaf.dtype}: make it float32")
    return axes, shapes
