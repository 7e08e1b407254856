"""The permuted form of the executor: disjoint sub-masks, each scanned in an order of the tokens that suits it, and merged.

The scan form is the case of one sub-mask in the given order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from hpnlp.ops.attention.block_sparse.chunks import heads_at_a_time
from hpnlp.ops.attention.block_sparse.decomposition.decompose import ALL_TOKENS, SubMask, decompose
from hpnlp.ops.attention.block_sparse.operands import ExecutorOperands, Form, Options, TokenInfo
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule
from hpnlp.ops.attention.block_sparse.tile import QueryResiduals, log_sum
from hpnlp.ops.attention.masks.base import Full
from hpnlp.ops.attention.pair_bias import is_pair_bias


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


def parts(
    options: Options, q: Array, k: Array, operands: ExecutorOperands, schedule: BlockSchedule | None
) -> Iterator[Part]:
    """The sub-masks into which the mask of a call is decomposed.

    Args:
      options: Static settings of the executor.
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      operands: Run-time operands of the executor.
      schedule: Tiles to compute in the given order of the tokens; None decomposes the mask.

    Yields:
      Each sub-mask with its order of the tokens and its schedule.
    """
    for sub_mask in _sub_masks(options, q, k, operands, schedule):
        yield _part(options, sub_mask, operands, q.shape[0])


def _sub_masks(
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
        or is_pair_bias(operands.bias)
        or options.form is Form.SCAN
    )
    divide_all = options.form is Form.PERMUTED
    heads = heads_at_a_time(q, k)
    schedules = decompose(mask, q.shape[1], k.shape[1], options.block_size, heads, undivided, divide_all)
    if operands.mask_is_static:
        return schedules
    return tuple(dataclasses.replace(part, mask=options.mask) for part in schedules)


class Permutation:
    """A permutation of the tokens of `[B, T, ...]`: chosen tokens, or each residue class of the indices as an example."""

    def __init__(self, stride: int, chosen: tuple[int, ...] | None) -> None:
        """Sets the order.

        Args:
          stride: Number of residue classes; 1 keeps the order.
          chosen: Indices of the tokens, ascending; None for all.
        """
        self._stride, self.chosen = stride, None if chosen is None else np.asarray(chosen, np.int32)

    def apply(self, x: Array, fill: ArrayLike = 0) -> Array:
        """`[B, T, ...]` as `[B, chosen, ...]`, or `[B * stride, ceil(T / stride), ...]` padded with `fill`."""
        if self.chosen is not None:
            return x[:, self.chosen]
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
        if self.chosen is not None:
            return jnp.zeros((x.shape[0], length, *x.shape[2:]), x.dtype).at[:, self.chosen].set(x)
        if self._stride == 1:
            return x
        x = x.reshape(-1, self._stride, *x.shape[1:]).swapaxes(1, 2)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


@dataclasses.dataclass(frozen=True)
class Part:
    """A sub-mask of a call, as an argument of `scan.forward` and `scan.backward`.

    Attributes:
      options: Static settings, with the sub-mask.
      operands: Operands in the orders of the tokens.
      schedule: Tiles of the sub-mask.
      queries: Order of the queries.
      keys: Order of the keys.
    """

    options: Options
    operands: ExecutorOperands
    schedule: BlockSchedule
    queries: Permutation
    keys: Permutation

    def residuals(self, residuals: QueryResiduals) -> QueryResiduals:
        """Residuals of the queries in the order of the part; padding has lse +inf, as rows that see nothing."""
        apply = self.queries.apply
        q, do, lse = apply(residuals.q), apply(residuals.do), apply(residuals.lse, jnp.inf)
        return QueryResiduals(q, do, lse, apply(residuals.lse_low), apply(residuals.delta))

    def merge(self, merged: Any, result: tuple[Array, ...], length: int) -> Any:
        """Merges (o, lse, lse_low) of earlier parts, or None, with those of this part.

        Args:
          merged: [B, T, N, ...] in the given order of the tokens; None without earlier parts.
          result: In the order of this part.
          length: T.

        Returns:
          The merged results in the given order of the tokens.
        """
        in_order = tuple(self.queries.undo(x, length) for x in result)
        chosen = self.queries.chosen
        if chosen is None:
            return merge_partials(merged, in_order) if merged else in_order
        if not merged:
            blank = map(jnp.zeros_like, in_order)
            merged = tuple(x + fill for x, fill in zip(blank, (0, -jnp.inf, 0), strict=True))
        both = merge_partials(tuple(x[:, chosen] for x in merged), result)  # for the chosen queries only
        return tuple(x.at[:, chosen].set(new) for x, new in zip(merged, both, strict=True))


def _part(options: Options, part: SubMask, operands: ExecutorOperands, batch: int) -> Part:
    """A sub-mask with options and operands in the orders of its tokens."""
    stride = part.selection.stride
    queries, keys = Permutation(stride, part.selection.queries), Permutation(stride, part.selection.keys)

    def permute(tokens: TokenInfo, permutation: Permutation) -> TokenInfo:
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
    return Part(dataclasses.replace(options, mask=part.mask), part_operands, part.schedule, queries, keys)
