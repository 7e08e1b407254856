"""Child-sum Tree-LSTM over batches of trees whose structure is data."""

from __future__ import annotations

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from hpnlp.nn.layers import dense_init, param
from hpnlp.ops.trees import Graph, Schedule, child_sum_tree_lstm, make_schedule


def batch_schedule(batch: Mapping[str, jax.Array], max_children: int) -> Schedule:
    """The schedule of a batch of trees, computed on the device.

    Args:
      batch: "parents", "slots", "heights" and "arities", int32 `[B, T]`, as `data.examples.kinds.trees.Trees` documents them.
      max_children: Largest number of children of a node.

    Returns:
      The schedule of the B T nodes, whose shapes depend on B, T and `max_children` only.

    Cost: a sort of B T integers.
    """
    parents = batch["parents"]
    (trees, length), count = parents.shape, parents.size
    first = jnp.arange(trees, dtype=jnp.int32)[:, None] * length
    graph = Graph(
        height=batch["heights"].reshape(-1),
        arity=batch["arities"].reshape(-1),
        op=jnp.zeros(count, jnp.int32),
        child=jnp.arange(count, dtype=jnp.int32),
        parent=jnp.where(parents >= 0, parents + first, -1).reshape(-1),
        slot=batch["slots"].reshape(-1),
        use=jnp.zeros(count, jnp.int32),
    )
    # Nodes with at least m children are at most an m-th of all, since every node has one parent.
    bounds = [0, *(arity for arity in (2, 8, 64) if arity < max_children), max(2, max_children)]
    capacities = [count, *(max(1, count // (bound + 1)) for bound in bounds[:-1])]
    signatures = [(0, bound) for bound in bounds]
    return make_schedule(graph, signatures, capacities=capacities, levels=length, uses=1)


class ChildSumTreeLSTM(nn.Module):
    """Child-sum Tree-LSTM. The bias of the forget gate is initialised to 1.

    Attributes:
      features: Features of a state, H.
    """

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "N D"], schedule: Schedule) -> Float[Array, "N H"]:
        """Hidden states of the nodes.

        Args:
          x: Inputs of the nodes.
          schedule: Order of the nodes.

        Returns:
          Hidden states, in the dtype of x.
        """
        size = 4 * self.features

        def bias(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            return jnp.zeros(shape, dtype).at[self.features : 2 * self.features].set(1.0)

        w = param(self, "kernel", dense_init, (x.shape[-1], size), ("embed", "hidden"))
        u = param(self, "children", dense_init, (self.features, size), ("embed", "hidden"))
        b = param(self, "bias", bias, (size,), ("hidden",))
        return child_sum_tree_lstm(x, w, u, b, schedule).h
