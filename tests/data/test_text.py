"""Paths to documents: what is read, what is left out, and where a fault lies."""

import io
import json
import os
import re
import sys
import sysconfig

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from hpnlp.data import text
from hpnlp.types import InputError


def read(path, **options) -> tuple[list[text.Document], text.LeftOut]:
    """All documents of one source, and all that was left out of it."""
    (source,) = text.find(str(path), "data.path")
    left_out = text.LeftOut(source.left_out)
    arguments = {"text_field": "text", "prompt_field": "", "eos_id": None, **options}
    return list(text.documents(source, left_out=left_out, **arguments)), left_out


def write(path, content: str | bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture
def tree(tmp_path):
    """A directory as people have them."""
    for name, content in {
        "b.txt": "bee",
        "a.md": "ay",
        "sub/c": b"\xff raw",
        "empty.txt": "",
        "image.png": b"\x89PNG\r\n\x1a\n\0\0",
        "more.gz": b"\x1f\x8b",
        ".hidden": "no",
        ".git/config": "no",
        "sub/__pycache__/c.pyc": "no",
        "rows.jsonl": '{"text": "one"}\n\n{"text": ""}\n{"text": "two"}\n',
    }.items():
        write(tmp_path / name, content)
    (tmp_path / "around").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    return tmp_path


def test_directory(tree):
    documents, left_out = read(tree)
    assert [(document.name, document.text) for document in documents] == [
        ("a.md", b"ay"),
        ("b.txt", b"bee"),
        ("rows.jsonl#0", b"one"),
        ("rows.jsonl#3", b"two"),
        ("sub/c", b"\xff raw"),
    ]
    assert left_out["hidden"][0] == 3
    assert left_out["links and devices"] == [2, "around"]
    assert left_out["binary"] == [1, "image.png"]
    assert left_out["compressed"] == [1, "more.gz"]
    assert left_out["empty"] == [2, "empty.txt"]
    assert "1 binary (image.png)" in str(left_out)


def test_what_is_named_is_read(tree):
    assert [d.text for d in read(tree / "image.png")[0]] == [b"\x89PNG\r\n\x1a\n\0\0"]
    assert [d.text for d in read(tree / ".hidden")[0]] == [b"no"]
    assert [d.name for d in read(tree / "*.png")[0]] == ["image.png"]
    assert [d.name for d in read(tree / "sub" / "**" / "c*")[0]] == ["__pycache__/c.pyc", "c"]
    assert read(tree / "s*/*")[1] == {"directories": [1, "sub/__pycache__"]}


def test_names_do_not_depend_on_where_the_source_lies(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    here = [d.name for d in read(f"{tmp_path.name}")[0]]
    assert here == [d.name for d in read(tree)[0]]
    assert [d.name for d in read(f"{tmp_path.name}/*.txt")[0]] == ["b.txt"]


def test_several_sources(tree):
    sources = text.find(f"{tree}/b.txt, {tree}/*.md,stdlib", "data.path")
    assert [len(source.files) for source in sources[:2]] == [1, 1] and len(sources[2].files) > 100


def test_each_file_is_read_once(tree):
    once = [document.name for document in read(tree)[0]]
    (tree / "aa.txt").symlink_to(tree / "sub" / "c")
    documents, left_out = read(tree)
    assert [d.name for d in documents] == ["a.md", "aa.txt", *once[1:-1]] and left_out["given twice"] == [1, "sub/c"]
    documents, left_out = read(tree / "**" / "*.txt")  # which follows the link `around` as far as the system lets it
    assert [d.name for d in documents] == ["aa.txt", "b.txt"] and left_out["given twice"][0] > 3
    first, second = text.find(f"{tree}/sub,{tree}", "data.path")
    assert [file.name for file in first.files] == ["c"] and "sub/c" not in [file.name for file in second.files]
    assert second.left_out["given twice"] == [2, "aa.txt"]
    with pytest.raises(InputError, match="data.path='.*/sub' adds no file .*1 given twice .c.*: leave it out"):
        text.find(f"{tree},{tree}/sub", "data.path")


def test_stdlib():
    (source,) = text.find("stdlib", "data.path")
    names = [file.name for file in source.files]
    base = sysconfig.get_path("stdlib")
    assert names == sorted(names) and {"argparse.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") and os.path.isfile(os.path.join(base, name)) for name in names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    assert text.find("stdlib", "data.path") == (source,)


@hypothesis.given(st.binary(max_size=60) | st.text(max_size=30).map(str.encode), st.integers(8, 20))
def test_long_text_is_cut_between_lines_or_characters(content, limit):
    pieces = list(text.pieces(io.BytesIO(content), limit))
    assert b"".join(pieces) == content and all(0 < len(piece) <= limit for piece in pieces)
    for piece in pieces[:-1]:
        assert piece.endswith(b"\n") or b"\n" not in piece
    try:
        content.decode()
    except UnicodeDecodeError:
        return
    for piece in pieces:
        piece.decode()


def test_lone_file_is_cut_finer(tmp_path):
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
def test_stream_of_ids_with_one_document_is_cut(eos_at):
    ids = np.ones(3000, np.int64)
    ids[eos_at] = 0
    assert list(text.split_ids(ids, 0)) == [(0, 1024), (1024, 2048), (2048, 3000)]


def test_jsonl_fields(tmp_path):
    rows = [{"q": "why?", "a": "so"}, {"a": "\ud800", "q": None}, {"q": "", "a": None}]
    path = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    documents, left_out = read(path, text_field="a", prompt_field="q")
    assert [(d.prompt, d.text) for d in documents] == [(b"why?", b"so"), (b"", b"\xed\xa0\x80")]
    assert left_out == {"empty": [1, f"{path}, line 3"]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("\udcff", "line 2: not JSON"),
        ('["a"]', "line 2: expected a JSON object with a field 'text'"),
        ('{"body": "a", "id": 1}', "line 2: no field 'text', the fields are 'body', 'id': pass data.text_field=NAME"),
        ('{"text": 3}', "line 2: field 'text' is a int, expected a string"),
    ],
)
def test_malformed_jsonl(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n', "utf-8", "surrogateescape")
    with pytest.raises(InputError, match=re.escape(f"x.jsonl, {message}")):
        read(path)


def test_missing_prompt_field(tmp_path):
    path = write(tmp_path / "x.jsonl", '{"text": "a"}')
    with pytest.raises(InputError, match="no field 'q', the fields are 'text': pass data.prompt_field=NAME"):
        read(path, prompt_field="q")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_parquet(tmp_path, kind):
    texts = [f"text {i}" for i in range(600)] + [None, ""]
    table = pa.table({"body": pa.array(texts, kind), "ask": pa.array([None, "why?"] * 301, kind), "n": range(602)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=100)
    documents, left_out = read(tmp_path, text_field="body", prompt_field="ask")
    assert [d.text.decode() for d in documents] == texts[:600]
    assert [d.prompt for d in documents[:2]] == [b"", b"why?"]
    assert documents[-1].name == "x.parquet#599" and left_out["empty"][0] == 2


def test_parquet_that_is_not_utf8(tmp_path):
    values = pa.array([b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": values}), tmp_path / "x.parquet")
    assert read(tmp_path)[0][0].text == b"\xff"


def test_bad_parquet(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), path)
    with pytest.raises(InputError, match="no field 'text', the fields are 'body', 'n'"):
        read(path)
    with pytest.raises(InputError, match="column 'n' holds int64, expected strings"):
        read(path, text_field="n")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="not a Parquet file"):
        read(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=re.escape("pip install pyarrow")):
        read(path)


def test_parquet_with_a_column_twice(tmp_path):
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "x.parquet")
    with pytest.raises(InputError, match="x.parquet: has more than one column 'text': rename one"):
        read(tmp_path)


def test_file_that_vanishes_while_files_are_listed(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "text")
    monkeypatch.setattr(text, "_walk", lambda *args: ["a.txt", "gone.txt"])
    with pytest.raises(InputError, match="cannot read '.*gone.txt': No such file or directory: mend or remove it"):
        read(tmp_path)


@hypothesis.given(st.lists(st.integers(0, 3), max_size=30))
def test_ids_are_split_after_eos(ids):
    parts = [ids[start:end] for start, end in text.split_ids(np.array(ids, np.uint8), 0)]
    assert sum(parts, []) == ids
    assert all(part and 0 not in part[:-1] for part in parts)
    assert all(part[-1] == 0 for part in parts[:-1])


def test_stream_of_ids_without_eos_is_cut(tmp_path):
    np.save(tmp_path / "x.npy", np.ones(150_000, np.uint16))
    documents, _ = read(tmp_path, eos_id=7)
    assert [len(d.text) for d in documents] == [2048] * 73 + [150_000 - 73 * 2048]
    assert isinstance(documents[0].text.base, np.memmap)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(3), "an array of float64 and shape (3,), expected one dimension of integer token ids"),
        (np.ones((2, 3), int), "shape (2, 3), expected one dimension"),
        (np.array([{}]), "not an array that can be memory-mapped"),
    ],
)
def test_bad_array(tmp_path, array, message):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(InputError, match=re.escape(message)):
        read(tmp_path / "x.npy")


