"""Attention on TPU: the splash kernels that come with jax, asked in our layout for our masks.

Blocks that the mask rules out are not visited, whatever the mask; what the kernels leave open is settled here:
- A row that sees nothing would get the mean of the values it visits. Every row has a sink at FLOOR, which weighs nothing
  beside any score, and takes all of a row that has none: o = 0, and every gradient 0.
- 0 * NaN is NaN, so keys that the mask, segments or lengths hide from every query are zeroed first.
- Lengths are padded to whole blocks, and head dims to what the matrix unit is fed by.
- The kernels' log-sum-exp has no gradient: `_with_lse` gives it one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.ops.arrays import accepts_numpy
from hpnlp.ops.attention.dispatch import asked
from hpnlp.ops.attention.masks.base import Full, Mask, PerHead
from hpnlp.types import InputError

# Lengths that blocks may have, the best first, and the lanes of which they are multiples.
BLOCKS = (512, 256, 128)
LANES = 128
# Head dims are padded to a multiple of this.
HEAD_DIM = 64
# Far below any score and far above the kernel's stand-in for -inf, -2e38.
FLOOR = -1e30
# The segment of keys that are hidden from every query.
NOBODY = np.iinfo(np.int32).min


def beyond_splash(q: Array, k: Array, v: Array, mask: Mask | PerHead, operands: Mapping[str, Any]) -> list[str]:
    """What of a call splash cannot honour: nothing where the list is empty.

    operands: all other arguments of the call by name; None, 0 and False stand for those that are not given.
    """
    given = asked(operands)
    honoured = {"segment_ids", "kv_segment_ids", "kv_lengths", "scale", "soft_cap", "return_lse", "interpret"}
    beyond = sorted(given - honoured - {"rng"})
    beyond += ["return_lse with soft_cap"] if {"return_lse", "soft_cap"} <= given else []
    beyond += [] if q.dtype in (jnp.bfloat16, jnp.float32) else [f"dtype {q.dtype}"]
    if mask.heads not in (None, q.shape[2]):
        beyond.append(f"a mask for {mask.heads} heads with {q.shape[2]}")
    # XLA cannot partition the kernels, and they do not say over which axes their results vary.
    mesh, manual = jax.sharding.get_abstract_mesh(), jax.sharding.AxisType.Manual
    free = [size for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if kind != manual]
    beyond += ["a mesh outside of shard_map"] if math.prod(free) > 1 or (free and manual in mesh.axis_types) else []
    varying = any(jax.typeof(x).manual_axis_type.varying for x in (q, k, v))
    return beyond + (["shard_map with check_vma"] if varying else [])


def splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    block_size: int | None = None,
    interpret: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention by jax's splash kernels for TPU; arguments and results as `attend`.

    mask: planned on the host once, in O(T S / block_size^2) steps and the elements of the blocks that it allows in part;
      of all but Causal, Window, Blockwise and conjunctions of two, these blocks are kept on the device, equal ones once.
    segment_ids, kv_segment_ids: above -2**31.
    scale: rounded into q, in q's dtype.
    soft_cap: scores become soft_cap * tanh(score / soft_cap) before the mask.
    return_lse: its gradient costs two forward passes and half a backward pass more.
    block_size: rows and keys of a block, a multiple of 128; None picks one.
    interpret: run on the CPU, slowly.

    Raises InputError on a block_size that does not fit, and on what `beyond_splash` lists. Second derivatives are not
    there. Cost: O(B N H) time for each pair in the blocks that the mask leaves; O(B N (T + S) H) memory.
    Source: jax.experimental.pallas.ops.tpu.splash_attention; Dao et al. 2022, "FlashAttention", algorithms 1 and 2.
    """
    beyond = beyond_splash(q, k, v, mask, {"return_lse": return_lse, "soft_cap": soft_cap})
    if beyond:
        raise InputError(f"impl 'splash' does not honour {', '.join(beyond)}: leave it out, or pass impl='xla'")
    if block_size is not None and (block_size < 1 or block_size % LANES):
        raise InputError(f"block_size {block_size}: expected a positive multiple of {LANES}")
    (b, t, n, h), (s, hv) = q.shape, (k.shape[1], v.shape[3])
    nothing = jnp.zeros((b, t, n, hv), q.dtype), jnp.full((b, t, n), -jnp.inf)
    if 0 in (*q.shape, *k.shape, *v.shape):
        return nothing if return_lse else nothing[0]

    # With the kernels, which take a third of a second to import.
    from hpnlp.ops.attention.kernels.splash_masks import seen_keys, translated

    block = (_block(t, block_size), _block(s, block_size))
    masks = translated(mask, n, t, s, block)
    size = masks.shape[1:]
    by_mask = seen_keys(masks)
    if not by_mask.any():  # of which the kernels cannot plan a grid
        return nothing if return_lse else nothing[0]
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    segments, seen = _segments(segment_ids, kv_segment_ids, kv_lengths, (b, t, s))
    seen = by_mask[None] if seen is None else seen & by_mask[None]
    if not (isinstance(seen, np.ndarray) and seen.all()):
        k, v = (jnp.where(seen[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (k, v))
    q = (q.astype(jnp.float32) * (h**-0.5 if scale is None else scale)).astype(q.dtype)
    q, k, v = _heads_first(q, size[0]), _heads_first(k, size[1]), _heads_first(v, size[1])
    if segments is not None:
        segments = tuple(jnp.pad(x, ((0, 0), (0, to - x.shape[1]))) for x, to in zip(segments, size, strict=True))
    arrays = (q, k, v, segments, jnp.full((n,), FLOOR, q.dtype))
    plain = _kernel(masks, block, soft_cap, interpret, residuals=False)
    if not return_lse:
        return _each(plain, *arrays)[:, :, :t, :hv].swapaxes(1, 2)
    o, lse = _with_lse(plain, _kernel(masks, block, soft_cap, interpret, residuals=True), *arrays)
    return o[:, :, :t, :hv].swapaxes(1, 2), lse[:, :, :t].swapaxes(1, 2)


def _kernel(masks: Any, block: tuple[int, int], soft_cap: float | None, interpret: bool, *, residuals: bool) -> Any:
    """(q [N, T, H], k, v [K, S, H], segments, sinks [N]) -> o, or (o, (lse,)) with residuals and without a gradient."""
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


def _each(kernel: Any, q: Array, k: Array, v: Array, segments: Any, sinks: Array) -> Any:
    """The kernel over the batch."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    ids = None if segments is None else kernels.SegmentIds(*segments)
    return jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(q, k, v, ids, sinks)


@jax.custom_vjp
def _with_lse(
    plain: Any, residual: Any, q: Array, k: Array, v: Array, segments: Any, sinks: Array
) -> tuple[Array, Array]:
    o, (lse,) = _each(residual, q, k, v, segments, sinks)
    return o, jnp.where(lse <= FLOOR / 2, -jnp.inf, lse)


@accepts_numpy
def _with_lse_forward(plain: Any, residual: Any, *arrays: Any) -> tuple[tuple[Array, Array], Any]:
    o, lse = _with_lse(plain, residual, *arrays)
    return (o, lse), (plain, arrays, lse)


def _with_lse_backward(saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    """The cotangent of lse adds p * dlse to that of the scores.

    So q gains dlse * (p k), the output of an attention whose values are the keys, and k gains p^T (dlse * q), the
    gradient of these values where dlse * q is the output's cotangent.
    """
    plain, (q, k, v, segments, sinks), lse = saved
    do, dlse = cotangents
    blind = jnp.isneginf(lse)[..., None]
    # Rows without visible keys. Their dlse and q may be NaN, and 0 * NaN is NaN, so both are zeroed.
    q, dlse = jnp.where(blind, jnp.zeros((), q.dtype), q), jnp.where(blind, 0.0, dlse[..., None])
    dq, dk, dv = jax.vjp(lambda q, k, v: _each(plain, q, k, v, segments, sinks), q, k, v)[1](do)
    keys, pull = jax.vjp(lambda values: _each(plain, q, k, values, segments, sinks), k)
    (more,) = pull((q.astype(jnp.float32) * dlse).astype(q.dtype))
    add = lambda x, y: (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)  # noqa: E731
    return None, None, add(dq, keys.astype(jnp.float32) * dlse), add(dk, more), dv, None, None


_with_lse.defvjp(_with_lse_forward, _with_lse_backward)


def _block(length: int, block_size: int | None) -> int:
    """The largest block that pads a length by an eighth at most."""
    if block_size is not None:
        return block_size
    return next((block for block in BLOCKS if -length % block <= length / 8), BLOCKS[-1])


def _segments(segment_ids: Any, kv_segment_ids: Any, kv_lengths: Any, shape: tuple[int, int, int]) -> tuple[Any, Any]:
    """((ids of queries, ids of keys), bool [B, S]: a query has the key's id); None for what needs none."""
    b, t, s = shape
    if kv_segment_ids is None and kv_lengths is None:
        return None, None
    own = kv_segment_ids is None or kv_segment_ids is segment_ids
    ids = jnp.zeros((b, t), jnp.int32) if segment_ids is None else segment_ids.astype(jnp.int32)
    kv_ids = jnp.zeros((b, s), jnp.int32) if kv_segment_ids is None else kv_segment_ids.astype(jnp.int32)
    if kv_lengths is not None:
        kv_ids = jnp.where(jnp.arange(s)[None, :] < kv_lengths[:, None], kv_ids, NOBODY)
    if own:
        return (ids, kv_ids), None if kv_lengths is None else kv_ids != NOBODY
    return (ids, kv_ids), jax.vmap(jnp.isin)(kv_ids, ids)


def _heads_first(x: Float[Array, "B T N H"], length: int) -> Float[Array, "B N L P"]:
    """Padded with zeros to `length` and to a multiple of HEAD_DIM."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, -x.shape[3] % HEAD_DIM))).swapaxes(1, 2)
