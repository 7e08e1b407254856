"""MLPs of experts over rows that are sorted by expert: loops over blocks of rows, with an explicit derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from hpnlp.flop_count import expected_iterations
from hpnlp.ops.custom_vjp import vary_alike, zeros_alike
from hpnlp.ops.linear import product
from hpnlp.ops.moe.schedule import Blocks
from hpnlp.ops.weight import is_weight

HIDDEN = "hidden"  # name of the products of experts for `jax.checkpoint` policies
Activation = Callable[[Array], Array]
# Stacks of an expert's matrices: "up" [E, D, F], "down" [E, F, D], and "gate" [E, D, F] of a gated MLP; arrays, or Weights
# with a leading axis.
Experts = dict[str, Any]


def grouped_mlp(
    x: Float[Array, "R D"], experts: Experts, blocks: tuple[Blocks, ...], activation: Activation
) -> Float[Array, "R D"]:
    """Applies to each block of rows the MLP of its expert.

    Only blocks that are in use are computed, so that the time does not depend on how evenly experts are chosen. A batched
    product would keep each of its products on one core, and gather the matrices of each block.

    Args:
      x: Rows.
      experts: Matrices of all experts.
      blocks: Blocks that cover the rows to compute.
      activation: Elementwise function of the first product; of the gate, where there is one.

    Returns:
      The results; 0 in rows outside of the blocks in use.

    Weights have no derivative here.

    Cost: forward, 2 R D F FLOPs for each matrix; keeps R x F numbers for each of "up" and "gate".
    """
    names = tuple(sorted(experts))
    if any(map(is_weight, experts.values())):
        return _forward(activation, names, blocks, x, tuple(experts[name] for name in names))[0]
    leaves = [blocks, x, *(experts[name] for name in names)]
    arrays, structure = jax.tree.flatten(leaves)
    blocks, x, *matrices = jax.tree.unflatten(structure, vary_alike(*arrays))
    return _grouped(activation, names, blocks, x, tuple(matrices))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped(activation: Activation, names: tuple[str, ...], blocks: Any, x: jax.Array, matrices: Any) -> jax.Array:
    return _forward(activation, names, blocks, x, matrices)[0]


def _forward(
    activation: Activation, names: tuple[str, ...], blocks: tuple[Blocks, ...], x: jax.Array, matrices: Any
) -> tuple[jax.Array, Any]:
    """`(results, residuals)`: the first products of each row are kept for the derivative."""
    experts = dict(zip(names, matrices, strict=True))
    first = [name for name in names if name != "down"]
    width = experts["up"].shape[-1]

    def step(block: Block, carry: Any) -> Any:
        y, kept = carry
        rows = block.rows(x)
        products = {name: block.product(rows, experts[name]) for name in first}
        kept = {name: block.write(kept[name], products[name]) for name in first}
        result = block.product(hidden_columns(activation, products), experts["down"])
        return block.write(y, result), kept

    start = zeros_alike(x, x.shape, x.dtype), {name: zeros_alike(x, (x.shape[0], width), x.dtype) for name in first}
    # The gates' derivative needs the results, so that the loops run again unless these are kept with the products.
    y, kept = checkpoint_name(_loop(step, blocks, start), HIDDEN)
    return y, (blocks, x, matrices, kept)


def _backward(activation: Activation, names: tuple[str, ...], residuals: Any, dy: jax.Array) -> Any:
    blocks, x, matrices, kept = residuals
    experts = dict(zip(names, matrices, strict=True))

    def step(block: Block, carry: Any) -> Any:
        dx, gradients = carry
        rows, d_rows = block.rows(x), block.rows(dy)
        products = {name: block.rows(kept[name]) for name in kept}
        hidden, pull = jax.vjp(functools.partial(hidden_columns, activation), products)
        (d_products,) = pull(d_rows @ block.matrix(experts["down"]).astype(x.dtype).T)
        gradients = dict(gradients)
        gradients["down"] = block.add(gradients["down"], _outer(hidden, d_rows))
        d_input = jnp.zeros((), x.dtype)
        for name, d_product in d_products.items():
            gradients[name] = block.add(gradients[name], _outer(rows, d_product))
            d_input = d_input + d_product @ block.matrix(experts[name]).astype(x.dtype).T
        return block.write(dx, d_input), gradients

    start = (
        zeros_alike(dy, x.shape, x.dtype),
        {name: zeros_alike(dy, w.shape, jnp.float32) for name, w in experts.items()},
    )
    dx, gradients = _loop(step, blocks, start)
    return None, dx, tuple(gradients[name].astype(w.dtype) for name, w in experts.items())


_grouped.defvjp(_forward, _backward)


class Block:
    """One block of a loop: its rows, and the matrices of its expert."""

    def __init__(self, expert: jax.Array, start: jax.Array, size: int) -> None:
        self.expert, self.start, self.size = expert, start, size

    def rows(self, x: jax.Array) -> jax.Array:
        """The rows of the block."""
        return lax.dynamic_slice_in_dim(x, self.start, self.size)

    def write(self, target: jax.Array, rows: jax.Array) -> jax.Array:
        """Replaces the rows of the block."""
        return lax.dynamic_update_slice_in_dim(target, rows, self.start, 0)

    def matrix(self, stack: Any) -> Any:
        """The matrix of the block's expert, an array or a Weight."""
        return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, self.expert, keepdims=False), stack)

    def product(self, rows: jax.Array, stack: Any) -> jax.Array:
        """Rows times the matrix of the block's expert, in the dtype of the rows."""
        matrix = self.matrix(stack)
        return product(rows, matrix).astype(rows.dtype) if is_weight(matrix) else rows @ matrix.astype(rows.dtype)

    def add(self, stack: jax.Array, change: jax.Array) -> jax.Array:
        """Adds to the matrix of the block's expert."""
        return lax.dynamic_update_index_in_dim(stack, self.matrix(stack) + change, self.expert, 0)


def _loop(step: Callable[[Block, Any], Any], blocks: tuple[Blocks, ...], carry: Any) -> Any:
    """Runs a step for each block in use."""
    for group in blocks:

        def body(index: jax.Array, carry: Any, group: Blocks = group) -> Any:
            return step(Block(group.experts[index], group.starts[index], group.size), carry)

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


def _outer(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x^T y` in float32."""
    return lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
