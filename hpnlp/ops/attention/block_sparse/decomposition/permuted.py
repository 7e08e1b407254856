"""The permuted form of the executor: disjoint sub-masks, each scanned in an order of the tokens that suits it, and merged.

The scan form is the case of one sub-mask in the given order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from hpnlp.ops.attention.block_sparse import scan
from hpnlp.ops.attention.block_sparse.chunks import heads_at_a_time
from hpnlp.ops.attention.block_sparse.decomposition.decompose import ALL_TOKENS, SubMask, decompose
from hpnlp.ops.attention.block_sparse.operands import ExecutorOperands, Form, Options, TokenInfo
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule
from hpnlp.ops.attention.block_sparse.tile import QueryResiduals, log_sum
from hpnlp.ops.attention.masks.base import Full
from hpnlp.ops.attention.pair_bias import PairBias


def merge_partials(*partials: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """Attention over the union of disjoint key sets from the result over each.

    Args:
      *partials: (o [..., Hv], lse [...], lse_low [...]) each; lse float32, see `tile.log_sum`.

    Returns:
      (o, lse, lse_low), o in the dtype of the first o.
    """
    lses = jnp.stack([lse for _, lse, _ in partials])
    top = jax.lax.stop_gradient(lses.max(axis=0))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(lses - top[None] + jnp.stack([low for _, _, low in partials]))
    sums = weights.sum(axis=0)
    total = jnp.where(sums != 0, sums, 1.0)
    # A partial result that saw nothing adds nothing, whatever its o holds.
    outs = [
        jnp.where(w[..., None] == 0, 0.0, o.astype(jnp.float32)) for w, (o, _, _) in zip(weights, partials, strict=True)
    ]
    out = sum((w / total)[..., None] * o for w, o in zip(weights, outs, strict=True))
    return jnp.asarray(out).astype(partials[0][0].dtype), *log_sum(top, sums)


def forward(
    options: Options, q: Array, k: Array, v: Array, operands: ExecutorOperands, schedule: BlockSchedule | None
) -> tuple[Array, Array, Array]:
    """Attention over all pairs that are visible.

    Args:
      options: Static settings of the executor.
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv].
      operands: Run-time operands of the executor.
      schedule: Tiles to compute in the given order of the tokens; None decomposes the mask.

    Returns:
      float32 (o [B, T, N, Hv], lse [B, T, N], lse_low [B, T, N]).
    """
    merged: Any = ()
    for part in _parts(options, q, k, operands, schedule):
        queries, keys, part_options, part_operands = _permute(options, part, operands, q.shape[0])
        result = scan.forward(
            part_options, queries.apply(q), keys.apply(k), keys.apply(v), part_operands, part.schedule
        )
        in_order = tuple(queries.undo(x, q.shape[1]) for x in result)
        if part.selection.queries is None:
            merged = merge_partials(merged, in_order) if merged else in_order
        else:  # merged for the chosen queries only
            chosen = np.asarray(part.selection.queries)
            if not merged:
                blank = map(jnp.zeros_like, in_order)
                merged = tuple(x + fill for x, fill in zip(blank, (0, -jnp.inf, 0), strict=True))
            both = merge_partials(tuple(x[:, chosen] for x in merged), result)
            merged = tuple(x.at[:, chosen].set(new) for x, new in zip(merged, both, strict=True))
    return merged


def backward(
    options: Options,
    residuals: QueryResiduals,
    k: Array,
    v: Array,
    operands: ExecutorOperands,
    schedule: BlockSchedule | None,
) -> tuple[Array, Array, Array, Any]:
    """Gradients of `forward`.

    Args:
      options: Static settings of the executor.
      residuals: Residuals of the queries, [B, T, N, ...].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv].
      operands: Run-time operands of the executor.
      schedule: As for `forward`.

    Returns:
      float32 (dq, dk, dv) in the shapes of q, k and v, and the gradient of operands.bias.
    """
    q = residuals.q
    sums: Any = None
    for part in _parts(options, q, k, operands, schedule):
        queries, keys, part_options, part_operands = _permute(options, part, operands, q.shape[0])
        part_residuals = QueryResiduals(
            queries.apply(q),
            queries.apply(residuals.do),
            queries.apply(residuals.lse, jnp.inf),
            queries.apply(residuals.lse_low),
            queries.apply(residuals.delta),
        )
        dq, dk, dv, db = scan.backward(
            part_options, part_residuals, keys.apply(k), keys.apply(v), part_operands, part.schedule
        )
        gradients = queries.undo(dq, q.shape[1]), keys.undo(dk, k.shape[1]), keys.undo(dv, k.shape[1]), db
        sums = gradients if sums is None else jax.tree.map(jnp.add, sums, gradients)
    return sums


def _parts(
    options: Options, q: Array, k: Array, operands: ExecutorOperands, schedule: BlockSchedule | None
) -> tuple[SubMask, ...]:
    """The sub-masks into which the mask is decomposed, with their orders and schedules."""
    if schedule is not None:
        return (SubMask(options.mask, ALL_TOKENS, schedule, False),)
    # With positions or global tokens, which are known at run time only, any two blocks may hold visible pairs.
    mask = options.mask if operands.mask_is_static else Full()
    undivided = (
        not operands.mask_is_static
        or operands.dense is not None
        or isinstance(operands.bias, PairBias)
        or options.form is Form.SCAN
    )
    divide_all = options.form is Form.PERMUTED
    heads = heads_at_a_time(q, k)
    schedules = decompose(mask, q.shape[1], k.shape[1], options.block_size, heads, undivided, divide_all)
    if operands.mask_is_static:
        return schedules
    return tuple(dataclasses.replace(part, mask=options.mask) for part in schedules)


class _Permutation:
    """A permutation of the tokens of `[B, T, ...]`: chosen tokens, or each residue class of the indices as an example."""

    def __init__(self, stride: int, chosen: tuple[int, ...] | None) -> None:
        """Sets the order.

        Args:
          stride: Number of residue classes; 1 keeps the order.
          chosen: Indices of the tokens, ascending; None for all.
        """
        self._stride, self._chosen = stride, None if chosen is None else np.asarray(chosen, np.int32)

    def apply(self, x: Array, fill: ArrayLike = 0) -> Array:
        """`[B, T, ...]` as `[B, chosen, ...]`, or `[B * stride, ceil(T / stride), ...]` padded with `fill`."""
        if self._chosen is not None:
            return x[:, self._chosen]
        if self._stride == 1:
            return x
        count = -(-x.shape[1] // self._stride)
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, count * self._stride - x.shape[1])
        x = jnp.pad(x, padding, constant_values=fill).reshape(x.shape[0], count, self._stride, *x.shape[2:])
        # A pass of its own, in pieces of all heads: together with the next transpose it would take twice as long.
        return jax.lax.optimization_barrier(x.swapaxes(1, 2).reshape(-1, count, *x.shape[3:]))

    def undo(self, x: Array, length: int) -> Array:
        """Undoes `apply`; tokens that were not chosen are 0."""
        if self._chosen is not None:
            return jnp.zeros((x.shape[0], length, *x.shape[2:]), x.dtype).at[:, self._chosen].set(x)
        if self._stride == 1:
            return x
        x = x.reshape(-1, self._stride, *x.shape[1:]).swapaxes(1, 2)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _permute(
    options: Options, part: SubMask, operands: ExecutorOperands, batch: int
) -> tuple[_Permutation, _Permutation, Options, ExecutorOperands]:
    """The orders of queries and keys of a sub-mask, and the options and operands in these orders."""
    stride = part.selection.stride
    queries, keys = _Permutation(stride, part.selection.queries), _Permutation(stride, part.selection.keys)

    def permute(tokens: TokenInfo, permutation: _Permutation) -> TokenInfo:
        if stride > 1:  # each example becomes `stride` examples
            tokens = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, x.shape[1])), tokens)
        permuted = jax.tree.map(permutation.apply, tokens)
        mask_position = jnp.arange(permuted.index.shape[1], dtype=jnp.int32)[None] if part.over_quotients else None
        return dataclasses.replace(permuted, index=permutation.apply(tokens.index, -1), mask_position=mask_position)

    def repeat(x: Array | None) -> Any:
        return None if x is None else jnp.repeat(x, stride, axis=0)

    part_operands = dataclasses.replace(
        operands,
        queries=permute(operands.queries, queries),
        keys=permute(operands.keys, keys),
        lengths=repeat(operands.lengths),
        streams=repeat(operands.streams),
    )
    return queries, keys, dataclasses.replace(options, mask=part.mask), part_operands
