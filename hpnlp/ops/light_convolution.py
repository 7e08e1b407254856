"""Depthwise convolutions whose weights are a softmax over the taps and are shared by the features of a head."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.dropout import keep_mask, seed_words
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

    Cost: B T W N H multiplications, which the compiler fuses into one pass over x. A gradient keeps x only. On a CPU, the
    gradient of the scores has temporary buffers of W times x, and takes 10 to 20 times as long as the forward pass.

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

    Cost: B T W N H multiplications. A gradient keeps x and the scores; its temporary buffers are those of `light_conv`.

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
    # Without the checkpoint, a gradient would keep W float32 copies of x.
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
    ids = None if segment_ids is None else _around(segment_ids, back, ahead)
    total = jnp.zeros(x.shape, jnp.float32)
    # The transpose of a split is one concatenation, where that of W slices would be a sum of W padded arrays.
    for tap, weight in enumerate(jnp.split(weights, width, axis=-1)):
        if preceding is None and abs(ahead - tap) >= length:
            continue
        start = width - 1 - tap
        value = around[:, start : start + length].astype(jnp.float32)
        if ids is not None and segment_ids is not None:
            same = ids[:, start : start + length] == segment_ids
            value = jnp.where(same[..., None, None], value, jnp.float32(0))
        total = total + weight * value
    return total.astype(x.dtype)


def _around(x: Array, before: int, after: int) -> Array:
    """Zeros before and after the tokens of x."""
    return jnp.pad(x, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
