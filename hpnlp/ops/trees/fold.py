"""Executor of schedules: computes a cell at every node of a graph, children first, by one compiled program.

States are rows of one buffer. The backward pass visits the rows in reverse. It stores the cotangents of children by place, so
that a node gathers those of its parents and nothing is scattered; it reads the final buffer, so that no step keeps a copy; and
it stores operands and cotangents of the products with weights, whose gradients are one product each after the loop.

Shape letters: N nodes, R rows, W nodes of a chunk, A places for children, F and G features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.trees.schedule import Schedule, TreeBlock
from hpnlp.types import InputError

# (product, inputs `[W, ...]` or None, states of the children `[W, A, ...]`) -> states `[W, ...]`.
Cell = Callable[[Any, Any, Any], Any]
# Nodes beyond the chunks of one width that are computed in chunks of the next width, as a number of these.
SMALL_CHUNKS = 3


@array_op("N", inputs="N")
def fold_graph(
    cells: Sequence[Cell],
    weights: Mapping[str, Array],
    inputs: PyTree,
    schedule: Schedule,
    state: PyTree[jax.ShapeDtypeStruct],
    *,
    by_block: bool = False,
) -> Any:
    """Computes the states of all nodes of a graph.

    A cell is a function `cell(product, x, children)` of the inputs of W nodes, `[W, ...]`, and the states of their children,
    `[W, A, ...]`, which returns their states, `[W, ...]`. A is the number of places of the signature, 0 for nodes without
    children; the states of absent children are 0. Weights enter a cell by `product(name, a, bias=None)` only, which returns
    `a weights[name] + weights[bias]` in float32 for `a` of `[W, ..., F]`. A cell treats each node by itself.

    Args:
      cells: For each op of the graph, its cell.
      weights: Matrices `[F, G]` and biases `[G]` by name.
      inputs: A tree of arrays `[N, ...]`, the inputs of the nodes.
      schedule: Order of the nodes.
      state: A tree of `jax.ShapeDtypeStruct`, the state of a node. It is hashable, as named tuples are.
      by_block: `inputs` is a list with a tree for each block of the schedule, in the order of its rows (`block_rows`), or None
        for blocks whose cells read no inputs.

    Returns:
      A tree like `state` of arrays `[N, ...]`; 0 for padding. There are no second derivatives: the number of steps is data.

    Raises:
      InputError: The graph has an op without a cell, or `inputs` has another number of nodes than the schedule.

    Cost: as many cells as nodes, and those of incomplete chunks: at most one chunk of the last width for each height and
    signature, and SMALL_CHUNKS of it in place of wider ones. The backward pass computes elementwise operations twice, and each
    product once forward and twice backward. It keeps the results of products, but no states of intermediate steps.

    References:
      Looks et al. 2017, "Deep learning with dynamic computation graphs".
      Neubig et al. 2017, "On-the-fly operation batching in dynamic computation graphs".
    """
    if missing := {block.op for block in schedule.blocks} - set(range(len(cells))):
        raise InputError(f"the graph has the op {min(missing)}, and there are {len(cells)} cells: pass one for each op")
    program = _Program(tuple(cells), schedule.blocks, schedule.widths, state)
    arrays = {field: jnp.asarray(getattr(schedule, field)) for field in _ARRAYS}
    if not by_block:
        leaves, structure = jax.tree.flatten(inputs)
        rows = [block_rows(x, schedule) for x in leaves]
        inputs = [jax.tree.unflatten(structure, [x[i] for x in rows]) for i in range(len(schedule.blocks))]
    leaves, structure = jax.tree.flatten((dict(weights), inputs, arrays))
    weights, inputs, arrays = jax.tree.unflatten(structure, vary_alike(*leaves))
    states = _fold(program, weights, inputs, arrays)
    return jax.tree.map(lambda x: _to_nodes(x, arrays["node"], arrays["row"]), states)


_ARRAYS = ("node", "row", "children", "uses", "starts", "levels")


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product with weights in a cell: the names of its weights, and the shapes of operand and result without rows."""

    name: str
    bias: str | None
    operand: Any
    result: Any


