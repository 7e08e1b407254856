"""Calls of `hpnlp.ops.trees` for test_numpy.py."""

import jax
import numpy as np

from hpnlp.ops import trees
from hpnlp.ops.trees import fold

RNG = np.random.default_rng(0)
GRAPH = trees.tree_graph(np.array([-1, 0, 0, 1, 1, -1]))
SCHEDULE = trees.make_schedule(GRAPH, [(0, 0), (0, 2)])
X, W, B = RNG.standard_normal((6, 4)), RNG.standard_normal((4, 8)), RNG.standard_normal(8)
CHILD_SUM, BINARY = RNG.standard_normal((2, 8)), RNG.standard_normal((2, 2, 10))
STATE = jax.ShapeDtypeStruct((4,), "float32")


def total(product, x, children):
    return x + product("w", children.sum(axis=1), "b") if children.shape[1] else x


CALLS = {
    "trees.tree_lstm.child_sum_tree_lstm": (
        (lambda *a: trees.child_sum_tree_lstm(*a, SCHEDULE), (X, W, CHILD_SUM, B)),
    ),
    "trees.tree_lstm.nary_tree_lstm": (
        (lambda *a: trees.nary_tree_lstm(*a, SCHEDULE), (X, W, BINARY, B)),
        (lambda *a: trees.nary_tree_lstm(*a, SCHEDULE, inputs="leaves"), (X, W, BINARY, B)),
    ),
    "trees.reference.reference_tree_lstm": (
        (lambda *a: trees.reference_tree_lstm(*a, GRAPH), (X, W, CHILD_SUM, B)),
        (lambda *a: trees.reference_tree_lstm(*a, GRAPH), (X, W, BINARY, B)),
    ),
    "trees.fold.fold_graph": (
        (
            lambda x, w, b: trees.fold_graph((total,), {"w": w, "b": b}, x, SCHEDULE, STATE),
            (X, RNG.standard_normal((4, 4)), RNG.standard_normal(4)),
        ),
    ),
    "trees.fold.block_rows": ((lambda x: fold.block_rows(x, SCHEDULE), (X,)),),
}
# Functions that make graphs and schedules, and cells, which `fold_graph` calls.
ON_HOST = {
    *(f"trees.graphs.{name}" for name in ("tree_graph", "dag", "check_labels")),
    *(f"trees.schedule.{name}" for name in ("make_schedule", "signatures_of", "rounded")),
    *(f"trees.tree_lstm.{name}" for name in ("child_sum_cell", "nary_cell")),
}
