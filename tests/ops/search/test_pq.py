"""Product quantization: codes and estimates against numpy loops, exact search when everything is read, recall, errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.search import pq
from hpnlp.ops.search.exact import recall
from hpnlp.ops.search.pq import PqCodes, build_pq, decode, pq_search
from tests.contracts import ONCE
from tests.messages import raises
from tests.ops.search.tables import by_sorting, clustered


@functools.cache
def program(k, probes, rerank):
    return jax.jit(functools.partial(pq_search, k=k, probes=probes, rerank=rerank), compiler_options=ONCE)


def search(index, q, k, probes, rerank=0):
    return program(k, probes, rerank)(index, q)


def unpacked(codes, centroids):
    codes = np.asarray(codes)
    return codes if centroids == 256 else np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)


def estimates(index, q, centroids, fine=False):
    """Scores [Q, V] by sums of tables of each query, one row after another, in float64."""
    q = np.asarray(q, np.float64) @ np.asarray(index.rotation, np.float64) * float(index.unit)
    vocab = index.shape[0]
    codes = [(unpacked(index.codes, centroids)[:vocab], index.books)]
    codes += [(np.asarray(index.fine_codes), index.fine_books)] if fine else []
    cell = np.repeat(np.arange(index.starts.size - 1), np.diff(index.starts))
    scores = np.empty((len(q), vocab))
    for i, x in enumerate(q):
        tables = [np.einsum("mkd,md->mk", np.asarray(b, np.float64), x.reshape(b.shape[0], -1)) for _, b in codes]
        for row in range(vocab):
            s = x @ np.asarray(index.means[cell[row]], np.float64)
            for table, (numbers, _) in zip(tables, codes, strict=True):
                s += sum(table[part, numbers[row, part]] for part in range(len(table)))
            scores[i, index.ids[row]] = s
    return scores


@pytest.mark.parametrize(("parts", "centroids", "fine"), [(4, 16, 0), (8, 16, 2), (2, 256, 0)], ids=str)
def test_estimates_match_loops_over_tables(parts, centroids, fine):
    q, w, _ = clustered(300, 4)
    index = build_pq(w, PqCodes(parts, centroids, "none", fine), cells=5, iterations=2)
    scores, ids = search(index, q, 10, 5, rerank=300)
    expected = estimates(index, q, centroids, bool(fine))
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1)[:, :10], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(expected, np.asarray(ids), axis=1), scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("centroids", [16, 256])
def test_tables_of_products_match_decoded_codes(monkeypatch, centroids):
    q, w, _ = clustered(500, 6)
    index = build_pq(w, PqCodes(4, centroids, "none"), cells=9, iterations=2)
    found = []
    for decoded in (1000, 1):
        monkeypatch.setattr(pq, "DECODED", decoded)
        found.append(jax.jit(functools.partial(pq_search, k=5, probes=3), compiler_options=ONCE)(index, q))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("vocab", "cells", "centroids", "capacity"), [(331, 7, 16, None), (331, 331, 16, 1), (300, 1, 256, None)], ids=str
)
def test_reading_everything_is_exact_search(vocab, cells, centroids, capacity):
    q, w, _ = clustered(vocab, 6)
    index = build_pq(w, PqCodes(4, centroids), cells=cells, iterations=2, capacity=capacity)
    np.testing.assert_array_equal(np.sort(index.ids), np.arange(vocab))
    scores, ids = search(index, q, 10, cells, rerank=vocab + 8 * cells)
    expected = by_sorting(q, w, 10)
    assert (scores.dtype, ids.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_allclose(scores, expected[0], rtol=5e-6, atol=5e-6)
    np.testing.assert_array_equal(ids, expected[1])


def test_codes_name_the_nearest_centroids():
    _, w, _ = clustered(300)
    index = build_pq(w, PqCodes(4, 16), cells=3, iterations=3)
    rotation = np.asarray(index.rotation, np.float32)
    np.testing.assert_allclose(rotation.T @ rotation, np.eye(16), atol=2e-3)
    cell = np.repeat(np.arange(3), np.diff(index.starts))
    rest = (
        np.asarray(w)[np.asarray(index.ids)] / float(index.unit) @ rotation - np.asarray(index.means, np.float32)[cell]
    )
    codes = unpacked(index.codes, 16)
    for part, book in enumerate(np.asarray(index.books, np.float32)):
        distance = ((rest[:, None, 4 * part : 4 * part + 4] - book[None]) ** 2).sum(axis=2)
        chosen = np.take_along_axis(distance, codes[:300, part, None].astype(int), axis=1)[:, 0]
        np.testing.assert_allclose(chosen, distance.min(axis=1), rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(
        np.asarray(decode(index.codes[:300], index.books))[:, :4], np.asarray(index.books)[0][codes[:300, 0]]
    )


def test_parts_get_equal_shares_of_the_variance():
    """Numbers of very different variance, in order: without the rotation, the first part would have all of it."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((2000, 16)).astype(np.float32) * np.exp(-np.arange(16, dtype=np.float32) / 3)
    index = build_pq(w, PqCodes(4, 16, "none"), cells=1, iterations=5)
    rest = np.asarray(w) / float(index.unit) @ np.asarray(index.rotation, np.float32)
    logs = np.log(rest.var(axis=0)).reshape(4, 4).sum(axis=1)
    assert np.ptp(logs) < 2.5 < np.ptp(np.log(w.var(axis=0)).reshape(4, 4).sum(axis=1))


