"""Corpora of words from the running Python's standard library, with vocabularies of 10,000 to 500,000 words.

    corpus = write_corpus("docs")
    prepare(DataConfig(path=corpus.path, tokenizer="words(20000, by=whitespace)"))

The text is split into words and written with one space or line end between words, so that a tokenizer that splits at
whitespace returns exactly these words. Sizes depend on the version of Python; 3.11.7 has:

| corpus | content | words | distinct words |
|---|---|---|---|
| docs | docstrings and comments except those of tests: lower-case words of letters | 578,327 | 13,710 |
| code | names, numbers and single punctuation marks of all sources | 7,113,689 | 118,336 |
| whitespace | all sources, split at whitespace | 2,768,999 | 455,722 |

Some installations of Python lack the tests: `code` and `whitespace` are smaller there.
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

from hpnlp.data.reading import sources, token_store
from hpnlp.data.reading.digest import Snapshot
from hpnlp.data.reading.files import ignore_progress, read_bytes
from hpnlp.spec import lookup

_FORMAT = 2  # version of the files that are written; part of the cache key
_LETTERS = re.compile(r"[a-z]+(?:'[a-z]+)?")
_CODE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|\d+|\S")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class WordCorpus:
    """A corpus on disk.

    Attributes:
      path: Glob for `DataConfig.path`, of one file per source file that has words.
      files: Number of these files.
      skipped: Number of source files that Python cannot parse.
      words: Number of words.
      types: Number of distinct words.
      sha256: Digest of the files' text in the order of their names.
      python: Version of Python whose library it is.
    """

    path: str
    files: int
    skipped: int
    words: int
    types: int
    sha256: str
    python: str


def write_corpus(name: str, cache: str = "") -> WordCorpus:
    """Writes a corpus to the cache, unless it is there already. The first call takes seconds, for one pass over the library.

    Args:
      name: An entry of CORPORA.
      cache: See `DataConfig.cache`.

    Returns:
      The corpus.

    Raises:
      InputError: The name is unknown, or the cache cannot be written.
    """
    paths, _ = lookup(CORPORA, name, "corpus")
    (source,) = sources.find(paths, "the standard library")
    root = token_store.cache_root(cache)
    content = Snapshot([file.path for file in source.files]).digest(root, ignore_progress)
    names = [file.name for file in source.files]
    key = token_store.json_hash([_FORMAT, name, platform.python_version(), names, content])

    def write(directory: str) -> dict[str, Any]:
        return _write(name, source.files, directory)

    directory, record = token_store.cached(root, f"words-{name}-{key}", write)
    return WordCorpus(os.path.join(glob.escape(directory).replace(",", "?"), "*.txt"), **record)


def _write(name: str, files: tuple[sources.File, ...], directory: str) -> dict[str, Any]:
    """Writes the words of the library's files to `directory` and returns the fields of WordCorpus except the path."""
    split_lines = CORPORA[name][1]
    counts: collections.Counter[str] = collections.Counter()
    digest, written, skipped = hashlib.sha256(), 0, 0
    for file in files:
        try:
            lines = [words for words in split_lines(read_bytes(file.path)) if words]
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
    """Splits docstrings and comments into lower-case words of letters.

    Args:
      source: Content of a Python file.

    Yields:
      The words of each docstring and comment, in the order of their first lines.

    Raises:
      SyntaxError: `source` is not valid Python. ValueError and tokenize.TokenError are raised for other faults.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some sources of the library contain deprecated syntax
        tree = ast.parse(source)
    lines = [
        (node.body[0].lineno, ast.get_docstring(node) or "")
        for node in ast.walk(tree)
        if isinstance(node, _DOCUMENTED) and node.body
    ]
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines.append((token.start[0], token.string.lstrip("# ")))
    for _, words in sorted(lines):
        yield _LETTERS.findall(words.lower())


def code(source: bytes) -> Iterator[list[str]]:
    """Splits lines of code into names, numbers and single punctuation marks.

    Args:
      source: Content of a file; bytes that are not UTF-8 become U+FFFD.

    Yields:
      The words of each line.
    """
    for line in source.decode("utf-8", "replace").splitlines():
        yield _CODE.findall(line)


def whitespace(source: bytes) -> Iterator[list[str]]:
    """Splits lines at whitespace.

    Args:
      source: Content of a file; bytes that are not UTF-8 become U+FFFD.

    Yields:
      The words of each line.
    """
    for line in source.decode("utf-8", "replace").splitlines():
        yield line.split()


# Name -> (path of the sources as in `DataConfig.path`, function from the bytes of a file to the words of its lines).
CORPORA: dict[str, tuple[str, Callable[[bytes], Iterator[list[str]]]]] = {
    "docs": ("stdlib", docs),
    "code": ("stdlib+tests", code),
    "whitespace": ("stdlib+tests", whitespace),
}
