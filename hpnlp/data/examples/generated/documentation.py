"""Passages of the docstrings of the running Python's standard library, with hidden names or sentences."""

from __future__ import annotations

import ast
import collections
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpnlp.data.examples.generated.entry import Generated
from hpnlp.data.examples.generated.standard_library import syntax_tree
from hpnlp.data.reading.sources import File

ITEMS = 28  # words and signs of a passage, at most
_LEAST = 6  # and at least
_SPANS = 3  # records of a passage, at most
_LETTERS = range(3, 25)  # lengths of names
_ITEM = re.compile(r"\w+|[^\w\s]")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z\"'`(])")
_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Passage(NamedTuple):
    """Consecutive sentences of a docstring.

    Attributes:
      file: Name of the file.
      title: Name of the module, class or function, with the names around it.
      sentences: The sentences.
    """

    file: str
    title: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        """The sentences as one line."""
        return " ".join(self.sentences)


def hidden_names(files: Sequence[File]) -> Iterator[dict[str, str]]:
    """Passages with a hidden name that another passage has as well, and the passage with its title as a document.

    A name is a word of 3 to 24 letters with an inner capital, an underscore or a digit, such as TarInfo or 2822: the
    salient spans of this text. The document is that which the text is taken from: `data.document_role=source`. Records have
    "text", "answer", "document" and "group", the file.
    """
    passages = _passages(files)
    counts = collections.Counter(itertools.chain.from_iterable(_names(passage.text) for passage in passages))
    draw = random.Random(0)
    for passage in passages:
        names = [name for name in _names(passage.text) if counts[name] > 1]
        for name in draw.sample(names, min(_SPANS, len(names))):
            document = f"{passage.title}: {passage.text}"
            yield {"text": passage.text, "answer": name, "document": document, "group": passage.file}


def inverse_cloze(files: Sequence[File]) -> Iterator[dict[str, str]]:
    """Sentences, and the remainders of their passages.

    Records have "text", one sentence of a passage of several; "pair", the other sentences after the title; and "group", the
    file.

    References:
      Lee et al. 2019, "Latent retrieval for weakly supervised open domain question answering", section 5.
    """
    draw = random.Random(0)
    for passage in _passages(files):
        if len(passage.sentences) > 1:
            place = draw.randrange(len(passage.sentences))
            if not any(map(str.isalnum, passage.sentences[place])):
                continue
            others = " ".join(passage.sentences[:place] + passage.sentences[place + 1 :])
            yield {
                "text": passage.sentences[place],
                "pair": f"{passage.title}: {others}",
                "group": passage.file,
            }


def _names(text: str) -> list[str]:
    """Different salient names of a text, in their order."""
    return [word for word in dict.fromkeys(re.findall(r"\w+", text)) if len(word) in _LETTERS and _is_salient(word)]


def _is_salient(word: str) -> bool:
    return "_" in word.strip("_") or any(letter.isupper() or letter.isdigit() for letter in word[1:])


def _passages(files: Sequence[File]) -> list[Passage]:
    """Passages of files; of passages with equal texts, the first."""
    distinct: dict[str, Passage] = {}
    for file in files:
        for passage in _file_passages(file):
            distinct.setdefault(passage.text, passage)
    return list(distinct.values())


def _file_passages(file: File) -> Iterator[Passage]:
    """Passages of a file; none if Python cannot parse it."""
    nodes: list[tuple[ast.AST, str]] = [
        (syntax_tree(file), file.name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    ]
    while nodes:
        node, title = nodes.pop()
        if isinstance(node, (ast.Module, *_NAMED)) and (text := ast.get_docstring(node)):
            yield from (Passage(file.name, title, sentences) for sentences in _split(text))
        for child in ast.iter_child_nodes(node):
            nodes.append((child, f"{title}.{child.name}" if isinstance(child, _NAMED) else title))


def _split(docstring: str) -> Iterator[tuple[str, ...]]:
    """Sentences of a docstring, in passages of at most ITEMS words and signs; a longer sentence loses its end."""
    passage: list[str] = []
    for sentence in itertools.chain.from_iterable(map(_SENTENCE_END.split, docstring.split("\n\n"))):
        ends = [item.end() for item in _ITEM.finditer(sentence)]
        text = " ".join(sentence[: ends[min(len(ends), ITEMS) - 1]].split()) if ends else ""
        if passage and _items(" ".join([*passage, text])) > ITEMS:
            yield from _kept(passage)
            passage = []
        passage += [text] if text else []
    yield from _kept(passage)


def _kept(sentences: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the sentences as a passage, unless they have fewer than _LEAST words and signs."""
    if _items(" ".join(sentences)) >= _LEAST:
        yield tuple(sentences)


def _items(text: str) -> int:
    return sum(1 for _ in _ITEM.finditer(text))


STDLIB_NAMES = Generated(hidden_names, "stdlib")
STDLIB_SENTENCES = Generated(inverse_cloze, "stdlib")
