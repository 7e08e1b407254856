"""Binary trees whose leaves are the words of a vocabulary, for hierarchical softmax; built on the host.

Inner nodes are numbered from the root down, level by level: the nodes of the first t levels have numbers below 2^t - 1. An
inner node is written as its number n >= 0, and word w as ~w = -1 - w.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from hpnlp.ops.softmax.structured.word_order import checked_order
from hpnlp.types import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """A binary tree over V words. Put it on the device once (`jax.device_put`), and pass it to jitted functions.

    Attributes:
      nodes: int32 [V, L], the inner nodes from the root to each word; 0 after the end of the path.
      signs: int8 [V, L], 1 where the path continues to the node's first child, -1 to its second, 0 after its end.
      children: int32 [V - 1, 2], the children of each inner node; ~w for word w.
    """

    nodes: Any
    signs: Any
    children: Any

    @property
    def vocab(self) -> int:
        """V, the number of words."""
        return self.nodes.shape[0]

    @property
    def depth(self) -> int:
        """L, the number of inner nodes on the longest path."""
        return self.nodes.shape[1]


def balanced_tree(vocab: int) -> Tree:
    """The tree of minimal depth, with the words from left to right in the order of their ids.

    Args:
      vocab: V, the number of words.

    Returns:
      A tree whose words are ceil(log2 V) deep or one less; the first ids have the shorter paths.

    Raises:
      InputError: vocab is under 1.

    Cost:
      O(V log V).
    """
    if vocab < 1:
        raise InputError(f"vocab {vocab}: expected at least one word")
    depth = (vocab - 1).bit_length()
    depths = np.full(vocab, depth)
    depths[: 2**depth - vocab] -= 1
    return _canonical_tree(depths)


def huffman_tree(counts: np.ndarray, order: np.ndarray | None = None) -> Tree:
    """Huffman's tree: the expected depth of words that are as frequent as their counts is minimal, under their entropy + 1 bit.

    Deterministic. Of words with equal counts, a lower id is no deeper. A leaf is merged before an inner node of the same
    weight, which makes the longest path as short as possible.

    Args:
      counts: [V] numbers over 0.
      order: [V] the ids, with words that should share nodes side by side, such as `similarity_order`. The words of a node that
        come first in this order are then those of its first half, as far as the depths allow. None puts words of one depth side
        by side in the order of their ids.

    Returns:
      The tree.

    Raises:
      InputError: counts are not all finite and over 0, or order does not hold each id once.

    Cost:
      O(V log V) for sorting, O(V) steps of Python, and O(V L) time and memory; with an order up to O(V L^2) time. L is at most
      1.45 log2(sum of counts) for integer counts; for fractions it may reach V - 1.

    References:
      Huffman 1952, "A method for the construction of minimum-redundancy codes".
      Mikolov et al. 2013, "Distributed representations of words and phrases and their compositionality", sec. 2.1: for words.
      Mnih and Hinton 2009, "A scalable hierarchical distributed language model", sec. 4: similar words share nodes.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or not counts.size or counts.dtype.kind not in "iuf":
        raise InputError(f"counts: {counts.dtype} of shape {counts.shape}: expected one number for each of V words")
    invalid = np.flatnonzero(~(np.isfinite(counts) & (counts > 0)))
    if invalid.size:
        word = invalid[0]
        raise InputError(
            f"counts[{word}] is {counts[word]}: expected finite numbers over 0; for example, add one to all"
        )
    vocab = counts.size
    ascending = np.lexsort((-np.arange(vocab), counts))
    depths = np.empty(vocab, np.int64)
    depths[ascending] = _huffman_depths(counts[ascending].tolist())
    return _canonical_tree(depths) if order is None else _ordered_tree(depths, checked_order(order, vocab))


