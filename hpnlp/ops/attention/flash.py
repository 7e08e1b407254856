"""Blockwise attention whose memory grows with the sequence, not with its square.

The forward pass keeps (o, lse); the backward pass computes each block of probabilities again. Two drivers share the
arithmetic of a tile. Short sequences run as panels: a Python loop over blocks of queries, each against the one span of
keys that its mask reaches. Long ones run as one loop over the pairs of a query block and a key block that the mask lets meet.

What decides the speed on a CPU, so that it is not lost again:
- Every product has the form [rows, inner] x [inner, columns], both row-major. XLA:CPU runs the form with a transposed
  left side, which `p^T do` and `ds^T q` would have, four times slower at these sizes. So q, k, v and do are laid out
  both ways, which is cheap, and the gradients of k and v come out transposed.
- Hidden scores become -inf before the exponential, so that one fused pass reads scores and writes probabilities.
- The batch is not cut into groups that fit a cache: one large batched product keeps all cores busy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention import tile
from hpnlp.ops.attention.algebra import Mask
from hpnlp.ops.attention.dropout import seed_words
from hpnlp.ops.attention.mask import Full
from hpnlp.ops.attention.tile import Given, Options, Side
from hpnlp.ops.manual import vary_alike

PANEL_ROWS = 128
LOOP_BLOCK = 256
# Up to so many panels and query-key pairs the panel driver runs. A quarter faster at T = S = 512, even at 1024; every
# panel adds to the program, and holds a gradient of the keys it reaches.
MOST_PANELS = 8
PANEL_PAIRS = 1024 * 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Facts:
    """The run-time operands: what is known of queries and keys, the keys' lengths [B], the dropout seed; and how many
    queries there are, where blocks are padded beyond them."""

    rows: Side
    columns: Side
    lengths: Any
    seed: Any
    queries: int | None = dataclasses.field(default=None, metadata={"static": True})


def flash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask = Full(),  # noqa: B008  (frozen)
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    kv_positions: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    return_lse: bool = False,
    block_size: int | None = None,
) -> Array | tuple[Array, Array]:
    """Attention by blocks with an online softmax; arguments and results as `attend`, which validates them.

    Blocks that the static mask rules out are not visited, unless positions are given. Cost: O(B N T S H) time less the
    blocks left out; O(B N H (T + S)) memory and the scores of one block of queries, and in the backward pass, as long as
    T S is at most 1024 x 1024, a gradient of the keys for each of up to 8 panels. Second derivatives work, in more memory;
    forward-mode ones do not. Inside `shard_map`, dropout counts batch and heads from 0 in each shard: fold the shard's
    index into `rng`.
    Source: Dao et al. 2022, "FlashAttention", algorithms 1 and 2.
    """
    options = Options(mask, q.shape[-1] ** -0.5 if scale is None else scale, dropout_rate, block_size)
    facts = _Facts(
        Side(None, positions, segment_ids),
        Side(None, kv_positions, kv_segment_ids),
        kv_lengths,
        seed_words(rng) if dropout_rate and rng is not None else None,
    )
    if 0 in (*q.shape, *k.shape, *v.shape):  # nothing to see, or nobody to see it
        out, lse = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), jnp.full(q.shape[:3], -jnp.inf)
        return (out, lse) if return_lse else out
    leaves, form = jax.tree.flatten(facts)
    q, k, v, *leaves = vary_alike(q, k, v, *leaves)
    both: Any = _flash(options, q, k, v, jax.tree.unflatten(form, leaves))
    out, lse = both
    return (out, lse) if return_lse else out


def _flash_forward(options: Options, q: Array, k: Array, v: Array, facts: _Facts) -> tuple[tuple[Array, Array], Any]:
    forward = _panels_forward if _as_panels(options, q, k) else _loop_forward
    o, lse = forward(options, q, k, v, facts)
    o = _from_rows(o).astype(q.dtype)
    lse = lse.reshape(lse.shape[0], -1, lse.shape[-1]).swapaxes(1, 2)
    return (o, lse), (q, k, v, facts, o, lse)


def _flash_backward(options: Options, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    q, k, v, facts, o, lse = saved
    do, dlse = cotangents
    kv_heads = k.shape[2]
    nothing = jnp.isneginf(lse)  # rows that see nothing, whose dlse may be anything
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1) - jnp.where(nothing, 0.0, dlse)
    per_row = lambda x: x.swapaxes(1, 2).reshape(x.shape[0], kv_heads, -1, x.shape[1])  # noqa: E731
    lse = jnp.where(nothing, jnp.inf, lse)
    given = Given(
        _rows(q, kv_heads),
        _columns(q, kv_heads),
        _rows(do, kv_heads),
        _columns(do, kv_heads),
        per_row(lse),
        per_row(delta),
    )
    backward = _panels_backward if _as_panels(options, q, k) else _loop_backward
    dq, dk, dv = backward(options, given, k, v, facts)
    return _from_rows(dq).astype(q.dtype), _from_columns(dk).astype(k.dtype), _from_columns(dv).astype(v.dtype), None


def _as_panels(options: Options, q: Array, k: Array) -> bool:
    panels = -(-q.shape[1] // (options.block_size or PANEL_ROWS))
    return panels <= MOST_PANELS and q.shape[1] * k.shape[1] <= PANEL_PAIRS


def _rows(x: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B K G T H"]:
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[3]).transpose(0, 2, 3, 1, 4)


def _columns(x: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B K H G T"]:
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[3]).transpose(0, 2, 4, 3, 1)


def _key_rows(x: Float[Array, "B S K H"]) -> Float[Array, "B K S H"]:
    return x.transpose(0, 2, 1, 3)


def _key_columns(x: Float[Array, "B S K H"]) -> Float[Array, "B K H S"]:
    return x.transpose(0, 2, 3, 1)


def _from_rows(x: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[4])


def _from_columns(x: Float[Array, "B K H S"]) -> Float[Array, "B S K H"]:
    return x.transpose(0, 3, 1, 2)


@dataclasses.dataclass(frozen=True)
class _Panel:
    """Queries q0 <= i < q1 against keys k0 <= j < k1."""

    q0: int
    q1: int
    k0: int
    k1: int


def _panels(options: Options, length: int, keys: int, by_index: bool) -> list[_Panel]:
    """One panel a block of queries, its keys trimmed to what the mask reaches where that is known while tracing."""
    block = options.block_size or PANEL_ROWS
    panels = []
    for q0 in range(0, length, block):
        q1, k0, k1 = min(q0 + block, length), 0, keys
        if by_index:
            starts = [j for j in range(0, keys, block) if options.mask.tile(q0, q1 - 1, j, min(j + block, keys) - 1)[0]]
            k0, k1 = (starts[0], min(starts[-1] + block, keys)) if starts else (0, 0)
            seen = options.mask.at(np.arange(q0, q1)[:, None], np.arange(k0, k1)[None, :]).any(axis=0).nonzero()[0]
            k0, k1 = (k0 + int(seen[0]), k0 + int(seen[-1]) + 1) if seen.size else (0, 0)
        panels.append(_Panel(q0, q1, k0, k1))
    return panels


def _cut(side: Side, start: int, stop: int) -> Side:
    part = lambda x: None if x is None else x[:, start:stop]  # noqa: E731
    return Side(np.arange(start, stop), part(side.position), part(side.segment))


def _panel_tile(options: Options, facts: _Facts, panel: _Panel, heads: tuple[int, ...]) -> tuple[Any, Any]:
    """(visible, kept) of a panel; heads: B, K, G."""
    rows, columns = _cut(facts.rows, panel.q0, panel.q1), _cut(facts.columns, panel.k0, panel.k1)
    see = tile.visible(options.mask, rows, columns, facts.lengths)
    if facts.seed is None:
        return see, None
    return see, tile.keep(options, facts.seed, rows, columns, (*heads, panel.q1 - panel.q0, panel.k1 - panel.k0))


def _after(parts: list[Any], queries: Array) -> Array:
    """`queries`, which are not there before the last but one of `parts` is.

    XLA:CPU would begin all panels at once, and hold the scores of all; a barrier it removes before it schedules. Two at a
    time keep all cores busy: one by one costs a thirtieth of a training step.
    """
    if len(parts) < 2:
        return queries
    never = parts[-2][1].reshape(-1)[0] > jnp.inf
    return jnp.where(never, jnp.zeros((), queries.dtype), queries)


def _panels_forward(options: Options, q: Array, k: Array, v: Array, facts: _Facts) -> tuple[Array, Array]:
    q, k, v = _rows(q, k.shape[2]), _key_columns(k), _key_rows(v)
    parts = []
    for panel in _panels(options, q.shape[3], k.shape[3], facts.rows.position is None):
        see, kept = _panel_tile(options, facts, panel, q.shape[:3])
        rows, span = slice(panel.q0, panel.q1), slice(panel.k0, panel.k1)
        if panel.k0 == panel.k1:
            shape = (*q.shape[:3], panel.q1 - panel.q0)
            parts.append((jnp.zeros((*shape, v.shape[3])), jnp.full(shape, -jnp.inf)))
        else:
            queries = _after(parts, q[:, :, :, rows])
            parts.append(tile.finish(*tile.forward(options, queries, k[..., span], v[:, :, span], see, kept)))
    return jnp.concatenate([o for o, _ in parts], axis=3), jnp.concatenate([lse for _, lse in parts], axis=3)


def _panels_backward(options: Options, given: Given, k: Array, v: Array, facts: _Facts) -> tuple[Array, Array, Array]:
    k_rows, k, v = _key_rows(k), _key_columns(k), _key_columns(v)
    panels = _panels(options, given.q.shape[3], k.shape[3], facts.rows.position is None)
    parts = []
    for panel in panels:
        see, kept = _panel_tile(options, facts, panel, given.q.shape[:3])
        rows, span = slice(panel.q0, panel.q1), slice(panel.k0, panel.k1)
        part = Given(
            _after(parts, given.q[:, :, :, rows]),
            given.q_columns[..., rows],
            given.do[:, :, :, rows],
            given.do_columns[..., rows],
            given.lse[..., rows],
            given.delta[..., rows],
        )
        if panel.k0 == panel.k1:
            parts.append((jnp.zeros(part.q.shape), jnp.zeros((*k.shape[:3], 0)), jnp.zeros((*v.shape[:3], 0))))
        else:
            parts.append(tile.backward(options, part, k_rows[:, :, span], k[..., span], v[..., span], see, kept))
    spans = [(panel.k0, panel.k1) for panel in panels]
    dk, dv = (_add_spans([part[i] for part in parts], spans, k.shape[3]) for i in (1, 2))
    return jnp.concatenate([part[0] for part in parts], axis=3), dk, dv


def _add_spans(parts: Sequence[Array], spans: Sequence[tuple[int, int]], length: int) -> Array:
    """The sum of arrays that each cover a span of the last axis; slices and one concatenation, which XLA fuses."""
    cuts = sorted({0, length, *(edge for span in spans for edge in span)})
    pieces = []
    for a, b in zip(cuts, cuts[1:], strict=False):
        over = [part[..., a - k0 : b - k0] for part, (k0, k1) in zip(parts, spans, strict=True) if k0 <= a and b <= k1]
        pieces.append(sum(over[1:], over[0]) if over else jnp.zeros((*parts[0].shape[:-1], b - a)))
    return jnp.concatenate(pieces, axis=-1)


def _blocks(x: Array, axis: int, block: int) -> Array:
    """Cuts `axis` into blocks, padded with zeros, and puts the number of the block in front."""
    axis %= x.ndim
    count = -(-x.shape[axis] // block)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, count * block - x.shape[axis])
    x = jnp.pad(x, padding)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :]), axis, 0)


def _unblock(x: Array, axis: int, length: int) -> Array:
    """Undoes `_blocks`."""
    axis %= x.ndim - 1
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis)


def _side_blocks(side: Side, length: int, block: int) -> Side:
    cut = lambda x: None if x is None else _blocks(x, 1, block)  # noqa: E731
    # Counted on through the padding, so that its keys lie beyond every length.
    index = jnp.arange(-(-length // block) * block, dtype=jnp.int32).reshape(-1, block)
    return Side(index, cut(side.position), cut(side.segment))


def _visits(options: Options, length: int, keys: int, block: int, by_index: bool) -> Array:
    """int32 [visits, 2]: the pairs of a block of queries and a block of keys that the mask does not rule out."""
    edges = lambda n: [(i, min(i + block, n) - 1) for i in range(0, n, block)]  # noqa: E731
    some = lambda q, k: not by_index or options.mask.tile(*q, *k)[0]  # noqa: E731
    pairs = [(i, j) for i, q in enumerate(edges(length)) for j, k in enumerate(edges(keys)) if some(q, k)]
    return jnp.asarray(np.array(pairs, np.int32).reshape(-1, 2))


def _loop_tile(options: Options, facts: _Facts, rows: Side, columns: Side, heads: tuple[int, ...]) -> tuple[Any, Any]:
    see = tile.visible(options.mask, rows, columns, facts.lengths)
    if facts.queries is not None:  # the last block's padding sees nothing, not even what is in its own segment
        see = see & (rows.index < facts.queries)[None, :, None]
    if facts.seed is None:
        return see, None
    shape = (*heads, rows.index.shape[0], columns.index.shape[0])
    return see, tile.keep(options, facts.seed, rows, columns, shape)


def _take(tree: Any, i: Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(tree: Any, i: Array, new: Any) -> Any:
    return jax.tree.map(lambda x, part: lax.dynamic_update_index_in_dim(x, part, i, 0), tree, new)


def _loop_facts(facts: _Facts, batch: int, length: int, keys: int, block: int) -> _Facts:
    """facts with both sides in blocks, and lengths that hide the padding of the last blocks."""
    lengths = jnp.full((batch,), keys, jnp.int32) if facts.lengths is None else jnp.minimum(facts.lengths, keys)
    rows, columns = _side_blocks(facts.rows, length, block), _side_blocks(facts.columns, keys, block)
    return _Facts(rows, columns, lengths, facts.seed, length if length % block else None)


def _loop_forward(options: Options, q: Array, k: Array, v: Array, facts: _Facts) -> tuple[Array, Array]:
    block = options.block_size or LOOP_BLOCK
    batch, length, keys = q.shape[0], q.shape[1], k.shape[1]
    visits = _visits(options, length, keys, block, facts.rows.position is None)
    facts = _loop_facts(facts, batch, length, keys, block)
    q_blocks = _blocks(_rows(q, k.shape[2]), 3, block)
    key_blocks = (_blocks(_key_columns(k), 3, block), _blocks(_key_rows(v), 2, block), facts.columns)

    def visit(sums: Any, pair: Array) -> tuple[Any, None]:
        q, rows = _take((q_blocks, facts.rows), pair[0])
        k, v, columns = _take(key_blocks, pair[1])
        see, kept = _loop_tile(options, facts, rows, columns, q.shape[:3])
        part = tile.forward(options, q, k, v, see, kept)
        return _put(sums, pair[0], tile.join(_take(sums, pair[0]), part)), None

    blank = jnp.zeros_like(q_blocks[..., 0], jnp.float32)
    weighted = jnp.zeros_like(q_blocks[..., :1], jnp.float32) + jnp.zeros((1,) * 5 + (v.shape[3],))
    sums, _ = lax.scan(visit, (blank + tile.FLOOR, blank, weighted), visits)
    o, lse = tile.finish(*sums)
    return _unblock(o, 3, length), _unblock(lse, 3, length)


def _loop_backward(options: Options, given: Given, k: Array, v: Array, facts: _Facts) -> tuple[Array, Array, Array]:
    block = options.block_size or LOOP_BLOCK
    batch, length, keys = k.shape[0], given.q.shape[3], k.shape[1]
    visits = _visits(options, length, keys, block, facts.rows.position is None)
    facts = _loop_facts(facts, batch, length, keys, block)
    row_axes = Given(3, 4, 3, 4, 3, 3)
    given_blocks = jax.tree.map(lambda x, axis: _blocks(x, axis, block), given, row_axes)
    k_blocks, v_blocks = _blocks(_key_columns(k), 3, block), _blocks(_key_columns(v), 3, block)
    key_blocks = (_blocks(_key_rows(k), 2, block), k_blocks, v_blocks, facts.columns)

    def visit(sums: Any, pair: Array) -> tuple[Any, None]:
        part, rows = _take((given_blocks, facts.rows), pair[0])
        k_rows, k, v, columns = _take(key_blocks, pair[1])
        see, kept = _loop_tile(options, facts, rows, columns, part.q.shape[:3])
        found = tile.backward(options, part, k_rows, k, v, see, kept)
        places = (pair[0], pair[1], pair[1])
        return tuple(_put(x, i, _take(x, i) + new) for x, i, new in zip(sums, places, found, strict=True)), None

    zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (given_blocks.q, k_blocks, v_blocks))
    (dq, dk, dv), _ = lax.scan(visit, zeros, visits)
    return _unblock(dq, 3, length), _unblock(dk, 3, keys), _unblock(dv, 3, keys)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(options: Options, q: Array, k: Array, v: Array, facts: _Facts) -> tuple[Array, Array]:
    return _flash_forward(options, q, k, v, facts)[0]


_flash.defvjp(_flash_forward, _flash_backward)
