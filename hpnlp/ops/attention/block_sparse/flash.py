"""Blockwise attention whose memory grows with the sequence, not with its square.

The forward pass keeps (o, lse); the backward pass computes each block of probabilities again. Two drivers share the
arithmetic of a tile: short sequences run as panels where these skip pairs, others as the visits of a block plan, in parts
where a mask's patterns want different orders of the tokens.

What decides the speed on a CPU, so that it is not lost again:
- No product turns the scores: XLA:CPU takes three times as long for `p^T do` and `ds^T q` as for their transposes, so the
  gradients of k and v come out with the features in front, and are turned once at the end.
- Hidden scores become -inf before the exponential, so that one fused pass reads scores and writes probabilities.
- Tiles of about a million scores, in as many heads as that takes: smaller ones drown in overhead, larger ones in misses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.arrays import accepts_numpy
from hpnlp.ops.attention.block_sparse import unrolled
from hpnlp.ops.attention.block_sparse.operands import Operands, from_columns, from_rows, per_row, rows_of, zeros
from hpnlp.ops.attention.block_sparse.permuted import backward, forward
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule
from hpnlp.ops.attention.block_sparse.tile import Options, QueryResiduals, TokenInfo
from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.custom_vjp import vary_alike
from hpnlp.ops.dropout import seed_words

SCOPE = "flash"  # what profiles and plans know these operations by; on accelerators one kernel does them all


@array_op("B T N", q="B T N")
def flash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask = Full(),  # noqa: B008  (frozen)
    *,
    blocks: BlockSchedule | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    kv_positions: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    dense_mask: Bool[Array, "..."] | None = None,
    global_tokens: tuple[Array, Array] | None = None,
    bias: Any = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    streams: Int[Array, "B N"] | None = None,
    heads: tuple[tuple[int, ...], int] | None = None,
    return_lse: bool = False,
    block_size: int | None = None,
) -> Array | tuple[Array, Array]:
    """Attention by blocks with an online softmax; arguments and results as `attend`, which validates them.

    blocks: the plan to run, which may be made at run time; of what its visits hold, the mask and the operands decide. None
    makes the mask's own. global_tokens: bool [B, T] and [B, S]. heads: the numbers of
    the heads and how many there are, where these are not all.
    Cost: O(pairs of live blocks x B N H) time; O(B N H (T + S)) memory and a tile, and in the backward pass, as long as
    T S is at most 1024 x 1024, a gradient of the keys for each of up to 8 panels. Second derivatives work, in more memory;
    forward-mode ones do not.
    Source: Dao et al. 2022, "FlashAttention", algorithms 1 and 2.
    """
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    (b, t, n), s = q.shape[:3], k.shape[1]
    if 0 in (b, t, n, s):  # nothing to see, or nobody to see it
        out, lse = jnp.zeros((b, t, n, v.shape[3]), q.dtype), zeros(b, t, n) - jnp.inf
        return (out, lse) if return_lse else out
    jaxpr, bias = _traced(bias) if callable(bias) else (None, bias)
    # Plain numbers, which jax.jit can tell apart; callers have arrays of one number, too.
    factor, cap = q.shape[-1] ** -0.5 if scale is None else float(scale), None if soft_cap is None else float(soft_cap)
    options = Options(mask, factor, cap, float(dropout_rate), block_size, jaxpr)
    seed = seed_words(rng) if dropout_rate > 0 and rng is not None else None
    numbers, count = (tuple(range(n)), n) if heads is None else heads
    names = jnp.asarray(numbers, jnp.int32)
    if seed is not None and streams is None:
        streams = jnp.arange(b, dtype=jnp.int32)[:, None] * count + names[None]
    q_global, k_global = (None, None) if global_tokens is None else global_tokens
    index = lambda length: jnp.arange(length, dtype=jnp.int32)[None]  # noqa: E731
    int32 = lambda x: None if x is None else jnp.asarray(x, jnp.int32)  # noqa: E731
    facts = Operands(
        TokenInfo(index(t), int32(positions), None, int32(segment_ids), q_global),
        TokenInfo(index(s), int32(kv_positions), None, int32(kv_segment_ids), k_global),
        int32(kv_lengths),
        seed,
        int32(streams) if seed is not None else None,
        names[None] if jaxpr is not None else None,
        _four(dense_mask),
        _four(bias) if jaxpr is None else bias,
    )
    leaves, form = jax.tree.flatten((facts, blocks))
    q, k, v, *leaves = vary_alike(q, k, v, *(jnp.asarray(leaf) for leaf in leaves))
    facts, blocks = jax.tree.unflatten(form, leaves)
    both: Any = _flash(options, q, k, v, facts.bias, dataclasses.replace(facts, bias=None), blocks)
    return both if return_lse else both[0]


def _four(x: Any) -> Any:
    return None if x is None else jnp.asarray(x).reshape((1,) * (4 - x.ndim) + x.shape)


def _traced(bias: Callable[..., Any]) -> tuple[Any, Any]:
    """The jaxpr of a bias function of three numbers, and the arrays that it has closed over."""
    closed = jax.make_jaxpr(bias)(*(jnp.int32(0),) * 3)
    return closed.jaxpr, tuple(closed.consts)


def _once(options: Options, function: Callable[..., Any]) -> Callable[..., Any]:
    """A pass that is traced once for all layers and derivatives that are alike, with what its module's constants were then.

    A bias function is like no other, and its traces would pile up.
    """
    return function if options.bias is not None else _traced_once(function)


@functools.cache
def _traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, static_argnums=0)


@jax.named_scope(SCOPE)
@accepts_numpy
def _flash_forward(
    options: Options, q: Array, k: Array, v: Array, bias: Any, facts: Operands, blocks: Any
) -> tuple[tuple[Array, Array], Any]:
    o, lse, rest = (
        checkpoint_name(x, "mixed") for x in _once(options, _forward)(options, q, k, v, bias, facts, blocks)
    )
    return (o, lse), (q, k, v, bias, facts, blocks, o, lse, rest)


def _forward(
    options: Options, q: Array, k: Array, v: Array, bias: Any, facts: Operands, blocks: Any
) -> tuple[Array, Array, Array]:
    full = dataclasses.replace(facts, bias=bias)
    if blocks is None and unrolled.fit(options, q.shape[1], k.shape[1], facts):
        o, lse, rest = unrolled.forward(options, q, k, v, full)
        o, lse, rest = from_rows(o), from_rows(lse[..., None])[..., 0], from_rows(rest[..., None])[..., 0]
    else:
        o, lse, rest = forward(options, q, k, v, full, blocks)
    return o.astype(q.dtype), lse, rest


@jax.named_scope(SCOPE)
def _flash_backward(options: Options, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    bias = saved[3]
    *found, by_bias = _once(options, _backward)(options, saved, cotangents)
    return *found, jax.tree.map(_cotangent, bias, by_bias), None, None


def _backward(options: Options, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Array, Array, Array, Any]:
    q, k, v, bias, facts, blocks, o, lse, rest = saved
    do, dlse = cotangents
    heads, full = k.shape[2], dataclasses.replace(facts, bias=bias)
    nothing = jnp.isneginf(lse)  # rows that see nothing, whose dlse may be anything, and q as well: 0 * NaN is NaN
    if blocks is not None or not _all_see(options, full, q.shape[1], k.shape[1]):
        q = jnp.where(nothing[..., None], jnp.zeros((), q.dtype), q)
    # A product: as a sum over the last axis, it took XLA:CPU twenty times as long (13 ms for 0.7 at T 4096, N 8, H 64).
    delta = jnp.einsum("btnh,btnh->btn", do, o, preferred_element_type=jnp.float32) - jnp.where(nothing, 0.0, dlse)
    lse = jnp.where(nothing, jnp.inf, lse)
    if blocks is None and unrolled.fit(options, q.shape[1], k.shape[1], facts):
        by_row = per_row(lse, heads), per_row(rest, heads), per_row(delta, heads)
        given = QueryResiduals(rows_of(q, heads), rows_of(do, heads), *by_row)
        dq, dk, dv, by_bias = unrolled.backward(options, given, k, v, full)
        dq, dk, dv = from_rows(dq), from_columns(dk), from_columns(dv)
    else:
        dq, dk, dv, by_bias = backward(options, (q, do, lse, rest, delta), k, v, full, blocks)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), by_bias


def _all_see(options: Options, facts: Operands, length: int, keys: int) -> bool:
    """Whether it is known while tracing that every query sees a key; false negatives cost a copy of q."""
    at_runtime = facts.lengths, facts.dense, facts.bias, facts.rows.segment, facts.rows.position, facts.columns.position
    return all(x is None for x in at_runtime) and length <= keys and _see_themselves(options.mask, length)


@functools.lru_cache(maxsize=256)
def _see_themselves(mask: Mask, length: int) -> bool:
    positions = np.arange(length)
    return bool(np.all(mask.at(positions, positions)))


def _cotangent(x: Array, dx: Array) -> Any:
    return dx.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(
    options: Options, q: Array, k: Array, v: Array, bias: Any, facts: Operands, blocks: Any
) -> tuple[Array, Array]:
    return _flash_forward(options, q, k, v, bias, facts, blocks)[0]


_flash.defvjp(_flash_forward, _flash_backward)
