"""Exact maximum inner product search: the best rows of a table, computed over blocks of its rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import zero_from_primal
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.types import AnyArray, InputError

# Scores of a block: 16 MiB.
SCORES = 1 << 22
# Rows of a block at least: a product with fewer is slow.
BLOCK = 4096
# Neighbouring columns whose maximum is computed first, before the best columns are selected.
GROUP = 32
# Stands for a score of -inf during a search, so that rows with that score still come before padding, which has -inf.
LOWEST = float(np.finfo(np.float32).min)


@array_op("Q", q="Q")
def exact_search(
    q: Float[Array, "Q D"],
    w: Float[Array, "V D"],
    k: int,
    *,
    bias: Float[Array, " V"] | None = None,
    block_size: int | None = None,
) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
    """The k rows of w with the largest q w^T + bias, for each query.

    Products accumulate in float32; if q and w differ in dtype, both are cast to float32. Gradients of the scores reach q, w and
    bias through the rows that are returned. If a score is NaN, the result is undefined.

    Args:
      q: [Q, D] queries.
      w: [V, D] table.
      k: Number of rows.
      bias: [V] added to the scores; -inf puts a row behind all others. None for no bias.
      block_size: Rows of a block; None takes a block of about 2^22 scores, and at least 4096 rows.

    Returns:
      (scores [Q, k] float32, ids [Q, k] int32), best first; of equal scores, the lower id first.

    Raises:
      InputError: Shapes do not fit, the table is empty, k is not 1 to V, or block_size is under 1.

    Cost:
      2 Q V D operations. Memory for a block of the table and of the scores, O(Q (block + k)).
    """
    check_search(q, w.shape, k)
    check_bias(bias, w.shape[0])
    if block_size is not None and block_size < 1:
        raise InputError(f"block_size {block_size}: expected at least 1 row")
    block = block_size or max(SCORES // max(q.shape[0], 1) // GROUP * GROUP, BLOCK)
    return _search(k, min(block, w.shape[0]), q, w, bias)


def recall(ids: Int[Array | np.ndarray, "Q k"], true_ids: Int[Array | np.ndarray, "Q n"]) -> float:
    """Share of the true ids that a search has returned; computed on the host.

    Args:
      ids: [Q, k] results of the search; -1 is none.
      true_ids: [Q, n] ids of the best rows, at least 0.

    Returns:
      The mean over the queries, 0 to 1.

    Raises:
      InputError: The numbers of queries differ, or there is no true id.
    """
    returned, true = np.asarray(ids), np.asarray(true_ids)
    if returned.shape[0] != true.shape[0] or not true.size:
        raise InputError(
            f"ids {returned.shape}, true_ids {true.shape}: expected both of the same queries, and at least one"
        )
    return float(np.mean([np.isin(b, a).mean() for a, b in zip(returned, true, strict=True)]))


def check_search(q: AnyArray, table: tuple[int, ...], k: int) -> None:
    """Checks the arguments of a search.

    Args:
      q: Queries, expected as [Q, D].
      table: Shape of the table, expected as (V, D).
      k: Number of rows.

    Raises:
      InputError: q and the table are not [Q, D] and [V, D], the table is empty, or k is not 1 to V.
    """
    if q.ndim != 2 or len(table) != 2 or q.shape[1] != table[1]:
        raise InputError(f"q {q.shape}, table {table}: expected [Q, D] and [V, D]; flatten queries to one axis")
    if not table[0]:
        raise InputError(f"table {table}: the table is empty; expected at least one row")
    if not 1 <= k <= table[0]:
        raise InputError(f"k is {k}: expected 1 to {table[0]}, the number of rows of the table")


def check_bias(bias: AnyArray | None, vocab: int) -> None:
    """Checks a bias.

    Args:
      bias: Array or None.
      vocab: V, the number of rows.

    Raises:
      InputError: The bias is not [V].
    """
    if bias is not None and bias.shape != (vocab,):
        raise InputError(f"bias has shape {bias.shape}: expected {(vocab,)}, one number for each row of w")


def product(q: Array, w: Array) -> Float[Array, "Q V"]:
    """Computes q w^T.

    Args:
      q: [Q, D].
      w: [V, D]; if the dtypes differ, both are cast to float32.

    Returns:
      [Q, V] float32.
    """
    if q.dtype != w.dtype:
        q, w = q.astype(jnp.float32), w.astype(jnp.float32)
    return lax.dot_general(q, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def top_k(s: Float[Array, "Q c"], k: int) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
    """The largest values of each row, as `lax.top_k` finds them, but faster for wide rows.

    Args:
      s: [Q, c] scores.
      k: Number of columns, at most c.

    Returns:
      (scores [Q, k], columns [Q, k]), best first; of equal scores, the lower column first.
    """
    s, at = _top_k_candidates(s, k)
    s, best = lax.top_k(s, k)
    return s, jnp.take_along_axis(at, best, axis=1)


def padded_top_k(s: Float[Array, "Q c"], k: int) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
    """`top_k` for any k, with padding.

    Args:
      s: [Q, c] scores.
      k: Number of columns.

    Returns:
      (scores [Q, k], columns [Q, k]), best first; -inf and column 0 from position c on.
    """
    best, at = top_k(s, min(k, s.shape[1]))
    padding = ((0, 0), (0, k - best.shape[1]))
    return jnp.pad(best, padding, constant_values=-jnp.inf), jnp.pad(at, padding)


def _top_k_candidates(s: Float[Array, "Q c"], k: int) -> tuple[Float[Array, "Q m"], Int[Array, "Q m"]]:
    """(scores [Q, m], columns [Q, m], rising) that contain the min(k, c) best of each row.

    A column among the k best is in one of the k groups of columns with the best maxima: if k groups come before its group,
    each of them has a score that comes before it. This holds with ties too: groups are of neighbours, so that an earlier group
    has the lower columns.
    """
    count, width = s.shape
    groups = width // GROUP
    if groups < 2 * k:
        best, at = lax.top_k(s, min(k, width))
        return best, at.astype(jnp.int32)
    grouped_width = groups * GROUP
    grouped = s[:, :grouped_width].reshape(count, groups, GROUP)
    _, best = lax.top_k(grouped.max(axis=2), k)
    best = jnp.sort(best.astype(jnp.int32), axis=1)
    scores = jnp.take_along_axis(grouped, best[:, :, None], axis=1).reshape(count, k * GROUP)
    at = (best[:, :, None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)[None, None]).reshape(count, k * GROUP)
    remainder = jnp.arange(grouped_width, width, dtype=jnp.int32)[None]
    remainder = jnp.broadcast_to(remainder, (count, width - grouped_width))
    pairs = (scores, s[:, grouped_width:]), (at, remainder)
    scores, at = (jnp.concatenate(pair, axis=1) for pair in pairs)
    return scores, at


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _search(k: int, block: int, q: Array, w: Array, bias: Array | None) -> tuple[Array, Array]:
    """`exact_search` with a block size: merges the k best rows so far with those of each block."""
    vocab = w.shape[0]

    def rows(x: Array, start: Array, size: int) -> Array:
        # A slice of all rows would be a copy.
        return x if size == vocab else lax.dynamic_slice_in_dim(x, start, size)

    def add(best: tuple[Array, Array], start: Array, size: int) -> tuple[Array, Array]:
        s = product(q, rows(w, start, size))
        s = s if bias is None else s + rows(bias, start, size).astype(jnp.float32)[None]
        candidates, at = _top_k_candidates(s, k)
        # The best rows so far come first, because they have the lower ids and must stay first among equals.
        scores = jnp.concatenate([best[0], jnp.maximum(candidates, LOWEST)], axis=1)
        ids = jnp.concatenate([best[1], at + start], axis=1)
        scores, at = lax.top_k(scores, k)
        return scores, jnp.take_along_axis(ids, at, axis=1)

    empty = jnp.full((q.shape[0], k), -jnp.inf, jnp.float32), jnp.full((q.shape[0], k), -1, jnp.int32)
    scores, ids, *_ = vary_alike(*empty, *jax.tree.leaves((q, w, bias)))
    best = scores, ids
    count, remainder = divmod(vocab, block)
    starts = jnp.arange(count, dtype=jnp.int32) * block
    if count == 1:
        best = add(best, starts[0], block)
    else:
        best = lax.scan(lambda best, start: (add(best, start, block), None), best, starts)[0]
    if remainder:
        best = add(best, jnp.int32(vocab - remainder), remainder)
    return jnp.where(best[0] == LOWEST, -jnp.inf, best[0]), best[1]


@_search.defjvp
@accepts_numpy
def _(k: int, block: int, primals: PyTree, tangents: PyTree) -> tuple[Any, Any]:
    out = _search(k, block, *primals)
    ids = out[1]

    def scores_of_ids(q: Array, w: Array, bias: Array | None = None) -> Float[Array, "Q k"]:
        s = jnp.einsum("qd,qkd->qk", q.astype(jnp.float32), w[ids].astype(jnp.float32))
        return s if bias is None else s + bias[ids].astype(jnp.float32)

    count = 2 if primals[2] is None else 3
    tangent = jax.jvp(scores_of_ids, primals[:count], tangents[:count])[1]
    return out, (tangent, zero_from_primal(ids))
