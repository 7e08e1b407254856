"""Corpora of words: their words, and the cache."""

import glob
import os
from pathlib import Path

import pytest

from hpnlp.data import stream
from hpnlp.data.reading import sources, stdlib
from tests.messages import raises

SOURCE = b'''"""A module's head."""
import os  # what it needs: os.path
X = 1


def f(a, *, b=2):
    """Don't   repeat "it".

    Ever!
    """
    return a @ b  # -> 3 \xe2\x86\x92 Three
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small directory in place of the standard library."""
    root = tmp_path / "lib"
    files = {"f.py": SOURCE, "sub/g.py": b"y = 1", "test/t.py": b"assert Y", "bad.py": b"def (\xff", "void.py": b"\n"}
    for name, content in {**files, "site-packages/x.py": b"no", "words.txt": b"no"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(root))
    return root


def content(corpus):
    return {os.path.basename(path): Path(path).read_text("utf-8") for path in glob.glob(corpus.path)}


def test_docs_are_words_of_docstrings_and_comments(library):
    corpus = stdlib.write_corpus("docs")
    assert content(corpus) == {"f.py.txt": "a module's head\nwhat it needs os path\ndon't repeat it ever\nthree\n"}
    assert (corpus.files, corpus.skipped, corpus.words, corpus.types) == (1, 1, 13, 12)


def test_code_is_names_numbers_and_marks(library):
    files = content(stdlib.write_corpus("code"))
    assert files.keys() == {"f.py.txt", "sub.g.py.txt", "test.t.py.txt", "bad.py.txt"}
    assert files["sub.g.py.txt"] == "y = 1\n" and files["bad.py.txt"] == "def ( \ufffd\n"
    assert "def f ( a , * , b = 2 ) :\n" in files["f.py.txt"] and "return a @ b # - > 3 → Three" in files["f.py.txt"]


def test_whitespace_keeps_all_text_between_whitespace(library):
    files = content(stdlib.write_corpus("whitespace"))
    assert "def f(a, *, b=2):\n" in files["f.py.txt"] and files["test.t.py.txt"] == "assert Y\n"
    for name, words in files.items():
        source = next(path for path in library.rglob("*.py") if str(path).endswith(name.split(".")[-3] + ".py"))
        assert words.split() == source.read_bytes().decode("utf-8", "replace").split()


def test_corpus_is_written_again_only_if_the_library_changes(library):
    first = stdlib.write_corpus("docs")
    stamp = os.stat(glob.glob(first.path)[0]).st_mtime_ns
    assert stdlib.write_corpus("docs") == first and os.stat(glob.glob(first.path)[0]).st_mtime_ns == stamp
    (library / "h.py").write_bytes(b"# more")
    second = stdlib.write_corpus("docs")
    assert second.path != first.path and second.files == 2 and second.sha256 != first.sha256
    os.remove(glob.glob(first.path)[0])
    (library / "h.py").unlink()
    assert stdlib.write_corpus("docs") == first and content(first)  # a damaged entry is written again


def test_cache_path_may_contain_glob_characters(library, tmp_path):
    corpus = stdlib.write_corpus("code", str(tmp_path / "[x]*"))
    config = stream.DataConfig(path=corpus.path, tokenizer="words(99, by=whitespace)", seq_len=8, batch_size=1)
    prepared = stream.prepare(config)
    assert prepared.train_documents + prepared.heldout_documents == 4


def test_unknown_corpus_raises():
    raises("unknown corpus 'dogs': did you mean 'docs'?", stdlib.write_corpus, "dogs")


def test_invalid_python_raises():
    for source in (b"def (", b"x = '''", b"\xff"):
        with pytest.raises((SyntaxError, ValueError)):
            list(stdlib.docs(source))


@pytest.mark.slow
def test_counts_are_those_of_the_docstring(tmp_path):
    """With Python 3.11.7."""
    corpus = stdlib.write_corpus("docs", str(tmp_path))
    assert corpus.skipped == 0 and 10_000 < corpus.types < 20_000 and len(os.listdir(tmp_path)) == 1
    if corpus.python == "3.11.7":
        assert (corpus.words, corpus.types) == (578_327, 13_710)
