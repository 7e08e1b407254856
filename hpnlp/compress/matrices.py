"""The matrices of a model: kernels of dense layers, and tables of embeddings and output layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from hpnlp.ops.weight import is_weight, leading_axes

# Names of the parameters that are multiplied by `hpnlp.ops.linear`, and of those whose rows are also looked up by id.
KERNELS = ("kernel",)
TABLES = ("table", "head")
# Names of the parameters of `nn.feed_forward.experts` that hold a matrix for each expert.
EXPERTS = ("gate", "up", "down")


def map_matrices(
    function: Callable[[str, Any], Any], params: PyTree, *, stacked: bool = False, experts: bool = False
) -> Any:
    """Parameters with another representation of their matrices.

    Args:
      function: A function of the path of a matrix, as "layers/attention/query/kernel", and of the array [D, F] or Weight; it
        returns an array or a Weight. Matrices of stacked layers are passed one by one to `jax.vmap` of the function.
      params: Weights of a model.
      stacked: Matrices of stacked layers are passed together, [L, D, F].
      experts: The matrices of experts are passed, too, one by one.

    Returns:
      The weights, with the results in place of kernels and tables.
    """

    def converted(path: KeyPath, leaf: PyTree) -> Any:
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        is_expert_stack = experts and names[-1] in EXPERTS and leading_axes(leaf) > 0
        if names[-1] not in (*KERNELS, *TABLES) and not is_expert_stack:
            return leaf
        convert: Callable[[Any], Any] = functools.partial(function, "/".join(names))
        for _ in range(0 if stacked else leading_axes(leaf)):
            convert = jax.vmap(convert)
        return convert(leaf)

    return jax.tree_util.tree_map_with_path(converted, params, is_leaf=is_weight)


def expert_numbers(params: PyTree) -> int:
    """Numbers in the matrices of experts that are arrays, and no Weights.

    Args:
      params: Weights of a model.

    Returns:
      The number.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    stacks = [
        leaf for path, leaf in leaves if not is_weight(leaf) and jax.tree_util.keystr(path[-1:], simple=True) in EXPERTS
    ]
    return sum(stack.size for stack in stacks if stack.ndim > 2)


def is_table(path: str) -> bool:
    """Whether a matrix is a table, whose rows are looked up by id.

    Args:
      path: Path of the matrix, as in `map_matrices`.

    Returns:
      True for tables, False for kernels.
    """
    return path.rsplit("/", 1)[-1] in TABLES