def _huffman_depths(weights: list[Any]) -> np.ndarray:
    """Depths of leaves with these ascending weights.

    Merged nodes arise in ascending order too, so that two queues, of leaves and of merged nodes, replace a heap.
    """
    leaves = len(weights)
    merged: list[Any] = []
    parents = [0] * (2 * leaves - 1)
    leaf = inner = 0
    for _ in range(leaves - 1):
        total = 0
        for _ in range(2):
            if leaf < leaves and (inner == len(merged) or weights[leaf] <= merged[inner]):
                total += weights[leaf]
                parents[leaf] = len(merged)
                leaf += 1
            else:
                total += merged[inner]
                parents[leaves + inner] = len(merged)
                inner += 1
        merged.append(total)
    depths = [0] * len(merged)
    for node in reversed(range(len(merged) - 1)):
        depths[node] = depths[parents[leaves + node]] + 1
    return np.asarray(depths)[parents[:leaves]] + 1 if merged else np.zeros(1, np.int64)


def _canonical_tree(depths: np.ndarray) -> Tree:
    """The tree with words at these depths [V]; a level holds first words, in the order of their ids, then inner nodes."""
    vocab = depths.size
    words = np.argsort(depths, kind="stable")
    level_ends = np.cumsum(np.bincount(depths))
    slots, children, inner = 1, [], 0
    for start, end in zip([0, *level_ends], level_ends, strict=False):
        inner_slots = slots - (end - start)
        children += [~words[start:end], inner + np.arange(inner_slots)]
        inner, slots = inner + inner_slots, 2 * inner_slots
    return _renumbered_tree(np.concatenate(children)[1:].reshape(vocab - 1, 2), 0)


