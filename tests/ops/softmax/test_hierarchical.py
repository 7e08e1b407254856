"""Hierarchical softmax against its definition in float64, Huffman's algorithm with a heap, and torch."""

import functools
import heapq
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from hpnlp.ops.softmax.structured import hierarchical as ops
from hpnlp.ops.softmax.structured.hierarchical import (
    balanced_tree,
    huffman_tree,
    path_nll,
    tree_from_children,
    tree_log_probs,
    tree_nll,
    tree_paths,
    tree_rows,
    tree_sample,
    tree_top_k,
)
from hpnlp.ops.table_rows import TableRows
from tests.contracts import ONCE, assert_close, assert_float16_has_gradients, once
from tests.messages import raises


def random_children(vocab, seed=0):
    """Children of a random tree: joins random pairs of subtrees; inner nodes have random numbers."""
    rng = np.random.default_rng(seed)
    numbers, subtrees = rng.permutation(vocab - 1), [~w for w in range(vocab)]
    children = np.zeros((vocab - 1, 2), np.int64)
    for number in numbers:
        children[number] = [subtrees.pop(rng.integers(len(subtrees))) for _ in range(2)]
        subtrees.append(number)
    return children


def chain(vocab):
    """Children of a tree in which word w has depth w + 1."""
    return np.array([[~w, w + 1 if w < vocab - 2 else ~(vocab - 1)] for w in range(vocab - 1)]).reshape(vocab - 1, 2)


def zipf(vocab):
    return 1000 // np.arange(1, vocab + 1) + 1


TREES = {
    "balanced": balanced_tree(43),
    "whole": balanced_tree(16),
    "huffman": huffman_tree(zipf(43)),
    "random": tree_from_children(random_children(43)),
    "chain": tree_from_children(chain(10)),
    "two": balanced_tree(2),
    "one": balanced_tree(1),
}
all_trees = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


def arrays(tree, n=9, dim=5, dtype="float32", beyond=3, scale=1.0):
    rng = np.random.default_rng(n + tree.vocab)
    rows = tree.vocab - 1 + beyond
    h, table = (jnp.asarray((scale * rng.standard_normal(shape)).astype(dtype)) for shape in ((n, dim), (rows, dim)))
    labels = jnp.asarray(rng.integers(0, tree.vocab, n).astype(jnp.int32))
    return h, table, labels, jnp.asarray(rng.standard_normal(rows).astype(jnp.float32))


def walks(children, root=0):
    """Paths of all words as pairs of a node and a side, by traversal of the tree."""
    actual, open_paths = {}, [(root if len(children) else -1, ())]
    while open_paths:
        at, path = open_paths.pop()
        if at < 0:
            assert ~at not in actual
            actual[~at] = path
        else:
            open_paths += [(int(child), (*path, (int(at), side))) for side, child in enumerate(children[at])]
    return [actual[word] for word in range(len(children) + 1)]


def definition(h, table, bias, tree, labels, cotangent):
    """Losses, and gradients of their sum weighted by the cotangent, node by node as in word2vec."""
    h, table, bias = (np.asarray(x, np.float64) for x in (h, table, bias))
    paths, losses = walks(tree.children), np.zeros(len(h))
    slopes = [np.zeros_like(x) for x in (h, table, bias)]
    for i, label in enumerate(np.asarray(labels)):
        for node, side in paths[label]:
            p = scipy.special.expit(h[i] @ table[node] + bias[node])
            losses[i] -= np.log(1 - p if side else p)
            slope = cotangent[i] * (p - (1 - side))
            slopes[0][i] += slope * table[node]
            slopes[1][node] += slope * h[i]
            slopes[2][node] += slope
    return losses, slopes


def all_log_probs(h, table, bias, tree):
    h, table, bias = (np.asarray(x, np.float64) for x in (h, table, bias))
    step = lambda node, side: scipy.special.log_expit((1 - 2 * side) * (h @ table[node] + bias[node]))  # noqa: E731
    return np.stack([sum([step(*turn) for turn in path], np.zeros(len(h))) for path in walks(tree.children)], axis=1)


# Trees


