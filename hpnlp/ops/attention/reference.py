"""Dense attention, written to be read: the twin that every faster form is held against."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.attention.masks.base import Full, Mask, PerHead
from hpnlp.ops.dropout import keep_mask, seed_words


@array_op("B T N", q="B T N")
def reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    kv_positions: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    dense_mask: Bool[Array, "..."] | None = None,
    global_tokens: Array | None = None,
    bias: Any = None,
    scale: float | Float[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    streams: Array | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Softmax attention (Vaswani et al. 2017, eq. 1) by the definition; arguments and results as `attend`.

    O(B N T S) memory.
    """
    (b, t, n, h), s, kv_heads = q.shape, k.shape[1], k.shape[2]
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    kv_positions = positions if kv_positions is None else kv_positions
    rows = jnp.broadcast_to(jnp.arange(t), (b, t)) if positions is None else positions
    columns = jnp.broadcast_to(jnp.arange(s), (b, s)) if kv_positions is None else kv_positions

    see = jnp.zeros((b, n, t, s), bool)
    for each, heads in mask.by_head(n).items():
        see = see.at[:, np.array(heads)].set(jnp.asarray(each.at(rows[:, :, None], columns[:, None, :]))[:, None])
    if global_tokens is not None:
        everywhere = as_flags(global_tokens, t)
        see |= everywhere[:, None, :, None] | everywhere[:, None, None, :]
    if segment_ids is not None and kv_segment_ids is not None:
        see &= (segment_ids[:, :, None] == kv_segment_ids[:, None, :])[:, None]
    if kv_lengths is not None:
        see &= jnp.arange(s)[None, None, None, :] < kv_lengths[:, None, None, None]
    if dense_mask is not None:
        see &= jnp.broadcast_to(dense_mask, see.shape)

    # What no query may see is taken out before any product, because 0 * NaN is NaN.
    seen = see.reshape(b, kv_heads, n // kv_heads * t, s).any(axis=2).transpose(0, 2, 1)[..., None]
    k = jnp.repeat(jnp.where(seen, k, jnp.zeros_like(k)), n // kv_heads, axis=2).astype(jnp.float32)
    v = jnp.repeat(jnp.where(seen, v, jnp.zeros_like(v)), n // kv_heads, axis=2).astype(jnp.float32)
    # Nor may a query that sees nothing reach the gradient of a key.
    q = jnp.where(see.any(axis=-1).transpose(0, 2, 1)[..., None], q, jnp.zeros((), q.dtype))
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k) * (h**-0.5 if scale is None else scale)
    if callable(bias):
        one = jax.vmap(jax.vmap(bias, (None, None, 0)), (None, 0, None))
        values: Any = jax.vmap(jax.vmap(one, (0, None, None)), (None, 0, 0))(jnp.arange(n), rows, columns)
        scores += values
    elif bias is not None:
        scores += jnp.broadcast_to(jnp.asarray(bias, jnp.float32), scores.shape)
    scores = jnp.where(see, scores, 0.0)  # whatever stands there, also for the gradient of what follows
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)

    if sinks is not None:  # a key of its own, which everyone sees and which has no value
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None, None], (b, n, t, 1))
        scores, see = jnp.concatenate([scores, sink], -1), jnp.concatenate([see, jnp.ones((b, n, t, 1), bool)], -1)
    scores = jnp.where(see, scores, -jnp.inf)
    some = ~jnp.isneginf(scores).all(axis=-1, keepdims=True)
    # Rows of -inf alone become rows of equal weights: softmax and its gradient would be NaN there.
    scores = jnp.where(some, scores, 0.0)
    lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    # Not exp(scores - lse), which rounds where lse is large.
    weights = jnp.where(see & some, jax.nn.softmax(scores, axis=-1), 0.0)[..., :s]
    if dropout_rate:
        assert rng is not None
        heads = (jnp.arange(b * n).reshape(b, n) if streams is None else streams)[..., None, None]
        keep = keep_mask(seed_words(rng), heads, rows[:, None, :, None], columns[:, None, None, :], dropout_rate)
        weights = jnp.where(keep, weights / (1.0 - dropout_rate), 0.0)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v).astype(q.dtype)
    if not return_lse:
        return out
    return out, jnp.where(some, lse, -jnp.inf)[..., 0].transpose(0, 2, 1)


@array_op("B", tokens="B")
def as_flags(tokens: Array, length: int) -> Bool[Array, "B T"]:
    """Global tokens as flags: bool [B, T] as they are, int [B, G] as places, of which those below 0 stand for none."""
    if tokens.dtype == jnp.bool_:
        return tokens
    places = jnp.where(tokens < 0, length, tokens.astype(jnp.int32))
    return (
        jnp.zeros((tokens.shape[0], length), bool)
        .at[jnp.arange(tokens.shape[0])[:, None], places]
        .set(True, mode="drop")
    )
