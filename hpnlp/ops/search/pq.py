"""Approximate maximum inner product search among product-quantized rows, in cells of k-means (IVFADC).

A row is stored as the number of its cell and one code for each part of its difference to the mean of the cell. The parts are
groups of principal directions of these differences, of which each group gets an equal share. If few queries probe a cell, the
scores of its rows are sums of numbers from a table of the query, one for each code: on XLA:CPU 6 us for a window of 390 rows,
against 42 for decoding it. If many do, the codes are decoded once and multiplied with all queries: a window of 400 rows and 64
queries takes 83 us, products with one-hot codes in int8 155, and a float32 table without codes 90. The best rows are scored
again.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Num, UInt8

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.search import cells as cell_search
from hpnlp.ops.search.cells import FOLD
from hpnlp.ops.search.exact import check_search, product
from hpnlp.types import InputError

# Default capacity of a cell over the mean number of rows; rows beyond it go to the next nearest cell.
SLACK = 2
# Least number of queries for each cell from which codes are decoded for several of them.
DECODED = 8
# Rows that the codebooks and the rotation are computed from, at most.
SAMPLE = 1 << 16
# Numbers of centroids of a part: codes of 4 and 8 bits.
CENTROIDS = 16, 256
# Vectors that an index can keep beside the codes, to score the best rows again.
KEEP = "same", "float16", "int8", "none"


@dataclasses.dataclass(frozen=True)
class PqCodes:
    """The form in which an index stores rows: their codes, and what it keeps beside them.

    Attributes:
      parts: Number M of parts. A row takes M bytes, or M / 2 with 16 centroids. Rows whose length is no multiple of M are
        extended by zeros.
      centroids: Centroids of a part, 256 or 16.
      keep: Vectors that are kept beside the codes to score the best rows again: those of the table as they are ("same"),
        rounded to "float16", rounded to "int8" with a factor for each row, or "none".
      fine: Number of parts of a second code, of one byte each, of what the first leaves; with keep="none", it takes the place
        of the vectors. 0 for none.
    """

    parts: int
    centroids: int = 256
    keep: str = "same"
    fine: int = 0

    def check(self, vocab: int, dim: int) -> None:
        """Checks the numbers against the size [V, D] of a table.

        Args:
          vocab: Number of rows V.
          dim: Numbers of a row D.

        Raises:
          InputError: There are fewer numbers than parts, or fewer rows than centroids, or a field is out of range.
        """
        if self.centroids not in CENTROIDS:
            raise InputError(f"centroids is {self.centroids}: expected 256, codes of 8 bits, or 16, codes of 4 bits")
        for name, number in (("parts", self.parts), ("fine", self.fine)):
            least = 1 if name == "parts" else 0
            if not least <= number <= dim:
                raise InputError(f"{name} is {number}: expected {least} to {dim}, the numbers of a vector")
        if self.width(dim) > 1.5 * dim:
            raise InputError(
                f"parts is {self.parts} and fine is {self.fine}: the {dim} numbers of a vector would be extended to "
                f"{self.width(dim)}, a multiple of both: choose one that divides the other"
            )
        if self.centroids == 16 and self.parts % 2:
            raise InputError(
                f"parts is {self.parts}: two codes of 4 bits share a byte; expected an even number, or centroids=256"
            )
        least = 256 if self.fine else self.centroids
        if vocab < least:
            raise InputError(
                f"w has {vocab} rows: expected at least {least}, one for each centroid of a part; use kind exact"
            )
        if self.keep not in KEEP:
            raise InputError(f"keep is {self.keep!r}: expected one of {', '.join(KEEP)}")

    def width(self, dim: int) -> int:
        """Numbers of a row that is extended by zeros, so that all parts have equally many.

        Args:
          dim: Numbers of a row D.

        Returns:
          E, at least D.
        """
        multiple = math.lcm(self.parts, self.fine or 1)
        return -(-dim // multiple) * multiple


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PqIndex:
    """A table of V rows in C cells, as codes of M parts with K centroids. All numbers are those of the table over `unit`.

    Attributes:
      codes: [R, M] codes of the rows, cell after cell, and zeros for the widest window; [R, M / 2] with 16 centroids.
      books: [M, K, E / M] float16 centroids of the parts, E of `PqCodes.width`.
      rotation: [D, E] float16 matrix with orthonormal rows, which queries are multiplied with.
      unit: Power of 2, at least the largest absolute value of the table.
      ids: [V] row numbers in the table.
      starts: [C + 1] first row of each cell, and V.
      means: [C, E] float16 mean of the rows of each cell, rotated.
      mean_bias: [C] 0, and -inf for an empty cell.
      spread: [C] expected difference of the best score of a cell's rows and the score of their mean, for a query of norm 1.
      capacity: Bound on the number of rows of a cell.
      vectors: [V, D] rows in the order of the codes, to score the best of them again; None to use codes alone.
      scales: [V] or [1] factors of the vectors; None for vectors as in the table.
      fine_codes: [V, F] codes of what the codes leave of the rows; None for none.
      fine_books: [F, 256, E / F] float16 centroids of `fine_codes`.
    """

    codes: UInt8[Array, "R _"]
    books: Float[Array, "M K d"]
    rotation: Float[Array, "D E"]
    unit: Float[Array, ""]
    ids: Int[Array, " V"]
    starts: Int[Array, " C1"]
    means: Float[Array, "C E"]
    mean_bias: Float[Array, " C"]
    spread: Float[Array, " C"]
    capacity: int = dataclasses.field(metadata={"static": True})
    vectors: Num[Array, "V D"] | None = None
    scales: Float[Array, " n"] | None = None
    fine_codes: UInt8[Array, "V _"] | None = None
    fine_books: Float[Array, "F K2 f"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D) of the table."""
        return self.ids.shape[0], self.rotation.shape[0]

    def window_scores(
        self, queries: tuple[Array, Array, Array | None], cell: Array, window: int
    ) -> Float[Array, "window g"]:
        """Scores of `window` rows, from the first row of a cell on.

        Args:
          queries: (rotated [g, E], plain [g, D], None), or with a table of products [1, M K] in place of None for g of 1.
          cell: A cell.
          window: Number of rows.

        Returns:
          [window, g].
        """
        rotated, _, table = queries
        codes = lax.dynamic_slice_in_dim(self.codes, self.starts[cell], window)
        if table is None:
            return product(decode(codes, self.books) + self.means[cell][None], rotated)
        products = table[0].at[_book_rows(codes, self.books)].get(mode="promise_in_bounds")
        # A product with ones, because XLA:CPU takes twice as long to sum over the last axis.
        return product(products, jnp.ones((1, products.shape[1]))) + product(self.means[cell][None], rotated)

    def row_scores(
        self, queries: tuple[Array, Array, Array | None], rows: Int[Array, " n"], cells: Int[Array, " n"]
    ) -> Float[Array, " n"]:
        """Scores of rows for one query, from the most exact form in which the index has the rows."""
        rotated, plain, _ = queries
        if self.vectors is not None:
            vectors = self.vectors.at[rows].get(mode="promise_in_bounds")
            s = product(plain[None], vectors)[0]
            if self.scales is None:
                return s
            return s * (self.scales[rows] if vectors.dtype == jnp.int8 else self.scales)
        x = decode(self.codes.at[rows].get(mode="promise_in_bounds"), self.books) + self.means[cells]
        if self.fine_codes is not None and self.fine_books is not None:
            x = x + decode(self.fine_codes.at[rows].get(mode="promise_in_bounds"), self.fine_books)
        return product(rotated[None], x)[0]


