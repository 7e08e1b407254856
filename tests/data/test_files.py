"""Compressed text, JSON arrays, bad lines and other encodings are read, or raise errors."""

import gzip
import io
import json
import os
import re
import sys
import tracemalloc

import hypothesis
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from hpnlp.data.reading import records, sources
from hpnlp.data.reading.documents import DocumentReader
from hpnlp.data.reading.sources import LeftOut
from hpnlp.types import InputError
from tests.data.reading import read
from tests.messages import raises

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: pa.compress(data, "zstd", asbytes=True)}
LINES = "".join(f"line {i} as ever\n" for i in range(400)).encode()
ROWS = [{"text": f"text {i} \u00e9\n"} for i in range(300)]


def texts(path, **options) -> list[bytes]:
    return [document.text for document in read(path, **options)[0]]


FORMS = {
    "x.txt": LINES,
    "x.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS),
    "x.json": json.dumps(ROWS, indent=1, ensure_ascii=False).encode(),
}


@pytest.mark.parametrize("extension", COMPRESS)
@pytest.mark.parametrize("name", FORMS)
def test_compressed_text_is_read(tmp_path, name, extension):
    path = tmp_path / (name + extension)
    path.write_bytes(COMPRESS[extension](FORMS[name]))
    documents, left_out = read(path)
    assert not left_out and documents[0].name in (name, f"{name}#0") and documents[1].name == f"{name}#1"
    if name == "x.txt":
        assert b"".join(d.text for d in documents) == LINES
    else:
        assert [d.text for d in documents] == [row["text"].encode() for row in ROWS]
    assert read(tmp_path)[0] == documents  # a walk takes it as well
    path.write_bytes(COMPRESS[extension](FORMS[name]) + COMPRESS[extension](b"  \n"))  # a file of several members
    assert len(read(path)[0]) == len(documents)
    path.write_bytes(b"")
    assert read(path) == ([], {"empty": [1, path.name]}) or name == "x.jsonl"


def test_compression_does_not_change_the_names_of_documents(tmp_path):
    for folder, extension in (("a", ""), ("b", ".gz")):
        (tmp_path / folder).mkdir()
        for i in range(3):
            (tmp_path / folder / f"{i}.txt{extension}").write_bytes(COMPRESS[extension](LINES))
    assert [(d.name, d.text) for d in read(tmp_path / "a")[0]] == [(d.name, d.text) for d in read(tmp_path / "b")[0]]


