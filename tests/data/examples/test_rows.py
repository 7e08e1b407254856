"""Formats of files: all give the same batches, and errors name the file, the place and the fix."""

import gzip
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpnlp.data.examples import prepare_examples
from hpnlp.data.reading import sources
from hpnlp.data.reading.rows import FORMATS, RowReader
from hpnlp.data.reading.sources import LeftOut
from hpnlp.types import InputError
from tests.data.batches import assert_equal, take
from tests.data.examples.records import KINDS, config, write
from tests.messages import raises


def read(path, kind="classification", skip_bad_lines=False, **options):
    """All records of one source, and what was left out of it."""
    (source,) = sources.find(str(path), "data.path", FORMATS)
    made = config(kind, path, **options)
    left_out = LeftOut(source.left_out)
    return list(RowReader(made.kind(), made.group_field, left_out, skip_bad_lines).read(source)), left_out


@pytest.mark.parametrize("kind", KINDS)
def test_all_formats_give_the_same_batches(tmp_path, kind):
    rows = KINDS[kind][0]()
    expected = None
    for extension in (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".npz"):
        (tmp_path / extension[1:]).mkdir()
        # The same name, because names decide which examples are held out.
        path = write(tmp_path / extension[1:] / f"rows{extension}", rows)
        examples = prepare_examples(config(kind, path, group_field=next(iter(rows[0])) if kind != "tagging" else ""))
        batches = take(examples.train(seed=0), 12) if kind != "tagging" else []
        found = (examples.labels, examples.train_examples + examples.heldout_examples)
        texts = sorted(text for stored in examples.stored.values() for text in stored.texts())
        if expected is None:
            expected = found, texts, batches
        assert (found, texts) == expected[:2]
        assert_equal(batches, expected[2])


def test_compressed_files_and_integer_labels_give_the_same_rows(tmp_path):
    rows = [{"text": "one", "label": 1}, {"text": "two", "label": True}, {"text": "three\r\n3", "label": "-"}]
    plain = write(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + plain.read_bytes() + b"\n\n"))
    (tmp_path / "c.csv").write_bytes(b'\xef\xbb\xbftext,id,label\none,0,1\n"two",1,true\n\n"three\r\n3",2,-\n')
    expected = [{"text_field": "one", "label_field": "1"}, {"text_field": "two", "label_field": "true"}]
    expected.append({"text_field": "three\r\n3", "label_field": "-"})
    for name in ("a.jsonl", "b.jsonl.gz", "c.csv"):
        found, _ = read(tmp_path / name)
        assert [row.values for row in found] == expected
        assert [row.name for row in found][0] == f"{name.removesuffix('.gz')}#0"


def test_parquet_columns_may_be_dictionaries_lists_and_integers(tmp_path):
    rows = KINDS["tagging"][0](4)
    table = pa.table({"words": [row["words"] for row in rows], "labels": [[1] * 3, [2, 1, 1], [3] * 3, [1] * 3]})
    pq.write_table(table, tmp_path / "a.parquet")
    found, _ = read(tmp_path / "a.parquet", "tagging")
    assert [row.values["labels_field"] for row in found][1] == ["2", "1", "1"]
    labels = pa.array(["x", "y", "x"]).dictionary_encode()
    pq.write_table(pa.table({"text": pa.array([b"a", b"b", b"c"]), "label": labels}), tmp_path / "b.parquet")
    found, _ = read(tmp_path / "b.parquet")
    assert [(row.values["text_field"], row.values["label_field"]) for row in found] == [
        ("a", "x"),
        ("b", "y"),
        ("c", "x"),
    ]


