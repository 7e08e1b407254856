"""Attention of each token to nearby tokens of its bucket: sort by bucket, attend within a sliding window, restore the order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PyTree

from hpnlp.ops.attention.block_sparse import tile
from hpnlp.ops.attention.block_sparse.operands import Options
from hpnlp.ops.attention.block_sparse.tile import TileMask
from hpnlp.ops.attention.bucketed import tiles
from hpnlp.ops.attention.bucketed.order import sort_by_bucket
from hpnlp.ops.attention.masks.base import Full
from hpnlp.ops.dropout import check_rate, keep_mask, seed_words
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.types import InputError

# Largest block of queries of a tile; on a CPU, smaller ones are faster with `causal`. With a smaller window, blocks of the
# window's size waste fewer products.
MAX_BLOCK, CPU_CAUSAL_BLOCK = 128, 64
# Tokens of the sequences of heads that are computed at a time on a CPU: copies of queries, keys and values in sorted order, and
# their gradients, stay in the caches and take little memory.
CPU_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class BucketSettings:
    """Static settings of attention within buckets: the tokens of its bucket that a token sees, and their scores.

    Attributes:
      window: Number of tokens of the bucket that a token sees in each direction, 0 or more.
      causal: Whether later tokens are hidden.
      hides_self: Whether a token attends to itself only if it sees no other token, as in Reformer, where keys are queries, and
        the score of a token with itself would be large.
      scale: Factor of the scores; H ** -0.5 if None.
    """

    window: int
    causal: bool
    hides_self: bool = False
    scale: float | int | None = None

    def __post_init__(self) -> None:
        if self.window < 0:
            raise InputError(f"window is {self.window}: expected 0 or more tokens")

    def factor(self, size: int) -> float | int:
        """The factor of the scores of heads of a size."""
        return size**-0.5 if self.scale is None else self.scale


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Static settings of a call, with the options of its tiles."""

    buckets: BucketSettings
    options: Options

    def band(self, length: int) -> tiles.Band:
        """The tiles of a round over sorted sequences of `length` tokens."""
        largest = CPU_CAUSAL_BLOCK if self.buckets.causal and jax.default_backend() == "cpu" else MAX_BLOCK
        block = min(max(8, -(-self.buckets.window // 8) * 8), largest)
        reach = min(-(-self.buckets.window // block), -(-length // block) - 1)
        return tiles.Band(block, reach, 0 if self.buckets.causal else reach, _Visible(self), self.options)


@dataclasses.dataclass(frozen=True)
class _Visible:
    """Visible pairs of a tile in a round: those within the window that no earlier round has computed."""

    settings: _Settings

    def __call__(self, queries: Sequence[Array], keys: Sequence[Array], seed: Array, streams: Array) -> TileMask:
        """Compares the codes of `_sorted_round`."""
        current, *earlier, index = (q - k for q, k in zip(queries, keys, strict=True))
        visible = self._within(current)
        for difference in earlier:
            visible = visible & ~self._within(difference)
        if self.settings.buckets.hides_self:
            visible = visible & (index != 0)
        rate = self.settings.options.dropout_rate
        return TileMask(visible, keep_mask(seed, streams, queries[-1], keys[-1], rate) if rate else None)

    def _within(self, difference: Array) -> Bool[Array, "..."]:
        window, wraps = self.settings.buckets.window, difference.astype(jnp.uint32)
        # As unsigned numbers, negative differences are large: one comparison for both bounds.
        if self.settings.buckets.causal:
            return wraps <= jnp.uint32(window)
        return wraps + jnp.uint32(window) <= jnp.uint32(2 * window)


@array_op("B T N", q="B T N")
def bucketed_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B _ M _"],
    v: Float[Array, "B _ K Hv"],
    buckets: Int[Array, "_ _ _ R"],
    settings: BucketSettings,
    *,
    segment_ids: Int[Array, "_ _"] | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    streams: Int[Array, "B N"] | None = None,
) -> Array:
    """Softmax attention of each token to tokens of its bucket, over several rounds with buckets of their own.

    In a round, a token sees itself and the `window` tokens of its bucket and segment that precede it. Without `causal`, it also
    sees the `window` tokens that follow. The softmax is over the union of the rounds: a pair that several rounds see counts
    once, which equals the correction by log(number of rounds) of the paper. As the window or the number of rounds grows,
    the result tends to exact attention; with one bucket and a window of T it is exact.

    With `causal`, whether a token sees an earlier one depends only on tokens up to it. (Later tokens shift its place in a block
    of the sorted sequence, by which sums of three or more terms may be rounded differently.) In the paper, tokens attend to
    chunks of the sorted sequence, whose borders move with later tokens.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, T, M, H]; M divides N. A token whose key or value is not finite gives NaN to the tokens that see it, and
        changes no other.
      v: Values [B, T, K, Hv]; K divides N.
      buckets: int32 [B, T, N, R], non-negative, for R rounds; a query and a key of one token share a bucket.
      settings: The tokens that a token sees, and the scale.
      segment_ids: int32 [B, T]; a query sees the keys of its own segment.
      dropout_rate: Probability of dropping a weight.
      rng: PRNG key of dropout.
      streams: int [B, N], a distinct number for each row and head; b * N + n if None.

    Returns:
      o [B, T, N, Hv] in the dtype of q, accumulated in float32.

    Raises:
      InputError: Shapes do not fit, or dropout without a key.

    Cost:
      R sorts of T integers for each head, and products for about 2 (causal) or 3 times R T window pairs; memory
      O(R B N T) integers and O(B N T H), also in the backward pass, which sorts the arrays again.

    References:
      Kitaev et al. 2020, "Reformer: the efficient transformer", arXiv 2001.04451, sec. 2 and eq. 3 to 5.
    """
    _check(q, k, v, buckets, segment_ids)
    check_rate(dropout_rate, rng)
    batch, length, heads, _ = q.shape
    if 0 in (batch, length, heads):
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    settings = dataclasses.replace(settings, window=min(settings.window, length))
    options = Options(Full(), settings.factor(q.shape[3]), dropout_rate=dropout_rate)
    seed = jnp.zeros(1, jnp.uint32) if rng is None else seed_words(rng)
    if streams is None:
        streams = jnp.arange(batch * heads, dtype=jnp.int32).reshape(batch, heads)
    order, codes = _order_and_codes(buckets, segment_ids, settings.window)
    lanes = (tiles.by_lane(x, heads) for x in (q, k, v))
    arrays = vary_alike(*lanes, order, codes, seed, streams.reshape(-1).astype(jnp.int32))
    o: Any = _attend(_Settings(settings, options), *arrays)
    return o.reshape(batch, heads, length, -1).transpose(0, 2, 1, 3)


def _check(q: Array, k: Array, v: Array, buckets: Array, segment_ids: Array | None) -> None:
    """Raises InputError if the arguments do not fit."""
    heads = q.shape[2]
    for name, x in (("k", k), ("v", v)):
        if x.shape[:2] != q.shape[:2] or x.shape[2] < 1 or heads % x.shape[2]:
            raise InputError(
                f"{name} {x.shape} with q {q.shape}: expected equal B and T, and a number of heads that divides {heads}"
            )
    if k.shape[3] != q.shape[3]:
        raise InputError(f"k {k.shape} with q {q.shape}: expected the same head size")
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise InputError(f"segment_ids has shape {segment_ids.shape}: expected {q.shape[:2]}")
    if buckets.shape[:3] != q.shape[:3] or buckets.ndim != 4 or buckets.shape[3] < 1:
        raise InputError(f"buckets {buckets.shape}: expected {q.shape[:3]} and at least one round")


def _order_and_codes(
    buckets: Array, segment_ids: Array | None, window: int
) -> tuple[Int[Array, "L R T"], Int[Array, "L F T"]]:
    """The sorted order of each round, and the coordinate of each token in each round and its index, for L = B N sequences."""
    batch, length, heads, rounds = buckets.shape
    by_lane = buckets.astype(jnp.int32).transpose(0, 2, 3, 1).reshape(-1, rounds, length)
    if segment_ids is not None:
        segment_ids = jnp.repeat(segment_ids, heads, axis=0)[:, None]
    order, coordinates = sort_by_bucket(by_lane, segment_ids, window)
    codes = jnp.put_along_axis(jnp.zeros_like(order), order, coordinates, axis=2, inplace=False)
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch * heads, 1, length))
    return order, jnp.concatenate([codes, index], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    settings: _Settings, q: Array, k: Array, v: Array, order: Array, codes: Array, seed: Array, streams: Array
) -> Array:
    """Results [L, T, Hv] of q, k, v [L, T, H], order [L, R, T], codes [L, R + 1, T] and streams [L]."""
    return _attend_forward(settings, q, k, v, order, codes, seed, streams)[0]


def _attend_forward(settings: _Settings, q: Array, k: Array, v: Array, *operands: Array) -> tuple[Array, Any]:
    order, codes, seed, streams = operands

    def attend(
        q: Array, k: Array, v: Array, order: Array, codes: Array, streams: Array, valid: Array
    ) -> tuple[Array, ...]:
        band = settings.band(q.shape[1])

        def add_round(sums: PyTree[Array], round_: PyTree[Array]) -> tuple[Any, None]:
            queries, keys = _sorted_round(settings, band, codes, *round_, valid_queries=None, valid_keys=valid)
            of_queries = queries.take(q), *queries.codes
            # 0 * NaN is NaN: a hidden value must be finite. NaN of the key makes the visible scores NaN.
            of_keys = keys.take(k, np.nan), keys.take(v), *keys.codes
            top, total, weighted = map(queries.put, tiles.forward(band, q.shape[1], of_queries, of_keys, seed, streams))
            return tile.combine(sums, (top, total, weighted)), None

        flat = jnp.zeros(q.shape[:2], jnp.float32)
        start = flat + tile.FLOOR, flat, jnp.zeros(v.shape, jnp.float32)
        sums, _ = lax.scan(add_round, vary_alike(*start, q)[:3], _rounds(order))
        o, lse, lse_low = tile.normalize(*sums)
        if settings.buckets.hides_self:
            o = jnp.where(jnp.isneginf(lse)[..., None], _alone(settings, v.astype(jnp.float32), seed, streams), o)
        return o.astype(q.dtype), lse, lse_low

    valid = _are_finite(k, v)
    results = _by_lanes(attend, q, k, v, order, codes, streams, valid)
    o, lse, lse_low = (checkpoint_name(x, "mixed") for x in results)
    return o, (q, k, v, *operands, valid, o, lse, lse_low)


def _are_finite(*arrays: Float[Array, "L T _"]) -> Bool[Array, "L T"]:
    """Whether all numbers of a token are finite."""
    return functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(x), axis=2) for x in arrays])