def test_archive_of_arrays_raises(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.ones(3, int))
    os.rename(tmp_path / "x.npz", tmp_path / "x.npy")
    with pytest.raises(InputError, match="not an array that can be memory-mapped .it is an archive of arrays"):
        read(tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([["a"]], "column 'text' holds list<element: string>, expected strings: pass another data.text_field"),
        ([{"a": "b"}], "column 'text' holds struct<a: string>, expected strings"),
        (pa.array(["a"]).dictionary_encode(), "column 'text' holds dictionary<"),
        (pa.array([], pa.string()), None),
        (pa.array([None], pa.string()), None),
    ],
)
def test_parquet_without_text(tmp_path, column, message):
    pq.write_table(pa.table({"text": column}), tmp_path / "x.parquet")
    if message is None:
        assert read(tmp_path / "x.parquet")[0] == []
    else:
        with pytest.raises(InputError, match=re.escape(message)):
            read(tmp_path / "x.parquet")


def test_damaged_parquet_raises_one_line(tmp_path):
    pq.write_table(pa.table({"text": ["some text"] * 9}), tmp_path / "x.parquet")
    whole = (tmp_path / "x.parquet").read_bytes()
    for at in range(4, len(whole), 29):
        (tmp_path / "x.parquet").write_bytes(whole[:at] + b"\x85\xff" * 4 + whole[at + 8 :])
        try:
            read(tmp_path / "x.parquet")
        except InputError as error:
            assert "\n" not in str(error) and "x.parquet" in str(error)