GOOD = '{"text": "t", "label": "x"}\n'
# (name of the file, content, kind, options, message). Every message names the file, the place and the fix.
BAD = {
    "missing field": ("a.jsonl", GOOD + '{"text": "t"}', {}, "a.jsonl, line 2: no field 'label', the fields are 'text': pass data.label_field=NAME"),  # noqa: E501
    "empty second text": ("a.csv", "text,second,label\na,,x\n", {"pair_field": "second"}, "a.csv, line 2: field 'second' is empty: mend or remove"),  # noqa: E501
    "null text": ("a.jsonl", '{"text": null, "label": 1}', {}, "a.jsonl, line 1: field 'text' is empty: mend or remove the line, or pass data.skip_bad_lines"),  # noqa: E501
    "empty class": ("a.jsonl", GOOD + '{"text": "t", "label": " "}', {}, "a.jsonl, line 2: field 'label' is an empty class: mend"),  # noqa: E501
    "label of a wrong type": ("a.jsonl", '{"text": "t", "label": 1.5}', {}, "field 'label' is the number 1.5, expected a string, a whole number or a boolean"),  # noqa: E501
    "not JSON": ("a.jsonl", GOOD + "{", {}, "a.jsonl, line 2: not JSON"),
    "JSON is not UTF-8": ("a.jsonl", GOOD.encode() + b'{"text": "\xff", "label": 1}', {}, "a.jsonl, line 2: not UTF-8 (byte 0xff at 10), to be converted by iconv -f CP1252"),  # noqa: E501
    "CSV is not UTF-8": ("a.csv", b"text,label\na,x\n\xe9,x\n", {}, "a.csv, line 3: field 'text' is not UTF-8 (byte 0xe9 at character 0), to be converted by iconv -f CP1252 -t UTF-8 FILE"),  # noqa: E501
    "half a surrogate pair": ("a.jsonl", r'{"text": "ab\ud800", "label": 1}', {}, "a.jsonl, line 1: field 'text' is not UTF-8 (half a surrogate pair at character 2): mend"),  # noqa: E501
    "UTF-16": ("a.csv", "text,label\nabc,x\n".encode("utf-16"), {}, "a.csv' is UTF-16, not UTF-8: convert it by: iconv"),
    "CSV without the column": ("a.csv", "text,class\na,x\n", {}, "a.csv, line 1: no field 'label', the fields are 'text', 'class': pass data.label_field=NAME with one of them; if this line is a record, write a line with the names"),  # noqa: E501
    "CSV with a column twice": ("a.csv", "text,label,label\na,x,x\n", {}, "a.csv, line 1: has more than one column 'label'"),
    "CSV with a missing cell": ("a.csv", 'text,label\n"a\nb",x\nc\n', {}, "a.csv, line 4: 1 cells, expected 2 as in the first line; cells are missing"),  # noqa: E501
    "CSV with line ends of old Macs": ("a.csv", "text,label\ra,x\rb,y\r", {}, r"a.csv, line 1: a carriage return outside of quotes: if all lines end so, convert the file by tr '\r' '\n' < FILE > NEW_FILE"),  # noqa: E501
    "another format": ("a.txt", "text", {}, "a.txt' has another format: expected .jsonl, .json, .csv, .tsv, .parquet, .npz: convert"),  # noqa: E501
    "damaged Parquet": ("a.parquet", "PAR1", {}, "a.parquet: not a Parquet file that can be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_records_raise(tmp_path, case):
    name, content, options, message = BAD[case]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    raises(re.escape(message), read, tmp_path / name, **options)


def test_lists_of_different_lengths_raise(tmp_path):
    write(tmp_path / "a.jsonl", [{"words": ["a", "b"], "labels": ["x"]}])
    raises("a.jsonl, line 1: field 'words' has 2 words and field 'labels' 1", read, tmp_path / "a.jsonl", "tagging")
    for words, message in (
        ([], "is empty"),
        (["a", ""], "has an item 2 that is empty"),
        (7, "is a int, expected a list"),
    ):
        write(tmp_path / "a.jsonl", [{"words": words, "labels": "x"}])
        raises(f"line 1: field 'words' {message}", read, tmp_path / "a.jsonl", "tagging")


def test_invalid_parquet_raises(tmp_path):
    for table, message in (
        ({"text": [1], "label": ["x"]}, "column 'text' holds integer, expected string: convert it, or pass another"),
        ({"text": ["t"], "label": [0.5]}, "column 'label' holds double, expected boolean or integer or string"),
        ({"text": [["t"]], "label": ["x"]}, "column 'text' holds list of string, expected string"),
        ({"text": ["t"]}, "no field 'label', the fields are 'text': pass data.label_field=NAME"),
        ({"text": ["t", None], "label": ["x", "x"]}, "a.parquet, row 1: field 'text' is empty"),
        ({"text": pa.array([b"t", b"\xff"]), "label": ["x", "x"]}, "a.parquet, row 1: field 'text' is not UTF-8"),
    ):
        pq.write_table(pa.table(table), tmp_path / "a.parquet")
        raises(re.escape(message), read, tmp_path / "a.parquet")


def test_arrays_may_hold_integers_and_booleans(tmp_path):
    np.savez_compressed(
        tmp_path / "a.npz", text=np.array(["a", "bc"]), label=np.array([3, 12], np.uint8), more=np.ones(5)
    )
    assert [row.values["label_field"] for row in read(tmp_path / "a.npz")[0]] == ["3", "12"]
    np.savez(tmp_path / "a.npz", text=np.array(["é".encode(), b"bc"]), label=np.array([True, False]))
    rows, _ = read(tmp_path / "a.npz")
    assert [tuple(row.values.values()) for row in rows] == [("é", "true"), ("bc", "false")]
    assert rows[1].name == "a.npz#1"


def test_invalid_arrays_raise(tmp_path):
    for arrays, message in (
        ({"text": ["t"]}, "a.npz: no field 'label', the fields are 'text': pass data.label_field=NAME"),
        ({"text": ["t"], "label": [0.5]}, "array 'label' holds float64 in 1 dimensions, expected boolean in 1"),
        ({"text": [["t"]], "label": [1]}, "array 'text' holds string in 2 dimensions, expected string in 1 dimensions"),
        ({"text": ["t", "u"], "label": [1]}, "arrays of different lengths {'text': 2, 'label': 1}: save arrays"),
        ({"text": [b"t", b"\xff"], "label": [1, 2]}, "a.npz, row 1: field 'text' is not UTF-8"),
        ({"text": np.array([None]), "label": [1]}, "a.npz: no arrays that can be read (Object arrays cannot be loaded"),
    ):
        np.savez(tmp_path / "a.npz", **arrays)
        raises(re.escape(message), read, tmp_path / "a.npz")


def test_strings_of_parquet_that_are_not_utf8_raise(tmp_path):
    text = pa.array([b"t", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"text": text, "label": ["x", "x"]}), tmp_path / "a.parquet")
    raises("a.parquet, row 1: field 'text' is not UTF-8", read, tmp_path / "a.parquet")
    words = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), text)
    pq.write_table(pa.table({"words": words, "labels": [["x"], ["x"]]}), tmp_path / "b.parquet")
    raises("b.parquet, row 1: field 'words' has an item 1 that is not UTF-8", read, tmp_path / "b.parquet", "tagging")


