"""An index finds what its kind finds, whole, grown, divided, saved and read back; and says what it cannot do."""

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
from hpnlp.retrieval.index import _checked
from hpnlp.types import InputError
from tests.contracts import once
from tests.ops.search.tables import by_sorting, clustered

V = 331
# Each looks at everything, so that all of them are exact; in parts too, whose cells are counted apart.
ALL = ("exact", "exact(block_size=16)", "ivf(cells=3,probes=3)", "lsh(bits=2,tables=1,probes=4,candidates=400)")
FAISS = ("faiss", 'faiss("IVF3,Flat",probes=3)')


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


def same(one, other, q, k=10):
    for a, b in zip(one.search(q, k), other.search(q, k), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", [*ALL, *(pytest.param(kind, marks=pytest.mark.oracle) for kind in FAISS)])
def test_finds_the_best_whole_grown_and_read_back(kind, data, tmp_path):
    q, w = data
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
def test_divided_over_devices_it_finds_the_same(kind, axis, data, mesh, tmp_path):
    """331 is a prime: parts differ in size, and k is more than some parts have."""
    q, w = data
    index = Index(kind, mesh=mesh, axis=axis).build(w[:300])
    assert_exact(index.add(w[300:]), q, w, 10)
    assert_exact(index, q, w, 200 if axis == "data" else V)
    index.save(tmp_path / "index")
    for options in ({"mesh": mesh, "axis": axis}, {"mesh": mesh, "axis": "data"}, {}):
        assert_exact(Index.load(tmp_path / "index", **options), q, w, 10)


@pytest.mark.parametrize("surrounding", ["none", "own", "other"])
@pytest.mark.parametrize("kind", [ALL[0], *ALL[2:]])
def test_divided_over_an_explicit_mesh_it_finds_the_same(kind, surrounding, data):
    """Of the default mesh of jax.make_mesh, which is also the surrounding one or is not; q may be divided too."""
    q, w = data
    other = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    whole = Index(kind).build(w)
    around = {"none": None, "own": mesh, "other": other}[surrounding]
    with contextlib.nullcontext() if around is None else jax.set_mesh(around):
        divided = jax.device_put(q[:4], jax.NamedSharding(mesh, jax.P("data")))
        index = Index(kind, mesh=mesh).build(w[:300]).add(w[300:])
        assert_exact(index, divided, w, 10)
        assert_exact(whole, divided, w, 10)
        assert_exact(Index(kind).build(jax.device_put(w[:328], divided.sharding)), q, w[:328], 10)


@pytest.mark.parametrize("kind", ["exact", "ivf(cells=1,probes=1)", "lsh(bits=1,tables=1,probes=2,candidates=9)"])
def test_padding_of_a_part_is_never_found(kind, mesh):
    """Five vectors over four devices, all with scores below those of padding with zeros; more is asked for than a part has."""
    w = -np.arange(1, 6, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    index = Index(kind, mesh=mesh).build(w)
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(index._state))
    scores, ids = index.search(np.ones((1, 3), np.float32), 5)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(scores, [[-3, -6, -9, -12, -15]])


@pytest.mark.parametrize("divided", [False, True])
def test_missing_neighbours_have_no_id(divided, data, mesh):
    """What the kinds find, no more: a cell of each part has fewer than k rows."""
    q, w = data
    index = Index("ivf(cells=40,probes=1,iterations=2)", mesh=mesh if divided else None).build(w)
    scores, ids = map(np.asarray, index.search(q, 100))
    assert (ids == -1).any() and (np.isneginf(scores) == (ids == -1)).all()
    true = np.einsum("qd,qkd->qk", q, w[ids])
    np.testing.assert_allclose(scores[ids >= 0], true[ids >= 0], rtol=1e-5, atol=1e-5)
    for row in ids:
        found = row[row >= 0]
        assert len(set(found)) == len(found) and (row[: len(found)] >= 0).all()


def test_is_what_the_functions_are(data):
    q, w = data
    ivf = once(lambda index, q: ivf_search(index, q, 5, probes=2), build_ivf(w, cells=20, seed=3), q)
    lsh = once(lambda index, q: lsh_search(index, q, 5, probes=3), build_lsh(w, bits=4, tables=2), q)
    for kind, expected in (("ivf(cells=20,probes=2,seed=3)", ivf), ("lsh(4,2,probes=3)", lsh)):
        scores, ids = Index(kind).build(w).search(q, 5)
        np.testing.assert_array_equal(ids, expected[1])
        np.testing.assert_allclose(scores, expected[0], rtol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        "ivf(cells=20,probes=1)",
        "lsh(4,2,probes=1)",
        pytest.param('faiss("IVF20,Flat",1)', marks=pytest.mark.oracle),
    ],
)
def test_probing_more_finds_more_and_leaves_the_index_as_it_was(kind, data, tmp_path):
    q, w = data
    index = Index(kind).build(w)
    before, true = index.search(q, 10), by_sorting(q, w, 10)[1]
    more = index.probing(8)
    assert recall(more.search(q, 10)[1], true) > recall(before[1], true) + 0.1
    more.save(tmp_path / "index")
    same(Index.load(tmp_path / "index"), more, q)
    np.testing.assert_array_equal(index.search(q, 10)[1], before[1])
    with pytest.raises(InputError, match="probes is 99"):
        index.probing(99)
    with pytest.raises(InputError, match="has no probes"):
        Index().build(w).probing(2)


