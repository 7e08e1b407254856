"""Attention by cuDNN on NVIDIA GPUs, asked through jax.nn for what it computes exactly as we define it.

A row that sees nothing would get the mean of the values, so that nothing is let through that could leave one: only
kv_lengths can, and these it reads beside values that are zeroed. What else is left out, and why: its log-sum-exp comes in
the inputs' dtype and without a gradient; its dropout is not the other backends'; a window it takes to the left only, with
no more queries than keys and beside nothing else; and of a bias only one that all rows of a batch share is sure to get a
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.dispatch import asked
from hpnlp.ops.attention.masks.base import Full, Mask, PerHead
from hpnlp.types import InputError


def beyond_cudnn(q: Array, k: Array, v: Array, mask: Mask | PerHead, operands: Mapping[str, Any]) -> list[str]:
    """What of a call cuDNN cannot honour exactly, or at all: nothing where the list is empty.

    operands: all other arguments of the call by name; None, 0 and False stand for those that are not given.
    """
    given = asked(operands) - {"scale", "rng"}
    beyond = _beyond_operands(q, k, operands, given)
    beyond += sorted(given - {"segment_ids", "kv_segment_ids", "kv_lengths", "bias"})
    order = _order(mask)
    if order is None:
        beyond.append(f"mask {mask}")
    elif order[1] is not None:
        beyond += [f"a window with {name}" for name in sorted(given & {"segment_ids", "kv_lengths", "bias"})]
        beyond += [f"a window with T {q.shape[1]} over S {k.shape[1]}"] if q.shape[1] > k.shape[1] else []
    beyond += [] if q.dtype in (jnp.bfloat16, jnp.float16) else [f"dtype {q.dtype}"]
    beyond += ["an empty axis"] if 0 in (*q.shape, *k.shape) else []
    sizes = {q.shape[3], v.shape[3]}
    return beyond + [f"head dim {size}" for size in sorted(sizes) if size % 8 or size > 128 or len(sizes) > 1]


def cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    bias: Float[Array, "1 N T S"] | None = None,
    scale: float | None = None,
) -> Array:
    """Attention by cuDNN's flash kernels; arguments and results as `attend`.

    mask: Full, Causal, Window(left, 0), or another band with the same bounds, as Causal() & Window(left).
    segment_ids: those of self-attention, at the price of a bias of B T T elements.
    kv_lengths: at the price of a copy of q, k and v.
    bias: finite, added to the scaled scores, in q's dtype.

    Raises InputError on what `beyond_cudnn` lists. Cost: O(B N T S H) time, less what Causal and Window leave out;
    O(B N (T + S) H) memory. Source: cuDNN's scaled dot product attention, by way of jax.nn.dot_product_attention.
    """
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    operands = {"segment_ids": segment_ids, "kv_segment_ids": kv_segment_ids, "kv_lengths": kv_lengths, "bias": bias}
    beyond = beyond_cudnn(q, k, v, mask, operands)
    if beyond:
        raise InputError(f"impl 'cudnn' does not honour {', '.join(beyond)}: leave it out, or pass impl='xla'")
    causal, left = _order(mask) or (False, None)
    lengths = None
    if kv_lengths is not None:
        # In an example without keys, cuDNN reads the first key. Its score and value must be 0, so that o and the gradients
        # are 0, and therefore its queries as well, because 0 * NaN is NaN.
        inside = jnp.arange(k.shape[1])[None, :] < kv_lengths[:, None]
        k, v = (jnp.where(inside[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (k, v))
        q = jnp.where((kv_lengths > 0)[:, None, None, None], q, jnp.zeros((), q.dtype))
        lengths = jnp.clip(kv_lengths.astype(jnp.int32), 1, k.shape[1])
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        None if segment_ids is None else (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None],
        scale=scale,
        is_causal=causal,
        key_value_seq_lengths=lengths,
        # Without is_causal it would bound the window to the left only.
        local_window_size=None if left is None else (left, 0),
        implementation="cudnn",
    )


def _beyond_operands(q: Array, k: Array, operands: Mapping[str, Any], given: set[str]) -> list[str]:
    """Of segments, lengths and bias: what is not as it must be, and what cannot stand beside another."""
    t, n, s = q.shape[1], q.shape[2], k.shape[1]
    # jax takes every call for one with a bias where it looks at the gradient, and a bias must have even lengths.
    beyond = [f"odd lengths: T {t}, S {s}"] if t % 2 or s % 2 else []
    segments, kv_segments = operands.get("segment_ids"), operands.get("kv_segment_ids")
    if kv_segments is not None and kv_segments is not segments:
        beyond.append("kv_segment_ids")  # as a query might see nothing; where it sees itself, a finite bias is exact
    if "segment_ids" in given and q.dtype == jnp.float16:
        beyond.append("segment_ids in float16")  # a bias of -32768 is not far enough below all scores
    if "bias" in given:
        bias = operands["bias"]
        shape, dtype = getattr(bias, "shape", None), getattr(bias, "dtype", None)
        beyond += [] if shape == (1, n, t, s) and dtype == q.dtype else [f"bias other than {q.dtype}[1, N, T, S]"]
    several = sorted(given & {"segment_ids", "kv_lengths", "bias"})
    return beyond + ([" with ".join(several)] if len(several) > 1 else [])


def _order(mask: Mask | PerHead) -> tuple[bool, int | None] | None:
    """(causal, how many keys to the left) of what cuDNN can mask by itself; None for other masks."""
    band = mask.band()
    if band == (None, None):
        return False, None
    if band is None or band[1] != 0 or (band[0] is not None and band[0] < 0):
        return None
    return True, band[0]
