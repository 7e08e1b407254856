"""Trees: syntax trees of functions, arrays of a batch, and records that are no trees."""

import ast
import json

import numpy as np
import pytest

from hpnlp.data.examples import TreesConfig, prepare_examples
from hpnlp.data.examples.generated import standard_library, syntax_trees
from hpnlp.data.examples.kinds.trees import preorder, preorder_parents
from hpnlp.types import InputError
from tests.messages import raises

CODE = "def f(a, *b):\n    if a.size > 10 and g(1, None):\n        return {'x': a}"


def shape(nodes, parents):
    """A tree as nested lists."""
    trees = [[label] for label in nodes]
    for node, parent in enumerate(parents):
        if parent >= 0:
            trees[parent].append(trees[node])
    return trees[0]


def test_syntax_trees_have_names_operators_and_constants_as_leaves():
    nodes, parents = syntax_trees.flat(syntax_trees.node_tree(ast.parse(CODE).body[0]))
    arguments = ["arguments", ["arg", ["a"]], ["arg", ["b"]]]
    compare = ["Compare", ["Attribute", ["a"], ["size"]], ["Gt"], ["int"]]
    test = ["BoolOp", ["And"], compare, ["Call", ["g"], ["1"], ["None"]]]
    assert shape(nodes, parents) == [
        "FunctionDef",
        ["f"],
        arguments,
        ["If", test, ["Return", ["Dict", ["str"], ["a"]]]],
    ]
    assert all(parent < node for node, parent in enumerate(parents)) and parents[0] == -1


@pytest.mark.parametrize("count", [8, 9, 70])
def test_many_children_are_grouped(count):
    nodes, parents = syntax_trees.flat(syntax_trees.node_tree(ast.parse(f"[{', '.join('x' * count)}]").body[0]))
    counts = np.bincount(np.array(parents[1:]), minlength=len(nodes))
    assert counts.max() <= syntax_trees.MAX_CHILDREN and nodes.count("x") == count
    assert (syntax_trees.GROUP in nodes) == (count > 8)


def test_trees_are_those_of_the_functions(monkeypatch):
    monkeypatch.setattr(
        standard_library, "functions", lambda files: iter([{"text": CODE, "label": "web", "group": "web/m.py"}])
    )
    (record,) = syntax_trees.functions(())
    assert record["nodes"][:3] == ["FunctionDef", "f", "arguments"] and len(record["parents"]) == len(record["nodes"])
    assert (record["label"], record["group"]) == ("web", "web/m.py")


def test_preorder_is_read_back():
    parents = [2, 2, 4, 4, -1, 2]
    order, counts = preorder(parents)
    assert order == [4, 2, 0, 1, 5, 3] and counts == [2, 3, 0, 0, 0, 0]
    assert [order[p] if p >= 0 else -1 for p in preorder_parents(np.array(counts))] == [parents[n] for n in order]


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


ROWS = [
    {"nodes": ["b", "x", "a", "y"], "parents": [2, 0, -1, 2], "label": "one"},
    {"nodes": "a x y", "parents": "-1 0 0", "label": "two"},
    {"nodes": ["y"], "parents": [-1], "label": "one"},
]


def config(tmp_path, rows=ROWS, heldout=ROWS, **fields):
    paths = {"path": write(tmp_path / "train.jsonl", rows), "heldout_path": write(tmp_path / "held.jsonl", heldout)}
    return TreesConfig(**paths, **{"tokenizer": "words(40, by=whitespace)", "seq_len": 5, "max_children": 3} | fields)


def test_batches_have_the_structure_of_trees(tmp_path):
    examples = prepare_examples(config(tmp_path))
    batch = next(examples.heldout(batch_size=4))
    texts = [examples.tokenizer.decode(row[row > 0]).decode() for row in batch["tokens"]]
    assert texts == ["a b x y", "a x y", "y", ""]
    structure = {
        "segment_ids": [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0] * 5],
        "parents": [[-1, 0, 1, 0, -1], [-1, 0, 0, -1, -1], [-1] * 5, [-1] * 5],
        "slots": [[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0] * 5, [0] * 5],
        "heights": [[2, 1, 0, 0, -1], [1, 0, 0, -1, -1], [0, -1, -1, -1, -1], [-1] * 5],
        "arities": [[2, 1, 0, 0, 0], [2, 0, 0, 0, 0], [0] * 5, [0] * 5],
    }
    for name, expected in structure.items():
        assert batch[name].tolist() == expected and batch[name].dtype == np.int32, name
    assert batch["weights"].tolist() == [1, 1, 1, 0]
    assert [examples.labels[label] for label in batch["labels"][:3]] == ["one", "two", "one"]


def test_large_trees_keep_their_first_nodes(tmp_path):
    examples = prepare_examples(config(tmp_path, seq_len=2))
    batch = next(examples.heldout(batch_size=3))
    assert batch["parents"].tolist() == [[-1, 0], [-1, 0], [-1, -1]]
    assert batch["arities"].tolist() == [[1, 0], [1, 0], [0, 0]]
    assert "4 examples cut, at data.seq_len=2" in examples.summary


def test_records_that_are_no_trees_raise(tmp_path):
    for row, message in (
        ({"parents": [1, 0]}, r"line 1: field 'parents': node 0 is its own descendant \(children: 0 -> 1 -> 0\)"),
        ({"parents": [-1]}, "field 'nodes' has 2 nodes and field 'parents' 1 parents, expected as many"),
        ({"parents": ["-1", "x"]}, "field 'parents': node 1 has the parent 'x', expected the number of a node"),
        ({"parents": [-1, -1]}, "field 'parents': 2 nodes have the parent -1, expected one, the root"),
        ({"nodes": list("abcde"), "parents": [-1, 0, 0, 0, 0]}, r"node 0 \('a'\) has 4 children"),
        ({"nodes": ["a b", "c"]}, "has 2 nodes with 3 tokens, expected one token for each node"),
    ):
        with pytest.raises(InputError, match=message):
            prepare_examples(config(tmp_path, [{"nodes": ["a", "b"], "parents": [-1, 0], "label": "one"} | row, *ROWS]))


def test_unknown_numbers_of_children_raise():
    raises("the vocabulary lacks a number of children", preorder_parents, np.array([-1, 0]))
