"""Approximate maximum inner product search in an inverted file (IVF): a query reads the rows of a few cells of k-means.

The rows of a cell are contiguous in memory. A query ranks the cells by the best score that it can expect of their rows, not by
the score of their mean: rows of one direction and different norms share a cell, and its mean is a poor estimate of its longest
row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.search.cells import (
    assign,
    cell_means,
    check_cells,
    expected_spread,
    in_order,
    nearest_cells,
    search_cells,
)
from hpnlp.ops.search.exact import check_bias, check_search, product

# Default capacity of a cell over the mean number of rows; rows beyond it go to the next nearest cell.
SLACK = 4


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

    def window_scores(self, queries: Array, cell: Array, window: int) -> Float[Array, "window g"]:
        """Scores of `window` rows, from the first row of a cell on, for queries [g, D]."""
        start = self.starts[cell]
        s = product(lax.dynamic_slice_in_dim(self.rows, start, window), queries)
        return s if self.bias is None else s + lax.dynamic_slice_in_dim(self.bias, start, window)[:, None]


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
    size = check_cells(vocab, cells, iterations, capacity, SLACK)
    check_bias(bias, vocab)
    x = table = np.asarray(w)
    if bias is not None:
        x = np.concatenate([table.astype(np.float32), np.asarray(bias, np.float32)[:, None]], axis=1)
    cell, order, starts, spilled = assign(x, cells, seed, iterations, size)
    counts = np.diff(starts)
    means = cell_means(x, cell, counts)
    mean_bias = np.zeros(cells, np.float32) if bias is None else means[:, dim]
    return IvfIndex(
        rows=jnp.asarray(in_order(table, order, size)),
        bias=None if bias is None else jnp.asarray(in_order(x[:, dim], order, size)),
        ids=jnp.asarray(order, jnp.int32),
        starts=jnp.asarray(starts, jnp.int32),
        means=jnp.asarray(means[:, :dim]),
        mean_bias=jnp.asarray(np.where(counts > 0, mean_bias, np.float32(-np.inf))),
        spread=jnp.asarray(expected_spread(x, cell, means)),
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
      For each query 2 (C + rows of the cells) D operations. The rows of a cell are read for each query, and once for up to 64
      of them if there are at least 2 for each cell, through a window of at most 1.5 times its size unless it is small.
      Memory O(Q (k + probes)), the scores of about 2^22 means, and about 2^23 scores of rows.

    References:
      Johnson et al. 2017, "Billion-scale similarity search with GPUs", sec. 5.
    """
    check_search(q, index.shape, k)
    index, q = lax.stop_gradient((index, q))
    # With a bias, the query has one more number, 1.
    norm = 0.0 if index.bias is None else 1.0
    near = nearest_cells(q, index.means, index.mean_bias, index.spread, probes, norm)
    return search_cells(index, q, near, k)
