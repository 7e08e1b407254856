"""Depthwise convolutions whose weights are a softmax over the taps and are shared by the features of a head."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.ops.dropout import keep_mask, seed_words
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.types import InputError


@array_op("B T N", x="B T N", segment_ids="B T")
def light_conv(
    x: Float[Array, "B T N H"],
    scores: Float[Array, "N W"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    ahead: int = 0,
    preceding: Float[Array, "B P N H"] | None = None,
    rate: float = 0.0,
    rng: Array | None = None,
    streams: Int[Array, "B N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Lightweight convolution: `y[t] = sum_j softmax(scores)[j] * x[t + ahead - j]`, with the weights of each head.

    Tokens outside of the sequence, and tokens of another segment, count as 0, even if they are NaN; the other weights keep
    their values.

    Args:
      x: Values of the heads.
      scores: Scores of the W taps, whose softmax are the weights; from the latest token that is read to the earliest.
      segment_ids: Segment of each token; None for one segment per sequence.
      ahead: Number of later tokens that an output reads, 0 for a causal convolution.
      preceding: Values of the P = W - 1 - ahead tokens before x, zeros before the sequence; None for zeros.
      rate: Rate of dropout of the weights (DropConnect), drawn for each token.
      rng: Key of dropout; None for no dropout.
      streams: A number for each sequence and head, on which dropout depends.

    Returns:
      The convolved values, in the dtype of x; sums are float32.

    Raises:
      InputError: The shapes of the arguments do not agree, there is no tap, `ahead` is not below the number of taps, or
        `rate` is not in [0, 1).

    Cost: B T W N H multiplications, which the compiler fuses into one pass over x. A gradient keeps x only, and
    computes the weights again.

    References:
      Wu et al. 2019, "Pay less attention with lightweight and dynamic convolutions", eq. 4 and 5.
    """
    return _checked(x, scores, segment_ids, ahead, preceding, rate, rng, streams)


