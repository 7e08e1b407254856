"""Attention on TPUs: the splash kernels of JAX, in the array layout of `attend` and for its masks.

The kernels skip blocks that the mask rules out. This module settles the cases that the kernels leave open:
- A row that sees nothing would get the mean of the values of its blocks. Every row has a sink at FLOOR, which has no weight
  beside any score and takes all weight of a row without scores: o = 0, and every gradient is 0.
- 0 * NaN is NaN, so keys that the mask, segments or lengths hide from every query are zeroed first.
- Lengths are padded to whole blocks, and head sizes to multiples that the matrix unit takes.
- The log-sum-exp of the kernels has no gradient: `_with_lse` adds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.attention.operands import Operands, scale_queries
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.types import InputError

SUPPORTS = frozenset({"segment_ids", "kv_segment_ids", "kv_lengths", "scale", "soft_cap", "return_lse"})
# Lengths of a block, in order of preference, and the lanes of which they are multiples.
BLOCKS = (512, 256, 128)
LANES = 128
# Head sizes are padded to a multiple of this.
HEAD_SIZE = 64
# Far below any score and far above the kernel's stand-in for -inf, -2e38.
FLOOR = -1e30
# The segment of keys that are hidden from every query.
NO_SEGMENT = np.iinfo(np.int32).min


def limits(q: Array, k: Array, v: Array, mask: Mask | PerHead, operands: Operands) -> list[str]:
    """Properties of a call that splash cannot compute, beside operands that `SUPPORTS` lacks.

    Args:
      q: [B, T, N, H].
      k: [B, S, K, H].
      v: [B, S, K, Hv].
      mask: Mask of the attention.
      operands: Operands of `attend`.

    Returns:
      Short descriptions, empty where there are none.
    """
    reasons = ["return_lse with soft_cap"] if {"return_lse", "soft_cap"} <= operands.features() else []
    reasons += [] if q.dtype in (jnp.bfloat16, jnp.float32) else [f"dtype {q.dtype}"]
    if mask.heads not in (None, q.shape[2]):
        reasons.append(f"a mask for {mask.heads} heads with {q.shape[2]}")
    # XLA cannot partition the kernels, and their results do not declare over which mesh axes they vary.
    mesh, manual = jax.sharding.get_abstract_mesh(), jax.sharding.AxisType.Manual
    free = [size for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if kind != manual]
    reasons += ["a mesh outside of shard_map"] if math.prod(free) > 1 or (free and manual in mesh.axis_types) else []
    varying = any(jax.typeof(x).manual_axis_type.varying for x in (q, k, v))
    return reasons + (["shard_map with check_vma"] if varying else [])


def splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    operands: Operands = Operands(),  # noqa: B008  (frozen)
    *,
    block_size: int | None = None,
    interpret: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention by JAX's splash kernels for TPUs, for calls without `limits`. Second derivatives are not defined.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv].
      mask: Scheduled on the host once, in O(T S / block_size^2) steps and the elements of partly allowed blocks. Except for
        Causal, Window, Blockwise and conjunctions of two, these blocks are kept on the device, equal ones once.
      operands: Operands of `attend`. Segment ids are over -2**31; the scale is rounded into q, in q's dtype; soft_cap
        applies before the mask. The gradient of the lse costs two forward passes and half a backward pass more.
      block_size: Queries and keys of a block, a multiple of 128; None chooses.
      interpret: Run on the CPU, slowly.

    Returns:
      o [B, T, N, Hv] in q's dtype; with return_lse the pair (o, lse), lse float32 [B, T, N].

    Raises:
      InputError: block_size is not a positive multiple of 128.

    Cost:
      O(B N H) time for each pair in the blocks that the mask leaves; O(B N (T + S) H) memory.

    References:
      jax.experimental.pallas.ops.tpu.splash_attention. Dao et al. 2022, "FlashAttention", algorithms 1 and 2.
    """
    if block_size is not None and (block_size < 1 or block_size % LANES):
        raise InputError(f"block_size {block_size}: expected a positive multiple of {LANES}")
    q, operands = scale_queries(q, operands)
    (b, t, n, h), (s, hv) = q.shape, (k.shape[1], v.shape[3])
    nothing = jnp.zeros((b, t, n, hv), q.dtype), jnp.full((b, t, n), -jnp.inf)
    if 0 in (*q.shape, *k.shape, *v.shape):
        return nothing if operands.return_lse else nothing[0]

    # Imported here together with the kernels, which takes a third of a second.
    from hpnlp.ops.attention.kernels.splash_masks import seen_keys, translate

    block = (_block(t, block_size), _block(s, block_size))
    masks = translate(mask, n, t, s, block)
    size = masks.shape[1:]
    seen_by_mask = seen_keys(masks)
    if not seen_by_mask.any():  # the kernels cannot make a grid without blocks
        return nothing if operands.return_lse else nothing[0]
    segments, seen = _segments(operands, (b, t, s))
    seen = seen_by_mask[None] if seen is None else seen & seen_by_mask[None]
    if not (isinstance(seen, np.ndarray) and seen.all()):
        k, v = (jnp.where(seen[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (k, v))
    q = (q.astype(jnp.float32) * (h**-0.5 if operands.scale is None else operands.scale)).astype(q.dtype)
    q, k, v = _heads_first(q, size[0]), _heads_first(k, size[1]), _heads_first(v, size[1])
    if segments is not None:
        segments = tuple(jnp.pad(x, ((0, 0), (0, to - x.shape[1]))) for x, to in zip(segments, size, strict=True))
    arrays = (q, k, v, segments, jnp.full((n,), FLOOR, q.dtype))
    plain = _kernel(masks, block, operands.soft_cap, interpret, residuals=False)
    if not operands.return_lse:
        return _over_batch(plain, *arrays)[:, :, :t, :hv].swapaxes(1, 2)
    with_residuals = _kernel(masks, block, operands.soft_cap, interpret, residuals=True)
    o, lse = _with_lse(plain, with_residuals, *arrays)
    return o[:, :, :t, :hv].swapaxes(1, 2), lse[:, :, :t].swapaxes(1, 2)


def _kernel(masks: Any, block: tuple[int, int], soft_cap: float | None, interpret: bool, *, residuals: bool) -> Any:
    """A function of (q [N, T, H], k, v [K, S, H], segments, sinks [N]): o; with residuals (o, (lse,)) without gradient."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    rows, columns = block
    sizes = kernels.BlockSizes(
        block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns, block_q_dq=rows, block_kv_dq=columns
    )
    return kernels.make_splash_mha(
        masks,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
        save_residuals=residuals,
        interpret=interpret,
    )


def _over_batch(
    kernel: Callable[..., Any], q: Array, k: Array, v: Array, segments: tuple[Array, ...] | None, sinks: Array
) -> Any:
    """The kernel mapped over the batch."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    ids = None if segments is None else kernels.SegmentIds(*segments)
    return jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(q, k, v, ids, sinks)


@jax.custom_vjp
def _with_lse(
    plain: Callable[..., Any],
    residual: Callable[..., Any],
    q: Array,
    k: Array,
    v: Array,
    segments: tuple[Array, ...] | None,
    sinks: Array,
) -> tuple[Array, Array]:
    """(o [B, N, T, Hv], lse [B, N, T]) with a gradient for both: plain computes o, residual o and lse."""
    o, (lse,) = _over_batch(residual, q, k, v, segments, sinks)
    return o, jnp.where(lse <= FLOOR / 2, -jnp.inf, lse)


@accepts_numpy
def _with_lse_forward(
    plain: Callable[..., Any], residual: Callable[..., Any], *arrays: PyTree
) -> tuple[tuple[Array, Array], Any]:
    o, lse = _with_lse(plain, residual, *arrays)
    return (o, lse), (plain, arrays, lse)


def _with_lse_backward(saved: PyTree, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    """Gradients of (o, lse) from those of o alone.

    The cotangent of lse adds p * dlse to the cotangent of the scores. So dq gains dlse * (p k), an attention output whose
    values are the keys, and dk gains p^T (dlse * q), the gradient of these values where dlse * q is the output's cotangent.
    """
    plain, (q, k, v, segments, sinks), lse = saved
    do, dlse = cotangents
    sees_nothing = jnp.isneginf(lse)[..., None]
    # Rows without visible keys. Their dlse and q may be NaN, and 0 * NaN is NaN, so both are zeroed.
    q = jnp.where(sees_nothing, jnp.zeros((), q.dtype), q)
    dlse = jnp.where(sees_nothing, 0.0, dlse[..., None])
    dq, dk, dv = jax.vjp(lambda q, k, v: _over_batch(plain, q, k, v, segments, sinks), q, k, v)[1](do)
    mean_keys, pull = jax.vjp(lambda values: _over_batch(plain, q, k, values, segments, sinks), k)
    (dk_lse,) = pull((q.astype(jnp.float32) * dlse).astype(q.dtype))
    return (
        None,
        None,
        _sum_in_float32(dq, mean_keys.astype(jnp.float32) * dlse),
        _sum_in_float32(dk, dk_lse),
        dv,
        None,
        None,
    )


def _sum_in_float32(x: Array, y: Array) -> Array:
    """The sum x + y, rounded once to the dtype of x."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)


_with_lse.defvjp(_with_lse_forward, _with_lse_backward)


def _block(length: int, block_size: int | None) -> int:
    """The largest block that pads a length by an eighth at most."""
    if block_size is not None:
        return block_size
    return next((block for block in BLOCKS if -length % block <= length / 8), BLOCKS[-1])


def _segments(operands: Operands, shape: tuple[int, int, int]) -> tuple[Any, Any]:
    """((ids of queries, ids of keys), bool [B, S]: some query has the key's id); None for what is not needed.

    Keys beyond the lengths have an id that no query has.
    """
    b, t, s = shape
    segment_ids, kv_segment_ids, lengths = operands.segment_ids, operands.kv_segment_ids, operands.kv_lengths
    if kv_segment_ids is None and lengths is None:
        return None, None
    ids = jnp.zeros((b, t), jnp.int32) if segment_ids is None else segment_ids.astype(jnp.int32)
    kv_ids = jnp.zeros((b, s), jnp.int32) if kv_segment_ids is None else kv_segment_ids.astype(jnp.int32)
    if lengths is not None:
        kv_ids = jnp.where(jnp.arange(s)[None, :] < lengths[:, None], kv_ids, NO_SEGMENT)
    if kv_segment_ids is segment_ids:
        return (ids, kv_ids), None if lengths is None else kv_ids != NO_SEGMENT
    return (ids, kv_ids), jax.vmap(jnp.isin)(kv_ids, ids)


def _heads_first(x: Float[Array, "B T N H"], length: int) -> Float[Array, "B N L P"]:
    """Heads before tokens, padded with zeros to `length` tokens and to a multiple of HEAD_SIZE."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, -x.shape[3] % HEAD_SIZE))).swapaxes(1, 2)
