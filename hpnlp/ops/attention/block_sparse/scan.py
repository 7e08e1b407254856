"""The scan form of the executor, for long sequences: loops over the steps of a schedule, in tiles that fit the caches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from hpnlp.ops.attention.block_sparse import tile
from hpnlp.ops.attention.block_sparse.array_blocks import (
    add_key_blocks,
    from_blocks,
    put_run,
    take_key_blocks,
    take_run,
    to_blocks,
    zeros,
)
from hpnlp.ops.attention.block_sparse.bias_tiles import BiasTiles
from hpnlp.ops.attention.block_sparse.chunks import Chunk, ChunkGrid, chunk_grid
from hpnlp.ops.attention.block_sparse.operands import ExecutorOperands, Options
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule
from hpnlp.ops.attention.block_sparse.steps import GroupSteps, TileMasks, residual_blocks
from hpnlp.ops.attention.block_sparse.tile import QueryResiduals
from hpnlp.ops.attention.pair_bias import is_pair_bias
from hpnlp.ops.helpers.custom_vjp import tied, vary_alike


def forward(
    options: Options, q: Array, k: Array, v: Array, operands: ExecutorOperands, schedule: BlockSchedule
) -> tuple[Array, Array, Array]:
    """Attention over the tiles of a schedule.

    Args:
      options: Static settings of the executor.
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv].
      operands: Run-time operands of the executor.
      schedule: The tiles; pairs outside of them are not visible.

    Returns:
      float32 (o [B, T, N, Hv], lse [B, T, N], lse_low [B, T, N]).
    """
    call = _make_call(options, q, k, v, operands, schedule)
    start = zeros(*q.shape[:3], v.shape[3]), zeros(*q.shape[:3]), zeros(*q.shape[:3])
    start = vary_alike(*start, q)[:3]
    add_chunk, numbers = functools.partial(_forward_chunk, call, q), call.chunks.numbers(q)
    return (add_chunk(start, None) if numbers is None else lax.scan(add_chunk, start, numbers))[0]


def backward(
    options: Options,
    residuals: QueryResiduals,
    k: Array,
    v: Array,
    operands: ExecutorOperands,
    schedule: BlockSchedule,
) -> tuple[Array, Array, Array, Any]:
    """Gradients of `forward`.

    Args:
      options: Static settings of the executor.
      residuals: Residuals of the queries, [B, T, N, ...].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv].
      operands: Run-time operands of the executor.
      schedule: As for `forward`.

    Returns:
      float32 (dq, dk, dv) in the shapes of q, k and v, and the gradient of operands.bias.
    """
    q = residuals.q
    call = _make_call(options, q, k, v, operands, schedule)
    bias = call.bias
    db = jax.tree.map(lambda x: zeros(*x.shape), operands.bias) if bias is None else bias.zeros()
    leaves, tree = jax.tree.flatten(db)
    *leaves, _ = vary_alike(*(zeros(*x.shape) for x in (q, k, v)), *leaves, q)
    start = (*leaves[:3], jax.tree.unflatten(tree, leaves[3:]))
    add_chunk, numbers = functools.partial(_backward_chunk, call, residuals), call.chunks.numbers(q)
    sums, _ = add_chunk(start, None) if numbers is None else lax.scan(add_chunk, start, numbers)
    *gradients, db = sums
    return *gradients, db if bias is None else bias.gradient(db)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of which chunks are computed one after another.

    Attributes:
      options: Static settings of the executor.
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv].
      operands: Operands of the call, tied to the queries.
      schedule: The tiles.
      group: Query heads of each key head, G.
      chunks: The chunks.
      bias: Tiles of a PairBias; None without one.
    """

    options: Options
    k: Array
    v: Array
    operands: ExecutorOperands
    schedule: BlockSchedule
    group: int
    chunks: ChunkGrid
    bias: BiasTiles | None

    def tile_masks(self, chunk: Chunk) -> TileMasks:
        """The tile masks of a chunk."""
        operands = chunk.cut_operands(self.operands, self.group)
        bias = None if self.bias is None else functools.partial(self.bias.take, chunk)
        return TileMasks(self.options, operands, self.schedule, chunk.heads, bias)

    def key_blocks(self, x: Array) -> Array:
        """Keys or values of a chunk in blocks."""
        return to_blocks(x, self.schedule.key_block, x.shape[2:3])


def _make_call(
    options: Options, q: Array, k: Array, v: Array, operands: ExecutorOperands, schedule: BlockSchedule
) -> _Call:
    bias, group = None, q.shape[2] // k.shape[2]
    if not is_pair_bias(operands.bias):
        operands = tied(operands, q)
    else:  # a tile is cut from its arrays anew in each step, and a copy of all is not needed
        bias = BiasTiles(operands.bias, schedule, (k.shape[2], group), (q.shape[1], k.shape[1]))
        operands = dataclasses.replace(tied(dataclasses.replace(operands, bias=None), q), bias=operands.bias)
    return _Call(options, k, v, operands, schedule, group, chunk_grid(q, k, schedule), bias)


