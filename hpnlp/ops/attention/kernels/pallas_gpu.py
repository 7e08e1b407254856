"""Block-sparse attention on NVIDIA GPUs from Hopper on, in Pallas Mosaic GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from hpnlp.ops.arrays import accepts_numpy
from hpnlp.ops.attention.kernels import hopper, hopper_backward
from hpnlp.ops.attention.kernels.hopper import LOG2E, TILE, Spec
from hpnlp.ops.attention.masks.base import Full, Mask, PerHead
from hpnlp.types import InputError

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
# Hidden by no id that tokens have: what padding and keys beyond a row's length are put into.
NOWHERE = np.iinfo(np.int32).min

# What a kernel can compute of a mask, element by element in registers.
_ELEMENTWISE = frozenset(
    {
        *("add", "sub", "mul", "div", "rem", "neg", "sign", "abs", "max", "min", "clamp", "integer_pow", "square"),
        *("and", "or", "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic"),
        *("eq", "ne", "lt", "le", "gt", "ge", "select_n", "convert_element_type", "broadcast_in_dim"),
    }
)


def beyond_pallas(
    q: Array,
    k: Array,
    v: Array,
    mask: Any = Full(),  # noqa: B008  (frozen)
    *,
    interpret: bool = False,
    **operands: Any,
) -> list[str]:
    """What this kernel cannot honour of a call of `attend`, in words; empty where it can.

    operands: what else `attend` was given; those that are None, False or 0 do not count.
    """
    beyond = [] if interpret else _beyond_device()
    beyond += [] if str(q.dtype) in DTYPES else [f"dtype {q.dtype}"]
    beyond += [f"head dim {size}" for size in sorted({q.shape[3], v.shape[3]}) if size > max(HEAD_DIMS)]
    beyond += [] if q.shape[0] and q.shape[1] and k.shape[1] else [f"q {q.shape} and k {k.shape} without elements"]
    beyond += _beyond_mask(mask)
    if mask.heads not in (None, q.shape[2]):
        beyond += [f"{mask.heads} masks for {q.shape[2]} heads"]
    known = {"segment_ids", "kv_segment_ids", "kv_lengths", "scale", "soft_cap", "return_lse"}
    return beyond + sorted(
        name
        for name, value in operands.items()
        if name not in known and not (value is None or value is False or _zero(value))
    )


def _zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def _beyond_device() -> list[str]:
    device = jax.devices()[0]
    if device.platform != "gpu":
        return [f"platform {device.platform}"]
    capability = getattr(device, "compute_capability", "")
    # wgmma, which the products are made of, is Hopper's own: neither older nor newer chips have it.
    return [] if capability.startswith("9.") else [f"compute capability {capability or 'unknown'}"]


@functools.lru_cache(maxsize=256)
def _beyond_mask(mask: Any) -> list[str]:
    place = jax.ShapeDtypeStruct((64, 64), jnp.int32)
    for each in mask.by_head(mask.heads or 1):
        try:
            traced = jax.make_jaxpr(each.at)(place, place)
        except Exception:  # a function of the user's own may raise anything  # noqa: BLE001
            return [f"mask {each}"]
        if not _elementwise(traced):
            return [f"mask {each}"]
    return []


def _elementwise(traced: Any) -> bool:
    """Whether a jaxpr has nothing but operations on elements, and no arrays of its own."""
    if any(np.ndim(constant) for constant in traced.consts):
        return False
    for equation in traced.jaxpr.eqns:
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        if not (_elementwise(inner) if inner is not None else equation.primitive.name in _ELEMENTWISE):
            return False
    return True


def pallas(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    interpret: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention over the blocks that a static mask leaves, in fused kernels; arguments and results as `attend`.

    q, k, v: bfloat16 or float16, H and Hv up to 128; sizes between 64 and 128 cost as much as 128, below 64 as much as 64,
    lengths as much as the next multiple of 128.
    mask: made of operations on elements (no searches, no arrays). With PerHead each distinct mask is a call of its own, for
    which keys and values are copied to its heads.
    soft_cap: scores s become soft_cap * tanh(s / soft_cap).
    interpret: runs the kernels in Pallas' interpreter on the CPU, for tests: seconds for a row of 128.

    CUDA 12.8.0 to 12.9.0: ptxas is known to miscompile causal masks; `experiments/bench/gpu_attention.py` tells.

    Raises InputError on what `beyond_pallas` names. The gradients of o and of the lse are exact; a second derivative is
    not defined.
    Cost: O(B N H 128^2) for each pair of blocks that the mask lets meet, twice that and a half again in the backward pass;
    O(B N (T + S) H) memory, and the list of such pairs on the host and on the device.
    Source: Dao et al. 2022, "FlashAttention", algorithms 1 and 4; Shah et al. 2024, "FlashAttention-3", algorithm 1.
    """
    beyond = beyond_pallas(q, k, v, mask, interpret=interpret)
    if beyond:
        raise InputError(f"impl 'pallas' does not honour {', '.join(beyond)}: change it, or pass impl='xla'")
    if soft_cap is not None and soft_cap <= 0:
        raise InputError(f"soft_cap {soft_cap}: expected a positive number, or None for none")
    groups = mask.by_head(q.shape[2])
    if len(groups) > 1:
        options = {"segment_ids": segment_ids, "kv_segment_ids": kv_segment_ids, "kv_lengths": kv_lengths}
        options |= {"scale": scale, "soft_cap": soft_cap, "interpret": interpret}
        o, lse = _per_head(q, k, v, groups, options)
        return (o, lse) if return_lse else o
    (mask,) = groups
    (batch, length, _, dim), keys, value_dim = q.shape, k.shape[1], v.shape[3]
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    segments, seen = _segments(batch, length, keys, segment_ids, kv_segment_ids, kv_lengths)
    if seen is not None:  # 0 * NaN would be NaN
        k, v = (jnp.where(seen[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (k, v))
    width = min(size for size in HEAD_DIMS if size >= max(dim, value_dim))
    q, k, v = (_padded(x, 1, -x.shape[1] % TILE) for x in (q, k, v))
    q, k, v = (_padded(x, 3, width - x.shape[3]) for x in (q, k, v))
    spec = Spec(mask, dim**-0.5 if scale is None else scale, soft_cap, length, keys, bool(segments), interpret)
    both: Any = _attend(spec, q, k, v, segments)
    o, lse = both
    o = o[:, :length, :, :value_dim]
    return (o, lse[:, :, :length].transpose(0, 2, 1)) if return_lse else o


def _per_head(
    q: Array, k: Array, v: Array, groups: dict[Mask, tuple[int, ...]], options: dict[str, Any]
) -> tuple[Array, Array]:
    """(o, lse) by one call for each distinct mask, over the heads that have it."""
    group = q.shape[2] // k.shape[2]
    order, parts = [], []
    for own, members in groups.items():
        heads = np.array(members)
        kv_heads = heads // group
        parts.append(pallas(q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads], own, return_lse=True, **options))
        order.extend(heads)
    back = np.argsort(order)
    o, lse = (jnp.concatenate(part, axis=2)[:, :, back] for part in zip(*parts, strict=True))
    return o, lse


def _segments(
    batch: int, length: int, keys: int, ids: Array | None, kv_ids: Array | None, lengths: Array | None
) -> tuple[tuple[Array, ...], Array | None]:
    """Padded ids of queries and keys with the lengths in them (none where there are neither), and which keys are seen."""
    if ids is None and lengths is None:
        return (), None
    seen = None
    same = ids is kv_ids
    ids = jnp.zeros((batch, length), jnp.int32) if ids is None else ids.astype(jnp.int32)
    kv_ids = jnp.zeros((batch, keys), jnp.int32) if kv_ids is None else kv_ids.astype(jnp.int32)
    if lengths is not None:
        seen = jnp.arange(keys)[None] < lengths[:, None]
        kv_ids = jnp.where(seen, kv_ids, NOWHERE)
    if not same:
        order = jnp.sort(ids, axis=1)
        place = jax.vmap(jnp.searchsorted)(order, kv_ids)
        seen = jnp.take_along_axis(order, jnp.minimum(place, length - 1), axis=1) == kv_ids
    pads = (-length % TILE, -keys % TILE)
    return tuple(_padded(x, 1, pad) for x, pad in zip((ids, kv_ids), pads, strict=True)), seen


def _padded(x: Array, axis: int, extra: int) -> Array:
    return jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)]) if extra else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: Spec, q: Array, k: Array, v: Array, segments: tuple[Array, ...]) -> tuple[Array, Array]:
    return hopper.forward(spec, q, k, v, segments)


@accepts_numpy
def _attend_forward(spec: Spec, q: Array, k: Array, v: Array, segments: tuple[Array, ...]) -> Any:
    o, lse = (checkpoint_name(x, "mixed") for x in hopper.forward(spec, q, k, v, segments))
    return (o, lse), (q, k, v, o, lse, segments)


def _attend_backward(spec: Spec, kept: Any, given: tuple[Array, Array]) -> Any:
    (q, k, v, o, lse, segments), (do, dlse) = kept, given
    # A row that saw nothing gets probabilities of 0, and its query and the cotangent of its lse are 0: 0 * NaN would be NaN.
    nothing = jnp.isneginf(lse)
    delta = jnp.einsum("btnh,btnh->bnt", do, o, preferred_element_type=jnp.float32) - jnp.where(nothing, 0.0, dlse)
    q = jnp.where(nothing.transpose(0, 2, 1)[..., None], jnp.zeros((), q.dtype), q)
    lse = jnp.where(nothing, jnp.inf, lse * LOG2E)
    arrays = (q, k, v, do, lse, delta)
    dq = hopper_backward.queries(spec, arrays, segments)
    return dq, *hopper_backward.keys(spec, arrays, segments), None


_attend.defvjp(_attend_forward, _attend_backward)
