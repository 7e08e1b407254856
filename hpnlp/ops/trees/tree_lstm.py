"""Tree-LSTMs (Tai et al. 2015): child-sum for any number of children, and N-ary for ordered children.

Gates are in the order i, f, o, u: input, forget, output, update. Shape letters: N nodes, D input features, H features of a
state, A places for children, G = 4 H gates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.linear import linear
from hpnlp.ops.trees.fold import block_rows, fold_graph
from hpnlp.ops.trees.schedule import Schedule
from hpnlp.types import InputError


class TreeState(NamedTuple):
    """State of nodes.

    Attributes:
      h: Hidden states `[N, H]`, in the dtype of the inputs.
      c: Memory cells `[N, H]`, float32.
    """

    h: Any
    c: Any


def _state(features: int, dtype: DTypeLike) -> TreeState:
    return TreeState(jax.ShapeDtypeStruct((features,), dtype), jax.ShapeDtypeStruct((features,), jnp.float32))


def _next_state(i: Array, o: Array, u: Array, kept: Array | None, dtype: DTypeLike) -> TreeState:
    """The state from gates before their activations, and the sum of the children's memory cells that is kept."""
    c = jax.nn.sigmoid(i) * jnp.tanh(u)
    c = c if kept is None else c + kept
    return TreeState((jax.nn.sigmoid(o) * jnp.tanh(c)).astype(dtype), c)


def child_sum_cell(product: Callable[..., Array], x: Array, children: TreeState) -> TreeState:
    """Cell of the child-sum Tree-LSTM, for `fold_graph` with weights "gates" `[H, 3H]` (i, o, u) and "forget" `[H, H]`.

    Args:
      product: As `fold_graph` passes it.
      x: `[W, 4H]`, input part of the gates with their biases.
      children: States of the children, `[W, A, H]`.

    Returns:
      The states.
    """
    i, f, o, u = jnp.split(x.astype(jnp.float32), 4, axis=-1)
    h, c = children
    if h.shape[1] == 0:
        return _next_state(i, o, u, None, h.dtype)
    total = h.astype(jnp.float32).sum(axis=1).astype(h.dtype)
    gates = jnp.split(product("gates", total), 3, axis=-1)
    forget = jax.nn.sigmoid(f[:, None] + product("forget", h))
    return _next_state(i + gates[0], o + gates[1], u + gates[2], (forget * c).sum(axis=1), h.dtype)


def nary_cell(product: Callable[..., Array], x: Array | None, children: TreeState) -> TreeState:
    """Cell of the N-ary Tree-LSTM, for `fold_graph` with weights "gates" `[A H, (3 + A) H]` (i, o, u, f_1, ..., f_A).

    Args:
      product: As `fold_graph` passes it.
      x: `[W, 4H]`, input part of the gates with their biases; None for nodes without an input, for which the bias is "bias"
        `[(3 + A) H]`.
      children: States of the children, `[W, A, H]`.

    Returns:
      The states.
    """
    h, c = children
    width, places, features = h.shape
    inputs = [jnp.float32(0)] * 4 if x is None else jnp.split(x.astype(jnp.float32), 4, axis=-1)
    i, f, o, u = inputs
    if places == 0:
        return _next_state(i, o, u, None, h.dtype)
    z = product("gates", h.reshape(width, places * features), "bias" if x is None else None)
    gates = jnp.split(z[:, : 3 * features], 3, axis=-1)
    forget = z[:, 3 * features :].reshape(width, places, features)
    forget = jax.nn.sigmoid(forget if x is None else forget + f[:, None])
    return _next_state(i + gates[0], o + gates[1], u + gates[2], (forget * c).sum(axis=1), h.dtype)


