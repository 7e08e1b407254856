"""Corpora of words from the running Python's standard library, with vocabularies of ten thousand to half a million words.

    corpus = write_corpus("docs")
    prepare(DataConfig(path=corpus.path, tokenizer="words(20000, by=whitespace)"))

The text is cut into words here and written with one space or line end between two, so that a tokenizer that splits at
whitespace finds these words and no others. How much there is depends on the Python; 3.11.7 has:

| corpus | what | words | types |
|---|---|---|---|
| docs | docstrings and comments without those of tests: lower-case words of letters | 578,327 | 13,710 |
| code | names, numbers and single marks of all sources | 7,113,689 | 118,336 |
| whitespace | what whitespace separates in all sources | 2,768,999 | 455,722 |

Some installations of Python come without tests: `code` and `whitespace` are smaller there.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import glob
import hashlib
import io
import os
import platform
import re
import tokenize
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from hpnlp.data import text, token_store
from hpnlp.data.digest import Snapshot
from hpnlp.spec import lookup
from hpnlp.types import InputError

_FORMAT = 2  # of what is written: part of the cache's key
_LETTERS = re.compile(r"[a-z]+(?:'[a-z]+)?")
_CODE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|\d+|\S")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class WordCorpus:
    """A corpus on disk. path: for `DataConfig.path`, a file for each source file that has words. skipped: source files that
    Python cannot parse. words, types: how many there are, and how many that differ. sha256: of the files' text, in the order of
    their names. python: whose library it is."""

    path: str
    files: int
    skipped: int
    words: int
    types: int
    sha256: str
    python: str


def write_corpus(name: str, cache: str = "") -> WordCorpus:
    """Writes the corpus `name` of CORPORA below the cache, once, and says where it is.

    cache: as `DataConfig.cache`. Raises InputError for an unknown name, or where the disk does not take it. Time: seconds the
    first time, for one pass over the library.
    """
    sources, _ = lookup(CORPORA, name, "corpus")
    (source,) = text.find(sources, "the standard library")
    root = token_store.cache_root(cache)
    content = Snapshot([file.path for file in source.files]).digest(root, lambda what, done, total: None)
    names = [file.name for file in source.files]
    key = token_store.key_of([_FORMAT, name, platform.python_version(), names, content])
    write = lambda directory: _write(name, source.files, directory)  # noqa: E731
    directory, record = token_store.cached(root, f"words-{name}-{key}", write)
    return WordCorpus(os.path.join(glob.escape(directory).replace(",", "?"), "*.txt"), **record)


def _write(name: str, files: tuple[text.File, ...], directory: str) -> dict[str, Any]:
    lines_of = CORPORA[name][1]
    counts: collections.Counter[str] = collections.Counter()
    digest, written, skipped = hashlib.sha256(), 0, 0
    for file in files:
        try:
            with open(file.path, "rb") as stream:
                lines = [words for words in lines_of(stream.read()) if words]
        except OSError as error:
            raise InputError(f"cannot read {file.path!r}: {error.strerror}: mend its permissions") from error
        except (SyntaxError, ValueError, tokenize.TokenError):
            skipped += 1
            continue
        if lines:
            written += 1
            data = "".join(" ".join(words) + "\n" for words in lines).encode()
            digest.update(data)
            for words in lines:
                counts.update(words)
            with open(os.path.join(directory, file.name.replace("/", ".") + ".txt"), "xb") as out:
                out.write(data)
    return {
        "files": written,
        "skipped": skipped,
        "words": counts.total(),
        "types": len(counts),
        "sha256": digest.hexdigest(),
        "python": platform.python_version(),
    }


def docs(source: bytes) -> Iterator[list[str]]:
    """The words of each docstring and comment, in the order of their lines. Raises SyntaxError or tokenize.TokenError where
    `source` is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the library's own sources do that is no longer done
        tree = ast.parse(source)
    found = [
        (node.body[0].lineno, ast.get_docstring(node) or "")
        for node in ast.walk(tree)
        if isinstance(node, _DOCUMENTED) and node.body
    ]
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append((token.start[0], token.string.lstrip("# ")))
    for _, words in sorted(found):
        yield _LETTERS.findall(words.lower())


def code(source: bytes) -> Iterator[list[str]]:
    """The names, numbers and marks of each line. What is no UTF-8 becomes U+FFFD."""
    for line in source.decode("utf-8", "replace").splitlines():
        yield _CODE.findall(line)


def whitespace(source: bytes) -> Iterator[list[str]]:
    """What whitespace separates in each line. What is no UTF-8 becomes U+FFFD."""
    for line in source.decode("utf-8", "replace").splitlines():
        yield line.split()


# name -> (the sources as `DataConfig.path` names them, bytes of a source file -> the words of its lines)
CORPORA: dict[str, tuple[str, Callable[[bytes], Iterator[list[str]]]]] = {
    "docs": ("stdlib", docs),
    "code": ("stdlib+tests", code),
    "whitespace": ("stdlib+tests", whitespace),
}
