"""Attention: `attend` computes it, `merge` puts partial results together, masks say who may see whom."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.algebra import Mask, PerHead
from hpnlp.ops.attention.flash import flash
from hpnlp.ops.attention.mask import (
    Blockwise,
    Causal,
    Dilated,
    Fixed,
    Full,
    Global,
    GlobalAt,
    Prefix,
    RandomBlocks,
    Sinks,
    Strided,
    Where,
    Window,
)
from hpnlp.ops.attention.patterns import (
    bigbird,
    longformer,
    sparse_transformer_fixed,
    sparse_transformer_strided,
)
from hpnlp.ops.attention.position import Scaling, rope
from hpnlp.ops.attention.reference import reference
from hpnlp.types import InputError

__all__ = [
    "Blockwise", "Causal", "Dilated", "Fixed", "Full", "Global", "GlobalAt", "Mask", "PerHead", "Prefix", "RandomBlocks",
    "Scaling", "Sinks", "Strided", "Where", "Window", "attend", "bigbird", "flash", "longformer", "merge", "reference",
    "rope", "sparse_transformer_fixed", "sparse_transformer_strided",
]  # fmt: skip

IMPLS = ("auto", "xla", "cudnn", "reference")


def attend(
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
    impl: str = "auto",
    block_size: int | None = None,
) -> Array | tuple[Array, Array]:
    """softmax(q k^T * scale) v over the pairs that the mask and the operands allow.

    q, k, v: K divides N, and query head n reads key head n // (N / K).
    mask: a static pattern, over positions where these are given, over indices from 0 elsewhere.
    segment_ids, kv_segment_ids: int32; a query sees the keys of its own segment. The kv_ twins of segment_ids and
      positions may be left out where T == S (self-attention).
    kv_lengths: keys at indices from kv_lengths[b] on are hidden.
    scale: H ** -0.5 where None.
    dropout_rate, rng: drops weights as a function of (rng, batch, head, positions), the same in every impl.
    return_lse: also return the log-sum-exp of each row's scores, float32 [B, T, N], for `merge`.
    impl: "xla" (blockwise, every device), "cudnn" (NVIDIA, dense or causal, 16 bits, self-attention in segments at the
      price of a bias of B T T elements), "reference" (dense, slow), or "auto": cudnn on a GPU where it can do what is
      asked, else xla.
    block_size: rows of a block of "xla"; None picks one.

    Returns o [B, T, N, Hv] in q's dtype (accumulated in float32), or (o, lse). A row that may see nothing gives o = 0,
    lse = -inf and zero gradients. Keys and values that no query may see are never read into a result, NaN or not.
    Raises InputError on shapes that do not fit and on what the chosen impl cannot honour.
    Cost: O(B N T S H) time less the blocks that the mask leaves out; O(B N (T + S) H) memory, also in the backward
    pass, except "reference"; see `flash` for short sequences, second derivatives, and dropout inside `shard_map`.
    Source: Vaswani et al. 2017, eq. 1; blockwise: Dao et al. 2022, "FlashAttention", algorithms 1 and 2.
    """
    _validate(q, k, v, segment_ids, kv_segment_ids, positions, kv_positions, kv_lengths, dropout_rate, rng, impl)
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    kv_positions = positions if kv_positions is None else kv_positions
    operands = {
        "segment_ids": segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "positions": positions,
        "kv_positions": kv_positions,
        "kv_lengths": kv_lengths,
    }
    beyond_cudnn = _beyond_cudnn(q, k, v, mask, operands)
    beyond_cudnn += ["dropout_rate"] * (dropout_rate > 0) + ["return_lse"] * return_lse
    if impl == "auto":
        impl = "cudnn" if jax.default_backend() == "gpu" and not beyond_cudnn and block_size is None else "xla"
    if block_size is not None and (impl != "xla" or block_size < 1):
        raise InputError(f"block_size {block_size} with impl {impl!r}: expected a positive one, with impl='xla' only")
    if impl == "cudnn":
        if beyond_cudnn:
            raise InputError(
                f"impl 'cudnn' does not honour {', '.join(beyond_cudnn)}: leave it out, or pass impl='xla'"
            )
        return _cudnn(q, k, v, mask, segment_ids, scale)
    options = {"scale": scale, "dropout_rate": dropout_rate, "rng": rng, "return_lse": return_lse}
    if impl == "reference":
        return reference(q, k, v, mask, **operands, **options)
    return flash(q, k, v, mask, **operands, **options, block_size=block_size)


def merge(*parts: tuple[Float[Array, "... Hv"], Float[Array, "..."]]) -> tuple[Array, Array]:
    """The attention over the union of disjoint key sets, from the (o, lse) of each; exact and differentiable.

    parts: o [..., Hv] and float32 lse [...], as `attend(..., return_lse=True)` gives them. Returns (o, lse), o in the
    first part's dtype. Where every part saw nothing (lse = -inf), o = 0 and lse = -inf, with zero gradients.
    Raises InputError without a part. Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax",
    eq. 4.
    """
    if not parts:
        raise InputError("merge of no parts: pass at least one (o, lse)")
    lses = jnp.stack([lse for _, lse in parts])
    top = jax.lax.stop_gradient(lses.max(axis=0))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(lses - top[None])
    total = weights.sum(axis=0)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    # A part that saw nothing adds nothing, whatever its o holds.
    outs = [jnp.where(w[..., None] > 0, o.astype(jnp.float32), 0.0) for w, (o, _) in zip(weights, parts, strict=True)]
    out = sum((w / total)[..., None] * o for w, o in zip(weights, outs, strict=True))
    return jnp.asarray(out).astype(parts[0][0].dtype), jnp.where(some, jnp.log(total) + top, -jnp.inf)


def _beyond_cudnn(q: Array, k: Array, v: Array, mask: Mask, operands: dict[str, Array | None]) -> list[str]:
    """What cuDNN's kernel cannot honour exactly, or at all."""
    given = {name for name, value in operands.items() if value is not None}
    # Segments reach it as an additive bias: exact where every query sees itself, as then no row is empty.
    if operands["segment_ids"] is operands["kv_segment_ids"] and q.shape[1] % 2 == 0:
        given -= {"segment_ids", "kv_segment_ids"}
    beyond = sorted(given)
    beyond += [] if isinstance(mask, Full | Causal) else [f"mask {mask}"]
    beyond += [] if q.dtype in (jnp.bfloat16, jnp.float16) else [f"dtype {q.dtype}"]
    sizes = {q.shape[3], v.shape[3]}
    return beyond + [f"head dim {size}" for size in sorted(sizes) if size % 8 or size > 128 or len(sizes) > 1]


