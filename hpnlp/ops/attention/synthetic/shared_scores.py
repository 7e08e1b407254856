"""Softmax attention with the same scores in all sequences of a batch: one product for all of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.attention.synthetic.attend import synthetic_attend
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.types import InputError

# Tokens of the longest sequences for which one product is faster on CPUs: with its backward pass, it takes 0.2 to 0.5 of the
# time of `synthetic_attend` at 128 and 256 tokens, and 0.9 to 1.2 at 512 and 1,024, since tiles there fit into the cache.
MAX_LENGTH = 256
# Differences of scores in a row up to which no sum of exponentials, taken relative to the row's maximum, underflows.
MAX_SPREAD = 60.0


@array_op("B T N", v="B T")
def shared_scores_attend(
    v: Float[Array, "B T N H"],
    scores: Float[Array, "_ _ _"],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    **dropout: Any,
) -> Float[Array, "B T N H"]:
    """Softmax attention `softmax(scores) v` with scores that do not depend on the sequence.

    Where each row of the batch has at most two segments, such as a text and padding, the exponentials of the scores are the
    same for all rows. Their product with the values of each segment, and with the indicators of its tokens, gives numerators
    and denominators. Further segments, values that are not finite, and scores that differ by more than MAX_SPREAD in a row take
    `synthetic_attend`, which is decided at run time; so do dropout, masks over positions or of each head, and more than
    MAX_LENGTH tokens.

    Args:
      v: Values.
      scores: Scores of each head, [N, T, T].
      mask: The pairs that may influence each other.
      segment_ids: Segments; tokens of different segments do not attend to each other.
      positions: Positions for the mask; indices if None.
      **dropout: `dropout_rate`, `rng` and `streams`, as for `attend`.

    Returns:
      The mixed values, in the dtype of v. A token that sees none has 0.

    Raises:
      InputError: The scores are not those of all pairs of tokens in each head of v.

    Cost: N T^2 exponentials, 2 B N T^2 H multiplications, and memory for O(N T^2 + B N T H) numbers, of
      which the backward pass gets v, the scores and the result; otherwise that of
      `synthetic_attend`.

    References:
      Tay et al. 2020, "Synthesizer: rethinking self-attention for transformer models", eq. 4.
    """
    length, heads = v.shape[1:3]
    if scores.shape != (heads, length, length):
        raise InputError(
            f"scores {scores.shape} with values {v.shape}: expected ({heads}, {length}, {length}), the scores of all pairs of "
            "tokens in each head"
        )

    def separately(v: Array, scores: Array) -> Array:
        segments = {"segment_ids": segment_ids, "kv_segment_ids": segment_ids}
        places = {"positions": positions, "kv_positions": positions}
        return synthetic_attend(v, [], [scores[None]], mask, **segments, **places, **dropout)

    def together(v: Array, scores: Array) -> Array:
        return _together(v, scores, visible, is_first, is_exact)

    patterns = [*mask.by_head(heads)]
    if not 1 <= length <= MAX_LENGTH or dropout.get("dropout_rate") or positions is not None or len(patterns) > 1:
        return separately(v, scores)
    indices = jnp.arange(length)
    visible = jnp.broadcast_to(jnp.asarray(patterns[0].at(indices[:, None], indices[None])), scores.shape[1:])
    highest = jnp.where(visible, scores, -jnp.inf).max(axis=2)
    spread = highest - jnp.where(visible, scores, jnp.inf).min(axis=2)  # -infinity in a row without visible keys
    is_exact = (spread <= MAX_SPREAD).all() & jnp.isfinite(v).all()
    is_first = None
    if segment_ids is not None:
        is_first = segment_ids == segment_ids[:, :1]
        second = jnp.take_along_axis(segment_ids, is_first.argmin(1)[:, None], axis=1)
        is_exact &= (is_first | (segment_ids == second)).all()
    # Before the cond, in which the devices of a shard_map may branch differently, and gradients of scores must not be summed.
    is_exact, v, scores = vary_alike(is_exact, v, scores)
    return jax.lax.cond(is_exact, together, separately, v, scores)


@jax.custom_vjp
def _together(
    v: Float[Array, "B T N H"],
    scores: Float[Array, "N T T"],
    visible: Bool[Array, "T T"],
    is_first: Bool[Array, "B T"] | None,
    is_exact: Bool[Array, ""],
) -> Float[Array, "B T N H"]:
    """The mixed values of rows of two segments, of which `is_first` tells one, or of one segment for None.

    Without `is_exact`, the result is not used, but computed under jax.vmap: it is that of zeros.

    The backward pass makes the operands of the products again, which are several times as large as the values. It divides by
    the sums of exponentials once: their squares, which the derivative of a quotient has, may underflow.
    """
    return _forward(v, scores, visible, is_first, is_exact)[0]


def _forward(
    v: Array, scores: Array, visible: Array, is_first: Array | None, is_exact: Array
) -> tuple[Array, tuple[Any, ...]]:
    residuals = v, scores, visible, is_first, is_exact
    v, scores = _or_zeros(is_exact, v), _or_zeros(is_exact, scores)
    # Values of float16 are multiplied as float32: exp(-MAX_SPREAD) underflows in float16.
    dtype = jnp.float32 if v.dtype == jnp.float16 else v.dtype
    weights, x = _exponentials(scores, visible).astype(dtype), _by_segment(_with_ones(v.astype(dtype)), is_first)
    y = _segment_columns(jnp.einsum("nts,nsc->ntc", weights, x, preferred_element_type=jnp.float32), is_first, len(v))
    total = y[..., -1:]
    o = jnp.where(total > 0, y[..., :-1] / jnp.where(total > 0, total, 1.0), 0.0).astype(v.dtype)
    return o, (*residuals, o, total)


def _backward(residuals: tuple[Any, ...], cotangent: Array) -> tuple[Array | None, ...]:
    v, scores, visible, is_first, is_exact, o, total = residuals
    v, scores = _or_zeros(is_exact, v), _or_zeros(is_exact, scores)
    cotangent = jnp.where(total > 0, cotangent.astype(jnp.float32) / jnp.where(total > 0, total, 1.0), 0.0)
    of_total = -jnp.sum(cotangent * o.astype(jnp.float32), axis=3, keepdims=True)
    dy = _by_segment(jnp.concatenate([cotangent, of_total], axis=3), is_first)
    weights, x = _exponentials(scores, visible), _by_segment(_with_ones(v.astype(jnp.float32)), is_first)
    dscores = weights * jnp.einsum("ntc,nsc->nts", dy, x)
    dv = _segment_columns(jnp.einsum("nts,ntc->nsc", weights, dy), is_first, len(v))[..., :-1]
    return dv.astype(v.dtype), dscores.astype(scores.dtype), None, None, None


_together.defvjp(_forward, _backward)


def _exponentials(scores: Float[Array, "N T T"], visible: Bool[Array, "T T"]) -> Float[Array, "N T T"]:
    """Exponentials of scores relative to the row's maximum, float32; 0 for keys that are not visible."""
    scores = jnp.where(visible, scores.astype(jnp.float32), -jnp.inf)
    highest = scores.max(axis=2, keepdims=True)
    return jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))


