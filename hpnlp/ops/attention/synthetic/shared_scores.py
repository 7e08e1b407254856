"""Softmax attention with the same scores in all sequences of a batch: one product for all of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.attention.synthetic.attend import synthetic_attend
from hpnlp.types import InputError

# Tokens of the longest sequences for which one product is faster on CPUs: with its backward pass, it takes 0.2 to 0.5 of the
# time of `synthetic_attend` at 128 and 256 tokens, and 0.9 to 1.2 at 512 and 1,024, since tiles there fit into the cache.
MAX_LENGTH = 256
# Differences of scores in a row up to which no sum of exponentials, taken relative to the row's maximum, underflows, nor does
# its square, by which the derivative of a quotient divides.
MAX_SPREAD = 40.0


@array_op("B T N", v="B T")
def shared_scores_attend(
    v: Float[Array, "B T N H"],
    scores: Float[Array, "N T T"],
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
      scores: Scores of each head.
      mask: The pairs that may influence each other.
      segment_ids: Segments; tokens of different segments do not attend to each other.
      positions: Positions for the mask; indices if None.
      **dropout: `dropout_rate`, `rng` and `streams`, as for `attend`.

    Returns:
      The mixed values, in the dtype of v. A token that sees none has 0.

    Raises:
      InputError: The scores are not those of all pairs of tokens in each head of v.

    Cost: N T^2 exponentials, 2 B N T^2 H multiplications, and memory for O(N T^2 + B N T H) numbers; otherwise that of
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
        # Under jax.vmap, both branches run, and the derivatives of the branch that is not taken have to be finite.
        v, scores = (jnp.where(is_exact, x, 0) for x in (v, scores))
        return _together(v, scores, visible, is_first)

    patterns = [*mask.by_head(heads)]
    if not 1 <= length <= MAX_LENGTH or dropout.get("dropout_rate") or positions is not None or len(patterns) > 1:
        return separately(v, scores)
    indices = jnp.arange(length)
    visible = jnp.broadcast_to(jnp.asarray(patterns[0].at(indices[:, None], indices[None])), scores.shape[1:])
    highest = jnp.where(visible, scores, -jnp.inf).max(axis=2)
    spread = highest - jnp.where(visible, scores, jnp.inf).min(axis=2)  # -infinity in a row without visible keys
    is_exact = (spread <= MAX_SPREAD).all() & jnp.isfinite(v).all()
    is_first = jnp.ones(v.shape[:2], bool)
    if segment_ids is not None:
        is_first = segment_ids == segment_ids[:, :1]
        second = jnp.take_along_axis(segment_ids, is_first.argmin(1)[:, None], axis=1)
        is_exact &= (is_first | (segment_ids == second)).all()
    return jax.lax.cond(is_exact, together, separately, v, scores)


def _together(
    v: Float[Array, "B T N H"], scores: Float[Array, "N T T"], visible: Bool[Array, "T T"], is_first: Bool[Array, "B T"]
) -> Float[Array, "B T N H"]:
    """The mixed values of rows of two segments, of which `is_first` tells one."""
    batch, length, heads, width = v.shape
    # Values of float16 are multiplied as float32: exp(-MAX_SPREAD) underflows in float16.
    dtype = jnp.float32 if v.dtype == jnp.float16 else v.dtype
    scores = jnp.where(visible, scores.astype(jnp.float32), -jnp.inf)
    highest = jax.lax.stop_gradient(scores.max(axis=2, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0)).astype(dtype)
    x = jnp.concatenate([v.astype(dtype), jnp.ones((*v.shape[:3], 1), dtype)], axis=3)
    chosen = is_first[:, :, None, None, None] == jnp.array([True, False])[None, None, None, :, None]
    x = jnp.where(chosen, x[:, :, :, None], jnp.zeros((), dtype))  # [B, T, N, 2, H + 1]
    x = x.transpose(2, 1, 0, 3, 4).reshape(heads, length, -1)
    y = jnp.einsum("nts,nsc->ntc", weights, x, preferred_element_type=jnp.float32)
    y = y.reshape(heads, length, batch, 2, width + 1).transpose(2, 1, 0, 3, 4)
    y = jnp.where(is_first[:, :, None, None], y[..., 0, :], y[..., 1, :])
    total = y[..., width:]
    return jnp.where(total > 0, y[..., :width] / jnp.where(total > 0, total, 1.0), 0.0).astype(v.dtype)
