"""Approximate maximum inner product search by locality-sensitive hashing: rows whose hash is near that of the query.

A column that makes rows equally long turns inner products into cosines, and the signs of random projections agree where the
cosine is large. Rows are made as long as the next power of two: were it the longest row of all, the column would be all that
is left of the short ones, and most would share a bucket. A query looks into its own bucket of each table and into those that
its least certain signs would give; of a bucket's rows, it takes the longest first.
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

from hpnlp.ops.array_op import array_op
from hpnlp.ops.search.exact import LOWEST, SCORES, best_of, check_bias, check_search, product
from hpnlp.types import InputError

BITS = 20
# How many rows are hashed at a time.
ROWS = 1 << 14
# Rows that a query looks at in a table, over what as many mean buckets hold.
SLACK = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LshIndex:
    """A table and, for each of T hash tables, its rows in the order of their buckets. No row is lost, whatever the sizes.

    Memory: the table, T (V + 2^bits + 1) integers and T bits (D + 1) numbers.
    w: the table. bias: as given. planes: whose signs are the bits. plane_bias: their part of the bias column.
    order: the rows of bucket b of table t are order[t, starts[t, b] : starts[t, b + 1]].
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
    """The rows of w in `tables` hash tables of 2^bits buckets; the same index for the same seed. Runs on the host.

    bias: added to the scores; finite. The mean row is taken off before the hash, which changes no order of scores and leaves
    more angle between rows. The hash knows directions, and lengths within a factor of two only: where few rows are much longer
    than the others, an inverted file finds more.
    Raises InputError where the table is empty, on a bias of another size, unless 1 <= bits <= 20, and unless tables >= 1.
    Cost: 2 V T bits D operations and T sorts of V codes; memory beside the index the table in float32.
    Source: Charikar 2002, sec. 3 (the signs); Bachrach et al. 2014, "Speeding up the Xbox recommender system", sec. 3.2 (the
    column); Yan et al. 2018, "Norm-ranging LSH for maximum inner product search" (one length for each range of norms).
    """
    vocab, dim = w.shape
    if not vocab:
        raise InputError(f"w {w.shape}: it is empty; expected at least one row")
    if not 1 <= bits <= BITS:
        raise InputError(f"bits is {bits}: expected 1 to {BITS}; near log2 of the rows over a bucket's rows is usual")
    if tables < 1:
        raise InputError(f"tables is {tables}: expected at least 1")
    check_bias(bias, vocab)
    x = np.asarray(w).astype(np.float32)
    if bias is not None:
        x = np.concatenate([x, np.asarray(bias, np.float32)[:, None]], axis=1)
    x = x - x.mean(axis=0)
    norm = np.sqrt((x**2).sum(axis=1))
    # The next power of two for each: with one limit for all, rows much shorter than the longest would be all column.
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
    """The k best rows in `probes` buckets of each table: (scores float32, ids int32), best first.

    candidates: how many rows a query looks at in each table, those of the nearest buckets first; None takes twice what as
    many mean buckets hold. `lsh_candidates` says how many rows were left out by that.
    The scores are exact; other rows are not found. Where fewer than k are, the rest has score -inf and id -1. With all
    buckets probed and V candidates this is exact search. No gradient passes.
    Raises InputError unless q is [Q, D], 1 <= k <= V, 1 <= probes <= 2^bits and candidates >= 1.
    Cost: per query 2 T (bits + candidates) D operations and T candidates rows gathered; memory some four million numbers,
    and at least the T candidates rows of one query.
    """
    check_search(q, index.shape, k)
    size = _check_probes(index, probes, candidates)
    index, q = lax.stop_gradient((index, q))
    tables = index.order.shape[0]

    def one(x: tuple[Array, Array]) -> tuple[Array, Array]:
        query, ids = x
        # Rows that are gathered twice cost less than finding out which they are; each is here at most once a table.
        at = jnp.maximum(ids, 0)
        s = product(query[None], index.w.at[at].get(mode="promise_in_bounds"))
        s = s if index.bias is None else s + index.bias[at][None]
        s, best = best_of(jnp.where(ids[None] < 0, -jnp.inf, jnp.maximum(s, LOWEST)), k * tables)
        found = jnp.where(jnp.isneginf(s), index.shape[0], ids[best])
        found, s = lax.sort((found, s), dimension=1, num_keys=1)
        again = jnp.pad(found[:, 1:] == found[:, :-1], ((0, 0), (1, 0)))
        s, best = best_of(jnp.where(again, -jnp.inf, s), k)
        ids = jnp.where(jnp.isneginf(s), -1, jnp.take_along_axis(found, best, axis=1))
        return jnp.where(s == LOWEST, -jnp.inf, s)[0], ids[0]

    def some(q: Array) -> tuple[Array, Array]:
        return lax.map(one, (q, _candidates(index, q, probes, size)[0]))

    count, dim = q.shape
    block = min(max(SCORES // (tables * (probes * index.planes.shape[1] + size)), 1), max(count, 1))
    blocks = -(-count // block)
    q = jnp.pad(q, ((0, blocks * block - count), (0, 0))).reshape(blocks, block, dim)
    scores, ids = lax.map(some, q)
    return scores.reshape(-1, k)[:count], ids.reshape(-1, k)[:count]


@array_op("Q", q="Q")
def lsh_candidates(
    index: LshIndex, q: Float[Array, "Q D"], *, probes: int, candidates: int | None = None
) -> tuple[Int[Array, "Q n"], Int[Array, " Q"]]:
    """What `lsh_search` looks at: (ids [Q, T candidates], -1 where there is none; how many rows of the probed buckets of
    all tables were left out because there were more). A row is there once for each table that offers it."""
    check_search(q, index.shape, 1)
    return _candidates(index, q, probes, _check_probes(index, probes, candidates))


def _check_probes(index: LshIndex, probes: int, candidates: int | None) -> int:
    """The rows that a query looks at in each table."""
    vocab, buckets = index.shape[0], index.starts.shape[1] - 1
    if not 1 <= probes <= buckets:
        raise InputError(f"probes is {probes}: expected 1 to {buckets}, the buckets of a table")
    if candidates is not None and candidates < 1:
        raise InputError(f"candidates is {candidates}: expected at least 1 row")
    return min(candidates or -(-SLACK * probes * vocab // buckets), vocab)


def _candidates(index: LshIndex, q: Float[Array, "B D"], probes: int, size: int) -> tuple[Array, Array]:
    count, (tables, bits, dim) = q.shape[0], index.planes.shape
    margins = product(q.astype(jnp.float32), index.planes.reshape(-1, dim)).reshape(count, tables, bits)
    margins = margins + index.plane_bias[None]
    powers = jnp.asarray(1 << np.arange(bits), jnp.int32)
    code = jnp.where(margins > 0, powers[None, None], 0).sum(axis=2, dtype=jnp.int32)
    least_certain = powers[jnp.argsort(jnp.abs(margins), axis=2)]
    flips = jnp.asarray(probe_sets(bits, probes))
    flipped = jnp.where(flips[None, None], least_certain[:, :, None], 0).sum(axis=3, dtype=jnp.int32)
    buckets = code[:, :, None] ^ flipped

    table = jnp.arange(tables, dtype=jnp.int32)[None, :, None]
    first = index.starts[table, buckets]
    ends = jnp.cumsum(index.starts[table, buckets + 1] - first, axis=2, dtype=jnp.int32)
    # The rows of the buckets one behind the other: of each place the bucket, and how far into it.
    place = jnp.arange(size, dtype=jnp.int32)
    find = jax.vmap(jax.vmap(lambda ends: jnp.searchsorted(ends, place, side="right").astype(jnp.int32)))
    bucket = jnp.minimum(find(ends), probes - 1)
    shift = index.starts[table, buckets + 1] - ends
    rows = place[None, None] + jnp.take_along_axis(shift, bucket, axis=2)
    total = ends[:, :, -1]
    there = place[None, None] < total[:, :, None]
    ids = jnp.where(there, index.order[table, jnp.where(there, rows, 0)], -1)
    return ids.reshape(count, -1), jnp.maximum(total - size, 0).sum(axis=1, dtype=jnp.int32)


def probe_sets(bits: int, probes: int) -> np.ndarray:
    """Which bits to flip, the least certain first, bool [probes, bits]: the sets whose squared margins have the least
    expected sum, where margins are normal.

    Source: Lv et al. 2007, "Multi-probe LSH", sec. 4.4 (shift and expand) and 4.5 (an order in expectation, for all queries).
    """
    normal = statistics.NormalDist()
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