def test_what_is_kept_decides_the_recall():
    q, w, _ = clustered(4000, 100)
    true = by_sorting(q, w, 10)[1]

    def measured(rerank=160, **kept):
        return recall(search(build_pq(w, PqCodes(4, 16, **kept), cells=16, iterations=4), q, 10, 16, rerank)[1], true)

    codes, fine, int8, float16, same = (
        measured(keep="none"), measured(keep="none", fine=8), measured(keep="int8"), measured(keep="float16"), measured()
    )  # fmt: skip
    assert codes + 0.1 < fine < int8 and int8 > 0.9 and abs(float16 - same) < 0.01
    assert measured(rerank=640) >= same


def test_the_scale_of_the_table_does_not_matter():
    """Numbers beyond the range of float16, and below it."""
    q, w, _ = clustered(300, 8)
    for keep in ("none", "float16", "int8"):
        indexes = (
            build_pq(w * jnp.float32(2.0**power), PqCodes(4, 16, keep), cells=5, iterations=2) for power in (0, 40, -40)
        )
        results = [search(index, q, 5, 2) for index in indexes]
        for (scores, ids), power in zip(results, (0, 40, -40), strict=True):
            np.testing.assert_array_equal(ids, results[0][1])
            np.testing.assert_allclose(scores, results[0][0] * 2.0**power, rtol=1e-5)


def test_a_table_of_zeros_and_more_rows_than_its_cells_have():
    index = build_pq(jnp.zeros((20, 4)), PqCodes(2, 16), cells=4, capacity=20)
    scores, ids = search(index, jnp.ones((1, 4)), 20, 4)
    np.testing.assert_array_equal(np.sort(ids), [np.arange(20)])
    np.testing.assert_array_equal(scores, np.zeros((1, 20)))
    w = jnp.concatenate([jnp.ones((16, 4)), -jnp.ones((2, 4))])
    index = build_pq(w, PqCodes(2, 16), cells=2, capacity=16)
    scores, ids = search(index, -jnp.ones((1, 4)), 3, 1)
    np.testing.assert_array_equal(ids, [[16, 17, -1]])
    np.testing.assert_array_equal(scores, [[4, 4, -np.inf]])


