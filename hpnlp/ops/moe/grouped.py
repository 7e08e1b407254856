"""MLPs of experts over rows that are sorted by expert: loops over blocks of rows, with an explicit derivative."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from hpnlp.cost.flop_count import expected_iterations
from hpnlp.ops.helpers.checkpoint_names import HIDDEN
from hpnlp.ops.helpers.custom_vjp import vary_alike, zeros_alike
from hpnlp.ops.linear import product
from hpnlp.ops.moe.dispatch import sums_of_tokens, token_of_rows, tokens_of_rows
from hpnlp.ops.moe.routing import Routing
from hpnlp.ops.moe.schedule import Blocks, ExpertSchedule
from hpnlp.ops.weight import is_weight

Activation = Callable[[Array], Array]
# Stacks of an expert's matrices: "up" [E, D, F], "down" [E, F, D], and "gate" [E, D, F] of a gated MLP; arrays, or Weights
# with a leading axis.
Experts = dict[str, Any]


def grouped_mlp(
    x: Float[Array, "N D"], routing: Routing, experts: Experts, schedule: ExpertSchedule, activation: Activation
) -> Float[Array, "N D"]:
    """Applies to each token the MLPs of its experts, block by block, and adds up the results, multiplied by the gates.

    Only blocks that are in use are computed, so that the time does not depend on how evenly experts are chosen. A batched
    product would keep each of its products on one core, and gather the matrices of each block.

    Args:
      x: Tokens.
      routing: Their assignments to experts.
      experts: Matrices of all experts.
      schedule: Rows of the assignments, and their blocks.
      activation: Elementwise function of the first product; of the gate, where there is one.

    Returns:
      The sums; 0 for tokens without an expert.

    Weights have no derivative here.

    Cost: forward, 2 A D F FLOPs for each matrix; keeps A x F numbers for each of "up" and "gate".
    """
    names = tuple(sorted(experts))
    matrices = tuple(experts[name] for name in names)
    places = schedule, dataclasses.replace(routing, gates=None)
    if any(map(is_weight, matrices)):
        return _forward(activation, names, places, x, routing.gates, matrices)[0]
    arrays, structure = jax.tree.flatten((places, x, routing.gates, matrices))
    return _grouped(activation, names, *jax.tree.unflatten(structure, vary_alike(*arrays)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped(
    activation: Activation,
    names: tuple[str, ...],
    places: tuple[ExpertSchedule, Routing],
    x: jax.Array,
    gates: jax.Array,
    matrices: PyTree,
) -> jax.Array:
    return _forward(activation, names, places, x, gates, matrices)[0]


def _forward(
    activation: Activation,
    names: tuple[str, ...],
    places: tuple[ExpertSchedule, Routing],
    x: jax.Array,
    gates: jax.Array,
    matrices: PyTree,
) -> tuple[jax.Array, Any]:
    """`(sums, residuals)`: the first products of each row are kept for the derivative."""
    schedule, routing = places
    experts = dict(zip(names, matrices, strict=True))
    first = [name for name in names if name != "down"]
    token, rows = _padded(token_of_rows(routing, schedule.source, x.shape[0]), schedule, x.shape[0])

    def step(block: GroupBlock, carry: Any) -> Any:
        results, kept = carry
        inputs = block.take(x, token)
        products = {name: block.product(inputs, experts[name]) for name in first}
        kept = {name: block.write(kept[name], products[name]) for name in first}
        result = block.product(hidden_columns(activation, products), experts["down"])
        return block.write(results, result), kept

    width = experts["up"].shape[-1]
    start = zeros_alike(x, (rows, x.shape[1]), x.dtype), {n: zeros_alike(x, (rows, width), x.dtype) for n in first}
    results, kept = _loop(step, schedule.blocks, start)
    y = tokens_of_rows(results, dataclasses.replace(routing, gates=gates), schedule.row, x.shape[0])
    # The gates' derivative needs the results, so that the loops run again unless these are kept with the products.
    y, results, kept = checkpoint_name((y, results, kept), HIDDEN)
    return y, (places, x, gates, matrices, results, kept)


def _backward(activation: Activation, names: tuple[str, ...], residuals: PyTree, dy: jax.Array) -> Any:
    """A pass for "down" and one for the other matrices, so that not all gradients need memory beside the products."""
    (schedule, routing), x, gates, matrices, results, kept = residuals
    experts = dict(zip(names, matrices, strict=True))
    token, rows = _padded(token_of_rows(routing, schedule.source, x.shape[0]), schedule, x.shape[0])
    gate_of_row, _ = _padded(gates.at[schedule.source].get(mode="fill", fill_value=0), schedule, 0)

    def sums(gates: jax.Array) -> jax.Array:
        return tokens_of_rows(results, dataclasses.replace(routing, gates=gates), schedule.row, x.shape[0])

    def down(block: GroupBlock, carry: Any) -> Any:
        d_products, gradient = carry
        d_rows, gate = block.take(dy, token), block.rows(gate_of_row)[:, None]
        products = {name: block.rows(kept[name]) for name in kept}
        hidden, pull = jax.vjp(functools.partial(hidden_columns, activation), products)
        d_hidden = (d_rows @ block.matrix(experts["down"]).astype(x.dtype).T).astype(jnp.float32)
        (changes,) = pull((gate * d_hidden).astype(x.dtype))
        hidden = (gate * hidden.astype(jnp.float32)).astype(x.dtype)
        gradient = block.add(gradient, _float32_product(_transposed(hidden), d_rows))
        d_products = {name: block.write(d_products[name], changes[name]) for name in kept}
        return d_products, gradient

    def first(block: GroupBlock, carry: Any) -> Any:
        dx, gradients = carry
        inputs, d_input = _transposed(block.take(x, token)), jnp.zeros((), x.dtype)
        gradients = dict(gradients)
        for name in kept:
            d_product = block.rows(d_products[name])
            gradients[name] = block.add(gradients[name], _float32_product(inputs, d_product))
            d_input = d_input + d_product @ block.matrix(experts[name]).astype(x.dtype).T
        return block.write(dx, d_input), gradients

    start = {name: jnp.zeros_like(kept[name]) for name in kept}, zeros_alike(dy, experts["down"].shape, jnp.float32)
    d_products, d_down = _loop(down, schedule.blocks, start)
    # Zeros that XLA cannot make before the end of the first loop, while their memory is in use.
    zero = (d_products["up"][0, 0] > jnp.inf).astype(jnp.float32)
    start = zeros_alike(dy, (rows, x.shape[1]), x.dtype), {n: jnp.full(experts[n].shape, zero) for n in kept}
    dx, gradients = _loop(first, schedule.blocks, start)
    gradients["down"] = d_down
    rows_of_token = schedule.row.reshape(x.shape[0], -1) if routing.tokens is None else None
    dx = sums_of_tokens(dx, rows_of_token, token, x.shape[0]).astype(x.dtype)
    (d_gates,) = jax.vjp(sums, gates)[1](dy)
    return None, dx, d_gates, tuple(gradients[name].astype(experts[name].dtype) for name in names)


_grouped.defvjp(_forward, _backward)


def _padded(values: jax.Array, schedule: ExpertSchedule, value: Any) -> tuple[jax.Array, Any]:
    """`(values of rows and of padding behind the last row, number of both)`, so that no slice of a block is moved."""
    if (size := schedule.blocks[-1].size) > 1:
        values = jnp.concatenate([values, jnp.full(size, value, values.dtype)])
    return values, values.shape[0]


class GroupBlock:
    """One block of a loop: its rows, and the matrices of its expert."""

    def __init__(self, group: Blocks, index: jax.Array) -> None:
        self.expert, self.start, self.size = group.experts[index], group.starts[index], group.size
        self.is_first = group.is_first
        self.is_row = jnp.arange(group.size, dtype=jnp.int32) < group.rows[index]

    def rows(self, x: jax.Array) -> jax.Array:
        """The rows of the block, and 0 behind them."""
        return self._select(
            lax.dynamic_slice_in_dim(x, self.start, self.size, allow_negative_indices=False), jnp.zeros((), x.dtype)
        )

    def take(self, x: jax.Array, token: jax.Array) -> jax.Array:
        """The tokens of the block's rows, and 0 behind them."""
        index = lax.dynamic_slice_in_dim(token, self.start, self.size, allow_negative_indices=False)
        if self.size == 1:
            return lax.dynamic_slice_in_dim(x, index[0], 1, allow_negative_indices=False)
        return jnp.take(x, self._select(index, jnp.int32(x.shape[0])), axis=0, mode="fill", fill_value=0)

    def write(self, target: jax.Array, rows: jax.Array) -> jax.Array:
        """Replaces the rows of the block."""
        rows = self._select(rows, lax.dynamic_slice_in_dim(target, self.start, self.size, allow_negative_indices=False))
        return lax.dynamic_update_slice_in_dim(target, rows, self.start, 0, allow_negative_indices=False)

    def _select(self, rows: jax.Array, other: jax.Array) -> jax.Array:
        if self.size == 1:  # no block is empty
            return rows
        is_row = self.is_row.reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.where(is_row, rows, other)

    def matrix(self, stack: PyTree) -> Any:
        """The matrix of the block's expert, an array or a Weight."""
        return jax.tree.map(lambda array: self._stacked_matrix(array)[0], stack)

    def _stacked_matrix(self, stack: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(stack, self.expert, 1, allow_negative_indices=False)

    def product(self, rows: jax.Array, stack: PyTree) -> jax.Array:
        """Rows times the matrix of the block's expert, in the dtype of the rows."""
        matrix = self.matrix(stack)
        return product(rows, matrix).astype(rows.dtype) if is_weight(matrix) else rows @ matrix.astype(rows.dtype)

    def add(self, stack: jax.Array, change: jax.Array) -> jax.Array:
        """Adds to the matrix of the block's expert."""
        change = change[None] if self.is_first else self._stacked_matrix(stack) + change[None]
        return lax.dynamic_update_slice_in_dim(stack, change, self.expert, 0, allow_negative_indices=False)


def _loop(step: Callable[[GroupBlock, Any], Any], blocks: tuple[Blocks, ...], carry: Any) -> Any:
    """Runs a step for each block in use."""
    for group in blocks:

        def body(index: jax.Array, carry: Any, group: Blocks = group) -> Any:
            return step(GroupBlock(group, index), carry)

        with expected_iterations(group.expected):
            carry = lax.fori_loop(jnp.int32(0), group.used, body, carry)
    return carry


def hidden_columns(activation: Activation, products: dict[str, jax.Array]) -> jax.Array:
    """The columns that "down" multiplies.

    Args:
      activation: Elementwise function.
      products: The products of "up" and, in gated MLPs, "gate".

    Returns:
      The activated product, or the product times the activated gate.
    """
    return activation(products["gate"]) * products["up"] if "gate" in products else activation(products["up"])


def _transposed(x: jax.Array) -> jax.Array:
    """A transposed copy: XLA's product of a CPU with a matrix that is only read in another order takes 1.3 times as long."""
    return lax.optimization_barrier(x.T)


def _float32_product(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
