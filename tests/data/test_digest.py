"""The cache of tokens never returns tokens of old content, and the summary states its use."""

import os

import pytest

from hpnlp.data import DataConfig, prepare
from hpnlp.data.reading import digest, stdlib
from hpnlp.data.reading.files import ignore_progress
from tests.messages import raises


def fail_on_hashing(step: str, done: int, total: int) -> None:
    raise AssertionError("files are hashed again")


def rewrite(path, content: str) -> None:
    """New content of the same size and modification time, with another change time."""
    before = os.stat(path)
    while os.stat(path).st_ctime_ns == before.st_ctime_ns:
        path.write_text(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.fixture(params=["small", "remembered"])
def remembered(request, monkeypatch) -> bool:
    """Whether digests are remembered, as for large files that have not changed recently."""
    if request.param == "remembered":
        monkeypatch.setattr(digest, "_REMEMBERED_BYTES", 0)
        monkeypatch.setattr(digest, "_STEP_SECONDS", -1e6)
    return request.param == "remembered"


@pytest.mark.parametrize("tokenizer", ["bytes", "words(60)"])
def test_new_content_of_the_same_size_and_time_is_read(tmp_path, remembered, tokenizer):
    path = tmp_path / "text" / "a.txt"
    path.parent.mkdir()
    lines = "".join(f"line {i:04} of many\n" for i in range(500))
    path.write_text(lines)
    config = DataConfig(path=str(path), seq_len=16, heldout=0.2, tokenizer=tokenizer)
    assert b"line" in prepare(config).read_heldout()
    rewrite(path, lines.replace("line", "word"))
    corpus = prepare(config)
    assert b"line" not in corpus.read_heldout() and b"word" in corpus.read_heldout()
    assert b"line" not in corpus.tokenizer.decode(next(corpus.train(seed=0))["tokens"].ravel())


def test_summary_states_use_of_the_cache(stories, remembered, cache):
    config = DataConfig(path=str(stories), seq_len=32, heldout=0.2)
    first, second = prepare(config), prepare(config)
    assert (first.is_cached, second.is_cached) == (False, True) and "cache" not in first.summary
    assert f"; tokens read from the cache, {second.directory}" in second.summary
    assert os.path.dirname(second.directory) == str(cache)
    assert sorted(name.split("-")[0] for name in os.listdir(cache)) == ["digest"] * remembered + ["tokens"]


def test_digests_of_old_files_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_REMEMBERED_BYTES", 0)
    path, root = tmp_path / "x", str(tmp_path / "cache")
    path.write_text("text")
    calls = []
    fresh = [digest.Snapshot([str(path)]).digest(root, lambda *args: calls.append(args)) for _ in range(2)]
    assert len(calls) == 2 and not os.path.exists(root)  # a second change could fall into the same step of the clock
    monkeypatch.setattr(digest, "_STEP_SECONDS", -1e6)
    settled = digest.Snapshot([str(path)]).digest(root, ignore_progress)
    assert {*fresh, settled, digest.Snapshot([str(path)]).digest(root, fail_on_hashing)} == {settled}
    assert digest.Snapshot([str(path), str(path)]).digest(root, ignore_progress) != settled


def test_files_are_hashed_where_the_cache_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_REMEMBERED_BYTES", 0)
    monkeypatch.setattr(digest, "_STEP_SECONDS", -1e6)
    path = tmp_path / "x"
    path.write_text("text")
    expected = digest.Snapshot([str(path)]).digest(str(tmp_path / "cache"), ignore_progress)
    assert digest.Snapshot([str(path)]).digest(str(path / "cache"), ignore_progress) == expected


@pytest.mark.parametrize("step", [3.0, -1e6])
def test_files_that_change_while_they_are_read_raise(tmp_path, cache, monkeypatch, step):
    monkeypatch.setattr(digest, "_STEP_SECONDS", step)
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"text {i} " * 9)

    def progress(step: str, done: int, total: int) -> None:
        rewrite(tmp_path / "0.txt", "else 0 " * 9)

    config = DataConfig(path=str(tmp_path), seq_len=16, heldout=0.2)
    raises("0.txt' changes while it is read: run again when it is complete", prepare, config, progress=progress)
    assert os.listdir(cache) == []
    prepare(config)


def test_change_within_one_step_of_the_clock_is_detected(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_text("text")
    snapshot = digest.Snapshot([str(path)])
    snapshot.digest(str(tmp_path), fail_on_hashing)
    path.write_text("else")
    monkeypatch.setattr(digest, "_stamp", lambda path: snapshot._stamps[0])
    raises("change while they are read", snapshot.check)


def test_words_of_a_changed_library_are_written_again(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    library.mkdir()
    (library / "a.py").write_text("# one word\n")
    monkeypatch.setattr(stdlib.sources.sysconfig, "get_path", lambda name: str(library))
    before = stdlib.write_corpus("docs")
    rewrite(library / "a.py", "# two word\n")
    assert stdlib.write_corpus("docs").sha256 != before.sha256


def test_nul_in_the_cache_path_raises(stories):
    raises("data.cache='a.x00b' has a NUL", lambda: prepare(DataConfig(path=str(stories), cache="a\0b")))
