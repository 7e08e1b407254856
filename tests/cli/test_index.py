"""`hpnlp index`: datastores of hidden states and of texts; shards; the mixture with a language model; what does not fit."""

import dataclasses
import functools
import json
import pickle
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp import report, tasks
from hpnlp.jobs.retrieval import next_words
from hpnlp.jobs.retrieval.gate import GateDocuments
from hpnlp.models.variables import FROZEN, collections
from hpnlp.retrieval import datastore, knn
from hpnlp.retrieval.knn import Neighbours
from hpnlp.training import loop, run_directory
from hpnlp.training.config_file import load_config
from tests import tiny

FLAGS = ("--keys=3000", "--tuning_tokens=400", "--k=8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tiny.copy_run(tmp_path_factory.mktemp("stored") / "run")


@pytest.fixture(scope="module")
def store(trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("store") / "all"
    source = next_words.load_source(trained, next_words.IndexOptions(3000, 400), None)
    next_words.build_shard(source, directory)
    datastore.complete(directory, [directory])
    losses = next_words.fit_mixtures(source, directory, 8)
    assert losses["learned"] < losses["tuned"] < losses["linear(0.25)"] < losses["model"]
    return directory


def score(run, *arguments):
    """Held-out loss that `hpnlp evaluate` prints."""
    outcome = run("evaluate", *arguments)
    assert outcome.code == 0, outcome.err
    return next(float(line.split()[1]) for line in outcome.out.splitlines() if line.split()[:1] == ["loss"])


def test_neighbours_lower_the_loss_of_held_out_text(run, trained, store):
    alone = json.loads((trained / "report.json").read_text())["heldout_loss"]
    tuned, learned = (score(run, trained, f"--datastore={store}", f"--mixture={name}") for name in ("tuned", "learned"))
    assert tuned < 0.9 * alone and learned < tuned + 0.02
    assert score(run, trained, f"--datastore={store}", "--mixture=linear(weight=1e-6)") == pytest.approx(
        alone, abs=2e-4
    )


def test_mixed_probabilities_match_a_loop(trained, store):
    """All distances and weights of a few positions, computed with numpy from the stored keys, in float64."""
    loaded = run_directory.load(trained)
    spec = "linear(weight=0.3,temperature=2.0)"
    found, model, frozen = Neighbours(str(store), spec, 5).load(loaded.model, loaded.params, loaded.tokenizer, trained)
    batch = loaded.model.example_batch(2, 16)
    batch = {**batch, "tokens": jnp.arange(32).reshape(2, 16) % 90 + 5, "segment_ids": jnp.ones((2, 16), jnp.int32)}
    variables = {**collections(loaded.params), FROZEN: frozen}
    log_probs = jax.jit(functools.partial(model.apply, method="log_probs"))(variables, batch)
    log_probs = np.asarray(log_probs, np.float64).reshape(32, -1)
    states, _ = jax.jit(lambda x: loaded.model.apply(x, batch, True, method="token_states"))(collections(loaded.params))
    q = np.asarray(states, np.float64).reshape(32, -1)
    next_logits = jax.jit(functools.partial(loaded.model.apply, method="next_logits"))
    alone = jax.nn.log_softmax(next_logits(collections(loaded.params), q.astype(np.float32)))
    keys, words = found.index._vectors()[:, :-2].astype(np.float64), found.words()
    np.testing.assert_allclose(np.exp(log_probs).sum(axis=1), 1.0, rtol=1e-5)
    for row in range(32):
        distances = ((q[row] - keys) ** 2).sum(axis=1)
        near = np.argsort(distances, kind="stable")[:5]
        shares = np.exp(-(distances[near] - distances[near[0]]) / 2.0)
        expected = 0.7 * np.exp(np.asarray(alone[row], np.float64))
        np.add.at(expected, words[near], 0.3 * shares / shares.sum())
        np.testing.assert_allclose(
            np.exp(log_probs[row]), expected, rtol=0.03, atol=1e-4
        )  # keys of the index are float16


def test_next_tokens_are_those_of_the_text(trained, store):
    """The word of each key is the token after the state: keys and words agree with a pass over the stored documents."""
    source = next_words.load_source(trained, next_words.IndexOptions(3000, 400), None)
    documents = source.documents
    positions = documents.positions(0, source.stored)
    np.testing.assert_array_equal(datastore.Datastore.load(store, "words").words(), documents.tokens[positions])
    assert source.stored == documents.gate < documents.heldout == len(documents.ends)


def test_copies_of_stored_documents_are_scored(run, trained, store, tmp_path):
    """A text may have copies on both sides of its split, of a licence for example."""
    shutil.copytree(store, tmp_path / "store")
    loaded = run_directory.load(trained)
    held = tasks.find("lm").dataset(loaded.config.data, loaded.vocabulary, lambda *_: None).documents[1].document(0)
    record = json.loads((tmp_path / "store" / datastore.RECORD).read_text())
    record["documents"][0] = datastore.document_digest(held)
    (tmp_path / "store" / datastore.RECORD).write_text(json.dumps(record))
    score(run, trained, f"--datastore={tmp_path}/store", "--batches=1")


def test_functions_of_shards_can_be_pickled(trained, store, tmp_path):
    """As Beam and SLURM's launchers send them to processes; each document is a shard at most."""
    options = next_words.IndexOptions(3000, 400)
    call = functools.partial(next_words.build_run_shard, trained, shards=2, options=options)
    records = [pickle.loads(pickle.dumps(call))(tmp_path / str(i), shard=i) for i in range(2)]
    assert pickle.loads(pickle.dumps(records)) == records
    joined = datastore.complete(tmp_path / "all", [tmp_path / "0", tmp_path / "1"])
    assert joined == datastore.read_record(store)


def test_documents_without_positions_are_shards(trained, tmp_path):
    source = next_words.load_source(trained, next_words.IndexOptions(3000, 400), None)
    sizes = np.array([5, 1, 9, 30])
    documents = GateDocuments(source.documents.tokens[:45], np.cumsum(sizes), np.ones(4, int), 3, 4)
    source = dataclasses.replace(source, documents=documents)
    counts = [next_words.build_shard(source, tmp_path / str(i), i, 3).count for i in range(3)]
    assert counts == [4, 0, 8]
    assert datastore.complete(tmp_path / "all", [tmp_path / str(i) for i in range(3)]).count == 12


def test_shards_merge_to_the_datastore_of_one_build(run, trained, store, tmp_path):
    for shard in (0, 1, 2):
        outcome = run("index", "build", trained, f"--out={tmp_path}/{shard}", f"--shard={shard}/3", *FLAGS[:2])
        assert outcome.code == 0, outcome.err
    shards = [tmp_path / str(i) for i in (2, 0, 1)]
    for wrong, message in (
        (shards[:2], "shard 1 of 3 is missing"),
        ([*shards[:2], shards[1]], "are both shard 0"),
        ([*shards, store], "is a complete datastore"),
    ):
        outcome = run("index", "merge", *wrong, f"--out={tmp_path}/bad", *FLAGS[:2])
        assert outcome.code == 2 and message in outcome.err, outcome.err
    outcome = run("index", "merge", *shards, f"--out={tmp_path}/all", "--keys=2000", FLAGS[1])
    assert outcome.code == 2 and "pass the same flags" in outcome.err
    outcome = run("index", "merge", *shards, f"--out={tmp_path}/all", *FLAGS)
    assert outcome.code == 0 and "learned" in outcome.out, outcome.err
    ours, theirs = (datastore.Datastore.load(path, "words") for path in (tmp_path / "all", store))
    np.testing.assert_array_equal(ours.words(), theirs.words())
    np.testing.assert_array_equal(ours.index._vectors(), theirs.index._vectors())
    outcome = run("evaluate", trained, f"--datastore={shards[0]}")
    assert outcome.code == 2 and "is shard 2 of 3: join all with hpnlp index merge" in outcome.err


def test_text_is_generated_with_neighbours(run, trained, store):
    """With nearly all weight on one neighbour, greedy text is what followed the nearest states."""
    flags = (f"--datastore={store}", "--mixture=linear(weight=0.999,temperature=0.01)", "--k=1")
    outcome = run("generate", trained, "--prompt=the ", "--tokens=24", "--temperature=0", *flags)
    assert outcome.code == 0, outcome.err
    assert any(word in outcome.out for word in tiny.WORDS)
    assert run("generate", trained, "--prompt=the ", "--tokens=24", "--temperature=0").out != outcome.out


def test_search_prints_what_followed(run, store):
    outcome = run("index", "search", store, "the ", "--count=2")
    assert outcome.code == 0 and len(outcome.out.splitlines()) <= 3 and "distance" in outcome.out


def test_datastores_of_other_runs_and_scored_text_are_refused(run, trained, store, tmp_path):
    other = tmp_path / "other"
    config = tiny.make(train__steps=2, train__seed=1)
    report.write(other, config, loop.train(config, other), "--config=tests/tiny.py")
    outcome = run("evaluate", other, f"--datastore={store}")
    assert outcome.code == 2 and "was built with the weights of" in outcome.err and str(trained) in outcome.err
    source = load_config(trained).data.path
    shutil.copytree(source, tmp_path / "text")
    outcome = run("evaluate", trained, f"--datastore={store}", f"--data.heldout_path={tmp_path}/text")
    assert outcome.code == 2 and "documents that are scored, which would find themselves" in outcome.err
    outcome = run("evaluate", trained, "--mixture=learned")
    assert outcome.code == 2 and "without --datastore" in outcome.err


def test_invalid_commands_raise(run, trained, store, tmp_path):
    for arguments, message in (
        ("sort RUN", "expected build, merge or search"),
        ("build RUN --out=NEW --shard=3/3", "expected the shard and their number"),
        ("build RUN --out=NEW --fields=a", "--fields=['a'] has no effect without files"),
        ("build RUN --out=RUN", "which is not of a datastore: name another directory"),
        ("build RUN --out=NEW --keys=20 --k=5000", "the number of positions that are stored"),
        ("search NEW text", "is no datastore"),
        ("search STORE", "expected a datastore and a text"),
        ("search STORE text --rerank=RUN", "has no effect with a datastore of a language model's text"),
        ("merge STORE --out=STORE", "is a shard: name another directory"),
    ):
        names = {"RUN": str(trained), "NEW": str(tmp_path / "new"), "STORE": str(store)}
        for name, path in names.items():
            arguments = arguments.replace(name, path)
        outcome = run("index", *arguments.split(" "))
        assert outcome.code == 2 and message in outcome.err, outcome.err


def test_fitted_mixtures_and_damage(store, tmp_path):
    shutil.copytree(store, tmp_path / "copy")
    (tmp_path / "copy" / knn.MIXTURES).write_bytes(b"no archive")
    with pytest.raises(knn.InputError, match="is damaged"):
        knn.find_mixture(datastore.Datastore.load(tmp_path / "copy", "words"), "tuned", None)
    (tmp_path / "copy" / knn.MIXTURES).unlink()
    with pytest.raises(knn.InputError, match="has no tuned mixture"):
        knn.find_mixture(datastore.Datastore.load(tmp_path / "copy", "words"), "tuned", None)
    record = json.loads((store / datastore.RECORD).read_text())
    (tmp_path / "copy" / datastore.RECORD).write_text(json.dumps({**record, "format": 0}))
    with pytest.raises(knn.InputError, match="has format 0"):
        datastore.read_record(tmp_path / "copy")


def test_files_of_the_user_are_not_removed(tmp_path):
    (tmp_path / "texts.jsonl").write_text("mine")
    with pytest.raises(knn.InputError, match="holds 'texts.jsonl' and no record.json: remove it, or name another"):
        datastore.prepare_directory(tmp_path)
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(knn.InputError, match="is damaged, or not of a datastore"):
        datastore.prepare_directory(tmp_path)
    assert (tmp_path / "texts.jsonl").read_text() == "mine"
