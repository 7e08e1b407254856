"""Binary trees whose leaves are the words of a vocabulary, made on the host.

Inner nodes are numbered from the root down, level by level: the first t levels are among the numbers below 2^t - 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from hpnlp.ops.softmax.word_order import checked_order
from hpnlp.types import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """A binary tree over V words, made on the host. Put it on the device once (`jax.device_put`), and pass it to `jit`.

    nodes: int32 [V, L], the inner nodes from the root to each word, in [0, V - 1); filled up with 0, the root.
    signs: int8 [V, L], 1 where the path goes to the node's first child, -1 to its second, 0 where it has ended.
    children: int32 [V - 1, 2], an inner node's children: n >= 0 is an inner node, ~w < 0 the word w.
    """

    nodes: Any
    signs: Any
    children: Any

    @property
    def vocab(self) -> int:
        return self.nodes.shape[0]

    @property
    def depth(self) -> int:
        """L, the number of inner nodes on the longest path."""
        return self.nodes.shape[1]


def balanced_tree(vocab: int) -> Tree:
    """The tree whose V words lie ceil(log2 V) deep or one less, from left to right in the order of their ids.

    Where depths differ, the first ids have the shorter paths. Raises InputError on an empty vocabulary. Cost: O(V log V).
    """
    if vocab < 1:
        raise InputError(f"vocab {vocab}: expected at least one word")
    depth = (vocab - 1).bit_length()
    depths = np.full(vocab, depth)
    depths[: 2**depth - vocab] -= 1
    return _canonical(depths)


def huffman_tree(counts: np.ndarray, order: np.ndarray | None = None) -> Tree:
    """The tree of least expected depth where words are as frequent as their counts [V]: less than their entropy + 1 bit.

    order: the ids [V] so that words that should share their nodes stand side by side, such as `similarity_order`. Below each
      node, words before a place in it go to one side and those after it to the other, as far as depths allow. Without it,
      words of one depth stand side by side in the order of ids.
    Deterministic. Of words with equal counts, a lower id lies no deeper; a leaf is merged before an inner node of its weight,
    which makes the longest path as short as it can be.
    Raises InputError on counts that are not all finite and over 0, and on an order that is not of every id once.
    Cost: O(V log V) for sorting, O(V) steps of Python, and O(V L) time and memory, with an order up
    to O(V L^2) time; L is at most 1.45 log2(sum of counts) for whole counts, and for fractions may reach V - 1.
    Source: Huffman 1952; for words, Mikolov et al. 2013, "Distributed representations of words and phrases", sec. 2.1; that
    similar words belong together, Mnih and Hinton 2009, "A scalable hierarchical distributed language model", sec. 4.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or not counts.size or counts.dtype.kind not in "iuf":
        raise InputError(f"counts: {counts.dtype} of shape {counts.shape}: expected one number for each of V words")
    wrong = np.flatnonzero(~(np.isfinite(counts) & (counts > 0)))
    if wrong.size:
        raise InputError(
            f"counts[{wrong[0]}] is {counts[wrong[0]]}: expected finite numbers over 0; add one to every count, for example"
        )
    vocab = counts.size
    rising = np.lexsort((-np.arange(vocab), counts))
    depths = np.empty(vocab, np.int64)
    depths[rising] = _huffman_depths(counts[rising].tolist())
    return _canonical(depths) if order is None else _arranged(depths, checked_order(order, vocab))


def _huffman_depths(weights: list[Any]) -> np.ndarray:
    """The depths of leaves with these ascending weights. Merged nodes come out in ascending order too: two queues do."""
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


def _canonical(depths: np.ndarray) -> Tree:
    """The tree of words that lie so deep: on each level the words in the order of their ids, then the inner nodes."""
    vocab = depths.size
    words = np.argsort(depths, kind="stable")
    ends = np.cumsum(np.bincount(depths))
    slots, places, inner = 1, [], 0
    for start, end in zip([0, *ends], ends, strict=False):
        below = slots - (end - start)
        places += [~words[start:end], inner + np.arange(below)]
        inner, slots = inner + below, 2 * below
    return _fill(np.concatenate(places)[1:].reshape(vocab - 1, 2), 0)


