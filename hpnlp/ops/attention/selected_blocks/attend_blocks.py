"""Attention of each query to some blocks of keys, with memory linear in the number of chosen blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.ops.attention.block_sparse.tile import FLOOR, log_sum
from hpnlp.ops.attention.selected_blocks.row_tiles import row_tiles
from hpnlp.ops.dropout import check_rate, keep_mask, seed_words
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.types import InputError

# Queries times heads in a tile, at most and at least, so that products keep a core busy and few rows are empty.
MAX_ROWS, MIN_ROWS = 128, 8
# Scores of the tiles of a step. On a CPU they stay in the caches; an accelerator needs many tiles to be busy.
CPU_SCORES, DEVICE_SCORES = 2**19, 2**25


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChosenBlocks:
    """Blocks of keys, and the blocks that each query reads.

    Attributes:
      starts: int [B, M], index of the first key of each of M blocks; all blocks are within the S keys.
      chosen: int [B, T, P, C], numbers of C distinct blocks for each query and each of P groups of N / P query heads; -1 for
        none.
      block: Number of keys of a block.
      kv_visible: bool [B, S, K], False for keys that no query sees; None for none.
    """

    starts: Any
    chosen: Any
    block: int = dataclasses.field(metadata={"static": True})
    kv_visible: Any = None


@array_op("B T N", q="B T N")
def attend_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B _ K Hv"],
    blocks: ChosenBlocks,
    *,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    streams: Int[Array, "B N"] | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Softmax attention of each query to all keys of the blocks that are chosen for it.

    The pairs (query, block) are sorted by block. Tiles of queries that read the same block are products of matrices, and the
    partial results of a query's blocks are merged by their log-sum-exp.

    Args:
      q: Queries.
      k: Keys. K divides P, P divides N, and query head n reads key head n // (N / K).
      v: Values.
      blocks: The blocks that are chosen for each query.
      dropout_rate: Probability of dropping a weight, by indices of query and key as in `attend`.
      rng: PRNG key of dropout.
      streams: A number for each row and head; b N + n if None.

    Returns:
      (o in q's dtype, float32 lse). A query without keys gets o = 0 and lse = -inf, with zero gradients.

    Raises:
      InputError: Shapes, the block or the rate of dropout do not fit.

    Cost:
      O(B T N C block H) time, and partial results of B T N C (Hv + 1) float32 numbers, on a CPU of one key head at a time. The
      backward pass computes the weights again from q, k, v, o and lse.

    References:
      Lu et al. 2025, "MoBA: Mixture of block attention for long-context LLMs", arXiv 2502.13189, algorithm 1.
    """
    _check(q, k, v, blocks)
    check_rate(dropout_rate, rng)
    if 0 in (*q.shape[:3], blocks.starts.shape[1], blocks.chosen.shape[3]):
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    seed = None
    if dropout_rate:
        assert rng is not None
        seed = seed_words(rng)
        if streams is None:
            streams = jnp.arange(q.shape[0] * q.shape[2], dtype=jnp.int32).reshape(q.shape[0], q.shape[2])
    indices = _Indices(blocks.starts, blocks.chosen, blocks.kv_visible, seed, streams if dropout_rate else None)
    leaves, structure = jax.tree.flatten((q, k, v, indices))
    q, k, v, indices = jax.tree.unflatten(structure, vary_alike(*leaves))
    result: Any = _attend(_Options(blocks.block, dropout_rate), q, k, v, indices)
    return result


