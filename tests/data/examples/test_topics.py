"""Topics of bags in place of labels: equality with groups of words, the cache, and errors."""

import json
import sys

import numpy as np
import pytest

from hpnlp.data.examples import BagExamples, BagsConfig, prepare_examples, topics
from hpnlp.tasks import TASKS
from hpnlp.tasks.vocabulary import Vocabulary
from tests.messages import raises

GROUPS = ("apple pear plum fig", "red green blue grey", "run walk jump swim")


def bags(seed, count):
    """Bags of two texts with words of one of three groups, which is returned as well."""
    rng = np.random.default_rng(seed)
    group = np.arange(count) % len(GROUPS)
    rows = [{"texts": [" ".join(rng.permutation(GROUPS[g].split())[:3]) for _ in range(2)]} for g in group]
    return rows, group


def config(tmp_path, positives="topics(3)", rows=None, **fields):
    for name, records in (("train", rows or bags(0, 30)[0]), ("held", bags(1, 9)[0])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in records))
    paths = {"path": str(tmp_path / "train.jsonl"), "heldout_path": str(tmp_path / "held.jsonl")}
    sizes = {"tokenizer": "words(40, by=whitespace)", "seq_len": 8, "max_texts": 2, "batch_size": 6}
    return BagsConfig(**paths, **sizes, cache=str(tmp_path / "cache"), positives=positives, **fields)


@pytest.mark.oracle
def test_topics_are_the_groups_of_words_of_records_without_labels(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    data = prepare_examples(config(tmp_path), opened_as=BagExamples)
    for name, (_, group) in (("train", bags(0, 30)), ("heldout", bags(1, 9))):
        found = np.array([data.stored[name].labels(number)[0] for number in range(len(group))])
        assert len(set(zip(group.tolist(), found.tolist(), strict=True))) == len(set(found.tolist())) == 3
        all_labels = data.stored[name].all_labels()
        np.testing.assert_array_equal(all_labels[all_labels >= 0].reshape(len(group), 2), np.stack([found, found], 1))
    words = [set(name.partition(": ")[2].split()) for name in data.labels]
    assert all(len(w) == topics.SHOWN and any(w <= set(group.split()) for group in GROUPS) for w in words)
    assert data.class_counts.tolist() == [10, 10, 10] and data.labels[0] in data.summary
    batch = next(data.train(seed=0))
    labels = [data.stored["train"].labels(int(number))[0] for number in batch["bag"]]
    assert sorted(set(batch["bag"])) and batch["labels"].tolist() == labels
    assert next(data.heldout(batch_size=6))["bag"].tolist() == [-1] * 6
    monkeypatch.setattr(topics, "_fit", lambda *_: pytest.fail("not read from the cache"))
    again = prepare_examples(config(tmp_path), opened_as=BagExamples)
    assert again.labels == data.labels and again.heldout_digest == data.heldout_digest


@pytest.mark.oracle
def test_runs_keep_their_topics(tmp_path):
    pytest.importorskip("sklearn")
    task, data = TASKS["labelled_bags"], config(tmp_path)
    vocabulary = task.vocabulary(task.dataset(data, None))
    assert task.dataset(data, vocabulary).labels == vocabulary.labels
    other = Vocabulary(vocabulary.tokenizer, ("topic 1: a", "topic 2: b"))
    raises("and those of the run topic 1: a, topic 2: b.*keep the run's data.path", task.dataset, data, other)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("positives", "rows", "message"),
    [
        ("topics(31)", None, "there are 30 training bags: expected at most as many topics"),
        ("topics(9)", [{"texts": ["a b", "b a"]}] * 12, "there are 2 different words in training bags: expected"),
        ("topics(3)", [{"texts": ["a b c", "c b a"]}] * 12, "topics are the main one of no training bag: expected"),
    ],
)
def test_more_topics_than_bags_or_words_raise(tmp_path, positives, rows, message):
    pytest.importorskip("sklearn")
    raises(message, lambda: prepare_examples(config(tmp_path, positives, rows), opened_as=BagExamples))


def test_missing_scikit_learn_raises(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.decomposition", None)
    raises(r"data.positives='topics\(3\)' needs", lambda: prepare_examples(config(tmp_path), opened_as=BagExamples))


def test_invalid_positives_raise(tmp_path):
    raises("data.positives .*'topic'.*did you mean 'topics'", config, tmp_path, "topic(3)")