def test_truncated_array(tmp_path):
    np.save(tmp_path / "x.npy", np.ones(100, int))
    for size in (200, 20, 0):
        os.truncate(tmp_path / "x.npy", size)
        with pytest.raises(InputError, match="x.npy"):
            read(tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "data.path='nowhere' does not exist: pass"),
        ("", "data.path='' does not exist"),
        ("*.none", "data.path='*.none' holds no file to read"),
        ("only_hidden", "holds no file to read (left out: 1 hidden (.x))"),
        ("a.txt,nowhere", "'nowhere' does not exist"),
        ("x.xz", "is compressed in a form that is not read: unpack it"),
        ("x.tar.gz", "is compressed in a form that is not read: unpack it"),
        ("x.npy.gz", "is compressed, and this format is not read from its start to its end: unpack it"),
        ("loop", "cannot be read (Too many levels of symbolic links)"),
        ("dangling", "is a link to nothing"),
        ("nul\0", "does not exist"),
        ("/dev/zero", "is not a regular file"),
        ("pipe", "is not a regular file"),
    ],
)
def test_bad_path(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "only_hidden/.x", "x.xz", "x.tar.gz", "x.npy.gz"):
        write(tmp_path / name, "x")
    os.symlink("loop", "loop")
    os.symlink("nothing", "dangling")
    os.mkfifo("pipe")
    with pytest.raises(InputError, match=re.escape(message)):
        text.find(path, "data.path")


def test_file_that_goes_away(tree):
    (source,) = text.find(str(tree), "data.path")
    (tree / "b.txt").unlink()
    with pytest.raises(InputError, match="cannot read .*b.txt'.*No such file"):
        list(text.documents(source, text_field="", prompt_field="", eos_id=None, left_out=text.LeftOut()))