def test_probing_faiss_leaves_the_index_as_it_was(data):
    pytest.importorskip("faiss")
    q, w = data
    index = Index('faiss("IVF16,Flat")').build(w)
    before = index.search(q, 5)[1]
    assert recall(index.probing(16).search(q, 5)[1], by_sorting(q, w, 5)[1]) == 1
    np.testing.assert_array_equal(index.search(q, 5)[1], before)
    with pytest.raises(InputError, match="no cells"):
        Index("faiss").build(w).probing(3)


@pytest.mark.parametrize("kind", ALL[1:])
def test_bfloat16_stays_bfloat16(kind, data, tmp_path):
    q, w = data[0], np.asarray(jnp.asarray(data[1], jnp.bfloat16))
    index = Index(kind).build(w)
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert "bfloat16" in {str(x.dtype) for x in jax.tree.leaves(again._state)}
    same(index, again, q)
    assert_exact(again.add(w[:1]), q, np.concatenate([w, w[:1]]), 3)


def test_a_write_that_fails_or_is_cut_off_leaves_the_old_index(data, tmp_path, monkeypatch):
    q, w = data
    path, index = tmp_path / "index", Index("exact").build(w)
    Index("exact").build(w[:20]).save(path)
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"PK")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(InputError, match="No space left.*that exists and has space"):
            index.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["index"] and path.read_bytes() == before
    path.with_name("index.part").write_bytes(b"a user's own")
    assert len(Index.load(path)) == 20
    index.save(path)
    assert len(Index.load(path)) == V and {p.name for p in tmp_path.iterdir()} == {"index", "index.part"}
    with pytest.raises(InputError, match="cannot write the index"):
        index.save(tmp_path / "nowhere" / "index")


def test_a_damaged_file_is_said_or_does_no_harm(data, tmp_path):
    """Bytes flipped one at a time, and the file cut off. Some bytes, such as the date, say nothing."""
    q, w = data[0], data[1][:20]
    path, index = tmp_path / "index", Index("ivf(cells=3,probes=3)").build(w)
    index.save(path)
    whole, expected = path.read_bytes(), index.search(q, 3)
    said = 0
    spots = np.random.default_rng(0).choice(len(whole), 150, replace=False)
    for damaged in (
        *(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :] for at in spots),
        *(whole[:at] for at in (0, 1, 100, len(whole) // 2, len(whole) - 1)),
        b"no index",
    ):
        path.write_bytes(damaged)
        try:
            found = Index.load(path)
        except InputError:
            said += 1
        else:
            for a, b in zip(jax.tree.leaves(found._state), jax.tree.leaves(index._state), strict=True):
                np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(found.search(q, 3)[1], expected[1])
    assert said > 90


def test_files_that_are_not_for_this_version(data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("hpnlp.retrieval.index.FORMAT", 2)
        Index().build(data[1]).save(tmp_path / "index")
    with pytest.raises(InputError, match="has format 2, this version reads 1"):
        Index.load(tmp_path / "index")
    with pytest.raises(InputError, match="there is no index"):
        Index.load(tmp_path / "none")
    with pytest.raises(InputError, match="cannot read"):
        Index.load(tmp_path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(InputError, match="damaged, or no saved index"):
        Index.load(tmp_path / "array.npy")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("exakt", "unknown index 'exakt': did you mean 'exact'"),
        ("exact,ivf(2,1)", "kind='exact,ivf.*expected exactly one"),
        ("ivf(cells=2)", "index 'ivf' takes .*probes"),
        ("ivf(cells=2,probe=1)", "did you mean 'probes'"),
    ],
)
def test_kinds_that_are_none(kind, told):
    with pytest.raises(InputError, match=told):
        Index(kind)


@pytest.mark.parametrize(
    ("vectors", "told"),
    [
        (np.ones((0, 4), np.float32), "at least 1 vector"),
        (np.ones((4, 0), np.float32), r"shape \(4, 0\): expected"),
        (np.ones(4, np.float32), r"shape \(4,\): expected \[n, D\]"),
        (np.ones((2, 3, 4), np.float32), "expected"),
        (np.ones((3, 4)), "float64: expected float32.*cast"),
        (np.ones((3, 4), int), "int64: expected float32"),
        (np.array([[1, 2], [np.nan, 0], [0, np.inf]], np.float32), "in 2 of 3 rows, first in row 1"),
    ],
    ids=str,
)
def test_vectors_that_are_none(vectors, told):
    index = Index().build(np.ones((5, 4), np.float32))
    with pytest.raises(InputError, match=told):
        index.build(vectors)
    with pytest.raises(InputError, match="expected|row"):
        index.add(vectors)
    assert len(index) == 5


def test_vectors_that_are_no_array():
    """Said before beartype, which checks types while tests run, would say it."""
    with pytest.raises(InputError, match="has type list: expected an array"):
        _checked([[1.0]], "vectors")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"q": np.ones((2, 3), np.float32)}, r"q has shape \(2, 3\): expected \[n, 4\]"),
        ({"q": np.ones(4, np.float32)}, r"q has shape \(4,\)"),
        ({"q": np.full((1, 4), np.nan, np.float32)}, "q has NaN"),
        ({"q": np.ones((1, 4), int)}, "q is int64"),
        ({"k": 0}, "k is 0: expected an integer, 1 to 5"),
        ({"k": 6}, "k is 6: expected an integer, 1 to 5"),
        ({"k": True}, "k is True"),
    ],
    ids=str,
)
def test_searches_that_cannot_be(changes, told):
    index = Index().build(np.ones((5, 4), np.float32))
    with pytest.raises(InputError, match=told):
        index.search(**({"q": np.ones((1, 4), np.float32), "k": 1} | changes))


