"""Records without labels, which a teacher labels: formats, the split, batches, counts and errors."""

import dataclasses
import json

import numpy as np
import pytest

from hpnlp.data.examples import prepare_examples
from hpnlp.data.examples.baselines import linear_accuracy
from hpnlp.data.examples.checks.check import check_examples
from hpnlp.data.examples.checks.guess import guessed_fields
from hpnlp.data.examples.config import HashedTextsConfig
from hpnlp.data.examples.kind import TEACHER_WEIGHTS
from hpnlp.data.ingest import hash_fraction
from hpnlp.types import InputError
from tests.data.batches import assert_equal, take
from tests.data.examples.records import classification, config, tagging, write
from tests.messages import raises

LABELS = ["class 0", "class 1", "class 2", "class 3"]  # of the teacher, one more than the data have


def without(rows, keeps, field="label", value=None):
    """The records, of which those whose number `keeps` is false for have the value in place of labels; no field for ..."""
    missing = [{name: x for name, x in row.items() if name != field or value is not ...} for row in rows]
    return [
        row if keeps(i) else {**other, **({} if value is ... else {field: value})}
        for i, (row, other) in enumerate(zip(rows, missing, strict=True))
    ]


def every_third(number):
    return number % 3 == 0


def texts(examples, name):
    return [row[0].decode() for row in examples.stored[name].texts()]


@pytest.mark.parametrize(
    ("extension", "value"),
    [("jsonl", None), ("jsonl", ...), ("json", " "), ("csv", ""), ("tsv", ""), ("parquet", None), ("npz", "")],
)
def test_missing_labels_are_read_from_all_formats(tmp_path, extension, value):
    rows = classification()
    path = write(tmp_path / f"a.{extension}", without(rows, every_third, value=value))
    examples = prepare_examples(config("classification", path, unlabelled=True), LABELS)
    is_heldout = [hash_fraction(f"a.{extension}#{i}") < 0.2 and every_third(i) for i in range(len(rows))]
    assert texts(examples, "heldout") == [row["text"] for row, held in zip(rows, is_heldout, strict=True) if held]
    assert texts(examples, "train") == [row["text"] for row, held in zip(rows, is_heldout, strict=True) if not held]
    assert examples.unlabelled == 40 and f"{60 - sum(is_heldout)} examples to train on (40 without a label)" in (
        examples.summary
    )
    assert examples.labels == tuple(LABELS) and examples.class_counts.tolist() == [20 - sum(is_heldout), 0, 0, 0]
    assert "no labelled training example of class 1, class 2, class 3" in examples.summary
    again = prepare_examples(config("classification", path, unlabelled=True), LABELS)
    assert again.is_cached and again.unlabelled == 40


@pytest.mark.parametrize("extension", ["csv", "parquet", "npz"])
def test_tables_may_lack_the_column(tmp_path, extension):
    rows = [{"text": row["text"]} for row in classification()]
    path, labelled = write(tmp_path / f"a.{extension}", rows), write(tmp_path / "b.jsonl", classification(9))
    made = config("classification", path, unlabelled=True, heldout_path=str(labelled))
    examples = prepare_examples(made, LABELS)
    assert examples.unlabelled == examples.train_examples == 60 and examples.heldout_examples == 9
    assert linear_accuracy(examples) == {"words": None, "characters": None}
    assert guessed_fields(dataclasses.replace(made, label_field="stars")) == {}


def test_batches_have_weights_of_labels_and_of_all_examples(tmp_path):
    keeps = every_third
    path = write(tmp_path / "a.jsonl", without(classification(), keeps))
    examples = prepare_examples(config("classification", path, unlabelled=True), LABELS)
    stored = examples.stored["train"]
    numbers = list(range(6))
    batch = examples.kind.batch(stored, numbers, 8, examples.tokenizer, examples.seq_len)
    known = [int(text.decode().split()[1]) % 3 == 0 for text, *_ in stored.texts(numbers)]
    assert batch["weights"].tolist() == [*map(float, known), 0, 0] and 0 < sum(known) < 6
    assert batch[TEACHER_WEIGHTS].tolist() == [1] * 6 + [0, 0] and batch["labels"].tolist() == [0] * 8

    path = write(tmp_path / "b.jsonl", without(tagging(), keeps, "labels", []))
    examples = prepare_examples(config("tagging", path, unlabelled=True), ["even", "odd"])
    labelled = prepare_examples(config("tagging", write(tmp_path / "c.jsonl", tagging())))
    numbers = range(12)
    batch = examples.kind.batch(examples.stored["train"], numbers, 12, examples.tokenizer, examples.seq_len)
    by_text = dict(zip(texts(labelled, "train"), range(labelled.train_examples), strict=True))
    heldout = dict(zip(texts(labelled, "heldout"), range(labelled.heldout_examples), strict=True))
    for row, text in enumerate(texts(examples, "train")[:12]):
        side, number = ("train", by_text[text]) if text in by_text else ("heldout", heldout[text])
        full = labelled.kind.batch(labelled.stored[side], [number], 1, labelled.tokenizer, labelled.seq_len)
        is_known = float(batch["weights"][row].any())
        np.testing.assert_array_equal(batch[TEACHER_WEIGHTS][row], full["weights"][0])
        np.testing.assert_array_equal(batch["labels"][row], is_known * full["labels"][0])
        np.testing.assert_array_equal(batch["weights"][row], is_known * full["weights"][0])
    assert 0 < batch["weights"].any(axis=1).sum() < 12


