"""Attention with position scores of distances by tiles, with an online softmax: the executor behind `relative_attention`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from hpnlp.ops.arrays import accepts_numpy
from hpnlp.ops.attention.block_sparse import tile
from hpnlp.ops.attention.block_sparse.array_blocks import (
    SLICE,
    add_key_blocks,
    from_blocks,
    put_run,
    queries_by_head,
    take_key_blocks,
    take_run,
    to_blocks,
    zeros,
)
from hpnlp.ops.attention.block_sparse.block_mask import evaluate_tiles
from hpnlp.ops.attention.block_sparse.chunks import Chunk, over_chunks
from hpnlp.ops.attention.block_sparse.operands import ExecutorOperands, Options
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule, TileGroup, TileState
from hpnlp.ops.attention.block_sparse.steps import TileMasks, residual_blocks, scan_group
from hpnlp.ops.attention.block_sparse.tile import QueryResiduals, TileMask
from hpnlp.ops.custom_vjp import tied, vary_alike


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Static settings.

    Attributes:
      options: Settings of the tiles; the mask allows distances from 0 to at most R - 1.
      block: Queries in a tile, r. S - T is a multiple of it.
      key_block: Keys in a tile, c, a multiple of r.
      padding: Keys at the beginning that do not exist.
    """

    options: Options
    block: int
    key_block: int
    padding: int

    def schedule(self, length: int, keys: int) -> BlockSchedule:
        """The tiles with visible pairs, one in a step.

        Args:
          length: Number of queries T.
          keys: Number of keys S.

        Returns:
          The schedule.
        """
        rows, columns = (x.reshape(-1) for x in np.indices((-(-length // self.block), -(-keys // self.key_block))))
        first, first_key = rows * self.block, columns * self.key_block
        bounds = first, first + self.block - 1, first_key, first_key + self.key_block - 1
        some, every = evaluate_tiles(self.options.mask, rows.shape, *bounds)
        test = ~every | (first_key < self.padding) | (first_key + self.key_block > keys)
        state = np.where(test, TileState.EVALUATE_MASK, TileState.ALL_ALLOWED).astype(np.int8)
        group = TileGroup(rows[some].astype(np.int32), columns[some, None, None].astype(np.int32), state[some])
        once = bool((np.bincount(rows[some], minlength=rows[-1] + 1) == 1).all())
        return BlockSchedule((group,), self.block, self.key_block, once)


class _Distances:
    """Embeddings of distances in the order in which tiles read them.

    Column x of a tile of position scores is the score of the embedding first + x. Query t of the tile and its key s have the
    distance of column r - 1 - t + s, so that the scores of all pairs are r rows of r + c columns, each shifted by one.
    """

    def __init__(self, tiling: Tiling, schedule: BlockSchedule, length: int, keys: int) -> None:
        block, ratio = tiling.block, tiling.key_block // tiling.block
        self._block, self._ratio, self._width = block, ratio, 1 + ratio
        (group,) = schedule.groups
        self._last = -(-length // block) - 1
        starts = self._last - group.first + group.keys[:, 0, 0] * ratio  # in blocks of r
        self._skipped = int(starts.min(initial=self._last))
        self._count = int(starts.max(initial=self._skipped)) + self._width - self._skipped
        # Distance of the embedding 0.
        self._largest = keys - length + (self._last + 1 - self._skipped) * block - 1

    def order(self, r: Array) -> Float[Array, "1 Y N H"]:
        """Embeddings from the largest distance on.

        Args:
          r: [R, N, H], from the distance 0 on.

        Returns:
          [1, Y, N, H], with zeros for distances outside of r.
        """
        r = r[: self._largest + 1]
        before, after = self._largest + 1 - r.shape[0], self._count * self._block - 1 - self._largest
        return jnp.pad(jnp.flip(r, 0), ((before, after), (0, 0), (0, 0)))[None]

    def undo(self, dr: Array, distances: int) -> Float[Array, "R N H"]:
        """The gradient of r from that of the result of `order`.

        Args:
          dr: [1, Y, N, H].
          distances: R.

        Returns:
          [R, N, H].
        """
        dr = jnp.flip(dr[0, : self._largest + 1], 0)[:distances]
        return jnp.pad(dr, ((0, distances - dr.shape[0]), (0, 0), (0, 0)))

    def start(self, first: Array, keys: Array) -> Array:
        """Index of the first block of embeddings of a tile.

        Args:
          first: int32 [], its query block.
          keys: int32 [1, 1], its key block.

        Returns:
          int32 [], in blocks of r embeddings.
        """
        return self._last - self._skipped - first + keys[0, 0] * self._ratio

    def tile(self, r: Array, start: Array) -> Float[Array, "1 1 K G L H"]:
        """Embeddings of a tile.

        Args:
          r: [1, K, G, Y, H], ordered embeddings of a chunk.
          start: As returned by `start`.

        Returns:
          [1, 1, K, G, r + c, H].
        """
        zero = jnp.zeros_like(start)
        size = (*r.shape[:3], self._width * self._block, r.shape[4])
        return lax.dynamic_slice(r, (zero, zero, zero, start * self._block, zero), size, **SLICE)[None]

    def blocks(self, start: Array) -> Array:
        """int32 [1, w], the blocks of embeddings of a tile.

        Args:
          start: As returned by `start`.

        Returns:
          The indices.
        """
        return (start + jnp.arange(self._width, dtype=jnp.int32))[None]

    def empty(self, heads: tuple[int, int], features: int) -> Float[Array, "Y 1 K G H r"]:
        """Zeros for the gradient of the embeddings in blocks, with features before embeddings.

        Args:
          heads: (K, G).
          features: H.

        Returns:
          float32 [blocks, 1, K, G, H, r].
        """
        return zeros(self._count, 1, *heads, features, self._block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_by_distance(
    tiling: Tiling,
    q: Float[Array, "B T N H"],
    by_distance: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    r: Float[Array, "R N H"],
    operands: ExecutorOperands,
) -> Float[Array, "B T N Hv"]:
    """Attention with the scores (q . k + by_distance . r[distance]) * scale.

    The last key has the place of the last query.

    Args:
      tiling: The mask, and sizes of tiles.
      q: Queries of the keys.
      by_distance: Queries of the distances.
      k: Keys; the first `padding` of them do not exist.
      v: Values.
      r: Embeddings of the distances from 0 on.
      operands: Segments and dropout; all arrays vary over the same mesh axes.

    Returns:
      In the dtype of q; 0 in rows that see nothing.
    """
    return _forward(tiling, q, by_distance, k, v, r, operands)[0]


@accepts_numpy
def _forward(
    tiling: Tiling, q: Array, by_distance: Array, k: Array, v: Array, r: Array, operands: ExecutorOperands
) -> tuple[Array, Any]:
    """(o, residuals)."""
    schedule = tiling.schedule(q.shape[1], k.shape[1])
    distances = _Distances(tiling, schedule, q.shape[1], k.shape[1])
    group, tied_operands, ordered = q.shape[2] // k.shape[2], tied(operands, q), distances.order(r)

    def add_chunk(chunk: Chunk, sums: Any) -> Any:
        queries = chunk.cut(q, group), chunk.cut(by_distance, group)
        inputs = *queries, chunk.cut(k), chunk.cut(v), chunk.cut(ordered, group)
        results = _forward_chunk(tiling, schedule, distances, *inputs, chunk.cut_operands(tied_operands, group))
        return tuple(chunk.put(x, new, group) for x, new in zip(sums, results, strict=True))

    start = [zeros(*q.shape[:3], v.shape[3]), zeros(*q.shape[:3]), zeros(*q.shape[:3])]
    start = tuple(_like(q, x) for x in start)
    o, lse, lse_low = over_chunks(add_chunk, start, q, k, schedule)
    o, lse, lse_low = (checkpoint_name(x, "mixed") for x in (o.astype(q.dtype), lse, lse_low))
    return o, (q, by_distance, k, v, r, operands, o, lse, lse_low)


def _forward_chunk(
    tiling: Tiling,
    schedule: BlockSchedule,
    distances: _Distances,
    q: Array,
    by_distance: Array,
    k: Array,
    v: Array,
    r: Array,
    operands: ExecutorOperands,
) -> tuple[Array, Array, Array]:
    """float32 (o, lse, lse_low) of one chunk."""
    heads = k.shape[2], q.shape[2] // k.shape[2]
    tile_masks = TileMasks(tiling.options, operands, schedule, heads[0])
    q_blocks, position_blocks = (to_blocks(x, schedule.block, heads) for x in (q, by_distance))
    k_blocks, v_blocks = (to_blocks(x, schedule.key_block, heads[:1]) for x in (k, v))
    table = queries_by_head(r, heads[0])

    def step(sums: Any, first: Array, keys: Array, tile_mask: TileMask, _: Any) -> Any:
        queries, positions = take_run((q_blocks, position_blocks), first, 1)
        bias = _position_scores(tiling, positions, distances.tile(table, distances.start(first, keys)))
        key_tiles = take_key_blocks(k_blocks, keys, -2), take_key_blocks(v_blocks, keys, -2)
        mask = dataclasses.replace(tile_mask, bias=bias)
        partial = tile.forward(tiling.options, queries, *key_tiles, mask)
        return put_run(sums, first, tile.combine(take_run(sums, first, 1), partial))

    flat = zeros(*q_blocks.shape[:-1])
    sums = tuple(_like(q, x) for x in (flat + tile.FLOOR, flat, zeros(*flat.shape, v.shape[3])))
    (steps,) = schedule.groups
    o, *lse_pair = tile.normalize(*scan_group(tile_masks, step, steps, sums))
    lse, lse_low = (from_blocks(x[..., None], q.shape[1])[..., 0] for x in lse_pair)
    return from_blocks(o, q.shape[1]), lse, lse_low


@accepts_numpy
def _backward(tiling: Tiling, saved: Any, do: Array) -> tuple[Any, ...]:
    """Gradients of all arrays but the operands."""
    q, by_distance, k, v, r, operands, o, lse, lse_low = saved
    schedule = tiling.schedule(q.shape[1], k.shape[1])
    distances = _Distances(tiling, schedule, q.shape[1], k.shape[1])
    group, operands, ordered = q.shape[2] // k.shape[2], tied(operands, q), distances.order(r)
    # Rows that see nothing may hold NaN, and 0 * NaN is NaN.
    sees_nothing = jnp.isneginf(lse)
    q, by_distance = (jnp.where(sees_nothing[..., None], jnp.zeros((), q.dtype), x) for x in (q, by_distance))
    delta = jnp.einsum("btnh,btnh->btn", do, o, preferred_element_type=jnp.float32)
    residuals = QueryResiduals(q, do, jnp.where(sees_nothing, jnp.inf, lse), lse_low, delta)

    def add_chunk(chunk: Chunk, sums: Any) -> Any:
        queries, positions = jax.tree.map(lambda x: chunk.cut(x, group), (residuals, by_distance))
        inputs = queries, positions, chunk.cut(k), chunk.cut(v), chunk.cut(ordered, group)
        gradients = _backward_chunk(tiling, schedule, distances, *inputs, chunk.cut_operands(operands, group))
        *sums, dr = sums
        *gradients, chunk_dr = gradients
        sizes = group, group, 1, 1
        new = (chunk.put(x, y, heads) for x, y, heads in zip(sums, gradients, sizes, strict=True))
        # Examples share the embeddings.
        return *new, chunk.put(dr, chunk.cut(dr, group) + chunk_dr, group)

    start = tuple(_like(q, zeros(*x.shape)) for x in (q, by_distance, k, v, ordered))
    *gradients, dr = over_chunks(add_chunk, start, q, k, schedule)
    gradients = *gradients, distances.undo(dr, r.shape[0])
    return *(x.astype(like.dtype) for x, like in zip(gradients, saved, strict=False)), None


def _backward_chunk(
    tiling: Tiling,
    schedule: BlockSchedule,
    distances: _Distances,
    residuals: QueryResiduals,
    by_distance: Array,
    k: Array,
    v: Array,
    r: Array,
    operands: ExecutorOperands,
) -> tuple[Array, ...]:
    """float32 gradients of one chunk: of q, by_distance, k, v and r."""
    q = residuals.q
    heads = k.shape[2], q.shape[2] // k.shape[2]
    tile_masks = TileMasks(tiling.options, operands, schedule, heads[0])
    blocks = residual_blocks(residuals, schedule.block, heads)
    position_blocks = to_blocks(by_distance, schedule.block, heads)
    k_blocks, v_blocks = (to_blocks(x, schedule.key_block, heads[:1]) for x in (k, v))
    table = queries_by_head(r, heads[0])

    def step(sums: Any, first: Array, keys: Array, tile_mask: TileMask, _: Any) -> Any:
        dq, dpositions, dk, dv, dr = sums
        queries, positions = take_run((blocks, position_blocks), first, 1)
        start = distances.start(first, keys)
        embeddings = distances.tile(table, start)
        key_tiles = take_key_blocks(k_blocks, keys, -2), take_key_blocks(v_blocks, keys, -2)
        mask = dataclasses.replace(tile_mask, bias=_position_scores(tiling, positions, embeddings))
        tile_dq, tile_dk, tile_dv, db = tile.backward(tiling.options, queries, *key_tiles, mask)
        of_queries = tile_dq, *_position_gradients(tiling, positions, embeddings, db)
        *of_queries, tile_dr = of_queries
        before = take_run((dq, dpositions), first, 1)
        dq, dpositions = put_run((dq, dpositions), first, tuple(map(jnp.add, before, of_queries)))
        dk, dv = add_key_blocks(dk, keys, tile_dk), add_key_blocks(dv, keys, tile_dv)
        return dq, dpositions, dk, dv, add_key_blocks(dr, distances.blocks(start), tile_dr)

    sums = [zeros(*x.shape) for x in (blocks.q, position_blocks, k_blocks.swapaxes(-1, -2), v_blocks.swapaxes(-1, -2))]
    sums = tuple(_like(q, x) for x in (*sums, distances.empty(heads, q.shape[3])))
    (steps,) = schedule.groups
    dq, dpositions, dk, dv, dr = scan_group(tile_masks, step, steps, sums)
    # Transposed in a pass of their own, as in the scan form of the executor.
    dk, dv, dr = lax.optimization_barrier(tuple(x.swapaxes(-1, -2) for x in (dk, dv, dr)))
    of_queries = (from_blocks(x, q.shape[1]) for x in (dq, dpositions))
    return *of_queries, from_blocks(dk, k.shape[1]), from_blocks(dv, k.shape[1]), from_blocks(dr, r.shape[1])


attend_by_distance.defvjp(_forward, _backward)


def _like(x: Array, start: Array) -> Array:
    """`start` as an array that varies over the mesh axes of x."""
    return vary_alike(start, x)[0]


def _position_scores(tiling: Tiling, q: Array, r: Array) -> Float[Array, "1 B K G r c"]:
    """Scaled position scores of a tile, from queries [1, B, K, G, r, H] and embeddings [1, 1, K, G, r + c, H]."""
    rows, width = q.shape[4], r.shape[4]
    r = jnp.broadcast_to(r, (*q.shape[:4], *r.shape[4:]))
    scores = _product(q, r, 2, 2)
    # Rows of one number less, so that each row starts one column before the row above.
    flat = scores.reshape(-1, rows * width)[:, rows - 1 : rows - 1 + rows * (width - 1)]
    shifted = flat.reshape(*q.shape[:4], rows, width - 1)[..., : width - rows]
    return shifted * tiling.options.scale


def _position_gradients(tiling: Tiling, q: Array, r: Array, db: Array) -> tuple[Array, Array]:
    """Gradients of `_position_scores`: [1, B, K, G, r, H], and [1, 1, K, G, H, r + c] with features before embeddings."""
    width = r.shape[4]
    r = jnp.broadcast_to(r, (*q.shape[:4], *r.shape[4:]))
    scores = _unshifted((db * tiling.options.scale).reshape(-1, *db.shape[-2:]))
    dtype = jnp.float32 if q.dtype == jnp.float16 else q.dtype
    scores = scores.astype(dtype)
    dq = _product(scores, r.astype(dtype), 2, 1).reshape(*q.shape)
    dr = _product(q.astype(dtype), scores, 1, 1).reshape(*q.shape[:4], q.shape[5], width)
    return dq, dr.sum(axis=1, keepdims=True)


def _unshifted(x: Array) -> Float[Array, "tiles r L"]:
    """Scores by column from scores by key [tiles, r, c]: row t begins r - 1 - t columns later.

    First by the remainder of t, and then by its quotient, in copies of rows. Reshapes of padded rows, as for the scores, would
    take as long as a product: XLA:CPU fuses them to one loop that divides for each number.
    """
    tiles, rows, keys = x.shape
    inner = next(i for i in range(int(rows**0.5), 0, -1) if rows % i == 0)
    outer = rows // inner
    x = x.reshape(tiles, outer, inner, keys)
    by_remainder = _zeros_like(x, (tiles, outer, inner, keys + inner - 1))
    for i in range(inner):
        by_remainder = lax.dynamic_update_slice(by_remainder, x[:, :, i : i + 1], (0, 0, i, inner - 1 - i))
    columns = _zeros_like(x, (tiles, outer, inner, rows + keys))
    for i in range(outer):
        row = by_remainder[:, i : i + 1]
        columns = lax.dynamic_update_slice(columns, row, (0, i, 0, inner * (outer - 1 - i)))
    return columns.reshape(tiles, rows, rows + keys)


def _zeros_like(x: Array, shape: tuple[int, ...]) -> Array:
    """Zeros of a shape, in the dtype of x, that vary over its mesh axes."""
    return vary_alike(jnp.zeros(shape, x.dtype), x)[0]


def _product(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """float32 product of matrices over an axis of each; other axes are joined."""
    a, b = (x.reshape(-1, *x.shape[-2:]) for x in (a, b))
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((0,), (0,))), preferred_element_type=jnp.float32)
