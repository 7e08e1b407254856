"""Hierarchical softmax: a word's probability is that of a walk down a binary tree whose leaves are the words.

An inner node n goes to its first child with probability sigmoid(h . table[n] + bias[n]), else to its second, so the
words' probabilities sum to 1 for any tree, and a loss needs the nodes on one path only.

Inner nodes are numbered from the root down, level by level. So the first t levels are among the first 2^t - 1 rows of the
table: nearly every token visits these, and one product scores them all, where gathering them for each token would add their
gradients to the same few rows one after the other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num

from hpnlp.ops.array_op import array_op
from hpnlp.ops.arrays import accepts_numpy
from hpnlp.ops.custom_vjp import vary_alike
from hpnlp.ops.linear import widened
from hpnlp.ops.sampling import sample
from hpnlp.ops.softmax.grouped_softmax import check_k
from hpnlp.ops.softmax.trees import Tree, balanced_tree, huffman_tree, tree_from_children
from hpnlp.types import InputError, TableRows

# How many levels are scored by one product. More would cost a CPU more than it saves.
DENSE_LEVELS = 6

__all__ = [
    "Tree",
    "balanced_tree",
    "huffman_tree",
    "path_nll",
    "tree_from_children",
    "tree_log_probs",
    "tree_nll",
    "tree_paths",
    "tree_rows",
    "tree_sample",
    "tree_top_k",
]


@array_op("N", h="N")
def tree_nll(
    h: Float[Array, "N D"],
    table: Float[Array, "R D"] | TableRows,
    tree: Tree,
    labels: Int[Array, " N"],
    *,
    bias: Float[Array, " R"] | None = None,
    ignore_index: int = -100,
) -> Float[Array, " N"]:
    """-log p(label) of each token in nats, float32: the sum of softplus(-sign * (h . table[n] + bias[n])) over the path.

    table, bias: a row for each of the V - 1 inner nodes; what stands beyond them is not used. The table may be the rows that
    `tree_rows` names, and then has no bias.
    ignore_index: tokens with this label have loss 0 and no gradient, NaN or not.

    Reverse mode, any number of times; `path_nll` has forward mode too. Rows on no label's path change nothing, NaN or not.
    Raises InputError on shapes that do not fit, and on labels out of range where they are known while tracing; elsewhere
    such a token's loss is NaN.
    Cost: O(N D L) time; memory beside inputs and gradients O(N (D + L)), and one float32 array of the table's size where its
    gradient is asked for.
    Source: Morin and Bengio 2005, "Hierarchical probabilistic neural network language model", eq. 2; Mnih and Hinton 2008.
    """
    _check(h, table, tree, bias)
    if labels.shape != h.shape[:1]:
        raise InputError(f"labels has shape {labels.shape}: expected {h.shape[:1]}")
    nodes, signs = tree_paths(tree, labels, ignore_index=ignore_index)
    if isinstance(table, TableRows):
        nodes, table = table.find(nodes), table.values
    labels = labels.astype(jnp.int32)
    ignored = labels == ignore_index
    h = jnp.where(ignored[:, None], jnp.zeros((), h.dtype), h)
    scores: Array = _scores(min(DENSE_LEVELS, tree.depth), *vary_alike(h, table, nodes))
    if bias is not None:
        scores = scores + bias[nodes].astype(jnp.float32)
    nll = _path_sum(scores, signs)
    return jnp.where(ignored | _is_word(tree, labels), nll, jnp.nan)


@array_op("N", h="N")
def path_nll(
    h: Float[Array, "N D"],
    rows: Float[Array, "N L D"],
    signs: Num[Array, "N L"],
    bias_rows: Float[Array, "N L"] | None = None,
) -> Float[Array, " N"]:
    """`tree_nll` of rows that are gathered already, for each token its own; forward mode too.

    rows, bias_rows: those of `tree_paths`' nodes. signs: theirs. Tokens whose signs are all 0 have loss 0 and no gradient.
    Cost: O(N L D) time and memory.
    """
    h, rows = widened(h, rows)
    silent = jnp.all(signs == 0, axis=1)
    h = jnp.where(silent[:, None], jnp.zeros((), h.dtype), h)
    scores = jnp.sum(h.astype(jnp.float32)[:, None] * _as(rows, h), axis=-1)
    if bias_rows is not None:
        scores = scores + bias_rows.astype(jnp.float32)
    return _path_sum(scores, signs.astype(jnp.float32))


@array_op("N", labels="N")
def tree_paths(
    tree: Tree, labels: Int[Array, " N"], *, ignore_index: int = -100
) -> tuple[Int[Array, "N L"], Float[Array, "N L"]]:
    """(nodes, signs) of the labels' paths: int32 and float32. Where a path has ended, the root and 0.

    Tokens labelled `ignore_index` have the root and 0 throughout. A label that is no word raises InputError where it is known
    while tracing; elsewhere its signs are NaN.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise InputError(f"labels are {labels.dtype}: expected integers, the number of each token's word")
    if not isinstance(labels, Tracer):
        known = np.asarray(labels)
        wrong = known[(known != ignore_index) & ((known < 0) | (known >= tree.vocab))]
        if wrong.size:
            raise InputError(f"a label is {wrong[0]}: expected 0 to {tree.vocab - 1}, or ignore_index={ignore_index}")
    labels = labels.astype(jnp.int32)
    word = _is_word(tree, labels)
    at = jnp.where(word, labels, 0)
    nodes = jnp.where(word[:, None], jnp.asarray(tree.nodes)[at], 0)
    signs = jnp.asarray(tree.signs)[at].astype(jnp.float32)
    otherwise = jnp.where(labels == ignore_index, jnp.float32(0), jnp.nan)
    return nodes, jnp.where(word[:, None], signs, otherwise[:, None])


