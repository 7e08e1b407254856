"""Approximate maximum inner product search by locality-sensitive hashing (LSH): a query reads buckets of similar hashes.

The hash of a row is the signs of random projections, which agree for vectors with a large cosine. An additional column gives
all rows the same norm, so that inner products become cosines. The common norm of a row is the next power of two over its norm:
with the norm of the longest row for all, a short row would consist of the additional column almost alone, and most rows would
share a bucket. A query reads its bucket in each hash table, and the buckets that result if its least certain signs are flipped
(multi-probe LSH). Within a bucket, the longest rows are read first.
"""

from __future__ import annotations

import dataclasses
import heapq
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.search.exact import LOWEST, SCORES, check_bias, check_search, padded_top_k, product
from hpnlp.types import InputError

# Bits of a hash at most: a hash table has 2^bits buckets.
BITS = 20
# Rows that are hashed at a time, on the host.
ROWS = 1 << 14
# Default number of rows that a query reads in a hash table, over the mean number of rows of its buckets.
SLACK = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LshIndex:
    """A table of V rows and T hash tables of L bits. It takes T (V + 2^L + 1) integers and T L (D + 1) numbers beside w.

    Attributes:
      w: [V, D] the table.
      bias: [V] added to the scores; None for no bias.
      planes: [T, L, D] random projections, whose signs are the bits.
      plane_bias: [T, L] the projections of the bias.
      order: [T, V] the rows of bucket b of hash table t are order[t, starts[t, b] : starts[t, b + 1]].
      starts: [T, 2^L + 1] first position of each bucket in `order`, and V.
    """

    w: Float[Array, "V D"]
    bias: Float[Array, " V"] | None
    planes: Float[Array, "T L D"]
    plane_bias: Float[Array, "T L"]
    order: Int[Array, "T V"]
    starts: Int[Array, "T B1"]

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D) of the table."""
        return self.w.shape[0], self.w.shape[1]


def build_lsh(
    w: Float[Array | np.ndarray, "V D"],
    *,
    bits: int,
    tables: int,
    seed: int = 0,
    bias: Float[Array | np.ndarray, " V"] | None = None,
) -> LshIndex:
    """Builds hash tables on the host.

    The mean row is subtracted before hashing, which changes no ranking and increases the angles between rows. The hash depends
    on directions, and on norms within a factor of two only: if a few rows are much longer than the others, an inverted file
    (`build_ivf`) has the better recall.

    Args:
      w: [V, D] table.
      bits: L, the bits of a hash, 1 to 20; near log2(V / rows of a bucket).
      tables: T, the number of hash tables.
      seed: Seed of the projections; the same seed gives the same index.
      bias: [V] added to the scores; finite. None for no bias.

    Returns:
      The index.

    Raises:
      InputError: The table is empty, the bias is not [V], bits is not 1 to 20, or tables is under 1.

    Cost:
      2 V T L D operations and T sorts of V codes; memory beside the index for the table in float32.

    References:
      Charikar 2002, "Similarity estimation techniques from rounding algorithms", sec. 3: signs of projections.
      Bachrach et al. 2014, "Speeding up the Xbox recommender system", sec. 3.2: the additional column.
      Yan et al. 2018, "Norm-ranging LSH for maximum inner product search": one norm for each range of norms.
    """
    vocab, dim = w.shape
    if not vocab:
        raise InputError(f"w {w.shape}: the table is empty; expected at least one row")
    if not 1 <= bits <= BITS:
        raise InputError(f"bits is {bits}: expected 1 to {BITS}; near log2(rows / rows of a bucket) is usual")
    if tables < 1:
        raise InputError(f"tables is {tables}: expected at least 1")
    check_bias(bias, vocab)
    x = np.asarray(w).astype(np.float32)
    if bias is not None:
        x = np.concatenate([x, np.asarray(bias, np.float32)[:, None]], axis=1)
    x = x - x.mean(axis=0)
    norm = np.sqrt((x**2).sum(axis=1))
    # The next power of two over each norm.
    limit = np.exp2(np.ceil(np.log2(np.where(norm > 0, norm, 1.0)))).astype(np.float32)
    x = x / limit[:, None]
    column = np.sqrt(np.maximum(1.0 - (norm / limit) ** 2, 0.0)).astype(np.float32)
    longest = np.argsort(-norm, kind="stable")

    planes = np.random.default_rng(seed).standard_normal((tables * bits, x.shape[1] + 1)).astype(np.float32)
    order, starts = np.empty((tables, vocab), np.int32), np.zeros((tables, (1 << bits) + 1), np.int32)
    codes = np.empty((vocab, tables), np.int32)
    for i in range(0, vocab, ROWS):
        signs = x[i : i + ROWS] @ planes[:, :-1].T + column[i : i + ROWS, None] * planes[:, -1] > 0
        codes[i : i + ROWS] = signs.reshape(-1, tables, bits) @ (1 << np.arange(bits, dtype=np.int32))
    for table in range(tables):
        order[table] = longest[np.argsort(codes[longest, table], kind="stable")]
        starts[table, 1:] = np.cumsum(np.bincount(codes[:, table], minlength=1 << bits))
    planes = planes.reshape(tables, bits, -1)
    return LshIndex(
        w=jnp.asarray(w),
        bias=None if bias is None else jnp.asarray(bias, jnp.float32),
        planes=jnp.asarray(planes[:, :, :dim]),
        plane_bias=jnp.asarray(np.zeros((tables, bits), np.float32) if bias is None else planes[:, :, dim]),
        order=jnp.asarray(order),
        starts=jnp.asarray(starts),
    )


@array_op("Q", q="Q")
def lsh_search(
    index: LshIndex, q: Float[Array, "Q D"], k: int, *, probes: int, candidates: int | None = None
) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
    """The k best rows of the buckets that a query probes.

    Scores are exact; other rows are missed. With all buckets probed and V candidates this is exact search. There is no
    gradient.

    Args:
      index: Result of `build_lsh`.
      q: [Q, D] queries.
      k: Number of rows, 1 to V.
      probes: Number of buckets that each query reads in each hash table, 1 to 2^L.
      candidates: Number of rows that each query reads in each hash table, those of the nearest buckets first; None is twice the
        number of rows of `probes` mean buckets. `lsh_candidates` returns the number of rows that were left out.

    Returns:
      (scores [Q, k] float32, ids [Q, k] int32), best first; -inf and -1 where there are fewer than k rows.

    Raises:
      InputError: q is not [Q, D], or k, probes or candidates are out of range.

    Cost:
      For each query 2 T (L + candidates) D operations, and T candidates rows to gather. Memory for about 2^22 numbers, and at
      least for the candidates of one query.
    """
    check_search(q, index.shape, k)
    size = _check_probes(index, probes, candidates)
    index, q = lax.stop_gradient((index, q))
    tables = index.order.shape[0]

    def best_candidates(x: tuple[Array, Array]) -> tuple[Array, Array]:
        query, ids = x
        # A row may be a candidate of several tables. Computing its score several times is faster than removing duplicates
        # first; each row is at most once among the candidates of a table, so that k * tables of them contain the k best rows.
        at = jnp.maximum(ids, 0)
        s = product(query[None], index.w.at[at].get(mode="promise_in_bounds"))
        s = s if index.bias is None else s + index.bias[at][None]
        s, best = padded_top_k(jnp.where(ids[None] < 0, -jnp.inf, jnp.maximum(s, LOWEST)), k * tables)
        best_ids = jnp.where(jnp.isneginf(s), index.shape[0], ids[best])
        best_ids, s = lax.sort((best_ids, s), dimension=1, num_keys=1)
        is_duplicate = jnp.pad(best_ids[:, 1:] == best_ids[:, :-1], ((0, 0), (1, 0)))
        s, best = padded_top_k(jnp.where(is_duplicate, -jnp.inf, s), k)
        ids = jnp.where(jnp.isneginf(s), -1, jnp.take_along_axis(best_ids, best, axis=1))
        return jnp.where(s == LOWEST, -jnp.inf, s)[0], ids[0]

    def search_block(q: Array) -> tuple[Array, Array]:
        return lax.map(best_candidates, (q, _candidates(index, q, probes, size)[0]))

    count, dim = q.shape
    block = min(max(SCORES // (tables * (probes * index.planes.shape[1] + size)), 1), max(count, 1))
    blocks = -(-count // block)
    q = jnp.pad(q, ((0, blocks * block - count), (0, 0))).reshape(blocks, block, dim)
    scores, ids = lax.map(search_block, q)
    return scores.reshape(-1, k)[:count], ids.reshape(-1, k)[:count]


@array_op("Q", q="Q")
def lsh_candidates(
    index: LshIndex, q: Float[Array, "Q D"], *, probes: int, candidates: int | None = None
) -> tuple[Int[Array, "Q n"], Int[Array, " Q"]]:
    """The rows that `lsh_search` reads.

    Args:
      index: Result of `build_lsh`.
      q: [Q, D] queries.
      probes: As in `lsh_search`.
      candidates: As in `lsh_search`.

    Returns:
      (ids [Q, T * candidates] int32, -1 for none; number [Q] of rows of the probed buckets that were left out, int32). A row
      occurs once for each hash table in which a probed bucket has it.
    """
    check_search(q, index.shape, 1)
    return _candidates(index, q, probes, _check_probes(index, probes, candidates))


def _check_probes(index: LshIndex, probes: int, candidates: int | None) -> int:
    """The number of rows that a query reads in each hash table."""
    vocab, buckets = index.shape[0], index.starts.shape[1] - 1
    if not 1 <= probes <= buckets:
        raise InputError(f"probes is {probes}: expected 1 to {buckets}, the number of buckets of a hash table")
    if candidates is not None and candidates < 1:
        raise InputError(f"candidates is {candidates}: expected at least 1 row")
    return min(candidates or -(-SLACK * probes * vocab // buckets), vocab)


def _candidates(index: LshIndex, q: Float[Array, "B D"], probes: int, size: int) -> tuple[Array, Array]:
    """`lsh_candidates`, with `size` candidates in each hash table."""
    buckets = _probed_buckets(index, q, probes)
    count, tables, _ = buckets.shape
    table = jnp.arange(tables, dtype=jnp.int32)[None, :, None]
    first = index.starts[table, buckets]
    ends = jnp.cumsum(index.starts[table, buckets + 1] - first, axis=2, dtype=jnp.int32)
    # The rows of the probed buckets are laid end to end; `bucket` is the bucket of each candidate's place in this sequence.
    place = jnp.arange(size, dtype=jnp.int32)
    find = jax.vmap(jax.vmap(lambda ends: jnp.searchsorted(ends, place, side="right").astype(jnp.int32)))
    bucket = jnp.minimum(find(ends), probes - 1)
    shift = index.starts[table, buckets + 1] - ends
    rows = place[None, None] + jnp.take_along_axis(shift, bucket, axis=2)
    total = ends[:, :, -1]
    exists = place[None, None] < total[:, :, None]
    ids = jnp.where(exists, index.order[table, jnp.where(exists, rows, 0)], -1)
    return ids.reshape(count, -1), jnp.maximum(total - size, 0).sum(axis=1, dtype=jnp.int32)


def _probed_buckets(index: LshIndex, q: Float[Array, "B D"], probes: int) -> Int[Array, "B T p"]:
    """The buckets that each query reads, the nearest first."""
    count, (tables, bits, dim) = q.shape[0], index.planes.shape
    margins = product(q.astype(jnp.float32), index.planes.reshape(-1, dim)).reshape(count, tables, bits)
    margins = margins + index.plane_bias[None]
    powers = jnp.asarray(1 << np.arange(bits), jnp.int32)
    code = jnp.where(margins > 0, powers[None, None], 0).sum(axis=2, dtype=jnp.int32)
    least_certain = powers[jnp.argsort(jnp.abs(margins), axis=2)]
    flips = jnp.asarray(probe_sets(bits, probes))
    flipped = jnp.where(flips[None, None], least_certain[:, :, None], 0).sum(axis=3, dtype=jnp.int32)
    return code[:, :, None] ^ flipped


def probe_sets(bits: int, probes: int) -> np.ndarray:
    """Sets of bits to flip: those with the least expected sum of squared margins, for normally distributed margins.

    Args:
      bits: Number of bits of a hash. Bits are numbered by their margins, the least certain first.
      probes: Number of sets.

    Returns:
      Mask [probes, bits]; the first set is empty.

    References:
      Lv et al. 2007, "Multi-probe LSH: efficient indexing for high-dimensional similarity search", sec. 4.4: shift and expand,
      sec. 4.5: one order in expectation for all queries.
    """
    normal = statistics.NormalDist()
    # Squared expected margin of the i-th least certain of the bits, by its quantile.
    cost = [normal.inv_cdf(0.5 + 0.5 * (i + 1) / (bits + 1)) ** 2 for i in range(bits)]
    sets = np.zeros((probes, bits), bool)
    heap: list[tuple[float, tuple[int, ...]]] = [(cost[0], (0,))]
    for row in sets[1:]:
        total, chosen = heapq.heappop(heap)
        row[list(chosen)] = True
        last = chosen[-1] + 1
        if last < bits:
            heapq.heappush(heap, (total + cost[last], (*chosen, last)))
            heapq.heappush(heap, (total - cost[last - 1] + cost[last], (*chosen[:-1], last)))
    return sets