def check_form(tree):
    """Asserts that paths are those of `children`, padded with node 0 and sign 0, and that numbers rise from level to level."""
    paths = walks(tree.children)
    assert (tree.vocab, tree.depth) == (len(paths), max(map(len, paths)))
    assert (tree.nodes.dtype, tree.signs.dtype, tree.children.dtype) == (np.int32, np.int8, np.int32)
    assert tree.children.shape == (tree.vocab - 1, 2)
    levels = np.zeros(tree.vocab - 1, int)
    for word, path in enumerate(paths):
        padding = [0] * (tree.depth - len(path))
        assert tree.nodes[word].tolist() == [node for node, _ in path] + padding
        assert tree.signs[word].tolist() == [1 - 2 * side for _, side in path] + padding
        levels[[node for node, _ in path]] = np.arange(len(path))
    assert (np.diff(levels) >= 0).all()


@all_trees
def test_trees_are_consistent(tree):
    check_form(tree)


def test_balanced_depths_and_order():
    for vocab in [*range(1, 18), 31, 33, 64]:
        tree = balanced_tree(vocab)
        check_form(tree)
        depths = [len(path) for path in walks(tree.children)]
        assert max(depths) == math.ceil(math.log2(vocab)) and max(depths) - min(depths) <= 1
        assert depths == sorted(depths)
        in_order = sorted(range(vocab), key=lambda word: [side for _, side in walks(tree.children)[word]])
        assert in_order == list(range(vocab))


def textbook(counts):
    """Expected depth times the number of tokens: the sum of the weights of all merges of the two lightest nodes."""
    queue, total = list(counts), 0
    heapq.heapify(queue)
    while len(queue) > 1:
        pair = heapq.heappop(queue) + heapq.heappop(queue)
        heapq.heappush(queue, pair)
        total += pair
    return total


@settings(max_examples=40)
@given(st.lists(st.one_of(st.integers(1, 5), st.integers(1, 10**12)), min_size=1, max_size=40))
def test_huffman_is_optimal_with_deterministic_ties(counts):
    tree = huffman_tree(np.array(counts))
    check_form(tree)
    depths = (tree.signs != 0).sum(axis=1)
    assert sum(n * int(d) for n, d in zip(counts, depths, strict=True)) == textbook(counts)
    p = np.array(counts) / sum(counts)
    entropy = -(p * np.log2(p)).sum()
    assert entropy - 1e-9 <= (p * depths).sum() < entropy + 1 or len(counts) == 1
    order = sorted(range(len(counts)), key=lambda word: (-counts[word], word))
    assert (np.diff(depths[order]) >= 0).all()


def test_huffman_of_equal_and_of_doubling_counts():
    for name in ("nodes", "signs", "children"):
        np.testing.assert_array_equal(getattr(huffman_tree(np.ones(43)), name), getattr(balanced_tree(43), name))
    assert huffman_tree(2.0 ** np.arange(30)).depth == 29
    # With leaves merged before inner nodes of the same weight, the tree of 1 1 2 2 has depth 2.
    assert huffman_tree(np.array([2, 2, 1, 1])).depth == 2


@pytest.mark.parametrize("vocab", [1, 2, 3, 8, 43])
def test_tree_from_children_keeps_the_shape(vocab):
    for seed in range(5):
        children = random_children(vocab, seed)
        root = next(iter(set(range(vocab - 1)) - set(children.ravel().tolist())), 0)
        tree = tree_from_children(children)
        check_form(tree)
        sides = lambda paths: [[side for _, side in path] for path in paths]  # noqa: E731
        assert sides(walks(children, root)) == sides(walks(tree.children))