def _arranged(depths: np.ndarray, order: np.ndarray) -> Tree:
    """The tree of words that lie so deep, each node's halves as near as can be to the first and the last in `order`."""
    children = np.empty((depths.size - 1, 2), np.int64)
    words, node, first, level = order, np.zeros(depths.size, np.int64), 0, 0
    while first < len(children):  # all nodes of a level at once; their words lie node by node, and each in order
        below = depths[words] - level
        second = _dealt(below, node).astype(np.int64)
        leaf = below == 1
        children[first + node[leaf], second[leaf]] = ~words[leaf]
        side = 2 * node + second
        inner = np.flatnonzero(~leaf)
        inner = inner[np.argsort(side[inner], kind="stable")]
        here, first = first, first + int(node[-1]) + 1
        halves, node = np.unique(side[inner], return_inverse=True)
        children[here + halves // 2, halves % 2] = first + np.arange(len(halves))
        words, level = words[inner], level + 1
    return _fill(children, 0)


def _dealt(below: np.ndarray, node: np.ndarray) -> np.ndarray:
    """Which words go to the second half of their node, so that the halves are as near as can be to the first and last ones.

    below [W]: how far under their node words lie; one that lies d below takes 2^-d of it, and all that it has take 1.
    node [W]: rising from 0. Words are dealt out from the shallow to the deep: those of a depth fit wherever there is room at
    all, so the halves fill exactly. Cost: a pass over W for each depth.
    """
    count = int(node[-1]) + 1
    share = 2.0**-below
    early = np.cumsum(share) - share / 2 - node < 0.5
    second = np.empty(len(below), bool)
    room, unit = np.ones((2, count)), 1
    for depth in np.unique(below):
        room *= 2.0 ** (depth - unit)  # how many words of this depth have room in each half
        unit, here = depth, np.flatnonzero(below == depth)
        of = node[here]
        wanted, there = np.bincount(of, early[here], count), np.bincount(of, minlength=count)
        taken = np.clip(wanted, there - room[1], np.minimum(room[0], there))
        second[here] = np.arange(len(here)) - (np.cumsum(there) - there)[of] >= taken[of]
        room -= [taken, there - taken]
        if not room.min(axis=0).any():  # one half of each is full: the deeper words are the other's
            deeper = below > depth
            second[deeper] = room[0, node[deeper]] == 0
            break
    return second


def tree_from_children(children: np.ndarray) -> Tree:
    """The given tree: children [V - 1, 2] of each inner node, where n >= 0 is an inner node and ~w (-1 - w) the word w.

    Inner nodes may be numbered in any way; the tree's own numbers count them from the root down, level by level.
    Raises InputError where this is no tree: a number out of range, a node with one child, words missing or repeated, nodes
    that the root does not reach, or a cycle. Cost: O(V L) time and memory.
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
    times = np.bincount(~children[children < 0], minlength=inner + 1)
    if inner and (times != 1).any():
        word = np.flatnonzero(times != 1)[0]
        raise InputError(f"children: word {word} stands at {times[word]} leaves: expected every word at one")
    orphans = np.setdiff1d(np.arange(inner), children)
    if orphans.size > 1:
        raise InputError(
            f"children: nodes {', '.join(map(str, orphans[:5]))} are no node's child: expected one, the root"
        )
    return _fill(children, int(orphans[0]) if inner else 0)


def _fill(children: np.ndarray, root: int) -> Tree:
    """The tree of valid children, but for cycles apart from the root; V - 1 is their number."""
    inner = children.shape[0]
    levels, reached = [], np.full(min(inner, 1), root)
    while reached.size:
        levels.append(reached)
        reached = children[reached].reshape(-1)
        reached = reached[reached >= 0]
    order = np.concatenate([np.zeros(0, np.int64), *levels])
    if order.size < inner:
        missing = np.setdiff1d(np.arange(inner), order)
        raise InputError(
            f"children: nodes {', '.join(map(str, missing[:5]))} form a cycle or hang from one: expected a tree that node "
            f"{root}, the root, reaches all of"
        )
    numbers = np.zeros(inner, np.int64)
    numbers[order] = np.arange(inner)
    children = children[order]
    children = np.where(children < 0, children, numbers[np.maximum(children, 0)]).astype(np.int32)

    nodes = np.zeros((inner + 1, len(levels)), np.int32)
    signs = np.zeros((inner + 1, len(levels)), np.int8)
    start, path, turns = 0, np.zeros((1, 0), np.int32), np.zeros((1, 0), np.int8)
    for level in levels:
        here = np.arange(start, start + level.size, dtype=np.int32)
        path = np.concatenate([path, here[:, None]], axis=1).repeat(2, axis=0)
        turn = np.tile(np.array([1, -1], np.int8), level.size)
        turns = np.concatenate([turns.repeat(2, axis=0), turn[:, None]], axis=1)
        below = children[here].reshape(-1)
        leaf = below < 0
        nodes[~below[leaf], : path.shape[1]] = path[leaf]
        signs[~below[leaf], : path.shape[1]] = turns[leaf]
        start, path, turns = start + level.size, path[~leaf], turns[~leaf]
    return Tree(nodes, signs, children)
