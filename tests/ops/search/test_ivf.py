"""Search in cells: exactness with all cells, recall with few, and no lost rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.search import cells
from hpnlp.ops.search.exact import recall
from hpnlp.ops.search.ivf import build_ivf, ivf_search
from tests.contracts import ONCE, once
from tests.messages import raises
from tests.ops.search.tables import by_sorting, clustered


@functools.cache
def program(k, probes):
    return jax.jit(functools.partial(ivf_search, k=k, probes=probes), compiler_options=ONCE)


def search(index, q, k, probes):
    return program(k, probes)(index, q)


def cell_of(index):
    """The cell of each row."""
    assignment = np.empty(index.shape[0], int)
    assignment[np.asarray(index.ids)] = np.repeat(np.arange(index.starts.size - 1), np.diff(index.starts))
    return assignment


@pytest.mark.parametrize(
    ("vocab", "cells", "capacity", "biased"),
    [(331, 7, 48, False), (331, 7, None, True), (43, 43, 1, False), (5, 1, None, True), (1, 1, None, False)],
    ids=str,
)
def test_probing_all_cells_is_exact_search(vocab, cells, capacity, biased):
    q, w, bias = clustered(vocab, 6)
    arguments = bias if biased else None
    index = build_ivf(w, cells=cells, iterations=3, capacity=capacity, bias=arguments)
    np.testing.assert_array_equal(np.sort(index.ids), np.arange(vocab))
    sizes = np.diff(index.starts)
    assert index.starts[0] == 0 and sizes.sum() == vocab and sizes.max() <= index.capacity
    np.testing.assert_array_equal(np.asarray(index.rows)[:vocab], np.asarray(w)[np.asarray(index.ids)])
    k = vocab if vocab < 50 else 10
    scores, ids = search(index, q, k, cells)
    expected = by_sorting(q, w, k, bias=arguments)
    assert (scores.dtype, ids.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_allclose(scores, expected[0], rtol=5e-6, atol=5e-6)
    np.testing.assert_array_equal(ids, expected[1])


def test_rows_are_in_the_cell_of_their_nearest_mean():
    """At the fixed point of Lloyd's algorithm, without full cells."""
    _, w, _ = clustered(600)
    index = build_ivf(w, cells=12, iterations=100, capacity=600)
    assert index.spilled == 0
    distance = ((np.asarray(w)[:, None] - np.asarray(index.means)[None]) ** 2).sum(axis=2)
    np.testing.assert_array_equal(cell_of(index), distance.argmin(axis=1))


def test_full_cells_spill_their_farthest_rows_to_the_next():
    """Nine rows on a line near one centre, three near the other, and a capacity of six."""
    w = jnp.asarray([[0.0], [0.1], [0.2], [0.3], [0.4], [0.5], [0.6], [0.7], [0.8], [9.0], [9.1], [9.2]])
    for seed in range(3):
        index = build_ivf(w, cells=2, seed=seed, capacity=6)
        assignment = cell_of(index)
        assert index.spilled == 3 and index.capacity == 6
        assert len(set(assignment[9:])) == 1 and (assignment[2:7] != assignment[9]).all()
        assert np.bincount(assignment).tolist() == [6, 6]


def test_equal_rows_fill_all_cells():
    """All rows are nearest to the same cell, and there are more cells than rounds of reassignment."""
    w = jnp.ones((300, 4))
    index = build_ivf(w, cells=100, iterations=1, capacity=3)
    np.testing.assert_array_equal(np.diff(index.starts), 3)
    np.testing.assert_array_equal(np.sort(index.ids), np.arange(300))


