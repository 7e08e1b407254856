"""`hpnlp index` of texts: search finds them, shards merge to the same datastore, and what does not fit."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest

import hpnlp
from hpnlp.jobs.retrieval import texts
from hpnlp.jobs.retrieval.rerank import find_label, rerank
from hpnlp.retrieval import datastore
from tests import tiny
from tests.cli.test_encode import save_run
from tests.messages import raises

TEXTS = ["the quick fox", "seven wizards\tbrew", *(" ".join(tiny.WORDS[n : n + 4]) for n in (3, 7, 5, 9, 12))]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("encoder") / "run", "dual_encoder")


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    """A classifier of pairs."""
    directory = tmp_path_factory.mktemp("cross_encoder") / "run"
    return save_run(directory, "classification", ("no", "Yes"), {"pair_field": "other"}, token_types=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory with texts as lines and as records: all.txt has those of half.txt and half.jsonl."""
    directory = tmp_path_factory.mktemp("texts")
    (directory / "all.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    (directory / "half.txt").write_text("\n".join(["", TEXTS[0], " \t", *TEXTS[1:3]]))
    (directory / "half.jsonl").write_text("".join(json.dumps({"id": 1, "body": text}) + "\n" for text in TEXTS[3:]))
    (directory / "blank.txt").write_text("\n\n")
    return directory


def build(run, *arguments):
    outcome = run("index", "build", *arguments)
    assert outcome.code == 0, outcome.err
    return outcome


@pytest.fixture(scope="module")
def store(encoder, tmp_path_factory):
    """The datastore of TEXTS."""
    directory = tmp_path_factory.mktemp("store") / "all"
    examples = [(f"text {number}", text) for number, text in enumerate(TEXTS)]
    record, cut = texts.build_shard(hpnlp.load(encoder), examples, texts.texts_digest(TEXTS), directory)
    datastore.complete(directory, [directory])
    assert (record.count, record.dim, cut) == (7, 16, 0)
    return directory


def assert_same(directory, expected):
    ours, theirs = (datastore.Datastore.load(path, "texts") for path in (directory, expected))
    assert (directory / datastore.TEXTS).read_bytes() == (expected / datastore.TEXTS).read_bytes()
    np.testing.assert_array_equal(ours.index._vectors(), theirs.index._vectors())


def test_search_finds_the_text_itself_first(run, encoder, store):
    vectors = hpnlp.load(encoder).encode(TEXTS)
    for number in (1, 4):
        outcome = run("index", "search", store, TEXTS[number], "--count=3")
        query, *lines = outcome.out.splitlines()
        assert outcome.code == 0 and query == TEXTS[number] and outcome.err == ""
        order = np.argsort(-(vectors @ vectors[number]))[:3]
        scores, numbers, found = zip(*(line.strip().split("  ") for line in lines), strict=True)
        assert order[0] == number and [int(n) - 1 for n in numbers] == order.tolist()
        assert found == tuple(" ".join(TEXTS[n].split()) for n in order)  # a text takes one line
        np.testing.assert_allclose(np.array(scores, float), (vectors @ vectors[number])[order], atol=2e-3)
    outcome = run("index", "search", store, "a", "b", "--count=99")
    assert [line.startswith(" ") for line in outcome.out.splitlines()] == 2 * [False, *7 * [True]]


def test_lines_and_records_have_the_same_vectors_without_blank_lines(run, encoder, files, store, tmp_path):
    arguments = [files / "half.txt", files / "half.jsonl", "--fields=body", "--batch_size=2"]
    outcome = build(run, encoder, *arguments, f"--out={tmp_path}/new")
    name = files / "half.txt"
    assert outcome.out == f"{tmp_path}/new: 7 vectors of 16 numbers, exact\n"
    left_out = f"hpnlp: left out: 2 without text: {name}, line 1; {name}, line 3\n"
    assert outcome.err == f"{left_out}hpnlp: search it: hpnlp index search {tmp_path}/new 'a question'\n"
    ours, theirs = (datastore.Datastore.load(path, "texts") for path in (tmp_path / "new", store))
    assert ours.texts(range(7)) == theirs.texts(range(7)) == dict(enumerate(TEXTS))
    np.testing.assert_allclose(ours.index._vectors(), theirs.index._vectors(), atol=1e-3)
    outcome = run("index", "search", tmp_path / "new", TEXTS[5], "--count=99")
    assert len(outcome.out.splitlines()) == 8 and f"  6  {TEXTS[5]}" in outcome.out.splitlines()[1]


def test_shards_merge_to_the_datastore_of_one_build(run, encoder, files, store, tmp_path):
    for shard in range(3):
        out = tmp_path / str(shard)
        outcome = build(run, encoder, files / "all.txt", f"--out={out}", f"--shard={shard}/3")
        assert f"{out}: shard {shard} of 3, {(3, 2, 2)[shard]} vectors of 16 numbers\n" == outcome.out
    shards = [tmp_path / name for name in "201"]
    outcome = run("index", "merge", *shards, f"--out={tmp_path}/all", "--index=ivf(cells=2,probes=2)")
    assert outcome.out == f"{tmp_path}/all: 7 vectors of 16 numbers, ivf(cells=2,probes=2)\n", outcome.err
    assert_same(tmp_path / "all", store)
    expected = run("index", "search", store, TEXTS[2]).out
    assert run("index", "search", tmp_path / "all", TEXTS[2]).out == expected
    build(run, encoder, files / "half.txt", f"--out={tmp_path}/other", "--shard=0/3")
    for arguments, message in (
        ([*shards[:2], "--keys=4"], "--keys=4 has no effect with a datastore of texts"),
        ([*shards[:2], "--k=4"], "--k=4 has no effect with a datastore of texts"),
        ([*shards[:2], "--fields=a"], "only in hpnlp index build: leave it out"),
        (shards[:2], "shard 1 of 3 is missing: name its directory, or build it with --shard=1/3"),
        ([*shards[:2], tmp_path / "other"], "are not of one datastore: source is"),
        ([store], "is a complete datastore"),
    ):
        outcome = run("index", "merge", *arguments, f"--out={tmp_path}/bad")
        assert outcome.code == 2 and message in outcome.err, outcome.err
    outcome = run("index", "search", shards[0], "a")
    assert outcome.code == 2 and "is shard 2 of 3: join all with hpnlp index merge" in outcome.err


def test_files_that_are_read_are_not_removed(run, encoder, tmp_path):
    (tmp_path / datastore.TEXTS).write_text('{"text": "a fox"}\n')
    outcome = run("index", "build", encoder, tmp_path / datastore.TEXTS, f"--out={tmp_path}/")
    assert outcome.code == 2 and f"holds {tmp_path}/texts.jsonl, which is read: name another" in outcome.err
    assert (tmp_path / datastore.TEXTS).read_text() == '{"text": "a fox"}\n'


def test_shards_without_texts_leave_the_older_datastore(store, tmp_path):
    shutil.copytree(store, tmp_path / "all")
    (tmp_path / "shard").mkdir()
    record = dataclasses.replace(datastore.read_record(store), index="")
    datastore.write_record(tmp_path / "shard", record)
    np.save(tmp_path / "shard" / datastore.VECTORS, np.zeros((record.count, record.dim), np.float16))
    raises("texts.jsonl is missing: build the shard again", datastore.complete, tmp_path / "all", [tmp_path / "shard"])
    (tmp_path / "shard" / datastore.TEXTS).write_text('"a fox"\n"a')
    message = "texts.jsonl has 1 texts, and record.json 7 vectors: build the shard again"
    raises(message, datastore.complete, tmp_path / "all", [tmp_path / "shard"])
    assert_same(tmp_path / "all", store)


def test_pairs_of_an_encoder_are_found_by_tabs(run, cross_encoder, tmp_path):
    (tmp_path / "pairs.txt").write_text("the fox\ta dog\nold\tcopper kettles\n")
    build(run, cross_encoder, tmp_path / "pairs.txt", f"--out={tmp_path}/store")
    outcome = run("index", "search", tmp_path / "store", "old\tcopper kettles", "--count=1")
    assert outcome.code == 0 and outcome.out.endswith("  2  old\tcopper kettles\n"), outcome
    outcome = run("index", "search", tmp_path / "store", "old")
    assert outcome.code == 2 and "is one text, and the run reads 2 (text, other): put one tab" in outcome.err


def test_queries_that_are_cut_are_noted(run, store):
    outcome = run("index", "search", store, "fox " * 20)
    assert outcome.code == 0 and outcome.err == "hpnlp: 1 of 1 texts were cut to data.seq_len=40 tokens\n"


def test_datastores_of_other_models_and_damaged_ones_raise(run, files, tmp_path):
    run_directory = save_run(tmp_path / "run", "dual_encoder")
    build(run, run_directory, files / "all.txt", f"--out={tmp_path}/store")
    store = datastore.Datastore.load(tmp_path / "store", "texts")
    shutil.rmtree(run_directory)
    outcome = run("index", "search", tmp_path / "store", "a")
    assert outcome.code == 2 and f"{run_directory}, which is not there: put the run back there" in outcome.err
    save_run(run_directory, "dual_encoder", seed=1)
    outcome = run("index", "search", tmp_path / "store", "a")
    assert outcome.code == 2 and f"was built with the weights of {run_directory}, and" in outcome.err
    outcome = run("evaluate", run_directory, f"--datastore={tmp_path}/store")
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    lines = (tmp_path / "store" / datastore.TEXTS).read_text().splitlines(keepends=True)
    for content, message in (("".join(lines[:3]), "has fewer texts than there are vectors"), ("{\n", "cannot read")):
        (tmp_path / "store" / datastore.TEXTS).write_text(content)
        raises(message, store.texts, [0, 5])
    (tmp_path / "store" / datastore.TEXTS).unlink()
    raises("cannot read .* build the datastore again", store.texts, [0])


def test_search_returns_texts_with_scores_and_numbers(encoder, store):
    loaded, model = datastore.Datastore.load(store, "texts"), hpnlp.load(encoder)
    ((score, number, text), *others), second = texts.search(loaded, model, [TEXTS[2], "a"], 9)
    assert (number, text) == (2, TEXTS[2]) and abs(score - 1) < 2e-3 and len(others) == 6 and len(second) == 7
    raises("of a language model's text|of texts, which no language model", datastore.Datastore.load, store, "words")


def test_candidates_are_ranked_by_the_probability_of_the_label(run, encoder, cross_encoder, store):
    predictions = hpnlp.load(cross_encoder).predict([("fox", text) for text in TEXTS])
    probabilities = np.array([prediction.probabilities["Yes"] for prediction in predictions])
    found = texts.search(datastore.Datastore.load(store, "texts"), hpnlp.load(encoder), ["fox"], 4)
    best = sorted((number for _, number, _ in found[0]), key=lambda number: -probabilities[number])
    (ranked,) = rerank(hpnlp.load(cross_encoder), ["fox"], found)
    assert [row[1:] for row in ranked] == [(number, TEXTS[number]) for number in best]
    np.testing.assert_allclose([row[0] for row in ranked], probabilities[best], rtol=1e-5)
    (reverse,) = rerank(hpnlp.load(cross_encoder), ["fox"], found, "no", batch_size=2)
    assert [number for _, number, _ in reverse] == best[::-1]
    flags = (f"--rerank={cross_encoder}", "--candidates=4", "--count=3")
    for label, order in (("Yes", best), ("no", best[::-1])):
        outcome = run("index", "search", store, "fox", *flags, f"--label={label}")
        numbers = [line.split("  ")[2] for line in outcome.out.splitlines()[1:]]
        assert outcome.code == 0 and numbers == [str(number + 1) for number in order[:3]], outcome
    outcome = run("index", "search", store, "fox", "the fox " * 5, *flags)
    assert f"  {probabilities[best[0]]:.3f}  {best[0] + 1}  " in outcome.out and outcome.out.count("\n") == 8
    assert outcome.err.splitlines()[0] == "hpnlp: 1 of 2 texts were cut to data.seq_len=40 tokens"
    assert "of 8 texts were cut to data.seq_len=40 tokens" in outcome.err


def test_pairs_without_tokens_are_left_out_and_pairs_of_texts_raise(cross_encoder):
    model = hpnlp.load(cross_encoder)
    assert rerank(model, ["a", "b"], [[(0.5, 3, ""), (0.4, 1, "c")], []])[0][0][1:] == (1, "c")
    raises("is not a single text", rerank, model, ["a"], [[(0.5, 3, ["a", "b"])]])


def test_the_label_is_named_or_found(cross_encoder):
    for labels, name, expected in (
        (("0", "1"), "", "1"),
        (("FALSE", "TRUE"), "", "TRUE"),
        (("near", "far"), "near", "near"),
        (("near", "far"), "", "has the labels near, far: none of them are named .*: name the label"),
        (("yes", "match", "no"), "", "several of them are named"),
        (("no", "yes"), "Yes", "has no label 'Yes': expected one of no, yes"),
        (("yes",), "", "has one label"),
    ):
        model = hpnlp.load(cross_encoder)
        model.run = dataclasses.replace(model.run, vocabulary=dataclasses.replace(model.run.vocabulary, labels=labels))
        if expected in labels:
            assert find_label(model, name) == expected
        else:
            raises(expected, find_label, model, name)


ERRORS = {
    "stdin": ("build RUN -", "texts of stdin can be read once, and an index reads them twice"),
    "a pipe": ("build RUN DIR/all.txt DIR/fifo", "fifo can be read once, and an index reads them twice"),
    "no such file": ("build DIR/no_run DIR/absent.txt", "absent.txt: there is no such file: name one\n"),
    "no texts": ("build RUN DIR/blank.txt", "there are no texts to encode: name a file with texts"),
    "another field": ("build RUN DIR/half.jsonl", "the fields are 'id', 'body': pass --fields=NAME with one of them\n"),
    "no files": ("build RUN", "runs of task='lm' or 'rnn_lm': name one of these, or files of texts after the run"),
    "keys": ("build RUN DIR/all.txt --keys=4", "--keys=4 has no effect with files of texts: leave it out"),
    "count": ("build RUN DIR/all.txt --count=4", "--count=4 has no effect here, only in hpnlp index search: leave it"),
    "index of a shard": ("build RUN DIR/all.txt --shard=0/2 --index=exact", "for a shard: pass it to hpnlp index"),
    "many shards": ("build RUN DIR/all.txt --shard=0/8", "shards=8: expected at most 7, the number of texts"),
    "k of a search": ("search STORE a --k=3", "--k=3 has no effect with a datastore of texts: pass --count"),
    "a blank query": ("search STORE ", "query 1 is empty: pass some text"),
    "candidates alone": ("search STORE a --candidates=9", "--candidates=9 has no effect without --rerank=RUN"),
    "few candidates": ("search STORE a --rerank=RUN --candidates=3", "--candidates=3 are fewer than --count=5"),
    "a dual encoder ranks": ("search STORE a --rerank=RUN", "is of task='dual_encoder': a cross-encoder is a run of"),
    "single texts": ("search STORE a --rerank=SINGLE", "reads single texts (text): a cross-encoder reads pairs"),
}


def test_invalid_commands_raise_and_write_nothing(run, encoder, cross_encoder, files, store, tmp_path):
    os.mkfifo(files / "fifo")
    single = save_run(tmp_path / "single", "classification", ("no", "yes"))
    names = {"RUN": encoder, "DIR": files, "STORE": store, "PAIRS": cross_encoder, "SINGLE": single}
    names["LM"] = save_run(tmp_path / "lm", "lm")
    for case, (command, message) in ERRORS.items():
        arguments = command.split(" ")
        for name, path in names.items():
            arguments = [argument.replace(name, str(path)) for argument in arguments]
        outcome = run("index", *arguments, *[f"--out={tmp_path}/new"] * (arguments[0] == "build"))
        assert outcome.code == 2 and message in outcome.err and outcome.err.count("\n") == 1, (case, outcome)
        assert not (tmp_path / "new").exists(), case
