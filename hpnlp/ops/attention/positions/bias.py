"""Relative positions as additive biases or products: ALiBi, T5, Shaw, Transformer-XL."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.arrays import accepts_numpy
from hpnlp.types import InputError

# (head, query position, key position) -> float32. The three are int32 and broadcast: scalars, say, or [N, 1, 1], [T, 1]
# and [S]. Its result has the shape that they broadcast to.
Bias = Callable[[Any, Any, Any], Array]


def alibi_slopes(heads: int) -> np.ndarray:
    """float64 [N]: 2 ** (-8 n / N) for n from 1 to N where N is a power of two.

    Elsewhere the slopes of the power p below N, and then every second one of 2 p, as in the authors' code. Raises
    InputError without a head.
    """
    if heads < 1:
        raise InputError(f"alibi of {heads} heads: expected at least 1")
    power = 2 ** (heads.bit_length() - 1)
    exponents = [8 * n / power for n in range(1, power + 1)] + [4 * n / power for n in range(1, 2 * (heads - power), 2)]
    return np.exp2(-np.asarray(exponents))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Alibi:
    heads: int = dataclasses.field(metadata={"static": True})

    def __call__(self, head: Any, q: Any, k: Any) -> Array:
        slopes = jnp.asarray(alibi_slopes(self.heads), jnp.float32)
        distance = jnp.abs(_difference(q, k)).astype(jnp.float32)
        slope, distance = jnp.broadcast_arrays(slopes[jnp.asarray(head)], distance)
        return -slope * distance


def alibi(heads: int) -> Bias:
    """-slope[head] * |q - k|: attention with linear biases, as a function of (head, query position, key position).

    heads: all that the queries have, N. Symmetric, so a model that also looks ahead can use it. The results of equal
    calls are equal and hash alike. Raises InputError without a head. Source: Press et al. 2022, "Train short, test
    long", sec. 3.
    """
    alibi_slopes(heads)
    return _Alibi(heads)


@array_op("...", distance="...")
def t5_buckets(
    distance: Int[Array, "*shape"], buckets: int = 32, max_distance: int = 128, *, bidirectional: bool = True
) -> Int[Array, "*shape"]:
    """int32, 0 to buckets - 1: the bucket of key position minus query position.

    Half of the buckets hold one distance each and the others ranges that grow by a constant factor up to max_distance;
    the last also holds all beyond. bidirectional: the upper half of all buckets is for keys after the query; otherwise
    these are in bucket 0. The edges are exact: no logarithm is rounded on the device.
    Raises InputError where there are too few buckets, or no distance is left for the ranges.
    Cost: one comparison per range and pair. Source: Raffel et al. 2020, "T5", sec. 2.1 and its code.
    """
    side, single, edges = _t5_edges(buckets, max_distance, bidirectional)
    away = jnp.abs(distance) if bidirectional else jnp.maximum(-distance, 0)
    bucket = jnp.minimum(away, single)
    for edge in edges:
        bucket += (away >= edge).astype(bucket.dtype)
    return bucket + side * (distance > 0).astype(bucket.dtype) if bidirectional else bucket


def _t5_edges(buckets: int, max_distance: int, bidirectional: bool) -> tuple[int, int, list[int]]:
    """The buckets of one side, how many of these hold one distance each, and where each range but the first begins."""
    side = buckets // 2 if bidirectional else buckets
    single = side // 2
    if single < 1 or max_distance <= single:
        raise InputError(
            f"{buckets} T5 buckets up to distance {max_distance}: expected at least {4 if bidirectional else 2} buckets, "
            f"and a max_distance above {max(single, 1)}, up to where distances have a bucket of their own"
        )
    ranges = side - single
    # Range n begins at the first whole number from single * (max_distance / single) ** (n / ranges) on.
    starts = (max_distance**n * single ** (ranges - n) for n in range(1, ranges))
    edges = [bisect.bisect_left(range(max_distance), start, key=lambda d: d**ranges) for start in starts]
    return side, single, edges


# Not compared by value, because a table has no hash; like any function it equals itself.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _T5:
    table: Any
    max_distance: int = dataclasses.field(metadata={"static": True})
    bidirectional: bool = dataclasses.field(metadata={"static": True})

    @array_op()
    def __call__(self, head: Any, q: Any, k: Any) -> Array:
        count = self.table.shape[0]
        bucket = t5_buckets(_difference(q, k), count, self.max_distance, bidirectional=self.bidirectional)
        bucket, head = jnp.broadcast_arrays(bucket, head)
        return self.table.astype(jnp.float32)[bucket, head]


@accepts_numpy
def t5_bias(table: Float[Array, "buckets N"], *, max_distance: int = 128, bidirectional: bool = True) -> Bias:
    """table[bucket of k - q, head], as a function of (head, query position, key position).

    table: a learned bias per bucket and head; may be traced, and gradients reach it. The function is a pytree with the
    table as its leaf, so it may also cross the borders of jit. T5 itself does not scale its scores: pass scale=1.
    Raises InputError as `t5_buckets` does. Cost: one look-up per head and pair. Source: Raffel et al. 2020, "T5", sec. 2.1.
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
    """q . a[k - q] * scale: the scores' term of relation-aware attention, float32.

    table: a, the embeddings of the distances from -left to R - 1 - left, shared by the heads; farther ones are clipped to
    these. left: half of R - 1 where None; R - 1 where all keys come before. positions: int32; [1, T] where all rows share
    them. scale: H ** -0.5 where None, as in the attention call. The paper's relative embeddings of values (eq. 3) are no
    score term and are not here.
    Raises InputError where `left` is None and R is even, or is no row of the table.
    Cost: O(B N T (R H + S)) time, B N T (R + S) floats of memory. Source: Shaw et al. 2018, eq. 4.
    """
    rows = table.shape[0]
    if left is None and rows % 2 == 0:
        raise InputError(
            f"shaw with a table of {rows} rows: expected an odd number, or pass left, the distances before"
        )
    left = rows // 2 if left is None else left
    if not 0 <= left < rows:
        raise InputError(f"shaw(left={left}) with a table of {rows} rows: expected 0 <= left < {rows}")
    row = jnp.clip(kv_positions[:, None, :] - positions[:, :, None], -left, rows - 1 - left) + left
    by_row = _product("btnh,rh->bntr", q, table, scale)
    return jnp.take_along_axis(by_row, row[:, None], axis=3)