def test_blocks_of_queries_match_one_block(monkeypatch):
    """Three blocks of 4 queries and one of 1, with cells that more queries probe than one product takes."""
    q, w, bias = clustered(331, 13)
    index = build_ivf(w, cells=7, iterations=2, capacity=64, bias=bias)
    run = lambda: once(lambda index, q: ivf_search(index, q, 5, probes=4), index, q)  # noqa: E731
    one_block = run()
    monkeypatch.setattr(cells, "SCORES", 4 * 4 * 64)
    monkeypatch.setattr(cells, "LANES", 2)
    for a, b in zip(run(), one_block, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("at_once", [1, 3])
def test_cells_read_for_one_query_match_shared_ones(monkeypatch, at_once):
    """Cells of 0 to 96 rows, in windows of four sizes and in numbers that are no multiples of those read at a time."""
    q, w, _ = clustered(500, 13)
    w = np.concatenate(
        [w, np.repeat(w[:1] * 2, 80, axis=0) + 1e-3 * np.random.default_rng(0).normal(size=(80, w.shape[1]))]
    )
    index = build_ivf(w.astype(np.float32), cells=23, iterations=3, capacity=96)
    run = lambda: once(lambda index, q: ivf_search(index, q, 5, probes=4), index, q)  # noqa: E731
    monkeypatch.setattr(cells, "SHARED", 1)
    shared = run()
    monkeypatch.setattr(cells, "SHARED", 1000)
    monkeypatch.setattr(cells, "READ_CELLS", at_once)
    for a, b in zip(run(), shared, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_few_cells_have_a_high_recall():
    """Two of 64 cells. If the bias did not rank the cells, the last recall would be 0.77."""
    q, w, bias = clustered(4000, 100)
    index = build_ivf(w, cells=64, seed=1)
    true = by_sorting(q, w, 10)[1]
    assert recall(search(index, q, 10, 2)[1], true) > 0.93
    true = by_sorting(q, w, 10, bias=bias)[1]
    assert recall(search(build_ivf(w, cells=64, seed=1, bias=bias), q, 10, 2)[1], true) > 0.81


def test_cells_are_ranked_by_their_expected_best_row():
    """The best row is in a cell with a lower mean and a larger spread."""
    rng = np.random.default_rng(0)
    near, far = ([m, y] + r * rng.standard_normal((50, 2)) for m, y, r in ((1.0, 10.0, 0.01), (0.9, -10.0, 0.5)))
    w = jnp.asarray(np.concatenate([near, far]), jnp.float32)
    q = jnp.asarray([[1.0, 0.0]])
    index = build_ivf(w, cells=2)
    assignment = cell_of(index)
    assert index.means[assignment[0], 0] > index.means[assignment[99], 0]
    np.testing.assert_array_equal(search(index, q, 3, 1)[1], by_sorting(q, w, 3)[1])
    far_rows = np.asarray(w)[50:] - np.asarray(w)[50:].mean(axis=0)
    np.testing.assert_allclose(index.spread[assignment[99]], far_rows.std() * np.sqrt(2 * np.log(50)), rtol=1e-5)


def test_missing_neighbours_have_no_id():
    """The probed cell has 2 rows, and 4 are requested; rows of other cells are not returned."""
    w = jnp.asarray([[1.0, 0.0], [0.9, 0.0], [-1.0, 0.0], [-0.9, 0.0], [-0.8, 0.0]])
    index = build_ivf(w, cells=2, capacity=3)
    scores, ids = search(index, jnp.asarray([[1.0, 0.0]]), 4, 1)
    np.testing.assert_array_equal(ids, [[0, 1, -1, -1]])
    np.testing.assert_allclose(scores, [[1.0, 0.9, -np.inf, -np.inf]])


def test_empty_cells_and_zero_queries():
    """With equal rows, k-means leaves all cells but one empty; a query of zeros scores all rows equally."""
    index = build_ivf(jnp.ones((4, 2)), cells=3, capacity=4)
    assert np.sort(np.diff(index.starts)).tolist() == [0, 0, 4]
    scores, ids = search(index, jnp.asarray([[0.0, 0.0], [1.0, 2.0]]), 3, 1)
    np.testing.assert_array_equal(scores, [[0] * 3, [3] * 3])
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 2)


def test_memory_does_not_grow_with_the_table():
    """Neither the table nor the rows of the probed cells are copied."""

    _, w, _ = clustered(64)
    index = build_ivf(w, cells=32, iterations=0, capacity=64)

    def temporary(vocab):
        def run(rows, ids, q):
            return ivf_search(dataclasses.replace(index, rows=rows, ids=ids), q, 10, probes=8)

        shapes = ((vocab + 64, 16), jnp.float32), ((vocab,), jnp.int32), ((100, 16), jnp.float32)
        arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        return jax.jit(run, compiler_options=ONCE).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    assert temporary(1 << 20) == temporary(1 << 12) < 1_000_000


def test_invalid_build_arguments_raise():
    for changes, message in (
        ({"w": jnp.ones((0, 4))}, "empty"),
        ({"cells": 0}, "cells is 0: expected 1 to 9"),
        ({"cells": 10}, "cells is 10: expected 1 to 9"),
        ({"iterations": -1}, "iterations"),
        ({"capacity": 2}, "capacity is 2: expected at least 3"),
    ):
        raises(message, build_ivf, **{"w": jnp.ones((9, 4)), "cells": 3} | changes)


def test_invalid_search_arguments_raise():
    index = build_ivf(jnp.ones((9, 4)), cells=3, iterations=0)
    for changes, message in (
        ({"q": jnp.ones((2, 5))}, r"q \(2, 5\), table \(9, 4\)"),
        ({"k": 0}, "k is 0"),
        ({"k": 10}, "k is 10"),
        ({"probes": 0}, "probes is 0: expected 1 to 3"),
        ({"probes": 4}, "probes is 4: expected 1 to 3"),
    ):
        raises(message, ivf_search, **{"index": index, "q": jnp.ones((2, 4)), "k": 2, "probes": 1} | changes)


@pytest.mark.oracle
def test_recall_is_at_least_that_of_faiss():
    faiss = pytest.importorskip("faiss")
    q, w, _ = clustered(20000, 200, 32, 200)
    host = np.asarray(w)
    flat = faiss.IndexFlatIP(32)
    theirs = faiss.IndexIVFFlat(flat, 32, 128, faiss.METRIC_INNER_PRODUCT)
    theirs.train(host)
    theirs.add(host)
    truth = faiss.IndexFlatIP(32)
    truth.add(host)
    true = truth.search(np.asarray(q), 10)[1]
    index = build_ivf(w, cells=128)
    for probes in (2, 4, 8):
        theirs.nprobe = probes
        expected = recall(theirs.search(np.asarray(q), 10)[1], true)
        assert recall(search(index, q, 10, probes)[1], true) >= expected - 0.01
