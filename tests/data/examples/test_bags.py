"""Labelled bags: titles of the standard library, arrays of a batch, and records that are no bags."""

import json

import numpy as np

from hpnlp.data.examples import BagsConfig, prepare_examples
from hpnlp.data.examples.generated import titles
from hpnlp.data.reading.sources import File
from tests.messages import raises


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


ROWS = [{"texts": ["a b b", "c", "b a"], "label": "one"}, {"texts": "d e\n\na d", "label": "two"}]


def config(tmp_path, rows=ROWS, heldout=ROWS, **fields):
    paths = {"path": write(tmp_path / "train.jsonl", rows), "heldout_path": write(tmp_path / "held.jsonl", heldout)}
    return BagsConfig(**paths, **{"tokenizer": "words(40, by=whitespace)", "seq_len": 6, "max_texts": 3} | fields)


def heldout(examples):
    """The held-out bags as lists of texts, with the batch."""
    batch = next(examples.heldout(batch_size=3))
    bags = [
        [examples.tokenizer.decode(row[number == n]).decode() for n in range(1, number.max() + 1)]
        for row, number in zip(batch["tokens"], batch["segment_ids"], strict=True)
    ]
    return bags, batch


def test_batches_have_a_segment_for_each_text(tmp_path):
    bags, batch = heldout(prepare_examples(config(tmp_path)))
    assert bags == [["a b", "c", "b a"], ["d e", "a d"], []]
    assert batch["segment_ids"].tolist() == [[1, 1, 2, 3, 3, 0], [1, 1, 2, 2, 0, 0], [0] * 6]
    assert batch["labels"].tolist() == [0, 1, 0] and batch["weights"].tolist() == [1, 1, 0]
    assert all(batch[name].dtype == np.int32 for name in ("tokens", "segment_ids", "positions", "labels"))


def test_repeated_tokens_are_kept_on_request(tmp_path):
    assert heldout(prepare_examples(config(tmp_path, distinct=False)))[0][0] == ["a b b", "c", "b a"]


def test_texts_of_long_bags_are_cut_alike(tmp_path):
    rows = [{"texts": ["a b c d", "e"], "label": "one"}, {"texts": ["a", "b", "c"], "label": "two"}]
    examples = prepare_examples(config(tmp_path, rows, rows, seq_len=4))
    assert heldout(examples)[0][:2] == [["a b", "e"], ["a", "b", "c"]]
    assert "2 examples cut, at data.seq_len=4" in examples.summary


def test_records_that_are_no_bags_raise(tmp_path):
    for row, message in (
        ({"texts": []}, "field 'texts' is empty"),
        ({"texts": ["a"]}, "line 1: field 'texts' has one text, expected at least 2, of which each is compared"),
        ({"texts": list("abcd")}, "field 'texts' has 4 texts, and data.max_texts=3: raise it, or divide it"),
        ({"texts": ["a", " "]}, "has no tokens in text 2 of its bag"),
        ({"texts": ["a", 3]}, "field 'texts' has an item 2 that is a int, expected a string"),
        ({"label": "thre"}, "the label 'thre' is held out, and no training example has it"),
    ):
        row = {"texts": ["a", "b"], "label": "one"} | row
        sides = {"rows": ROWS, "heldout": [row]} if "label" in message else {"rows": [row, *ROWS]}
        raises(message, prepare_examples, config(tmp_path, **sides))


def test_invalid_configs_raise(tmp_path):
    message = "data.seq_len=2 leaves no room for a token of each of data.max_texts=3 texts: raise it"
    raises(message, lambda: prepare_examples(config(tmp_path, seq_len=2)))


def test_bags_of_one_label_raise(tmp_path):
    one = [ROWS[0]]
    raises("only the class 'one': expected at least two classes", lambda: prepare_examples(config(tmp_path, one, one)))


def test_titles_are_first_paragraphs_of_one_module(tmp_path):
    def file(name, documented):
        lines = [f'def f{i}():\n    """{text}"""\n' for i, text in enumerate(documented)]
        path = tmp_path / name.replace("/", "_")
        path.write_text("".join(lines))
        return File(str(path), name, 0)

    letters = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota"]
    own = [f"Return the {letter} of (s[, t]) -> x" for letter in letters]
    files = [
        file("net/__init__.py", ["Two words", "Is in both.", *own, "First line\n    goes on.\n\n    Not the rest."]),
        file("other.py", ["Is in both.", *(f"Open file number {i}." for i in range(12))]),
        file("small.py", ["The only title here."]),
    ]
    found = titles.titles(files)
    assert found.keys() == {"net", "other"}
    assert set(found["net"]) == {*own, "First line goes on."} and len(found["other"]) == 12
    train, held = list(titles.train_bags(files)), list(titles.heldout_bags(files))
    assert len(train) + len(held) == 2 + 3 and {bag["label"] for bag in train} == {"net", "other"}
    texts = [text for bag in train + held for text in bag["texts"]]
    assert len(texts) == len(set(texts)) == 20
