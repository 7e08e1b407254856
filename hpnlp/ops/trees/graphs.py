"""Nodes and edges of trees and directed acyclic graphs, checked on the host.

Shape letters: N nodes, E edges. An edge leads from a child to its parent, which is computed from its children.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from hpnlp.types import InputError

SHOWN = 8  # nodes of a cycle that an error names


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Nodes and edges. All arrays are int32, of numpy or of jax.

    Attributes:
      height: `[N]` edges of the longest path from the node down to a node without children; -1 for padding.
      arity: `[N]` number of children.
      op: `[N]` number of the cell that computes the node.
      child: `[E]` child of each edge.
      parent: `[E]` parent of each edge; -1 for an edge that does not exist.
      slot: `[E]` index of the child among the children of its parent.
      use: `[E]` index of the parent among the parents of its child; 0 in trees.
    """

    height: Any
    arity: Any
    op: Any
    child: Any
    parent: Any
    slot: Any
    use: Any


def tree_graph(parents: ArrayLike | Sequence[Any], *, ops: ArrayLike | Sequence[Any] | None = None) -> Graph:
    """Makes the graph of one or more trees.

    Args:
      parents: `[N]` parent of each node, -1 for roots. Children of a node are ordered by their numbers.
      ops: `[N]` number of the cell that computes each node; None for 0.

    Returns:
      The graph in numpy arrays, whose edge i leads from node i to its parent.

    Raises:
      InputError: A parent is no node, or a node is its own ancestor.

    Cost: O(N log N).
    """
    parents = _integers(parents, "parents")
    count = len(parents)
    wrong = np.flatnonzero((parents < -1) | (parents >= count))
    if wrong.size:
        node = int(wrong[0])
        raise InputError(
            f"node {node} has the parent {parents[node]}: expected 0 to {count - 1}, or -1 for a root: correct parents[{node}]"
        )
    nodes = np.arange(count, dtype=np.int32)
    inner = parents >= 0
    arity = np.bincount(parents[inner], minlength=count).astype(np.int32)
    height = _heights(nodes[inner], parents[inner], arity)
    slot = np.where(inner, _occurrence(parents), 0).astype(np.int32)
    return Graph(height, arity, _ops(ops, count), nodes, parents, slot, np.zeros(count, np.int32))


def dag(children: Sequence[Sequence[int]], *, ops: ArrayLike | Sequence[Any] | None = None) -> Graph:
    """Makes a directed acyclic graph, in which a node may have several parents.

    Args:
      children: For each of N nodes, its children in order.
      ops: As for `tree_graph`.

    Returns:
      The graph in numpy arrays.

    Raises:
      InputError: A child is no node, or a node is its own descendant.

    Cost: O(E log E).
    """
    count = len(children)
    arity = np.array([len(of_node) for of_node in children], np.int32)
    child = _integers([node for of_node in children for node in of_node], "children")
    parent = np.repeat(np.arange(count, dtype=np.int32), arity)
    wrong = np.flatnonzero((child < 0) | (child >= count))
    if wrong.size:
        edge = int(wrong[0])
        raise InputError(
            f"node {parent[edge]} has the child {child[edge]}: expected 0 to {count - 1}: correct children[{parent[edge]}]"
        )
    height = _heights(child, parent, arity)
    return Graph(height, arity, _ops(ops, count), child, parent, _occurrence(parent), _occurrence(child))


def check_labels(labels: ArrayLike | Sequence[Any], vocab: int) -> np.ndarray:
    """Checks that the labels of nodes are ids of a vocabulary.

    Args:
      labels: `[N]` label of each node.
      vocab: Number of ids.

    Returns:
      int32 `[N]`.

    Raises:
      InputError: A label is not in the vocabulary.
    """
    labels = _integers(labels, "labels")
    wrong = np.flatnonzero((labels < 0) | (labels >= vocab))
    if wrong.size:
        node = int(wrong[0])
        raise InputError(
            f"node {node} has the unknown label {labels[node]}: expected 0 to {vocab - 1}: map unknown labels to an id of "
            "their own, or raise the size of the vocabulary"
        )
    return labels


def _integers(values: ArrayLike | Sequence[Any], name: str) -> np.ndarray:
    """The values as int32; raises InputError for other values, or more than one axis."""
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{name}: {array.dtype} {array.shape}: expected whole numbers in one axis: convert the array")
    limits = np.iinfo(np.int32)
    wrong = np.flatnonzero((array < limits.min) | (array > limits.max))
    if wrong.size:
        index = int(wrong[0])
        raise InputError(
            f"{name}[{index}] = {array[index]}: expected at most {limits.max} in absolute value: correct it"
        )
    return array.astype(np.int32)


def _ops(ops: ArrayLike | Sequence[Any] | None, count: int) -> np.ndarray:
    """Numbers of the cells, 0 by default; raises InputError for another number of nodes."""
    array = np.zeros(count, np.int32) if ops is None else _integers(ops, "ops")
    if len(array) != count:
        raise InputError(f"ops: {len(array)} numbers for {count} nodes: pass one for each node")
    return array


def _occurrence(values: np.ndarray) -> np.ndarray:
    """For each value, the number of equal values before it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    result = np.empty(len(values), np.int32)
    result[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return result


def _heights(child: np.ndarray, parent: np.ndarray, arity: np.ndarray) -> np.ndarray:
    """Height of each node; raises InputError for a cycle."""
    order = np.argsort(child, kind="stable")
    parent_by_child = parent[order]
    ends = np.searchsorted(child[order], np.arange(len(arity) + 1))
    height = np.full(len(arity), -1, np.int32)
    remaining, ready, level = arity.copy(), np.flatnonzero(arity == 0), 0
    while ready.size:
        height[ready] = level
        counts = ends[ready + 1] - ends[ready]
        edges = np.repeat(ends[ready] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        parents = parent_by_child[edges]
        np.subtract.at(remaining, parents, 1)
        ready = np.unique(parents[remaining[parents] == 0])
        level += 1
    if np.any(height < 0):
        raise InputError(_cycle_message(child, parent, height))
    return height


def _cycle_message(child: np.ndarray, parent: np.ndarray, height: np.ndarray) -> str:
    """Message for a graph with a cycle: each node without a height has a child without one."""
    of_parent = {}
    for below, above in zip(child.tolist(), parent.tolist(), strict=True):
        if height[below] < 0:
            of_parent.setdefault(above, below)
    node, index = int(np.flatnonzero(height < 0)[0]), {}
    while node not in index:
        index[node] = len(index)
        node = of_parent[node]
    path = list(index)[index[node] :]
    shown = " -> ".join(map(str, [*path[:SHOWN], *(["..."] if len(path) > SHOWN else []), node]))
    return f"node {node} is its own descendant (children: {shown}): remove one of these edges, so that every path ends"