@dataclasses.dataclass(frozen=True)
class _Program:
    """The static part of an evaluation; its fields are as in `fold_graph` and `Schedule`."""

    cells: tuple[Cell, ...]
    blocks: tuple[TreeBlock, ...]
    widths: tuple[int, ...]
    state: Any

    def empty_states(self, rows: int) -> Any:
        """States of all rows, 0."""
        return jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), self.state)

    def child_rows(self, arrays: Mapping[str, Array], index: int) -> Array:
        """`[rows, A]` rows of the children of a block."""
        block = self.blocks[index]
        flat = arrays["children"][block.place : block.place + block.rows * block.arity]
        return flat.reshape(block.rows, block.arity)

    def products(self, weights: Mapping[str, Array], inputs: Sequence[PyTree]) -> list[list[_Product]]:
        """The products of the cell of each block, in the order of their calls."""
        by_block = []
        for block, x in zip(self.blocks, inputs, strict=True):
            recorded: list[_Product] = []

            def record(name: str, a: Array, bias: str | None = None, recorded: list[_Product] = recorded) -> Array:
                z = _product(a, weights, name, bias)
                recorded.append(_Product(name, bias, _row(a), _row(z)))
                return z

            kids = jax.tree.map(lambda s, b=block: jnp.zeros((1, b.arity, *s.shape), s.dtype), self.state)
            jax.eval_shape(lambda x, kids, b=block, r=record: self.cells[b.op](r, x, kids), _slice(x, 0, 1), kids)
            by_block.append(recorded)
        return by_block


