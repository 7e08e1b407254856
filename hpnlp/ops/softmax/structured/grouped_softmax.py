"""Softmax over groups of words: each token is compared with the words of its label's group only.

Tokens are sorted by group, and the tokens of a group are taken in blocks, so that a block meets the words of one group in one
product. The number of tokens of a group differs from batch to batch, and shapes must not. A loop therefore runs over the
blocks that exist, and within a block a loop runs over windows of the group's words; both counts are known at run time only,
so that the work is that of the groups that occur. If JAX differentiated these loops, each turn would make a gradient of the
whole table. The derivative here is a second such loop, which adds the gradient of a window in its place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float, Int, PyTree

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.linear import widened
from hpnlp.ops.softmax.online_logsumexp import OnlineLogSumExp
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class TileShape:
    """Tokens of a block and words of a window: the size of one product."""

    tokens: int
    words: int


class _Operands(NamedTuple):
    """Arguments of the loss that have gradients, or their gradients; None where there is none."""

    bias: Any
    h: Any
    projection: Any
    w: Any


class _Grouping(NamedTuple):
    """Assignment of N tokens to blocks, and of words to G groups. All int32.

    Attributes:
      order: [N + tokens of a block] the tokens sorted by group; padding at the end.
      rank: [N] position of each token in `order`.
      first: [G + 1] position in `order` of the first token of each group.
      block_ends: [G] number of blocks of all groups up to and including each group.
      shift: [G] position in `order` of block b of group g is shift[g] + b * (tokens of a block).
      starts: [G + 1] first word of each group.
    """

    order: Array
    rank: Array
    first: Array
    block_ends: Array
    shift: Array
    starts: Array


@array_op("N", h="N")
def grouped_nll(
    h: Float[Array, "N D"],
    w: Float[Array, "R d"],
    groups: Int[Array, " N"],
    targets: Int[Array, " N"],
    starts: Int[Array, " G1"] | Int[np.ndarray, " G1"],
    *,
    bias: Float[Array, " R"] | None = None,
    projection: Float[Array, "d D"] | None = None,
    tile: TileShape,
) -> Float[Array, " N"]:
    """-log softmax of each token over the words of its group, at its target, in nats, float32.

    Gradients reach h, w, bias and projection by reverse mode, once; forward over reverse mode gives products with the Hessian.
    `jax.vmap` runs one example after another, each with a gradient of the table: flatten the tokens instead.

    Arguments are not checked here; callers do so.

    Args:
      h: [N, D] hidden states.
      w: [R, d] word vectors; group g has the rows starts[g] to starts[g + 1] - 1. d = D without a projection.
      groups: [N] group of each token; tokens whose group is outside 0 to G - 1 have loss 0.
      targets: [N] row of each token's word, within its group.
      starts: [G + 1] first row of each group, and R.
      bias: [R] added to the logits; None for no bias.
      projection: [d, D] applied to the states before the product with the words; None for none.
      tile: Largest size of one product.

    Returns:
      [N] losses.

    Cost:
      With the gradients 8 d operations for each pair of a group's tokens, rounded up to blocks, and words, rounded up to
      windows; groups without tokens cost nothing. Memory beside inputs and gradients: a few tiles, a copy of the gradient of
      h, and a float32 gradient of w where w is not float32; XLA:CPU also makes a float32 copy of a bfloat16 w. A float16 h
      is computed in float32, with copies: see `widened`.
    """
    if not h.shape[0]:
        return jnp.zeros(0, jnp.float32)
    h, w, projection = widened(h, w, projection)
    integers = [x.astype(jnp.int32) for x in (groups, jnp.asarray(starts), targets)]
    leaves, tree = jax.tree.flatten((_Operands(bias, h, projection, w), integers))
    operands, integers = jax.tree.unflatten(tree, vary_alike(*leaves))
    tile = TileShape(min(tile.tokens, h.shape[0]), min(tile.words, w.shape[0]))
    groups, first_rows, targets = integers
    return _nll(tile, operands, targets, _group_tokens(tile, groups, first_rows))


@accepts_numpy
def known_labels(labels: Int[Array, " N"], tokens: int, vocab: int) -> tuple[Int[Array, " N"], Bool[Array, " N"]]:
    """Separates labels that are words from those that are not.

    Args:
      labels: [N] ids.
      tokens: The N that is expected.
      vocab: Number of words.

    Returns:
      ([N] int32 labels with 0 in place of ids that are no words, [N] mask of the labels that are words).

    Raises:
      InputError: labels are not N integers, or an id that is known while tracing is no word.
    """
    if labels.shape != (tokens,) or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise InputError(f"labels are {labels.dtype} {labels.shape}: expected integers {(tokens,)}, each token's word")
    is_word = (labels >= 0) & (labels < vocab)
    if not isinstance(labels, Tracer):
        ids = np.asarray(labels)
        invalid = ids[(ids < 0) | (ids >= vocab)]
        if invalid.size:
            raise InputError(f"a label is {invalid[0]}: expected 0 to {vocab - 1}; mask tokens that have none")
    return jnp.where(is_word, labels, 0).astype(jnp.int32), is_word


@array_op()
def merge_top_k(
    best: Float[Array, " k"], ids: Int[Array, " k"], scores: Float[Array, " m"], score_ids: Int[Array, " m"]
) -> tuple[Float[Array, " k"], Int[Array, " k"]]:
    """Merges scores into the k best so far.

    Args:
      best: [k] best scores so far, of any order.
      ids: [k] their ids.
      scores: [m] scores.
      score_ids: [m] their ids.

    Returns:
      (scores [k], ids [k]) of the k highest of all, highest first.
    """
    values, at = lax.top_k(jnp.concatenate([best, scores]), best.shape[0])
    return values, jnp.concatenate([ids, score_ids.astype(ids.dtype)])[at]


def check_k(k: int, vocab: int) -> None:
    """Checks the number of words of a top-k search.

    Args:
      k: Number of words to return.
      vocab: Number of words.

    Raises:
      InputError: k is not 1 to vocab.
    """
    if not 1 <= k <= vocab:
        raise InputError(f"k {k}: expected 1 to {vocab}, the number of words")


def _group_tokens(tile: TileShape, groups: Array, starts: Array) -> _Grouping:
    count, n = starts.shape[0] - 1, groups.shape[0]
    groups = jnp.where((groups >= 0) & (groups < count), groups, count)
    order = jnp.argsort(groups).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(n, dtype=jnp.int32), unique_indices=True)
    first = jnp.searchsorted(groups[order], jnp.arange(count + 1, dtype=jnp.int32)).astype(jnp.int32)
    blocks = (jnp.diff(first) + tile.tokens - 1) // tile.tokens
    block_ends = jnp.cumsum(blocks, dtype=jnp.int32)
    shift = first[:-1] - tile.tokens * (block_ends - blocks)
    return _Grouping(jnp.pad(order, (0, tile.tokens)), rank, first, block_ends, shift, starts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(tile: TileShape, operands: _Operands, targets: Array, grouping: _Grouping) -> Array:
    return _nll_forward(tile, operands, targets, grouping)[0]


@accepts_numpy
def _nll_forward(tile: TileShape, operands: _Operands, targets: Array, grouping: _Grouping) -> tuple[Array, Any]:
    losses, lses = sequential_vmap(functools.partial(_losses, tile))(operands, targets, grouping)
    has_group = grouping.rank < grouping.first[-1]
    return jnp.where(has_group, losses[grouping.rank], 0.0), (operands, targets, grouping, losses, lses)


def _nll_backward(tile: TileShape, saved: PyTree, cotangent: Array) -> tuple[_Operands, None, None]:
    return sequential_vmap(functools.partial(_gradients, tile))(*saved, cotangent), None, None


_nll.defvjp(_nll_forward, _nll_backward)


def _losses(tile: TileShape, operands: _Operands, targets: Array, grouping: _Grouping) -> tuple[Array, Array]:
    """Losses and log-sum-exps in the order of `grouping.order`.

    A block may write beyond its group; the blocks of later groups overwrite this.
    """

    def block(number: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        group, position, tokens, _ = _block_tokens(tile, grouping, number)
        x = _project(operands, operands.h[tokens])

        def window(number: Array, sums: tuple[OnlineLogSumExp, Array]) -> tuple[OnlineLogSumExp, Array]:
            other_lse, target = sums
            _, s, is_target = _logits(tile, operands, grouping, group, number, x, targets[tokens])
            other_lse = other_lse.add(jnp.where(is_target, -jnp.inf, s))
            return other_lse, target + jnp.where(is_target, s, 0.0).sum(axis=1)

        zero = _zeros(operands, tile.tokens)
        windows = _windows(tile, grouping, group)
        other_lse, target = lax.fori_loop(jnp.int32(0), windows, window, (OnlineLogSumExp.empty(zero), zero))
        other_lse = other_lse.value()
        # The label is kept apart from the other words: lse - target would round to 0 for a confident token.
        results = jax.nn.softplus(other_lse - target), jnp.logaddexp(other_lse, target)
        losses, lses = (lax.dynamic_update_slice(x, y, (position,)) for x, y in zip(out, results, strict=True))
        return losses, lses

    empty = _zeros(operands, grouping.order.shape[0])
    return lax.fori_loop(jnp.int32(0), grouping.block_ends[-1], block, (empty, empty))


def _gradients(
    tile: TileShape,
    operands: _Operands,
    targets: Array,
    grouping: _Grouping,
    losses: Array,
    lses: Array,
    cotangent: Array,
) -> _Operands:
    """Gradients of the operands; losses and lses are those of `_losses`, and the cotangent [N] is in the order of tokens."""
    h, projection = operands.h, operands.projection

    def block(number: Array, carry: tuple[Array, _Operands]) -> tuple[Array, _Operands]:
        dh, sums = carry
        group, position, tokens, in_group = _block_tokens(tile, grouping, number)
        tokens_h = jnp.where(in_group[:, None], h[tokens], jnp.zeros((), h.dtype))
        x = _project(operands, tokens_h)
        loss, lse = (lax.dynamic_slice(x, (position,), (tile.tokens,))[:, None] for x in (losses, lses))

        def window(number: Array, carry: tuple[Array, _Operands]) -> tuple[Array, _Operands]:
            dx, sums = carry
            row, s, is_target = _logits(tile, operands, grouping, group, number, x, targets[tokens])
            ds = jnp.where(is_target, jnp.expm1(-loss), jnp.exp(s - lse)) * cotangent[tokens][:, None]
            ds = jnp.where(in_group[:, None], ds, 0.0)
            narrow = ds.astype(h.dtype)
            sums = sums._replace(w=_add(sums.w, row, _dot(narrow, x, 0, 0)))
            if operands.bias is not None:
                sums = sums._replace(bias=_add(sums.bias, row, ds.sum(axis=0)))
            return dx + _dot(narrow, _slice(tile, operands.w, row).astype(h.dtype), 1, 0), sums

        windows = _windows(tile, grouping, group)
        dx, sums = lax.fori_loop(jnp.int32(0), windows, window, (_zeros(operands, *x.shape), sums))
        if projection is not None:
            narrow = dx.astype(h.dtype)
            sums = sums._replace(projection=sums.projection + _dot(narrow, tokens_h, 0, 0))
            dx = _dot(narrow, projection.astype(h.dtype), 1, 0)
        return lax.dynamic_update_slice(dh, dx.astype(h.dtype), (position, jnp.int32(0))), sums

    sums = jax.tree.map(lambda x: _zeros(operands, *x.shape), operands._replace(h=None))
    dh = _zeros(operands, grouping.order.shape[0], h.shape[1]).astype(h.dtype)
    dh, sums = lax.fori_loop(jnp.int32(0), grouping.block_ends[-1], block, (dh, sums))
    dh = dh[grouping.rank]
    return jax.tree.map(lambda dx, x: dx.astype(x.dtype), sums, operands._replace(h=None))._replace(h=dh)


def _block_tokens(tile: TileShape, grouping: _Grouping, number: Array) -> tuple[Array, Array, Array, Array]:
    """(group of a block, position of its first token in `order`, its tokens, mask of those that are in the group)."""
    group = jnp.sum(grouping.block_ends <= number, dtype=jnp.int32)
    position = grouping.shift[group] + number * tile.tokens
    in_group = position + jnp.arange(tile.tokens, dtype=jnp.int32) < grouping.first[group + 1]
    return group, position, lax.dynamic_slice(grouping.order, (position,), (tile.tokens,)), in_group


def _windows(tile: TileShape, grouping: _Grouping, group: Array) -> Array:
    """Number of windows over the words of a group."""
    return (grouping.starts[group + 1] - grouping.starts[group] + tile.words - 1) // tile.words


def _logits(
    tile: TileShape,
    operands: _Operands,
    grouping: _Grouping,
    group: Array,
    number: Array,
    x: Array,
    targets: Array,
) -> tuple[Array, Array, Array]:
    """(first row of a window, logits [tokens, words] with -inf for rows of other groups and windows, mask of the targets)."""
    w, bias = operands.w, operands.bias
    begin = grouping.starts[group] + number * tile.words
    row = jnp.minimum(begin, w.shape[0] - tile.words)  # a window that would pass the end of the table begins earlier
    rows = row + jnp.arange(tile.words, dtype=jnp.int32)
    s = _dot(x, _slice(tile, w, row).astype(x.dtype), 1, 1)
    if bias is not None:
        s = s + _slice(tile, bias, row).astype(jnp.float32)[None]
    in_window = ((rows >= begin) & (rows < grouping.starts[group + 1]))[None]
    return row, jnp.where(in_window, s, -jnp.inf), in_window & (rows[None] == targets[:, None])


def _project(operands: _Operands, h: Array) -> Array:
    projection = operands.projection
    return h if projection is None else _dot(h, projection.astype(h.dtype), 1, 1).astype(h.dtype)


def _zeros(operands: _Operands, *shape: int) -> Array:
    """float32 zeros that in `jax.shard_map` vary over all mesh axes that the operands vary over."""
    return vary_alike(jnp.zeros(shape, jnp.float32), operands.h)[0]


def _slice(tile: TileShape, x: Array, row: Array) -> Array:
    return lax.dynamic_slice_in_dim(x, row, tile.words)


def _add(table: Array, row: Array, block: Array) -> Array:
    """The table with the block added to its rows from `row` on."""
    block = lax.dynamic_slice_in_dim(table, row, block.shape[0]) + block
    return lax.dynamic_update_slice_in_dim(table, block, row, 0)


def _dot(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)