def test_what_the_kind_refuses_is_refused_when_it_is_built(mesh):
    w = np.ones((5, 4), np.float32)
    for kind, told in (
        ("ivf(cells=6,probes=1)", "cells is 6"),
        ("ivf(cells=2,probes=3)", "probes is 3: expected 1 to 2"),
        ("lsh(bits=1,tables=1,probes=3)", "probes is 3"),
    ):
        index = Index(kind)
        with pytest.raises(InputError, match=told):
            index.build(w)
        with pytest.raises(InputError, match="index is empty"):
            index.search(w, 1)
    with pytest.raises(InputError, match="at least 4 vectors, one for each device"):
        Index(mesh=mesh).build(w[:3])


def test_before_it_is_built_there_is_nothing(tmp_path):
    w = np.ones((5, 4), np.float32)
    for use in (
        lambda index: index.search(w, 1),
        lambda index: index.add(w),
        lambda index: index.save(tmp_path / "index"),
    ):
        with pytest.raises(InputError, match="build"):
            use(Index())
    assert len(Index()) == 0 and not list(tmp_path.iterdir())


def test_other_vectors_than_those_it_holds():
    index = Index().build(np.ones((5, 4), np.float32))
    with pytest.raises(InputError, match=r"shape \(2, 3\): expected \[n, 4\]"):
        index.add(np.ones((2, 3), np.float32))
    with pytest.raises(InputError, match="float16, those of the index float32"):
        index.add(np.ones((2, 4), np.float16))


def test_meshes_that_cannot_be(mesh):
    with pytest.raises(InputError, match="unknown mesh axis 'date': did you mean 'data'"):
        Index(mesh=mesh, axis="date")
    with pytest.raises(InputError, match="cannot be divided over a mesh"):
        Index("faiss", mesh=mesh)


def test_faiss_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match="pip install faiss-cpu"):
        Index("faiss").build(np.ones((5, 4), np.float32))


@pytest.mark.oracle
def test_what_faiss_refuses_is_said():
    w = np.ones((5, 4), np.float32)
    for kind, told in (
        ("faiss(nonsense)", "faiss cannot build 'nonsense'"),
        ("faiss(Flat,probes=2)", "has no cells"),
        ('faiss("IVF1,Flat",probes=2)', "probes is 2: expected 1 to 1"),
        ('faiss("IVF9,Flat")', "faiss cannot build"),
    ):
        with pytest.raises(InputError, match=told):
            Index(kind).build(w)


@pytest.mark.oracle
def test_faiss_tells_missing_neighbours_and_finds_what_we_find(data, mesh):
    q, w = data
    scores, ids = map(np.asarray, Index('faiss("IVF40,Flat",probes=1)').build(w).search(q, 100))
    assert (ids == -1).any() and (np.isneginf(scores) == (ids == -1)).all()
    flat = Index("faiss").build(w).search(q, 10)
    for divided in (None, mesh):
        ours = Index("exact", mesh=divided).build(w).search(q, 10)
        np.testing.assert_array_equal(ours[1], flat[1])
        np.testing.assert_allclose(ours[0], flat[0], rtol=1e-5, atol=1e-5)
