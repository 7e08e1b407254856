"""The scan form of the executor, for long sequences: loops over the steps of a schedule, in tiles that fit the caches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

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
from hpnlp.ops.attention.block_sparse.chunks import Chunk, over_chunks
from hpnlp.ops.attention.block_sparse.operands import ExecutorOperands, Options
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule
from hpnlp.ops.attention.block_sparse.steps import TileMasks, residual_blocks, scan_group
from hpnlp.ops.attention.block_sparse.tile import QueryResiduals, TileMask
from hpnlp.ops.attention.pair_bias import PairBias
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
    group = q.shape[2] // k.shape[2]
    bias = _bias_tiles(operands, schedule, q, k)
    operands = _tied(operands, q)

    def add_chunk(chunk: Chunk, sums: PyTree) -> Any:
        inputs = chunk.cut(q, group), chunk.cut(k), chunk.cut(v), chunk.cut_operands(operands, group)
        results = _forward_chunk(options, *inputs, schedule, _of_chunk(bias, chunk))
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
    group = q.shape[2] // k.shape[2]
    bias = _bias_tiles(operands, schedule, q, k)
    operands = _tied(operands, q)

    def add_chunk(chunk: Chunk, sums: PyTree) -> Any:
        queries = jax.tree.map(lambda x: chunk.cut(x, group), residuals)
        inputs = queries, chunk.cut(k), chunk.cut(v), chunk.cut_operands(operands, group)
        # Gradients of the bias are sums over all chunks, because the axes of bias arrays may be shared by chunks.
        *gradients, db = _backward_chunk(options, *inputs, schedule, bias, chunk, sums[3])
        new = (chunk.put(x, y, heads) for x, y, heads in zip(sums, gradients, (group, 1, 1), strict=False))
        return *new, db

    db = jax.tree.map(lambda x: zeros(*x.shape), operands.bias) if bias is None else bias.zeros()
    leaves, tree = jax.tree.flatten(db)
    *leaves, _ = vary_alike(*(zeros(*x.shape) for x in (q, k, v)), *leaves, q)
    start = (*leaves[:3], jax.tree.unflatten(tree, leaves[3:]))
    *gradients, db = over_chunks(add_chunk, start, q, k, schedule)
    return *gradients, db if bias is None else bias.gradient(db)


def _bias_tiles(operands: ExecutorOperands, schedule: BlockSchedule, q: Array, k: Array) -> BiasTiles | None:
    """The tiles of a PairBias; None without one."""
    heads = k.shape[2], q.shape[2] // k.shape[2]
    return BiasTiles(operands.bias, schedule, heads, (q.shape[1], k.shape[1])) if _has_tiles(operands) else None


def _has_tiles(operands: ExecutorOperands) -> bool:
    return isinstance(operands.bias, PairBias)


def _of_chunk(bias: BiasTiles | None, chunk: Chunk) -> Callable[[Array, Array], Array] | None:
    return None if bias is None else functools.partial(bias.take, chunk)


def _tied(operands: ExecutorOperands, q: Array) -> ExecutorOperands:
    """`tied`, but for a PairBias: a tile is cut from its arrays anew in each step, and a copy of all is not needed."""
    if not _has_tiles(operands):
        return tied(operands, q)
    return dataclasses.replace(tied(dataclasses.replace(operands, bias=None), q), bias=operands.bias)


def _forward_chunk(
    options: Options,
    q: Array,
    k: Array,
    v: Array,
    operands: ExecutorOperands,
    schedule: BlockSchedule,
    bias: Callable[[Array, Array], Array] | None,
) -> tuple[Array, Array, Array]:
    """`forward` of one chunk."""
    heads = k.shape[2], q.shape[2] // k.shape[2]
    tile_masks = TileMasks(options, operands, schedule, heads[0], bias)
    q_blocks = to_blocks(q, schedule.block, heads)
    k_blocks, v_blocks = (to_blocks(x, schedule.key_block, heads[:1]) for x in (k, v))

    def step(sums: PyTree, first: Array, keys: Array, tile_mask: TileMask, _: PyTree) -> Any:
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
    bias_tiles: BiasTiles | None,
    chunk: Chunk,
    db: PyTree,
) -> tuple[Array, Array, Array, Any]:
    """`backward` of one chunk; db: gradients of the bias in earlier chunks."""
    q = residuals.q
    heads = k.shape[2], q.shape[2] // k.shape[2]
    tile_masks = TileMasks(options, operands, schedule, heads[0], _of_chunk(bias_tiles, chunk))
    blocks = residual_blocks(residuals, schedule.block, heads)
    k_blocks, v_blocks = (to_blocks(x, schedule.key_block, heads[:1]) for x in (k, v))

    def step(sums: PyTree, first: Array, keys: Array, tile_mask: TileMask, bias: PyTree) -> Any:
        dq, dk, dv, db = sums
        queries = take_run(blocks, first, keys.shape[0])
        key_tiles = take_key_blocks(k_blocks, keys, -2), take_key_blocks(v_blocks, keys, -2)
        tile_dq, tile_dk, tile_dv, tile_db = tile.backward(options, queries, *key_tiles, tile_mask)
        tile_dq = tile_dq if schedule.once else tile_dq + take_run(dq, first, keys.shape[0])
        if bias is not None:
            db = tile.add_bias_gradient(db, bias, operands.bias, tile_db)
        elif bias_tiles is not None:
            db = bias_tiles.add(db, chunk, first, keys, tile_db)
        return put_run(dq, first, tile_dq), add_key_blocks(dk, keys, tile_dk), add_key_blocks(dv, keys, tile_dv), db

    sums = [zeros(*x.shape) for x in (blocks.q, k_blocks.swapaxes(-1, -2), v_blocks.swapaxes(-1, -2))]
    *sums, _ = vary_alike(*sums, q)
    sums = (*sums, db)
    for group in schedule.groups:
        sums = scan_group(tile_masks, step, group, sums)
    dq, dk, dv, db = sums
    # Transposed in a pass of their own: together with the next transpose, every number would be read far from the last one.
    dk, dv = lax.optimization_barrier((dk.swapaxes(-1, -2), dv.swapaxes(-1, -2)))
    return from_blocks(dq, q.shape[1]), from_blocks(dk, k.shape[1]), from_blocks(dv, k.shape[1]), db