CHILDREN = (
    ([[0, 1, 2]], r"shape \(1, 3\): expected integers \[V - 1, 2\]"),
    ([[-1.0, -2.0]], "float64"),
    ([[-1, 1]], "1 is no node: expected 0 to 0"),
    ([[-1, -3]], "-3 is no node"),
    ([[1, 1], [-1, -2]], "node 0 has one child"),
    ([[1, -1], [-1, -2]], "word 0 is at 2 leaves"),
    ([[1, 0], [-1, -2]], "word 2 is at 0 leaves"),
    ([[1, 2], [2, -1], [-2, -3], [-4, -5]], "nodes 0, 3 are children of no node"),
    ([[-1, -2], [2, -3], [1, -4]], "nodes 1, 2 form a cycle"),
    ([[-1, -2], [1, -3]], "nodes 1 form a cycle"),
)
COUNTS = (([3, 0, 1], r"counts\[1\] is 0.*add one"), ([1.0, math.nan], "nan"), ([1.0, math.inf], "inf"), ([-1], "-1"))
H, TABLE, LABELS = np.ones((9, 5), np.float32), np.ones((42, 5), np.float32), np.ones(9, np.int32)
CALL = {"h": H, "table": TABLE, "tree": TREES["balanced"], "labels": LABELS}
INVALID = (
    *((tree_from_children, {"children": np.array(children)}, message) for children, message in CHILDREN),
    *((huffman_tree, {"counts": np.array(counts)}, message) for counts, message in COUNTS),
    (balanced_tree, {"vocab": 0}, "at least one word"),
    (huffman_tree, {"counts": np.zeros(0)}, "one number for each"),
    (tree_nll, CALL | {"h": H[:, :4]}, r"h \(9, 4\), table \(42, 5\)"),
    (tree_nll, CALL | {"h": H[None]}, "flatten tokens"),
    (tree_nll, CALL | {"labels": H[:, 0]}, "expected integers"),
    (tree_nll, CALL | {"labels": LABELS[1:]}, r"labels has shape \(8,\)"),
    (tree_nll, CALL | {"bias": H[:, 0]}, r"shape \(9,\): expected"),
    (tree_nll, CALL | {"table": TABLE[1:]}, "table has 41 rows: expected at least 42"),
    (
        tree_nll,
        CALL | {"table": TableRows(jnp.arange(42), jnp.asarray(TABLE)), "bias": TABLE[:, 0]},
        "expected None beside rows",
    ),
    (tree_log_probs, {"h": H, "table": TABLE[1:], "tree": TREES["balanced"]}, "table has 41 rows"),
    (
        tree_sample,
        {"h": H, "table": TABLE[1:], "tree": TREES["balanced"], "rng": np.uint32([0, 7])},
        "table has 41 rows",
    ),
    (tree_top_k, {"h": H, "table": TABLE[1:], "tree": TREES["balanced"], "k": 2}, "table has 41 rows"),
    *((tree_top_k, {"h": H, "table": TABLE, "tree": TREES["balanced"], "k": k}, f"k {k}: expected 1") for k in (0, 44)),
)


@pytest.mark.usefixtures("symbolic_sizes")  # a type checker would raise first
def test_invalid_arguments_raise():
    for function, arguments, message in INVALID:
        raises(message, function, **arguments)


@pytest.mark.slow
def test_large_trees_are_complete():
    assert balanced_tree(455_000).depth == 19
    tree = huffman_tree(4_000_000 // np.arange(1, 455_001) + 1)
    assert tree.depth < 30 and (np.sort(~tree.children[tree.children < 0]) == np.arange(455_000)).all()
    assert (np.ldexp(1.0, -(tree.signs != 0).sum(axis=1))).sum() == 1


# The loss


@pytest.mark.parametrize(
    ("name", "dense"), [*((name, 2) for name in TREES), ("huffman", 0), ("huffman", 6), ("balanced", 6)]
)
def test_losses_and_gradients_match_definition(name, dense, monkeypatch):
    monkeypatch.setattr(ops, "DENSE_LEVELS", dense)
    tree = TREES[name]
    h, table, labels, bias = arrays(tree)
    cotangent = np.cos(np.arange(h.shape[0], dtype=np.float32))

    def run(h, table, bias, tree, labels):
        losses, pull = jax.vjp(lambda *given: tree_nll(*given[:2], tree, labels, bias=given[2]), h, table, bias)
        return losses, pull(jnp.asarray(cotangent))

    losses, slopes = once(run, h, table, bias, tree, labels)
    expected, expected_slopes = definition(h, table, bias, tree, labels, cotangent)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, expected, rtol=2e-6, atol=1e-6)
    for actual, slope in zip(slopes, expected_slopes, strict=True):
        np.testing.assert_allclose(actual, slope, rtol=5e-6, atol=5e-6)