@pytest.mark.parametrize("extension", [".gz", ".zst"])
def test_damaged_archives_raise(tmp_path, extension):
    path = tmp_path / f"x.txt{extension}"
    intact = COMPRESS[extension](os.urandom(2000).hex().encode())
    flipped = bytearray(intact)
    flipped[len(intact) // 2] ^= 0xFF
    contents = [intact[:3], intact[: len(intact) // 2], intact[:-2], b"no archive at all", intact + b"junk"]
    for content in contents + [flipped] * (extension == ".gz"):  # pyarrow writes zstd without a checksum
        path.write_bytes(content)
        expected = f"cannot decompress '{path}' ("
        raises(re.escape(expected) + r".+\): the file is damaged or truncated: download", read, path)


def test_zstd_without_pyarrow_raises(tmp_path, monkeypatch):
    (tmp_path / "x.zst").write_bytes(COMPRESS[".zst"](LINES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    raises("zstd needs the pyarrow package: pip install pyarrow", read, tmp_path / "x.zst")


@pytest.mark.parametrize("name", ["x.txt.gz", "x.jsonl.gz", "x.json.zst"])
def test_text_is_decompressed_as_a_stream(tmp_path, name, monkeypatch):
    monkeypatch.setattr(records, "_MAX_BYTES", 1 << 18)
    start = b"" if "txt" in name else b'[{"text": "'
    (tmp_path / name).write_bytes(COMPRESS["." + name.split(".")[2]](start + b"a" * (1 << 22)))
    (source,) = sources.find(str(tmp_path / name), "data.path")
    reader = DocumentReader("text", "", LeftOut())
    tracemalloc.start()
    try:
        size = sum(len(document.text) for document in reader.read(source))
        assert size == 1 << 22
    except InputError as error:
        assert re.search(r"longer than 262,144 (bytes|characters)", str(error)) and start
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2.5e6


@hypothesis.given(
    st.lists(st.text(max_size=20) | st.fixed_dictionaries({"text": st.text(max_size=20), "n": st.floats(0, 1)})),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.integers(1, 9),
)
def test_arrays_match_the_json_module(values, indent, ascii_only, chunk):
    content = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_CHUNK", chunk)  # cuts elements and characters everywhere
        stream = io.BufferedReader(io.BytesIO(content))  # type: ignore[arg-type]
        assert list(records.ArrayReader(stream, "x.json")) == values


def test_malformed_arrays_raise(tmp_path):
    for content, message in (
        ('[{"text": "a"}', "record 2: not a JSON array (the array has no end)"),
        ('["a" "b"]', "record 2: not a JSON array (expected a comma or ])"),
        ('["a"] and more', "record 2: not a JSON array (text follows the array)"),
        ('["a", "\udcff"]', "record 1: not a JSON array (invalid start byte near byte 7, not UTF-8, to be converted"),
        ('[{"text": ' + "[" * 100_000, "record 1: not a JSON array (maximum recursion depth exceeded"),
        ('["a", 3]', "record 2: a int, expected an object or a string: mend or remove the line, or pass data.skip_bad"),
        ('[{"body": 1}]', "record 1: no field 'text', the fields are 'body': pass data.text_field=NAME"),
        ('[{"text": 3}]', "record 1: field 'text' is a int, expected a string"),
    ):
        path = tmp_path / "x.json"
        path.write_text(content, "utf-8", "surrogateescape")
        with pytest.raises(InputError, match=re.escape(f"x.json, {message}")) as caught:
            read(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ['{"text": "a"}', "[1, 2]", "[]", "[[1]]", '[{"body": "a"}]'])
def test_other_json_of_a_walk_is_text(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    if content != "[]":
        assert texts(tmp_path) == [content.encode()]
    if "body" in content:
        assert texts(tmp_path, text_field="body") == [b"a"]


BAD = {
    "x.jsonl": (
        b'{"text": "a"}\n{"text": \n[1]\n{"text": 3}\n{"body": "c"}\n{"text": "\\ud800"}\n\xff\n{"text": "b"}',
        6,
    ),
    "x.json": (b'["a", 3, {"text": null}, {"body": 4}, {"text": "\\udfff"}, "b"]', 3),
    "x.txt": (b"a\n\xff\xfe no\n\xc3\xa9\nb \xe9\n", 2),
}


@pytest.mark.parametrize("name", BAD)
def test_skipped_lines_are_counted(tmp_path, name):
    path = tmp_path / name
    content, count = BAD[name]
    path.write_bytes(content)
    documents, left_out = read(path, skip_bad_lines=True)
    assert [d.text for d in documents] == ([b"a", b"b"] if name != "x.txt" else [b"a\n\xc3\xa9\n"])
    assert left_out["bad lines"][0] == count and str(path) in left_out["bad lines"][1]
    if name != "x.txt":
        assert [d.name for d in documents] == [f"{name}#0", f"{name}#{7 if name == 'x.jsonl' else 5}"]


STORY = "It was a dark and stormy night.\n" * 5


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["x y.txt", "x.jsonl", "x.txt.gz"])
def test_utf16_raises_with_the_command_that_converts_it(tmp_path, encoding, name):
    if encoding == "utf-32" and name != "x y.txt":
        return
    content = STORY if "txt" in name else json.dumps({"text": STORY})
    (tmp_path / name).write_bytes(COMPRESS[name[-3:] if "gz" in name else ""](content.encode(encoding)))
    kind = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    with pytest.raises(InputError) as caught:
        read(tmp_path / name)
    message = str(caught.value)
    assert f"is {kind}, not UTF-8: convert it by: " in message and f"iconv -f {kind} -t UTF-8" in message
    assert ("gzip -dc" in message) == ("gz" in name) and ("' > NEW_FILE" in message) == (" " in name)
    if "jsonl" not in name:
        assert f"in {kind}, to be converted by iconv -f {kind} -t UTF-8, ({name})" in str(read(tmp_path)[1])


@pytest.mark.parametrize("content", [b"\xff\xfe" + bytes(range(256)), b"\0\1" * 50, b"a\0\0b" * 9, b"\xff\xfe"[:1]])
def test_binary_data_is_not_detected_as_utf16(tmp_path, content):
    (tmp_path / "x.bin").write_bytes(content)
    assert texts(tmp_path / "x.bin") == [content]


def test_unprintable_file_names_are_escaped(tmp_path):
    for name in (b"\xff.txt", b"two\nlines.jsonl", b"empty\x1b.txt"):
        (tmp_path / os.fsdecode(name)).write_bytes(
            b'{"text": 3}' if b"json" in name else b"" if b"empty" in name else b"a"
        )
    documents, left_out = read(tmp_path / "*.txt")
    assert [d.text for d in documents] == [b"a"]
    assert str(left_out) == r"1 empty (empty\x1b.txt)"
    with pytest.raises(InputError, match="two.*lines.jsonl, line 1: field 'text' is a int") as caught:
        read(tmp_path / "two\nlines.jsonl")
    assert "\n" not in str(caught.value)
