"""The scan form of the executor, for long sequences: loops over the steps of a schedule, in tiles that fit the caches."""

from __future__ import annotations

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
from hpnlp.ops.attention.block_sparse.chunks import Chunk, over_chunks
from hpnlp.ops.attention.block_sparse.operands import ExecutorOperands, Options
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule
from hpnlp.ops.attention.block_sparse.steps import TileMasks, residual_blocks, scan_group
from hpnlp.ops.attention.block_sparse.tile import QueryResiduals, TileMask
from hpnlp.ops.custom_vjp import tied, vary_alike


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
    group, operands = q.shape[2] // k.shape[2], tied(operands, q)

    def add_chunk(chunk: Chunk, sums: Any) -> Any:
        inputs = chunk.cut(q, group), chunk.cut(k), chunk.cut(v), chunk.cut_operands(operands, group)
        results = _forward_chunk(options, *inputs, schedule)
        return tuple(chunk.put(x, new, group) for x, new in zip(sums, results, strict=True))

    start = zeros(*q.shape[:3], v.shape[3]), zeros(*q.shape[:3]), zeros(*q.shape[:3])
    return over_chunks(add_chunk, vary_alike(*start, q)[:3], q, k, schedule)


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
    group, operands = q.shape[2] // k.shape[2], tied(operands, q)

    def add_chunk(chunk: Chunk, sums: Any) -> Any:
        queries = jax.tree.map(lambda x: chunk.cut(x, group), residuals)
        inputs = queries, chunk.cut(k), chunk.cut(v), chunk.cut_operands(operands, group)
        *gradients, db = _backward_chunk(options, *inputs, schedule)
        new = tuple(chunk.put(x, y, heads) for x, y, heads in zip(sums, gradients, (group, 1, 1), strict=False))
        if options.bias_jaxpr is not None or operands.bias is None:  # arrays of a bias function, which all chunks share
            return (*new, jax.tree.map(jnp.add, sums[3], db))
        # An axis of 1 of a bias array is shared by chunks as well, so that gradients are added.
        return (*new, chunk.put(sums[3], chunk.cut(sums[3], group, 1) + db, group, 1))

    start = [zeros(*x.shape) for x in (q, k, v)]
    db_start = [zeros(*x.shape) for x in jax.tree.leaves(operands.bias)]
    *start, _ = vary_alike(*start, *db_start, q)
    db = jax.tree.unflatten(jax.tree.structure(operands.bias), start[3:])
    return over_chunks(add_chunk, (*start[:3], db), q, k, schedule)


def _forward_chunk(
    options: Options, q: Array, k: Array, v: Array, operands: ExecutorOperands, schedule: BlockSchedule
) -> tuple[Array, Array, Array]:
    """`forward` of one chunk."""
    heads = k.shape[2], q.shape[2] // k.shape[2]
    tile_masks = TileMasks(options, operands, schedule, heads[0])
    q_blocks = to_blocks(q, schedule.block, heads)
    k_blocks, v_blocks = (to_blocks(x, schedule.key_block, heads[:1]) for x in (k, v))

    def step(sums: Any, first: Array, keys: Array, tile_mask: TileMask, _: Any) -> Any:
        run = keys.shape[0]
        queries = take_run(q_blocks, first, run)
        key_tiles = take_key_blocks(k_blocks, keys, -2), take_key_blocks(v_blocks, keys, -2)
        partial = tile.forward(options, queries, *key_tiles, tile_mask)
        if schedule.once:
            return put_run(sums, first, tile.normalize(*partial))
        return put_run(sums, first, tile.combine(take_run(sums, first, run), partial))

    # (o, lse, lse_low) where each query block has a single step, else (top, total, weighted) of the steps so far.
    flat = zeros(*q_blocks.shape[:-1])
    weighted = zeros(*flat.shape, v.shape[3])
    sums = (weighted, flat - jnp.inf, flat) if schedule.once else (flat + tile.FLOOR, flat, weighted)
    *sums, _ = vary_alike(*sums, q)
    for group in schedule.groups:
        sums = scan_group(tile_masks, step, group, tuple(sums))
    o, *lse_pair = sums if schedule.once else tile.normalize(*sums)
    lse, lse_low = (from_blocks(x[..., None], q.shape[1])[..., 0] for x in lse_pair)
    return from_blocks(o, q.shape[1]), lse, lse_low


def _backward_chunk(
    options: Options,
    residuals: QueryResiduals,
    k: Array,
    v: Array,
    operands: ExecutorOperands,
    schedule: BlockSchedule,
) -> tuple[Array, Array, Array, Any]:
    """`backward` of one chunk."""
    q = residuals.q
    heads = k.shape[2], q.shape[2] // k.shape[2]
    tile_masks = TileMasks(options, operands, schedule, heads[0])
    blocks = residual_blocks(residuals, schedule.block, heads)
    k_blocks, v_blocks = (to_blocks(x, schedule.key_block, heads[:1]) for x in (k, v))

    def step(sums: Any, first: Array, keys: Array, tile_mask: TileMask, bias: Any) -> Any:
        dq, dk, dv, db = sums
        queries = take_run(blocks, first, keys.shape[0])
        key_tiles = take_key_blocks(k_blocks, keys, -2), take_key_blocks(v_blocks, keys, -2)
        tile_dq, tile_dk, tile_dv, tile_db = tile.backward(options, queries, *key_tiles, tile_mask)
        tile_dq = tile_dq if schedule.once else tile_dq + take_run(dq, first, keys.shape[0])
        if bias is not None:
            db = tile.add_bias_gradient(db, bias, operands.bias, tile_db)
        elif tile_masks.bias is not None:
            db = tile_masks.bias.add(db, first, keys, tile_db)
        return put_run(dq, first, tile_dq), add_key_blocks(dk, keys, tile_dk), add_key_blocks(dv, keys, tile_dv), db

    sums = [zeros(*x.shape) for x in (blocks.q, k_blocks.swapaxes(-1, -2), v_blocks.swapaxes(-1, -2))]
    bias = operands.bias if tile_masks.bias is None else tile_masks.bias.blocks
    db_start = [zeros(*x.shape) for x in jax.tree.leaves(bias)]
    *sums, _ = vary_alike(*sums, *db_start, q)
    sums = (*sums[:3], jax.tree.unflatten(jax.tree.structure(bias), sums[3:]))
    for group in schedule.groups:
        sums = scan_group(tile_masks, step, group, sums)
    dq, dk, dv, db = sums
    db = db if tile_masks.bias is None else tile_masks.bias.joined(db).reshape(operands.bias.shape)
    # Transposed in a pass of their own: together with the next transpose, every number would be read far from the last one.
    dk, dv = lax.optimization_barrier((dk.swapaxes(-1, -2), dv.swapaxes(-1, -2)))
    return from_blocks(dq, q.shape[1]), from_blocks(dk, k.shape[1]), from_blocks(dv, k.shape[1]), db
