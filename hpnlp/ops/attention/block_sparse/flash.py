"""Block-sparse flash attention, the implementation "xla": `flash`, its custom derivative, and the choice of a form.

The forward pass keeps (o, lse), and the backward pass computes each tile of probabilities again, so that memory grows with the
sequence length and not with its square. All forms share the arithmetic of a tile. Short sequences run in the unrolled form
where it skips pairs, others in scans over the schedule of the mask or of its sub-masks.

Measured on CPUs:
- Hidden scores become -inf before the exponential, so that one fused pass reads scores and writes probabilities.
- Tiles have about a million scores, over as many heads as that takes: smaller tiles are dominated by overhead, larger ones
  by cache misses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from hpnlp.ops.attention.block_sparse import scan, unrolled
from hpnlp.ops.attention.block_sparse.array_blocks import zeros
from hpnlp.ops.attention.block_sparse.decomposition import permuted
from hpnlp.ops.attention.block_sparse.operands import ExecutorOperands, Form, Options, executor_records
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule
from hpnlp.ops.attention.block_sparse.tile import QueryResiduals
from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.attention.operands import Operands, as_flags, scale_queries
from hpnlp.ops.attention.pair_bias import is_pair_bias
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import as_arrays
from hpnlp.ops.helpers.custom_vjp import vary_alike

# Name of these operations in profiles and in the planner, which counts them as one kernel on accelerators.
SCOPE = "flash"


@array_op("B T N", q="B T N")
def flash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    operands: Operands = Operands(),  # noqa: B008  (frozen)
    *,
    schedule: BlockSchedule | None = None,
    form: Form | None = None,
    block_size: int | tuple[int, int] | None = None,
) -> Array | tuple[Array, Array]:
    """Attention by tiles with an online softmax, without validation of the arguments.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv].
      mask: A static pattern, or one for each head.
      operands: The other arguments of `attend`, except impl and block_size.
      schedule: The tiles to compute, possibly arrays made at run time; within them the mask and the operands decide.
        None derives the schedule from the mask.
      form: The form of the executor; None chooses by size and estimated cost.
      block_size: Queries and keys in a block, one number or two; None chooses by estimated cost.

    Returns:
      o [B, T, N, Hv] in q's dtype; with return_lse the pair (o, lse), lse float32 [B, T, N].

    Cost:
      O(B N H) time for each pair in active tiles; O(B N H (T + S)) memory plus a tile, and in the backward pass of the
      unrolled form (T S at most 1024 x 1024) a gradient of the keys for each of up to 8 query blocks. Second derivatives
      work and take more memory; forward-mode derivatives do not work.

    References:
      Dao et al. 2022, "FlashAttention", algorithms 1 and 2.
    """
    q, operands = scale_queries(q, operands)
    if operands.global_tokens is not None:
        operands = dataclasses.replace(operands, global_tokens=as_flags(operands.global_tokens, q.shape[1]))
    results, order, masks = [], [], mask.by_head(q.shape[2])
    if 0 in (*q.shape[:3], k.shape[1]):  # no queries or no keys
        masks, nothing = {}, jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
        results.append((nothing, zeros(*q.shape[:3]) - jnp.inf))
    for head_mask, heads in masks.items():
        inputs = _select_heads(q, k, v, operands, heads)
        options, records = executor_records(
            inputs, head_mask, (heads, q.shape[2]), block_size, form, schedule is not None
        )
        leaves, tree = jax.tree.flatten((*inputs[:3], records, schedule))
        leaves = vary_alike(*(jnp.asarray(leaf) for leaf in leaves))
        results.append(_flash(options, *jax.tree.unflatten(tree, leaves)))
        order += heads
    o, lse = results[0]
    if len(results) > 1:
        o, lse = (jnp.concatenate(arrays, axis=2)[:, :, np.argsort(order)] for arrays in zip(*results, strict=True))
    if operands.sinks is not None:  # a further key with score sinks and value 0
        sink_o, sink_lse = jnp.zeros_like(o), jnp.broadcast_to(operands.sinks.astype(jnp.float32), lse.shape)
        low, sink_low = jnp.zeros_like(lse), jnp.zeros_like(sink_lse)
        o, lse, _ = permuted.merge_partials((o, lse, low), (sink_o, sink_lse, sink_low))
    return (o, lse) if operands.return_lse else o


def _select_heads(
    q: Array, k: Array, v: Array, operands: Operands, heads: tuple[int, ...]
) -> tuple[Array, Array, Array, Operands]:
    """The arrays of some query heads, with the key heads that they read."""
    if len(heads) == q.shape[2]:
        return q, k, v, operands
    heads_per_key = q.shape[2] // k.shape[2]
    key_heads = [i // heads_per_key for i in heads]
    distinct = list(dict.fromkeys(key_heads))
    if key_heads == [i for i in distinct for _ in range(heads_per_key)]:
        key_heads = distinct  # all query heads of each key head are here, so that they can go on sharing it
    operands = _operands_of_heads(operands, heads)
    return q[:, :, np.array(heads)], k[:, :, np.array(key_heads)], v[:, :, np.array(key_heads)], operands


def _operands_of_heads(operands: Operands, heads: tuple[int, ...]) -> Operands:
    """The operands of some query heads."""
    changes = {}
    for name in ("dense_mask", "bias"):
        array = getattr(operands, name)
        if is_pair_bias(array):
            changes[name] = array.select_heads(np.array(heads))
        elif isinstance(array, jax.Array | np.ndarray) and array.ndim >= 3 and array.shape[-3] > 1:
            changes[name] = array[..., np.array(heads), :, :]
    if operands.streams is not None:
        changes["streams"] = operands.streams[:, np.array(heads)]
    return dataclasses.replace(operands, **changes)


class _Residuals(NamedTuple):
    """Arguments and results of the forward pass."""

    q: Array
    k: Array
    v: Array
    operands: ExecutorOperands
    schedule: BlockSchedule | None
    o: Array
    lse: Array
    lse_low: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(
    options: Options, q: Array, k: Array, v: Array, operands: ExecutorOperands, schedule: BlockSchedule | None
) -> tuple[Array, Array]:
    """(o, lse), differentiable by q, k, v and the bias among the operands."""
    return _flash_forward(options, q, k, v, operands, schedule)[0]


@jax.named_scope(SCOPE)
def _flash_forward(
    options: Options, q: Array, k: Array, v: Array, operands: ExecutorOperands, schedule: BlockSchedule | None
) -> tuple[tuple[Array, Array], _Residuals]:
    """((o, lse), residuals); rematerialisation policies know o, lse and lse_low as "mixed"."""
    q, k, v, operands, schedule = as_arrays((q, k, v, operands, schedule))
    function = _forward if options.bias_jaxpr is not None else _traced_once(_forward)
    o, lse, lse_low = (checkpoint_name(x, "mixed") for x in function(options, q, k, v, operands, schedule))
    return (o, lse), _Residuals(q, k, v, operands, schedule, o, lse, lse_low)


@jax.named_scope(SCOPE)
def _flash_backward(options: Options, saved: _Residuals, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    """Gradients of q, k, v and the bias; none of the other operands and the schedule."""
    function = _backward if options.bias_jaxpr is not None else _traced_once(_backward)
    *gradients, db = function(options, saved, cotangents)
    none: Any = None
    return *gradients, ExecutorOperands(none, none, bias=jax.tree.map(_cotangent, saved.operands.bias, db)), None


_flash.defvjp(_flash_forward, _flash_backward)


@functools.cache
def _traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A pass that is traced once for all layers and derivatives with equal options and shapes.

    Calls with a bias function are not: their options equal no others, and their traces would accumulate in the cache.
    """
    return jax.jit(function, static_argnums=0)


