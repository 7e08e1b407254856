"""Attention by cuDNN on NVIDIA GPUs, through jax.nn, for calls that it computes exactly as `attend` defines them.

cuDNN gives a row that sees nothing the mean of the values, so every operand that could leave such a row is unsupported except
kv_lengths, for which the hidden values are zeroed. Unsupported for other reasons: return_lse (cuDNN's log-sum-exp has the
inputs' dtype and no gradient), dropout (its pattern differs from the other implementations), windows to the right, windows
with more queries than keys or beside other operands, and biases that differ between examples (their gradient is not certain).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hpnlp.ops.attention.masks.base import Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.attention.operands import Operands, scale_queries

SUPPORTS = frozenset({"segment_ids", "kv_segment_ids", "kv_lengths", "bias", "scale"})
# Operands of which cuDNN takes one at a time, and none beside a window.
_EXCLUSIVE = frozenset({"segment_ids", "kv_lengths", "bias"})


def limits(q: Array, k: Array, v: Array, mask: Mask | PerHead, operands: Operands) -> list[str]:
    """Properties of a call that cuDNN cannot compute exactly, beside operands that `SUPPORTS` lacks.

    Args:
      q: [B, T, N, H].
      k: [B, S, K, H].
      v: [B, S, K, Hv].
      mask: Mask of the attention.
      operands: Operands of `attend`.

    Returns:
      Short descriptions, empty where there are none.
    """
    exclusive = sorted(operands.features() & _EXCLUSIVE)
    reasons = _operand_limits(q, k, operands)
    reasons += [" with ".join(exclusive)] if len(exclusive) > 1 else []
    band = _causal_band(mask)
    if band is None:
        reasons.append(f"mask {mask}")
    elif band[1] is not None:
        reasons += [f"a window with {name}" for name in exclusive]
        reasons += [f"a window with T {q.shape[1]} over S {k.shape[1]}"] if q.shape[1] > k.shape[1] else []
    reasons += [] if q.dtype in (jnp.bfloat16, jnp.float16) else [f"dtype {q.dtype}"]
    reasons += ["an empty axis"] if 0 in (*q.shape, *k.shape) else []
    sizes = {q.shape[3], v.shape[3]}
    return reasons + [f"head size {size}" for size in sorted(sizes) if size % 8 or size > 128 or len(sizes) > 1]


def cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask | PerHead,
    operands: Operands,
) -> Array:
    """Attention by cuDNN's flash kernels, for calls without `limits`.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, H].
      mask: Full, Causal, Window(left, 0), or another band with the same bounds, as Causal() & Window(left).
      operands: Operands of `attend`. segment_ids cost a bias of B T T elements, and kv_lengths a copy of q, k and v. The
        bias is finite, [1, N, T, S] in q's dtype.

    Returns:
      o [B, T, N, H] in q's dtype.

    Cost:
      O(B N T S H) time, less the pairs that Causal and Window exclude; O(B N (T + S) H) memory.

    References:
      cuDNN's scaled dot product attention, through `jax.nn.dot_product_attention`.
    """
    q, operands = scale_queries(q, operands)
    causal, left = _causal_band(mask) or (False, None)
    lengths, segments = operands.kv_lengths, operands.segment_ids
    if lengths is not None:
        # For an example without keys cuDNN reads the first key. Its score and value must be 0, so that o and the gradients are
        # 0, and therefore its queries as well, because 0 * NaN is NaN.
        q = jnp.where((lengths > 0)[:, None, None, None], q, jnp.zeros((), q.dtype))
        inside = jnp.arange(k.shape[1])[None, :] < lengths[:, None]
        k, v = (jnp.where(inside[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (k, v))
        lengths = jnp.clip(lengths.astype(jnp.int32), 1, k.shape[1])
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        operands.bias,
        None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None],
        scale=operands.scale,
        is_causal=causal,
        key_value_seq_lengths=lengths,
        # Without is_causal, jax.nn would bound the window to the left only.
        local_window_size=None if left is None else (left, 0),
        implementation="cudnn",
    )


def _operand_limits(q: Array, k: Array, operands: Operands) -> list[str]:
    """Limits of lengths, segments and biases."""
    t, n, s = q.shape[1], q.shape[2], k.shape[1]
    # jax.nn takes every call that is differentiated for one with a bias, and a bias must have even lengths.
    reasons = [f"odd lengths: T {t}, S {s}"] if t % 2 or s % 2 else []
    if operands.kv_segment_ids is not operands.segment_ids:
        # A query might see nothing. In self-attention it sees itself, so that a finite bias hides exactly.
        reasons.append("kv_segment_ids other than segment_ids")
    if operands.segment_ids is not None and q.dtype == jnp.float16:
        # The bias of hidden pairs, -32768, is not far enough below all scores.
        reasons.append("segment_ids in float16")
    if (bias := operands.bias) is not None:
        is_added = isinstance(bias, jax.Array | np.ndarray) and bias.shape == (1, n, t, s) and bias.dtype == q.dtype
        reasons += [] if is_added else [f"bias other than {q.dtype}[1, N, T, S]"]
    return reasons


def _causal_band(mask: Mask | PerHead) -> tuple[bool, int | None] | None:
    """(causal, keys to the left, None for all) of masks that cuDNN can apply; None for other masks."""
    band = mask.band()
    if band == (None, None):
        return False, None
    if band is None or band[1] != 0 or (band[0] is not None and band[0] < 0):
        return None
    return True, band[0]