def _ordered_tree(depths: np.ndarray, order: np.ndarray) -> Tree:
    """The tree with words at these depths [V], whose nodes divide their words as near as possible to the middle of `order`.

    Computes a level at a time, for all of its nodes at once. `words` are those under the nodes of the level, node by node and
    in order; `node` [W] is the node of each, counted from the first node of the level.
    """
    children = np.empty((depths.size - 1, 2), np.int64)
    words, node, first, level = order, np.zeros(depths.size, np.int64), 0, 0
    while first < len(children):
        depth_below = depths[words] - level
        in_second = _in_second_half(depth_below, node).astype(np.int64)
        is_leaf = depth_below == 1
        children[first + node[is_leaf], in_second[is_leaf]] = ~words[is_leaf]
        child = 2 * node + in_second
        inner = np.flatnonzero(~is_leaf)
        inner = inner[np.argsort(child[inner], kind="stable")]
        level_first, first = first, first + int(node[-1]) + 1
        inner_children, node = np.unique(child[inner], return_inverse=True)
        children[level_first + inner_children // 2, inner_children % 2] = first + np.arange(len(inner_children))
        words, level = words[inner], level + 1
    return _renumbered_tree(children, 0)


def _in_second_half(depth_below: np.ndarray, node: np.ndarray) -> np.ndarray:
    """Mask [W] of the words that go to the second half of their node.

    The halves are as near as possible to the first and the last words of the node. depth_below [W]: levels between node and
    word; a word d levels below takes 2^-d of the node, and all words of a node take 1. node [W]: rising from 0. Words are
    assigned from the shallow to the deep; those of one depth fit wherever there is room at all, so that the halves fill
    exactly. Cost: a pass over the words for each depth.
    """
    count = int(node[-1]) + 1
    share = 2.0**-depth_below
    is_early = np.cumsum(share) - share / 2 - node < 0.5
    in_second = np.empty(len(depth_below), bool)
    room, unit = np.ones((2, count)), 1
    for depth in np.unique(depth_below):
        room *= 2.0 ** (depth - unit)  # in words of this depth, for the first and the second half of each node
        unit, here = depth, np.flatnonzero(depth_below == depth)
        nodes = node[here]
        early, total = np.bincount(nodes, is_early[here], count), np.bincount(nodes, minlength=count)
        taken = np.clip(early, total - room[1], np.minimum(room[0], total))
        rank_in_node = np.arange(len(here)) - (np.cumsum(total) - total)[nodes]
        in_second[here] = rank_in_node >= taken[nodes]
        room -= [taken, total - taken]
        if not room.min(axis=0).any():  # in every node one half is full: the deeper words belong to the other
            deeper = depth_below > depth
            in_second[deeper] = room[0, node[deeper]] == 0
            break
    return in_second


def tree_from_children(children: np.ndarray) -> Tree:
    """A tree of any shape.

    Args:
      children: [V - 1, 2] integers, the children of each inner node: n >= 0 for an inner node and ~w = -1 - w for word w. Inner
        nodes may be numbered in any way; those of the result are numbered from the root down, level by level.

    Returns:
      The tree.

    Raises:
      InputError: children are no tree: a number is out of range, a node has one child, words are missing or repeated, or there
        are nodes that the root does not reach.

    Cost:
      O(V L) time and memory.
    """
    children = np.asarray(children)
    if children.ndim != 2 or children.shape[1] != 2 or children.dtype.kind not in "iu":
        raise InputError(f"children: {children.dtype} of shape {children.shape}: expected integers [V - 1, 2]")
    children = children.astype(np.int64)
    inner = children.shape[0]
    outside = (children >= inner) | (children < ~inner)
    if outside.any():
        raise InputError(
            f"children: {children[outside][0]} is no node: expected 0 to {inner - 1}, or -1 - w for a word w, 0 to {inner}"
        )
    same = np.flatnonzero(children[:, 0] == children[:, 1])
    if same.size:
        raise InputError(
            f"children: node {same[0]} has one child, twice: expected two; put the child in the node's place"
        )
    leaves = np.bincount(~children[children < 0], minlength=inner + 1)
    if inner and (leaves != 1).any():
        word = np.flatnonzero(leaves != 1)[0]
        raise InputError(f"children: word {word} is at {leaves[word]} leaves: expected every word at one leaf")
    orphans = np.setdiff1d(np.arange(inner), children)
    if orphans.size > 1:
        raise InputError(
            f"children: nodes {', '.join(map(str, orphans[:5]))} are children of no node: expected the root only"
        )
    return _renumbered_tree(children, int(orphans[0]) if inner else 0)


def _renumbered_tree(children: np.ndarray, root: int) -> Tree:
    """The tree of these children [V - 1, 2], renumbered from the root down. Raises InputError if there are cycles."""
    inner = children.shape[0]
    levels, reached = [], np.full(min(inner, 1), root)
    while reached.size:
        levels.append(reached)
        reached = children[reached].reshape(-1)
        reached = reached[reached >= 0]
    order = np.concatenate([np.zeros(0, np.int64), *levels])
    if order.size < inner:
        missing = ", ".join(map(str, np.setdiff1d(np.arange(inner), order)[:5]))
        raise InputError(
            f"children: nodes {missing} form a cycle or hang from one: expected all nodes below node {root}"
        )
    numbers = np.zeros(inner, np.int64)
    numbers[order] = np.arange(inner)
    children = children[order]
    children = np.where(children < 0, children, numbers[np.maximum(children, 0)]).astype(np.int32)
    nodes, signs = _paths(children, [level.size for level in levels])
    return Tree(nodes, signs, children)


def _paths(children: np.ndarray, level_sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and signs [V, L] of the words' paths, from children that are numbered level by level."""
    vocab = children.shape[0] + 1
    nodes = np.zeros((vocab, len(level_sizes)), np.int32)
    signs = np.zeros((vocab, len(level_sizes)), np.int8)
    # Paths to the nodes of a level, and the signs on them: [nodes of the level, depth].
    start, path, path_signs = 0, np.zeros((1, 0), np.int32), np.zeros((1, 0), np.int8)
    for size in level_sizes:
        level = np.arange(start, start + size, dtype=np.int32)
        path = np.concatenate([path, level[:, None]], axis=1).repeat(2, axis=0)
        last_sign = np.tile(np.array([1, -1], np.int8), size)
        path_signs = np.concatenate([path_signs.repeat(2, axis=0), last_sign[:, None]], axis=1)
        child = children[level].reshape(-1)
        is_leaf = child < 0
        nodes[~child[is_leaf], : path.shape[1]] = path[is_leaf]
        signs[~child[is_leaf], : path.shape[1]] = path_signs[is_leaf]
        start, path, path_signs = start + size, path[~is_leaf], path_signs[~is_leaf]
    return nodes, signs