def _alone(settings: _Settings, x: Float[Array, "L T H"], seed: Array, streams: Array) -> Float[Array, "L T H"]:
    """Results of tokens that see only themselves, from their values; also the gradients of the values from those of results."""
    rate = settings.options.dropout_rate
    if not rate:
        return x
    index = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    kept = keep_mask(seed, streams[:, None], index, index, rate)[..., None]
    return jnp.where(kept, x * (1.0 / (1.0 - rate)), jnp.float32(0))


def _attend_backward(settings: _Settings, saved: PyTree[Array], do: Array) -> tuple[Any, ...]:
    q, k, v, order, codes, seed, streams, *of_results = saved

    def gradients(
        q: Array, k: Array, v: Array, order: Array, codes: Array, streams: Array, *of_results: Array
    ) -> tuple[Array, ...]:
        do, valid, o, lse, lse_low = of_results
        band = settings.band(q.shape[1])
        delta = jnp.einsum("lth,lth->lt", do, o, preferred_element_type=jnp.float32)
        is_alone = jnp.isneginf(lse)
        of_alone = _alone(settings, do.astype(jnp.float32), seed, streams)
        # All factors of weights are finite, because hidden weights are 0. NaN of the lse makes the visible weights NaN.
        is_finite = jnp.isfinite(lse) & jnp.isfinite(delta)
        lse = jnp.where(is_finite, lse, jnp.where(is_alone, jnp.inf, jnp.nan))
        residuals = do, lse, lse_low, jnp.where(is_finite, delta, 0.0)

        def add_round(sums: tuple[Array, ...], round_: PyTree[Array]) -> tuple[tuple[Array, ...], None]:
            queries, keys = _sorted_round(settings, band, codes, *round_, valid_queries=is_finite, valid_keys=valid)
            of_queries = queries.take(q), *queries.codes
            of_keys = keys.take(k), keys.take(v), *keys.codes
            sorted_residuals = tuple(map(queries.take, residuals))
            dq, dk, dv = tiles.backward(band, q.shape[1], of_queries, of_keys, sorted_residuals, seed, streams)
            part = queries.put(dq), keys.put(dk), keys.put(dv)
            return tuple(total + x for total, x in zip(sums, part, strict=True)), None

        zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q, k)]
        start = *zeros, jnp.where(is_alone[..., None], of_alone, jnp.float32(0))
        sums, _ = lax.scan(add_round, vary_alike(*start, q)[:3], _rounds(order))
        return tuple(dx.astype(x.dtype) for dx, x in zip(sums, (q, k, v), strict=True))

    dq, dk, dv = _by_lanes(gradients, q, k, v, order, codes, streams, do, *of_results)
    return dq, dk, dv, *(np.zeros(x.shape, jax.dtypes.float0) for x in (order, codes, seed, streams))


