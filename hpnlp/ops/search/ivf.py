"""Approximate maximum inner product search in an inverted file: rows in cells of near ones, of which a query reads a few.

The rows of a cell lie side by side, so a query reads a stretch of memory a cell. Cells are ordered by the best score that a
query may expect of their rows, not by that of their mean: rows of one direction and different norms share a cell, and its
mean says little of its longest row.
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

# Of how many rows a cell k-means takes its sample, and how many rows look for a cell at a time.
SAMPLE = 64
ROWS = 4096
# The largest cell over the mean one; rows beyond it go to the next nearest cell. How often they look for one with room.
SLACK = 4
ROUNDS = 32
# Cells are read through windows of the capacity over powers of sqrt(2): small ones need not be read as if they were full.
WINDOWS = 9
# Neighbours in a cell of which only the largest score is kept at first: the best are made again. How many are kept at a time.
FOLD = 8
MAXIMA = 1 << 21
# The least and most queries that read a cell together, and how many numbers are gathered at a time to make scores again.
LANES = 4, 64
GATHERED = 1 << 18


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IvfIndex:
    """A table in cells. Memory: the table once more and a window of rows, C (D + 3) + V numbers.

    rows: the table's rows, cell after cell, and as many rows of nothing as the widest window has. bias: theirs, or None.
    ids: the words of the rows. starts: the first row of each cell, and V.
    means: of the rows of each cell. mean_bias: likewise, -inf where a cell is empty.
    spread: how far the best of a cell's rows is expected over their mean, for a query of length 1.
    spilled: how many rows are not in the cell of their nearest centroid, because it was full.
    capacity: what no cell has more rows than.
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
    """The rows of w in `cells` cells by k-means; the same index for the same seed. Runs on the host.

    bias: added to the scores; finite. iterations: of Lloyd's algorithm, on a sample of 64 rows a cell; a cell that runs
    empty starts again from the row that is served worst. capacity: the most rows of a cell; None takes four times the mean.
    Rows that find their cell full go, the farthest first, to the nearest that is not: `spilled` counts them, none is lost.

    Raises InputError where the table is empty, on a bias of another size, and unless 1 <= cells <= V and cells * capacity >= V.
    Cost: 2 C D (64 C iterations + V) operations; memory beside the index the table in float32 and 4096 x C scores.
    Source: Sivic & Zisserman 2003, "Video Google"; Lloyd 1982.
    """
    vocab, dim = w.shape
    if not vocab:
        raise InputError(f"w {w.shape}: it is empty; expected at least one row")
    if not 1 <= cells <= vocab:
        raise InputError(
            f"cells is {cells}: expected 1 to {vocab}, the rows of the table; near its square root is usual"
        )
    if iterations < 0:
        raise InputError(f"iterations is {iterations}: expected 0 or more")
    size = min(-(-SLACK * vocab // cells) if capacity is None else capacity, vocab)
    if cells * size < vocab:
        raise InputError(
            f"capacity is {size}: expected at least {-(-vocab // cells)}, so that {cells} cells hold {vocab}"
        )
    check_bias(bias, vocab)
    table = np.asarray(w)
    x = table.astype(np.float32)
    if bias is not None:
        x = np.concatenate([x, np.asarray(bias, np.float32)[:, None]], axis=1)
    own, spilled = _spill(x, _centroids(x, cells, seed, iterations), size)

    order = np.argsort(own, kind="stable")
    counts = np.bincount(own, minlength=cells)
    means = _means(x, own, counts)
    apart = np.bincount(own, ((x - means[own]) ** 2).sum(axis=1), minlength=cells)
    # The largest of n normal numbers is expected at sigma sqrt(2 log n), at most: Boucheron, Lugosi & Massart 2013, thm 2.5.
    sigma = np.sqrt(apart / np.maximum(counts, 1) / x.shape[1])
    spread = sigma * np.sqrt(2 * np.log(np.maximum(counts, 1)))
    mean_bias = np.zeros(cells, np.float32) if bias is None else means[:, dim]
    beyond = _windows(size)[-1]
    padded = lambda a: np.concatenate([a[order], np.zeros((beyond, *a.shape[1:]), a.dtype)])  # noqa: E731
    return IvfIndex(
        rows=jnp.asarray(padded(table)),
        bias=None if bias is None else jnp.asarray(padded(x[:, dim])),
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
    """The k best rows in `probes` cells of each query: (scores float32, ids int32), best first.

    The scores are exact; rows of other cells are not found. Where these cells have fewer than k rows, the rest has score
    -inf and id -1. With all cells probed this is exact search, up to the order of equal scores. No gradient passes.
    Raises InputError unless q is [Q, D], 1 <= k <= V and 1 <= probes <= cells.
    Cost: per query 2 (C + rows of the cells) D operations, and 2 k 8 D to make the best scores again; the rows of a cell once
    through memory for up to 64 of the queries that probe it, in windows of at most 1.5 times its size where it is not small;
    memory O(Q (k + probes)), the scores of some four million means, and some two million maxima with room for up to four
    times as many.
    Source: Johnson et al. 2017, "Billion-scale similarity search with GPUs", sec. 5 (many queries).
    """
    check_search(q, index.shape, k)
    cells = index.means.shape[0]
    if not 1 <= probes <= cells:
        raise InputError(f"probes is {probes}: expected 1 to {cells}, the cells of the index")
    index, q = lax.stop_gradient((index, q))
    wide = q.astype(jnp.float32)
    length = jnp.sqrt((wide**2).sum(axis=1, keepdims=True) + (0.0 if index.bias is None else 1.0))
    means = jnp.concatenate([index.means, index.spread[:, None]], axis=1)
    _, near = exact_search(jnp.concatenate([wide, length], axis=1), means, probes, bias=index.mean_bias)

    count = q.shape[0]
    size = max(min(MAXIMA // (probes * -(-index.capacity // FOLD)), count), 1)
    whole = count // size * size
    parts = jax.tree.map(lambda x: x[:whole].reshape(-1, size, x.shape[1]), (q, near))
    found = lax.map(lambda x: _search(index, x[0], x[1], k), parts)
    found = jax.tree.map(lambda x: x.reshape(-1, k), found)
    if whole < count:
        rest = _search(index, q[whole:], near[whole:], k)
        found = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), found, rest)
    return found


def _search(index: IvfIndex, q: Float[Array, "B D"], near: Int[Array, "B p"], k: int) -> tuple[Array, Array]:
    """The k best rows of the cells `near` each query: first the FOLD neighbours with the best maxima, then of these."""
    windows = _windows(index.capacity)
    best = _maxima(index, q, near, windows).reshape(q.shape[0], -1)
    folds = windows[-1] // FOLD
    best, at = best_of(best, min(k, best.shape[1]))
    cell = jnp.take_along_axis(near, at // folds, axis=1)
    row = (index.starts[cell] + at % folds * FOLD)[:, :, None] + jnp.arange(FOLD, dtype=jnp.int32)[None, None]
    there = (row < index.starts[cell + 1][:, :, None]) & ~jnp.isneginf(best)[:, :, None]
    row = jnp.where(there, row, -1).reshape(q.shape[0], -1)

    def again(x: tuple[Array, Array]) -> Float[Array, " n"]:
        at = jnp.maximum(x[1], 0)
        s = product(x[0][None], index.rows.at[at].get(mode="promise_in_bounds"))[0]
        return s if index.bias is None else s + index.bias[at]

    s = lax.map(again, (q, row), batch_size=max(GATHERED // (row.shape[1] * q.shape[1]), 1))
    s, at = best_of(jnp.where(row < 0, -jnp.inf, jnp.maximum(s, LOWEST)), k)
    row = jnp.take_along_axis(row, at, axis=1)
    ids = jnp.where(jnp.isneginf(s), -1, index.ids[jnp.maximum(row, 0)])
    return jnp.where(s == LOWEST, -jnp.inf, s), ids


def _windows(capacity: int) -> list[int]:
    """Multiples of FOLD, the last of at least `capacity` rows."""
    return sorted({math.ceil(capacity / 2 ** (i / 2) / FOLD) * FOLD for i in range(WINDOWS)})


def _maxima(
    index: IvfIndex, q: Float[Array, "B D"], near: Int[Array, "B p"], windows: list[int]
) -> Float[Array, "B p folds"]:
    """The best score of each FOLD neighbours in the cells `near` each query; -inf where a cell has no row.

    Pairs of a query and a cell are sorted by cell, and taken up to `lanes` of one cell at a time: a product each.
    """
    (count, probes), cells, folds = near.shape, index.means.shape[0], windows[-1] // FOLD
    pairs = count * probes
    lanes = min(max(1 << (pairs // cells).bit_length(), LANES[0]), LANES[1])
    cell, pair = lax.sort((near.reshape(-1), jnp.arange(pairs, dtype=jnp.int32)), num_keys=1)
    first = jnp.searchsorted(cell, jnp.arange(cells + 1, dtype=jnp.int32)).astype(jnp.int32)
    blocks = -(-jnp.diff(first) // lanes)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    bound = pairs // lanes + min(cells, pairs)  # of the blocks of all cells
    block = jnp.arange(bound, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(ends, block, side="right"), cells - 1).astype(jnp.int32)
    begin = first[owner] + (block - ends[owner] + blocks[owner]) * lanes
    start, size = index.starts[owner], index.starts[owner + 1] - index.starts[owner]
    window = jnp.searchsorted(jnp.asarray(windows, jnp.int32), size).astype(jnp.int32)
    queries = jnp.pad(pair // probes, (0, lanes))
    readers = [functools.partial(_read, index, rows, folds) for rows in windows]

    def add(i: Array, best: Float[Array, "P folds"]) -> Float[Array, "P folds"]:
        # Lanes behind the last pair of a cell are the next cell's, and nobody asks for what they find.
        some = q.at[lax.dynamic_slice_in_dim(queries, begin[i], lanes)].get(mode="promise_in_bounds")
        found = lax.switch(window[i], readers, some, start[i], size[i])
        return lax.dynamic_update_slice_in_dim(best, found, i * lanes, axis=0)

    empty = jnp.full((bound * lanes, folds), -jnp.inf, jnp.float32)
    best, *_ = vary_alike(empty, *jax.tree.leaves((index, q, near)))
    best = lax.fori_loop(0, ends[-1], add, best)
    place = (ends[cell] - blocks[cell]) * lanes + jnp.arange(pairs, dtype=jnp.int32) - first[cell]
    return best[jnp.zeros_like(place).at[pair].set(place, unique_indices=True)].reshape(count, probes, folds)


def _read(
    index: IvfIndex, window: int, folds: int, q: Float[Array, "g D"], start: Array, size: Array
) -> Float[Array, "g folds"]:
    """The maxima of the rows from `start` on, of which `size` count and the window has no fewer."""
    part = lambda x: lax.dynamic_slice_in_dim(x, start, window)  # noqa: E731
    s = product(part(index.rows), q)
    s = s if index.bias is None else s + part(index.bias)[:, None]
    there = jnp.arange(window, dtype=jnp.int32) < size
    s = jnp.where(there[:, None], jnp.maximum(s, LOWEST), -jnp.inf)
    s = s.reshape(-1, FOLD, q.shape[0]).max(axis=1).T
    return jnp.pad(s, ((0, 0), (0, folds - window // FOLD)), constant_values=-jnp.inf)


def _centroids(x: np.ndarray, cells: int, seed: int, iterations: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sample = x[rng.choice(x.shape[0], min(x.shape[0], SAMPLE * cells), replace=False)]
    centroids = sample[:cells]
    for _ in range(iterations):
        own, distance = _nearest(sample, centroids)
        counts = np.bincount(own, minlength=cells)
        empty = np.flatnonzero(counts == 0)
        centroids = _means(sample, own, counts)
        centroids[empty] = sample[np.argsort(-distance, kind="stable")[: empty.size]]
    return centroids


def _means(x: np.ndarray, own: np.ndarray, counts: np.ndarray) -> np.ndarray:
    means = np.zeros((counts.size, x.shape[1]), np.float32)
    some = counts > 0
    starts = (np.cumsum(counts) - counts)[some]
    means[some] = np.add.reduceat(x[np.argsort(own, kind="stable")], starts) / counts[some, None].astype(np.float32)
    return means


def _nearest(x: np.ndarray, centroids: np.ndarray, full: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The nearest centroid of each row, of those that are not full, and the squared distance to it."""
    offset = -0.5 * (centroids**2).sum(axis=1)
    offset = offset if full is None else np.where(full, np.float32(-np.inf), offset)
    own, best = np.empty(x.shape[0], np.int64), np.empty(x.shape[0], np.float32)
    for i in range(0, x.shape[0], ROWS):
        s = x[i : i + ROWS] @ centroids.T + offset
        own[i : i + ROWS] = s.argmax(axis=1)
        best[i : i + ROWS] = s.max(axis=1)
    return own, (x**2).sum(axis=1) - 2 * best


def _spill(x: np.ndarray, centroids: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """The cell of each row, no cell with more than `capacity` rows, and how many rows are not in the nearest."""
    own = np.full(x.shape[0], -1)
    room = np.full(centroids.shape[0], capacity)
    left = np.arange(x.shape[0])
    spilled = 0
    for _ in range(ROUNDS):
        cell, distance = _nearest(x[left], centroids, room == 0)
        order = np.lexsort((distance, cell))
        cell, rows = cell[order], left[order]
        rank = np.arange(cell.size) - np.searchsorted(cell, cell)
        fits = rank < room[cell]
        own[rows[fits]] = cell[fits]
        room -= np.bincount(cell[fits], minlength=room.size)
        left = rows[~fits]
        if not left.size:
            return own, spilled
        spilled = spilled or left.size
    own[left] = np.repeat(np.arange(room.size), room)[: left.size]
    return own, spilled