@pytest.mark.parametrize("fine", [0, 4])
def test_rows_of_any_length_are_divided_into_parts(fine):
    """12 numbers as if of 16."""
    q, w, _ = clustered(300, 4, dim=12)
    index = build_pq(w, PqCodes(8, 16, "none", fine), cells=5, iterations=2)
    assert index.shape == (300, 12) and index.books.shape == (8, 16, 2)
    scores, ids = search(index, q, 10, 5, rerank=300)
    expected = estimates(index, q, 16, bool(fine))
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1)[:, :10], rtol=1e-5, atol=1e-5)
    exact = build_pq(w, PqCodes(8, 16), cells=5, iterations=2)
    np.testing.assert_array_equal(search(exact, q, 10, 5, rerank=300)[1], by_sorting(q, w, 10)[1])
    assert np.corrcoef(np.sort(by_sorting(q, w, 300)[0])[:, ::-1].ravel(), -np.sort(-expected).ravel())[0, 1] > 0.99


FIELDS = {field.name for field in dataclasses.fields(PqCodes)}


def test_invalid_build_arguments_raise():
    for changes, message in (
        ({"w": jnp.ones((0, 4))}, "empty"),
        ({"w": jnp.ones((15, 4))}, "w has 15 rows: expected at least 16"),
        ({"fine": 2}, "w has 20 rows: expected at least 256"),
        ({"w": jnp.ones((20, 4)).at[3, 1].set(jnp.nan)}, "w has NaN or infinity, first in row 3"),
        ({"cells": 21}, "cells is 21: expected 1 to 20"),
        ({"parts": 6}, "parts is 6: expected 1 to 4, the numbers of a vector"),
        ({"parts": 0}, "parts is 0"),
        ({"parts": 1}, "parts is 1: two codes of 4 bits share a byte"),
        ({"fine": 5}, "fine is 5: expected 0 to 4"),
        ({"parts": 4, "fine": 3}, "the 4 numbers of a vector would be extended to 12"),
        ({"centroids": 64}, "centroids is 64: expected 256"),
        ({"keep": "int4"}, "keep is 'int4': expected one of same"),
        ({"iterations": -1}, "iterations"),
        ({"capacity": 2}, "capacity is 2: expected at least 7"),
    ):
        arguments = {"w": jnp.ones((20, 4)), "cells": 3} | changes
        fields = {"parts": 2, "centroids": 16} | {name: arguments.pop(name) for name in FIELDS & arguments.keys()}
        raises(message, lambda x=arguments, f=fields: build_pq(form=PqCodes(**f), **x))


def test_invalid_search_arguments_raise():
    index = build_pq(jnp.ones((20, 4)), PqCodes(2, 16), cells=3, iterations=0)
    for changes, message in (
        ({"q": jnp.ones((2, 5))}, r"q \(2, 5\), table \(20, 4\)"),
        ({"k": 21}, "k is 21"),
        ({"probes": 4}, "probes is 4: expected 1 to 3"),
        ({"rerank": -1}, "rerank is -1"),
    ):
        raises(message, pq_search, **{"index": index, "q": jnp.ones((2, 4)), "k": 2, "probes": 1} | changes)


@pytest.mark.oracle
def test_recall_of_codes_is_at_least_that_of_faiss():
    """Codes alone, of the same number of bytes, with the same rotation or one that faiss has learned."""
    faiss = pytest.importorskip("faiss")
    q, w, _ = clustered(20000, 200, 32, 200)
    host, true = np.asarray(w), by_sorting(q, w, 10)[1]
    ours = search(build_pq(w, PqCodes(8, keep="none"), cells=64, iterations=5), q, 10, 8)[1]
    for factory in ("IVF64,PQ8", "OPQ8,IVF64,PQ8"):
        theirs = faiss.index_factory(32, factory, faiss.METRIC_INNER_PRODUCT)
        theirs.train(host)
        theirs.add(host)
        faiss.extract_index_ivf(theirs).nprobe = 8
        assert recall(ours, true) >= recall(theirs.search(np.asarray(q), 10)[1], true) - 0.01
