"""Approximate maximum inner product search in an inverted file (IVF): a query reads the rows of a few cells of k-means.

The rows of a cell are contiguous in memory. A query ranks the cells by the best score that it can expect of their rows, not by
the score of their mean: rows of one direction and different norms share a cell, and its mean is a poor estimate of its longest
row.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.custom_vjp import vary_alike
from hpnlp.ops.search.exact import LOWEST, best_of, check_bias, check_search, exact_search, product
from hpnlp.types import InputError

# Rows for each cell in the sample that k-means is run on.
SAMPLE = 64
# Rows whose nearest cell is computed at a time, on the host.
ROWS = 4096
# Default capacity of a cell over the mean number of rows; further rows go to the next nearest cell.
SLACK = 4
# Rounds in which rows without a cell go to the nearest cell with room; after them, any cell is taken.
ROUNDS = 32
# Sizes of the windows through which cells are read: the capacity over powers of sqrt(2). A small cell is read through a small
# window.
WINDOWS = 9
# Neighbouring rows of a cell of which only the largest score is kept at first; the scores of the best are computed again.
FOLD = 8
# Maxima that are kept at a time, for a part of the queries.
MAXIMA = 1 << 21
# Least and largest number of queries that read a cell together.
LANES = 4, 64
# Numbers of rows that are gathered at a time to compute scores again.
GATHERED = 1 << 18


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IvfIndex:
    """A table of V rows in C cells. It takes a copy of the table, a window of rows, and C (D + 3) + V numbers.

    Attributes:
      rows: [R, D] rows of the table, cell after cell, and zeros for the widest window.
      bias: [R] of the rows; None for no bias.
      ids: [V] row numbers in the table.
      starts: [C + 1] first row of each cell, and V.
      means: [C, D] mean of the rows of each cell.
      mean_bias: [C] mean bias of each cell; -inf for an empty cell.
      spread: [C] expected difference of the best score of a cell's rows and the score of their mean, for a query of norm 1.
      spilled: Number of rows that are not in the cell of their nearest centroid, because it was full.
      capacity: Bound on the number of rows of a cell.
    """

    rows: Float[Array, "R D"]
    bias: Float[Array, " R"] | None
    ids: Int[Array, " V"]
    starts: Int[Array, " C1"]
    means: Float[Array, "C D"]
    mean_bias: Float[Array, " C"]
    spread: Float[Array, " C"]
    spilled: Int[Array, ""]
    capacity: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D) of the table."""
        return self.ids.shape[0], self.rows.shape[1]


