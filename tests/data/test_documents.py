"""Files to documents: their content and names, and errors with the place of a fault."""

import io
import json
import os
import re
import sys

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from hpnlp.data.reading import sources
from hpnlp.data.reading.documents import DocumentReader, pieces, split_ids
from hpnlp.data.reading.sources import LeftOut
from hpnlp.types import InputError
from tests.data.reading import read
from tests.messages import raises


def write(path, content: str | bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@hypothesis.given(st.binary(max_size=60) | st.text(max_size=30).map(str.encode), st.integers(8, 20))
def test_long_text_is_cut_between_lines_or_characters(content, limit):
    cuts = list(pieces(io.BytesIO(content), limit))
    assert b"".join(cuts) == content and all(0 < len(piece) <= limit for piece in cuts)
    for piece in cuts[:-1]:
        assert piece.endswith(b"\n") or b"\n" not in piece
    try:
        content.decode()
    except UnicodeDecodeError:
        return
    for piece in cuts:
        piece.decode()


def test_single_file_is_cut_into_small_pieces(tmp_path):
    lines = "".join(f"line {i}\n" for i in range(30_000))
    alone, _ = read(write(tmp_path / "alone" / "big.txt", lines))
    assert [d.name for d in alone[:2]] == ["big.txt", "big.txt#1"] and len(alone) > 4
    assert [d.offset for d in alone] == np.cumsum([0] + [len(d.text) for d in alone[:-1]]).tolist()
    write(tmp_path / "pair" / "small.txt", "small")
    write(tmp_path / "pair" / "big.txt", lines)
    pair, _ = read(tmp_path / "pair")
    assert [d.name for d in pair] == ["big.txt", "small.txt"]
    little, _ = read(write(tmp_path / "little.txt", lines[:3000]))
    assert len(little) == 3 and all(len(d.text) <= 1024 for d in little)


@pytest.mark.parametrize("eos_at", [[], [2999]])
def test_ids_of_one_document_are_cut(eos_at):
    ids = np.ones(3000, np.int64)
    ids[eos_at] = 0
    assert list(split_ids(ids, 0)) == [(0, 1024), (1024, 2048), (2048, 3000)]


def test_jsonl_records_give_prompts_and_texts(tmp_path):
    rows = [{"q": "why?", "a": "so"}, {"a": "\ud800", "q": None}, {"q": "", "a": None}]
    path = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    documents, left_out = read(path, text_field="a", prompt_field="q")
    assert [(d.prompt, d.text) for d in documents] == [(b"why?", b"so"), (b"", b"\xed\xa0\x80")]
    assert left_out == {"empty": [1, f"{path}, line 3"]}


def test_malformed_jsonl_raises(tmp_path):
    for line, message in (
        ('{"text": "a"', "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("\udcff", "line 2: not UTF-8 (byte 0xff at 0), to be converted by iconv"),
        ('["a"]', "line 2: expected a JSON object with a field 'text'"),
        ('{"body": "a", "id": 1}', "line 2: no field 'text', the fields are 'body', 'id': pass data.text_field=NAME"),
        ('{"text": 3}', "line 2: field 'text' is a int, expected a string"),
    ):
        path = tmp_path / "x.jsonl"
        path.write_text(f'{{"text": "fine"}}\n{line}\n', "utf-8", "surrogateescape")
        raises(re.escape(f"x.jsonl, {message}"), read, path)


def test_missing_prompt_field_raises(tmp_path):
    path = write(tmp_path / "x.jsonl", '{"text": "a"}')
    raises("no field 'q', the fields are 'text': pass data.prompt_field=NAME", read, path, prompt_field="q")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_rows_give_prompts_and_texts(tmp_path, kind):
    texts = [f"text {i}" for i in range(600)] + [None, ""]
    table = pa.table({"body": pa.array(texts, kind), "ask": pa.array([None, "why?"] * 301, kind), "n": range(602)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=100)
    documents, left_out = read(tmp_path, text_field="body", prompt_field="ask")
    assert [d.text.decode() for d in documents] == texts[:600]
    assert [d.prompt for d in documents[:2]] == [b"", b"why?"]
    assert documents[-1].name == "x.parquet#599" and left_out["empty"][0] == 2


def test_parquet_strings_that_are_not_utf8_are_read(tmp_path):
    values = pa.array([b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": values}), tmp_path / "x.parquet")
    assert read(tmp_path)[0][0].text == b"\xff"


def test_invalid_parquet_raises(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), path)
    raises("no field 'text', the fields are 'body', 'n'", read, path)
    raises("column 'n' holds integer, expected string", read, path, text_field="n")
    path.write_bytes(path.read_bytes()[:-20])
    raises("not a Parquet file", read, path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    raises(re.escape("pip install pyarrow"), read, path)


def test_repeated_parquet_column_raises(tmp_path):
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "x.parquet")
    raises("x.parquet: has more than one column 'text': rename one", read, tmp_path)


@hypothesis.given(st.lists(st.integers(0, 3), max_size=30))
def test_ids_are_split_after_eos(ids):
    documents = [ids[start:end] for start, end in split_ids(np.array(ids, np.uint8), 0)]
    assert sum(documents, []) == ids
    assert all(document and 0 not in document[:-1] for document in documents)
    assert all(document[-1] == 0 for document in documents[:-1])


def test_ids_without_eos_are_cut(tmp_path):
    np.save(tmp_path / "x.npy", np.ones(150_000, np.uint16))
    documents, _ = read(tmp_path, eos_id=7)
    assert [len(d.text) for d in documents] == [2048] * 73 + [150_000 - 73 * 2048]
    assert isinstance(documents[0].text.base, np.memmap)


def test_invalid_arrays_raise(tmp_path):
    for array, message in (
        (np.ones(3), "an array of float64 and shape (3,), expected one dimension of integer token ids"),
        (np.ones((2, 3), int), "shape (2, 3), expected one dimension"),
        (np.array([{}]), "not an array that can be memory-mapped"),
    ):
        np.save(tmp_path / "x.npy", array)
        raises(re.escape(message), read, tmp_path / "x.npy")


def test_archive_of_arrays_raises(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.ones(3, int))
    os.rename(tmp_path / "x.npz", tmp_path / "x.npy")
    raises("not an array that can be memory-mapped .it is an archive of arrays", read, tmp_path / "x.npy")


def test_parquet_column_types_are_checked(tmp_path):
    for column, message in (
        ([["a"]], "column 'text' holds list of string, expected string: convert it, or pass another data.text_field"),
        ([{"a": "b"}], "column 'text' holds struct<a: string>, expected string"),
        (pa.array([], pa.string()), None),
        (pa.array([None], pa.string()), None),
    ):
        pq.write_table(pa.table({"text": column}), tmp_path / "x.parquet")
        if message is None:
            assert read(tmp_path / "x.parquet")[0] == []
        else:
            raises(re.escape(message), read, tmp_path / "x.parquet")


def test_errors_of_damaged_parquet_are_one_line(tmp_path):
    pq.write_table(pa.table({"text": ["some text"] * 9}), tmp_path / "x.parquet")
    content = (tmp_path / "x.parquet").read_bytes()
    for i in range(4, len(content), 29):
        (tmp_path / "x.parquet").write_bytes(content[:i] + b"\x85\xff" * 4 + content[i + 8 :])
        try:
            read(tmp_path / "x.parquet")
        except InputError as error:
            assert "\n" not in str(error) and "x.parquet" in str(error)


def test_truncated_array_raises(tmp_path):
    np.save(tmp_path / "x.npy", np.ones(100, int))
    for size in (200, 20, 0):
        os.truncate(tmp_path / "x.npy", size)
        raises("x.npy", read, tmp_path / "x.npy")


def test_removed_file_raises(tmp_path):
    (source,) = sources.find(str(write(tmp_path / "b.txt", "bee")), "data.path")
    (tmp_path / "b.txt").unlink()
    raises("cannot read .*b.txt'.*No such file", lambda: list(DocumentReader("", "", LeftOut()).read(source)))
