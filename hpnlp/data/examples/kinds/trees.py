"""Trees with one label each: their nodes in preorder, with numbers of children, and the arrays of a batch of trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpnlp.data.examples.kind import (
    Kind,
    Numbers,
    TokenisedExamples,
    example_labels,
    example_weights,
    padded,
    sequences,
)
from hpnlp.data.packing import Batch
from hpnlp.data.reading.fields import Column, FieldError
from hpnlp.ops.trees.graphs import tree_graph
from hpnlp.types import InputError, Tokenizer


@dataclasses.dataclass(frozen=True)
class Trees(Kind):
    """A tree whose nodes have labels of one token, with one label of the whole.

    A tree is stored as two texts: the labels of the nodes in preorder, and their numbers of children. A tree with more than
    `seq_len` nodes keeps its first ones in preorder.

    A batch has "tokens" (labels of the nodes in preorder, the root first), "segment_ids" (1; 0 on padding) and "positions", as
    other kinds, and "parents" (index of the parent within the tree; -1 for the root and padding), "slots" (index among the
    children of the parent), "heights" (longest path down to a leaf; -1 on padding) and "arities" (number of children), int32
    [B, T]; "labels", int32 [B]; "weights", float32 [B].

    Attributes:
      nodes_field: Field of the labels of the nodes.
      parents_field: Field of the parents of the nodes.
      label_field: Field of the label of the tree.
      max_children: Largest number of children.
    """

    nodes_field: str
    parents_field: str
    label_field: str
    max_children: int
    has_labels = True

    @property
    def parts(self) -> int:
        return 2

    @property
    def columns(self) -> tuple[Column, ...]:
        return (
            Column(self.nodes_field, "nodes_field", "words"),
            Column(self.parents_field, "parents_field", "labels"),
            Column(self.label_field, "label_field", "label"),
        )

    def check(self, values: Mapping[str, Any]) -> None:
        nodes, parents = values["nodes_field"], values["parents_field"]
        if len(nodes) != len(parents):
            raise FieldError(
                f"field {self.nodes_field!r} has {len(nodes)} nodes and field {self.parents_field!r} {len(parents)} parents, "
                "expected as many"
            )
        where = f"field {self.parents_field!r}: "
        try:
            numbers = np.array([int(parent) for parent in parents])
        except ValueError:
            node = next(i for i, parent in enumerate(parents) if not parent.lstrip("-").isdecimal())
            raise FieldError(
                f"{where}node {node} has the parent {parents[node]!r}, expected the number of a node, or -1 for the root"
            ) from None
        try:
            graph = tree_graph(numbers)
        except InputError as error:
            raise FieldError(f"{where}{error}") from error
        if (roots := int(np.sum(numbers < 0))) != 1:
            raise FieldError(f"{where}{roots} nodes have the parent -1, expected one, the root")
        widest = int(graph.arity.argmax())
        if graph.arity[widest] > self.max_children:
            raise FieldError(
                f"{where}node {widest} ({nodes[widest]!r}) has {graph.arity[widest]} children, and data.max_children="
                f"{self.max_children}: raise it, or put groups of children under nodes of their own"
            )

    def texts(self, values: Mapping[str, Any]) -> list[str]:
        order, counts = preorder([int(parent) for parent in values["parents_field"]])
        nodes = values["nodes_field"]
        return [" ".join(nodes[node] for node in order), " ".join(map(str, counts))]

    def labels(self, values: Mapping[str, Any]) -> list[str]:
        return [values["label_field"]]

    def join(self, ids: Sequence[np.ndarray], labels: np.ndarray) -> tuple[Sequence[np.ndarray], np.ndarray]:
        ids, labels = super().join(ids, labels)
        if len(ids[0]) != len(ids[1]):
            raise FieldError(
                f"has {len(ids[1])} nodes with {len(ids[0])} tokens, expected one token for each node: pass "
                'data.tokenizer="words(SIZE, by=whitespace)", and labels without spaces'
            )
        return ids, labels

    def special_tokens(self, tokenizer: Tokenizer) -> int:
        return 0

    def is_cut(self, lengths: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
        return lengths[:, 0] > seq_len

    def row_lengths(self, lengths: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
        return super().row_lengths(lengths[:, :1], tokenizer, seq_len)

    def batch(
        self, examples: TokenisedExamples, numbers: Numbers, count: int, tokenizer: Tokenizer, seq_len: int
    ) -> Batch:
        number_of = self._numbers_by_id(tokenizer)
        rows = [examples.part(number, 0)[:seq_len] for number in numbers]
        parents = [
            preorder_parents(number_of[examples.part(number, 1)])[: len(row)]
            for number, row in zip(numbers, rows, strict=True)
        ]
        labels = example_labels(examples, numbers, count)
        batch = sequences(rows, count, seq_len, tokenizer.pad_id)
        parents = padded(parents, count, seq_len, -1)
        first = np.arange(count, dtype=np.int32)[:, None] * seq_len
        graph = tree_graph(np.where(parents >= 0, parents + first, -1).reshape(-1))
        by_tree = {"slots": graph.slot, "heights": graph.height, "arities": graph.arity}
        return {
            **batch,
            "parents": parents,
            **{name: array.reshape(count, seq_len) for name, array in by_tree.items()},
            "heights": np.where(batch["segment_ids"] > 0, graph.height.reshape(count, seq_len), -1).astype(np.int32),
            "labels": labels,
            "weights": example_weights(len(numbers), count),
        }

    def _numbers_by_id(self, tokenizer: Tokenizer) -> np.ndarray:
        """The number of children that each id stands for; -1 for ids that stand for none."""
        table = np.full(tokenizer.vocab_size, -1, np.int32)
        for number in range(self.max_children + 1):
            ids = tokenizer.encode(str(number).encode())
            if len(ids) == 1 and tokenizer.decode(ids) == str(number).encode():
                table[ids[0]] = number
        return table


def preorder(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """`(nodes in preorder, their numbers of children)` of a tree; `parents` are the parents of its nodes, -1 for the root.

    A node comes before its children, and children come in the order of their numbers.
    """
    children: list[list[int]] = [[] for _ in parents]
    roots = []
    for node, parent in enumerate(parents):
        (children[parent] if parent >= 0 else roots).append(node)
    order, pending = [], roots[::-1]
    while pending:
        order.append(pending.pop())
        pending.extend(reversed(children[order[-1]]))
    return order, [len(children[node]) for node in order]


def preorder_parents(counts: np.ndarray) -> np.ndarray:
    """Parents of the nodes of a tree in preorder, int32 [n], -1 for the root, from their numbers of children, integers [n].

    Raises InputError if a number is unknown (-1), or the numbers are not those of a tree.
    """
    parents = np.full(len(counts), -1, np.int32)
    path: list[list[int]] = []  # nodes that lack children, with the number that is missing
    for node, count in enumerate(counts.tolist()):
        if path:
            parents[node] = path[-1][0]
            path[-1][1] -= 1
            if not path[-1][1]:
                path.pop()
        if count < 0 or (node and parents[node] < 0):
            raise InputError(
                "the vocabulary lacks a number of children, or it is over data.max_children: raise that, or SIZE in "
                'data.tokenizer="words(SIZE, by=whitespace)"'
            )
        if count:
            path.append([node, count])
    return parents