def build_ivf(
    w: Float[Array | np.ndarray, "V D"],
    *,
    cells: int,
    seed: int = 0,
    iterations: int = 10,
    capacity: int | None = None,
    bias: Float[Array | np.ndarray, " V"] | None = None,
) -> IvfIndex:
    """Builds an index on the host: cells by k-means.

    Args:
      w: [V, D] table.
      cells: Number C of cells; near sqrt(V) is usual.
      seed: Seed of the sample; the same seed gives the same index.
      iterations: Number of iterations of Lloyd's algorithm, on a sample of 64 rows for each cell. A cell that becomes
        empty starts again from the row that is farthest from its centroid.
      capacity: Bound on the rows of a cell; None is 4 times the mean. The rows of an over-full cell that are farthest from its
        centroid go to the nearest cell with room; `IvfIndex.spilled` counts them, and no row is lost.
      bias: [V] added to the scores; finite. None for no bias.

    Returns:
      The index.

    Raises:
      InputError: The table is empty, the bias is not [V], cells is not 1 to V, iterations is negative, or cells * capacity is
        under V.

    Cost:
      2 C D (64 C iterations + V) operations; memory beside the index for 4096 x C scores, the rows of a cell in float32, and
      the table in float32 if there is a bias.

    References:
      Sivic and Zisserman 2003, "Video Google: a text retrieval approach to object matching in videos".
      Lloyd 1982, "Least squares quantization in PCM".
    """
    vocab, dim = w.shape
    if not vocab:
        raise InputError(f"w {w.shape}: the table is empty; expected at least one row")
    if not 1 <= cells <= vocab:
        raise InputError(f"cells is {cells}: expected 1 to {vocab}, the number of rows; near its square root is usual")
    if iterations < 0:
        raise InputError(f"iterations is {iterations}: expected 0 or more")
    size = min(-(-SLACK * vocab // cells) if capacity is None else capacity, vocab)
    if cells * size < vocab:
        raise InputError(
            f"capacity is {size}: expected at least {-(-vocab // cells)}, so that {cells} cells hold {vocab} rows"
        )
    check_bias(bias, vocab)
    x = table = np.asarray(w)
    if bias is not None:
        x = np.concatenate([table.astype(np.float32), np.asarray(bias, np.float32)[:, None]], axis=1)
    cell, spilled = _assign_cells(x, _centroids(x, cells, seed, iterations), size)

    order = np.argsort(cell, kind="stable")
    counts = np.bincount(cell, minlength=cells)
    means = _means(x, cell, counts)
    squares = np.empty(vocab, np.float32)
    for i in range(0, vocab, ROWS):
        rows = slice(i, i + ROWS)
        squares[rows] = ((x[rows].astype(np.float32) - means[cell[rows]]) ** 2).sum(axis=1)
    square_sums = np.bincount(cell, squares, minlength=cells)
    # The expected maximum of n normal numbers is at most sigma sqrt(2 log n): Boucheron, Lugosi and Massart 2013, thm. 2.5.
    sigma = np.sqrt(square_sums / np.maximum(counts, 1) / x.shape[1])
    spread = sigma * np.sqrt(2 * np.log(np.maximum(counts, 1)))
    mean_bias = np.zeros(cells, np.float32) if bias is None else means[:, dim]
    padding = _windows(size)[-1]
    return IvfIndex(
        rows=jnp.asarray(_reordered(table, order, padding)),
        bias=None if bias is None else jnp.asarray(_reordered(x[:, dim], order, padding)),
        ids=jnp.asarray(order, jnp.int32),
        starts=jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32),
        means=jnp.asarray(means[:, :dim]),
        mean_bias=jnp.asarray(np.where(counts > 0, mean_bias, np.float32(-np.inf))),
        spread=jnp.asarray(spread, jnp.float32),
        spilled=jnp.asarray(spilled, jnp.int32),
        capacity=size,
    )


@array_op("Q", q="Q")
def ivf_search(
    index: IvfIndex, q: Float[Array, "Q D"], k: int, *, probes: int
) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
    """The k best rows of the cells that a query probes.

    Scores are exact; rows of other cells are missed. With all cells probed this is exact search, up to the order of equal
    scores. There is no gradient.

    Args:
      index: Result of `build_ivf`.
      q: [Q, D] queries.
      k: Number of rows, 1 to V.
      probes: Number of cells that each query reads, 1 to C.

    Returns:
      (scores [Q, k] float32, ids [Q, k] int32), best first; -inf and -1 where the cells have fewer than k rows.

    Raises:
      InputError: q is not [Q, D], or k or probes are out of range.

    Cost:
      For each query 2 (C + rows of the cells) D operations, and 16 k D to compute the best scores again. The rows of a cell are
      read once for up to 64 of the queries that probe it, through a window of at most 1.5 times its size unless it is small.
      Memory O(Q (k + probes)), the scores of about 2^22 means, and about 2^21 to 2^23 maxima.

    References:
      Johnson et al. 2017, "Billion-scale similarity search with GPUs", sec. 5.
    """
    check_search(q, index.shape, k)
    cells = index.means.shape[0]
    if not 1 <= probes <= cells:
        raise InputError(f"probes is {probes}: expected 1 to {cells}, the number of cells")
    index, q = lax.stop_gradient((index, q))
    near = _nearest_cells(index, q, probes)
    count = q.shape[0]
    part = max(min(MAXIMA // (probes * -(-index.capacity // FOLD)), count), 1)
    end = count // part * part
    blocks = jax.tree.map(lambda x: x[:end].reshape(-1, part, x.shape[1]), (q, near))
    best = lax.map(lambda x: _search(index, x[0], x[1], k), blocks)
    best = jax.tree.map(lambda x: x.reshape(-1, k), best)
    if end < count:
        last = _search(index, q[end:], near[end:], k)
        best = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), best, last)
    return best


def _nearest_cells(index: IvfIndex, q: Float[Array, "Q D"], probes: int) -> Int[Array, "Q p"]:
    """Cells with the best expected scores: the score of the mean, and the spread times the norm of the query.

    The norm of the query includes the 1 that multiplies the bias.
    """
    wide = q.astype(jnp.float32)
    norm = jnp.sqrt((wide**2).sum(axis=1, keepdims=True) + (0.0 if index.bias is None else 1.0))
    means = jnp.concatenate([index.means, index.spread[:, None]], axis=1)
    return exact_search(jnp.concatenate([wide, norm], axis=1), means, probes, bias=index.mean_bias)[1]


def _search(index: IvfIndex, q: Float[Array, "B D"], near: Int[Array, "B p"], k: int) -> tuple[Array, Array]:
    """The k best rows of the cells `near` each query: first the folds with the best maxima, then the best rows of these.

    A fold is FOLD neighbouring rows of a cell.
    """
    windows = _windows(index.capacity)
    best = _maxima(index, q, near, windows).reshape(q.shape[0], -1)
    folds = windows[-1] // FOLD
    best, at = best_of(best, min(k, best.shape[1]))
    cell = jnp.take_along_axis(near, at // folds, axis=1)
    row = (index.starts[cell] + at % folds * FOLD)[:, :, None] + jnp.arange(FOLD, dtype=jnp.int32)[None, None]
    exists = (row < index.starts[cell + 1][:, :, None]) & ~jnp.isneginf(best)[:, :, None]
    row = jnp.where(exists, row, -1).reshape(q.shape[0], -1)

    def scores(x: tuple[Array, Array]) -> Float[Array, " n"]:
        query, rows = x
        at = jnp.maximum(rows, 0)
        s = product(query[None], index.rows.at[at].get(mode="promise_in_bounds"))[0]
        return s if index.bias is None else s + index.bias[at]

    s = lax.map(scores, (q, row), batch_size=max(GATHERED // (row.shape[1] * q.shape[1]), 1))
    s, at = best_of(jnp.where(row < 0, -jnp.inf, jnp.maximum(s, LOWEST)), k)
    row = jnp.take_along_axis(row, at, axis=1)
    ids = jnp.where(jnp.isneginf(s), -1, index.ids[jnp.maximum(row, 0)])
    return jnp.where(s == LOWEST, -jnp.inf, s), ids


def _windows(capacity: int) -> list[int]:
    """Sizes of the windows, multiples of FOLD; the largest has at least `capacity` rows."""
    return sorted({math.ceil(capacity / 2 ** (i / 2) / FOLD) * FOLD for i in range(WINDOWS)})


def _maxima(
    index: IvfIndex, q: Float[Array, "B D"], near: Int[Array, "B p"], windows: list[int]
) -> Float[Array, "B p folds"]:
    """The best score of each fold of the cells `near` each query; -inf where a cell has no row.

    Pairs of a query and a cell are sorted by cell. A block is up to `lanes` pairs of one cell, which take one product.
    """
    (count, probes), cells, folds = near.shape, index.means.shape[0], windows[-1] // FOLD
    pairs = count * probes
    lanes = min(max(1 << (pairs // cells).bit_length(), LANES[0]), LANES[1])
    cell, pair = lax.sort((near.reshape(-1), jnp.arange(pairs, dtype=jnp.int32)), num_keys=1)
    first = jnp.searchsorted(cell, jnp.arange(cells + 1, dtype=jnp.int32)).astype(jnp.int32)
    blocks = -(-jnp.diff(first) // lanes)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    bound = pairs // lanes + min(cells, pairs)  # at least the number of blocks
    block = jnp.arange(bound, dtype=jnp.int32)
    block_cell = jnp.minimum(jnp.searchsorted(ends, block, side="right"), cells - 1).astype(jnp.int32)
    begin = first[block_cell] + (block - ends[block_cell] + blocks[block_cell]) * lanes
    start, size = index.starts[block_cell], index.starts[block_cell + 1] - index.starts[block_cell]
    window = jnp.searchsorted(jnp.asarray(windows, jnp.int32), size).astype(jnp.int32)
    queries = jnp.pad(pair // probes, (0, lanes))
    readers = [functools.partial(_read_cell, index, rows, folds) for rows in windows]

    def add(i: Array, best: Float[Array, "P folds"]) -> Float[Array, "P folds"]:
        # Lanes after the last pair of a cell hold pairs of the next cell; their results are not used.
        block_q = q.at[lax.dynamic_slice_in_dim(queries, begin[i], lanes)].get(mode="promise_in_bounds")
        maxima = lax.switch(window[i], readers, block_q, start[i], size[i])
        return lax.dynamic_update_slice_in_dim(best, maxima, i * lanes, axis=0)

    empty = jnp.full((bound * lanes, folds), -jnp.inf, jnp.float32)
    best, *_ = vary_alike(empty, *jax.tree.leaves((index, q, near)))
    best = lax.fori_loop(0, ends[-1], add, best)
    place = (ends[cell] - blocks[cell]) * lanes + jnp.arange(pairs, dtype=jnp.int32) - first[cell]
    return best[jnp.zeros_like(place).at[pair].set(place, unique_indices=True)].reshape(count, probes, folds)


def _read_cell(
    index: IvfIndex, window: int, folds: int, q: Float[Array, "g D"], start: Array, size: Array
) -> Float[Array, "g folds"]:
    """Maxima of the folds of the `size` rows from `start` on, read through a window of at least that many rows."""
    s = product(lax.dynamic_slice_in_dim(index.rows, start, window), q)
    s = s if index.bias is None else s + lax.dynamic_slice_in_dim(index.bias, start, window)[:, None]
    in_cell = jnp.arange(window, dtype=jnp.int32) < size
    s = jnp.where(in_cell[:, None], jnp.maximum(s, LOWEST), -jnp.inf)
    s = s.reshape(-1, FOLD, q.shape[0]).max(axis=1).T
    return jnp.pad(s, ((0, 0), (0, folds - window // FOLD)), constant_values=-jnp.inf)


def _reordered(x: np.ndarray, order: np.ndarray, padding: int) -> np.ndarray:
    """Rows of x in this order, and zeros after them."""
    return np.concatenate([x[order], np.zeros((padding, *x.shape[1:]), x.dtype)])


def _centroids(x: np.ndarray, cells: int, seed: int, iterations: int) -> np.ndarray:
    """Centroids [C, D] of k-means on a sample of the rows x [V, D]."""
    rng = np.random.default_rng(seed)
    sample = x[rng.choice(x.shape[0], min(x.shape[0], SAMPLE * cells), replace=False)].astype(np.float32)
    centroids = sample[:cells]
    for _ in range(iterations):
        cell, distance = _nearest(sample, centroids, np.arange(len(sample)))
        counts = np.bincount(cell, minlength=cells)
        empty = np.flatnonzero(counts == 0)
        centroids = _means(sample, cell, counts)
        centroids[empty] = sample[np.argsort(-distance, kind="stable")[: empty.size]]
    return centroids


def _means(x: np.ndarray, cell: np.ndarray, counts: np.ndarray) -> np.ndarray:
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


def _nearest(
    x: np.ndarray, centroids: np.ndarray, rows: np.ndarray, full: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(nearest centroid of each of some rows of x among those that are not full, squared distance to it)."""
    offset = -0.5 * (centroids**2).sum(axis=1)
    offset = offset if full is None else np.where(full, np.float32(-np.inf), offset)
    cell, distance = np.empty(rows.size, np.int64), np.empty(rows.size, np.float32)
    for i in range(0, rows.size, ROWS):
        block = x[rows[i : i + ROWS]].astype(np.float32)
        s = block @ centroids.T + offset
        cell[i : i + ROWS] = s.argmax(axis=1)
        distance[i : i + ROWS] = (block**2).sum(axis=1) - 2 * s.max(axis=1)
    return cell, distance


def _assign_cells(x: np.ndarray, centroids: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """(cell of each row, with at most `capacity` rows in a cell; number of rows that are not in the nearest cell)."""
    assigned = np.full(x.shape[0], -1)
    room = np.full(centroids.shape[0], capacity)
    remaining = np.arange(x.shape[0])
    spilled = 0
    for _ in range(ROUNDS):
        cell, distance = _nearest(x, centroids, remaining, room == 0)
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
