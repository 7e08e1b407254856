"""Labelled examples from the source code of the running Python's standard library.

All examples of a source file are held out together (their field "group" is the file's name), because functions of one file
share names, comments and idioms. Texts that occur more than once are taken once, so that no text is on both sides.
"""

from __future__ import annotations

import ast
import builtins
import collections
import copy
import io
import itertools
import keyword
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hpnlp.data.examples.generated.entry import Generated
from hpnlp.data.reading.files import read_bytes
from hpnlp.data.reading.sources import File
from hpnlp.data.reading.split import hash_fraction

_MIN_FUNCTIONS, _MIN_FILES = 100, 5  # a package with fewer is not a class
_MIN_CODE = 60  # characters of a function; shorter functions are the same in many packages
_MIN_WORDS = 4  # words of a docstring, and of a line of tokens
_LINES_SHARE = 0.25  # share of the library's lines that are examples of tokens
_PASSAGE = 2000  # characters of a passage
_PAIR_GROUPS = 40  # groups of files whose passages are paired
_PAIRED = 8  # passages of a file that are paired with each other
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Functions and methods, labelled with the package that they come from: "text", "label" and "group".

    The text is the code as `ast.unparse` writes it, without docstring, comments and decorators. The names of all packages that
    are classes are replaced by "package", because a name in the text would give its label away. Packages with fewer than 100
    functions or 5 files are left out, as are modules that are no package.
    """
    first: dict[str, tuple[str, str]] = {}  # text -> (package, file); the package is "" if there are several
    for file in files:
        package, slash, _ = file.name.partition("/")
        for function in _functions(file) if slash else ():
            text = _code(function)
            if len(text) >= _MIN_CODE and first.setdefault(text, (package, file.name))[0] != package:
                first[text] = ("", file.name)
    counts = collections.Counter(package for package, _ in first.values())
    in_files = collections.Counter(package for package, _ in set(first.values()))
    kept = {name for name in counts if name and counts[name] >= _MIN_FUNCTIONS and in_files[name] >= _MIN_FILES}
    names = re.compile(rf"\b_?({'|'.join(sorted(kept))})\b", re.IGNORECASE)
    for text, (package, name) in first.items():
        if package in kept:
            yield {"text": names.sub("package", text), "label": package, "group": name}


def passages(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Passages, of at most 2,000 characters, of consecutive functions of a file: "text", "label" and "group".

    Functions and labels are those of `functions`.
    """
    for name, examples in itertools.groupby(functions(files), key=lambda example: example["group"]):
        examples = list(examples)
        for text in _passages(example["text"] for example in examples):
            yield {"text": text, "label": examples[0]["label"], "group": name}


