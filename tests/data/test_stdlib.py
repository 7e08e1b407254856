"""Corpora of words: what counts as a word, and a cache that is written once and whole."""

import glob
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpnlp.data import stdlib, stream, text
from hpnlp.types import InputError

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
    """A standard library of a few files."""
    root = tmp_path / "lib"
    files = {"f.py": SOURCE, "sub/g.py": b"y = 1", "test/t.py": b"assert Y", "bad.py": b"def (\xff", "void.py": b"\n"}
    for name, content in {**files, "site-packages/x.py": b"no", "words.txt": b"no"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(root))
    return root


def content(corpus):
    return {os.path.basename(path): Path(path).read_text("utf-8") for path in glob.glob(corpus.path)}


def test_docs_are_words_of_docstrings_and_comments(library):
    corpus = stdlib.write_corpus("docs")
    assert content(corpus) == {"f.py.txt": "a module's head\nwhat it needs os path\ndon't repeat it ever\nthree\n"}
    assert (corpus.files, corpus.skipped, corpus.words, corpus.types) == (1, 1, 13, 12)


def test_code_is_names_numbers_and_marks_of_tests_too(library):
    found = content(stdlib.write_corpus("code"))
    assert found.keys() == {"f.py.txt", "sub.g.py.txt", "test.t.py.txt", "bad.py.txt"}
    assert found["sub.g.py.txt"] == "y = 1\n" and found["bad.py.txt"] == "def ( \ufffd\n"
    assert "def f ( a , * , b = 2 ) :\n" in found["f.py.txt"] and "return a @ b # - > 3 → Three" in found["f.py.txt"]


def test_whitespace_keeps_what_it_separates(library):
    found = content(stdlib.write_corpus("whitespace"))
    assert "def f(a, *, b=2):\n" in found["f.py.txt"] and found["test.t.py.txt"] == "assert Y\n"
    for name, words in found.items():
        source = next(path for path in library.rglob("*.py") if str(path).endswith(name.split(".")[-3] + ".py"))
        assert words.split() == source.read_bytes().decode("utf-8", "replace").split()


def test_written_once_and_anew_when_the_library_changes(library):
    first = stdlib.write_corpus("docs")
    stamp = os.stat(glob.glob(first.path)[0]).st_mtime_ns
    assert stdlib.write_corpus("docs") == first and os.stat(glob.glob(first.path)[0]).st_mtime_ns == stamp
    (library / "h.py").write_bytes(b"# more")
    second = stdlib.write_corpus("docs")
    assert second.path != first.path and second.files == 2 and second.sha256 != first.sha256
    os.remove(glob.glob(first.path)[0])
    (library / "h.py").unlink()
    assert stdlib.write_corpus("docs") == first and content(first)  # what was damaged is made again


def test_a_cache_of_an_odd_name_is_read_back(library, tmp_path):
    corpus = stdlib.write_corpus("code", str(tmp_path / "[x]*"))
    config = stream.DataConfig(path=corpus.path, tokenizer="words(99, by=whitespace)", seq_len=8, batch_size=1)
    found = stream.prepare(config)
    assert found.train_documents + found.heldout_documents == 4


def test_unknown_corpus():
    with pytest.raises(InputError, match="unknown corpus 'dogs': did you mean 'docs'?"):
        stdlib.write_corpus("dogs")


def test_no_python_is_told():
    for source in (b"def (", b"x = '''", b"\xff"):
        with pytest.raises((SyntaxError, ValueError)):
            list(stdlib.docs(source))


@pytest.mark.slow
def test_the_real_library(tmp_path):
    """Two processes at once leave one whole corpus; where this is Python 3.11.7, of the counts that the module gives."""
    program = "import sys; from hpnlp.data.stdlib import write_corpus; print(write_corpus('docs', sys.argv[1]).words)"
    both = [subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE) for _ in range(2)]
    assert len({process.communicate()[0] for process in both}) == 1
    corpus = stdlib.write_corpus("docs", str(tmp_path))
    assert corpus.skipped == 0 and 10_000 < corpus.types < 20_000 and len(os.listdir(tmp_path)) == 1
    if corpus.python == "3.11.7":
        assert (corpus.words, corpus.types) == (578_327, 13_710)
