"""Hierarchical softmax: the probability of a word is that of the path to its leaf in a binary tree (see `trees`).

At inner node n, the path continues to the first child with probability sigmoid(h . table[n] + bias[n]), else to the second.
The probabilities of the words therefore sum to 1 for any tree, and a loss needs the nodes of one path only.

Inner nodes are numbered from the root down, level by level, so that the first t levels are among the first 2^t - 1 rows of
the table. Nearly every token visits these rows. One product scores them for all tokens; if they were gathered for each token,
their gradients would be added to the same few rows one after the other.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num, PyTree

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.linear import widened
from hpnlp.ops.sampling import sample
from hpnlp.ops.softmax.structured.grouped_softmax import check_k
from hpnlp.ops.softmax.structured.trees import Tree, balanced_tree, huffman_tree, tree_from_children
from hpnlp.ops.table_rows import TableRows, find_rows, is_row_subset
from hpnlp.types import AnyArray, InputError

# Levels whose nodes are scored for all tokens by one product. With more levels, a CPU computes longer than it saves in gathers.
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
    """-log p(label) of each token in nats: the sum of softplus(-sign * (h . table[n] + bias[n])) over the label's path.

    Differentiable by reverse mode, any number of times; `path_nll` has forward mode too. Rows that are on no label's path
    influence nothing, even if they are NaN.

    Args:
      h: [N, D] hidden states.
      table: [R, D] vectors of the V - 1 inner nodes, R >= V - 1; other rows are not used. Or `TableRows` with at least the
        rows that `tree_rows` returns; there is no bias then.
      tree: Over V words, of depth L.
      labels: [N] words.
      bias: [R] added to the nodes' scores; None for no bias.
      ignore_index: Tokens with this label have loss 0 and no gradient, even where h is NaN.

    Returns:
      [N] float32 losses.

    Raises:
      InputError: Shapes do not fit, or a label that is known while tracing is no word. The loss of a token whose label is
        unknown while tracing and no word is NaN.

    Cost:
      O(N D L) time. Memory beside inputs and gradients O(N (D + L)), and a float32 array of the table's size for its gradient.

    References:
      Morin and Bengio 2005, "Hierarchical probabilistic neural network language model", eq. 2.
      Mnih and Hinton 2008, "A scalable hierarchical distributed language model".
    """
    _check(h, table, tree, bias)
    if labels.shape != h.shape[:1]:
        raise InputError(f"labels has shape {labels.shape}: expected {h.shape[:1]}")
    nodes, signs = tree_paths(tree, labels, ignore_index=ignore_index)
    rows, nodes = find_rows(table, nodes)
    labels = labels.astype(jnp.int32)
    ignored = labels == ignore_index
    h = jnp.where(ignored[:, None], jnp.zeros((), h.dtype), h)
    scores: Array = _path_scores(min(DENSE_LEVELS, tree.depth), *vary_alike(h, rows, nodes))
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
    """`tree_nll` from rows that were gathered for each token; differentiable in both modes.

    Args:
      h: [N, D] hidden states.
      rows: [N, L, D] rows of the table at the nodes of `tree_paths`.
      signs: [N, L] signs of `tree_paths`. Tokens whose signs are all 0 have loss 0 and no gradient.
      bias_rows: [N, L] entries of the bias at the nodes; None for no bias.

    Returns:
      [N] float32 losses in nats.

    Cost:
      O(N L D) time and memory.
    """
    h, rows = widened(h, rows)
    ignored = jnp.all(signs == 0, axis=1)
    h = jnp.where(ignored[:, None], jnp.zeros((), h.dtype), h)
    scores = jnp.sum(h.astype(jnp.float32)[:, None] * _round_like(rows, h), axis=-1)
    if bias_rows is not None:
        scores = scores + bias_rows.astype(jnp.float32)
    return _path_sum(scores, signs.astype(jnp.float32))


@array_op("N", labels="N")
def tree_paths(
    tree: Tree, labels: Int[Array, " N"], *, ignore_index: int = -100
) -> tuple[Int[Array, "N L"], Float[Array, "N L"]]:
    """Inner nodes on the paths to the labels, and the branches taken there.

    Args:
      tree: Tree of depth L.
      labels: [N] words.
      ignore_index: Tokens with this label get node 0 and sign 0 throughout.

    Returns:
      (nodes [N, L] int32, signs [N, L] float32). A sign is 1 for the first child and -1 for the second. After the end of a path
      the node is 0, the root, and the sign 0.

    Raises:
      InputError: labels are not integers, or a label that is known while tracing is no word. The signs of a label that is
        unknown while tracing and no word are NaN.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise InputError(f"labels are {labels.dtype}: expected integers, the id of each token's word")
    if not isinstance(labels, Tracer):
        ids = np.asarray(labels)
        invalid = ids[(ids != ignore_index) & ((ids < 0) | (ids >= tree.vocab))]
        if invalid.size:
            raise InputError(f"a label is {invalid[0]}: expected 0 to {tree.vocab - 1}, or ignore_index={ignore_index}")
    labels = labels.astype(jnp.int32)
    is_word = _is_word(tree, labels)
    words = jnp.where(is_word, labels, 0)
    nodes = jnp.where(is_word[:, None], jnp.asarray(tree.nodes)[words], 0)
    signs = jnp.asarray(tree.signs)[words].astype(jnp.float32)
    no_word_sign = jnp.where(labels == ignore_index, jnp.float32(0), jnp.nan)
    return nodes, jnp.where(is_word[:, None], signs, no_word_sign[:, None])