def _or_zeros(condition: Array, x: Array) -> Array:
    return jnp.where(condition, x, jnp.zeros((), x.dtype))


def _with_ones(v: Float[Array, "B T N H"]) -> Float[Array, "B T N C"]:
    return jnp.concatenate([v, jnp.ones((*v.shape[:3], 1), v.dtype)], axis=3)


def _by_segment(x: Float[Array, "B T N C"], is_first: Bool[Array, "B T"] | None) -> Float[Array, "N T _"]:
    """Columns of each row of the batch and segment, which are 0 at tokens of the other segment."""
    x = x[:, :, :, None]
    if is_first is not None:
        chosen = jnp.stack([is_first, ~is_first], axis=2)
        x = _or_zeros(chosen[:, :, None, :, None], x)
    return x.transpose(2, 1, 0, 3, 4).reshape(x.shape[2], x.shape[1], -1)


def _segment_columns(
    y: Float[Array, "N T _"], is_first: Bool[Array, "B T"] | None, batch: int
) -> Float[Array, "B T N C"]:
    """The columns of each token's own segment."""
    y = y.reshape(*y.shape[:2], batch, 1 if is_first is None else 2, -1).transpose(2, 1, 0, 3, 4)
    return y[..., 0, :] if is_first is None else jnp.where(is_first[:, :, None, None], y[..., 0, :], y[..., 1, :])