@all_trees
def test_log_probs_match_definition_and_sum_to_one(tree):
    h, table, _, bias = arrays(tree, 4, scale=2.0)
    actual = once(functools.partial(tree_log_probs, bias=bias), h, table, tree)
    np.testing.assert_allclose(np.exp(np.asarray(actual, np.float64)).sum(axis=1), 1, rtol=1e-6)
    expected = all_log_probs(h, table, bias, tree)
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)


def test_confident_token_keeps_loss():
    """Values match float64; log(1 - sigmoid) of a rounded sigmoid would be 0 or infinite."""
    tree, table = balanced_tree(2), jnp.ones((1, 1))
    actual = once(tree_nll, jnp.array([[30.0], [30.0], [-90.0]]), table, tree, jnp.array([0, 1, 0]))
    np.testing.assert_allclose(actual, [np.log1p(np.exp(-30.0)), 30.0, 90.0], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_sixteen_bits_accumulate_in_float32(dtype):
    """With this number of tokens, a gradient that is summed in 16 bits would be inaccurate."""
    tree = TREES["huffman"]
    h, table, labels, bias = arrays(tree, 500, 16, dtype, scale=0.5)

    def run(h, table):
        losses, pull = jax.vjp(lambda h, table: tree_nll(h, table, tree, labels, bias=bias), h, table)
        return losses, pull(jnp.full(500, 1e-4, jnp.float32))

    actual, slopes = once(run, h, table)
    assert actual.dtype == jnp.float32 and all(slope.dtype == jnp.dtype(dtype) for slope in slopes)
    expected, expected_slopes = definition(h, table, bias, tree, labels, np.full(500, 1e-4))
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)
    for slope, reference in zip(slopes, expected_slopes[:2], strict=True):
        assert np.linalg.norm(np.asarray(slope, np.float64) - reference) <= 0.004 * np.linalg.norm(reference)


@pytest.mark.parametrize("gathered", [pytest.param(False, marks=pytest.mark.slow), True])
def test_small_gradients_do_not_underflow_in_float16(gathered):
    rng = np.random.default_rng(0)
    h, table = (jnp.asarray(rng.standard_normal((count, 5)).astype(jnp.float32)) for count in (9, 42))
    labels = jnp.arange(9, dtype=jnp.int32)
    nodes, signs = tree_paths(TREES["balanced"], labels)

    def loss(h, table):
        table = 100 * table
        each = path_nll(h, table[nodes], signs) if gathered else tree_nll(h, table, TREES["balanced"], labels)
        return each.sum() * 1e-7

    assert_float16_has_gradients(loss, h / 100, table)


def test_gradients_keep_the_dtype_of_each_operand():
    tree = TREES["balanced"]
    h, table, labels, _ = arrays(tree, dtype="bfloat16")
    run = jax.grad(lambda h, table: tree_nll(h, table, tree, labels).sum(), (0, 1))
    assert [x.dtype for x in once(run, h, table.astype(jnp.float32))] == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize(("name", "dense"), [("balanced", 0), ("chain", 6)])
def test_unvisited_rows_and_ignored_tokens_do_not_contribute(name, dense, monkeypatch):
    """NaN in such rows and tokens changes no loss and no gradient."""
    monkeypatch.setattr(ops, "DENSE_LEVELS", dense)
    tree = TREES[name]
    h, table, labels, bias = arrays(tree)
    labels = (labels % 3).at[4].set(-1).at[0].set(0)
    unused = np.setdiff1d(np.arange(table.shape[0]), tree.nodes[np.asarray(labels)[labels >= 0]])
    assert unused.size > 5 and unused[0] < 2**6 - 1
    silent = (labels == -1)[:, None]

    def run(h, table, bias):
        losses, pull = jax.vjp(lambda *x: tree_nll(*x[:2], tree, labels, ignore_index=-1, bias=x[2]), h, table, bias)
        return losses, pull(jnp.ones_like(losses))

    run = jax.jit(run, compiler_options=ONCE)
    clean = run(h, table, bias)
    dirty = run(jnp.where(silent, jnp.nan, h), table.at[unused].set(jnp.nan), bias.at[unused].set(jnp.nan))
    for a, b in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)
    assert clean[0][4] == 0 and not np.asarray(clean[1][0])[4].any()


