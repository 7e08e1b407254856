"""Exact maximum inner product search: the best rows of a table, a block of it at a time."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import zero_from_primal
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.arrays import accepts_numpy
from hpnlp.ops.custom_vjp import vary_alike
from hpnlp.types import InputError

# How many scores are made at a time, and of how many rows at least: a product with fewer is slow.
SCORES = 1 << 22
BLOCK = 4096
# Columns of which the largest is found before the best are looked for.
GROUP = 32
# What a score of -inf counts as, so that a row which has it comes before no row at all.
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
    """The k rows of w with the largest q w^T + bias, for each query: (scores float32, ids int32), best first.

    bias: added to the scores; -inf puts a row behind all others. block_size: rows of a block; None takes what makes some
    four million scores, and at least 4096 rows. Of equal scores the lower id comes first.

    Products accumulate in float32; where q and w differ in dtype, both are taken to float32. Gradients of the scores reach
    q, w and bias, through the rows that were found. NaN is not searched for: with NaN in a score the result is undefined.
    Raises InputError on shapes that do not fit, on an empty table, and unless 1 <= k <= V.
    Cost: 2 Q V D operations; memory a block of the table and of scores, O(Q (block + k)), and never Q x V unless one block
    holds the table.
    """
    check_search(q, w.shape, k)
    check_bias(bias, w.shape[0])
    if block_size is not None and block_size < 1:
        raise InputError(f"block_size {block_size}: expected at least 1 row")
    wanted = block_size or max(SCORES // max(q.shape[0], 1) // GROUP * GROUP, BLOCK)
    return _search(k, min(wanted, w.shape[0]), q, w, bias)


def recall(ids: Int[Array | np.ndarray, "Q k"], true_ids: Int[Array | np.ndarray, "Q n"]) -> float:
    """The share of `true_ids`, which are 0 or more, that is among the `ids` of the same query. Computed on the host."""
    found, true = np.asarray(ids), np.asarray(true_ids)
    if found.shape[0] != true.shape[0] or not true.size:
        raise InputError(
            f"ids {found.shape}, true_ids {true.shape}: expected both of the same queries, and at least one"
        )
    return float(np.mean([np.isin(b, a).mean() for a, b in zip(found, true, strict=True)]))


def check_search(q: Any, table: tuple[int, ...], k: int) -> None:
    """Raises InputError where no search for the k best of a table of that shape can be."""
    if q.ndim != 2 or len(table) != 2 or q.shape[1] != table[1]:
        raise InputError(f"q {q.shape}, table {table}: expected [Q, D] and [V, D]; flatten queries to one axis")
    if not table[0]:
        raise InputError(f"table {table}: it is empty; expected at least one row")
    if not 1 <= k <= table[0]:
        raise InputError(f"k is {k}: expected 1 to {table[0]}, the rows of the table; ask for at most that many")


def check_bias(bias: Any, vocab: int) -> None:
    """Raises InputError where the bias is not a number for each row."""
    if bias is not None and bias.shape != (vocab,):
        raise InputError(f"bias has shape {bias.shape}: expected {(vocab,)}, a number for each row of w")


def product(q: Array, w: Array) -> Float[Array, "Q V"]:
    """q w^T, float32."""
    if q.dtype != w.dtype:
        q, w = q.astype(jnp.float32), w.astype(jnp.float32)
    return lax.dot_general(q, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def top_k(s: Float[Array, "Q c"], k: int) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
    """As lax.top_k for k <= c, and faster for wide rows."""
    s, at = _contenders(s, k)
    s, best = lax.top_k(s, k)
    return s, jnp.take_along_axis(at, best, axis=1)


def best_of(s: Float[Array, "Q c"], k: int) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
    """The k best of each row and their columns; where there are fewer than k, the rest is -inf and column 0."""
    found, at = top_k(s, min(k, s.shape[1]))
    missing = ((0, 0), (0, k - found.shape[1]))
    return jnp.pad(found, missing, constant_values=-jnp.inf), jnp.pad(at, missing)


def _contenders(s: Float[Array, "Q c"], k: int) -> tuple[Float[Array, "Q m"], Int[Array, "Q m"]]:
    """Scores among which the min(k, c) best of each row are, and their columns, which rise.

    What is among the k best lies in one of the k groups of columns with the best maxima: if k groups are before its own,
    each holds a score before it. The same of equals: groups are of neighbours, so the earlier group has the lower columns.
    """
    count, width = s.shape
    groups = width // GROUP
    if groups < 2 * k:
        best, at = lax.top_k(s, min(k, width))
        return best, at.astype(jnp.int32)
    whole = groups * GROUP
    apart = s[:, :whole].reshape(count, groups, GROUP)
    _, best = lax.top_k(apart.max(axis=2), k)
    best = jnp.sort(best.astype(jnp.int32), axis=1)
    found = jnp.take_along_axis(apart, best[:, :, None], axis=1).reshape(count, k * GROUP)
    at = (best[:, :, None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)[None, None]).reshape(count, k * GROUP)
    rest = jnp.broadcast_to(jnp.arange(whole, width, dtype=jnp.int32)[None], (count, width - whole))
    found, at = (jnp.concatenate(pair, axis=1) for pair in ((found, s[:, whole:]), (at, rest)))
    return found, at


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _search(k: int, block: int, q: Array, w: Array, bias: Array | None) -> tuple[Array, Array]:
    vocab = w.shape[0]

    def add(best: tuple[Array, Array], start: Array, size: int) -> tuple[Array, Array]:
        # A slice of the whole would be a copy.
        part = lambda x: x if size == vocab else lax.dynamic_slice_in_dim(x, start, size)  # noqa: E731
        s = product(q, part(w))
        s = s if bias is None else s + part(bias).astype(jnp.float32)[None]
        found, at = _contenders(s, k)
        # Rows that came before have lower ids, so of equals they are to stay before.
        found = jnp.concatenate([best[0], jnp.maximum(found, LOWEST)], axis=1)
        ids = jnp.concatenate([best[1], at + start], axis=1)
        found, at = lax.top_k(found, k)
        return found, jnp.take_along_axis(ids, at, axis=1)

    none = jnp.full((q.shape[0], k), -jnp.inf, jnp.float32), jnp.full((q.shape[0], k), -1, jnp.int32)
    scores, ids, *_ = vary_alike(*none, *jax.tree.leaves((q, w, bias)))
    best = scores, ids
    count, rest = divmod(vocab, block)
    starts = jnp.arange(count, dtype=jnp.int32) * block
    if count == 1:
        best = add(best, starts[0], block)
    else:
        best = lax.scan(lambda best, start: (add(best, start, block), None), best, starts)[0]
    if rest:
        best = add(best, jnp.int32(vocab - rest), rest)
    return jnp.where(best[0] == LOWEST, -jnp.inf, best[0]), best[1]


@_search.defjvp
@accepts_numpy
def _(k: int, block: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    out = _search(k, block, *primals)
    ids = out[1]

    def again(q: Array, w: Array, bias: Array | None) -> Float[Array, "Q k"]:
        s = jnp.einsum("qd,qkd->qk", q.astype(jnp.float32), w[ids].astype(jnp.float32))
        return s if bias is None else s + bias[ids].astype(jnp.float32)

    count = 2 if primals[2] is None else 3
    slope = jax.jvp(again if count == 3 else lambda q, w: again(q, w, None), primals[:count], tangents[:count])[1]
    return out, (slope, zero_from_primal(ids))
