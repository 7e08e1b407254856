"""Block-sparse attention on NVIDIA GPUs from Hopper on, in Pallas Mosaic GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, Float, PyTree

from hpnlp.ops.attention.kernels import hopper, hopper_backward
from hpnlp.ops.attention.kernels.hopper import LOG2E, TILE, KernelOptions
from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.attention.operands import Operands, scale_queries
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.device import hopper_limits

SUPPORTS = frozenset({"segment_ids", "kv_segment_ids", "kv_lengths", "scale", "soft_cap", "return_lse"})
DTYPES = ("bfloat16", "float16")
HEAD_SIZES = (64, 128)
# Segment of padding and of keys beyond a row's length; no token has this id.
NO_SEGMENT = np.iinfo(np.int32).min

# Primitives of a mask that a kernel can compute element by element in registers.
_ELEMENTWISE = frozenset(
    {
        *("add", "sub", "mul", "div", "rem", "neg", "sign", "abs", "max", "min", "clamp", "integer_pow", "square"),
        *("and", "or", "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic"),
        *("eq", "ne", "lt", "le", "gt", "ge", "select_n", "convert_element_type", "broadcast_in_dim"),
    }
)


def limits(
    q: Array, k: Array, v: Array, mask: Mask | PerHead, operands: Operands, *, interpret: bool = False
) -> list[str]:
    """Properties of a call that the kernels cannot compute, beside operands that `SUPPORTS` lacks.

    Args:
      q: [B, T, N, H].
      k: [B, S, K, H].
      v: [B, S, K, Hv].
      mask: Mask of the attention.
      operands: Operands of `attend`.
      interpret: Leave the device out, for the interpreter.

    Returns:
      Short descriptions, empty where there are none.
    """
    del operands
    reasons = [] if interpret else hopper_limits()
    reasons += [] if str(q.dtype) in DTYPES else [f"dtype {q.dtype}"]
    reasons += [f"head size {size}" for size in sorted({q.shape[3], v.shape[3]}) if size > max(HEAD_SIZES)]
    reasons += [] if q.shape[0] and q.shape[1] and k.shape[1] else [f"q {q.shape} and k {k.shape} without elements"]
    reasons += _mask_limits(mask)
    if mask.heads not in (None, q.shape[2]):
        reasons += [f"{mask.heads} masks for {q.shape[2]} heads"]
    return reasons


@functools.lru_cache(maxsize=256)
def _mask_limits(mask: Mask | PerHead) -> list[str]:
    """The first mask of some heads that has other operations than those on elements."""
    positions = jax.ShapeDtypeStruct((64, 64), jnp.int32)
    for head_mask in mask.by_head(mask.heads or 1):
        try:
            traced = jax.make_jaxpr(head_mask.at)(positions, positions)
        except Exception:  # a user's function may raise anything  # noqa: BLE001
            return [f"mask {head_mask}"]
        if not _is_elementwise(traced):
            return [f"mask {head_mask}"]
    return []


def _is_elementwise(traced: ClosedJaxpr) -> bool:
    """Whether a jaxpr has only operations on elements, and closes over no arrays."""
    if any(np.ndim(constant) for constant in traced.consts):
        return False
    for equation in traced.jaxpr.eqns:
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        if not (_is_elementwise(inner) if inner is not None else equation.primitive.name in _ELEMENTWISE):
            return False
    return True


def pallas(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    operands: Operands = Operands(),  # noqa: B008  (frozen)
    *,
    interpret: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention over the tiles of a static mask in fused kernels, for calls without `limits`.

    The gradients of o and of the lse are exact; second derivatives are not defined. ptxas of CUDA 12.8.0 to 12.9.0 is known
    to miscompile causal masks; `experiments/bench/gpu.py` detects it.

    Args:
      q: Queries [B, T, N, H], bfloat16 or float16. H and Hv up to 128: sizes between 64 and 128 cost as much as 128, below
        64 as much as 64; T and S cost as much as the next multiple of 128.
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv].
      mask: Mask made of operations on elements (no searches, no arrays). With PerHead each distinct mask is a call of its
        own, for which keys and values are copied to its heads.
      operands: Operands of `attend`.
      interpret: Run in Pallas' interpreter on the CPU, for tests: seconds for 128 tokens.

    Returns:
      o [B, T, N, Hv] in q's dtype; with return_lse the pair (o, lse), lse float32 [B, T, N].

    Cost:
      O(B N H 128^2) for each active tile, and 2.5 times as much in the backward pass; O(B N (T + S) H) memory, and the list
      of active tiles on the host and on the device.

    References:
      Dao et al. 2022, "FlashAttention", algorithms 1 and 4. Shah et al. 2024, "FlashAttention-3", algorithm 1.
    """
    q, operands = scale_queries(q, operands)
    groups = mask.by_head(q.shape[2])
    if len(groups) > 1:
        o, lse = _mask_by_head(q, k, v, groups, operands, interpret)
        return (o, lse) if operands.return_lse else o
    (head_mask,) = groups
    (_, length, _, size), key_length, value_size = q.shape, k.shape[1], v.shape[3]
    segments, seen = _segments(operands, q.shape[0], length, key_length)
    if seen is not None:  # 0 * NaN would be NaN
        k, v = (jnp.where(seen[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (k, v))
    width = min(x for x in HEAD_SIZES if x >= max(size, value_size))
    q, k, v = (_padded(x, 1, -x.shape[1] % TILE) for x in (q, k, v))
    q, k, v = (_padded(x, 3, width - x.shape[3]) for x in (q, k, v))
    scale = size**-0.5 if operands.scale is None else operands.scale
    options = KernelOptions(head_mask, scale, operands.soft_cap, length, key_length, bool(segments), interpret)
    result: Any = _attend(options, q, k, v, segments)
    o, lse = result
    o = o[:, :length, :, :value_size]
    return (o, lse[:, :, :length].transpose(0, 2, 1)) if operands.return_lse else o


def _mask_by_head(
    q: Array, k: Array, v: Array, groups: dict[Mask, tuple[int, ...]], operands: Operands, interpret: bool
) -> tuple[Array, Array]:
    """(o, lse) by one call for each distinct mask, over the heads that have it."""
    heads_per_key = q.shape[2] // k.shape[2]
    with_lse = dataclasses.replace(operands, return_lse=True)
    order, results = [], []
    for mask, members in groups.items():
        heads = np.array(members)
        key_heads = heads // heads_per_key
        inputs = q[:, :, heads], k[:, :, key_heads], v[:, :, key_heads]
        results.append(pallas(*inputs, mask, with_lse, interpret=interpret))
        order.extend(heads)
    inverse = np.argsort(order)
    o, lse = (jnp.concatenate(arrays, axis=2)[:, :, inverse] for arrays in zip(*results, strict=True))
    return o, lse


def _segments(operands: Operands, batch: int, length: int, key_length: int) -> tuple[tuple[Array, ...], Array | None]:
    """`((segment ids of queries, of keys), keys that a query sees)`: ids padded to whole tiles, and bool [B, S].

    Keys from `kv_lengths` on have the id NO_SEGMENT. The ids are () without segments and lengths. The keys are None where every
    key is seen by a query.
    """
    ids, kv_ids, lengths = operands.segment_ids, operands.kv_segment_ids, operands.kv_lengths
    if ids is None and lengths is None:
        return (), None
    seen = None
    self_attention = ids is kv_ids
    ids = jnp.zeros((batch, length), jnp.int32) if ids is None else ids.astype(jnp.int32)
    kv_ids = jnp.zeros((batch, key_length), jnp.int32) if kv_ids is None else kv_ids.astype(jnp.int32)
    if lengths is not None:
        seen = jnp.arange(key_length)[None] < lengths[:, None]
        kv_ids = jnp.where(seen, kv_ids, NO_SEGMENT)
    if not self_attention:
        ascending = jnp.sort(ids, axis=1)
        index = jax.vmap(jnp.searchsorted)(ascending, kv_ids)
        seen = jnp.take_along_axis(ascending, jnp.minimum(index, length - 1), axis=1) == kv_ids
    pads = (-length % TILE, -key_length % TILE)
    return tuple(_padded(x, 1, pad) for x, pad in zip((ids, kv_ids), pads, strict=True)), seen


def _padded(x: Array, axis: int, extra: int) -> Array:
    """Appends zeros to an axis."""
    return jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)]) if extra else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: KernelOptions, q: Array, k: Array, v: Array, segments: tuple[Array, ...]) -> tuple[Array, Array]:
    """(o [B, T, N, H], lse [B, N, T]) of padded arrays."""
    return hopper.forward(options, q, k, v, segments)