@array_op("B T N", x="B T N", segment_ids="B T")
def dynamic_conv(
    x: Float[Array, "B T N H"],
    scores: Float[Array, "B T N W"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    ahead: int = 0,
    preceding: Float[Array, "B P N H"] | None = None,
    rate: float = 0.0,
    rng: Array | None = None,
    streams: Int[Array, "B N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Dynamic convolution: `light_conv` with scores of each token.

    Args:
      x: Values of the heads.
      scores: Scores of the W taps of each token and head.
      segment_ids: As for `light_conv`.
      ahead: As for `light_conv`.
      preceding: As for `light_conv`.
      rate: As for `light_conv`.
      rng: As for `light_conv`.
      streams: As for `light_conv`.

    Returns:
      The convolved values, in the dtype of x; sums are float32.

    Raises:
      InputError: As for `light_conv`.

    Cost: B T W N H multiplications. A gradient keeps x and the scores, and computes the weights again.

    References:
      Wu et al. 2019, "Pay less attention with lightweight and dynamic convolutions", eq. 6.
    """
    return _checked(x, scores, segment_ids, ahead, preceding, rate, rng, streams)


def _checked(
    x: Array,
    scores: Array,
    segment_ids: Array | None,
    ahead: int,
    preceding: Array | None,
    rate: float,
    rng: Array | None,
    streams: Array | None,
) -> Array:
    leading = (x.shape[2],) if scores.ndim == 2 else x.shape[:3]
    width = scores.shape[-1]
    if width < 1 or scores.shape[:-1] != leading:
        raise InputError(f"scores {scores.shape} for x {x.shape}: expected {(*leading, 'taps')} with at least one tap")
    if not 0 <= ahead < width:
        raise InputError(f"ahead={ahead}: expected 0 to {width - 1}, since there are {width} taps")
    earlier = (x.shape[0], width - 1 - ahead, *x.shape[2:])
    if preceding is not None and (preceding.shape != earlier or segment_ids is not None):
        raise InputError(f"preceding {preceding.shape}: expected {earlier}, and no segment_ids")
    if not 0.0 <= rate < 1.0:
        raise InputError(f"rate={rate}: expected at least 0 and less than 1")
    if rate and rng is not None and streams is None:
        raise InputError(f"rate={rate} without streams: pass a number for each sequence and head")
    seed = seed_words(rng) if rate and rng is not None else None
    # Without the checkpoint, a gradient would keep the weights of each token and their dropout.
    convolve = jax.checkpoint(functools.partial(_convolve, ahead, rate), prevent_cse=False)
    return convolve(x, scores, segment_ids, preceding, seed, streams)


def _convolve(
    ahead: int,
    rate: float,
    x: Array,
    scores: Array,
    segment_ids: Array | None,
    preceding: Array | None,
    seed: Array | None,
    streams: Array | None,
) -> Array:
    length, width = x.shape[1], scores.shape[-1]
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
    if scores.ndim == 2:
        weights = weights[None, None]
    if seed is not None:
        assert streams is not None
        tokens, taps = jnp.arange(length, dtype=jnp.int32), jnp.arange(width, dtype=jnp.int32)
        keep = keep_mask(seed, streams[:, None, :, None], tokens[None, :, None, None], taps[None, None, None], rate)
        weights = jnp.where(keep, weights / (1.0 - rate), jnp.float32(0))
    back = width - 1 - ahead
    around = _around(x, back, ahead) if preceding is None else _around(jnp.concatenate([preceding, x], 1), 0, ahead)
    ids = () if segment_ids is None else (segment_ids, _around(segment_ids, back, ahead))
    around, weights, *ids = vary_alike(around, weights, *ids)
    return _weighted(around, weights, tuple(ids))


@jax.custom_vjp
def _weighted(around: Array, weights: Array, ids: tuple[Array, ...]) -> Array:
    """`y[t] = sum_j weights[t, j] * around[t + W - 1 - j]`, in the dtype of around.

    Args:
      around: `[B, T + W - 1, N, H]`, the tokens that are read.
      weights: float32 `[B, T, N, W]` or `[1, 1, N, W]`.
      ids: Segments of the tokens `[B, T]` and of those that are read; empty for one segment.

    Returns:
      `[B, T, N, H]`.
    """
    width = weights.shape[-1]
    length = around.shape[1] - width + 1
    total = jnp.zeros((around.shape[0], length, *around.shape[2:]), jnp.float32)
    for tap in range(width):
        total = total + weights[..., tap, None] * _read(around, ids, width - 1 - tap, length)
    return total.astype(around.dtype)


def _weighted_forward(around: Array, weights: Array, ids: tuple[Array, ...]) -> tuple[Array, Any]:
    return _weighted(around, weights, ids), (around, weights, ids)


def _weighted_backward(saved: PyTree, dy: Array) -> tuple[Array, Array, tuple[None, ...]]:
    around, weights, ids = saved
    width = weights.shape[-1]
    (length, total_length), dy = (dy.shape[1], around.shape[1]), dy.astype(jnp.float32)

    def tap_gradient(tap: Array) -> Array:
        """The gradient of the weights of one tap."""
        value = _read(around, ids, width - 1 - tap, length)
        # An einsum: XLA:CPU takes ten times as long for a sum of products over the last axis.
        by_token = jnp.einsum("btnh,btnh->btn", dy, value, precision=lax.Precision.HIGHEST)
        shared = tuple(i for i in (0, 1) if weights.shape[i] == 1 != by_token.shape[i])
        return by_token.sum(axis=shared, keepdims=True) if shared else by_token

    # A loop, so that the tokens are copied for one tap at a time.
    dweights = jnp.moveaxis(lax.map(tap_gradient, jnp.arange(width, dtype=jnp.int32)), 0, -1)

    readers, by_reader = _around(dy, width - 1, width - 1), weights
    if weights.shape[1] == length:
        by_reader = _around(weights, width - 1, width - 1)
    of_readers = () if not ids else (ids[1], _around(ids[0], width - 1, width - 1))
    daround = jnp.zeros(around.shape, jnp.float32)
    for tap in range(width):  # the token at index u is read by the one at u - (W - 1 - tap)
        weight = by_reader[:, tap : tap + total_length] if weights.shape[1] == length else by_reader
        daround = daround + weight[..., tap, None] * _read(readers, of_readers, tap, total_length)
    return daround.astype(around.dtype), dweights, tuple(None for _ in ids)


_weighted.defvjp(_weighted_forward, _weighted_backward)


def _read(around: Array, ids: tuple[Array, ...], start: Array | int, length: int) -> Array:
    """Float32 tokens from `start` on, 0 where they belong to another segment than the tokens that read them."""
    value = lax.dynamic_slice_in_dim(around, start, length, axis=1).astype(jnp.float32)
    if not ids:
        return value
    same = lax.dynamic_slice_in_dim(ids[1], start, length, axis=1) == ids[0]
    return jnp.where(same[..., None, None], value, jnp.float32(0))


def _around(x: Array, before: int, after: int) -> Array:
    """Zeros before and after the tokens of x."""
    return jnp.pad(x, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