def _forward(
    options: Options, q: Array, k: Array, v: Array, operands: ExecutorOperands, schedule: BlockSchedule | None
) -> tuple[Array, Array, Array]:
    """(o in q's dtype, lse, lse_low), in the form that suits the call."""
    if options.tests_positions:
        options, static = dataclasses.replace(options, tests_positions=False), operands.without_positions()
        return lax.cond(
            operands.positions_are_indices(),
            lambda: _forward(options, q, k, v, static, schedule),
            lambda: _forward(options, q, k, v, operands, schedule),
        )
    if schedule is None and unrolled.suits(options, q.shape[1], k.shape[1], operands):
        o, lse, lse_low = unrolled.forward(options, q, k, v, operands)
        return o.astype(q.dtype), lse, lse_low
    merged: Any = None
    for part in permuted.parts(options, q, k, operands, schedule):
        inputs = part.queries.apply(q), part.keys.apply(k), part.keys.apply(v)
        result = scan.forward(part.options, *inputs, part.operands, part.schedule)
        merged = part.merge(merged, result, q.shape[1])
    o, lse, lse_low = merged
    return o.astype(q.dtype), lse, lse_low


def _backward(options: Options, saved: _Residuals, cotangents: tuple[Array, Array]) -> tuple[Array, Array, Array, Any]:
    """Gradients of q, k, v and the bias, in the form of the forward pass."""
    q, k, v, operands, schedule, o, lse, lse_low = saved
    if options.tests_positions:
        options, static = dataclasses.replace(options, tests_positions=False), operands.without_positions()
        return lax.cond(
            operands.positions_are_indices(),
            lambda: _backward(options, saved._replace(operands=static), cotangents),
            lambda: _backward(options, saved, cotangents),
        )
    do, dlse = cotangents
    # Rows that see nothing. Their dlse and q may be NaN, and 0 * NaN is NaN, so both are zeroed.
    sees_nothing = jnp.isneginf(lse)
    if schedule is not None or not _all_see(options, operands, q.shape[1], k.shape[1]):
        q = jnp.where(sees_nothing[..., None], jnp.zeros((), q.dtype), q)
    # An einsum: as a sum over the last axis, XLA:CPU took 20 times as long (13 ms for 0.7 at T 4096, N 8, H 64).
    delta = jnp.einsum("btnh,btnh->btn", do, o, preferred_element_type=jnp.float32)
    delta = delta - jnp.where(sees_nothing, 0.0, dlse)
    residuals = QueryResiduals(q, do, jnp.where(sees_nothing, jnp.inf, lse), lse_low, delta)
    if schedule is None and unrolled.suits(options, q.shape[1], k.shape[1], operands):
        sums = unrolled.backward(options, residuals, k, v, operands)
    else:
        sums: Any = None
        for part in permuted.parts(options, q, k, operands, schedule):
            inputs = part.residuals(residuals), part.keys.apply(k), part.keys.apply(v)
            dq, dk, dv, db = scan.backward(part.options, *inputs, part.operands, part.schedule)
            dq, dk, dv = part.queries.undo(dq, q.shape[1]), *(part.keys.undo(x, k.shape[1]) for x in (dk, dv))
            sums = (dq, dk, dv, db) if sums is None else jax.tree.map(jnp.add, sums, (dq, dk, dv, db))
    dq, dk, dv, db = sums
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), db


def _all_see(options: Options, operands: ExecutorOperands, length: int, key_length: int) -> bool:
    """Whether it is known while tracing that every query sees a key; a false negative costs a copy of q."""
    queries, keys = operands.queries, operands.keys
    at_run_time = operands.lengths, operands.dense, operands.bias, queries.segment, queries.position, keys.position
    return all(x is None for x in at_run_time) and length <= key_length and _see_themselves(options.mask, length)


@functools.lru_cache(maxsize=256)
def _see_themselves(mask: Mask, length: int) -> bool:
    """Whether the mask lets each of the first `length` positions see itself."""
    positions = np.arange(length)
    return bool(np.all(mask.at(positions, positions)))


def _cotangent(x: Array, dx: Array) -> Any:
    """A gradient in the dtype of its array; float0 zeros for integers."""
    return dx.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)
