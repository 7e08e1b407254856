"""Attention within a band of two sequences of blocks, tile by tile: a block of queries against nearby blocks of keys.

Which pairs of a tile are visible is a function of integer codes of the tokens, so that any order of the tokens can be used.
Scores exist for one group of tiles at a time, also in the backward pass. Values must be finite, and in the backward pass
keys, queries and cotangents as well; scores and the log-sum-exp may be NaN where no pair is visible.

A tile reads W / C consecutive blocks of keys. The tiles of every (W / C)-th block of queries read disjoint keys, one after the
other, so that their keys are a slice of the sequence: XLA:CPU takes longer to copy overlapping keys of all tiles than for the
products.
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
from hpnlp.ops.attention.block_sparse.tile import TileMask
from hpnlp.ops.helpers.custom_vjp import vary_alike

# Code of padding of keys, at the ends of sequences.
PAD = 2**31 - 1
# Scores of a group of tiles that read disjoint keys. On a CPU a group stays in the caches; an accelerator needs many tiles to
# be busy.
CPU_SCORES, DEVICE_SCORES = 2**19, 2**25


@dataclasses.dataclass(frozen=True)
class Band:
    """Static settings of the tiles.

    Attributes:
      block: Tokens of a block, C.
      before: Number of key blocks of a tile before the block of the same number.
      after: Number of key blocks of a tile after it.
      rule: `(codes of queries, codes of keys, seed, streams) -> TileMask` for integer arrays that broadcast against each other,
          to `[n, C, W]` or `[n, W, C]`, W = (before + 1 + after) C keys. A hashable function or dataclass.
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