@array_op()
def tree_rows(tree: Tree, labels: Int[Array, " N"], *, ignore_index: int = -100) -> Int[Array, " R"]:
    """The rows of the table that a loss of these labels looks up, int32: the first ones, which it scores for all tokens, and
    those of each further level of the labels' paths. Some are repeated, and there may be row 0 instead of none."""
    nodes = tree_paths(tree, labels, ignore_index=ignore_index)[0]
    inner = max(tree.vocab - 1, 1)
    found = [jnp.arange(min(2**DENSE_LEVELS - 1, inner), dtype=jnp.int32)]
    for level in range(DENSE_LEVELS, tree.depth):
        most = min(labels.shape[0], 2**level, inner)  # a level of the tree has no more
        found.append(jnp.unique(nodes[:, level], size=most, fill_value=0))
    return jnp.concatenate(found)


@array_op("N", h="N")
def tree_log_probs(
    h: Float[Array, "N D"], table: Float[Array, "R D"], tree: Tree, *, bias: Float[Array, " R"] | None = None
) -> Float[Array, "N V"]:
    """The log-probability of every word, float32. Arguments as in `tree_nll`.

    Cost: 2 N V D operations and O(N V log L) more; memory O(N V).
    """
    _check(h, table, tree, bias)
    inner = tree.vocab - 1
    scores = _dot(h, table[:inner].astype(h.dtype), 1)
    if bias is not None:
        scores = scores + bias[:inner].astype(jnp.float32)[None]
    # Inner nodes and then words, each with the log-probability of the step into it and the node where the step begins.
    children = jnp.asarray(tree.children)
    places = jnp.where(children < 0, inner + ~children, children)
    steps = jnp.stack([jax.nn.log_sigmoid(scores), jax.nn.log_sigmoid(-scores)], axis=-1)
    total = jnp.zeros((h.shape[0], inner + tree.vocab), jnp.float32).at[:, places].set(steps)
    above = jnp.zeros(inner + tree.vocab, jnp.int32).at[places].set(jnp.arange(inner, dtype=jnp.int32)[:, None])
    # Each round doubles how many steps are summed. What reaches the root stays there, and its own step is 0.
    for _ in range((tree.depth - 1).bit_length() if tree.depth else 0):
        total, above = total + total[:, above], above[above]
    return total[:, inner:]


