"""Attention within a band of two sequences of blocks, tile by tile: a block of queries against nearby blocks of keys.

Which pairs of a tile are visible is a function of integer codes of the tokens, so that any order of the tokens can be used.
Scores exist for one group of tiles at a time, also in the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hpnlp.ops.attention.block_sparse import tile
from hpnlp.ops.attention.block_sparse.operands import Options
from hpnlp.ops.attention.block_sparse.tile import QueryResiduals, TileMask
from hpnlp.ops.custom_vjp import vary_alike

# Code of padding, at the ends of sequences.
PAD = 2**31 - 1
# Scores of a group of tiles. On a CPU a group stays in the second-level cache; an accelerator needs many tiles to be busy.
CPU_SCORES, DEVICE_SCORES = 2**18, 2**25


@dataclasses.dataclass(frozen=True)
class Band:
    """Static settings of the tiles.

    Attributes:
      block: Tokens of a block, C.
      before: Number of key blocks of a tile before the block of the same number.
      after: Number of key blocks of a tile after it.
      rule: `(codes of queries, codes of keys, seed, streams [n]) -> TileMask` with arrays `[n, 1, 1, C, W]`, for tuples of
          codes `[n, C]` and `[n, W]`, W = (before + 1 + after) C keys. A hashable function or dataclass.
      options: Settings of the arithmetic of a tile.
    """

    block: int
    before: int
    after: int
    rule: Callable[..., TileMask]
    options: Options

    @property
    def width(self) -> int:
        """Number of key blocks of a tile."""
        return self.before + 1 + self.after


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Loop over groups of tiles: groups of `lanes` sequences and `blocks` blocks, `count` of them along both axes."""

    lanes: int
    blocks: int
    count: tuple[int, int]

    def start(self, i: Array) -> tuple[Array, Array]:
        """Index of the first sequence and of the first block of group i."""
        return i // self.count[1] * self.lanes, i % self.count[1] * self.blocks

    def indices(self) -> Array:
        return jnp.arange(self.count[0] * self.count[1], dtype=jnp.int32)


