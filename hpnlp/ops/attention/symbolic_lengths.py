"""Attention over sequences of symbolic length, for exported programs that take any length.

A static mask has a schedule of tiles for lengths that are numbers. For a symbol, the mask is computed with the scores.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.attention.masks.base import Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.attention.operands import Operands
from hpnlp.ops.attention.reference import dense_attention, visible_pairs

_HIDDEN = -1e30  # a hidden score; exp of it is 0 beside any visible score


def has_symbols(*arrays: Array) -> bool:
    """Whether the length of an array [B, T, ...] is a symbol.

    Returns:
      True if one of them has a symbolic length.
    """
    return not all(isinstance(array.shape[1], int) for array in arrays)


def symbolic_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask | PerHead,
    operands: Operands,
) -> Array | tuple[Array, Array]:
    """`attend` for symbolic lengths.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv]; finite also where no query sees them.
      mask: A static pattern, or one for each head.
      operands: Operands of `attend`.

    Returns:
      As `attend`.

    Cost:
      O(B N T S H) time and O(B N T S) memory.
    """
    is_plain = (
        operands.sinks is None and operands.bias is None and not operands.dropout_rate and not operands.return_lse
    )
    if not is_plain:
        return dense_attention(q, k, v, mask, operands)
    (b, t, n, h), s, kv_heads = q.shape, k.shape[1], k.shape[2]
    q_pos = jnp.broadcast_to(jnp.arange(t), (b, t)) if operands.positions is None else operands.positions
    k_pos = jnp.broadcast_to(jnp.arange(s), (b, s)) if operands.kv_positions is None else operands.kv_positions
    visible = visible_pairs(mask, operands, q_pos, k_pos, n)
    scale = h**-0.5 if operands.scale is None else operands.scale
    k, v = (x if kv_heads == n else jnp.repeat(x, n // kv_heads, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", (q * scale).astype(jnp.float32), k.astype(jnp.float32))
    if operands.soft_cap is not None:
        scores = operands.soft_cap * jnp.tanh(scores / operands.soft_cap)
    weights = row_softmax(jnp.where(visible, scores, _HIDDEN))
    o = jnp.einsum("bnts,bsnh->btnh", weights, v.astype(jnp.float32))
    return jnp.where(visible.any(axis=-1).transpose(0, 2, 1)[..., None], o, 0.0).astype(q.dtype)


@jax.jit
def row_softmax(scores: Array) -> Array:
    """Softmax over the last axis; a function of its own, which exporters find by its name.

    Args:
      scores: float32 [..., S].

    Returns:
      float32 [..., S].
    """
    return jax.nn.softmax(scores, axis=-1)