@array_op("... T", x="... T R")
def relative_shift(x: Float[Array, "*lead T R"], keys: int) -> Float[Array, "*lead T {keys}"]:
    """out[..., i, j] = x[..., i, T - 1 - i + j], and 0 where x has no such column: a column a distance becomes one a key.

    Padding and reshaping alone: a copy of [..., T, T + keys], and no gather. Raises InputError where x has columns that no
    pair reads. Source: Dai et al. 2019, "Transformer-XL", app. B.
    """
    t, width = x.shape[-2], x.shape[-2] + keys - 1
    if x.shape[-1] > width:
        raise InputError(
            f"relative_shift of {x.shape[-1]} distances: {t} queries and {keys} keys have at most {width}, leave out the rest"
        )
    # Rows one longer than what is then cut from them: each starts one column earlier than the row above.
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
    """(q + u, bias) so that attention over these has the scores ((q + u) . k + (q + v) . r) * scale.

    r: the projected embeddings of the distances query minus key in falling order, from that of the last query and the
    first key. With M keys before the first query these are M + T - 1 down to M - S + 1, R = T + S - 1 in all; where
    queries see no later keys, the first M + T do, and the scores of the keys after are left without their term.
    u, v: the learned content and position biases. keys: S. scale: H ** -0.5 where None, as in the attention call.
    Keys stand at consecutive places, memory first; documents packed in one row keep their distances.

    Returns q + u in q's dtype, and the bias, float32: B N T S floats, and for a while B N T (T + S). Raises InputError where
    r has more rows than there are distances. Cost: O(B N T R H) time.
    Source: Dai et al. 2019, "Transformer-XL", sec. 3.3, with r = W_kR R; for R see `sinusoids`.
    """
    toward_content, toward_place = (q + bias.astype(q.dtype)[None, None] for bias in (u, v))
    return toward_content, relative_shift(_product("btnh,rnh->bntr", toward_place, r, scale), keys)


def _difference(q: Any, k: Any) -> Array:
    q, k = jnp.broadcast_arrays(q, k)
    return k - q


def _product(spec: str, q: Array, embeddings: Array, scale: float | None) -> Array:
    product = jnp.einsum(spec, q, embeddings.astype(q.dtype), preferred_element_type=jnp.float32)
    return product * (q.shape[-1] ** -0.5 if scale is None else scale)