@array_op()
def tree_rows(tree: Tree, labels: Int[Array, " N"], *, ignore_index: int = -100) -> Int[Array, " R"]:
    """Rows of the table that `tree_nll` reads for these labels.

    They are the first rows, which are scored for all tokens, and the nodes of the labels' paths on each deeper level.

    Args:
      tree: The tree.
      labels: [N] words.
      ignore_index: Label of tokens that do not count.

    Returns:
      [R] int32 rows, some of them repeated; row 0 is padding.
    """
    nodes = tree_paths(tree, labels, ignore_index=ignore_index)[0]
    inner = max(tree.vocab - 1, 1)
    rows = [jnp.arange(min(2**DENSE_LEVELS - 1, inner), dtype=jnp.int32)]
    for level in range(DENSE_LEVELS, tree.depth):
        bound = min(labels.shape[0], 2**level, inner)  # at least the number of different nodes on this level
        rows.append(jnp.unique(nodes[:, level], size=bound, fill_value=0))
    return jnp.concatenate(rows)


@array_op("N", h="N")
def tree_log_probs(
    h: Float[Array, "N D"], table: Float[Array, "R D"], tree: Tree, *, bias: Float[Array, " R"] | None = None
) -> Float[Array, "N V"]:
    """Log-probabilities of all words.

    Arguments: see `tree_nll`.

    Returns:
      [N, V] float32.

    Cost:
      2 N V D operations and O(N V log L) more; memory O(N V).
    """
    _check(h, table, tree, bias)
    inner = tree.vocab - 1
    scores = _dot(h, table[:inner].astype(h.dtype), 1)
    if bias is not None:
        scores = scores + bias[:inner].astype(jnp.float32)[None]
    # All nodes, inner ones first and then words: the log-probability of the step from the parent to the node, and the parent.
    children = jnp.asarray(tree.children)
    child_index = jnp.where(children < 0, inner + ~children, children)
    steps = jnp.stack([jax.nn.log_sigmoid(scores), jax.nn.log_sigmoid(-scores)], axis=-1)
    total = jnp.zeros((h.shape[0], inner + tree.vocab), jnp.float32).at[:, child_index].set(steps)
    ancestor = jnp.zeros(inner + tree.vocab, jnp.int32).at[child_index].set(jnp.arange(inner, dtype=jnp.int32)[:, None])
    # Pointer doubling: each round doubles the number of steps in `total`. The root is its own ancestor, with a step of 0.
    for _ in range((tree.depth - 1).bit_length() if tree.depth else 0):
        total, ancestor = total + total[:, ancestor], ancestor[ancestor]
    return total[:, inner:]