_attend.defvjp(_attend_forward, _attend_backward)


def _by_lanes(function: Callable[..., tuple[Array, ...]], *arrays: Array) -> tuple[Array, ...]:
    """Applies a function of arrays `[L, ...]` to a part of the L sequences at a time."""
    lanes, length = arrays[0].shape[:2]
    if jax.default_backend() != "cpu" or lanes * length <= CPU_TOKENS:
        return function(*arrays)
    together = next(n for n in range(max(1, CPU_TOKENS // length), 0, -1) if lanes % n == 0)
    groups = [x.reshape(-1, together, *x.shape[1:]) for x in arrays]
    return tuple(x.reshape(lanes, *x.shape[2:]) for x in lax.map(lambda x: function(*x), groups))


def _rounds(order: Int[Array, "L R T"]) -> tuple[Int[Array, " R"], Int[Array, "R L T"]]:
    """Numbers of the rounds, and the order of each."""
    return jnp.arange(order.shape[1], dtype=jnp.int32), order.swapaxes(0, 1)


@dataclasses.dataclass(frozen=True)
class _Sorted:
    """Tokens of L sequences in sorted order, with padding, P tokens each.

    Attributes:
      places: int32 [L, P], index of each token among all L T; -1 for padding.
      valid_places: As `places`; -1 also for tokens that are not valid.
      back: int32 [L, T], index of each token among the L P sorted ones.
      codes: int32 [L, P] each, see `_Visible`.
    """

    places: Array
    valid_places: Array
    back: Array
    codes: list[Array]

    def take(self, x: Array, fill: float = 0.0) -> Array:
        """`[L, P, ...]` from `[L, T, ...]`; rows, but not scalars, of padding and of tokens that are not valid are `fill`."""
        return _take(x, self.places if x.ndim == 2 else self.valid_places, fill)

    def put(self, x: Array) -> Array:
        """`[L, T, ...]` from `[L, P, ...]`."""
        return _take(x, self.back)


def _take(x: Array, index: Int[Array, "L P"], fill: float = 0.0) -> Array:
    """`[L, P, ...]`, of `x [L, T, ...]` with the first two axes as one; for -1, `fill` in rows, and any number in scalars."""
    rows = x.reshape(-1, *x.shape[2:]).at[index].get(mode="clip", wrap_negative_indices=False)
    # XLA:CPU vectorises a gather of rows only together with arithmetic, which takes a third of the time.
    return rows if x.ndim == 2 else jnp.where((index >= 0)[..., None], rows, jnp.full((), fill, x.dtype))


def _sorted_round(
    settings: _Settings,
    band: tiles.Band,
    codes: Int[Array, "L F T"],
    number: Array,
    order: Int[Array, "L T"],
    valid_queries: Bool[Array, "L T"] | None,
    valid_keys: Bool[Array, "L T"],
) -> tuple[_Sorted, _Sorted]:
    """Sorts the queries and the keys of a round. None for `valid_queries`: all are valid.

    The codes are the coordinates in this round and in all but the last round, and the index. The queries have coordinates that
    see nothing in place of those of rounds that are not earlier.
    """
    lanes, length = order.shape
    lane = jnp.arange(lanes, dtype=jnp.int32)[:, None]
    places = order + lane * length
    back = jnp.put_along_axis(order, order, jnp.arange(length, dtype=jnp.int32)[None], axis=1, inplace=False)
    current = _take(lax.dynamic_index_in_dim(codes, number, axis=1, keepdims=False), places)
    earlier = [_take(codes[:, e], places) for e in range(codes.shape[1] - 2)]
    nowhere = -2 - settings.buckets.window  # not within the window of any coordinate, nor of tiles.PAD
    hidden = [jnp.where(number > e, x, nowhere) for e, x in enumerate(earlier)]

    def padded(width: tuple[int, int], codes: list[Array], code: int, valid: Array | None) -> _Sorted:
        index = back + (lane * (width[0] + length + width[1]) + width[0])
        codes = [jnp.pad(x, ((0, 0), width), constant_values=jnp.int32(code)) for x in codes]
        valid_places = places if valid is None else jnp.where(_take(valid, places), places, -1)
        of_all, of_valid = (jnp.pad(x, ((0, 0), width), constant_values=jnp.int32(-1)) for x in (places, valid_places))
        return _Sorted(of_all, of_valid, index, codes)

    of_queries, of_keys = tiles.padding(band, lanes, length)
    queries = padded(of_queries, [current, *hidden, order], nowhere, valid_queries)
    return queries, padded(of_keys, [current, *earlier, order], tiles.PAD, valid_keys)


@array_op("B T N", buckets="B T N")
def visible_pairs(
    buckets: Int[Array, "B T N R"], settings: BucketSettings, segment_ids: Int[Array, "B T"] | None = None
) -> Bool[Array, "B N T T"]:
    """The pairs that `bucketed_attention` computes, by their definition.

    Args:
      buckets: int32 [B, T, N, R].
      settings: As in `bucketed_attention`.
      segment_ids: int32 [B, T].

    Returns:
      bool [B, N, T, T], query by key.

    Cost: O(B N R T^2).
    """
    by_round = buckets.transpose(3, 0, 2, 1)
    alike = by_round[..., :, None] == by_round[..., None, :]
    if segment_ids is not None:
        alike = alike & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])[None]
    # Number of tokens of the bucket up to each token, for each query: a difference counts the tokens between two tokens.
    count = jnp.cumsum(alike, axis=-1, dtype=jnp.int32)
    distance = jnp.diagonal(count, axis1=-2, axis2=-1)[..., :, None] - count
    near = (distance <= settings.window) & (distance >= (0 if settings.causal else -settings.window))
    visible = jnp.any(alike & near, axis=0)
    if settings.hides_self:
        visible = without_self(visible, jnp.eye(visible.shape[-1], dtype=bool)[None, None])
    return visible


@array_op("B T N", q="B T N")
def bucketed_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T M H"],
    v: Float[Array, "B T K Hv"],
    buckets: Int[Array, "B T N R"],
    settings: BucketSettings,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Array:
    """`bucketed_attention` as dense attention over `visible_pairs`, to be read and compared with.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, T, M, H].
      v: Values [B, T, K, Hv].
      buckets: int32 [B, T, N, R].
      settings: As in `bucketed_attention`.
      segment_ids: int32 [B, T].

    Returns:
      o [B, T, N, Hv].

    Cost: O(B N T^2 (H + R)).
    """
    heads = q.shape[2]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2).astype(jnp.float32) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k) * settings.factor(q.shape[3])
    visible = visible_pairs(buckets, settings, segment_ids)
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v).astype(q.dtype)


def without_self(visible: Bool[Array, "*a T S"], is_self: Bool[Array, "*b T S"]) -> Bool[Array, "*a T S"]:
    """Hides tokens from themselves, where they see another token.

    Args:
      visible: bool [..., T, S].
      is_self: bool, broadcasts to [..., T, S]: the key is that of the query's token.

    Returns:
      bool [..., T, S].
    """
    others = visible & ~is_self
    return others | (visible & ~jnp.any(others, axis=-1, keepdims=True))
