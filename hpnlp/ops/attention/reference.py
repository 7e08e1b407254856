"""Dense attention, written to be read: the twin that every faster form is held against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.algebra import Mask
from hpnlp.ops.attention.dropout import keep_mask, seed_words
from hpnlp.ops.attention.mask import Full


def allowed(
    mask: Mask,
    shape: tuple[int, int, int],
    segment_ids: Int[Array, "B T"] | None,
    kv_segment_ids: Int[Array, "B S"] | None,
    positions: Int[Array, "B T"] | None,
    kv_positions: Int[Array, "B S"] | None,
    kv_lengths: Int[Array, "B"] | None,
) -> Array:
    """bool [B, T, S]: the static mask at the positions, and the same segment, and a key below the row's length."""
    b, t, s = shape
    q = jnp.broadcast_to(jnp.arange(t), (b, t)) if positions is None else positions
    k = jnp.broadcast_to(jnp.arange(s), (b, s)) if kv_positions is None else kv_positions
    see = mask.at(q[:, :, None], k[:, None, :])
    if segment_ids is not None and kv_segment_ids is not None:
        see &= segment_ids[:, :, None] == kv_segment_ids[:, None, :]
    if kv_lengths is not None:
        see &= jnp.arange(s)[None, None, :] < kv_lengths[:, None, None]
    return see


def reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask = Full(),  # noqa: B008  (frozen)
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    kv_positions: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Softmax attention (Vaswani et al. 2017, eq. 1) by the definition; arguments and results as `attend`.

    O(B N T S) memory.
    """
    b, t, n, h = q.shape
    s, kv_heads = k.shape[1], k.shape[2]
    see = allowed(mask, (b, t, s), segment_ids, kv_segment_ids, positions, kv_positions, kv_lengths)
    # What no query may see is taken out before any product, because 0 * NaN is NaN.
    seen = see.any(axis=1)[:, :, None, None]
    k = jnp.repeat(jnp.where(seen, k, jnp.zeros_like(k)), n // kv_heads, axis=2).astype(jnp.float32)
    v = jnp.repeat(jnp.where(seen, v, jnp.zeros_like(v)), n // kv_heads, axis=2).astype(jnp.float32)
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k) * (h**-0.5 if scale is None else scale)
    see = see[:, None]
    some = see.any(axis=-1, keepdims=True)
    scores = jnp.where(see, scores, jnp.where(some, -jnp.inf, 0.0))
    lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    weights = jnp.where(
        see, jax.nn.softmax(scores, axis=-1), 0.0
    )  # not exp(scores - lse), which rounds where lse is large
    if dropout_rate:
        assert rng is not None
        heads = jnp.arange(b * n).reshape(b, n)
        rows = jnp.broadcast_to(jnp.arange(t), (b, t)) if positions is None else positions
        columns = jnp.broadcast_to(jnp.arange(s), (b, s)) if kv_positions is None else kv_positions
        keep = keep_mask(seed_words(rng), heads, rows, columns, dropout_rate)
        weights = jnp.where(keep, weights / (1.0 - dropout_rate), 0.0)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v).astype(q.dtype)
    if not return_lse:
        return out
    return out, jnp.where(some, lse, -jnp.inf)[..., 0].transpose(0, 2, 1)