def _cudnn(q: Array, k: Array, v: Array, mask: Mask, segment_ids: Array | None, scale: float | None) -> Array:
    see = None if segment_ids is None else (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q, k, v, mask=see, scale=scale, is_causal=isinstance(mask, Causal), implementation="cudnn"
    )


def _validate(q, k, v, segment_ids, kv_segment_ids, positions, kv_positions, kv_lengths, dropout_rate, rng, impl):
    if impl not in IMPLS:
        raise InputError(f"impl {impl!r}: expected one of {', '.join(IMPLS)}")
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise InputError(f"q {q.shape}, k {k.shape}, v {v.shape}: expected [B, T, N, H], [B, S, K, H], [B, S, K, Hv]")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and q.shape[3] == k.shape[3] and k.shape[1:3] == v.shape[1:3]):
        raise InputError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: expected one B, one H in q and k, one S and K in k and v"
        )
    if q.shape[2] % k.shape[2]:
        raise InputError(f"{k.shape[2]} key heads do not divide {q.shape[2]} query heads: choose K that divides N")
    if not (q.dtype == k.dtype == v.dtype):
        raise InputError(f"dtypes of q {q.dtype}, k {k.dtype}, v {v.dtype} differ: cast them to one")
    (b, t), s = q.shape[:2], k.shape[1]
    for name, value, kv_value in (("segment_ids", segment_ids, kv_segment_ids), ("positions", positions, kv_positions)):
        if value is None and kv_value is not None:
            raise InputError(f"kv_{name} without {name}: pass both")
        if value is not None and kv_value is None and t != s:
            raise InputError(f"{name} without kv_{name} where T {t} and S {s} differ: pass both")
        for label, array, shape in ((name, value, (b, t)), (f"kv_{name}", kv_value, (b, s))):
            if array is not None and array.shape != shape:
                raise InputError(f"{label} has shape {array.shape}: expected {shape}")
    if kv_lengths is not None and kv_lengths.shape != (b,):
        raise InputError(f"kv_lengths has shape {kv_lengths.shape}: expected {(b,)}")
    if not 0.0 <= dropout_rate < 1.0:
        raise InputError(f"dropout_rate {dropout_rate}: expected 0 <= rate < 1")
    if dropout_rate and rng is None:
        raise InputError("dropout_rate without rng: pass a jax.random key, or dropout_rate=0")
