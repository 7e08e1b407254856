"""Dense attention, written to be read: every faster implementation is tested against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.attention.operands import Operands, as_flags
from hpnlp.ops.dropout import keep_mask, seed_words
from hpnlp.ops.helpers.array_op import array_op


@array_op("B T N", q="B T N")
def reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    **operands: Any,
) -> Array | tuple[Array, Array]:
    """Softmax attention by its definition, without validation of the arguments.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv].
      mask: A static pattern, or one for each head.
      **operands: Further arguments of `attend`, with the same meaning, except impl and block_size.

    Returns:
      o [B, T, N, Hv] in q's dtype; with return_lse the pair (o, lse), lse float32 [B, T, N].

    Cost:
      O(B N T S H) time and O(B N T S) memory.

    References:
      Vaswani et al. 2017, "Attention is all you need", eq. 1.
    """
    return dense_attention(q, k, v, mask, Operands(**operands))


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask | PerHead,
    operands: Operands,
) -> Array | tuple[Array, Array]:
    """`reference` with its operands as a record.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv].
      mask: A static pattern, or one for each head.
      operands: Operands of `attend`.

    Returns:
      o [B, T, N, Hv] in q's dtype; with return_lse the pair (o, lse), lse float32 [B, T, N].
    """
    (b, t, n, h), s, kv_heads = q.shape, k.shape[1], k.shape[2]
    q_pos = jnp.broadcast_to(jnp.arange(t), (b, t)) if operands.positions is None else operands.positions
    k_pos = jnp.broadcast_to(jnp.arange(s), (b, s)) if operands.kv_positions is None else operands.kv_positions
    visible = visible_pairs(mask, operands, q_pos, k_pos, n)

    # Keys that no query may see are zeroed before any product, because 0 * NaN is NaN.
    seen = visible.reshape(b, kv_heads, n // kv_heads * t, s).any(axis=2).transpose(0, 2, 1)[..., None]
    k = jnp.repeat(jnp.where(seen, k, jnp.zeros_like(k)), n // kv_heads, axis=2).astype(jnp.float32)
    v = jnp.repeat(jnp.where(seen, v, jnp.zeros_like(v)), n // kv_heads, axis=2).astype(jnp.float32)
    # A query that sees nothing must not reach the gradient of a key either.
    q = jnp.where(visible.any(axis=-1).transpose(0, 2, 1)[..., None], q, jnp.zeros((), q.dtype))
    scale = h**-0.5 if operands.scale is None else operands.scale
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k) * scale
    scores = _add_bias(scores, operands.bias, q_pos, k_pos)
    # Hidden scores may be anything, also NaN: 0 keeps the gradients of the operations below finite.
    scores = jnp.where(visible, scores, 0.0)
    if operands.soft_cap is not None:
        scores = operands.soft_cap * jnp.tanh(scores / operands.soft_cap)

    if operands.sinks is not None:  # one more key without a value, which every query sees
        sink = jnp.broadcast_to(operands.sinks.astype(jnp.float32)[None, :, None, None], (b, n, t, 1))
        scores = jnp.concatenate([scores, sink], -1)
        visible = jnp.concatenate([visible, jnp.ones((b, n, t, 1), bool)], -1)
    scores = jnp.where(visible, scores, -jnp.inf)
    sees_any = ~jnp.isneginf(scores).all(axis=-1, keepdims=True)
    # Rows of -inf become rows of equal weights: softmax and its gradient would be NaN.
    scores = jnp.where(sees_any, scores, 0.0)
    lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    # softmax and not exp(scores - lse), which rounds where lse is large.
    weights = jnp.where(visible & sees_any, jax.nn.softmax(scores, axis=-1), 0.0)[..., :s]
    if operands.dropout_rate:
        weights = _drop(weights, operands, q_pos, k_pos)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v).astype(q.dtype)
    if not operands.return_lse:
        return out
    return out, jnp.where(sees_any, lse, -jnp.inf)[..., 0].transpose(0, 2, 1)


def visible_pairs(
    mask: Mask | PerHead, operands: Operands, q_pos: Int[Array, "B T"], k_pos: Int[Array, "B S"], heads: int
) -> Bool[Array, "B N T S"]:
    """The pairs that the mask and the operands allow.

    Args:
      mask: A static pattern, or one for each head.
      operands: Operands of `attend`.
      q_pos: Positions of the queries [B, T].
      k_pos: Positions of the keys [B, S].
      heads: Number of heads, N.

    Returns:
      [B, N, T, S].
    """
    (b, t), s = q_pos.shape, k_pos.shape[1]
    masks = mask.by_head(heads)
    visible = jnp.zeros((b, heads, t, s), bool)
    for head_mask, members in masks.items():
        allowed = jnp.asarray(head_mask.at(q_pos[:, :, None], k_pos[:, None, :]))[:, None]
        visible = visible.at[:, np.array(members)].set(allowed) if len(masks) > 1 else visible | allowed
    if operands.global_tokens is not None:
        is_global = as_flags(operands.global_tokens, t)
        visible |= is_global[:, None, :, None] | is_global[:, None, None, :]
    if operands.segment_ids is not None and operands.kv_segment_ids is not None:
        visible &= (operands.segment_ids[:, :, None] == operands.kv_segment_ids[:, None, :])[:, None]
    if operands.kv_lengths is not None:
        visible &= jnp.arange(s)[None, None, None, :] < operands.kv_lengths[:, None, None, None]
    if operands.dense_mask is not None:
        visible &= jnp.broadcast_to(operands.dense_mask, visible.shape)
    return visible


def _add_bias(
    scores: Float[Array, "B N T S"],
    bias: Callable[..., Array] | ArrayLike | None,
    q_pos: Int[Array, "B T"],
    k_pos: Int[Array, "B S"],
) -> Float[Array, "B N T S"]:
    """Scores plus a bias array, or a bias function evaluated for every head and pair of positions."""
    if callable(bias):
        pairs = jax.vmap(jax.vmap(bias, (None, None, 0)), (None, 0, None))
        values: Any = jax.vmap(jax.vmap(pairs, (0, None, None)), (None, 0, 0))(
            jnp.arange(scores.shape[1]), q_pos, k_pos
        )
        return scores + values
    if bias is not None:
        return scores + jnp.broadcast_to(jnp.asarray(bias, jnp.float32), scores.shape)
    return scores


def _drop(
    weights: Float[Array, "B N T S"], operands: Operands, q_pos: Int[Array, "B T"], k_pos: Int[Array, "B S"]
) -> Float[Array, "B N T S"]:
    """Attention weights after dropout, the kept ones scaled up."""
    assert operands.rng is not None
    b, n = weights.shape[:2]
    streams = (jnp.arange(b * n).reshape(b, n) if operands.streams is None else operands.streams)[..., None, None]
    seed, rate = seed_words(operands.rng), operands.dropout_rate
    keep = keep_mask(seed, streams, q_pos[:, None, :, None], k_pos[:, None, None, :], rate)
    return jnp.where(keep, weights / (1.0 - rate), 0.0)
