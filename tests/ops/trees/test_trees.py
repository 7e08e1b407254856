"""Batched trees and graphs against loops over nodes written from the papers' equations, and errors of invalid graphs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpnlp.ops.trees import (
    check_labels,
    child_sum_tree_lstm,
    dag,
    fold_graph,
    make_schedule,
    nary_tree_lstm,
    reference_tree_lstm,
    signatures_of,
    tree_graph,
)
from hpnlp.ops.trees.schedule import rounded
from tests.contracts import assert_close, once
from tests.messages import raises

D, H = 5, 6
WIDTHS = (8, 2)


def random_parents(rng, count, trees=3, recent=6):
    """Parents of random trees: each node but the roots is a child of one of the nodes shortly before it."""
    parents = np.full(count, -1)
    for node in range(trees, count):
        parents[node] = rng.integers(max(0, node - recent), node)
    order = rng.permutation(count)  # numbers say nothing about heights
    result = np.full(count, -1)
    result[order] = np.where(parents >= 0, order[parents], -1)
    return result


def binary_parents(rng, leaves):
    """A random binary tree."""
    parents, roots = np.full(2 * leaves - 1, -1), list(range(leaves))
    for node in range(leaves, 2 * leaves - 1):
        for _ in range(2):
            parents[roots.pop(rng.integers(len(roots)))] = node
        roots.append(node)
    return parents


def forest(rng, sizes):
    """Random binary trees, one after another."""
    trees = [binary_parents(rng, leaves) for leaves in sizes]
    starts = np.cumsum([0, *map(len, trees)])
    return np.concatenate([np.where(t >= 0, t + s, -1) for t, s in zip(trees, starts, strict=False)])


def arrays(rng, count, places=0):
    """Inputs and weights, for the child-sum form or for the N-ary form of some places."""
    shape = (places, H, (3 + places) * H) if places else (H, 4 * H)
    normal = lambda *s: rng.normal(size=s).astype(np.float32)  # noqa: E731
    return normal(count, D), normal(D, 4 * H), normal(*shape) * np.float32(0.4), normal(4 * H)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_states(x, w, u, b, children, order):
    """(h, c) of each node in float64 by equations 2 to 14 of Tai et al. 2015, gate by gate."""
    x, w, u, b = (np.asarray(a, np.float64) for a in (x, w, u, b))
    wi, wf, wo, wu = np.split(w, 4, axis=1)
    bi, bf, bo, bu = np.split(b, 4)
    h, c = np.zeros((len(children), H)), np.zeros((len(children), H))
    for j in order:
        below = children[j]
        if u.ndim == 2:
            ui, uf, uo, uu = np.split(u, 4, axis=1)
            hidden = sum((h[k] for k in below), np.zeros(H))
            of = {"i": hidden @ ui, "o": hidden @ uo, "u": hidden @ uu}
            forget = [h[k] @ uf for k in below]
        else:
            by_gate = u.reshape(u.shape[0], H, 3 + u.shape[0], H)
            sums = [sum((h[k] @ by_gate[s, :, g] for s, k in enumerate(below)), np.zeros(H)) for g in range(3 + len(u))]
            of = dict(zip("iou", sums, strict=False))
            forget = sums[3:]
        i, o = sigmoid(x[j] @ wi + of["i"] + bi), sigmoid(x[j] @ wo + of["o"] + bo)
        c[j] = i * np.tanh(x[j] @ wu + of["u"] + bu)
        for k, gate in zip(below, forget, strict=False):
            c[j] += sigmoid(x[j] @ wf + gate + bf) * c[k]
        h[j] = o * np.tanh(c[j])
    return h, c


def children_of(parents):
    return [np.flatnonzero(parents == node).tolist() for node in range(len(parents))]


def score(function, args, seeds):
    """Value, states and gradients of a sum of states weighted at random."""

    def loss(args):
        states = function(*args)
        total = sum(jnp.sum(s.astype(jnp.float32) * w) for s, w in zip(states, seeds, strict=True))
        return total, states

    (_, states), gradients = jax.value_and_grad(loss, has_aux=True)(args)
    return states, gradients


CASES = {
    "binary": (forest(np.random.default_rng(0), [1, 3, 10]), 2),
    "child_sum": (random_parents(np.random.default_rng(1), 24), 0),
    "wide": (np.where(np.arange(40) % 37 == 0, -1, 0), 0),
    "chain": (np.arange(1, 26) % 25 - (np.arange(25) == 24), 0),
    "ternary": (np.array([-1, 0, 0, 0, 1, 1, 4, -1, 7, 7]), 3),
    "alone": (np.array([-1]), 0),
}
# Smaller, because the program of the reference grows with the number of nodes.
SMALL_CASES = {
    "binary": (forest(np.random.default_rng(0), [1, 5]), 2),
    "child_sum": (random_parents(np.random.default_rng(1), 11, trees=2), 0),
    "ternary": CASES["ternary"],
}


def make_case(parents, places):
    rng = np.random.default_rng(2)
    return parents, places, arrays(rng, len(parents), places), [rng.normal(size=(len(parents), H)) for _ in range(2)]


@functools.cache
def case(name):
    return make_case(*CASES[name])


def with_padding(parents, count):
    """The graph of trees, and further nodes that are padding."""
    graph = tree_graph(np.append(parents, np.full(count, -1)))
    is_node = np.arange(len(graph.height)) < len(parents)
    return dataclasses.replace(graph, height=np.where(is_node, graph.height, np.int32(-1)))


def batched(parents, places):
    graph = tree_graph(parents)
    signatures = [(0, 0), (0, places)] if places else None
    schedule = make_schedule(graph, signatures, widths=WIDTHS)
    op = nary_tree_lstm if places else child_sum_tree_lstm
    return graph, lambda *args: op(*args, schedule)


@pytest.mark.parametrize("name", CASES)
def test_states_match_the_equations(name):
    parents, places, args, _ = case(name)
    graph, function = batched(parents, places)
    actual = once(function, *args)
    expected = numpy_states(*args, children_of(parents), np.argsort(graph.height, kind="stable"))
    assert_close(list(actual), [np.float32(e) for e in expected])


@pytest.mark.parametrize("name", SMALL_CASES)
def test_gradients_match_the_reference(name):
    parents, places, args, seeds = make_case(*SMALL_CASES[name])
    seeds = [np.float32(s) for s in seeds]
    graph, function = batched(parents, places)
    actual = once(lambda args: score(function, args, seeds), args)
    expected = once(lambda args: score(lambda *a: reference_tree_lstm(*a, graph), args, seeds), args)
    assert_close(actual, expected)


def test_nodes_with_several_parents_get_all_gradients():
    rng = np.random.default_rng(3)
    children = [[], [], [0, 1], [0, 2], [1, 2, 3], [2, 2], [4, 5, 0]]
    graph = dag(children)
    assert graph.height.tolist() == [0, 0, 1, 2, 3, 2, 4] and graph.use.max() == 3
    args, seeds = arrays(rng, len(children)), [rng.normal(size=(len(children), H)).astype(np.float32) for _ in range(2)]
    schedule = make_schedule(graph, widths=WIDTHS)
    actual = once(lambda args: score(lambda *a: child_sum_tree_lstm(*a, schedule), args, seeds), args)
    expected = once(lambda args: score(lambda *a: reference_tree_lstm(*a, graph), args, seeds), args)
    assert_close(actual, expected)
    h, c = numpy_states(*args, children, range(len(children)))
    assert_close(list(actual[0]), [np.float32(h), np.float32(c)])


def test_inputs_of_leaves_equal_inputs_of_zero_elsewhere():
    parents, places, (x, *weights), seeds = case("binary")
    seeds = [np.float32(s) for s in seeds]
    graph = tree_graph(parents)
    schedule = make_schedule(graph, [(0, 0), (0, 2)], widths=WIDTHS)
    is_leaf = (graph.arity == 0)[:, None]

    def leaves(x, *weights):
        return nary_tree_lstm(x, *weights, schedule, inputs="leaves")

    def all_nodes(x, *weights):
        return nary_tree_lstm(jnp.where(is_leaf, x, jnp.float32(0)), *weights, schedule)

    actual, expected = (once(lambda args, f=f: score(f, args, seeds), (x, *weights)) for f in (leaves, all_nodes))
    assert_close(actual, expected)


def test_bfloat16_is_close_to_float32():
    parents, places, args, seeds = case("child_sum")
    seeds = [jnp.asarray(s, jnp.float32) for s in seeds]
    graph, function = batched(parents, places)
    states, gradients = once(
        lambda args: score(lambda *a: function(*a), args, seeds), (jnp.bfloat16(args[0]), *args[1:])
    )
    assert states.h.dtype == gradients[0].dtype == jnp.bfloat16 and states.c.dtype == gradients[1].dtype == jnp.float32
    expected = numpy_states(
        np.float32(jnp.bfloat16(args[0])), *args[1:], children_of(parents), np.argsort(graph.height)
    )
    assert_close([states.h], [jnp.bfloat16(expected[0])], "bfloat16")


@functools.cache
def fixed_program():
    """The child-sum form for graphs of at most 48 nodes, as one compiled program, and the number of its traces."""
    traces = []

    @jax.jit
    def run(args, seeds, schedule):
        traces.append(1)
        return score(lambda *a: child_sum_tree_lstm(*a, schedule), args, seeds)

    return run, traces


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**16), count=st.integers(1, 48), recent=st.integers(1, 12))
def test_one_program_computes_any_forest(seed, count, recent):
    rng = np.random.default_rng(seed)
    parents = np.append(random_parents(rng, count, trees=min(count, 2), recent=recent), np.full(48 - count, -1))
    graph = tree_graph(parents)
    schedule = make_schedule(graph, [(0, 0), (0, 4), (0, 48)], capacities=(48, 48, 48), levels=48, widths=WIDTHS)
    args, seeds = arrays(rng, 48), [rng.normal(size=(48, H)).astype(np.float32) for _ in range(2)]
    run, traces = fixed_program()
    states, gradients = run(args, seeds, schedule)
    assert len(traces) == 1
    order = np.argsort(graph.height, kind="stable")
    assert_close(list(states), [np.float32(e) for e in numpy_states(*args, children_of(parents), order)])
    # Along a random direction, against differences in float64.
    direction, step = [rng.normal(size=a.shape) for a in args], 1e-5
    values = [
        sum(
            np.sum(s * w)
            for s, w in zip(
                numpy_states(
                    *(a + sign * step * d for a, d in zip(args, direction, strict=True)), children_of(parents), order
                ),
                seeds,
                strict=True,
            )
        )
        for sign in (1, -1)
    ]
    slope = sum(np.sum(np.float64(g) * d) for g, d in zip(gradients, direction, strict=True))
    np.testing.assert_allclose(slope, (values[0] - values[1]) / (2 * step), rtol=1e-3, atol=1e-3)


def test_schedules_of_jax_arrays_equal_those_of_numpy():
    graph = with_padding(random_parents(np.random.default_rng(4), 48), 2)
    options = {"signatures": ((0, 0), (0, 2), (0, 8)), "capacities": (50, 40, 20), "levels": 32, "uses": 1}
    expected = make_schedule(graph, **options)
    actual = once(lambda graph: make_schedule(graph, **options), jax.tree.map(jnp.asarray, graph))
    assert_close(actual, expected)
    assert actual.blocks == expected.blocks and actual.widths == expected.widths


def test_padding_has_no_state_and_no_gradient():
    parents, _, args, seeds = case("child_sum")
    schedule = make_schedule(with_padding(parents, 2), widths=WIDTHS)
    x = np.concatenate([args[0], np.full((2, D), 7, np.float32)])
    seeds = [np.concatenate([np.float32(s), np.ones((2, H), np.float32)]) for s in seeds]
    states, gradients = once(
        lambda args: score(lambda *a: child_sum_tree_lstm(*a, schedule), args, seeds), (x, *args[1:])
    )
    _, function = batched(parents, 0)
    expected = once(lambda args: score(function, args, [s[:-2] for s in seeds]), args)
    assert_close(jax.tree.map(lambda s: s[:-2], states), expected[0])
    assert_close(list(gradients[1:]), list(expected[1][1:]))
    assert np.all(np.asarray(states.h[-2:]) == 0) and np.all(np.asarray(gradients[0][-2:]) == 0)


def test_cells_of_several_ops_evaluate_expressions():
    """Leaves, sums of any number of terms and products of two: three ops with signatures of their own."""
    scale = np.float32([[2.0]])
    cells = (
        lambda product, x, children: x,
        lambda product, x, children: children.sum(axis=1),
        lambda product, x, children: product("scale", children.prod(axis=1)),
    )
    # (1 + 2 + 3) * 2 * (4 * 2 * 5) = 480, and 7
    children = [[2, 6], [], [3, 4, 5], [], [], [], [7, 8], [], []]
    ops = [2, 0, 1, 0, 0, 0, 2, 0, 0]
    values = np.float32([[0], [7], [0], [1], [2], [3], [0], [4], [5]])
    graph = dag(children, ops=ops)
    schedule = make_schedule(graph, widths=WIDTHS)
    assert [b[:2] for b in schedule.blocks] == [(0, 0), (1, 8), (2, 2)] == list(signatures_of(graph))

    def run(values, scale):
        return fold_graph(cells, {"scale": scale}, values, schedule, jax.ShapeDtypeStruct((1,), jnp.float32))

    def result_and_gradients(values, scale):
        result, pull = jax.vjp(run, values, scale)
        return result, pull(jnp.zeros_like(result).at[0].set(1.0))

    result, (d_values, d_scale) = once(result_and_gradients, values, scale)
    assert result[:, 0].tolist() == [480, 7, 6, 1, 2, 3, 40, 4, 5]
    assert d_scale.tolist() == [[480.0]]
    assert d_values[:, 0].tolist() == [0, 0, 0, 80, 80, 80, 0, 120, 96]


def test_sizes_are_rounded_to_few_numbers():
    sizes = [rounded(count) for count in range(5000)]
    assert all(count <= size <= max(16, 1.25 * count + 1) for count, size in enumerate(sizes)) and len(set(sizes)) < 45


SIGNATURES = ((0, 0), (0, 2))
INVALID = {
    "cycle": (
        lambda: tree_graph([1, 2, 0, -1]),
        r"node 0 is its own descendant \(children: 0 -> 2 -> 1 -> 0\): remove one",
    ),
    "itself": (lambda: dag([[0]]), "node 0 is its own descendant"),
    "parent": (
        lambda: tree_graph([-1, 7]),
        r"node 1 has the parent 7: expected 0 to 1, or -1 for a root: correct parents\[1\]",
    ),
    "child": (lambda: dag([[], [0, -1]]), r"node 1 has the child -1: expected 0 to 1: correct children\[1\]"),
    "label": (
        lambda: check_labels([0, 3, 9], 4),
        "node 2 has the unknown label 9: expected 0 to 3: map unknown labels",
    ),
    "range": (lambda: tree_graph([-1, 2**32]), r"parents\[1\] = 4294967296: expected at most 2147483647"),
    "empty": (lambda: make_schedule(tree_graph([])), "signatures: none, as for a graph without nodes"),
    "nodes": (
        lambda: child_sum_tree_lstm(*arrays(np.random.default_rng(0), 2), make_schedule(tree_graph([-1, 0, 0]))),
        r"inputs \(2, 24\) for a schedule of 3 nodes: pass one row",
    ),
    "dtype": (lambda: tree_graph([0.5]), "parents: float64 .*: expected whole numbers in one axis"),
    "ops": (lambda: tree_graph([-1], ops=[0, 1]), "ops: 2 numbers for 1 nodes"),
    "signature": (
        lambda: make_schedule(tree_graph([-1, 0, 0, 0]), SIGNATURES),
        r"node 0 has op 0 and 3 children, which no entry of signatures=.* has places for: add \(0, 3\)",
    ),
    "order": (
        lambda: make_schedule(tree_graph([-1]), ((0, 2), (0, 0))),
        "the numbers of children of an op must ascend",
    ),
    "widths": (
        lambda: make_schedule(tree_graph([-1]), widths=(2, 8)),
        "widths=.*: expected positive numbers that fall",
    ),
    "capacity": (
        lambda: make_schedule(tree_graph([-1, 0, 0]), SIGNATURES, capacities=(1, 1)),
        r"2 nodes of signature \(0, 0\), with capacity 1",
    ),
    "capacities": (
        lambda: make_schedule(tree_graph([-1]), SIGNATURES, capacities=(1,)),
        "capacities: 1 for 2 signatures",
    ),
    "levels": (lambda: make_schedule(tree_graph([-1, 0]), levels=1), "levels=1: the graph needs 2: raise levels"),
    "jax": (
        lambda: make_schedule(jax.tree.map(jnp.asarray, tree_graph([-1]))),
        "a graph of jax arrays needs signatures",
    ),
    "cells": (
        lambda: fold_graph(
            (), {}, np.zeros((1, 1)), make_schedule(tree_graph([-1])), jax.ShapeDtypeStruct((1,), "float32")
        ),
        "the graph has the op 0, and there are 0 cells",
    ),
    "places": (
        lambda: nary_tree_lstm(*arrays(np.random.default_rng(0), 4, 2), make_schedule(tree_graph([-1, 0, 0, 0]))),
        "schedule: a signature has 8 places for children, and u is for 2",
    ),
    "shape": (
        lambda: child_sum_tree_lstm(
            np.zeros((1, 2)), np.zeros((2, 20)), np.zeros((6, 20)), np.zeros(20), make_schedule(tree_graph([-1]))
        ),
        re.escape("u (6, 20): expected (6, 24)"),
    ),
    "inputs": (
        lambda: nary_tree_lstm(*arrays(np.random.default_rng(0), 1, 2), make_schedule(tree_graph([-1])), inputs="leaf"),
        "inputs='leaf': expected 'all' or 'leaves'",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_raise(name):
    function, message = INVALID[name]
    raises(message, function)
