"""Index: results of all kinds after building, adding, dividing, saving and loading; errors."""

from __future__ import annotations

import contextlib
import errno
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.search import build_ivf, build_lsh, ivf_search, lsh_search, recall
from hpnlp.retrieval import Index
from hpnlp.retrieval.external_indexes import SCANN_MODULE
from hpnlp.retrieval.index import _checked
from hpnlp.types import InputError
from tests.contracts import once
from tests.messages import raises
from tests.ops.search.tables import by_sorting, clustered

V = 331
# Settings with which every kind reads all vectors, and is therefore exact; also when divided, as cells are per device.
ALL = (
    "exact",
    "exact(block_size=16)",
    "ivf(cells=3,probes=3)",
    "lsh(bits=2,tables=1,probes=4,candidates=400)",
    "pq(parts=4,cells=3,probes=3,rerank=400,centroids=16,iterations=2)",
)
FAISS = ("faiss", 'faiss("IVF3,Flat",probes=3)')
SCANN = ("scann(rerank=400)", "scann(cells=3,probes=3,rerank=400)")


@pytest.fixture(scope="module")
def data():
    q, w, _ = clustered(V, 7)
    return np.asarray(q), np.asarray(w)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def assert_exact(index, q, w, k):
    scores, ids = index.search(q, k)
    expected = by_sorting(q, w, k)
    assert (scores.dtype, ids.dtype) == (jnp.float32, jnp.int32) and len(index) == len(w)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_allclose(scores, expected[0], rtol=1e-5, atol=1e-5)