def decode(codes: UInt8[Array, "n _"], books: Float[Array, "M K d"]) -> Float[Array, "n E"]:
    """Centroids of codes.

    Args:
      codes: [n, M]; with 16 centroids [n, M / 2], of which the lower bits belong to the even parts.
      books: [M, K, d] centroids.

    Returns:
      [n, M d].
    """
    m, _, width = books.shape
    rows = books.reshape(-1, width).at[_book_rows(codes, books)].get(mode="promise_in_bounds")
    return rows.reshape(-1, m * width)


def _book_rows(codes: UInt8[Array, "n _"], books: Float[Array, "M K d"]) -> Int[Array, "n M"]:
    """Rows of codes in the table [M K, d] of all centroids; arguments as of `decode`."""
    m, centroids, _ = books.shape
    if centroids == 16:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, m)
    return codes.astype(jnp.int32) + jnp.arange(m, dtype=jnp.int32)[None] * centroids


def build_pq(
    w: Float[Array | np.ndarray, "V D"],
    form: PqCodes,
    *,
    cells: int,
    seed: int = 0,
    iterations: int = 10,
    capacity: int | None = None,
) -> PqIndex:
    """Builds an index on the host: cells by k-means, a rotation, and codebooks of the differences to the means of the cells.

    Args:
      w: [V, D] table, finite.
      form: The codes of a row, and what is kept of it.
      cells: Number C of cells; near sqrt(V) is usual.
      seed: Seed of the samples; the same seed gives the same index.
      iterations: Number of iterations of each k-means.
      capacity: Bound on the rows of a cell; None is twice the mean. Further rows go to the nearest cell with room.

    Returns:
      The index.

    Raises:
      InputError: The table is empty, not finite or of a size that does not fit the form, or cells, iterations or capacity are
        out of range.

    Cost:
      2 C D (64 C iterations + V) operations for the cells and 2 K D (64 K iterations + V) for the codes; memory for
      four tables in float32 beside the index.

    References:
      Jegou, Douze and Schmid 2011, "Product quantization for nearest neighbor search".
      Ge, He, Ke and Sun 2013, "Optimized product quantization for approximate nearest neighbor search", sec. 3.2.2.
      Jegou, Tavenard, Douze and Amsaleg 2011, "Searching in one billion vectors: re-rank with source coding".
    """
    vocab, dim = w.shape
    size = cell_search.check_cells(vocab, cells, iterations, capacity, SLACK)
    form.check(vocab, dim)
    table = np.asarray(w)
    x = table.astype(np.float32)
    if not np.isfinite(x).all():
        row = int(np.flatnonzero(~np.isfinite(x).all(axis=1))[0])
        raise InputError(f"w has NaN or infinity, first in row {row}: remove such rows")
    unit = np.float32(2.0 ** math.ceil(math.log2(max(float(np.abs(x).max()), 1e-30))))
    x /= unit
    if form.width(dim) > dim:
        x = np.pad(x, ((0, 0), (0, form.width(dim) - dim)))
    cell, order, starts, _ = cell_search.assign(x, cells, seed, iterations, size)
    counts = np.diff(starts)
    means = cell_search.cell_means(x, cell, counts)
    rotation = _rotation(_sample(x - means[cell], seed), form.parts).astype(np.float16)
    means = (means @ rotation.astype(np.float32)).astype(np.float16)
    rotated = x @ rotation.astype(np.float32)
    spread = cell_search.expected_spread(rotated, cell, means.astype(np.float32))
    order = _by_neighbours(rotated, order, starts)
    residuals = rotated[order] - means[cell[order]]
    codes, books, residuals = _encode(residuals, form.parts, form.centroids, seed, iterations)
    fine_codes = fine_books = None
    if form.fine:
        fine_codes, fine_books, _ = _encode(residuals, form.fine, 256, seed, iterations)
    vectors, scales = _kept(table[order], unit, form.keep)
    padded = cell_search.in_order(_packed(codes, form.centroids), np.arange(vocab), size)
    optional = {"vectors": vectors, "scales": scales, "fine_codes": fine_codes, "fine_books": fine_books}
    return PqIndex(
        codes=jnp.asarray(padded),
        books=jnp.asarray(books),
        rotation=jnp.asarray(rotation[:dim]),
        unit=jnp.asarray(unit),
        ids=jnp.asarray(order, jnp.int32),
        starts=jnp.asarray(starts, jnp.int32),
        means=jnp.asarray(means),
        mean_bias=jnp.asarray(np.where(counts > 0, np.float32(0), np.float32(-np.inf))),
        spread=jnp.asarray(spread),
        capacity=size,
        **{name: None if x is None else jnp.asarray(x) for name, x in optional.items()},
    )


