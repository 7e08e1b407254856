"""Paths to files: which files are found, and which are left out."""

import os
import re
import sysconfig

import pytest

from hpnlp.data.reading import sources
from tests.data.reading import read
from tests.messages import raises


def write(path, content: str | bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture
def tree(tmp_path):
    """A directory with text, binary, hidden, compressed and linked files."""
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


def test_walk_leaves_out_unlikely_text(tree):
    documents, left_out = read(tree)
    assert [(document.name, document.text) for document in documents] == [
        ("a.md", b"ay"),
        ("b.txt", b"bee"),
        ("rows.jsonl#0", b"one"),
        ("rows.jsonl#3", b"two"),
        ("sub/c", b"\xff raw"),
    ]
    assert left_out["hidden"][0] == 3
    assert left_out["links and devices"] == [2, "around", "gone"]
    assert left_out["binary"] == [1, "image.png"]
    assert left_out["compressed, of other formats (.gz)"] == [1, "more.gz"]
    assert left_out["empty"][:2] == [2, "empty.txt"]
    assert "1 binary (image.png)" in str(left_out)


def test_named_files_are_read_whatever_their_kind(tree):
    assert [d.text for d in read(tree / "image.png")[0]] == [b"\x89PNG\r\n\x1a\n\0\0"]
    assert [d.text for d in read(tree / ".hidden")[0]] == [b"no"]
    assert [d.name for d in read(tree / "*.png")[0]] == ["image.png"]
    assert [d.name for d in read(tree / "sub" / "**" / "c*")[0]] == ["__pycache__/c.pyc", "c"]
    assert read(tree / "s*/*")[1] == {"directories": [1, "sub/__pycache__"]}


def test_names_do_not_depend_on_the_source_directory(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    here = [d.name for d in read(f"{tmp_path.name}")[0]]
    assert here == [d.name for d in read(tree)[0]]
    assert [d.name for d in read(f"{tmp_path.name}/*.txt")[0]] == ["b.txt"]


def test_commas_separate_sources(tree):
    first, second, third = sources.find(f"{tree}/b.txt, {tree}/*.md,stdlib", "data.path")
    assert (len(first.files), len(second.files)) == (1, 1) and len(third.files) > 100


def test_duplicate_files_are_left_out(tree):
    names = [document.name for document in read(tree)[0]]
    (tree / "aa.txt").symlink_to(tree / "sub" / "c")
    documents, left_out = read(tree)
    assert [d.name for d in documents] == ["a.md", "aa.txt", *names[1:-1]] and left_out["given twice"] == [1, "sub/c"]
    documents, left_out = read(tree / "**" / "*.txt")  # follows the link `around` until the system stops it
    assert [d.name for d in documents] == ["aa.txt", "b.txt"] and left_out["given twice"][0] > 3
    first, second = sources.find(f"{tree}/sub,{tree}", "data.path")
    assert [file.name for file in first.files] == ["c"] and "sub/c" not in [file.name for file in second.files]
    assert second.left_out["given twice"][:2] == [2, "aa.txt"]
    raises("data.path='.*/sub' adds no file .*1 given twice .c", sources.find, f"{tree},{tree}/sub", "data.path")


def test_stdlib_lists_sources_without_tests():
    (source,) = sources.find("stdlib", "data.path")
    names = [file.name for file in source.files]
    base = sysconfig.get_path("stdlib")
    assert names == sorted(names) and {"argparse.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") and os.path.isfile(os.path.join(base, name)) for name in names)
    directories = {directory for name in names for directory in name.split("/")}
    assert not directories & {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    assert sources.find("stdlib", "data.path") == (source,)


def test_file_removed_while_listing_raises(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "text")
    monkeypatch.setattr(sources, "_walk", lambda *args: ["a.txt", "gone.txt"])
    raises("cannot read '.*gone.txt': No such file or directory: mend or remove it", read, tmp_path)


def test_invalid_paths_raise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "only_hidden/.x", "x.xz", "x.npy.gz"):
        write(tmp_path / name, "x")
    os.symlink("loop", "loop")
    os.symlink("nothing", "dangling")
    os.mkfifo("pipe")
    for path, message in (
        ("nowhere", "data.path='nowhere' does not exist: pass"),
        ("*.none", "data.path='*.none' holds no file to read"),
        ("only_hidden", "holds no file to read (left out: 1 hidden (.x))"),
        ("a.txt,nowhere", "'nowhere' does not exist"),
        ("x.xz", "is compressed in a form that is not read: unpack it"),
        ("x.npy.gz", "is compressed, and this format is not read from its start to its end: unpack it"),
        ("loop", "cannot be read (Too many levels of symbolic links)"),
        ("dangling", "is a link to nothing"),
        ("pipe", "is not a regular file"),
    ):
        raises(re.escape(message), sources.find, path, "data.path")
