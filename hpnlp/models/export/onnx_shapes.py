"""Symbolic sizes of arrays in ONNX graphs: int64 scalars that are computed from the shapes of the inputs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jax.typing import ArrayLike

from hpnlp.types import InputError

_BINARY = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul"}
# ONNX divides integers towards zero; sizes and their divisors are not negative.
_CALLS = {"floordiv": "Div", "mod": "Mod", "max": "Max", "min": "Min"}


@runtime_checkable
class Nodes(Protocol):
    """The members of `onnx_graph.OnnxGraph` that compute sizes."""

    def constant(self, value: str | ArrayLike) -> str: ...

    def integers(self, *values: int) -> str: ...

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str: ...


class SymbolicSizes:
    """Symbolic sizes of a graph."""

    def __init__(self, graph: Nodes, symbols: Mapping[str, Callable[[Any], str]]):
        """Prepares the sizes.

        Args:
          graph: The graph.
          symbols: Name of a symbol -> function of the graph that adds the node of its value, an int64 scalar.
        """
        self._graph = graph
        self._symbols = symbols
        self._scalars: dict[str, str] = {}
        self._vectors: dict[tuple[str, ...], str] = {}

    def scalar(self, size: Any) -> str:
        """The name of a size, an int64 scalar.

        Args:
          size: A number, or a symbolic expression of JAX.

        Returns:
          The name.

        Raises:
          InputError: The expression has an operation that is not written.
        """
        if is_number(size):
            return self._graph.constant(np.int64(size))
        text = str(size)
        if text not in self._scalars:
            self._scalars[text] = self._node(ast.parse(text.replace("^", "**"), mode="eval").body, text)
        return self._scalars[text]

    def vector(self, sizes: Sequence[Any]) -> str:
        """The name of a vector of sizes, int64.

        Args:
          sizes: Numbers and symbolic expressions.

        Returns:
          The name.
        """
        if all(map(is_number, sizes)):
            return self._graph.integers(*map(int, sizes))
        key = tuple(map(str, sizes))
        if key not in self._vectors:
            first = self._graph.integers(0)
            vectors = [self._graph.node("Unsqueeze", self.scalar(size), first) for size in sizes]
            self._vectors[key] = vectors[0] if len(vectors) == 1 else self._graph.node("Concat", *vectors, axis=0)
        return self._vectors[key]

    def _node(self, tree: ast.expr, text: str) -> str:
        """The name of the value of a parsed expression."""
        if isinstance(tree, ast.Name) and tree.id in self._symbols:
            return self._symbols[tree.id](self._graph)
        if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
            return self._graph.constant(np.int64(tree.value))
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            return self._graph.node("Neg", self._node(tree.operand, text))
        if isinstance(tree, ast.BinOp) and type(tree.op) in _BINARY:
            return self._graph.node(_BINARY[type(tree.op)], self._node(tree.left, text), self._node(tree.right, text))
        if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Pow):
            return self._graph.node("Pow", self._node(tree.left, text), self._node(tree.right, text))
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in _CALLS:
            return self._graph.node(_CALLS[tree.func.id], *(self._node(argument, text) for argument in tree.args))
        raise InputError(f"the model has an array of {text} elements, which is not written as ONNX for any length")


def is_number(size: object) -> bool:
    """Whether a size is a number and not a symbolic expression.

    Returns:
      True for a number.
    """
    return isinstance(size, int | np.integer)