@pytest.mark.parametrize("name", ["balanced", "one"])
def test_invalid_labels_give_nan_or_raise(name):
    tree = TREES[name]
    h, table, _, _ = arrays(tree, 3)
    for label in (tree.vocab, -1):
        labels = jnp.asarray(np.array([0, label, 0], np.int32))
        np.testing.assert_array_equal(np.isnan(once(tree_nll, h, table, tree, labels)), [False, True, False])
        for function in (functools.partial(tree_nll, h, table), tree_rows):
            raises(f"label is {label}: expected 0 to {tree.vocab - 1}", function, tree, labels)
    if tree.depth:
        nodes, signs = once(lambda labels: tree_paths(tree, labels), labels)
        rows = table[nodes]
        np.testing.assert_array_equal(np.isnan(once(path_nll, h, rows, signs)), [False, True, False])


def test_vmap_and_checkpoint_match_reference():
    """Applies vmap over states and labels or over tables, and checkpoint."""
    tree = TREES["huffman"]
    h, table, labels, bias = arrays(tree, 5)
    loss = lambda h, table, labels: jnp.sin(tree_nll(h, table, tree, labels, bias=bias)).sum()  # noqa: E731
    slopes = jax.grad(loss, (0, 1))
    grads = jax.jit(slopes, compiler_options=ONCE)
    assert_close(once(jax.grad(jax.checkpoint(loss), (0, 1)), h, table, labels), grads(h, table, labels))
    both = np.stack([labels, labels[::-1]])
    for axes, args in (
        ((0, None, 0), (np.stack([h, -h]), table, both)),
        ((None, 0, None), (h, np.stack([table, -table]), labels)),
    ):
        actual = once(jax.vmap(slopes, axes), *args)
        apart = [grads(*(x if axis is None else x[i] for x, axis in zip(args, axes, strict=True))) for i in (0, 1)]
        assert_close(actual, jax.tree.map(lambda *x: np.stack(x), *apart))


@pytest.mark.slow
def test_second_derivatives_match_reference():
    tree = TREES["huffman"]
    h, table, labels, bias = arrays(tree, 5)
    nodes, signs = tree_paths(tree, labels)
    reference = lambda h, table: jnp.sin(path_nll(h, table[nodes], signs, bias[nodes])).sum()  # noqa: E731
    ours = lambda h, table: jnp.sin(tree_nll(h, table, tree, labels, bias=bias)).sum()  # noqa: E731
    curvature = [
        jax.grad(lambda h, table, f=f: jnp.cos(jax.grad(f, 1)(h, table)).sum() + jax.grad(f)(h, table).sum(), (0, 1))
        for f in (ours, reference)
    ]
    assert_close(*(once(f, h, table) for f in curvature))


def test_two_devices_match_one():
    tree = TREES["balanced"]
    h, table, labels, _ = arrays(tree, 16)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated, cut = jax.P(), jax.P("d")
    run = lambda h, table, labels: jax.lax.psum(tree_nll(h, table, tree, labels).sum(), "d")  # noqa: E731
    apart = jax.shard_map(run, mesh=mesh, in_specs=(cut, replicated, cut), out_specs=replicated)
    expected = jax.value_and_grad(lambda h, table: tree_nll(h, table, tree, labels).sum(), (0, 1))
    actual = once(jax.value_and_grad(lambda h, table: apart(h, table, labels), (0, 1)), h, table)
    assert_close(actual, once(expected, h, table))


