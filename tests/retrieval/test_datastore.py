"""Datastores on disk: distances against numpy, what interrupted commands leave, and files that do not belong together."""

import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.mixtures.knn_model import KnnModel
from hpnlp.retrieval import datastore, knn
from hpnlp.retrieval.datastore import Datastore, Record
from tests.messages import raises

KINDS = ("exact", "ivf(cells=7,probes=7)", "ivf(cells=40,probes=1)", "lsh(bits=3,tables=1,probes=1)")


def write_shard(directory, keys, words, shard=0, shards=1):
    """A shard of given keys and words."""
    path = datastore.prepare_directory(directory)
    np.save(path / datastore.VECTORS, keys.astype(np.float16))
    np.save(path / datastore.WORDS, words)
    sizes = shard, shards, len(keys), keys.shape[1]
    datastore.write_record(path, Record("words", "run", 1, "w", "t", "s", *sizes, (f"document {shard}",)))
    return path


def neighbours(store, q, k):
    """Distances and words of the model's search."""
    model, frozen = knn.with_datastore(None, store, k, knn.linear(0.5, 1.0))
    assert isinstance(model, KnnModel)
    return map(np.asarray, model.neighbours(frozen, jnp.asarray(q, jnp.float32)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.05, 1.0, 60.0])
def test_distances_match_a_loop(tmp_path, kind, scale):
    """Norms that differ, an odd size, duplicates, a word above 65,536, and more neighbours than cells have."""
    draw = np.random.default_rng(0)
    keys = scale * draw.normal(size=(101, 33)) * np.exp(0.5 * draw.normal(size=(101, 1)))
    keys[50:53] = keys[5]
    words = draw.integers(0, 70_000, 101).astype(np.int32)
    words[5] = 69_999
    path = write_shard(tmp_path / "store", keys, words)
    datastore.complete(path, [path], kind)
    store = Datastore.load(path, "words")
    stored = keys.astype(np.float16).astype(np.float64)
    q = np.concatenate([stored[:9], stored[:9] + 0.3 * scale * draw.normal(size=(9, 33))])
    exact = ((q[:, None].astype(np.float32).astype(np.float64) - stored) ** 2).sum(axis=2)
    distances, found = neighbours(store, q, 60)
    tolerance = 2e-6 * (stored**2).sum(axis=1).max()
    for row in range(len(q)):
        is_found = np.isfinite(distances[row])
        count = int(is_found.sum())
        assert is_found[:count].all()  # those that do not exist come last
        place = [
            int(np.abs(np.where(words == w, exact[row], np.inf) - d).argmin())
            for w, d in zip(found[row, :count], distances[row, :count], strict=True)
        ]
        np.testing.assert_allclose(distances[row, :count], exact[row, place], atol=tolerance)
        if kind in KINDS[:2]:  # reads all vectors
            assert count == 60
            np.testing.assert_allclose(distances[row], np.sort(exact[row])[:60], atol=tolerance)
    if kind in KINDS[:2]:
        assert np.abs(distances[:9, 0]).max() < 1e-5 * exact.mean()


def test_cells_of_states_of_different_norms_hold_near_ones(tmp_path):
    draw = np.random.default_rng(0)
    keys = np.repeat(draw.normal(size=(30, 24)), 100, axis=0) + 0.7 * draw.normal(size=(3000, 24))
    keys *= np.exp(0.5 * draw.normal(size=(3000, 1)))
    path = write_shard(tmp_path / "store", keys, np.arange(3000, dtype=np.uint16))
    datastore.complete(path, [path], "ivf(cells=32,probes=4)")
    q = keys[:200] + 0.1 * draw.normal(size=(200, 24))
    exact = np.argsort(((q[:, None] - keys) ** 2).sum(axis=2), axis=1)[:, :5]
    found = [*neighbours(Datastore.load(path, "words"), q, 5)][1]
    assert np.mean([np.isin(a, b).mean() for a, b in zip(exact, found, strict=True)]) > 0.9


