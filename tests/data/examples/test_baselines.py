"""Linear baselines of scikit-learn: their scores on examples that are easy by construction, and the missing package."""

import random
import sys

import numpy as np
import pytest

from hpnlp.data.examples import baselines, prepare_examples
from hpnlp.data.examples.store import StoredExamples
from tests.data.examples.records import config, write
from tests.messages import raises

NAMES = [f"name{i}" for i in range(80)]
NAMED = ["file", "socket", "thread", "header", "queue", "token"]


def bags(count=300):
    """Texts of random words; every word occurs mostly in texts of one of four classes."""
    draw = random.Random(0)
    for _ in range(count):
        kind = draw.randrange(4)
        words = [
            NAMES[draw.randrange(20) * 4 + (kind if draw.random() < 0.7 else draw.randrange(4))] for _ in range(12)
        ]
        yield {"text": " ".join(words), "pair": " ".join(reversed(words[3:])), "second": words[0], "label": kind}


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["classification", "pair classification"])
def test_bags_of_words_find_the_class_of_words(tmp_path, kind):
    pytest.importorskip("sklearn")
    examples = prepare_examples(config(kind, write(tmp_path / "a.jsonl", list(bags()))))
    scores = baselines.linear_accuracy(examples)
    assert scores.keys() == {"words", "characters"} and all(0.8 < score <= 1 for score in scores.values())
    assert baselines.linear_accuracy(examples) == scores


@pytest.mark.oracle
def test_tfidf_finds_pairs_that_share_words(tmp_path):
    pytest.importorskip("sklearn")
    path = write(tmp_path / "a.jsonl", list(bags()))
    examples = prepare_examples(config("pairs", path))
    recall = baselines.tfidf_recall(examples, top=(1, 5, 1000))
    assert 0.8 < recall[1] <= recall[5] <= recall[1000] == 1.0
    rows = [{**row, "pair": f"nothing {i}"} for i, row in enumerate(bags())]
    unrelated = prepare_examples(config("pairs", write(path, rows)))
    assert baselines.tfidf_recall(unrelated, limit=20)[10] < 0.6
    assert baselines.tfidf_recall(unrelated, top=(19, 20), limit=20) == {19: 0.0, 20: 1.0}


@pytest.mark.oracle
def test_tfidf_ranks_match_a_direct_computation(tmp_path):
    text = pytest.importorskip("sklearn.feature_extraction.text")
    examples = prepare_examples(config("pairs", write(tmp_path / "a.jsonl", list(bags()))))
    rows = [[part.decode() for part in texts] for texts in examples.stored["heldout"].texts()]
    model = text.TfidfVectorizer(sublinear_tf=True)
    model.fit([part.decode() for texts in examples.stored["train"].texts() for part in texts])
    queries, keys = (model.transform([row[part] for row in rows]).toarray() for part in range(2))
    order = np.argsort(-queries @ keys.T, axis=1)
    expected = np.mean([i in order[i, :3] for i in range(len(rows))])
    assert baselines.tfidf_recall(examples, top=(3,))[3] == pytest.approx(expected, abs=1 / len(rows))


@pytest.mark.oracle
def test_examples_without_features_have_no_score(tmp_path):
    pytest.importorskip("sklearn")
    rows = [{"text": "!" * (i + 1), "pair": "?" * (i + 1), "label": i % 2} for i in range(9)]
    path = write(tmp_path / "a.jsonl", rows)
    scores = baselines.linear_accuracy(prepare_examples(config("classification", path)))
    assert scores["words"] is None and scores.keys() == {"words", "characters"}
    assert baselines.tfidf_recall(prepare_examples(config("pairs", path))) == {1: None, 10: None}
    spaces = write(tmp_path / "b.jsonl", [{"source": " " * (i + 1), "target": "a"} for i in range(9)])
    assert baselines.linear_exact_match(prepare_examples(config("seq2seq", spaces))) == {}


@pytest.mark.oracle
def test_baselines_read_a_limited_number_of_training_examples(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(baselines, "MAX_TRAINED", 61)
    read, texts = [], StoredExamples.texts
    monkeypatch.setattr(StoredExamples, "texts", lambda *args: (read.append(1) or row for row in texts(*args)))
    examples = prepare_examples(config("classification", write(tmp_path / "a.jsonl", list(bags()))))
    assert baselines.linear_accuracy(examples)["words"] > 0.5
    assert len(read) == 61 + 2 * examples.heldout_examples


@pytest.mark.oracle
def test_tfidf_of_words_matches_parts_of_identifiers_and_of_tokens_those_of_the_tokenizer(tmp_path):
    pytest.importorskip("sklearn")
    rows = [{"text": f"read {a} {b} quickly", "pair": f"def read{a.title()}_{b}(self)"} for a in NAMED for b in NAMED]
    examples = prepare_examples(config("pairs", write(tmp_path / "a.jsonl", rows), tokenizer="words(300)"))
    assert baselines.tfidf_recall(examples, top=(1,), by="words")[1] == 1.0
    assert baselines.tfidf_recall(examples, top=(1,), by="tokens")[1] < 0.5


@pytest.mark.oracle
def test_a_linear_model_predicts_targets_whose_words_stand_in_the_places_of_the_source_words(tmp_path):
    pytest.importorskip("sklearn")
    draw = random.Random(0)
    words = dict(zip(NAMED, ["one", "two", "three", "four", "five", "six"], strict=True))
    sources = [draw.choices(NAMED, k=draw.randint(1, 4)) for _ in range(300)]
    rows = [{"source": " ".join(s), "target": " ".join(words[name] for name in s)} for s in sources]
    longer = [{"source": " ".join(s), "target": " ".join(map(words.get, s))} for s in (draw.choices(NAMED, k=6),)]
    paths = {"challenge_path": str(write(tmp_path / "b.jsonl", longer))}
    examples = prepare_examples(config("seq2seq", write(tmp_path / "a.jsonl", rows), **paths))
    assert baselines.linear_exact_match(examples, ("heldout", "challenge")) == {"heldout": 1.0, "challenge": 0.0}


def test_missing_package_raises(tmp_path, monkeypatch):
    for name in ("sklearn", "sklearn.feature_extraction.text"):
        monkeypatch.setitem(sys.modules, name, None)
    examples = prepare_examples(config("pairs", write(tmp_path / "a.jsonl", list(bags(30)))))
    raises("needs the scikit-learn package: pip install scikit-learn", baselines.tfidf_recall, examples)