def _row(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _slice(tree: PyTree, start: Array | int, width: int) -> Any:
    """Rows of the arrays of a tree."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, width), tree)


def _update(tree: PyTree, rows: PyTree, start: Array | int) -> Any:
    """The arrays of a tree with other rows from `start` on."""
    return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), start, 0), tree, rows)


def _gather(tree: PyTree, index: Array) -> Any:
    return jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), tree)


def _dot(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)


def _product(a: Array, weights: Mapping[str, Array], name: str, bias: str | None) -> Array:
    """Float32 `a weights[name] + weights[bias]`."""
    matrix = weights[name]
    z = _dot(a.reshape(-1, a.shape[-1]), matrix.astype(a.dtype), 1, 0).reshape(*a.shape[:-1], matrix.shape[-1])
    return z if bias is None else z + weights[bias].astype(jnp.float32).reshape((1,) * (z.ndim - 1) + (-1,))


@jax.custom_vjp
def _known_product(a: Array, matrix: Array, z: Array) -> Array:
    """The result z of a product that has been computed before; the gradient of z is that of the result."""
    return z


def _known_product_forward(a: Array, matrix: Array, z: Array) -> tuple[Array, tuple[Array, Array]]:
    return z, (a, matrix)


def _known_product_backward(saved: tuple[Array, Array], dz: Array) -> tuple[Array, None, Array]:
    a, matrix = saved
    da = _dot(dz.reshape(-1, dz.shape[-1]).astype(a.dtype), matrix.astype(a.dtype), 1, 1)
    return da.astype(a.dtype).reshape(a.shape), None, dz


_known_product.defvjp(_known_product_forward, _known_product_backward)


def _chunks(
    first: Array | int,
    last: Array | int,
    widths: Sequence[int],
    body: Callable[[int, Any, Any], Any],
    carry: PyTree,
    *,
    from_end: bool,
) -> Any:
    """Runs `body(width, start, carry)` over chunks of the rows first to last - 1.

    The last chunk runs over the end of the rows; with `from_end`, chunks are counted from the end, and the last one runs over
    the beginning.
    """
    for width, smaller in zip(widths, (*widths[1:], 0), strict=True):
        count = last - first
        number = jnp.maximum((count + (width - 1 - SMALL_CHUNKS * smaller)) // width, 0)

        def chunk(
            i: Array | int, carry: PyTree, width: int = width, first: Array | int = first, last: Array | int = last
        ) -> Any:
            return body(width, last - (i + 1) * width if from_end else first + i * width, carry)

        carry = lax.fori_loop(jnp.int32(0), number, chunk, carry)
        first, last = (first, last - number * width) if from_end else (first + number * width, last)
    return carry


def _each_block(
    program: _Program, arrays: Mapping[str, Any], body: Callable[..., Any], carry: PyTree, *, reverse: bool
) -> Any:
    """Runs `body(index of a block, width, first row, carry)` over all chunks in the order of heights, or in reverse."""
    blocks = list(enumerate(program.blocks))

    def leaves(carry: PyTree) -> Any:
        for index, block in blocks:
            if block.arity == 0:
                carry = body(index, block.capacity, 0, carry)
        return carry

    def level(step: Array | int, carry: PyTree) -> Any:
        height = arrays["levels"] - 1 - step if reverse else step
        for index, block in reversed(blocks) if reverse else blocks:
            if block.arity:
                bounds = lax.dynamic_slice_in_dim(arrays["starts"][index], height, 2)
                run = functools.partial(body, index)
                carry = _chunks(bounds[0], bounds[1], program.widths, run, carry, from_end=reverse)
        return carry

    carry = carry if reverse else leaves(carry)
    if any(block.arity for block in program.blocks):
        carry = lax.fori_loop(jnp.int32(0), arrays["levels"], level, carry)
    return leaves(carry) if reverse else carry


def _forward(
    program: _Program, weights: Mapping[str, Array], inputs: Sequence[PyTree], arrays: Mapping[str, Any], keep: bool
) -> tuple[Any, Any]:
    """States of all rows; and, with `keep`, the results of the products of each block."""
    children = [program.child_rows(arrays, i) for i in range(len(program.blocks))]
    saved: list[list[Array]] = [[] for _ in program.blocks]
    if keep:
        for block, of_block, products in zip(program.blocks, saved, program.products(weights, inputs), strict=True):
            of_block += [jnp.zeros((block.rows, *p.result.shape), p.result.dtype) for p in products]

    def body(index: int, width: int, start: Array | int, carry: PyTree) -> Any:
        states, saved = carry
        block, results = program.blocks[index], []

        def product(name: str, a: Array, bias: str | None = None) -> Array:
            results.append(_product(a, weights, name, bias))
            return results[-1]

        kids = _gather(states, _slice(children[index], start, width))
        state = program.cells[block.op](product, _slice(inputs[index], start, width), kids)
        if keep:
            saved = [_update(s, results, start) if i == index else s for i, s in enumerate(saved)]
        return _update(states, state, start + block.row), saved

    return _each_block(program, arrays, body, (program.empty_states(arrays["node"].shape[0]), saved), reverse=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fold(program: _Program, weights: Mapping[str, Array], inputs: Sequence[PyTree], arrays: Mapping[str, Any]) -> Any:
    """States of all rows."""
    return _forward(program, weights, inputs, arrays, keep=False)[0]


@accepts_numpy
def _fold_forward(
    program: _Program, weights: Mapping[str, Array], inputs: Sequence[PyTree], arrays: Mapping[str, Any]
) -> tuple[Any, Any]:
    states, saved = _forward(program, weights, inputs, arrays, keep=True)
    return states, (weights, inputs, arrays, states, saved)


def _fold_backward(program: _Program, residuals: PyTree, d_states: PyTree) -> tuple[Any, Any, None]:
    weights, inputs, arrays, states, saved = residuals
    children = [program.child_rows(arrays, i) for i in range(len(program.blocks))]
    products = program.products(weights, inputs)
    empty = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
    by_place = jax.tree.map(lambda x: jnp.zeros((arrays["children"].shape[0], *x.shape), x.dtype), program.state)
    factors = [
        [tuple(jnp.zeros((block.rows, *x.shape), x.dtype) for x in (p.operand, p.result)) for p in of_block]
        for block, of_block in zip(program.blocks, products, strict=True)
    ]

    def body(index: int, width: int, start: Array | int, carry: PyTree) -> Any:
        d_inputs, by_place, factors = carry
        block = program.blocks[index]
        results = _slice(saved[index], start, width)

        def replay(x: PyTree, kids: PyTree, results: PyTree) -> tuple[Any, list[Array]]:
            operands: list[Array] = []

            def product(name: str, a: Array, bias: str | None = None) -> Array:
                operands.append(a)
                return _known_product(a, weights[name], results[len(operands) - 1])

            return program.cells[block.op](product, x, kids), operands

        kids = _gather(states, _slice(children[index], start, width))
        _, pull, operands = jax.vjp(replay, _slice(inputs[index], start, width), kids, results, has_aux=True)
        uses = _slice(arrays["uses"], start + block.row, width)
        above = _slice(d_states, start + block.row, width)
        cotangent = jax.tree.map(lambda d, g: d + g.sum(axis=1).astype(d.dtype), above, _gather(by_place, uses))
        dx, d_kids, d_results = pull(cotangent)
        if block.arity:
            flat = jax.tree.map(lambda d: d.reshape(-1, *d.shape[2:]), d_kids)
            by_place = _update(by_place, flat, block.place + start * block.arity)
        pairs = list(zip(operands, d_results, strict=True))
        factors = [_update(f, pairs, start) if i == index else f for i, f in enumerate(factors)]
        d_inputs = [_update(d, dx, start) if i == index else d for i, d in enumerate(d_inputs)]
        return d_inputs, by_place, factors

    d_inputs, _, factors = _each_block(program, arrays, body, (empty(inputs), by_place, factors), reverse=True)
    return _weight_gradients(program, weights, products, factors), d_inputs, None


def _weight_gradients(
    program: _Program,
    weights: Mapping[str, Array],
    products: list[list[_Product]],
    factors: list[list[tuple[Array, Array]]],
) -> Any:
    """Gradients of the weights, from the operands of all products and the cotangents of their results."""
    sums = {name: jnp.zeros(x.shape, jnp.float32) for name, x in weights.items()}
    for block, of_block, arrays in zip(program.blocks, products, factors, strict=True):
        for product, pair in zip(of_block, arrays, strict=True):
            a, dz = (x[block.margin : block.margin + block.capacity].reshape(-1, x.shape[-1]) for x in pair)
            if product.bias is not None:
                sums[product.bias] += dz.sum(axis=0)
            dz = dz.astype(a.dtype)
            sums[product.name] += _dot(dz, a, 0, 0).T if a.shape[1] > dz.shape[1] else _dot(a, dz, 0, 0)
    return {name: total.astype(weights[name].dtype) for name, total in sums.items()}


_fold.defvjp(_fold_forward, _fold_backward)


@array_op("", x="N")
def block_rows(x: Array, schedule: Schedule, blocks: Sequence[int] | None = None) -> list[Array]:
    """Rows of blocks of an array of nodes. The gradient is a gather, too.

    Args:
      x: `[N, ...]`.
      schedule: Order of the nodes.
      blocks: Indices of the blocks; None for all.

    Returns:
      `[rows, ...]` for each block; 0 for rows without a node.

    Raises:
      InputError: x has another number of nodes than the schedule.
    """
    if x.shape[:1] != schedule.row.shape:
        raise InputError(
            f"inputs {x.shape} for a schedule of {schedule.row.shape[0]} nodes: pass one row for each node of the graph"
        )
    chosen = tuple(range(len(schedule.blocks))) if blocks is None else tuple(blocks)
    return _block_rows(schedule.blocks, chosen, x, jnp.asarray(schedule.node), jnp.asarray(schedule.row))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _block_rows(
    blocks: tuple[TreeBlock, ...], chosen: tuple[int, ...], x: Array, node: Array, row: Array
) -> list[Array]:
    return [_taken(x, node[blocks[i].row : blocks[i].row + blocks[i].rows]) for i in chosen]


@accepts_numpy
def _block_rows_forward(
    blocks: tuple[TreeBlock, ...], chosen: tuple[int, ...], x: Array, node: Array, row: Array
) -> tuple[list[Array], Array]:
    return _block_rows(blocks, chosen, x, node, row), row


def _block_rows_backward(
    blocks: tuple[TreeBlock, ...], chosen: tuple[int, ...], row: Array, d_rows: list[Array]
) -> tuple[Array, None, None]:
    shape, dtype = d_rows[0].shape[1:], d_rows[0].dtype
    by_block = dict(zip(chosen, d_rows, strict=True))
    gradients = [by_block.get(i, jnp.zeros((block.rows, *shape), dtype)) for i, block in enumerate(blocks)]
    return _taken(jnp.concatenate([jnp.zeros((1, *shape), dtype), *gradients]), row), None, None


_block_rows.defvjp(_block_rows_forward, _block_rows_backward)


@jax.custom_vjp
def _to_nodes(x: Array, node: Array, row: Array) -> Array:
    """An array of rows in the order of the nodes; 0 for padding. The gradient is a gather, too."""
    return _taken(x, row)


def _to_nodes_forward(x: Array, node: Array, row: Array) -> tuple[Array, Array]:
    return _to_nodes(x, node, row), node


def _to_nodes_backward(node: Array, d: Array) -> tuple[Array, None, None]:
    return _taken(d, node), None, None


_to_nodes.defvjp(_to_nodes_forward, _to_nodes_backward)


def _taken(x: Array, index: Array) -> Array:
    """Elements of the first axis; 0 for indices out of bounds."""
    taken = x.at[jnp.clip(index, 0, x.shape[0] - 1)].get(mode="promise_in_bounds")
    exists = (index >= 0) & (index < x.shape[0])
    return jnp.where(exists.reshape(-1, *(1,) * (x.ndim - 1)), taken, jnp.zeros((), x.dtype))
