"""Cells of k-means, and the search of the rows of the cells near each query: what `ivf` and `pq` share.

Rows are stored cell after cell, and a search reads the cells that its queries probe through windows of a few static sizes. If
most of these cells are probed by one query, several cells are read at a time, each for one query: on two cores, 8 windows of
256 rows of 194 numbers take 10 us each, one after another 15. If several queries probe a cell, they share a product: 4 queries
take 20 us.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.search.exact import LOWEST, exact_search, padded_top_k
from hpnlp.types import InputError

# Rows for each cell in the sample that k-means is run on.
SAMPLE = 64
# Rows whose nearest cell is computed at a time, on the host.
ROWS = 4096
# Rounds in which rows without a cell go to the nearest cell with room; after them, any cell is taken.
ROUNDS = 32
# Sizes of the windows through which cells are read: the capacity over powers of sqrt(2). A small cell is read through a small
# window.
WINDOWS = 9
# Neighbouring rows of a cell of which only the largest score is kept at first; the scores of the best are computed again.
FOLD = 8
# Scores, or maxima of folds, that are kept at a time, for a part of the queries.
SCORES = 1 << 23
MAXIMA = 1 << 22
# Least number of queries for each cell from which they read a cell together.
SHARED = 2
# Largest number of queries that read a cell together.
LANES = 64
# Numbers that are read at a time if each cell is read for one query: 2 MiB of float32, and at most so many cells.
READ, READ_CELLS = 1 << 19, 8
# Numbers of rows that are gathered at a time to compute scores again.
GATHERED = 1 << 18


@runtime_checkable
class Cells(Protocol):
    """An index whose rows are stored cell after cell. Queries are a tree of arrays [Q, ...], of a form that it defines.

    Attributes:
      ids: [V] row numbers in the table.
      starts: [C + 1] first row of each cell, and V.
      capacity: Bound on the number of rows of a cell; the storage ends with padding for the widest of `windows(capacity)`.
    """

    @property
    def ids(self) -> Int[Array, " V"]: ...
    @property
    def starts(self) -> Int[Array, " C1"]: ...
    @property
    def capacity(self) -> int: ...

    def window_scores(self, queries: PyTree[Array], cell: Array, window: int) -> Float[Array, "window g"]:
        """Scores of `window` rows, from the first row of a cell on, for g queries."""
        ...


@runtime_checkable
class CodedCells(Cells, Protocol):
    """Cells whose windows have approximate scores, and whose rows are scored again."""

    def row_scores(self, queries: PyTree[Array], rows: Int[Array, " n"], cells: Int[Array, " n"]) -> Float[Array, " n"]:
        """Final scores of these rows of these cells for one query."""
        ...


def check_cells(vocab: int, cells: int, iterations: int, capacity: int | None, slack: int) -> int:
    """Checks settings of `assign_cells`.

    Args:
      vocab: V, the number of rows.
      cells: Number C of cells.
      iterations: Iterations of k-means.
      capacity: Bound on the rows of a cell, or None.
      slack: The default bound over the mean number of rows.

    Returns:
      The bound on the rows of a cell.

    Raises:
      InputError: The table is empty, cells is not 1 to V, iterations is negative, or cells * capacity is under V.
    """
    if not vocab:
        raise InputError("w has no rows: the table is empty; expected at least one row")
    if not 1 <= cells <= vocab:
        raise InputError(f"cells is {cells}: expected 1 to {vocab}, the number of rows; near its square root is usual")
    if iterations < 0:
        raise InputError(f"iterations is {iterations}: expected 0 or more")
    size = min(-(-slack * vocab // cells) if capacity is None else capacity, vocab)
    if cells * size < vocab:
        raise InputError(
            f"capacity is {size}: expected at least {-(-vocab // cells)}, so that {cells} cells hold {vocab} rows"
        )
    return size


def expected_spread(x: np.ndarray, cell: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Expected difference of the best score of a cell's rows and the score of their mean, for a query of norm 1.

    Args:
      x: [V, D] rows.
      cell: [V] cell of each row.
      means: [C, D] means of the cells.

    Returns:
      [C].
    """
    counts = np.bincount(cell, minlength=len(means))
    squares = np.empty(len(x), np.float32)
    for i in range(0, len(x), ROWS):
        rows = slice(i, i + ROWS)
        squares[rows] = ((x[rows].astype(np.float32) - means[cell[rows]]) ** 2).sum(axis=1)
    square_sums = np.bincount(cell, squares, minlength=len(means))
    # The expected maximum of n normal numbers is at most sigma sqrt(2 log n): Boucheron, Lugosi and Massart 2013, thm. 2.5.
    sigma = np.sqrt(square_sums / np.maximum(counts, 1) / x.shape[1])
    return (sigma * np.sqrt(2 * np.log(np.maximum(counts, 1)))).astype(np.float32)


