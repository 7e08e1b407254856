"""Pairs of texts with labels and grades: their arrays, the range of grades, the cache, and errors."""

import re

import numpy as np
import pytest

from hpnlp.data.examples import PairsConfig, prepare_examples
from hpnlp.data.examples.kinds.unlabelled import Unlabelled, converted
from tests.data.examples.records import write
from tests.messages import raises

# One pair of each label and grade; with two grades, "1" and 5.
LABELS, GRADES = ("yes", "no", "yes", "maybe"), (1, 5, "2", 4.5)


def rows(count=8):
    return [
        {"text": f"text {i}", "pair": f"partner {i}", "label": LABELS[i % 4], "grade": GRADES[i % 4]}
        for i in range(count)
    ]


def prepared(tmp_path, examples=None, **options):
    """Examples of which all of a second file are held out."""
    paths = {"path": str(write(tmp_path / "a.jsonl", rows()))}
    paths["heldout_path"] = str(write(tmp_path / "b.jsonl", rows(4) if examples is None else examples))
    cache = str(tmp_path / "cache")
    return prepare_examples(PairsConfig(**paths | {"seq_len": 20, "tokenizer": "bytes", "cache": cache} | options))


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ({"label_field": "label"}, "labels", [2, 1, 2, 0, 0]),  # maybe, no, yes
        ({"label_field": "grade", "label_range": "1, 5"}, "grades", [0, 1, 0.25, 0.875, 0]),
        ({"label_field": "grade", "label_range": "-5,5"}, "grades", [0.6, 1, 0.7, 0.95, 0]),
    ],
)
def test_batches_have_a_label_or_a_grade_of_each_pair(tmp_path, options, name, expected):
    plain, examples = prepared(tmp_path), prepared(tmp_path, **options)
    batch = examples.kind.batch(examples.stored["heldout"], range(4), 5, examples.tokenizer, 20)
    assert batch[name].dtype == (np.int32 if name == "labels" else np.float32)
    np.testing.assert_array_equal(batch.pop(name), np.array(expected, batch["weights"].dtype))
    expected_batch = plain.kind.batch(plain.stored["heldout"], range(4), 5, plain.tokenizer, 20)
    assert batch.keys() == expected_batch.keys()
    for key, values in expected_batch.items():
        np.testing.assert_array_equal(batch[key], values)
    assert examples.labels == (("maybe", "no", "yes") if name == "labels" else ())
    assert examples.heldout_digest != plain.heldout_digest and not examples.kind.compares_examples
    assert "\nscores on 4 examples depend on chance" in examples.summary
    assert ("an accuracy has a standard error" in examples.summary) == (name == "labels")
    values = converted(examples.kind, {"text": "ask", "pair": "told"})  # predictions need no label
    unlabelled = Unlabelled(examples.kind, examples.tokenizer, [values])
    assert examples.kind.batch(unlabelled, [0], 1, examples.tokenizer, 20)[name].tolist() == [0]


def test_another_range_reads_the_records_again(tmp_path):
    options = {"label_field": "grade"}
    assert not prepared(tmp_path, **options, label_range="1,5").is_cached
    assert prepared(tmp_path, **options, label_range="1.0,5").is_cached
    other = prepared(tmp_path, **options, label_range="0,5")
    assert not other.is_cached and other.stored["heldout"].all_grades().tolist() == pytest.approx([0.2, 1, 0.4, 0.9])


GRADED = {"label_field": "grade", "label_range": "0,5"}


def test_invalid_records_and_fields_raise(tmp_path):
    for options, row, message in (
        (GRADED, {"grade": 5.5}, "b.jsonl, line 1: field 'grade' is 5.5, expected 0 to 5 (data.label_range)"),
        (GRADED, {"grade": "high"}, "b.jsonl, line 1: field 'grade' is 'high', expected a number"),
        ({"label_field": "label"}, {"label": 0.5}, "b.jsonl, line 1: field 'label' is the number 0.5, expected"),
        ({"label_field": "label"}, {"label": "other"}, "line 1: the label 'other' is held out, and no training"),
        ({"label_field": "gold"}, {}, "no field 'gold'"),
        ({"label_field": "text"}, {}, "data.label_field='text' is data.text_field, too"),
        ({"label_range": "0,5"}, {}, "data.label_range='0,5', and data.label_field='' names no field with numbers"),
        (GRADED | {"label_range": "5,0"}, {}, "data.label_range='5,0': expected two ascending numbers, as 0,5"),
        (GRADED | {"negative_fields": "x"}, {}, "data.negative_fields='x', data.label_field='grade': pairs"),
        (GRADED | {"fold_labels": True}, {}, "data.fold_labels=True: these examples have no labels"),
    ):
        raises(re.escape(message), prepared, tmp_path, [rows(1)[0] | row], **options)
