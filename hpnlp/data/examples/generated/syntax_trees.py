"""Labelled abstract syntax trees of the source code of the running Python's standard library."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from hpnlp.data.examples.generated import standard_library
from hpnlp.data.examples.generated.entry import Generated
from hpnlp.data.reading.sources import File

MAX_CHILDREN = 8  # more children of a node are grouped under nodes GROUP
GROUP = "..."
MAX_NUMBER = 9  # larger whole numbers are the leaf "int"

_Tree = tuple[str, list[Any]]  # label and subtrees


def functions(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Abstract syntax trees of the functions of `standard_library.functions`, labelled with the package that they come from.

    A node is labelled with its type (as `Call`), and names, operators and constants are leaves: a name with itself, None, True,
    False and small numbers too, other constants with their type. More than 8 children are grouped under nodes "...".

    Args:
      files: Files of the library.

    Yields:
      Records with "nodes", labels in preorder, "parents", "label" and "group".
    """
    for example in standard_library.functions(files):
        (function,) = ast.parse(example["text"]).body
        nodes, parents = flat(node_tree(function))
        yield {"nodes": nodes, "parents": parents, "label": example["label"], "group": example["group"]}


def node_tree(node: ast.AST) -> _Tree:
    """`(label, subtrees)` of a statement, an expression or a part of one."""
    if isinstance(node, ast.Name):
        return node.id, []
    if isinstance(node, ast.Constant):
        return _constant(node.value), []
    subtrees: list[_Tree] = []
    for name, value in ast.iter_fields(node):
        if name not in ("ctx", "type_comment", "kind", "type_ignores"):
            subtrees += [_subtree(item) for item in (value if isinstance(value, list) else [value]) if item is not None]
    while len(subtrees) > MAX_CHILDREN:
        subtrees = [(GROUP, subtrees[i : i + MAX_CHILDREN]) for i in range(0, len(subtrees), MAX_CHILDREN)]
    return type(node).__name__, subtrees


def _subtree(item: object) -> _Tree:
    """The tree of an item of a field: a node, a name, or a number such as the level of an import."""
    return node_tree(item) if isinstance(item, ast.AST) else (item if isinstance(item, str) else _constant(item), [])


def _constant(value: object) -> str:
    """The label of a constant."""
    if value is None or isinstance(value, bool) or (isinstance(value, int) and 0 <= value <= MAX_NUMBER):
        return str(value)
    return type(value).__name__


def flat(tree: _Tree) -> tuple[list[str], list[int]]:
    """`(labels, parents)` of the nodes of a tree in preorder, -1 for the root."""
    nodes, parents, pending = [], [], [(tree, -1)]
    while pending:
        (label, subtrees), parent = pending.pop()
        pending.extend((subtree, len(nodes)) for subtree in reversed(subtrees))
        nodes.append(label)
        parents.append(parent)
    return nodes, parents


STDLIB_TREES = Generated(functions, "stdlib")