def test_memory_does_not_grow_with_depth():
    """Memory is a few arrays like the states and one gradient of the table, for any number of levels."""
    tree = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), balanced_tree(4096))
    n, dim = 512, 128
    shapes = ((n, dim), jnp.float32), ((4096, dim), jnp.float32), ((n,), jnp.int32)
    given = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    run = jax.grad(lambda h, table, tree, labels: tree_nll(h, table, tree, labels).sum(), (0, 1))
    used = jax.jit(run).lower(*given[:2], tree, given[2]).compile().memory_analysis().temp_size_in_bytes
    assert used < 6 * n * dim * 4 < n * tree.depth * dim * 4


# Predictions


@pytest.mark.parametrize(("name", "k"), [("balanced", 7), ("random", 1), ("chain", 9)])
def test_top_k_matches_sorting(name, k):
    """Flat, ordinary, very peaked and equal probabilities in one batch."""
    tree = TREES[name]
    h, table, _, bias = arrays(tree, 40)
    h = h * jnp.asarray(np.repeat([0.0, 0.1, 1.0, 30.0], 10), jnp.float32)[:, None]
    run = jax.jit(lambda h, table, bias: tree_top_k(h, table, tree, k, bias=bias), compiler_options=ONCE)
    for offset in (bias, jnp.zeros_like(bias)):
        actual, words = run(h, table, offset)
        expected = all_log_probs(h, table, offset, tree)
        assert words.dtype == jnp.int32 and actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, -np.sort(-expected, axis=1)[:, :k], rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(np.take_along_axis(expected, np.asarray(words), 1), actual, rtol=2e-6, atol=2e-6)
        assert all(len(set(row)) == k for row in np.asarray(words).tolist())


def test_top_k_nan_stays_within_its_token():
    tree = TREES["balanced"]
    h, table, _, _ = arrays(tree)
    actual = once(functools.partial(tree_top_k, k=2), h.at[1].set(jnp.nan), table, tree)[0]
    np.testing.assert_array_equal(np.isnan(actual).all(axis=1), np.arange(9) == 1)
    assert np.isnan(actual).sum() == 2


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
def test_samples_follow_the_distribution(temperature):
    tree = tree_from_children(random_children(11, 3))
    h, table, _, bias = arrays(tree, 2)
    log_probs = all_log_probs(h, table, bias, tree) / temperature
    probs = scipy.special.softmax(log_probs, axis=1)
    many = jnp.repeat(h, 20000, axis=0)
    run = lambda h, table: tree_sample(h, table, tree, jax.random.key(1), bias=bias, temperature=temperature)  # noqa: E731
    actual = np.asarray(once(run, many, table)).reshape(2, -1)
    for words, p in zip(actual, probs, strict=True):
        assert scipy.stats.chisquare(np.bincount(words, minlength=11), p * words.size).pvalue > 1e-3
        # Neighbours are independent.
        pairs = np.bincount(words[::2] * 11 + words[1::2], minlength=121)
        assert scipy.stats.chisquare(pairs, np.outer(p, p).ravel() * words.size / 2).pvalue > 1e-3


@pytest.mark.parametrize("name", ["huffman", "one"])
def test_temperature_near_zero_takes_the_best_word(name):
    tree = TREES[name]
    h, table, _, bias = arrays(tree, 6)
    key = jax.random.key(0)
    best = all_log_probs(h, table, bias, tree).argmax(axis=1)
    for temperature in (0.0, jnp.float32(0), 1e-6):
        words = once(lambda t=temperature: tree_sample(h, table, tree, key, bias=bias, temperature=t))
        assert words.dtype == jnp.int32
        np.testing.assert_array_equal(words, best)


def test_one_word_has_probability_one():
    tree, table = balanced_tree(1), jnp.zeros((0, 5))
    h = jnp.ones((3, 5))
    loss = lambda h: tree_nll(h, table, tree, jnp.zeros(3, jnp.int32)).sum()  # noqa: E731
    assert not any(np.asarray(x).any() for x in once(jax.value_and_grad(loss), h))
    assert once(tree_log_probs, h, table, tree).tolist() == [[0]] * 3
    assert [x.tolist() for x in once(lambda h: tree_top_k(h, table, tree, 1), h)] == [[[0]] * 3] * 2
    assert once(tree_sample, h, table, tree, jax.random.key(0)).tolist() == [0, 0, 0]


# Errors
