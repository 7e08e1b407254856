"""Labelled bags of titles: first paragraphs of the docstrings of the running Python's standard library."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from hpnlp.data.examples.generated.entry import Generated
from hpnlp.data.examples.generated.standard_library import syntax_tree
from hpnlp.data.reading.sources import File
from hpnlp.data.reading.split import hash_fraction

BAG = 4  # titles of a bag
_MIN_TITLES, _MAX_TITLES = 8, 128  # smaller modules are left out; a larger module keeps this many titles
_MIN_WORDS, _MAX_CHARACTERS = 3, 120
_HELDOUT = 0.2  # share of the bags of a module that are held out; its first bag is not
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def train_bags(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Bags of titles of one module each, labelled with the module: "texts", "label" and "group".

    A title is the first paragraph of a docstring in one line, as it is written, with signatures and quotes. Titles
    that occur in several modules are left out, as are those of less than 3 words or more than 120 characters, and modules with
    less than 8 titles.
    """
    return (bag for bag, is_heldout in _bags(files) if not is_heldout)


def heldout_bags(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Bags of the same modules that `train_bags` does not have."""
    return (bag for bag, is_heldout in _bags(files) if is_heldout)


def titles(files: Sequence[File]) -> dict[str, list[str]]:
    """Name of a module -> its titles, in an order that depends on their text alone."""
    modules: dict[str, set[str]] = {}  # by title
    for file in files:
        for title in _titles(file):
            modules.setdefault(title, set()).add(file.name.removesuffix(".py").removesuffix("/__init__"))
    by_module: dict[str, list[str]] = {}
    for title, names in modules.items():
        if len(names) == 1:
            by_module.setdefault(names.pop(), []).append(title)
    ordered = {name: sorted(texts, key=hash_fraction)[:_MAX_TITLES] for name, texts in sorted(by_module.items())}
    return {name: texts for name, texts in ordered.items() if len(texts) >= _MIN_TITLES}


def _bags(files: Sequence[File]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Records, and whether they are held out."""
    for module, module_titles in titles(files).items():
        for number in range(len(module_titles) // BAG):
            group = f"{module}/{number}"
            texts = module_titles[number * BAG : (number + 1) * BAG]
            is_heldout = number > 0 and hash_fraction(group) < _HELDOUT
            yield {"texts": texts, "label": module, "group": group}, is_heldout


def _titles(file: File) -> Iterator[str]:
    """Titles of a file; none if Python cannot parse it."""
    for node in ast.walk(syntax_tree(file)):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            title = " ".join(text.strip().split("\n\n")[0].split())
            if len(title) <= _MAX_CHARACTERS and len(title.split()) >= _MIN_WORDS:
                yield title


STDLIB_TITLES = Generated(train_bags, "stdlib", heldout=heldout_bags)
