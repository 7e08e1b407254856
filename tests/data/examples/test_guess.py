"""Columns of a table of labelled texts that are guessed from their names and values."""

import json

import pytest

from hpnlp.data.examples import ClassificationConfig
from hpnlp.data.examples.checks.guess import guessed_fields
from hpnlp.types import InputError

TEXTS = ["a good film", "a bad film", "no film at all", "the best one"]


def write(path, header, *columns):
    rows = zip(*columns, strict=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows))
    else:
        mark = "\t" if path.suffix == ".tsv" else ","
        path.write_text("".join(mark.join(row) + "\n" for row in (header, *rows)))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
@pytest.mark.parametrize(
    ("header", "columns", "expected"),
    [
        (["text", "label"], (TEXTS, "yyny"), {}),
        (["Review", "Sentiment"], (TEXTS, "yyny"), {"text_field": "Review", "label_field": "Sentiment"}),
        (["kind", "sentence"], ("yyny", TEXTS), {"text_field": "sentence", "label_field": "kind"}),
        (["a", "b"], ("yyny", TEXTS), {"text_field": "b", "label_field": "a"}),
        (["a", "b"], (TEXTS, TEXTS), {}),
        (["a", "b"], ("yyny", "yyny"), {}),
        (["id", "Text", "Label"], ("1234", TEXTS, "yyny"), {"text_field": "Text", "label_field": "Label"}),
        (["id", "a", "b"], ("1234", TEXTS, "yyny"), {}),
        (["text", "title", "label"], (TEXTS, TEXTS, "yyny"), {}),
        (["title", "body", "label"], (TEXTS, TEXTS, "yyny"), {}),
        (["text"], (TEXTS,), {}),
    ],
)
def test_columns_are_guessed_where_they_can_be_told_apart(tmp_path, name, header, columns, expected):
    write(tmp_path / name, header, *columns)
    for path in (tmp_path / name, tmp_path):
        assert guessed_fields(ClassificationConfig(path=str(path))) == expected


def test_invalid_records_do_not_hide_the_names(tmp_path):
    (tmp_path / "a.csv").write_text("review,sentiment,id\na,b,1,2,3\nc,d,2\n", "utf-8")
    assert guessed_fields(ClassificationConfig(path=str(tmp_path / "a.csv"))) == {
        "text_field": "review",
        "label_field": "sentiment",
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"label_field": "score"}, {"text_field": "review"}), ({"text_field": "summary"}, {"label_field": "sentiment"})],
)
def test_names_that_the_user_gives_stay(tmp_path, given, expected):
    (tmp_path / "a.csv").write_text("review,sentiment,score,summary\na,b,1,c\n", "utf-8")
    assert guessed_fields(ClassificationConfig(path=str(tmp_path / "a.csv"), **given)) == expected


def test_names_of_no_column_raise(tmp_path):
    for given, message in (
        ({"label_field": "sentimnt"}, "no field 'sentimnt' .did you mean 'sentiment'..*: pass data.label_field=NAME"),
        ({"text_field": "absent"}, "no field 'absent', the fields are 'review', .*: pass data.text_field=NAME"),
    ):
        (tmp_path / "a.csv").write_text("review,sentiment\na,b\n", "utf-8")
        with pytest.raises(InputError, match=f"data.path='.*a.csv': {message}"):
            guessed_fields(ClassificationConfig(path=str(tmp_path / "a.csv"), **given))


def test_tables_without_a_line_of_names_raise(tmp_path):
    for name, mark in (("a.csv", ","), ("a.tsv", "\t"), ("b.csv", ";")):
        lines = [f"{text}{mark}{label}\n" for text, label in zip(TEXTS * 2, "yyny" * 2, strict=True)]
        (tmp_path / name).write_text("".join(lines))
        message = (
            "the first line has 'y', which is a label of other lines, .*: write a line with the names of the columns"
        )
        with pytest.raises(InputError, match=message):
            guessed_fields(ClassificationConfig(path=str(tmp_path / name)))


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\n", b'"a,b\n', b"a,b\n1\n"])
def test_nothing_is_guessed_from_files_that_cannot_be_read(tmp_path, content):
    if content is not None:
        (tmp_path / "a.csv").write_bytes(content)
    assert guessed_fields(ClassificationConfig(path=str(tmp_path / "a.csv"))) == {}
    assert guessed_fields(ClassificationConfig()) == {}