def test_shards_without_positions_are_joined(tmp_path):
    keys, words = np.random.default_rng(0).normal(size=(30, 5)), np.arange(30, dtype=np.uint16)
    parts = [(0, 12), (12, 12), (12, 30)]
    shards = [write_shard(tmp_path / str(i), keys[a:b], words[a:b], i, 3) for i, (a, b) in enumerate(parts)]
    record = datastore.complete(tmp_path / "all", [shards[2], shards[0], shards[1]])
    assert (record.count, record.documents) == (30, ("document 0", "document 1", "document 2"))
    store = Datastore.load(tmp_path / "all", "words")
    np.testing.assert_array_equal(store.words(), words)
    np.testing.assert_array_equal([*neighbours(store, keys.astype(np.float16), 1)][1][:, 0], words)
    empty = write_shard(tmp_path / "empty", keys[:0], words[:0])
    raises("hold no vectors: build a datastore of more text", datastore.complete, empty, [empty])


def test_commands_that_were_interrupted_are_given_again(tmp_path):
    keys, words = np.ones((4, 3)), np.arange(4, dtype=np.uint16)
    path = datastore.prepare_directory(tmp_path / "store")
    (path / datastore.VECTORS).write_bytes(b"complete")
    (path / f".{datastore.WORDS}.{'0f' * 16}.part").write_bytes(b"half")
    raises("is not complete, since its command has not ended: give the command again", datastore.read_record, path)
    write_shard(path, keys, words)
    assert sorted(file.name for file in path.iterdir()) == ["record.json", "vectors.npy", "words.npy"]
    (path / ".mine.part").write_bytes(b"")
    raises("'.mine.part', which is not of a datastore", datastore.prepare_directory, path)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (datastore.WORDS, np.zeros(3, np.uint16), "has 3 words and record.json 4 vectors: build the datastore again"),
        (datastore.INDEX, None, "has 5 vectors and record.json 4: build the datastore again"),
    ],
)
def test_files_of_other_datastores_raise(tmp_path, name, array, message):
    paths = [write_shard(tmp_path / str(n), np.eye(n, 3), np.arange(n, dtype=np.uint16)) for n in (4, 5)]
    for path in paths:
        datastore.complete(path, [path])
    if array is None:
        (paths[0] / name).write_bytes((paths[1] / name).read_bytes())
    else:
        np.save(paths[0] / name, array)
    raises(message, lambda: Datastore.load(paths[0], "words").words())


def test_vectors_of_another_size_than_the_record_raise(tmp_path):
    path = write_shard(tmp_path / "store", np.eye(4, 3), np.arange(4, dtype=np.uint16))
    np.save(path / datastore.VECTORS, np.zeros((4, 2), np.float16))
    raises(r"has \(4, 2\) numbers, and its record others: build the shard again", datastore.complete, path, [path])


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (
            datastore.VECTORS,
            np.full((5, 3), np.nan, np.float16),
            "1/vectors.npy has NaN or infinity, first in row 0: build",
        ),
        (
            datastore.WORDS,
            np.zeros(3, np.uint16),
            "1/words.npy has 3 words, and record.json 5 vectors: build the shard",
        ),
        (datastore.WORDS, None, "1/words.npy is missing: build the shard again"),
    ],
)
def test_damaged_shards_are_named(tmp_path, name, array, message):
    shards = [write_shard(tmp_path / str(i), np.eye(5, 3), np.arange(5, dtype=np.uint16), i, 2) for i in range(2)]
    (shards[1] / name).unlink()
    if array is not None:
        np.save(shards[1] / name, array)
    raises(message, datastore.complete, tmp_path / "all", shards)
    assert not (tmp_path / "all").exists()


def test_vectors_stay_if_their_index_cannot_be_built(tmp_path):
    path = write_shard(tmp_path / "store", np.eye(4, 3), np.arange(4, dtype=np.uint16))
    raises(r"--index=ivf\(cells=9,probes=1\): .*the vectors", datastore.complete, path, [path], "ivf(cells=9,probes=1)")
    again = "hpnlp index merge .*store --out=DIR --keys=9, with another --index"
    raises(again, datastore.complete, path, [path], "ivf(cells=9,probes=1)", ["--keys=9"])
    assert datastore.complete(tmp_path / "other", [path], "ivf(cells=2,probes=1)").count == 4