@array_op("N", h="N")
def tree_top_k(
    h: Float[Array, "N D"], table: Float[Array, "R D"], tree: Tree, k: int, *, bias: Float[Array, " R"] | None = None
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """The k most probable words of each token, exact; ties may be broken in any way.

    The search is branch and bound, depth first, the more probable child first. No word is more probable than the inner nodes
    above it, so that a node is left out if it is no better than the k-th best word so far. A token whose search meets NaN gets
    NaN.

    Args:
      h: As in `tree_nll`.
      table: As in `tree_nll`.
      tree: As in `tree_nll`.
      k: Number of words.
      bias: As in `tree_nll`.

    Returns:
      (log_probs [N, k] float32, words [N, k] int32), best first.

    Raises:
      InputError: k is not 1 to V.

    Cost:
      A peaked distribution visits about k L nodes, a flat one up to V. Tokens run side by side until the last is done. Memory
      O(N (D + L + k)).
    """
    _check(h, table, tree, bias)
    check_k(k, tree.vocab)
    if not tree.depth:
        return jnp.zeros((h.shape[0], 1), jnp.float32), jnp.zeros((h.shape[0], 1), jnp.int32)
    children = jnp.asarray(tree.children)
    levels = jnp.arange(tree.depth + 1, dtype=jnp.int32)

    def search(row: Array) -> tuple[Array, Array]:
        def visit(state: _Search) -> _Search:
            log_probs = state.log_prob + _branch_log_probs(row, table, bias, state.node)
            return _visit_node(state, levels, log_probs, children[state.node])

        state = visit(_Search.start(tree.depth, k))
        state = lax.while_loop(lambda state: (state.depth > 0) & ~state.met_nan, visit, state)
        return jnp.where(state.met_nan, jnp.nan, state.best), state.words

    return jax.vmap(search)(h)


class _Search(NamedTuple):
    """State of the search of one token: the node to visit next, the waiting nodes of each level, and the k best words.

    A level has at most two waiting nodes: the deepest waiting nodes are visited first, so that a level is empty when a node
    above it is visited. Level 0 is that of the root, and stays empty; depth 0 ends the search.
    """

    node: Array  # index of the node
    depth: Array  # level of the node
    log_prob: Array  # log-probability of the node
    waiting: Array  # [L + 1, 2] log-probabilities of the waiting nodes, -inf for none
    waiting_nodes: Array  # [L + 1, 2] their indices
    best: Array  # [k] log-probabilities of the best words so far
    words: Array  # [k] ids of the best words so far
    met_nan: Array  # whether a log-probability was NaN

    @classmethod
    def start(cls, depth: int, k: int) -> _Search:
        waiting = jnp.full((depth + 1, 2), -jnp.inf, jnp.float32)
        zero = jnp.int32(0), jnp.int32(0), jnp.float32(0)
        waiting_nodes = jnp.zeros((depth + 1, 2), jnp.int32)
        best = jnp.full(k, -jnp.inf, jnp.float32)
        return cls(*zero, waiting, waiting_nodes, best, jnp.zeros(k, jnp.int32), jnp.bool_(False))


def _visit_node(
    state: _Search, levels: Int[Array, " L1"], log_probs: Float[Array, " 2"], children: Int[Array, " 2"]
) -> _Search:
    """The search after the visit of a node with these children and their log-probabilities; levels: 0 to L."""
    k = state.best.shape[0]
    best, order = lax.top_k(jnp.concatenate([state.best, jnp.where(children < 0, log_probs, -jnp.inf)]), k)
    words = jnp.concatenate([state.words, ~children])[order]
    waiting = state.waiting.at[state.depth + 1].set(jnp.where(children < 0, -jnp.inf, log_probs))
    waiting_nodes = state.waiting_nodes.at[state.depth + 1].set(children)
    may_win = waiting > best[-1]
    depth = jnp.max(jnp.where(may_win.any(axis=1), levels, 0))
    side = jnp.argmax(waiting[depth]).astype(jnp.int32)
    node, log_prob = waiting_nodes[depth, side], waiting[depth, side]
    waiting = waiting.at[depth, side].set(-jnp.inf)
    return _Search(node, depth, log_prob, waiting, waiting_nodes, best, words, jnp.isnan(log_probs).any())


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
    """Draws a word for each token, with probability proportional to p(word)^(1 / temperature).

    Args:
      h: As in `tree_nll`.
      table: As in `tree_nll`.
      tree: As in `tree_nll`.
      rng: A PRNG key.
      bias: As in `tree_nll`.
      temperature: 0 takes the most probable word.

    Returns:
      [N] int32 words.

    Cost:
      At temperature 1, given as a Python number, a walk from the root, O(N L D); at 0 that of `tree_top_k`. At others that of
      `tree_log_probs`, because a temperature at each node would give another distribution.
    """
    is_static = isinstance(temperature, int | float)
    if is_static and temperature == 0:
        return tree_top_k(h, table, tree, 1, bias=bias)[1][:, 0]
    if not is_static or temperature != 1:
        return sample(tree_log_probs(h, table, tree, bias=bias), rng, temperature=temperature).astype(jnp.int32)
    _check(h, table, tree, bias)
    if not tree.depth:
        return jnp.zeros(h.shape[0], jnp.int32)
    children = jnp.asarray(tree.children)

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        level, position = state  # ~word once a word is reached
        node = jnp.maximum(position, 0)
        log_prob = jax.vmap(lambda row, node: _branch_log_probs(row, table, bias, node)[0])(h, node)
        points = jax.random.uniform(jax.random.fold_in(rng, level), position.shape, jnp.float32)
        side = jnp.where(points < jnp.exp(log_prob), 0, 1)
        return level + 1, jnp.where(position < 0, position, children[node, side])

    start = jnp.int32(0), jnp.zeros(h.shape[0], jnp.int32)
    return ~lax.while_loop(lambda state: (state[1] >= 0).any(), step, start)[1]


def _dot(a: Array, b: Array, axis: int) -> Array:
    """Contracts both arrays along this axis, with float32 sums."""
    return lax.dot_general(a, b, (((axis,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _path_scores(dense: int, h: Array, table: Array, nodes: Array) -> Float[Array, "N L"]:
    """Scores h . table[node] of the nodes of every path; those of the first `dense` levels come from one product.

    The others are computed a level at a time, so that no [N, L, D] array exists. The derivative is written out because the
    derivative of the loop that JAX derives makes a new array of the table's size for each level.
    """
    top = min(2**dense - 1, table.shape[0])
    wide = h.astype(jnp.float32)
    scores = jnp.take_along_axis(_dot(wide, _round_like(table[:top], h), 1), nodes[:, :dense], axis=1)
    if dense == nodes.shape[1]:
        return scores

    def level(_: None, nodes: Array) -> tuple[None, Array]:
        return None, jnp.sum(wide * _round_like(table[nodes], h), axis=1)

    return jnp.concatenate([scores, lax.scan(level, None, nodes[:, dense:].T)[1].T], axis=1)


@accepts_numpy
def _path_scores_forward(dense: int, h: Array, table: Array, nodes: Array) -> tuple[Array, Any]:
    return _path_scores(dense, h, table, nodes), (h, table, nodes)


def _path_scores_backward(dense: int, saved: PyTree, slopes: Array) -> tuple[Array, Array, None]:
    """Gradients of h and table: one product for the `dense` upper levels, and a loop over the lower ones."""
    h, table, nodes = saved
    rows = table.shape[0]
    top = min(2**dense - 1, rows)
    dense_nodes = nodes[:, :dense]
    tokens = jnp.arange(h.shape[0], dtype=jnp.int32)[:, None]
    dense_slopes = jnp.zeros((h.shape[0], top), jnp.float32).at[tokens, dense_nodes].add(slopes[:, :dense])
    # Rows that no path of the batch visits are left out: they may be NaN, and 0 x NaN is NaN.
    dense_rows = jnp.where((dense_slopes != 0).any(axis=0)[:, None], _round_like(table[:top], h), 0.0)
    wide = h.astype(jnp.float32)

    def level(sums: PyTree, x: PyTree) -> tuple[Any, None]:
        dh, dtable = sums
        nodes, slopes = x
        dh = dh + slopes[:, None] * _round_like(table[nodes], h)
        # After the end of a path the slope is 0. Adding it to the root, row 0, would be slow: all such tokens add there.
        return (dh, dtable.at[jnp.where(slopes == 0, rows, nodes)].add(slopes[:, None] * wide, mode="drop")), None

    dtable = vary_alike(jnp.zeros(table.shape, jnp.float32), h)[0].at[:top].set(_dot(dense_slopes, wide, 0))
    sums = _dot(dense_slopes, dense_rows.T, 1), dtable
    if dense < nodes.shape[1]:
        sums = lax.scan(level, sums, (nodes[:, dense:].T, slopes[:, dense:].T))[0]
    dh, dtable = sums
    return dh.astype(h.dtype), dtable.astype(table.dtype), None


_path_scores.defvjp(_path_scores_forward, _path_scores_backward)


def _round_like(rows: Array, h: Array) -> Array:
    """Rows rounded to the dtype of h, as a product with h would round them, in float32."""
    return rows.astype(h.dtype).astype(jnp.float32)


def _path_sum(scores: Float[Array, "N L"], signs: Float[Array, "N L"]) -> Float[Array, " N"]:
    """Sum of the losses of the nodes on a path; those after its end, with sign 0, count 0."""
    ended = signs == 0
    return jnp.sum(jnp.where(ended, 0.0, jax.nn.softplus(jnp.where(ended, 0.0, -signs * scores))), axis=1)


def _branch_log_probs(row: Array, table: Array, bias: Array | None, node: Array) -> Float[Array, " 2"]:
    """Log-probabilities of a node's children, given that the path reaches the node; row [D] is a token's state."""
    score = jnp.sum(row.astype(jnp.float32) * _round_like(table[node], row))
    if bias is not None:
        score = score + bias[node].astype(jnp.float32)
    return jax.nn.log_sigmoid(jnp.stack([score, -score]))


def _is_word(tree: Tree, labels: Array) -> Array:
    return (labels >= 0) & (labels < tree.vocab)


def _check(h: AnyArray, table: Any, tree: Tree, bias: AnyArray | None) -> None:
    """Raises InputError if h, table and bias do not fit the tree."""
    is_subset = is_row_subset(table)
    shape = (table.values if is_subset else table).shape
    if h.ndim != 2 or len(shape) != 2 or h.shape[1] != shape[1]:
        raise InputError(f"h {h.shape}, table {shape}: expected [N, D] and [V - 1, D]; flatten tokens to one axis")
    if is_subset:
        if bias is not None:
            raise InputError("bias: expected None beside rows of a table; leave it out, or pass the whole table")
        return
    if table.shape[0] < tree.vocab - 1:
        raise InputError(
            f"table has {table.shape[0]} rows: expected at least {tree.vocab - 1}, one for each inner node of a tree over "
            f"{tree.vocab} words"
        )
    if bias is not None and bias.shape != table.shape[:1]:
        raise InputError(f"bias has shape {bias.shape}: expected {table.shape[:1]}, one number for each row of table")