@array_op("Q", q="Q")
def pq_search(
    index: PqIndex, q: Float[Array, "Q D"], k: int, *, probes: int, rerank: int = 0
) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
    """The k best rows of the cells that a query probes, chosen by their codes and ranked by what the index keeps of them.

    With vectors as in the table, all cells probed and all rows ranked again, this is exact search, up to the order of equal
    scores. There is no gradient.

    Args:
      index: Result of `build_pq`.
      q: [Q, D] queries.
      k: Number of rows, 1 to V.
      probes: Number of cells that each query reads, 1 to C.
      rerank: Number of rows that are scored again, rounded up to a multiple of 8; at least 8 k are. These are the rows of
        the folds, 8 neighbours of a cell, with the best scores.

    Returns:
      (scores [Q, k] float32, ids [Q, k] int32), best first; -inf and -1 where the cells have fewer than k rows. Scores are
      those of the vectors that are kept; without them, estimates from the codes.

    Raises:
      InputError: q is not [Q, D], k or probes are out of range, or rerank is negative.

    Cost:
      For each query 2 (C + rerank) D operations, and for each row of its cells M additions, or 2 D operations if there are at
      least 8 queries for each cell, up to 64 of which share the decoded codes. Memory O(Q (k + probes)), the scores of about
      2^22 means, about 2^22 maxima of folds, and with fewer queries Q M K products.

    References:
      See `build_pq`.
    """
    check_search(q, index.shape, k)
    if rerank < 0:
        raise InputError(f"rerank is {rerank}: expected 0 or more, the number of rows that are scored again")
    index, q = lax.stop_gradient((index, q))
    wide = q.astype(jnp.float32)
    floats = {name: getattr(index, name).astype(jnp.float32) for name in ("books", "means", "rotation")}
    if index.fine_books is not None:
        floats["fine_books"] = index.fine_books.astype(jnp.float32)
    index = dataclasses.replace(index, **floats)
    rotated = lax.dot(wide, index.rotation) * index.unit
    near = cell_search.nearest_cells(rotated, index.means, index.mean_bias, index.spread, probes)
    few = q.shape[0] * probes < DECODED * index.means.shape[0]
    table = _products(rotated, index.books) if few else None
    queries = (rotated, q, table)
    return cell_search.search_coded_cells(index, queries, near, k, folds=max(k, -(-rerank // FOLD)), shared=DECODED)


def _products(queries: Float[Array, "Q E"], books: Float[Array, "M K d"]) -> Float[Array, "Q _"]:
    """Products [Q, M K] of the parts of queries and the centroids."""
    m, centroids, width = books.shape
    products = jnp.einsum("qmd,mkd->qmk", queries.reshape(-1, m, width), books)
    return products.reshape(-1, m * centroids)


def _sample(x: np.ndarray, seed: int) -> np.ndarray:
    if len(x) <= SAMPLE:
        return x
    return x[np.random.default_rng(seed).choice(len(x), SAMPLE, replace=False)]


def _by_neighbours(x: np.ndarray, order: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Orders the rows of each cell so that the rows of a fold are near each other, by halving along the widest coordinate.

    A query that ranks one row of a fold highly then ranks the others highly too, and fewer folds have to be scored again.
    """
    order = order.copy()
    open_ranges = list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
    while open_ranges:
        first, last = open_ranges.pop()
        folds = -(-(last - first) // FOLD)
        if folds < 2:
            continue
        rows = order[first:last]
        values = x[rows]
        values = values[:, np.argmax(values.var(axis=0))]
        half = folds // 2 * FOLD
        order[first:last] = rows[np.argpartition(values, half - 1)]
        open_ranges += [(first, first + half), (first + half, last)]
    return order


def _rotation(x: np.ndarray, parts: int) -> np.ndarray:
    """Principal directions [D, D] of x, as columns, dealt to the parts so that their products of variances are nearly equal."""
    variances, directions = np.linalg.eigh(x.T.astype(np.float64) @ x / len(x))
    least = 1e-12 * max(float(variances.max()), 1e-30)
    log_variances = np.log(np.maximum(variances, least) / least)
    members: list[list[int]] = [[] for _ in range(parts)]
    width = x.shape[1] // parts
    for direction in np.argsort(-log_variances):
        open_parts = [part for part in range(parts) if len(members[part]) < width]
        part = min(open_parts, key=lambda part: (log_variances[members[part]].sum(), len(members[part])))
        members[part].append(int(direction))
    return directions[:, np.concatenate(members).astype(int)]


def _encode(
    x: np.ndarray, parts: int, centroids: int, seed: int, iterations: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes [V, M], float16 codebooks [M, K, D / M], what the codes leave of x) by k-means of each part."""
    codes, books, residuals = np.empty((len(x), parts), np.uint8), [], np.empty_like(x)
    for part, columns in enumerate(np.array_split(np.arange(x.shape[1]), parts)):
        values = np.ascontiguousarray(x[:, columns])
        book = cell_search.centroids(values, centroids, seed + part, iterations, min(len(x), SAMPLE // 4))
        book = book.astype(np.float16)
        codes[:, part] = cell_search.nearest(values, book.astype(np.float32))[0]
        residuals[:, columns] = values - book[codes[:, part]]
        books.append(book)
    return codes, np.stack(books), residuals


def _packed(codes: np.ndarray, centroids: int) -> np.ndarray:
    """Codes as bytes, two to a byte with 16 centroids."""
    return codes if centroids == 256 else codes[:, ::2] | codes[:, 1::2] << 4


def _kept(rows: np.ndarray, unit: np.float32, keep: str) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(vectors, their factors) that are kept of the rows."""
    if keep == "none":
        return None, None
    wide = rows.astype(np.float32)
    if keep == "int8":
        scales = np.maximum(np.abs(wide).max(axis=1), np.float32(1e-30)) / 127
        return np.round(wide / scales[:, None]).astype(np.int8), scales
    if keep == "float16" and rows.dtype != np.float16:
        return (wide / unit).astype(np.float16), np.array([unit])
    return rows, None