@array_op("N", h="N")
def tree_top_k(
    h: Float[Array, "N D"], table: Float[Array, "R D"], tree: Tree, k: int, *, bias: Float[Array, " R"] | None = None
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """(log_probs, words) of the k most probable words, best first; exact. Other arguments as in `tree_nll`.

    Of words with the k-th largest probability, any may be given. A token whose search meets NaN gets NaN.
    Raises InputError where k is not 1 to V.
    Cost: branch and bound, depth first, the more probable child before the other. No word is more probable than the node that
    it hangs from, so a node is left out if it is no better than the k-th best word found. Peaked distributions visit some
    k L nodes, flat ones up to V; tokens run side by side until the last is done. Memory O(N (D + L + k)).
    """
    _check(h, table, tree, bias)
    check_k(k, tree.vocab)
    if not tree.depth:
        return jnp.zeros((h.shape[0], 1), jnp.float32), jnp.zeros((h.shape[0], 1), jnp.int32)
    children = jnp.asarray(tree.children)
    depths = jnp.arange(tree.depth + 1, dtype=jnp.int32)

    def visit(state: Any, row: Array) -> Any:
        node, depth, log_prob, waiting, waiting_nodes, best, words, _ = state
        steps = log_prob + _turns(row, table, bias, node)
        below = children[node]
        best, order = lax.top_k(jnp.concatenate([best, jnp.where(below < 0, steps, -jnp.inf)]), k)
        words = jnp.concatenate([words, ~below])[order]
        # A level has no more than two nodes waiting: the deepest level's go first, so it is empty when its parents are
        # visited. Level 0 is the root's, and stays empty.
        waiting = waiting.at[depth + 1].set(jnp.where(below < 0, -jnp.inf, steps))
        waiting_nodes = waiting_nodes.at[depth + 1].set(below)
        hopeful = waiting > best[-1]
        depth = jnp.max(jnp.where(hopeful.any(axis=1), depths, 0))
        side = jnp.argmax(waiting[depth]).astype(jnp.int32)
        node, log_prob = waiting_nodes[depth, side], waiting[depth, side]
        waiting = waiting.at[depth, side].set(-jnp.inf)
        return node, depth, log_prob, waiting, waiting_nodes, best, words, jnp.isnan(steps).any()

    def search(row: Array) -> tuple[Array, Array]:
        waiting = jnp.full((tree.depth + 1, 2), -jnp.inf, jnp.float32)
        state = (jnp.int32(0), jnp.int32(0), jnp.float32(0), waiting, jnp.zeros((tree.depth + 1, 2), jnp.int32))
        state = visit((*state, jnp.full(k, -jnp.inf, jnp.float32), jnp.zeros(k, jnp.int32), jnp.bool_(False)), row)
        state = lax.while_loop(lambda state: (state[1] > 0) & ~state[-1], lambda state: visit(state, row), state)
        *_, best, words, lost = state
        return jnp.where(lost, jnp.nan, best), words

    return jax.vmap(search)(h)


@array_op("N", h="N")
def tree_sample(
    h: Float[Array, "N D"],
    table: Float[Array, "R D"],
    tree: Tree,
    rng: Array,
    *,
    bias: Float[Array, " R"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
) -> Int[Array, " N"]:
    """A word for each token, int32, drawn with probability proportional to p(word)^(1 / temperature).

    Other arguments as in `tree_nll`. Temperature 0 takes the most probable word.
    Cost: at temperature 1, given as a Python number, a walk from the root, O(N L D); at 0 that of `tree_top_k`; at others that
    of `tree_log_probs`, since a temperature of each node's choice would be another distribution.
    """
    known = isinstance(temperature, int | float)
    if known and temperature == 0:
        return tree_top_k(h, table, tree, 1, bias=bias)[1][:, 0]
    if not known or temperature != 1:
        return sample(tree_log_probs(h, table, tree, bias=bias), rng, temperature=temperature).astype(jnp.int32)
    _check(h, table, tree, bias)
    if not tree.depth:
        return jnp.zeros(h.shape[0], jnp.int32)
    children = jnp.asarray(tree.children)

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        level, at = state
        node = jnp.maximum(at, 0)
        first = jax.vmap(lambda row, node: _turns(row, table, bias, node)[0])(h, node)
        points = jax.random.uniform(jax.random.fold_in(rng, level), at.shape, jnp.float32)
        side = jnp.where(points < jnp.exp(first), 0, 1)
        return level + 1, jnp.where(at < 0, at, children[node, side])

    start = jnp.int32(0), jnp.zeros(h.shape[0], jnp.int32)
    return ~lax.while_loop(lambda state: (state[1] >= 0).any(), step, start)[1]


def _dot(a: Array, b: Array, axis: int) -> Array:
    """a contracted with b along this axis of both, summed in float32."""
    return lax.dot_general(a, b, (((axis,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(dense: int, h: Array, table: Array, nodes: Array) -> Float[Array, "N L"]:
    """h . table[node] of the nodes of every path; those of the first `dense` levels from one product.

    The others are taken a level at a time, so that no array of tokens x levels x width is made. The derivative is written out
    because that of a loop would make a new array of the table's size for each level.
    """
    top = min(2**dense - 1, table.shape[0])
    wide = h.astype(jnp.float32)
    each = jnp.take_along_axis(_dot(wide, _as(table[:top], h), 1), nodes[:, :dense], axis=1)
    if dense == nodes.shape[1]:
        return each

    def level(_: None, nodes: Array) -> tuple[None, Array]:
        return None, jnp.sum(wide * _as(table[nodes], h), axis=1)

    return jnp.concatenate([each, lax.scan(level, None, nodes[:, dense:].T)[1].T], axis=1)


@accepts_numpy
def _scores_forward(dense: int, h: Array, table: Array, nodes: Array) -> tuple[Array, Any]:
    return _scores(dense, h, table, nodes), (h, table, nodes)


def _scores_backward(dense: int, saved: Any, slopes: Array) -> tuple[Array, Array, None]:
    h, table, nodes = saved
    rows = table.shape[0]
    top = min(2**dense - 1, rows)
    upper = nodes[:, :dense]
    # Rows that no path of the batch visits have slopes of 0 only; and 0 x NaN is NaN.
    tokens = jnp.arange(h.shape[0], dtype=jnp.int32)[:, None]
    spread = jnp.zeros((h.shape[0], top), jnp.float32).at[tokens, upper].add(slopes[:, :dense])
    head = jnp.where((spread != 0).any(axis=0)[:, None], _as(table[:top], h), 0.0)
    wide = h.astype(jnp.float32)

    def level(sums: Any, x: Any) -> tuple[Any, None]:
        dh, dtable = sums
        nodes, slopes = x
        dh = dh + slopes[:, None] * _as(table[nodes], h)
        # Where a path has ended there is nothing to add, and all would add it to the root.
        return (dh, dtable.at[jnp.where(slopes == 0, rows, nodes)].add(slopes[:, None] * wide, mode="drop")), None

    dtable = vary_alike(jnp.zeros(table.shape, jnp.float32), h)[0].at[:top].set(_dot(spread, wide, 0))
    sums = _dot(spread, head.T, 1), dtable
    if dense < nodes.shape[1]:
        sums = lax.scan(level, sums, (nodes[:, dense:].T, slopes[:, dense:].T))[0]
    return sums[0].astype(h.dtype), sums[1].astype(table.dtype), None


_scores.defvjp(_scores_forward, _scores_backward)


def _as(rows: Array, h: Array) -> Array:
    """Rows of the table as a product with h takes them: rounded to its dtype, and then float32."""
    return rows.astype(h.dtype).astype(jnp.float32)


def _path_sum(scores: Float[Array, "N L"], signs: Float[Array, "N L"]) -> Float[Array, " N"]:
    ended = signs == 0
    return jnp.sum(jnp.where(ended, 0.0, jax.nn.softplus(jnp.where(ended, 0.0, -signs * scores))), axis=1)


def _turns(row: Array, table: Array, bias: Array | None, node: Array) -> Float[Array, " 2"]:
    """The log-probabilities of a node's children, given the node and the token `row`."""
    score = jnp.sum(row.astype(jnp.float32) * _as(table[node], row))
    if bias is not None:
        score = score + bias[node].astype(jnp.float32)
    return jax.nn.log_sigmoid(jnp.stack([score, -score]))


def _is_word(tree: Tree, labels: Array) -> Array:
    return (labels >= 0) & (labels < tree.vocab)


def _check(h: Any, table: Any, tree: Tree, bias: Any) -> None:
    shape = (table.values if isinstance(table, TableRows) else table).shape
    if h.ndim != 2 or len(shape) != 2 or h.shape[1] != shape[1]:
        raise InputError(f"h {h.shape}, table {shape}: expected [N, D] and [V - 1, D]; flatten tokens to one axis")
    if isinstance(table, TableRows):
        if bias is not None:
            raise InputError("bias beside rows of a table: leave it out, or pass the whole table")
        return
    if table.shape[0] < tree.vocab - 1:
        raise InputError(
            f"table has {table.shape[0]} rows: expected at least {tree.vocab - 1}, one for each inner node of a tree over "
            f"{tree.vocab} words"
        )
    if bias is not None and bias.shape != table.shape[:1]:
        raise InputError(f"bias has shape {bias.shape}: expected {table.shape[:1]}, a number for each row of table")