@accepts_numpy
def _attend_forward(options: KernelOptions, q: Array, k: Array, v: Array, segments: tuple[Array, ...]) -> Any:
    o, lse = (checkpoint_name(x, "mixed") for x in hopper.forward(options, q, k, v, segments))
    return (o, lse), (q, k, v, o, lse, segments)


def _attend_backward(options: KernelOptions, saved: PyTree, cotangents: tuple[Array, Array]) -> Any:
    (q, k, v, o, lse, segments), (do, dlse) = saved, cotangents
    # A row that sees nothing gets probabilities of 0. Its query and the cotangent of its lse are zeroed, as 0 * NaN is NaN.
    sees_nothing = jnp.isneginf(lse)
    delta = jnp.einsum("btnh,btnh->bnt", do, o, preferred_element_type=jnp.float32) - jnp.where(sees_nothing, 0.0, dlse)
    q = jnp.where(sees_nothing.transpose(0, 2, 1)[..., None], jnp.zeros((), q.dtype), q)
    lse = jnp.where(sees_nothing, jnp.inf, lse * LOG2E)
    arrays = (q, k, v, do, lse, delta)
    dq = hopper_backward.queries(options, arrays, segments)
    return dq, *hopper_backward.keys(options, arrays, segments), None


_attend.defvjp(_attend_forward, _attend_backward)