def nearest_cells(
    q: Float[Array, "Q D"], means: Float[Array, "C D"], mean_bias: Array, spread: Array, probes: int, norm: float = 0.0
) -> Int[Array, "Q p"]:
    """Cells with the best expected scores: the score of the mean, and the spread times the norm of the query.

    Args:
      q: Queries.
      means: Means of the cells.
      mean_bias: [C] added to their scores; -inf for an empty cell.
      spread: [C], see `expected_spread`.
      probes: Number of cells.
      norm: Added to the square norm of the query: 1 for the number that multiplies a bias.

    Returns:
      [Q, p] cells, best first.

    Raises:
      InputError: There are fewer cells than probes.
    """
    if not 1 <= probes <= means.shape[0]:
        raise InputError(f"probes is {probes}: expected 1 to {means.shape[0]}, the number of cells")
    wide = q.astype(jnp.float32)
    length = jnp.sqrt((wide**2).sum(axis=1, keepdims=True) + norm)
    means = jnp.concatenate([means.astype(jnp.float32), spread[:, None]], axis=1)
    return exact_search(jnp.concatenate([wide, length], axis=1), means, probes, bias=mean_bias)[1]


def search_cells(index: Cells, queries: PyTree[Array], near: Int[Array, "Q p"], k: int) -> tuple[Array, Array]:
    """The k best rows of the cells `near` each query, by the scores of the windows.

    Args:
      index: The index.
      queries: Queries, [Q, ...] in each array.
      near: [Q, p] cells.
      k: Number of rows.

    Returns:
      (scores [Q, k] float32, ids [Q, k] int32), best first; -inf and -1 where the cells have fewer than k rows.
    """

    def search(queries: PyTree[Array], near: Int[Array, "B p"]) -> tuple[Array, Array]:
        scores = _read_cells(index, queries, near, 1, SHARED)
        s, at = padded_top_k(scores.reshape(near.shape[0], -1), k)
        row = index.starts[jnp.take_along_axis(near, at // scores.shape[2], axis=1)] + at % scores.shape[2]
        return _with_ids(index, s, row)

    return _in_parts(search, queries, near, SCORES // windows(index.capacity)[-1])


def search_coded_cells(
    index: CodedCells, queries: PyTree[Array], near: Int[Array, "Q p"], k: int, folds: int, shared: int
) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
    """The k best rows among those that are scored again: the FOLD rows of each of the folds with the best maxima.

    Args:
      index: The index.
      queries: Queries, [Q, ...] in each array.
      near: [Q, p] cells.
      k: Number of rows.
      folds: Number of folds whose rows are scored again, at least k.
      shared: Least number of queries for each cell from which they read a cell together.

    Returns:
      As `search_cells`.
    """
    search = functools.partial(_search_coded, index, k=k, folds=folds, shared=shared)
    return _in_parts(search, queries, near, MAXIMA // -(-index.capacity // FOLD))


def _in_parts(
    search: Callable[[Any, Array], tuple[Array, Array]], queries: PyTree[Array], near: Int[Array, "Q p"], cells: int
) -> tuple[Array, Array]:
    """Searches equal parts of the queries one after another, each with at most about `cells` pairs of a query and a cell.

    A small last part would read cells for one query at a time: 4,096 queries took twice as long.
    """
    count, probes = near.shape
    if not count:  # a search has no block to read
        shapes = jax.eval_shape(search, *jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), (queries, near)))
        return jax.tree.map(lambda x: jnp.zeros((0, *x.shape[1:]), x.dtype), shapes)
    groups = -(-count // max(cells // probes, 1))
    if groups <= 1:
        return search(queries, near)
    part = -(-count // groups)
    # The last part begins earlier, so that all have the same size, and searches some queries a second time.
    starts = jnp.minimum(jnp.arange(groups, dtype=jnp.int32) * part, count - part)

    def search_part(start: Array) -> tuple[Array, Array]:
        return search(*jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, part), (queries, near)))

    best = lax.map(search_part, starts)
    last = groups * part - count
    return jax.tree.map(lambda x: jnp.concatenate([x[:-1].reshape(-1, *x.shape[2:]), x[-1, last:]]), best)


def _with_ids(index: Cells, s: Float[Array, "B k"], row: Int[Array, "B k"]) -> tuple[Array, Array]:
    """(scores, ids) of rows; -inf and -1 where the score is that of no row."""
    ids = jnp.where(jnp.isneginf(s), -1, index.ids[jnp.where(jnp.isneginf(s), 0, row)])
    return jnp.where(s == LOWEST, -jnp.inf, s), ids


def _search_coded(
    index: CodedCells, queries: PyTree[Array], near: Int[Array, "B p"], k: int, folds: int, shared: int
) -> tuple[Array, Array]:
    """First the folds with the best maxima, then the best rows of these."""
    maxima = _read_cells(index, queries, near, FOLD, shared)
    folds_of_cell = maxima.shape[2]
    maxima = maxima.reshape(near.shape[0], -1)
    best, at = padded_top_k(maxima, min(folds, maxima.shape[1]))
    cell = jnp.take_along_axis(near, at // folds_of_cell, axis=1)
    row = (index.starts[cell] + at % folds_of_cell * FOLD)[:, :, None] + jnp.arange(FOLD, dtype=jnp.int32)[None, None]
    exists = (row < index.starts[cell + 1][:, :, None]) & ~jnp.isneginf(best)[:, :, None]
    row = jnp.where(exists, row, -1).reshape(near.shape[0], -1)
    cell = jnp.repeat(cell, FOLD, axis=1)

    def scores(x: tuple[Any, Array, Array]) -> Float[Array, " n"]:
        query, rows, cells = x
        return index.row_scores(query, jnp.maximum(rows, 0), cells)

    numbers = row.shape[1] * jax.tree.leaves(queries)[0].shape[1]
    s = lax.map(scores, (queries, row, cell), batch_size=max(GATHERED // numbers, 1))
    s, at = padded_top_k(jnp.where(row < 0, -jnp.inf, jnp.maximum(s, LOWEST)), k)
    return _with_ids(index, s, jnp.take_along_axis(row, at, axis=1))


def windows(capacity: int) -> list[int]:
    """Sizes of the windows, multiples of FOLD.

    Args:
      capacity: Bound on the number of rows of a cell.

    Returns:
      Rising sizes; the largest has at least `capacity` rows.
    """
    return sorted({math.ceil(capacity / 2 ** (i / 2) / FOLD) * FOLD for i in range(WINDOWS)})


def _read_cells(
    index: Cells, queries: PyTree[Array], near: Int[Array, "B p"], fold: int, shared: int
) -> Float[Array, "B p folds"]:
    """The best score of each `fold` neighbouring rows of the cells `near` each query; -inf where a cell has no row.

    Pairs of a query and a cell are sorted by the window of the cell, and by cell. A block is up to `lanes` pairs of one cell,
    which take one product; several blocks of one lane are read at a time.
    """
    sizes = windows(index.capacity)
    (count, probes), cells, width = near.shape, index.starts.shape[0] - 1, sizes[-1] // fold
    pairs = count * probes
    lanes = min(1 << (pairs // cells).bit_length(), LANES) if pairs >= shared * cells else 1
    window = jnp.searchsorted(jnp.asarray(sizes, jnp.int32), jnp.diff(index.starts)).astype(jnp.int32)
    by_window = jnp.argsort(window, stable=True).astype(jnp.int32)
    rank = jnp.zeros_like(by_window).at[by_window].set(jnp.arange(cells, dtype=jnp.int32), unique_indices=True)
    rank, pair = lax.sort((rank[near.reshape(-1)], jnp.arange(pairs, dtype=jnp.int32)), num_keys=1)
    first = jnp.searchsorted(rank, jnp.arange(cells + 1, dtype=jnp.int32)).astype(jnp.int32)
    blocks = -(-jnp.diff(first) // lanes)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    bound = pairs // lanes + (min(cells, pairs) if lanes > 1 else 0)  # at least the number of blocks
    block = jnp.arange(bound, dtype=jnp.int32)
    block_rank = jnp.minimum(jnp.searchsorted(ends, block, side="right"), cells - 1).astype(jnp.int32)
    begin = first[block_rank] + (block - ends[block_rank] + blocks[block_rank]) * lanes
    of_window = jnp.searchsorted(window[by_window[block_rank]], jnp.arange(len(sizes), dtype=jnp.int32), side="right")
    stops = jnp.minimum(of_window.astype(jnp.int32), ends[-1])
    of_pairs = jnp.pad(pair // probes, (0, lanes))
    block_cell, begin = (jnp.pad(x, (0, READ_CELLS)) for x in (by_window[block_rank], begin))

    def read(rows: int, at_once: int, i: Array, best: Float[Array, "P folds"]) -> Float[Array, "P folds"]:
        # Blocks after the last one of a window, and lanes after the last pair of a cell, are read again later or not used.
        def read_block(begin: Array, cell: Array) -> Float[Array, "g folds"]:
            at = lax.dynamic_slice_in_dim(of_pairs, begin, lanes)
            lane_queries = jax.tree.map(lambda x: x.at[at].get(mode="promise_in_bounds"), queries)
            return _read_cell(index, rows, fold, lane_queries, cell)

        block = (begin, block_cell)
        if at_once == 1:
            scores = read_block(*(x[i] for x in block))
        else:
            scores = jax.vmap(read_block)(*(lax.dynamic_slice_in_dim(x, i, at_once) for x in block))
        scores = jnp.pad(
            scores.reshape(at_once * lanes, -1), ((0, 0), (0, width - rows // fold)), constant_values=-jnp.inf
        )
        return lax.dynamic_update_slice_in_dim(best, scores, i * lanes, axis=0)

    empty = jnp.full(((bound + READ_CELLS) * lanes, width), -jnp.inf, jnp.float32)
    best, *_ = vary_alike(empty, *jax.tree.leaves((index, queries, near)))
    start = jnp.int32(0)
    for rows, stop in zip(sizes, stops, strict=True):
        numbers = rows * jax.tree.leaves(queries)[0].shape[1]
        at_once = min(max(READ // numbers, 1), READ_CELLS) if lanes == 1 else 1
        steps = -(-(stop - start) // at_once)
        best = lax.fori_loop(
            0, steps, lambda i, best, r=rows, n=at_once, start=start: read(r, n, start + i * n, best), best
        )
        start = stop
    place = (ends[rank] - blocks[rank]) * lanes + jnp.arange(pairs, dtype=jnp.int32) - first[rank]
    return best[jnp.zeros_like(place).at[pair].set(place, unique_indices=True)].reshape(count, probes, width)


def _read_cell(index: Cells, window: int, fold: int, queries: PyTree[Array], cell: Array) -> Float[Array, "g folds"]:
    """Maxima of the folds of a cell, read through a window of at least its size."""
    s = index.window_scores(queries, cell, window)
    in_cell = jnp.arange(window, dtype=jnp.int32) < index.starts[cell + 1] - index.starts[cell]
    s = jnp.where(in_cell[:, None], jnp.maximum(s, LOWEST), -jnp.inf)
    return s.reshape(-1, fold, s.shape[1]).max(axis=1).T


def in_order(x: np.ndarray, order: np.ndarray, capacity: int) -> np.ndarray:
    """Rows of x in this order, and zeros after them.

    Args:
      x: [V, ...].
      order: [V] rows of x.
      capacity: Bound on the rows of a cell.

    Returns:
      [R, ...] rows, padded for the widest window.
    """
    return np.concatenate([x[order], np.zeros((windows(capacity)[-1], *x.shape[1:]), x.dtype)])


def assign(
    x: np.ndarray, cells: int, seed: int, iterations: int, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Cells of rows by k-means.

    Args:
      x: [V, D] rows.
      cells: Number C of cells.
      seed: Seed of the sample.
      iterations: Iterations of k-means.
      capacity: Bound on the rows of a cell.

    Returns:
      (cell [V], order [V] of the rows by cell, starts [C + 1] of the cells in this order, number of rows that are not in the
      cell of their nearest centroid).
    """
    cell, spilled = assign_cells(x, centroids(x, cells, seed, iterations), capacity)
    starts = np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=cells))])
    return cell, np.argsort(cell, kind="stable"), starts, spilled


def centroids(x: np.ndarray, cells: int, seed: int, iterations: int, sample_size: int | None = None) -> np.ndarray:
    """Centroids [C, D] of k-means on a sample of the rows x [V, D]; of SAMPLE rows for each cell by default."""
    rng = np.random.default_rng(seed)
    sample = x[rng.choice(x.shape[0], min(x.shape[0], sample_size or SAMPLE * cells), replace=False)].astype(np.float32)
    centroids = sample[:cells]
    for _ in range(iterations):
        cell, distance = nearest(sample, centroids)
        counts = np.bincount(cell, minlength=cells)
        empty = np.flatnonzero(counts == 0)
        centroids = cell_means(sample, cell, counts)
        centroids[empty] = sample[np.argsort(-distance, kind="stable")[: empty.size]]
    return centroids


def cell_means(x: np.ndarray, cell: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean [C, D] of the rows x of each cell; 0 for an empty cell. Rows are converted to float32 a few cells at a time."""
    means = np.zeros((counts.size, x.shape[1]), np.float32)
    order, ends = np.argsort(cell, kind="stable"), np.cumsum(counts)
    first = 0
    while first < counts.size:
        begin = ends[first] - counts[first]
        last = max(int(np.searchsorted(ends, begin + ROWS, side="right")), first + 1)
        nonempty = first + np.flatnonzero(counts[first:last])
        if nonempty.size:
            rows = x[order[begin : ends[last - 1]]].astype(np.float32)
            sums = np.add.reduceat(rows, ends[nonempty] - counts[nonempty] - begin)
            means[nonempty] = sums / counts[nonempty, None].astype(np.float32)
        first = last
    return means


def nearest(
    x: np.ndarray, centroids: np.ndarray, rows: np.ndarray | None = None, full: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(nearest centroid of each of some rows of x among those that are not full, squared distance to it)."""
    rows = np.arange(len(x)) if rows is None else rows
    offset = -0.5 * (centroids**2).sum(axis=1)
    offset = offset if full is None else np.where(full, np.float32(-np.inf), offset)
    cell, distance = np.empty(rows.size, np.int64), np.empty(rows.size, np.float32)
    for i in range(0, rows.size, ROWS):
        block = x[rows[i : i + ROWS]].astype(np.float32)
        s = block @ centroids.T + offset
        cell[i : i + ROWS] = s.argmax(axis=1)
        distance[i : i + ROWS] = (block**2).sum(axis=1) - 2 * s.max(axis=1)
    return cell, distance


def assign_cells(x: np.ndarray, centroids: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """(cell of each row, with at most `capacity` rows in a cell; number of rows that are not in the nearest cell)."""
    assigned = np.full(x.shape[0], -1)
    room = np.full(centroids.shape[0], capacity)
    remaining = np.arange(x.shape[0])
    spilled = 0
    for _ in range(ROUNDS):
        cell, distance = nearest(x, centroids, remaining, room == 0)
        order = np.lexsort((distance, cell))
        cell, rows = cell[order], remaining[order]
        rank = np.arange(cell.size) - np.searchsorted(cell, cell)
        fits = rank < room[cell]
        assigned[rows[fits]] = cell[fits]
        room -= np.bincount(cell[fits], minlength=room.size)
        remaining = rows[~fits]
        if not remaining.size:
            return assigned, spilled
        spilled = spilled or remaining.size
    assigned[remaining] = np.repeat(np.arange(room.size), room)[: remaining.size]
    return assigned, spilled