def _grid(band: Band, lanes: int, length: int) -> _Grid:
    """The loop for sequences of `length` tokens without padding; with padding counted, another one may result."""
    scores = CPU_SCORES if jax.default_backend() == "cpu" else DEVICE_SCORES
    tiles = max(1, scores // (band.block**2 * band.width))
    runs = -(-length // (band.block * band.width))  # each run has `width` blocks, one of each set of tiles
    if runs >= tiles:
        # The most runs that pad a sequence by at most 1/16 of its length.
        together = next(n for n in range(tiles, 0, -1) if -runs % n * 16 <= runs)
        return _Grid(1, together * band.width, (lanes, -(-runs // together)))
    together = next(n for n in range(min(lanes, max(1, tiles // runs)), 0, -1) if lanes % n == 0)
    return _Grid(together, runs * band.width, (lanes // together, 1))


def padding(band: Band, lanes: int, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Numbers of tokens of padding before and after the sequences, of the arrays of queries and of those of keys.

    Args:
      band: Settings.
      lanes: Number of sequences L.
      length: Number of tokens T of each.

    Returns:
      ((0, after), (before, after)): the padded lengths are those of `forward` and `backward`.
    """
    grid = _grid(band, lanes, length)
    after = grid.blocks * grid.count[1] * band.block - length
    return (0, after), (band.before * band.block, after + band.after * band.block)


def forward(
    band: Band, length: int, queries: tuple[Array, ...], keys: tuple[Array, ...], seed: Array, streams: Array
) -> tuple[Array, Array, Array]:
    """Unnormalised attention of all tiles.

    Args:
      band: Settings.
      length: Number of tokens T of a sequence, without padding.
      queries: q [L, P, H], then codes int32 [L, P], P tokens with `padding`.
      keys: k [L, S, H], v [L, S, Hv], then codes int32 [L, S], S tokens with `padding`, which no other token sees.
      seed: uint32 [words], for dropout.
      streams: int32 [L], a number of each sequence, for dropout.

    Returns:
      float32 (top [L, P], total [L, P], weighted [L, P, Hv]); see `tile.forward`.

    Cost: O(L T W H) time for W keys of a tile; memory for the inputs, the results and one group of tiles.
    """
    grid, size = _grid(band, queries[0].shape[0], length), queries[0].shape[:2]
    queries, keys = _blocks(band, queries), _blocks(band, keys)

    def group(i: Array) -> tuple[Array, ...]:
        results = []
        for shift in range(band.width):
            (q, *codes), (k, v, *key_codes) = _tiles(band, grid, i, shift, queries, keys)
            codes, key_codes = [x[:, :, None] for x in codes], [x[:, None] for x in key_codes]
            mask = band.rule(codes, key_codes, seed, _group_streams(band, grid, i, streams))
            mask = jax.tree.map(lambda x: x[:, None, None], mask)
            partial = tile.forward(band.options, q[:, None, None], k[:, None], v[:, None], mask, finite=True)
            results.append([x[:, 0, 0] for x in partial])
        return tuple(_together(grid, *x) for x in zip(*results, strict=True))

    results = lax.map(group, _varying(grid.indices(), queries[0]))
    top, total, weighted = (x.reshape(*size, *x.shape[4:]) for x in results)
    return top, total, weighted


def backward(
    band: Band,
    length: int,
    queries: tuple[Array, ...],
    keys: tuple[Array, ...],
    residuals: tuple[Array, ...],
    seed: Array,
    streams: Array,
) -> tuple[Array, Array, Array]:
    """Gradients of all tiles.

    Args:
      band: Settings.
      length: As in `forward`.
      queries: As in `forward`.
      keys: As in `forward`.
      residuals: (do [L, P, Hv], lse [L, P], lse_low [L, P], delta [L, P]), finite in padding; see `tile.QueryResiduals`.
      seed: uint32 [words], for dropout.
      streams: int32 [L], a number of each sequence, for dropout.

    Returns:
      float32 (dq [L, P, H], dk [L, S, H], dv [L, S, Hv]), of padding without meaning.

    Cost: As `forward`, 2.5 times the products.
    """
    grid, size = _grid(band, queries[0].shape[0], length), queries[0].shape
    rows, key_blocks = _blocks(band, (*residuals, *queries)), _blocks(band, keys)

    def group(sums: tuple[Array, ...], i: Array) -> tuple[tuple[Array, ...], Array]:
        gradients = []
        for shift in range(band.width):
            (do, lse, lse_low, delta, q, *codes), (k, v, *key_codes) = _tiles(band, grid, i, shift, rows, key_blocks)
            codes, key_codes = [x[:, None] for x in codes], [x[:, :, None] for x in key_codes]
            mask = band.rule(codes, key_codes, seed, _group_streams(band, grid, i, streams))
            dq, dk, dv = _tile_gradients(band.options, (q, do, lse, lse_low, delta), k, v, mask)
            sums = tuple(_add_to_blocks(grid, i, shift, x, dx) for x, dx in zip(sums, (dk, dv), strict=True))
            gradients.append(dq)
        return sums, _together(grid, *gradients)

    zeros = tuple(_varying(jnp.zeros(x.shape, jnp.float32), x) for x in key_blocks[:2])
    sums, dq = lax.scan(group, zeros, _varying(grid.indices(), rows[0]))
    dk, dv = (x.reshape(x.shape[0], -1, x.shape[3]) for x in sums)
    return dq.reshape(size), dk, dv


def _tile_gradients(
    options: Options, residuals: tuple[Array, ...], k: Array, v: Array, mask: TileMask
) -> tuple[Array, Array, Array]:
    """Gradients of q [n, C, H], k [n, W, H] and v [n, W, Hv], with a mask [n, W, C]. As `tile.backward`, from scores by key.

    XLA:CPU transposes the scores for one of the products, and not for two, as with scores by query.
    """
    q, do, lse, lse_low, delta = residuals
    early = options.scale if q.dtype == jnp.float32 else 1.0  # as in `tile.forward`
    s = _product(k, q * early if early != 1.0 else q, 2, 2)
    s = s if early != 1.0 else s * options.scale
    # Hidden weights are 0 also for queries whose lse is NaN.
    p = jnp.where(mask.visible, jnp.exp(s - lse[:, None] - lse_low[:, None]), 0.0)
    dp = _product(v, do, 2, 2)
    dropped = p
    if mask.kept is not None:
        dropped, dp = (jnp.where(mask.kept, x * (1.0 / (1.0 - options.dropout_rate)), 0.0) for x in (p, dp))
    dtype = jnp.float32 if k.dtype == jnp.float16 else k.dtype  # float16 overflows under loss scaling
    ds = (p * (dp - delta[:, None]) * options.scale).astype(dtype)
    return (
        _product(ds, k.astype(dtype), 1, 1),
        _product(ds, q.astype(dtype), 2, 1),
        _product(dropped.astype(k.dtype), do, 2, 1),
    )


def _product(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """float32 product over an axis of each, batched over the first axis."""
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _varying(x: Array, like: Array) -> Array:
    return vary_alike(x, like)[0]


def _blocks(band: Band, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """`[L, blocks, C, ...]` from `[L, blocks C, ...]`."""
    return tuple(x.reshape(x.shape[0], -1, band.block, *x.shape[2:]) for x in arrays)


def _tiles(
    band: Band, grid: _Grid, i: Array, shift: int, rows: tuple[Array, ...], keys: tuple[Array, ...]
) -> tuple[Any, Any]:
    """Tiles of the query blocks `shift`, `shift + width`, ... of group i: `[n, C, ...]` of queries, `[n, W, ...]` of keys."""
    lane, block = grid.start(i)

    def cut(x: Array, start: Array, blocks: int) -> Array:
        starts = (lane, start, *[jnp.zeros_like(lane)] * (x.ndim - 2))
        return lax.dynamic_slice(x, starts, (grid.lanes, blocks, *x.shape[2:]))

    def query_tiles(x: Array) -> Array:
        x = cut(x, block, grid.blocks).reshape(-1, band.width, *x.shape[2:])
        return x[:, shift]

    def key_tiles(x: Array) -> Array:
        return cut(x, block + shift, grid.blocks).reshape(-1, band.width * band.block, *x.shape[3:])

    return tuple(map(query_tiles, rows)), tuple(map(key_tiles, keys))


def _group_streams(band: Band, grid: _Grid, i: Array, streams: Array) -> Array:
    """The numbers of the sequences of each tile of group i, `[n, 1, 1]`."""
    streams = lax.dynamic_slice(streams, grid.start(i)[:1], (grid.lanes,))
    return jnp.repeat(streams, grid.blocks // band.width)[:, None, None]


def _together(grid: _Grid, *results: Array) -> Array:
    """Interleaves results of the tiles of every (W / C)-th block, `[n, C, ...]` each, to `[lanes, blocks, C, ...]`."""
    return jnp.stack(results, axis=1).reshape(grid.lanes, grid.blocks, *results[0].shape[1:])


def _add_to_blocks(grid: _Grid, i: Array, shift: int, sums: Array, dx: Array) -> Array:
    """Adds gradients of the keys of tiles `[n, W, H]` to those of all key blocks `[L, blocks, C, H]`."""
    lane, block = grid.start(i)
    start = (lane, block + shift, jnp.zeros_like(lane), jnp.zeros_like(lane))
    part = lax.dynamic_slice(sums, start, (grid.lanes, grid.blocks, *sums.shape[2:]))
    return lax.dynamic_update_slice(sums, part + dx.reshape(part.shape), start)