@array_op("B T N", q="B T N")
def attend_blocks_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    blocks: ChosenBlocks,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """`attend_blocks` by its definition, without dropout: dense attention with a mask of pairs.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      blocks: The blocks that are chosen for each query.

    Returns:
      (o in q's dtype, float32 lse).

    Cost:
      O(B N T S (C + H)) time and O(B N T S C) memory.
    """
    chosen = blocks.chosen
    heads, groups, kv_heads = q.shape[2], chosen.shape[2], k.shape[2]
    first = jnp.take_along_axis(blocks.starts[:, None, None], jnp.maximum(chosen, 0), axis=3)[..., None]
    keys = jnp.arange(k.shape[1])[None, None, None, None]
    visible = ((chosen >= 0)[..., None] & (keys >= first) & (keys < first + blocks.block)).any(axis=3)
    visible = jnp.repeat(visible, heads // groups, axis=2)
    if blocks.kv_visible is not None:
        visible = visible & jnp.repeat(blocks.kv_visible.transpose(0, 2, 1), heads // kv_heads, axis=1)[:, None]
    k, v = (jnp.repeat(x.astype(jnp.float32), heads // kv_heads, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->btns", q.astype(jnp.float32), k) * q.shape[3] ** -0.5
    sees_any = visible.any(axis=3, keepdims=True)
    scores = jnp.where(visible, scores, jnp.where(sees_any, -jnp.inf, 0.0))
    weights = jnp.where(visible, jax.nn.softmax(scores, axis=3), 0.0)
    lse = jnp.where(sees_any[..., 0], jax.nn.logsumexp(scores, axis=3), -jnp.inf)
    return jnp.einsum("btns,bsnh->btnh", weights, v).astype(q.dtype), lse


def _check(q: Array, k: Array, v: Array, blocks: ChosenBlocks) -> None:
    """Checks shapes and the size of the blocks."""
    starts, chosen = blocks.starts, blocks.chosen
    heads, groups, kv_heads = q.shape[2], chosen.shape[2], k.shape[2]
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise InputError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: expected equal B, equal H in q and k, equal S and K in k and v"
        )
    if groups % kv_heads or heads % groups:
        raise InputError(
            f"chosen has {groups} groups of heads for {heads} query and {kv_heads} key heads: expected a multiple of "
            f"{kv_heads} that divides {heads}"
        )
    if chosen.shape[:2] != q.shape[:2] or starts.shape[0] != q.shape[0]:
        raise InputError(f"q {q.shape}, starts {starts.shape}, chosen {chosen.shape}: expected equal B and T")
    if not 1 <= blocks.block <= k.shape[1]:
        raise InputError(f"block {blocks.block}: expected 1 to {k.shape[1]}, the number of keys")


@dataclasses.dataclass(frozen=True)
class _Options:
    block: int
    dropout_rate: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Indices:
    """Operands without gradients; see `attend_blocks`."""

    starts: Any
    chosen: Any
    kv_visible: Any
    seed: Any
    streams: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Tiles:
    """n tiles, of any examples and key heads.

    Attributes:
      rows: int32 [n, W], index among all rows of queries; -1 for none.
      start: int32 [n], index of the first key among the keys of all examples and key heads.
      is_used: bool [n], whether the tile has rows.
    """

    rows: Array
    start: Array
    is_used: Array


class _Problem:
    """Arrays by example and key head, and their tiles.

    A row is a query of one of the P / K groups of heads of a key head, with its g = N / P heads: `[B K T P / K, g, ...]`. Keys
    are `[B K S, ...]`.
    """

    def __init__(
        self,
        options: _Options,
        q: Array,
        k: Array,
        v: Array,
        indices: _Indices,
        tiles: tuple[_Tiles, Array] | None = None,
    ) -> None:
        self.options, self.indices = options, indices
        self.batch, self.length, self.heads, self.size = q.shape
        self.keys, self.kv_heads = k.shape[1:3]
        groups, self.count = indices.chosen.shape[2:]
        self.repeats, self.together = groups // self.kv_heads, self.heads // groups
        self.scale = jnp.float32(self.size**-0.5)
        self.q, self.k, self.v = self.to_rows(q), _by_head(k), _by_head(v)
        self.visible = None if indices.kv_visible is None else _by_head(indices.kv_visible[..., None])[:, 0]
        self.streams = None
        if indices.streams is not None:
            self.streams = self.to_rows(jnp.broadcast_to(indices.streams[:, None, :, None], (*q.shape[:3], 1)))[..., 0]
        blocks = indices.starts.shape[1]
        chosen = indices.chosen.reshape(self.batch, self.length, self.kv_heads, -1).swapaxes(1, 2)
        chosen = chosen.reshape(self.batch * self.kv_heads, -1)
        pairs = chosen.shape[1] // max(blocks, 1)
        width = 2 ** (max(min(pairs, MAX_ROWS // self.together), MIN_ROWS // self.together, 1).bit_length() - 1)
        self.tiles, self.places = self._tiles(chosen, blocks, width) if tiles is None else tiles

    def _tiles(self, chosen: Array, blocks: int, width: int) -> tuple[_Tiles, Array]:
        """The tiles of all problems, in steps `[steps, n, ...]`, and the place of each pair of a row and a block."""
        tiles = row_tiles(chosen, blocks, width)
        problems = jnp.arange(chosen.shape[0], dtype=jnp.int32)[:, None]
        rows = jnp.where(
            tiles.rows < 0, -1, tiles.rows // self.count + problems[..., None] * (chosen.shape[1] // self.count)
        )
        starts = jnp.repeat(self.indices.starts, self.kv_heads, axis=0).astype(jnp.int32)
        start = jnp.take_along_axis(starts, jnp.minimum(tiles.groups, blocks - 1), axis=1)
        is_used = tiles.groups < blocks
        start = jnp.where(is_used, start, 0) + problems * self.keys

        scores = CPU_SCORES if jax.default_backend() == "cpu" else DEVICE_SCORES
        steps = -(-is_used.size // max(1, scores // (width * self.together * self.options.block)))
        together = -(-is_used.size // steps)

        def in_steps(x: Array, fill: ArrayLike) -> Array:
            x = x.reshape(-1, *x.shape[2:])
            x = jnp.pad(x, [(0, steps * together - x.shape[0]), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)
            return x.reshape(steps, together, *x.shape[1:])

        places = jnp.where(tiles.places < 0, -1, tiles.places + problems * (tiles.groups.shape[1] * width))
        steps_of = in_steps(rows, jnp.int32(-1)), in_steps(start, jnp.int32(0)), in_steps(is_used, False)
        return _Tiles(*steps_of), places.reshape(-1, self.count)

    def to_rows(self, x: Array) -> Array:
        """`[B K T P / K, g, F]` from `[B, T, N, F]`."""
        x = x.reshape(self.batch, self.length, self.kv_heads, self.repeats * self.together, x.shape[3])
        return x.swapaxes(1, 2).reshape(-1, self.together, x.shape[4])

    def from_rows(self, x: Array) -> Array:
        """`[B, T, N, F]` from `[B K T P / K, g, F]`."""
        x = x.reshape(self.batch, self.kv_heads, self.length, -1, x.shape[2])
        return x.swapaxes(1, 2).reshape(self.batch, self.length, self.heads, x.shape[4])

    def tile_queries(self, tiles: _Tiles, x: Array) -> Array:
        """The rows of x `[rows, g, ...]` that each tile reads, `[n, W g, ...]`; x is the queries, or another array by row."""
        x = _take_rows(x, tiles.rows)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def tile_keys(self, tiles: _Tiles, x: Array) -> Array:
        """The block of keys, values or flags of each tile: `[n, block, ...]`."""
        return _take_rows(x, tiles.start[:, None] + jnp.arange(self.options.block, dtype=jnp.int32)[None])

    def scores(self, tiles: _Tiles, q: Array, k: Array) -> Array:
        """float32 `[n, W g, block]` of `tile_queries` and `tile_keys`; -inf for keys that are not visible."""
        # In float32 the queries are scaled, so that XLA:CPU cannot scale and subtract the maximum in one rounded operation in
        # one of the passes only. The weights of large scores would then differ between the passes.
        early = q.dtype == jnp.float32
        scores = _product(q * self.scale if early else q, k, 2, 2)
        scores = scores if early else scores * self.scale
        if self.visible is not None:
            scores = jnp.where(self.tile_keys(tiles, self.visible)[:, None], scores, -jnp.inf)
        return scores

    def kept(self, tiles: _Tiles) -> Array | None:
        """float32 `[n, W g, block]`, the factors of dropout; None without dropout."""
        if self.streams is None or self.indices.seed is None:
            return None
        rate = self.options.dropout_rate
        query = jnp.maximum(tiles.rows, 0) // self.repeats % self.length
        query = jnp.repeat(query, self.together, axis=1)[..., None]
        key = tiles.start[:, None, None] % self.keys + jnp.arange(self.options.block, dtype=jnp.int32)[None, None]
        keep = keep_mask(self.indices.seed, self.tile_queries(tiles, self.streams)[..., None], query, key, rate)
        return jnp.where(keep, jnp.float32(1.0 / (1.0 - rate)), jnp.float32(0))


def _take_rows(x: Array, rows: Array) -> Array:
    """Rows `[*rows.shape, ...]` of x; row 0 for -1."""
    taken = x.at[jnp.maximum(rows, 0)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    # XLA:CPU vectorises a gather of rows only together with arithmetic, which makes it 3 times as fast.
    return (
        taken if x.dtype == bool else lax.optimization_barrier(taken * lax.optimization_barrier(jnp.ones((), x.dtype)))
    )


def _sum_of_places(x: Array, places: Array, weights: Array) -> Array:
    """`[R, g, F]`, sums of rows of x at places `[R, C]`, times weights `[R, C, g]`."""
    # XLA:CPU takes 40 times as long for a sum over an axis of the gathered rows.
    terms = (_take_rows(x, places[:, i]) * weights[:, i, :, None] for i in range(places.shape[1]))
    return functools.reduce(jnp.add, terms)


def _or_one(total: Array) -> Array:
    """Sums of weights, 1 in place of 0."""
    return jnp.where(total > 0, total, 1.0)


def _by_head(x: Array) -> Array:
    """`[B K S, F]` from `[B, S, K, F]`."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[3])


def _product(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    """float32 product over one axis of each, batched over the first axis."""
    return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((0,), (0,))), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, q: Array, k: Array, v: Array, indices: _Indices) -> tuple[Array, Array]:
    return _forward(options, q, k, v, indices)[0]


def _by_key_head(
    function: Callable[..., Any], indices: _Indices, kv_heads: int, arrays: PyTree, tiles: PyTree = None
) -> Any:
    """`function(indices, arrays, tiles)`, on a CPU for one key head after the other.

    The partial results of one key head at a time stay in the caches and take little memory.

    Args:
      function: Returns `(arrays [B, _, _, ...] of heads on axis 2, others)`.
      indices: Indices of all heads.
      kv_heads: Number of key heads K.
      arrays: Arrays [B, _, _, ...] of heads on axis 2, a multiple of K.
      tiles: The others that an earlier call has returned.

    Returns:
      `(arrays of all heads, others)`.
    """
    if kv_heads == 1 or jax.default_backend() != "cpu":
        return function(indices, arrays, tiles)

    def by_head(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:]), 2, 0)

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    of_heads = indices.chosen, indices.kv_visible, None if indices.streams is None else indices.streams[:, None]

    def one_head(x: PyTree) -> Any:
        (chosen, kv_visible, streams), arrays, tiles = x
        streams = None if streams is None else streams[:, 0]
        return function(
            dataclasses.replace(indices, chosen=chosen, kv_visible=kv_visible, streams=streams), arrays, tiles
        )

    results, others = lax.map(one_head, (*jax.tree.map(by_head, (of_heads, arrays)), tiles))
    return jax.tree.map(joined, results), others


@accepts_numpy
def _forward(options: _Options, q: Array, k: Array, v: Array, indices: _Indices) -> tuple[Any, Any]:
    function = functools.partial(_forward_of_heads, options)
    (o, lse, lse_low), tiles = _by_key_head(function, indices, k.shape[2], (q, k, v))
    return (o, lse), (q, k, v, indices, tiles, o, lse, lse_low)


def _forward_of_heads(options: _Options, indices: _Indices, arrays: tuple[Array, ...], _: None) -> tuple[Any, Any]:
    q, k, v = arrays
    problem = _Problem(options, q, k, v, indices)
    (count, width), together = problem.tiles.rows.shape[1:], problem.together

    def compute(tiles: _Tiles) -> tuple[Array, Array, Array]:
        scores = problem.scores(tiles, problem.tile_queries(tiles, problem.q), problem.tile_keys(tiles, problem.k))
        top = jnp.maximum(jnp.max(scores, axis=2), FLOOR)
        weights = jnp.exp(scores - top[..., None])
        total = jnp.sum(weights, axis=2)
        kept = problem.kept(tiles)
        weights = weights if kept is None else weights * kept
        return top, total, _product(weights.astype(v.dtype), problem.tile_keys(tiles, problem.v), 2, 1)

    def skip(tiles: _Tiles) -> tuple[Array, Array, Array]:
        zeros = jnp.zeros((count, width * together), jnp.float32)
        empty = zeros + FLOOR, zeros, jnp.zeros((*zeros.shape, v.shape[3]), jnp.float32)
        top, total, weighted, _ = vary_alike(*empty, tiles.rows)
        return top, total, weighted

    def step(_: None, tiles: _Tiles) -> tuple[None, tuple[Array, Array, Array]]:
        return None, lax.cond(tiles.is_used.any(), compute, skip, tiles)

    _, (tops, totals, weighted) = lax.scan(step, None, problem.tiles)
    tops, totals = (_take_rows(x.reshape(-1, together), problem.places) for x in (tops, totals))
    exists = (problem.places >= 0)[..., None]
    top = jnp.max(jnp.where(exists, tops, FLOOR), axis=1)
    # The barrier keeps the exponentials out of the loop over the features of a row.
    weights = lax.optimization_barrier(jnp.exp(jnp.where(exists, tops - top[:, None], -jnp.inf)))
    total = jnp.sum(weights * totals, axis=1)
    o = _sum_of_places(weighted.reshape(-1, together, v.shape[3]), problem.places, weights) / _or_one(total)[..., None]
    lse, lse_low = (problem.from_rows(x[..., None])[..., 0] for x in log_sum(top, total))
    o = problem.from_rows(o).astype(q.dtype)
    return (o, lse, lse_low), (problem.tiles, problem.places)


@accepts_numpy
def _backward(options: _Options, residuals: PyTree, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    q, k, v, indices, tiles, o, lse, lse_low = residuals
    do, dlse = cotangents
    # d score = weight * (do . v - delta)
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=3) - jnp.where(jnp.isneginf(lse), 0.0, dlse)
    numbers = jnp.stack([jnp.where(jnp.isneginf(lse), jnp.inf, lse), lse_low, delta], axis=3)
    function = functools.partial(_backward_of_heads, options)
    (dq, dk, dv), _ = _by_key_head(function, indices, k.shape[2], (q, k, v, do, numbers), tiles)
    return dq, dk, dv, None


def _backward_of_heads(
    options: _Options, indices: _Indices, arrays: tuple[Array, ...], tiles: PyTree
) -> tuple[Any, None]:
    q, k, v, do, numbers = arrays
    problem = _Problem(options, q, k, v, indices, tiles)
    numbers, do = lax.optimization_barrier((problem.to_rows(numbers), problem.to_rows(do)))

    def compute(sums: tuple[Array, Array], tiles: _Tiles) -> tuple[tuple[Array, Array], Array]:
        q_rows, do_rows, of_rows = (problem.tile_queries(tiles, x) for x in (problem.q, do, numbers))
        k_block, v_block = (problem.tile_keys(tiles, x) for x in (problem.k, problem.v))
        is_row = jnp.repeat(tiles.rows >= 0, problem.together, axis=1)[..., None]
        weights = jnp.exp(problem.scores(tiles, q_rows, k_block) - of_rows[..., :1] - of_rows[..., 1:2])
        weights = jnp.where(is_row, weights, 0.0)
        d_weights, dropped = _product(do_rows, v_block, 2, 2), weights
        if (kept := problem.kept(tiles)) is not None:
            d_weights, dropped = d_weights * kept, weights * kept
        d_scores = (weights * (d_weights - of_rows[..., 2:]) * problem.scale).astype(q.dtype)
        # The barrier keeps XLA:CPU from computing the exponentials again for each product.
        d_scores, dropped = lax.optimization_barrier((d_scores, dropped.astype(v.dtype)))
        gradients = _product(d_scores, q_rows, 1, 1), _product(dropped, do_rows, 1, 1)

        def add(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            # One tile after the other, because several may read the same keys.
            at = tiles.start[i], jnp.zeros_like(i)
            new = (lax.dynamic_slice(x, at, dx.shape[1:]) + dx[i] for x, dx in zip(sums, gradients, strict=True))
            sum_k, sum_v = (lax.dynamic_update_slice(x, y, at) for x, y in zip(sums, new, strict=True))
            return sum_k, sum_v

        return lax.fori_loop(0, tiles.start.shape[0], add, sums), _product(d_scores, k_block, 2, 1)

    def skip(sums: tuple[Array, Array], tiles: _Tiles) -> tuple[tuple[Array, Array], Array]:
        shape = tiles.rows.shape[0], tiles.rows.shape[1] * problem.together, problem.size
        return sums, vary_alike(jnp.zeros(shape, jnp.float32), tiles.rows)[0]

    def step(sums: tuple[Array, Array], tiles: _Tiles) -> tuple[tuple[Array, Array], Array]:
        return lax.cond(tiles.is_used.any(), compute, skip, sums, tiles)

    start = (jnp.zeros(x.shape, jnp.float32) for x in (problem.k, problem.v))
    dk, dv, _ = vary_alike(*start, q)
    (dk, dv), dq = lax.scan(step, (dk, dv), problem.tiles)
    exists = (problem.places >= 0)[..., None].astype(jnp.float32)
    dq = problem.from_rows(_sum_of_places(dq.reshape(-1, problem.together, problem.size), problem.places, exists))
    shape = problem.batch, problem.kv_heads, k.shape[1], -1
    dk, dv = (x.reshape(shape).swapaxes(1, 2) for x in (dk, dv))
    return (dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)), None


_attend.defvjp(_forward, _backward)
