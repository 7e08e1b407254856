"""Cache entries appear complete or not at all, also after kills and with several writers."""

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hpnlp.data import DataConfig, prepare
from hpnlp.data.reading import token_store
from hpnlp.types import InputError
from tests.messages import raises

ROOT = pathlib.Path(__file__).parents[2]


def writer(content: str):
    def write(directory: str) -> dict:
        with open(os.path.join(directory, "data"), "w") as file:
            file.write(content)
        return {"content": content}

    return write


def fail_on_write(directory: str) -> dict:
    raise AssertionError("a complete entry is written again")


def test_complete_entry_is_not_written_again(tmp_path):
    path, record = token_store.cached(str(tmp_path), "entry", writer("one"))
    assert (tmp_path / "entry" / "data").read_text() == "one" and record == {"content": "one"}
    assert token_store.cached(str(tmp_path), "entry", fail_on_write) == (path, record)
    assert os.listdir(tmp_path) == ["entry"]


@pytest.mark.parametrize("damage", ["index", "no index", "json", "cut", "missing"])
def test_damaged_entry_is_made_again(tmp_path, damage):
    token_store.cached(str(tmp_path), "entry", writer("one"))
    index = tmp_path / "entry" / "index.json"
    if damage == "index":
        os.truncate(index, 20)
    elif damage == "no index":
        index.unlink()
    elif damage == "json":
        index.write_text("[]")
    elif damage == "cut":
        os.truncate(tmp_path / "entry" / "data", 1)
    else:
        (tmp_path / "entry" / "data").unlink()
    assert token_store.cached(str(tmp_path), "entry", writer("two"))[1] == {"content": "two"}
    assert (tmp_path / "entry" / "data").read_text() == "two"
    assert os.listdir(tmp_path) == ["entry"]


def test_first_of_two_writers_wins(tmp_path):
    def slow(directory: str) -> dict:
        token_store.cached(str(tmp_path), "entry", writer("fast"))
        return writer("slow")(directory)

    token_store.cached(str(tmp_path), "entry", slow)
    assert (tmp_path / "entry" / "data").read_text() == "fast"
    assert os.listdir(tmp_path) == ["entry"]


def test_failed_write_leaves_nothing(tmp_path):
    def fail(directory: str) -> dict:
        writer("half")(directory)
        raise InputError("the text is at fault")

    raises("the text is at fault", token_store.cached, str(tmp_path), "entry", fail)
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
from hpnlp.data import DataConfig, prepare
def progress(step, done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
prepare(DataConfig(path=sys.argv[1], cache=sys.argv[2]), progress=progress)
"""


@pytest.mark.slow
def test_files_of_a_killed_writer_are_removed_when_old(stories, tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(stories), str(tmp_path)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".hpnlp-unfinished-")
    config = DataConfig(path=str(stories), cache=str(tmp_path), seq_len=32)
    corpus = prepare(config)
    assert corpus.train_documents + corpus.heldout_documents == 40
    # The files are removed only when all are old, because a process may still be writing.
    assert left in os.listdir(tmp_path)
    content = sorted((tmp_path / left).rglob("*"))
    assert (tmp_path / left / "entry" / "train.tokens") in content
    make_old(*content[:-1], tmp_path / left)
    token_store.cached(str(tmp_path), "another", writer("x"))
    assert left in os.listdir(tmp_path)
    make_old(content[-1])
    token_store.cached(str(tmp_path), "one more", writer("x"))
    assert left not in os.listdir(tmp_path)


def make_old(*paths):
    old = time.time() - 30 * 24 * 3600
    for path in paths:
        os.utime(path, (old, old))


@pytest.mark.parametrize("name", ["tmp-thesis", ".hpnlp-unfinished-mine"])
def test_other_directories_are_not_removed(tmp_path, name):
    """The cache may be a directory with other content, as with `data.cache=.`."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "chapter.tex").write_text("years of work")
    make_old(tmp_path / name / "chapter.tex", tmp_path / name)
    token_store.cached(str(tmp_path), "entry", writer("one"))
    assert (tmp_path / name / "chapter.tex").exists()


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        path, _ = token_store.cached(str(tmp_path), "entry", writer("one"))
    finally:
        os.umask(before)
    modes = [os.stat(name).st_mode & 0o777 for name in (path, os.path.join(path, "data"))]
    assert modes == [0o755, 0o644]


def test_file_size_limit_raises(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(InputError, match=r"cannot write the data cache .*: File too large: .*data.cache=DIR"):
            token_store.cached(str(tmp_path), "entry", writer("x" * 100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_unwritable_cache_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the data cache .*file/cache'"):
        token_store.cached(str(tmp_path / "file" / "cache"), "entry", writer("x"))


def test_cache_root_prefers_config_then_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HPNLP_CACHE", "/own")
    assert token_store.cache_root("~/here") == str(tmp_path / "here")
    assert token_store.cache_root("") == "/own"
    monkeypatch.delenv("HPNLP_CACHE")
    assert token_store.cache_root("") == "/xdg/hpnlp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert token_store.cache_root("") == str(tmp_path / ".cache" / "hpnlp")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(264, np.uint16), (1 << 16, np.uint16), (1 << 20, np.uint32)])
def test_tokens_reads_what_the_writer_wrote(tmp_path, vocab_size, dtype):
    documents = [(np.array([0, vocab_size - 1]), 1, b"first"), (np.array([5]), 3, b""), (np.arange(4), 2, b"third")]
    with token_store.TokenWriter(str(tmp_path), "x", vocab_size, keep_raw=True) as file:
        for document in documents:
            file.add(*document)
    tokens = token_store.Tokens(str(tmp_path), "x", json.loads(json.dumps(file.record())))
    assert tokens.tokens.dtype == dtype
    assert tokens.ends.tolist() == [2, 3, 7] and tokens.skips.tolist() == [1, 3, 2]
    for i, (ids, _, raw) in enumerate(documents):
        np.testing.assert_array_equal(tokens.document(i), ids)
        assert tokens.raw(i) == raw
    assert tokens.raw() == b"firstthird"
    os.remove(tmp_path / "x.raw")
    raises("cannot read .*x.raw': No such file .* run the same command again", tokens.raw)