def test_bad_records_are_left_out_if_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text(GOOD + "{\n" + '{"text": "t"}\n' + GOOD)
    (tmp_path / "b.csv").write_bytes(b'text,label\na,x\n\xff,x\nb\n"c"d,x\ne,x\n')
    (tmp_path / "c.json").write_text(f"[{GOOD}, 3]")
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(b"text,label\na,x\n"))
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "notes.txt").write_text("a note")
    rows, left_out = read(tmp_path, skip_bad_lines=True)
    assert [row.where.rpartition("/")[2] for row in rows] == [
        "a.jsonl, line 1", "a.jsonl, line 4", "b.csv, line 2", "b.csv, line 6", "c.json, record 1",
        "d.csv.gz, line 2",
    ]  # fmt: skip
    counts = {reason: count for reason, (count, *_) in left_out.items()}
    assert counts == {"invalid": 6, "empty": 1, "of other formats (.txt)": 1}


def test_quotes_of_tsv_are_characters_and_those_of_tabs_in_csv_are_not(tmp_path):
    """Three lines that begin and end with a quotation mark were one record."""
    lines = ["text\tlabel", '"one\t1', 'two" "2\t2', 'three"\t3', '"four"\t4']
    (tmp_path / "a.tsv").write_text("\n".join(lines) + "\n")
    values = [(row.values["text_field"], row.values["label_field"]) for row in read(tmp_path / "a.tsv")[0]]
    assert values == [('"one', "1"), ('two" "2', "2"), ('three"', "3"), ('"four"', "4")]
    (tmp_path / "b.csv").write_text('text\tlabel\n"one\ttab\nand line, comma"\t1\n')
    assert [row.values["text_field"] for row in read(tmp_path / "b.csv")[0]] == ["one\ttab\nand line, comma"]
    (tmp_path / "c.tsv").write_text("text\tlabel\none\ttwo\t1\n")
    raises("line 2: 3 cells, expected 2 .*; cells have no tabs and no quotes; name a file", read, tmp_path / "c.tsv")


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)


@hypothesis.settings(max_examples=60)
@hypothesis.given(rows=st.lists(st.tuples(CELLS, CELLS.filter(str.strip)), min_size=1, max_size=5))
def test_csv_holds_any_text(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "a"
    rows = [{"text": text, "label": label} for text, label in rows]
    for extension in (".csv", ".jsonl"):
        found, _ = read(write(path.with_suffix(extension), rows))
        assert [row.values for row in found] == [{"text_field": r["text"], "label_field": r["label"]} for r in rows]


@hypothesis.settings(max_examples=100)
@hypothesis.given(
    content=st.binary(max_size=60) | st.text(alphabet='[]{}",:\\ntextlabel1\n \r', max_size=60).map(str.encode)
)
def test_damaged_files_raise_input_errors_only(tmp_path_factory, content):
    root = tmp_path_factory.mktemp("damaged")
    for extension in (".csv", ".jsonl", ".json", ".parquet", ".npz"):
        (root / f"a{extension}").write_bytes(content)
        try:
            read(root / f"a{extension}")
        except InputError as error:
            assert len(str(error).splitlines()) == 1


def test_cells_may_be_separated_by_semicolons(tmp_path):
    for name, lines in (
        ("a.csv", ["text;label", '"a; b";x', "c, d;y"]),
        ("b.csv", ["text\tlabel", "a; b\tx", "c, d\ty"]),
        ("c.csv", ["text,label;", "a; b,x", '"c, d",y']),
    ):
        (tmp_path / name).write_text("\n".join(lines))
        options = {"label_field": "label;"} if name == "c.csv" else {}
        rows, _ = read(tmp_path / name, **options)
        assert [row.values["text_field"] for row in rows] == ["a; b", "c, d"]
        assert [row.values["label_field"] for row in rows] == ["x", "y"]
