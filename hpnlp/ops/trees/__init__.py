"""Recursive networks over trees and directed acyclic graphs, batched by height and signature.

`tree_graph` or `dag` checks nodes and edges, `make_schedule` orders the nodes, and an operation such as
`child_sum_tree_lstm`, or `fold_graph` with cells of your own, computes all of them by one compiled program.
"""

from hpnlp.ops.trees.fold import fold_graph
from hpnlp.ops.trees.graphs import Graph, check_labels, dag, tree_graph
from hpnlp.ops.trees.reference import reference_tree_lstm
from hpnlp.ops.trees.schedule import Schedule, make_schedule, signatures_of
from hpnlp.ops.trees.tree_lstm import TreeState, child_sum_tree_lstm, nary_tree_lstm

__all__ = [
    "Graph", "Schedule", "TreeState", "check_labels", "child_sum_tree_lstm", "dag", "fold_graph", "make_schedule",
    "nary_tree_lstm", "reference_tree_lstm", "signatures_of", "tree_graph",
]  # fmt: skip