def test_data_with_all_labels_are_those_of_labelled_runs(tmp_path):
    for kind, make in (("classification", classification), ("tagging", tagging)):
        path = write(tmp_path / f"{kind}.jsonl", make())
        plain, other = (prepare_examples(config(kind, path, unlabelled=on)) for on in (False, True))
        assert (
            plain.heldout_digest == other.heldout_digest and plain.summary.split(";")[0] == other.summary.split(";")[0]
        )
        for expected, batch in zip(take(plain.train(seed=0), 3), take(other.train(seed=0), 3), strict=True):
            np.testing.assert_array_equal(batch.pop(TEACHER_WEIGHTS), expected["weights"])
            assert_equal([batch], [expected])


def test_examples_of_heldout_sets_without_labels_are_counted(tmp_path):
    rows = [{**row, "page": f"page {i // 5}"} for i, row in enumerate(classification())]
    path = write(tmp_path / "a.jsonl", without(rows, every_third))
    examples = prepare_examples(config("classification", path, unlabelled=True, group_field="page"), LABELS)
    heldout = [i for i, row in enumerate(rows) if hash_fraction(row["page"]) < 0.2]
    assert texts(examples, "heldout") == [rows[i]["text"] for i in heldout if every_third(i)]
    assert not set(texts(examples, "train")) & {rows[i]["text"] for i in heldout}
    count = sum(not every_third(i) for i in heldout)
    assert f"left out: {count} held out without a label" in examples.summary and examples.unlabelled == 40 - count

    other = write(tmp_path / "b.jsonl", without(classification(9), every_third))
    made = config("classification", path, unlabelled=True, heldout_path=str(other), challenge_path=str(other))
    examples = prepare_examples(made, LABELS)
    assert examples.heldout_examples == examples.stored["challenge"].count == 3
    assert [line[:53] for line in examples.left_out()] == [
        "left out of held-out examples: 6 held out without a l",
        "left out of challenge examples: 6 held out without a ",
    ]


def test_checks_count_records_without_labels(tmp_path):
    path = write(tmp_path / "a.jsonl", without(classification(), every_third))
    found = check_examples(config("classification", path))
    assert any(fault.startswith("40 records: field 'label' is empty: ") for fault in found.faults)
    made = config("classification", path, unlabelled=True)
    for labels in (LABELS, None):
        rows = without(classification(), lambda i: i % 4 == 0)
        found = check_examples(dataclasses.replace(made, path=str(write(tmp_path / "b.jsonl", rows))), labels=labels)
        assert not found.faults and any(
            line == "45 training examples have no label: they need a teacher, distill.teacher=RUN"
            for line in found.remarks
        )
        assert not any("another label" in line for line in found.remarks)


ERRORS = {
    "no label, labelled run": (
        dict(keeps=every_third, value=""),
        {},
        "a.jsonl, line 2: field 'label' is empty: .*or pass data.skip_bad_lines=True .*; or let a teacher label it: pass "
        "data.unlabelled=True and distill.teacher=RUN",
    ),
    "nothing to score": (
        dict(keeps=lambda i: False),
        {"unlabelled": True, "labels": LABELS},
        "no example has a label, so that none can be held out and scored: pass data.heldout_path=PATH",
    ),
    "nothing to score in heldout_path": (
        dict(keeps=lambda i: False),
        {"unlabelled": True, "labels": LABELS, "heldout_path": "a.json*"},
        r"no valid example is held out \(left out: 60 held out without a label .*\): add examples with labels",
    ),
    "no classes": (
        dict(keeps=lambda i: False),
        {"unlabelled": True, "heldout_path": "b.jsonl"},
        "none of the 60 training examples has a label: pass distill.teacher=RUN, whose classes are taken",
    ),
    "a label that the teacher does not have": (
        dict(keeps=every_third),
        {"unlabelled": True, "labels": ["blue", "green"]},
        "has label 'class 0', of which there is no class: .*; the classes are those of the teacher, blue, green: name one that "
        "was trained on such labels",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_invalid_data_raise(tmp_path, name):
    missing, options, message = ERRORS[name]
    path = write(tmp_path / "a.jsonl", without(classification(), **missing))
    write(tmp_path / "b.jsonl", classification(9))
    options = dict(options)
    labels = options.pop("labels", None)
    if "heldout_path" in options:
        options["heldout_path"] = str(tmp_path / options["heldout_path"])
        if options["heldout_path"].endswith("a.json*"):
            path = write(tmp_path / "c.jsonl", classification())
    raises(message, lambda: prepare_examples(config("classification", path, **options), labels))


def test_other_numbers_of_labels_than_words_raise(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"words": ["a", "b"], "labels": ["x"]}) + "\n")
    with pytest.raises(InputError, match="has 2 words and field 'labels' 1 labels"):
        prepare_examples(config("tagging", path, unlabelled=True), ["x", "y"])


def test_projection_networks_have_no_teacher():
    raises("data.unlabelled=True: projection networks have no teacher", HashedTextsConfig, path="a", unlabelled=True)