def same(first, second, q, k=10):
    for a, b in zip(first.search(q, k), second.search(q, k), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", [*ALL, *(pytest.param(kind, marks=pytest.mark.oracle) for kind in FAISS)])
def test_build_add_save_and_load_match_sorting(kind, data, tmp_path):
    assert_built_added_and_saved_as_sorted(kind, *data, tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", SCANN)
def test_scann_matches_sorting_where_it_ranks_all_vectors_again(kind, data, tmp_path):
    pytest.importorskip("scann")
    assert_built_added_and_saved_as_sorted(kind, *data, tmp_path)


def assert_built_added_and_saved_as_sorted(kind, q, w, tmp_path):
    index = Index(kind).build(w[:200])
    assert_exact(index, q, w[:200], 10)
    assert index.add(w[200:]) is index
    assert_exact(index, q, w, 10)
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert_exact(again, q, w, 10)
    same(index, again, q)
    assert_exact(again.add(2 * w[:5]), q, np.concatenate([w, 2 * w[:5]]), 10)
    assert index.search(q[:0], 3)[1].shape == (0, 3)


@pytest.mark.parametrize(("kind", "axis"), [*((kind, "data") for kind in ALL), ("exact", "tensor")])
def test_divided_index_matches_sorting(kind, axis, data, mesh, tmp_path):
    """331 is prime, so that parts differ in size, and k is larger than some parts."""
    q, w = data
    index = Index(kind, mesh=mesh, axis=axis).build(w[:300])
    assert_exact(index.add(w[300:]), q, w, 10)
    assert_exact(index, q, w, 200 if axis == "data" else V)
    index.save(tmp_path / "index")
    for options in ({"mesh": mesh, "axis": axis}, {"mesh": mesh, "axis": "data"}, {}):
        assert_exact(Index.load(tmp_path / "index", **options), q, w, 10)


@pytest.mark.parametrize(
    ("kind", "surrounding"), [(ALL[0], "none"), pytest.param(ALL[2], "own", marks=pytest.mark.slow), (ALL[3], "other")]
)
def test_divided_index_on_explicit_mesh_matches_sorting(kind, surrounding, data):
    """The default mesh of jax.make_mesh, as the surrounding mesh or not; the queries are sharded too."""
    q, w = data
    other = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    undivided = Index(kind).build(w)
    around = {"none": None, "own": mesh, "other": other}[surrounding]
    with contextlib.nullcontext() if around is None else jax.set_mesh(around):
        divided = jax.device_put(q[:4], jax.NamedSharding(mesh, jax.P("data")))
        index = Index(kind, mesh=mesh).build(w[:300]).add(w[300:])
        assert_exact(index, divided, w, 10)
        assert_exact(undivided, divided, w, 10)
        assert_exact(Index(kind).build(jax.device_put(w[:328], divided.sharding)), q, w[:328], 10)


@pytest.mark.parametrize("kind", ["exact", "ivf(cells=1,probes=1)", "lsh(bits=1,tables=1,probes=2,candidates=9)"])
def test_padding_is_never_returned(kind, mesh):
    """Five vectors over four devices, with scores below that of the padding; k is larger than a part."""
    w = -np.arange(1, 6, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    index = Index(kind, mesh=mesh).build(w)
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(index._state))
    scores, ids = index.search(np.ones((1, 3), np.float32), 5)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(scores, [[-3, -6, -9, -12, -15]])


@pytest.mark.parametrize("divided", [False, True])
def test_missing_neighbours_have_no_id(divided, data, mesh):
    """The probed cell of each part has fewer than k rows."""
    q, w = data
    index = Index("ivf(cells=40,probes=1,iterations=2)", mesh=mesh if divided else None).build(w)
    scores, ids = map(np.asarray, index.search(q, 100))
    assert (ids == -1).any() and (np.isneginf(scores) == (ids == -1)).all()
    true = np.einsum("qd,qkd->qk", q, w[ids])
    np.testing.assert_allclose(scores[ids >= 0], true[ids >= 0], rtol=1e-5, atol=1e-5)
    for row in ids:
        actual = row[row >= 0]
        assert len(set(actual)) == len(actual) and (row[: len(actual)] >= 0).all()


def test_index_matches_search_functions(data):
    q, w = data
    ivf = once(lambda index, q: ivf_search(index, q, 5, probes=2), build_ivf(w, cells=20, seed=3), q)
    lsh = once(lambda index, q: lsh_search(index, q, 5, probes=3), build_lsh(w, bits=4, tables=2), q)
    for kind, expected in (("ivf(cells=20,probes=2,seed=3)", ivf), ("lsh(4,2,probes=3)", lsh)):
        scores, ids = Index(kind).build(w).search(q, 5)
        np.testing.assert_array_equal(ids, expected[1])
        np.testing.assert_allclose(scores, expected[0], rtol=1e-5)


@pytest.mark.parametrize(
    "kind",
    ["ivf(cells=20,probes=1)", "lsh(4,2,probes=1)", pytest.param('faiss("IVF20,Flat",1)', marks=pytest.mark.oracle)],
)
def test_probing_increases_recall_and_leaves_the_index_unchanged(kind, data, tmp_path):
    q, w = data
    index = Index(kind).build(w)
    before, true = index.search(q, 10), by_sorting(q, w, 10)[1]
    more = index.probing(8)
    assert recall(more.search(q, 10)[1], true) > recall(before[1], true) + 0.1
    more.save(tmp_path / "index")
    same(Index.load(tmp_path / "index"), more, q)
    np.testing.assert_array_equal(index.search(q, 10)[1], before[1])
    raises("probes is 99", index.probing, 99)
    raises("has no probes", lambda: Index().build(w).probing(2))


def test_probing_faiss_leaves_the_index_unchanged(data):
    pytest.importorskip("faiss")
    q, w = data
    index = Index('faiss("IVF16,Flat")').build(w)
    before = index.search(q, 5)[1]
    assert recall(index.probing(16).search(q, 5)[1], by_sorting(q, w, 5)[1]) == 1
    np.testing.assert_array_equal(index.search(q, 5)[1], before)
    raises("no cells", lambda: Index("faiss").build(w).probing(3))


@pytest.mark.parametrize("kind", [*ALL[3:], *(pytest.param(kind, marks=pytest.mark.slow) for kind in ALL[1:3])])
def test_bfloat16_stays_bfloat16(kind, data, tmp_path):
    q, w = data[0], np.asarray(jnp.asarray(data[1], jnp.bfloat16))
    index = Index(kind).build(w)
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert "bfloat16" in {str(x.dtype) for x in jax.tree.leaves(again._state)}
    same(index, again, q)
    other = (0.5 * w[:1].astype(np.float32)).astype(w.dtype)  # equal scores may be in any order
    assert_exact(again.add(other), q, np.concatenate([w, other]), 3)


def test_failed_write_leaves_the_old_file(data, tmp_path, monkeypatch):
    q, w = data
    path, index = tmp_path / "index", Index("exact").build(w)
    Index("exact").build(w[:20]).save(path)
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"PK")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        raises("No space left.*that exists and has space", index.save, path)
    assert [p.name for p in tmp_path.iterdir()] == ["index"] and path.read_bytes() == before
    path.with_name("index.part").write_bytes(b"a user's own")
    assert len(Index.load(path)) == 20
    index.save(path)
    assert len(Index.load(path)) == V and {p.name for p in tmp_path.iterdir()} == {"index", "index.part"}
    raises("cannot write the index", index.save, tmp_path / "nowhere" / "index")


def test_damaged_files_raise_or_load_correctly(data, tmp_path):
    """Flips single bytes, and truncates the file. Some bytes, such as those of the date, have no effect."""
    q, w = data[0], data[1][:20]
    path, index = tmp_path / "index", Index("ivf(cells=3,probes=3)").build(w)
    index.save(path)
    undivided, expected = path.read_bytes(), index.search(q, 3)
    said = 0
    spots = np.random.default_rng(0).choice(len(undivided), 150, replace=False)
    for damaged in (
        *(undivided[:at] + bytes([undivided[at] ^ 0x41]) + undivided[at + 1 :] for at in spots),
        *(undivided[:at] for at in (0, 1, 100, len(undivided) // 2, len(undivided) - 1)),
        b"no index",
    ):
        path.write_bytes(damaged)
        try:
            actual = Index.load(path)
        except InputError:
            said += 1
        else:
            for a, b in zip(jax.tree.leaves(actual._state), jax.tree.leaves(index._state), strict=True):
                np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(actual.search(q, 3)[1], expected[1])
    assert said > 90


def test_unreadable_files_raise(data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("hpnlp.retrieval.index.FORMAT", 2)
        Index().build(data[1]).save(tmp_path / "index")
    raises("has format 2, this version reads 1", Index.load, tmp_path / "index")
    raises("there is no index", Index.load, tmp_path / "none")
    raises("cannot read", Index.load, tmp_path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    raises("damaged, or no saved index", Index.load, tmp_path / "array.npy")


def test_unknown_kinds_raise():
    for kind, message in (
        ("exakt", "unknown index 'exakt': did you mean 'exact'"),
        ("exact,ivf(2,1)", "kind='exact,ivf.*expected exactly one"),
        ("ivf(cells=2)", "index 'ivf' takes .*probes"),
        ("ivf(cells=2,probe=1)", "did you mean 'probes'"),
    ):
        raises(message, Index, kind)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.ones((0, 4), np.float32), "at least 1 vector"),
        (np.ones((4, 0), np.float32), r"shape \(4, 0\): expected"),
        (np.ones(4, np.float32), r"shape \(4,\): expected \[n, D\]"),
        (np.ones((3, 4)), "float64: expected float32.*cast"),
        (np.array([[1, 2], [np.nan, 0], [0, np.inf]], np.float32), "in 2 of 3 rows, first in row 1"),
    ],
    ids=str,
)
def test_invalid_vectors_raise_and_leave_the_index_unchanged(vectors, message):
    index = Index().build(np.ones((5, 4), np.float32))
    raises(message, index.build, vectors)
    raises("expected|row", index.add, vectors)
    assert len(index) == 5


def test_vectors_of_another_type_raise():
    """Calls the check itself, because beartype would raise first."""
    raises("has type list: expected an array", _checked, [[1.0]], "vectors")


def test_invalid_searches_raise():
    index = Index().build(np.ones((5, 4), np.float32))
    for changes, message in (
        ({"q": np.ones((2, 3), np.float32)}, r"q has shape \(2, 3\): expected \[n, 4\]"),
        ({"q": np.ones(4, np.float32)}, r"q has shape \(4,\)"),
        ({"q": np.full((1, 4), np.nan, np.float32)}, "q has NaN"),
        ({"q": np.ones((1, 4), int)}, "q is int64"),
        ({"k": 0}, "k is 0: expected an integer, 1 to 5"),
        ({"k": 6}, "k is 6: expected an integer, 1 to 5"),
        ({"k": True}, "k is True"),
    ):
        raises(message, index.search, **{"q": np.ones((1, 4), np.float32), "k": 1} | changes)


def test_invalid_settings_raise_at_build(mesh):
    w = np.ones((5, 4), np.float32)
    for kind, message in (
        ("ivf(cells=6,probes=1)", "cells is 6"),
        ("ivf(cells=2,probes=3)", "probes is 3: expected 1 to 2"),
        ("lsh(bits=1,tables=1,probes=3)", "probes is 3"),
    ):
        index = Index(kind)
        raises(message, index.build, w)
        raises("index is empty", index.search, w, 1)
    raises("at least 4 vectors, one for each device", lambda: Index(mesh=mesh).build(w[:3]))


def test_empty_index_raises(tmp_path):
    w = np.ones((5, 4), np.float32)
    for use in (
        lambda index: index.search(w, 1),
        lambda index: index.add(w),
        lambda index: index.save(tmp_path / "index"),
    ):
        with pytest.raises(InputError, match="build"):
            use(Index())
    assert len(Index()) == 0 and not list(tmp_path.iterdir())


def test_vectors_unlike_those_in_the_index_raise():
    index = Index().build(np.ones((5, 4), np.float32))
    raises(r"shape \(2, 3\): expected \[n, 4\]", index.add, np.ones((2, 3), np.float32))
    raises("float16, those of the index float32", index.add, np.ones((2, 4), np.float16))


def test_invalid_meshes_raise(mesh):
    raises("unknown mesh axis 'date': did you mean 'data'", Index, mesh=mesh, axis="date")
    raises("cannot be divided over a mesh", Index, "faiss", mesh=mesh)


@pytest.mark.parametrize(
    ("kind", "module", "package"), [("faiss", "faiss", "faiss-cpu"), ("scann", SCANN_MODULE, "scann")]
)
def test_missing_packages_raise(monkeypatch, kind, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=f"an index of kind '{kind}' needs the package {kind}: pip install {package}"):
        Index(kind).build(np.ones((5, 4), np.float32))


@pytest.mark.oracle
def test_invalid_faiss_settings_raise():
    w = np.ones((5, 4), np.float32)
    for kind, message in (
        ("faiss(nonsense)", "faiss cannot build 'nonsense'"),
        ("faiss(Flat,probes=2)", "has no cells"),
        ('faiss("IVF1,Flat",probes=2)', "probes is 2: expected 1 to 1"),
        ('faiss("IVF9,Flat")', "faiss cannot build"),
    ):
        with pytest.raises(InputError, match=message):
            Index(kind).build(w)


@pytest.mark.oracle
def test_recall_of_scann_rises_to_that_of_exact_search(data):
    pytest.importorskip("scann")
    q, w = data
    true, recalls = np.asarray(Index().build(w).search(q, 10)[1]), []
    index = Index("scann(cells=10,probes=1,rerank=10)").build(w)
    for probes, rerank in ((1, 10), (10, 10), (10, V)):
        scores, ids = map(np.asarray, index.searching(probes=probes, rerank=rerank).search(q, 10))
        recalls.append(recall(ids, true))
        # Scores are products of the vectors themselves, whichever vectors are found.
        assert ((ids == -1) == np.isneginf(scores)).all()
        products = np.take_along_axis(q @ w.T, np.maximum(ids, 0), axis=1)
        np.testing.assert_allclose(np.where(ids < 0, 0, scores), np.where(ids < 0, 0, products), rtol=1e-4, atol=1e-5)
    assert recalls == sorted(recalls) and recalls[-1] == 1
    missing = np.asarray(index.search(q, V)[1]) == -1
    assert missing.any() and not missing[:, 0].any()


@pytest.mark.oracle
def test_invalid_scann_settings_raise():
    pytest.importorskip("scann")
    for kind, message in (
        ("scann(cells=2)", "cells=2 and probes=None: set both, or none"),
        ("scann(cells=2,probes=3)", "probes is 3: expected 1 to 2, the number of cells"),
        ("scann(cells=9,probes=3)", "scann cannot build .* from vectors .* less than the number of clusters"),
        ("scann(rerank=0)", "scann with rerank=0: expected at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            Index(kind).build(np.ones((5, 4), np.float32))


@pytest.mark.oracle
def test_faiss_matches_exact_and_marks_missing_neighbours(data, mesh):
    q, w = data
    scores, ids = map(np.asarray, Index('faiss("IVF40,Flat",probes=1)').build(w).search(q, 100))
    assert (ids == -1).any() and (np.isneginf(scores) == (ids == -1)).all()
    flat = Index("faiss").build(w).search(q, 10)
    for divided in (None, mesh):
        ours = Index("exact", mesh=divided).build(w).search(q, 10)
        np.testing.assert_array_equal(ours[1], flat[1])
        np.testing.assert_allclose(ours[0], flat[0], rtol=1e-5, atol=1e-5)
