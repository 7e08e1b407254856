"""Attention: `attend` computes it, `merge` puts partial results together, masks say who may see whom."""

from __future__ import annotations

import inspect
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.attention.block_sparse.flash import flash
from hpnlp.ops.attention.block_sparse.permuted import merge_partials
from hpnlp.ops.attention.dispatch import PLATFORMS, asked, choose
from hpnlp.ops.attention.dispatch import explain as explain_choice
from hpnlp.ops.attention.kernels.cudnn import beyond_cudnn, cudnn
from hpnlp.ops.attention.kernels.splash_tpu import beyond_splash, splash
from hpnlp.ops.attention.masks.base import Full, Mask, PerHead
from hpnlp.ops.attention.reference import as_flags, reference
from hpnlp.ops.attention.validate import validate
from hpnlp.types import InputError


@array_op("B T N", q="B T N")
def attend(
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
    dense_mask: Array | None = None,
    global_tokens: Array | None = None,
    bias: Any = None,
    scale: float | Float[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    streams: Int[Array, "B N"] | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    block_size: int | None = None,
) -> Array | tuple[Array, Array]:
    """softmax(q k^T * scale) v over the pairs that the mask and the operands allow.

    q, k, v: K divides N, and query head n reads key head n // (N / K).
    mask: a static pattern, or one for each head, over positions where these are given, over indices from 0 elsewhere.
    segment_ids, kv_segment_ids: int32; a query sees the keys of its own segment. The kv_ twins of segment_ids and
      positions may be left out where T == S (self-attention).
    kv_lengths: keys at indices from kv_lengths[b] on are hidden.
    dense_mask: bool, broadcasts to [B, N, T, S]; False hides. It costs what it holds, and hides nothing from being computed.
    global_tokens: self-attention only; bool [B, T], or int [B, G] with places in the row, -1 for none: tokens that see all
      and are seen by all, whatever the mask says (a causal one, too), within segments, lengths and dense_mask.
    bias: added to the scaled scores; an array that broadcasts to [B, N, T, S], or a function of (head, query position, key
      position), int32 scalars, that gives a scalar and may close over arrays. Gradients reach the array, or those.
    scale: H ** -0.5 where None; an array may be traced, and has a gradient.
    soft_cap: scores become soft_cap * tanh(score / soft_cap), after the bias (Gemma Team 2024, "Gemma 2", sec. 2).
    sinks: a logit for each head that takes part in the softmax and has no value (OpenAI 2025, "gpt-oss"); the lse counts it.
    dropout_rate, rng: drops weights as a function of (rng, stream, positions), the same in every impl.
    streams: int32, a number for each row and head; b * N + n where None. Inside `shard_map`, where rows and heads count from
      0 in each shard, numbers of the whole make dropout the same as on one device.
    return_lse: also return the log-sum-exp of each row's scores, float32 [B, T, N], for `merge`.
    impl: "xla" (blockwise, every device), "cudnn" (NVIDIA, 16 bits; dense, causal and windows), "pallas" (Hopper, 16 bits,
      most masks; not yet measured), "splash" (TPU, every mask), "reference" (dense, slow), or "auto": the fastest that
      honours all that is asked; `explain` says why.
    block_size: rows of a block of "xla"; None picks what the pattern costs least in.

    Returns o [B, T, N, Hv] in q's dtype (accumulated in float32), or (o, lse). A row that may see nothing gives o = 0,
    lse = -inf (its sink, where there are sinks) and zero gradients. Keys and values that no query may see are never read
    into a result, NaN or not. Queries that may see nothing may be NaN, too, but with impl="splash" without return_lse,
    whose gradients are NaN then.
    Derivatives are by reverse mode (`jax.grad`, `jax.vjp`, `jax.jacrev`); forward mode (`jax.jvp`, `jax.jacfwd`) raises jax's
    TypeError, except with impl="reference".
    Raises InputError on shapes that do not fit and on what the chosen impl cannot honour.
    Cost: O(B N H) times the pairs of the blocks that the mask does not rule out; O(B N (T + S) H) memory, also in the
    backward pass, except "reference"; see `flash` for short sequences and second derivatives.
    Source: Vaswani et al. 2017, eq. 1; blockwise: Dao et al. 2022, "FlashAttention", algorithms 1 and 2.

    jax.nn.dot_product_attention     here
    query, key, value                q, k, v
    is_causal=True                   mask=Causal(); top-left as there: with a cache pass positions
    local_window_size=(l, r)         mask=Window(l, r)
    mask                             dense_mask
    query_seq_lengths                leave out, and take no notice of those rows
    key_value_seq_lengths            kv_lengths
    return_residual                  return_lse: float32, and with a gradient
    implementation                   impl
    """
    operands = {
        "segment_ids": segment_ids,
        "kv_segment_ids": segment_ids if kv_segment_ids is None else kv_segment_ids,
        "positions": positions,
        "kv_positions": positions if kv_positions is None else kv_positions,
        "kv_lengths": kv_lengths,
        "dense_mask": dense_mask,
        "global_tokens": global_tokens,
        "bias": bias,
        "sinks": sinks,
        "soft_cap": soft_cap,
    }
    validate(q, k, v, mask, segment_ids, kv_segment_ids, positions, kv_positions, operands, dropout_rate, rng)
    beyond = _beyond(q, k, v, mask, operands | {"dropout_rate": dropout_rate, "return_lse": return_lse})
    if impl == "auto":
        impl = "xla" if block_size is not None else choose(jax.default_backend(), beyond)
    if impl not in beyond:
        raise InputError(f"impl {impl!r}: expected one of auto, {', '.join(beyond)}")
    if PLATFORMS[impl] not in (None, jax.default_backend()):
        raise InputError(f"impl {impl!r} runs on {PLATFORMS[impl]}, this is {jax.default_backend()}: pass impl='xla'")
    if beyond[impl]:
        raise InputError(f"impl {impl!r} does not honour {', '.join(beyond[impl])}: leave it out, or pass impl='xla'")
    if block_size is not None and (impl != "xla" or block_size < 1):
        raise InputError(f"block_size {block_size} with impl {impl!r}: expected a positive one, with impl='xla' only")
    if isinstance(scale, jax.Array) and impl != "reference":
        q, scale = _scaled(q, scale), 1.0
    if impl in ("splash", "cudnn", "pallas"):
        given = {name: operands[name] for name in asked(operands)}
        given |= {"return_lse": True} if return_lse else {}
        return _kernel(impl)(q, k, v, mask, scale=scale, **given)
    options = {"scale": scale, "dropout_rate": dropout_rate, "rng": rng, "streams": streams}
    if impl == "reference":
        return reference(q, k, v, mask, **operands, **options, return_lse=return_lse)
    del operands["sinks"]
    if global_tokens is not None:
        flags = as_flags(global_tokens, q.shape[1])
        operands["global_tokens"] = flags, flags
    o, lse = _per_head(q, k, v, mask, operands, {**options, "block_size": block_size})
    if sinks is not None:
        o, lse = _with_sinks(o, lse, sinks)
    return (o, lse) if return_lse else o


def explain(q: Any, k: Any, v: Any, mask: Mask | PerHead = Full(), **operands: Any) -> str:  # noqa: B008  (frozen)
    """Which impl `attend` takes by itself for this call, and why not another: a line for each.

    Arguments as `attend`. Raises InputError on an argument that it does not have.
    """
    known = inspect.signature(attend).parameters
    for name in operands:
        if name not in known or name in ("impl", "block_size"):
            raise InputError(f"explain has no argument {name!r}: expected those of attend but impl and block_size")
    for name in ("segment_ids", "positions"):
        operands |= (
            {f"kv_{name}": operands[name]} if operands.get(name) is not None and f"kv_{name}" not in operands else {}
        )
    return explain_choice(jax.default_backend(), _beyond(q, k, v, mask, operands))


@array_op("...", parts="...")
def merge(*parts: tuple[Float[Array, "*a Hv"], Float[Array, "*a"]]) -> tuple[Array, Array]:
    """The attention over the union of disjoint key sets, from the (o, lse) of each; exact and differentiable.

    parts: o [..., Hv] and float32 lse [...], as `attend(..., return_lse=True)` gives them. Returns (o, lse), o in the
    first part's dtype. Where every part saw nothing (lse = -inf), o = 0 and lse = -inf, with zero gradients.
    Raises InputError without a part. Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax",
    eq. 4.
    """
    if not parts:
        raise InputError("merge of no parts: pass at least one (o, lse)")
    return merge_partials(*((o, lse, jnp.zeros_like(lse)) for o, lse in parts))[:2]


def _beyond(q: Array, k: Array, v: Array, mask: Mask | PerHead, operands: dict[str, Any]) -> dict[str, list[str]]:
    """What each impl cannot honour of a call."""
    each = {
        "splash": beyond_splash(q, k, v, mask, operands),
        "cudnn": beyond_cudnn(q, k, v, mask, operands),
        "pallas": [],
    }
    if jax.default_backend() == "gpu":
        from hpnlp.ops.attention.kernels.pallas_gpu import beyond_pallas

        each["pallas"] = beyond_pallas(q, k, v, mask, **operands)
    return {**each, "xla": [], "reference": []}


def _kernel(impl: str) -> Any:
    if impl != "pallas":
        return {"splash": splash, "cudnn": cudnn}[impl]
    from hpnlp.ops.attention.kernels.pallas_gpu import pallas

    return pallas


def _per_head(
    q: Array, k: Array, v: Array, mask: Mask | PerHead, operands: dict[str, Any], options: dict[str, Any]
) -> tuple[Array, Array]:
    """(o, lse) by one call for each mask that some heads have."""
    groups = mask.by_head(q.shape[2])
    if len(groups) == 1:
        return cast(Any, flash(q, k, v, next(iter(groups)), **operands, **options, return_lse=True))
    group, streams = q.shape[2] // k.shape[2], options["streams"]
    found, order = [], []
    for one, heads in groups.items():
        key_heads = [i // group for i in heads]
        if key_heads == [i for i in dict.fromkeys(key_heads) for _ in range(group)]:
            key_heads = list(dict.fromkeys(key_heads))
        own = dict(operands)
        for name in ("dense_mask", "bias"):
            if getattr(own[name], "ndim", 0) >= 3 and own[name].shape[-3] > 1:
                own[name] = own[name][..., np.array(heads), :, :]
        part = q[:, :, np.array(heads)], k[:, :, np.array(key_heads)], v[:, :, np.array(key_heads)]
        if streams is not None:
            own["streams"] = streams[:, np.array(heads)]
        found.append(flash(*part, one, **{**options, **own}, heads=(heads, q.shape[2]), return_lse=True))
        order += heads
    o, lse = (jnp.concatenate(parts, axis=2)[:, :, np.argsort(order)] for parts in zip(*found, strict=True))
    return o, lse


def _scaled(q: Array, scale: Array) -> Array:
    """q * scale, where a query that sees nothing adds 0 to the gradient of scale even if it is NaN: 0 * NaN is NaN."""
    wide = q.astype(jnp.float32)
    finite = jnp.isfinite(wide)
    product = jnp.where(finite, wide, 0.0) * scale.astype(jnp.float32)
    return (product + jnp.where(finite, 0.0, wide)).astype(q.dtype)


def _with_sinks(o: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """The merge with a key of score `sinks` and value 0."""
    return merge((o, lse), (jnp.zeros_like(o), jnp.broadcast_to(sinks.astype(jnp.float32), lse.shape)))
