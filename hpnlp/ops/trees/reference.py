"""Tree-LSTMs computed node by node in Python: slow, and the specification of the batched form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.trees.graphs import Graph
from hpnlp.ops.trees.tree_lstm import TreeState


def reference_tree_lstm(x: Array, w: Array, u: Array, b: Array, graph: Graph) -> TreeState:
    """States of the nodes of a graph, one node after another, children first.

    Args:
      x: `[N, D]`, inputs of the nodes.
      w: `[D, G]`, as for `tree_lstm.child_sum_tree_lstm`; G = 4 H.
      u: `[H, 4H]` for the child-sum form; `[A, H, (3 + A) H]` for the N-ary form, see `tree_lstm.nary_tree_lstm`.
      b: `[G]`, biases.
      graph: The graph, in numpy arrays.

    Returns:
      The states of the nodes, float32.

    Cost: several operations of JAX for each node.
    """
    children: list[list[int]] = [[] for _ in graph.height]
    for edge in np.lexsort((graph.slot, graph.parent)).tolist():
        if graph.parent[edge] >= 0:
            children[graph.parent[edge]].append(int(graph.child[edge]))
    order = [node for node in np.argsort(graph.height, kind="stable").tolist() if graph.height[node] >= 0]
    return _states(x, w, u, b, children, order)


@array_op("N", x="N")
def _states(x: Array, w: Array, u: Array, b: Array, children: list[list[int]], order: list[int]) -> TreeState:
    """States of the nodes, computed in an order."""
    x, w, u, b = (array.astype(jnp.float32) for array in (x, w, u, b))
    states: dict[int, tuple[Array, Array]] = {}
    for node in order:
        of_node = [states[child] for child in children[node]]
        states[node] = (_child_sum if u.ndim == 2 else _nary)(x[node], w, u, b, of_node)
    zero = jnp.zeros(b.shape[0] // 4)
    h, c = zip(*(states.get(node, (zero, zero)) for node in range(len(children))), strict=True)
    return TreeState(jnp.stack(h), jnp.stack(c))


def _state(i: Array, o: Array, u: Array, kept: Array) -> tuple[Array, Array]:
    c = jax.nn.sigmoid(i) * jnp.tanh(u) + kept
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _child_sum(x: Array, w: Array, u: Array, b: Array, children: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Equations 2 to 8."""
    wi, wf, wo, wu = jnp.split(x @ w + b, 4)
    ui, uf, uo, uu = jnp.split(u, 4, axis=1)
    total = sum((h for h, _ in children), jnp.zeros(u.shape[0]))
    kept = sum((jax.nn.sigmoid(wf + h @ uf) * c for h, c in children), jnp.zeros(u.shape[0]))
    return _state(wi + total @ ui, wo + total @ uo, wu + total @ uu, kept)


def _nary(x: Array, w: Array, u: Array, b: Array, children: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Equations 9 to 14."""
    wi, wf, wo, wu = jnp.split(x @ w + b, 4)
    zero = jnp.zeros(u.shape[1])
    gates = sum((h @ u[slot] for slot, (h, _) in enumerate(children)), jnp.zeros(u.shape[2]))
    ui, uo, uu, *uf = jnp.split(gates, 3 + u.shape[0])
    kept = sum((jax.nn.sigmoid(wf + uf[slot]) * c for slot, (_, c) in enumerate(children)), zero)
    return _state(wi + ui, wo + uo, wu + uu, kept)