def by_lane(x: Float[Array, "B T K H"], heads: int) -> Float[Array, "L T H"]:
    """The sequences of all query heads; keys and values are repeated for the query heads that read them.

    Args:
      x: Queries, keys or values of K heads.
      heads: Number of query heads N, a multiple of K.

    Returns:
      [L, T, H], L = B N.
    """
    x = x.transpose(0, 2, 1, 3)
    return jnp.repeat(x, heads // x.shape[1], axis=1).reshape(-1, *x.shape[2:])


def _grid(band: Band, lanes: int, blocks: int) -> _Grid:
    scores = CPU_SCORES if jax.default_backend() == "cpu" else DEVICE_SCORES
    tiles = max(1, scores // (band.block**2 * band.width))
    if blocks >= tiles:
        groups = -(-blocks // tiles)
        return _Grid(1, -(-blocks // groups), (lanes, groups))
    together = next(n for n in range(min(lanes, max(1, tiles // blocks)), 0, -1) if lanes % n == 0)
    return _Grid(together, blocks, (lanes // together, 1))


def forward(
    band: Band, queries: tuple[Array, ...], keys: tuple[Array, ...], seed: Array, streams: Array
) -> tuple[Array, Array, Array]:
    """Unnormalised attention of all tiles.

    Args:
      band: Settings.
      queries: q [L, T, H], then codes int32 [L, T].
      keys: k [L, S, H], v [L, S, Hv], then codes int32 [L, S]; S tokens in as many blocks as the queries have.
      seed: uint32 [words], for dropout.
      streams: int32 [L], a number of each sequence, for dropout.

    Returns:
      float32 (top [L, T], total [L, T], weighted [L, T, Hv]); see `tile.forward`.

    Cost: O(L T W H) time for W keys of a tile; memory for the inputs, the results and one group of tiles.
    """
    lanes, length = queries[0].shape[:2]
    grid = _grid(band, lanes, -(-length // band.block))
    queries, keys = _query_blocks(band, grid, queries), _key_blocks(band, grid, keys)

    def group(i: Array) -> tuple[Array, Array, Array]:
        (q, *codes), (k, v, *key_codes) = _group(band, grid, i, queries, keys)
        mask = band.rule(tuple(codes), tuple(key_codes), seed, _of_group(grid, i, streams))
        top, total, weighted = tile.forward(band.options, q[:, None, None], k[:, None], v[:, None], mask)
        return top[:, 0, 0], total[:, 0, 0], weighted[:, 0, 0]

    results = lax.map(group, _varying(grid.indices(), queries[0]))
    top, total, weighted = (_in_sequence(x, lanes, length) for x in results)
    return top, total, weighted


def backward(
    band: Band,
    queries: tuple[Array, ...],
    keys: tuple[Array, ...],
    residuals: tuple[Array, ...],
    seed: Array,
    streams: Array,
) -> tuple[Array, Array, Array]:
    """Gradients of all tiles.

    Args:
      band: Settings.
      queries: q [L, T, H], then codes int32 [L, T].
      keys: k [L, S, H], v [L, S, Hv], then codes int32 [L, S]; S tokens in as many blocks as the queries have.
      residuals: (do [L, T, Hv], lse [L, T], lse_low [L, T], delta [L, T]); see `tile.QueryResiduals`.
      seed: uint32 [words], for dropout.
      streams: int32 [L], a number of each sequence, for dropout.

    Returns:
      float32 (dq [L, T, H], dk [L, S, H], dv [L, S, Hv]).

    Cost: As `forward`, 2.5 times the products.
    """
    lanes, length = queries[0].shape[:2]
    grid = _grid(band, lanes, -(-length // band.block))
    do, lse, lse_low, delta = residuals
    # The probabilities of padding are 0.
    lse_blocks = _blocks(lse, band.block, 0, grid.blocks * grid.count[1], fill=jnp.inf)
    rows = (lse_blocks, *_query_blocks(band, grid, (do, lse_low, delta, *queries)))
    key_blocks = _key_blocks(band, grid, keys)

    def group(sums: tuple[Array, ...], i: Array) -> tuple[tuple[Array, ...], Array]:
        (lse, do, lse_low, delta, q, *codes), (k, v, *key_codes) = _group(band, grid, i, rows, key_blocks)
        mask = band.rule(tuple(codes), tuple(key_codes), seed, _of_group(grid, i, streams))
        of_queries = QueryResiduals(*(x[:, None, None] for x in (q, do, lse, lse_low, delta)))
        dq, dk, dv, _ = tile.backward(band.options, of_queries, k[:, None], v[:, None], mask)
        sums = tuple(_add_to_blocks(band, grid, i, x, dx[:, 0]) for x, dx in zip(sums, (dk, dv), strict=True))
        return sums, dq[:, 0, 0]

    zeros = tuple(_varying(jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2]), jnp.float32), x) for x in key_blocks[:2])
    sums, dq = lax.scan(group, zeros, _varying(grid.indices(), rows[0]))
    size = keys[0].shape[1]
    dk, dv = (x[:, band.before :].swapaxes(2, 3).reshape(lanes, -1, x.shape[2])[:, :size] for x in sums)
    return _in_sequence(dq, lanes, length), dk, dv


def _varying(x: Array, like: Array) -> Array:
    return vary_alike(x, like)[0]


def _query_blocks(band: Band, grid: _Grid, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """`[L, T, ...]` -> `[L, blocks, C, ...]`, the number of blocks a multiple of those of a group."""
    return tuple(_blocks(x, band.block, 0, grid.blocks * grid.count[1]) for x in arrays)


def _key_blocks(band: Band, grid: _Grid, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """As `_query_blocks`, with `band.before` blocks of padding before and `band.after` after them."""
    return tuple(_blocks(x, band.block, band.before, grid.blocks * grid.count[1] + band.after) for x in arrays)


def _blocks(x: Array, size: int, before: int, blocks: int, fill: float = 0.0) -> Array:
    """`[L, T, ...]` -> `[L, before + blocks, C, ...]`. Codes are padded with PAD, other arrays with `fill`."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (before * size, blocks * size - x.shape[1])
    is_code = jnp.issubdtype(x.dtype, jnp.integer)
    x = jnp.pad(x, padding, constant_values=jnp.asarray(PAD if is_code else fill, x.dtype))
    return x.reshape(x.shape[0], before + blocks, size, *x.shape[2:])


def _group(band: Band, grid: _Grid, i: Array, rows: tuple[Array, ...], keys: tuple[Array, ...]) -> tuple[Any, Any]:
    """The arrays of the tiles of group i: `[n, C, ...]` of queries and `[n, W, ...]` of keys."""
    lane, block = grid.start(i)

    def cut(x: Array, blocks: int) -> Array:
        start = (lane, block, *[jnp.zeros_like(lane)] * (x.ndim - 2))
        return lax.dynamic_slice(x, start, (grid.lanes, blocks, *x.shape[2:]))

    def windows(x: Array) -> Array:
        x = cut(x, grid.blocks + band.width - 1)
        x = jnp.concatenate([x[:, j : j + grid.blocks] for j in range(band.width)], axis=2)
        return x.reshape(-1, *x.shape[2:])

    return tuple(cut(x, grid.blocks).reshape(-1, *x.shape[2:]) for x in rows), tuple(windows(x) for x in keys)


def _of_group(grid: _Grid, i: Array, streams: Array) -> Array:
    """The numbers of the sequences of each tile of group i, `[n]`."""
    return jnp.repeat(lax.dynamic_slice(streams, grid.start(i)[:1], (grid.lanes,)), grid.blocks)


def _add_to_blocks(band: Band, grid: _Grid, i: Array, sums: Array, dx: Array) -> Array:
    """Adds gradients of the keys of tiles `[n, H, W]` to those of all key blocks `[L, blocks, H, C]`."""
    lane, block = grid.start(i)
    start = (lane, block, jnp.zeros_like(lane), jnp.zeros_like(lane))
    part = lax.dynamic_slice(sums, start, (grid.lanes, grid.blocks + band.width - 1, *sums.shape[2:]))
    dx = dx.reshape(grid.lanes, grid.blocks, *dx.shape[1:])
    for j in range(band.width):
        padding = ((0, 0), (j, band.width - 1 - j), (0, 0), (0, 0))
        part = part + jnp.pad(dx[..., j * band.block : (j + 1) * band.block], padding)
    return lax.dynamic_update_slice(sums, part, start)


def _in_sequence(x: Array, lanes: int, length: int) -> Array:
    """Results of the groups `[groups, n, C, ...]` as `[L, T, ...]`."""
    return x.reshape(lanes, -1, *x.shape[3:])[:, :length]
