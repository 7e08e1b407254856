"""Relative positions as the `bias` of an attention call: ALiBi, T5, Shaw, Transformer-XL.

A bias that depends only on head, query position and key position is a function of the three (`alibi`, `t5_bias`), which
attention evaluates tile by tile. A bias that depends on the query too is an array [B, N, T, S] (`shaw`, `transformer_xl`).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.types import InputError

# (head, query position, key position) -> float32. The arguments are int32 and broadcast, such as scalars, or [N, 1, 1],
# [T, 1] and [S]. The result has the broadcast shape.
Bias = Callable[[Any, Any, Any], Array]


def alibi_slopes(heads: int) -> np.ndarray:
    """The slopes of ALiBi: 2 ** (-8 n / N) for n from 1 to N if N is a power of two.

    For other N, the slopes of the largest power of two p below N, then every second slope of 2 p, as in the authors' code.

    Args:
      heads: N.

    Returns:
      float64 [N].

    Raises:
      InputError: N is less than 1.
    """
    if heads < 1:
        raise InputError(f"alibi with {heads} heads: expected at least 1")
    power = 2 ** (heads.bit_length() - 1)
    exponents = [8 * n / power for n in range(1, power + 1)] + [4 * n / power for n in range(1, 2 * (heads - power), 2)]
    return np.exp2(-np.asarray(exponents))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Alibi:
    """The function that `alibi` returns."""

    heads: int = dataclasses.field(metadata={"static": True})

    def __call__(self, head: ArrayLike, q: ArrayLike, k: ArrayLike) -> Array:
        slopes = jnp.asarray(alibi_slopes(self.heads), jnp.float32)
        distance = jnp.abs(_difference(q, k)).astype(jnp.float32)
        slope, distance = jnp.broadcast_arrays(slopes[jnp.asarray(head)], distance)
        return -slope * distance


def alibi(heads: int) -> Bias:
    """The bias -slope[head] * |q - k| of attention with linear biases.

    It is symmetric, so that bidirectional models can use it. The results of equal calls are equal and have equal hashes.

    Args:
      heads: Number of all query heads, N.

    Returns:
      A function of (head, query position, key position).

    Raises:
      InputError: N is less than 1.

    References:
      Press et al. 2022, "Train short, test long", section 3.
    """
    alibi_slopes(heads)
    return _Alibi(heads)


@array_op("...", distance="...")
def t5_buckets(
    distance: Int[Array, "*shape"], buckets: int = 32, max_distance: int = 128, *, bidirectional: bool = True
) -> Int[Array, "*shape"]:
    """Buckets of relative positions as in T5.

    Half of the buckets hold one distance each, the others ranges that grow by a constant factor up to max_distance; the last
    bucket also holds all larger distances. The edges are exact: no logarithm is rounded on the device.

    Args:
      distance: int [...], key position minus query position.
      buckets: Number of buckets.
      max_distance: Distance at which the last range ends.
      bidirectional: The upper half of the buckets is for keys after the query; otherwise these keys are in bucket 0.

    Returns:
      int32 [...], 0 to buckets - 1.

    Raises:
      InputError: There are too few buckets, or max_distance leaves no distances for the ranges.

    Cost:
      One comparison for each range and pair.

    References:
      Raffel et al. 2020, "T5", section 2.1 and its code.
    """
    side, single, edges = _t5_edges(buckets, max_distance, bidirectional)
    away = jnp.abs(distance) if bidirectional else jnp.maximum(-distance, 0)
    bucket = jnp.minimum(away, single)
    for edge in edges:
        bucket += (away >= edge).astype(bucket.dtype)
    return bucket + side * (distance > 0).astype(bucket.dtype) if bidirectional else bucket


def _t5_edges(buckets: int, max_distance: int, bidirectional: bool) -> tuple[int, int, list[int]]:
    """Number of buckets of a side, number of these with a single distance, and first distance of each range but the first."""
    side = buckets // 2 if bidirectional else buckets
    single = side // 2
    if single < 1 or max_distance <= single:
        raise InputError(
            f"{buckets} T5 buckets up to distance {max_distance}: expected at least {4 if bidirectional else 2} buckets, "
            f"and a max_distance over {max(single, 1)}, the largest distance with a bucket of its own"
        )
    ranges = side - single
    # Range n begins at single * (max_distance / single) ** (n / ranges), rounded up.
    starts = (max_distance**n * single ** (ranges - n) for n in range(1, ranges))
    edges = [bisect.bisect_left(range(max_distance), start, key=lambda d: d**ranges) for start in starts]
    return side, single, edges


# Compared by identity, as functions are, because the table has no hash.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _T5:
    """The function that `t5_bias` returns."""

    table: Any
    max_distance: int = dataclasses.field(metadata={"static": True})
    bidirectional: bool = dataclasses.field(metadata={"static": True})

    @array_op()
    def __call__(self, head: ArrayLike, q: ArrayLike, k: ArrayLike) -> Array:
        count = self.table.shape[0]
        bucket = t5_buckets(_difference(q, k), count, self.max_distance, bidirectional=self.bidirectional)
        bucket, head = jnp.broadcast_arrays(bucket, head)
        return self.table.astype(jnp.float32)[bucket, head]


@accepts_numpy
def t5_bias(table: Float[Array, "buckets N"], *, max_distance: int = 128, bidirectional: bool = True) -> Bias:
    """The bias table[bucket of k - q, head] of T5.

    T5 does not scale its scores: pass scale=1 to `attend`.

    Args:
      table: Learned bias of each bucket and head, [buckets, N]; may be traced, and gradients reach it.
      max_distance: As for `t5_buckets`.
      bidirectional: As for `t5_buckets`.

    Returns:
      A function of (head, query position, key position). It is a pytree with the table as its leaf, so that it can be an
      argument of jitted functions.

    Raises:
      InputError: As for `t5_buckets`.

    Cost:
      One table lookup for each head and pair.

    References:
      Raffel et al. 2020, "T5", section 2.1.
    """
    _t5_edges(table.shape[0], max_distance, bidirectional)
    return _T5(table, max_distance, bidirectional)


@array_op("B N T S", q="B T N", kv_positions="_ S")
def shaw(
    q: Float[Array, "B T N H"],
    table: Float[Array, "R H"],
    positions: Int[Array, "#B T"],
    kv_positions: Int[Array, "#B S"],
    *,
    left: int | None = None,
    scale: float | None = None,
) -> Float[Array, "B N T S"]:
    """The bias q . a[k - q] * scale of relation-aware attention.

    The paper's relative embeddings of values (eq. 3) are no bias and are not implemented.

    Args:
      q: Queries [B, T, N, H].
      table: a, embeddings of the distances from -left to R - 1 - left, [R, H], shared by the heads. Larger distances are
        clipped to these.
      positions: int [B, T], or [1, T] if all examples share them.
      kv_positions: int [B, S] or [1, S].
      left: None is (R - 1) / 2; R - 1 if no key comes after its query.
      scale: H ** -0.5 if None, as in `attend`.

    Returns:
      float32 [B, N, T, S].

    Raises:
      InputError: left is None and R is even, or left is outside of the table.

    Cost:
      O(B N T (R H + S)) time, B N T (R + S) floats of memory.

    References:
      Shaw et al. 2018, "Self-attention with relative position representations", eq. 4.
    """
    rows = table.shape[0]
    if left is None and rows % 2 == 0:
        raise InputError(
            f"shaw with a table of {rows} rows and left=None: expected an odd number of rows, or a number for left"
        )
    left = rows // 2 if left is None else left
    if not 0 <= left < rows:
        raise InputError(f"shaw(left={left}) with a table of {rows} rows: expected 0 <= left < {rows}")
    index = jnp.clip(kv_positions[:, None, :] - positions[:, :, None], -left, rows - 1 - left) + left
    by_distance = _product("btnh,rh->bntr", q, table, scale)
    return jnp.take_along_axis(by_distance, index[:, None], axis=3)


@array_op("... T", x="... T R")
def relative_shift(x: Float[Array, "*lead T R"], keys: int) -> Float[Array, "*lead T {keys}"]:
    """Converts one column per distance to one column per key: out[..., i, j] = x[..., i, T - 1 - i + j], 0 beyond x.

    Args:
      x: [..., T, R].
      keys: S.

    Returns:
      [..., T, S].

    Raises:
      InputError: x has columns that no pair reads.

    Cost:
      One copy of [..., T, T + S] by padding and reshaping; no gather.

    References:
      Dai et al. 2019, "Transformer-XL", appendix B.
    """
    t, width = x.shape[-2], x.shape[-2] + keys - 1
    if x.shape[-1] > width:
        raise InputError(
            f"relative_shift of {x.shape[-1]} distances: expected at most {width} for {t} queries and {keys} keys"
        )
    # The reshapes change the row length from width + 1 to width, so that each row starts one column before the row above.
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width + 1 - x.shape[-1])])
    flat = x.reshape(*x.shape[:-2], t * (width + 1))[..., t - 1 : t - 1 + t * width]
    return flat.reshape(*x.shape[:-2], t, width)[..., :keys]


@array_op("B T N | B N T", q="B T N")
def transformer_xl(
    q: Float[Array, "B T N H"],
    r: Float[Array, "R N H"],
    u: Float[Array, "N H"],
    v: Float[Array, "N H"],
    keys: int,
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T {keys}"]]:
    """Queries and bias of Transformer-XL, whose scores are ((q + u) . k + (q + v) . r) * scale.

    Keys have consecutive positions, memory first; documents packed in one sequence keep their distances.

    Args:
      q: Queries [B, T, N, H].
      r: Projected embeddings of the distances query minus key, [R, N, H], in descending order from the distance between the
        last query and the first key. With M keys before the first query the distances are M + T - 1 to M - S + 1,
        R = T + S - 1 in all. Queries that see no later keys need only the first M + T; later keys then get no bias.
      u: Learned bias of the content scores [N, H].
      v: Learned bias of the position scores [N, H].
      keys: S.
      scale: H ** -0.5 if None, as in `attend`.

    Returns:
      (q + u [B, T, N, H] in q's dtype, bias float32 [B, N, T, S]), the queries and the bias for `attend`.

    Raises:
      InputError: r has more rows than there are distances.

    Cost:
      O(B N T R H) time; B N T (T + S) floats of temporary memory.

    References:
      Dai et al. 2019, "Transformer-XL", section 3.3, with r = W_kR R; for R see `sinusoids`.
    """
    content_queries, position_queries = (q + bias.astype(q.dtype)[None, None] for bias in (u, v))
    return content_queries, relative_shift(_product("btnh,rnh->bntr", position_queries, r, scale), keys)


def _difference(q: ArrayLike, k: ArrayLike) -> Array:
    """The difference k - q in the shape that both broadcast to."""
    q, k = jnp.broadcast_arrays(q, k)
    return k - q


def _product(spec: str, q: Array, embeddings: Array, scale: float | None) -> Array:
    """float32 product of queries and embeddings, times the scale."""
    product = jnp.einsum(spec, q, embeddings.astype(q.dtype), preferred_element_type=jnp.float32)
    return product * (q.shape[-1] ** -0.5 if scale is None else scale)
