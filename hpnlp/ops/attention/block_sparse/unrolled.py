"""The unrolled form of the executor, for short sequences: a Python loop over query blocks, each against one span of keys.

Unlike the tiles of a schedule, spans of keys need neither gathers nor padding to whole blocks, and their visibility is a numpy
array where the mask alone decides it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from hpnlp.ops.attention.block_sparse import tile
from hpnlp.ops.attention.block_sparse.array_blocks import (
    keys_by_head,
    keys_from_gradient,
    queries_by_head,
    queries_from_heads,
    scalars_by_head,
    split_heads,
    zeros,
)
from hpnlp.ops.attention.block_sparse.decomposition import cost_model
from hpnlp.ops.attention.block_sparse.operands import ExecutorOperands, Form, Options, TokenInfo
from hpnlp.ops.attention.block_sparse.tile import QueryResiduals, TileMask
from hpnlp.ops.attention.masks.base import Full, Mask


def suits(options: Options, length: int, key_length: int, operands: ExecutorOperands) -> bool:
    """Whether the unrolled form runs a call: T and S are small enough that it is faster than a scan.

    Args:
      options: Static settings of the executor; `form` decides where it is set.
      length: T.
      key_length: S.
      operands: Run-time operands of the executor.

    Returns:
      True for this form.
    """
    if isinstance(options.block_size, tuple):
        return False  # a bias that has tiles of this shape only
    if options.form is not None:
        return options.form is Form.UNROLLED
    pairs, mask = length * key_length, _static_mask(options, operands)
    if (
        -(-length // _block_size(options, mask)) > cost_model.UNROLLED_MAX_BLOCKS
        or pairs > cost_model.UNROLLED_MAX_PAIRS
    ):
        return False
    if pairs < cost_model.UNROLLED_DENSE_PAIRS:
        return True
    blocks = _query_blocks(options, length, key_length, operands)
    return (
        sum((block.q1 - block.q0) * (block.k1 - block.k0) for block in blocks) <= cost_model.UNROLLED_MAX_SHARE * pairs
    )


def forward(options: Options, q: Array, k: Array, v: Array, operands: ExecutorOperands) -> tuple[Array, Array, Array]:
    """Attention over all pairs that are visible.

    Args:
      options: Static settings of the executor.
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv].
      operands: Run-time operands of the executor.

    Returns:
      float32 (o [B, T, N, Hv], lse [B, T, N], lse_low [B, T, N]).
    """
    kv_heads = k.shape[2]
    q, k, v = queries_by_head(q, kv_heads), keys_by_head(k), keys_by_head(v)
    results: list[tuple[Array, ...]] = []
    for block in _query_blocks(options, q.shape[3], k.shape[2], operands):
        if block.sees_nothing:
            shape = (*q.shape[:3], block.q1 - block.q0)
            results.append((zeros(*shape, v.shape[3]), zeros(*shape) - jnp.inf, zeros(*shape)))
            continue
        tile_mask, _ = _tile_mask(options, operands, block, kv_heads)
        queries = _after_earlier(results, q[:, :, :, block.queries])
        partial = tile.forward(options, queries, k[:, :, block.keys], v[:, :, block.keys], tile_mask)
        results.append(tile.normalize(*partial))
    o, lse, lse_low = (jnp.concatenate(blocks, axis=3) for blocks in zip(*results, strict=True))
    o = queries_from_heads(o)
    lse, lse_low = (queries_from_heads(x[..., None])[..., 0] for x in (lse, lse_low))
    return o, lse, lse_low


def backward(
    options: Options, residuals: QueryResiduals, k: Array, v: Array, operands: ExecutorOperands
) -> tuple[Array, Array, Array, Any]:
    """Gradients of `forward`.

    Args:
      options: Static settings of the executor.
      residuals: Residuals of the queries, [B, T, N, ...].
      k: Keys [B, S, K, H].
      v: Values [B, S, K, Hv].
      operands: Run-time operands of the executor.

    Returns:
      float32 (dq, dk, dv) in the shapes of q, k and v, and the gradient of operands.bias.
    """
    kv_heads = k.shape[2]
    scalars = [scalars_by_head(x, kv_heads) for x in (residuals.lse, residuals.lse_low, residuals.delta)]
    residuals = QueryResiduals(*(queries_by_head(x, kv_heads) for x in (residuals.q, residuals.do)), *scalars)
    # Made to depend on `do`, because XLA:CPU would otherwise share these copies with the forward pass and keep them in
    # between (50 MB a layer of 12 heads of size 64, for 8 x 512 tokens).
    k, v = (_wait_for(residuals.do, keys_by_head(x)) for x in (k, v))
    blocks = _query_blocks(options, residuals.q.shape[3], k.shape[2], operands)
    results: list[tuple[Array, ...]] = []
    db = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), operands.bias)
    for block in blocks:
        queries = _cut_residuals(residuals, block, results)
        if block.sees_nothing:
            results.append((zeros(*queries.q.shape), *(zeros(*x.shape[:2], x.shape[3], 0) for x in (k, v))))
            continue
        tile_mask, bias = _tile_mask(options, operands, block, kv_heads)
        *gradients, tile_db = tile.backward(options, queries, k[:, :, block.keys], v[:, :, block.keys], tile_mask)
        results.append(tuple(gradients))
        if bias is not None:
            db = tile.add_bias_gradient(db, bias, operands.bias, tile_db)
    dk, dv = (_add_spans([result[i] for result in results], blocks, k.shape[2]) for i in (1, 2))
    dq = jnp.concatenate([result[0] for result in results], axis=3)
    return queries_from_heads(dq), keys_from_gradient(dk), keys_from_gradient(dv), db


@dataclasses.dataclass(frozen=True)
class _QueryBlock:
    """Queries q0 <= i < q1 against keys k0 <= j < k1."""

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def queries(self) -> slice:
        return slice(self.q0, self.q1)

    @property
    def keys(self) -> slice:
        return slice(self.k0, self.k1)

    @property
    def sees_nothing(self) -> bool:
        return self.k0 == self.k1


def _query_blocks(
    options: Options, length: int, key_length: int, operands: ExecutorOperands
) -> tuple[_QueryBlock, ...]:
    """All query blocks, each with the span of keys that the mask reaches where that is known while tracing."""
    mask = _static_mask(options, operands)
    return _trimmed_blocks(mask, length, key_length, _block_size(options, mask))


def _static_mask(options: Options, operands: ExecutorOperands) -> Mask:
    """The mask as far as it is known while tracing."""
    return options.mask if operands.mask_is_static else Full()


def _block_size(options: Options, mask: Mask) -> int:
    """Number of queries in a block. mask: result of `_static_mask`."""
    assert not isinstance(options.block_size, tuple)
    return options.block_size or (cost_model.UNROLLED_FULL_BLOCK if mask == Full() else cost_model.UNROLLED_BLOCK)


@functools.lru_cache(maxsize=64)
def _trimmed_blocks(mask: Mask, length: int, key_length: int, size: int) -> tuple[_QueryBlock, ...]:
    """Query blocks of `size`, each with the smallest span of keys that holds all its visible keys."""
    blocks = []
    for q0 in range(0, length, size):
        q1 = min(q0 + size, length)
        seen = mask.at(np.arange(q0, q1)[:, None], np.arange(key_length)[None, :]).any(axis=0).nonzero()[0]
        blocks.append(_QueryBlock(q0, q1, int(seen[0]), int(seen[-1]) + 1) if seen.size else _QueryBlock(q0, q1, 0, 0))
    return tuple(blocks)


def _tile_mask(
    options: Options, operands: ExecutorOperands, block: _QueryBlock, kv_heads: int
) -> tuple[TileMask, Callable[[Any], Array] | None]:
    """The TileMask of a query block, and its bias as a function of operands.bias."""
    queries, keys = _cut_tokens(operands.queries, block.queries), _cut_tokens(operands.keys, block.keys)
    dense = None if operands.dense is None else _cut_pairs(split_heads(operands.dense, kv_heads), block)
    visible = tile.visible_pairs(options.mask, queries, keys, operands.lengths, dense)
    kept = None
    if operands.seed is not None:
        kept = tile.kept_weights(options, operands.seed, split_heads(operands.streams, kv_heads), queries, keys)
    if operands.bias is None:
        return TileMask(visible, kept), None

    def bias(operand: PyTree) -> Array:
        if options.bias_jaxpr is None:
            terms = tuple(_cut_pairs(x, block) for x in operand.terms)
            return split_heads(dataclasses.replace(operand, terms=terms).dense(), kv_heads)
        return tile.bias_of_function(options, operand, split_heads(operands.heads, kv_heads), queries, keys)

    return TileMask(visible, kept, bias(operands.bias)), bias


def _cut_tokens(tokens: TokenInfo, span: slice) -> TokenInfo:
    """The properties of a span of tokens; its indices are numpy, since they are known while tracing."""
    cut = jax.tree.map(lambda x: x[:, span], dataclasses.replace(tokens, index=None))
    return dataclasses.replace(cut, index=np.arange(span.start, span.stop)[None])


def _cut_pairs(x: Array, block: _QueryBlock) -> Array:
    """The part of [..., T, S], any axis of which may be 1, that belongs to a query block."""
    queries = slice(None) if x.shape[-2] == 1 else block.queries
    return x[..., queries, :] if x.shape[-1] == 1 else x[..., queries, block.keys]


def _cut_residuals(residuals: QueryResiduals, block: _QueryBlock, earlier: Sequence[Any]) -> QueryResiduals:
    """The residuals of a query block, computed after the blocks before the last one; see `_after_earlier`."""
    return QueryResiduals(
        _after_earlier(earlier, residuals.q[:, :, :, block.queries]),
        residuals.do[:, :, :, block.queries],
        residuals.lse[..., block.queries],
        residuals.lse_low[..., block.queries],
        residuals.delta[..., block.queries],
    )


def _after_earlier(results: Sequence[Any], queries: Array) -> Array:
    """`queries`, made to depend on the last but one of the earlier results.

    XLA:CPU would otherwise start all query blocks at once and hold the scores of all; it removes an optimization barrier
    before it schedules. Two blocks at a time keep all cores busy: one at a time costs 3 % of a training step.
    """
    return queries if len(results) < 2 else _wait_for(next(x for x in results[-2][::-1] if x.size), queries)


def _wait_for(done: Array, x: Array) -> Array:
    """`x`, made to depend on `done` by a condition that is never true but that XLA cannot fold."""
    return jnp.where(done.reshape(-1)[0] > jnp.inf, jnp.zeros((), x.dtype), x)


def _add_spans(gradients: Sequence[Array], blocks: Sequence[_QueryBlock], length: int) -> Array:
    """The sum of gradients [..., k1 - k0] of spans of keys: [..., length]. Slices and one concatenation, which XLA fuses."""
    edges = sorted({0, length, *(edge for block in blocks for edge in (block.k0, block.k1))})
    pieces = []
    for a, b in zip(edges, edges[1:], strict=False):
        covering = [
            gradient[..., a - block.k0 : b - block.k0]
            for gradient, block in zip(gradients, blocks, strict=True)
            if block.k0 <= a and b <= block.k1
        ]
        pieces.append(sum(covering[1:], covering[0]) if covering else zeros(*gradients[0].shape[:-1], b - a))
    return jnp.concatenate(pieces, axis=-1)