def _forward_chunk(call: _Call, q: Array, sums: Any, number: Array | None) -> tuple[Any, None]:
    """Adds the results of a chunk to those of the call."""
    options, schedule, chunk = call.options, call.schedule, call.chunks.chunk(number)
    q, k, v = chunk.cut(q, call.group), chunk.cut(call.k), chunk.cut(call.v)
    tile_masks = call.tile_masks(chunk)
    q_blocks = to_blocks(q, schedule.block, (chunk.heads, call.group))
    k_blocks, v_blocks = call.key_blocks(k), call.key_blocks(v)

    def add_tile(steps: GroupSteps, sums: Any, inputs: Any) -> tuple[Any, None]:
        first, keys, tile_mask, _ = steps.tile(sums, inputs)
        run = keys.shape[0]
        queries = take_run(q_blocks, first, run)
        key_tiles = take_key_blocks(k_blocks, keys, -2), take_key_blocks(v_blocks, keys, -2)
        partial = tile.forward(options, queries, *key_tiles, tile_mask)
        if schedule.once:
            return put_run(sums, first, tile.normalize(*partial)), None
        return put_run(sums, first, tile.combine(take_run(sums, first, run), partial)), None

    # (o, lse, lse_low) where each query block has a single step, else (top, total, weighted) of the steps so far.
    flat = zeros(*q_blocks.shape[:-1])
    weighted = zeros(*flat.shape, v.shape[3])
    tiles = (weighted, flat - jnp.inf, flat) if schedule.once else (flat + tile.FLOOR, flat, weighted)
    *tiles, _ = vary_alike(*tiles, q)
    tiles = tuple(tiles)
    for group in schedule.groups:
        steps = tile_masks.steps(group)
        tiles, _ = lax.scan(steps.body(add_tile), tiles, steps.inputs, unroll=steps.unroll)
    o, *lse_pair = tiles if schedule.once else tile.normalize(*tiles)
    lse, lse_low = (from_blocks(x[..., None], q.shape[1])[..., 0] for x in lse_pair)
    results = from_blocks(o, q.shape[1]), lse, lse_low
    return tuple(chunk.put(x, new, call.group) for x, new in zip(sums, results, strict=True)), None


def _backward_chunk(call: _Call, residuals: QueryResiduals, sums: Any, number: Array | None) -> tuple[Any, None]:
    """Adds the gradients of a chunk to those of the call."""
    options, schedule, chunk = call.options, call.schedule, call.chunks.chunk(number)
    residuals = jax.tree.map(lambda x: chunk.cut(x, call.group), residuals)
    q, k, v = residuals.q, chunk.cut(call.k), chunk.cut(call.v)
    tile_masks = call.tile_masks(chunk)
    blocks = residual_blocks(residuals, schedule.block, (chunk.heads, call.group))
    k_blocks, v_blocks = call.key_blocks(k), call.key_blocks(v)

    def add_tile(steps: GroupSteps, sums: Any, inputs: Any) -> tuple[Any, None]:
        first, keys, tile_mask, bias = steps.tile(sums, inputs)
        dq, dk, dv, db = sums
        queries = take_run(blocks, first, keys.shape[0])
        key_tiles = take_key_blocks(k_blocks, keys, -2), take_key_blocks(v_blocks, keys, -2)
        tile_dq, tile_dk, tile_dv, tile_db = tile.backward(options, queries, *key_tiles, tile_mask)
        tile_dq = tile_dq if schedule.once else tile_dq + take_run(dq, first, keys.shape[0])
        if bias is not None:
            db = tile.add_bias_gradient(db, bias, call.operands.bias, tile_db)
        elif call.bias is not None:
            db = call.bias.add(db, chunk, first, keys, tile_db)
        dq = put_run(dq, first, tile_dq)
        return (dq, add_key_blocks(dk, keys, tile_dk), add_key_blocks(dv, keys, tile_dv), db), None

    tiles = [zeros(*x.shape) for x in (blocks.q, k_blocks.swapaxes(-1, -2), v_blocks.swapaxes(-1, -2))]
    *tiles, _ = vary_alike(*tiles, q)
    # Gradients of the bias are sums over all chunks, because the axes of bias arrays may be shared by chunks.
    tiles = (*tiles, sums[3])
    for group in schedule.groups:
        steps = tile_masks.steps(group)
        tiles, _ = lax.scan(steps.body(add_tile), tiles, steps.inputs, unroll=steps.unroll)
    dq, dk, dv, db = tiles
    # Transposed in a pass of their own: together with the next transpose, every number would be read far from the last one.
    dk, dv = lax.optimization_barrier((dk.swapaxes(-1, -2), dv.swapaxes(-1, -2)))
    gradients = from_blocks(dq, q.shape[1]), from_blocks(dk, k.shape[1]), from_blocks(dv, k.shape[1])
    new = (chunk.put(x, y, heads) for x, y, heads in zip(sums[:3], gradients, (call.group, 1, 1), strict=True))
    return (*new, db), None