@array_op("N", x="N")
def child_sum_tree_lstm(
    x: Float[Array, "N D"], w: Float[Array, "D G"], u: Float[Array, "H G"], b: Float[Array, " G"], schedule: Schedule
) -> TreeState:
    """Child-sum Tree-LSTM (Tai et al. 2015, eq. 2 to 8) of every node of a graph.

    With the sum s of the children's h: `i = sigmoid(x W_i + s U_i + b_i)`, o and, with tanh, u likewise;
    `f_k = sigmoid(x W_f + h_k U_f + b_f)` for each child k; `c = i u + sum_k f_k c_k`, `h = o tanh(c)`.

    Args:
      x: Inputs of the nodes.
      w: Weights of the inputs.
      u: Weights of the children.
      b: Biases.
      schedule: Order of the nodes, from `make_schedule`.

    Returns:
      The states of the nodes; 0 for padding.

    Raises:
      InputError: Shapes that do not fit.

    Cost: 4 D H multiplications for each node, and H^2 for each place for a child and 3 H^2 for each node with children.
    """
    features = u.shape[0]
    _check("u", u, (features, 4 * features))
    _check("w", w, (x.shape[-1], 4 * features))
    _check("b", b, (4 * features,))
    gates = jnp.concatenate([u[:, :features], u[:, 2 * features :]], axis=1)
    weights = {"gates": gates, "forget": u[:, features : 2 * features]}
    return fold_graph((child_sum_cell,), weights, linear(x, w, b), schedule, _state(features, x.dtype))


@array_op("N", x="N")
def nary_tree_lstm(
    x: Float[Array, "N D"],
    w: Float[Array, "D G"],
    u: Float[Array, "A H F"],
    b: Float[Array, " G"],
    schedule: Schedule,
    *,
    inputs: str = "all",
) -> TreeState:
    """N-ary Tree-LSTM (Tai et al. 2015, eq. 9 to 14) of every node of a graph; the binary one for A = 2.

    `i = sigmoid(x W_i + sum_l h_l U_l,i + b_i)`, o and, with tanh, u likewise; for each child k
    `f_k = sigmoid(x W_f + sum_l h_l U_l,k + b_f)`; `c = i u + sum_k f_k c_k`, `h = o tanh(c)`. An absent child counts as 0.

    Args:
      x: Inputs of the nodes.
      w: Weights of the inputs.
      u: Weights of the children, F = (3 + A) H: for each child those of i, o, u, f_1, ..., f_A.
      b: Biases, in the order i, f, o, u.
      schedule: Order of the nodes, whose signatures have the places 0 and A.
      inputs: "all"; or "leaves" if x counts for nodes without children only, as for constituents, whose products with W are
        then left out.

    Returns:
      The states of the nodes; 0 for padding.

    Raises:
      InputError: Shapes that do not fit, or `inputs` is unknown.

    Cost: 4 D H multiplications for each node (with "leaves", only those), and A (3 + A) H^2 for each node with children.
    """
    places, features = u.shape[:2]
    _check("u", u, (places, features, (3 + places) * features))
    _check("w", w, (x.shape[-1], 4 * features))
    _check("b", b, (4 * features,))
    if inputs not in ("all", "leaves"):
        raise InputError(f"inputs={inputs!r}: expected 'all' or 'leaves'")
    if wrong := {block.arity for block in schedule.blocks} - {0, places}:
        raise InputError(
            f"schedule: a signature has {min(wrong)} places for children, and u is for {places}: pass signatures=((0, 0), "
            f"(0, {places})) to make_schedule"
        )
    weights = {"gates": u.reshape(places * features, -1)}
    if inputs == "all":
        return fold_graph((nary_cell,), weights, linear(x, w, b), schedule, _state(features, x.dtype))
    i, f, o, update = jnp.split(b, 4)
    weights["bias"] = jnp.concatenate([i, o, update, *[f] * places])
    leaves = [i for i, block in enumerate(schedule.blocks) if block.arity == 0]
    rows = dict(zip(leaves, block_rows(x, schedule, leaves), strict=True))
    by_block = [linear(rows[i], w, b) if i in rows else None for i in range(len(schedule.blocks))]
    return fold_graph((nary_cell,), weights, by_block, schedule, _state(features, x.dtype), by_block=True)


def _check(name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Raises InputError for an array of another shape."""
    if array.shape != shape:
        raise InputError(f"{name} {array.shape}: expected {shape}: pass weights of the same sizes")
