"""Search by hashing: exactness with all buckets, recall with few, and counts of the rows left out."""

import functools
import itertools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.search.exact import recall
from hpnlp.ops.search.lsh import build_lsh, lsh_candidates, lsh_search, probe_sets
from tests.contracts import ONCE, once
from tests.messages import raises
from tests.ops.search.tables import by_sorting, clustered


@functools.cache
def program(k, probes, candidates):
    return jax.jit(functools.partial(lsh_search, k=k, probes=probes, candidates=candidates), compiler_options=ONCE)


def search(index, q, k, probes, candidates=None):
    return program(k, probes, candidates)(index, q)


@pytest.mark.parametrize(
    ("vocab", "bits", "tables", "biased"), [(331, 4, 3, False), (43, 1, 1, True), (1, 3, 2, False)], ids=str
)
def test_probing_all_buckets_is_exact_search(vocab, bits, tables, biased):
    q, w, bias = clustered(vocab, 6)
    index_bias = bias if biased else None
    index = build_lsh(w, bits=bits, tables=tables, bias=index_bias)
    np.testing.assert_array_equal(np.sort(index.order, axis=1), np.arange(vocab)[None].repeat(tables, axis=0))
    assert (np.diff(index.starts) >= 0).all() and not index.starts[:, 0].any()
    assert index.starts.shape == (tables, 2**bits + 1) and (index.starts[:, -1] == vocab).all()
    k = vocab if vocab < 50 else 10
    scores, ids = search(index, q, k, 2**bits, vocab)
    expected = by_sorting(q, w, k, bias=index_bias)
    assert (scores.dtype, ids.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_allclose(scores, expected[0], rtol=5e-6, atol=5e-6)
    np.testing.assert_array_equal(ids, expected[1])


def test_rows_are_in_the_bucket_of_their_signs():
    """Rows have norms just under a power of two, so that the additional column is small; the longest rows come first."""
    _, w, _ = clustered(100)
    w = 0.9999 * w / jnp.linalg.norm(w, axis=1, keepdims=True)
    w = jnp.concatenate([w, -w, w / 4])  # of mean near 0
    w = jnp.concatenate([w, -w])
    index = build_lsh(w, bits=5, tables=2)
    margins = np.einsum("vd,tld->tvl", np.asarray(w / jnp.linalg.norm(w, axis=1, keepdims=True)), index.planes)
    codes, clear = (margins > 0) @ (1 << np.arange(5)), (np.abs(margins) > 0.1).all(axis=2)
    for table in range(2):
        order = np.asarray(index.order[table])
        buckets = np.repeat(np.arange(32), np.diff(index.starts[table]))
        np.testing.assert_array_equal(codes[table][order][clear[table][order]], buckets[clear[table][order]])
        assert clear[table].mean() > 0.5
        long = order < 200
        long[order >= 300] = order[order >= 300] < 500
        assert all(not np.diff(long[buckets == b].astype(int)).max(initial=0) > 0 for b in range(32))


def test_probe_sets_have_the_least_cost():
    """Compared with all sets, sorted by cost."""
    bits = 6
    cost = [statistics.NormalDist().inv_cdf(0.5 + 0.5 * i / (bits + 1)) ** 2 for i in range(1, bits + 1)]
    every = [c for n in range(bits + 1) for c in itertools.combinations(range(bits), n)]
    every.sort(key=lambda chosen: sum(cost[i] for i in chosen))
    for probes in (1, 9, 2**bits):
        assert [tuple(np.flatnonzero(row)) for row in probe_sets(bits, probes)] == every[:probes]


def test_probes_flip_the_least_certain_bits_of_each_query():
    """Compared with the definition in numpy."""
    q, w, _ = clustered(500, 5)
    index = build_lsh(w, bits=5, tables=3)
    ids, left_out = once(functools.partial(lsh_candidates, probes=4, candidates=500), index, q)
    assert not np.asarray(left_out).any()
    margins = np.einsum("qd,tld->qtl", np.asarray(q), np.asarray(index.planes))
    for query, table in np.ndindex(5, 3):
        margin = margins[query, table]
        rank = np.argsort(np.abs(margin))
        actual = []
        for flips in probe_sets(5, 4):
            signs = margin > 0
            signs[rank[flips]] ^= True
            start, end = np.asarray(index.starts)[table, signs @ (1 << np.arange(5)) + np.array([0, 1])]
            actual += np.asarray(index.order)[table, start:end].tolist()
        mine = np.asarray(ids).reshape(5, 3, 500)[query, table]
        assert mine[: len(actual)].tolist() == actual and (mine[len(actual) :] == -1).all()


def test_left_out_rows_are_counted():
    q, w, _ = clustered(500, 5)
    index = build_lsh(w, bits=3, tables=2)
    every, none = once(functools.partial(lsh_candidates, probes=3, candidates=500), index, q)
    few_ids, left_out = once(functools.partial(lsh_candidates, probes=3, candidates=20), index, q)
    assert not np.asarray(none).any() and (np.asarray(left_out) > 0).any()
    sizes = (np.asarray(every).reshape(5, 2, 500) >= 0).sum(axis=2)
    np.testing.assert_array_equal(left_out, np.maximum(sizes - 20, 0).sum(axis=1))
    np.testing.assert_array_equal(
        np.asarray(few_ids).reshape(5, 2, 20), np.asarray(every).reshape(5, 2, 500)[:, :, :20]
    )


def test_recall_grows_with_probes():
    q, w, bias = clustered(4000, 100)
    true, biased = by_sorting(q, w, 10)[1], by_sorting(q, w, 10, bias=bias)[1]
    index = build_lsh(w, bits=8, tables=6)
    actual = [recall(search(index, q, 10, probes)[1], true) for probes in (1, 12)]
    assert actual[0] + 0.1 < actual[1] and actual[1] > 0.8
    index = build_lsh(w, bits=8, tables=6, bias=bias)
    assert recall(search(index, q, 10, 12)[1], biased) > 0.82


def test_missing_and_duplicate_neighbours():
    """A query whose buckets have one row gets one row, once, although every hash table returns it."""
    w = jnp.asarray([[1.0, 0.0], [-1.0, 0.0]])
    index = build_lsh(w, bits=1, tables=5)
    scores, ids = search(index, jnp.asarray([[1.0, 0.0]]), 2, 1)
    np.testing.assert_array_equal(ids, [[0, -1]])
    np.testing.assert_array_equal(scores, [[1.0, -np.inf]])


def test_rows_of_zeros_have_a_bucket():
    index = build_lsh(jnp.zeros((7, 3)), bits=2, tables=1)
    np.testing.assert_array_equal(np.sort(index.order[0]), np.arange(7))
    assert np.asarray(search(index, jnp.ones((1, 3)), 3, 4, 7)[0]).tolist() == [[0, 0, 0]]


def test_invalid_build_arguments_raise():
    for changes, message in (
        ({"w": jnp.ones((0, 4))}, "empty"),
        ({"bits": 0}, "bits is 0: expected 1 to 20"),
        ({"bits": 21}, "bits is 21"),
        ({"tables": 0}, "tables is 0"),
    ):
        raises(message, build_lsh, **{"w": jnp.ones((9, 4)), "bits": 2, "tables": 1} | changes)


def test_invalid_search_arguments_raise():
    index = build_lsh(jnp.ones((9, 4)), bits=2, tables=1)
    for changes, message in (
        ({"q": jnp.ones((2, 5))}, r"q \(2, 5\), table \(9, 4\)"),
        ({"k": 0}, "k is 0"),
        ({"k": 10}, "k is 10"),
        ({"probes": 0}, "probes is 0: expected 1 to 4"),
        ({"probes": 5}, "probes is 5: expected 1 to 4"),
        ({"candidates": 0}, "candidates is 0"),
    ):
        raises(message, lsh_search, **{"index": index, "q": jnp.ones((2, 4)), "k": 2, "probes": 1} | changes)