def same_file(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Pairs of passages, labelled "1" if both come from one file, and otherwise "0": "text", "pair", "label" and "group".

    Files are divided into groups by their names, and passages are paired within a group only, so that groups that are held out
    share no file with the others. Half of the pairs have the label "1".
    """
    by_group: dict[int, list[list[str]]] = collections.defaultdict(list)
    seen: set[str] = set()
    for file in files:
        codes = [code for function in _functions(file) if len(code := _code(function)) >= _MIN_CODE]
        of_file = list(_passages(code for code in dict.fromkeys(codes) if code not in seen))
        seen.update(codes)
        if len(of_file) > 1:
            by_group[int(hash_fraction(file.name) * _PAIR_GROUPS)].append(of_file)
    for group, passages_of_files in sorted(by_group.items()):
        if len(passages_of_files) > 1:
            for index, of_file in enumerate(passages_of_files):
                others = [text for other, texts in enumerate(passages_of_files) if other != index for text in texts]
                for number, (first, second) in enumerate(itertools.combinations(of_file[:_PAIRED], 2)):
                    draw = hash_fraction(f"{index}/{number}/{first}")
                    yield {"text": first, "pair": second, "label": "1", "group": str(group)}
                    yield {"text": first, "pair": others[int(draw * len(others))], "label": "0", "group": str(group)}


def _passages(texts: Iterable[str]) -> Iterator[str]:
    """Consecutive texts, joined to passages of at most _PASSAGE characters; longer texts are cut."""
    passage = ""
    for text in texts:
        if passage and len(passage) + len(text) + 2 > _PASSAGE:
            yield passage
            passage = ""
        passage = (f"{passage}\n\n{text}" if passage else text)[:_PASSAGE]
    if passage:
        yield passage


def docstrings(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Docstrings of functions and methods, "text", with the code that they belong to, "pair", and "group".

    The code is as `ast.unparse` writes it, without docstring, comments and decorators.
    """
    seen: set[str] = set()
    for file in files:
        for function in _functions(file):
            text = ast.get_docstring(function) or ""
            code = _code(function)
            if len(text.split()) >= _MIN_WORDS and len(code) >= _MIN_CODE and not {text, code} & seen:
                seen |= {text, code}
                yield {"text": text, "pair": code, "group": file.name}


def tokens(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Tokens of a quarter of the lines of code, labelled with their kinds: "words", "labels" and "group".

    A line ends where a statement ends. Kinds are keyword, definition (a name after `def` or `class`), attribute (a name after a
    dot), builtin, call (another name before a parenthesis), argument (a name before `=` within parentheses), name, number,
    string, comment and operator.
    """
    seen: set[tuple[str, ...]] = set()
    for file in files:
        for line in _lines(file):
            words = tuple(token.string for token in line)
            if len(words) >= _MIN_WORDS and words not in seen and hash_fraction("\0".join(words)) < _LINES_SHARE:
                seen.add(words)
                yield {"words": words, "labels": _kinds(line), "group": file.name}


def syntax_tree(file: File) -> ast.Module:
    """The syntax tree of a file; an empty one if Python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some sources of the library contain deprecated syntax
            return ast.parse(read_bytes(file.path))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _functions(file: File) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods of a file, without functions in functions; none if Python cannot parse the file."""
    pending = collections.deque(syntax_tree(file).body)
    while pending:
        node = pending.popleft()
        if isinstance(node, _DOCUMENTED):
            yield node
        elif not isinstance(node, ast.expr):
            pending.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))


def _code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The code of a function without docstring, comments and decorators."""
    bare = copy.copy(function)
    bare.body = (function.body[1:] if ast.get_docstring(function) is not None else function.body) or [ast.Pass()]
    bare.decorator_list = []
    return ast.unparse(bare)


def _lines(file: File) -> Iterator[list[tokenize.TokenInfo]]:
    """Tokens of the statements of a file that have text; a file ends where it is not valid Python."""
    line: list[tokenize.TokenInfo] = []
    try:
        for token in tokenize.tokenize(io.BytesIO(read_bytes(file.path)).readline):
            if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
                yield line
                line = []
            elif token.string.strip() and token.type != tokenize.ENCODING:
                line.append(token)
    except (SyntaxError, ValueError, tokenize.TokenError):
        return


_PLAIN_KINDS = {tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.COMMENT: "comment"}
# From Python 3.12 on, f-strings are several tokens, and from 3.14 on t-strings.
_PLAIN_KINDS |= {
    getattr(tokenize, f"{letter}STRING_{part}", -1): "string" for letter in "FT" for part in ("START", "MIDDLE", "END")
}


def _kinds(line: Sequence[tokenize.TokenInfo]) -> list[str]:
    """Kinds of the tokens of one line."""
    words = ["", *(token.string for token in line), ""]
    depth, kinds = 0, []
    for token, before, after in zip(line, words[:-2], words[2:], strict=True):
        if token.type == tokenize.NAME:
            kinds.append(_kind_of_name(token.string, before, after, depth))
        else:
            kinds.append(_PLAIN_KINDS.get(token.type, "operator"))
            depth += (token.string in "([{") - (token.string in ")]}")
    return kinds


def _kind_of_name(name: str, before: str, after: str, depth: int) -> str:
    """Kind of a name between two tokens, within `depth` brackets."""
    if keyword.iskeyword(name):
        return "keyword"
    if before in ("def", "class"):
        return "definition"
    if before == ".":
        return "attribute"
    if depth and after == "=":
        return "argument"
    if hasattr(builtins, name):
        return "builtin"
    return "call" if after == "(" else "name"


STDLIB_FUNCTIONS = Generated(functions, "stdlib")
STDLIB_TOKENS = Generated(tokens, "stdlib")
STDLIB_DOCSTRINGS = Generated(docstrings, "stdlib")
STDLIB_PASSAGES = Generated(passages, "stdlib")
STDLIB_SAME_FILE = Generated(same_file, "stdlib")
