"""Long sequences: one loop over the visits of a block plan, in tiles that fit the caches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from hpnlp.ops.attention.block_sparse import cost_model, tile
from hpnlp.ops.attention.block_sparse.operands import (
    Operands,
    add_bias,
    bias_tile,
    by_key_head,
    from_blocks,
    to_blocks,
    zeros,
)  # fmt: skip
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule, TileGroup
from hpnlp.ops.attention.block_sparse.tile import Options, QueryResiduals, TileMask, TokenInfo
from hpnlp.ops.custom_vjp import tied, vary_alike

# No index counts from the end, and the block -1, which is none, may be any: what jax adds for each index to be on the safe
# side would be half of all operations that are traced here.
SLICE: Any = {"allow_negative_indices": False}
THERE: Any = {"mode": "clip", "wrap_negative_indices": False}


def forward(
    options: Options, q: Array, k: Array, v: Array, facts: Operands, blocks: BlockSchedule
) -> tuple[Array, Array, Array]:
    """(o `[B, T, N, Hv]`, lse and rest `[B, T, N]`), float32."""
    group, facts = q.shape[2] // k.shape[2], tied(facts, q)

    def one(chunk: _Chunk, sums: Any) -> Any:
        part = chunk.cut(q, group), chunk.cut(k), chunk.cut(v), chunk.facts(facts, group)
        found = _forward(options, *part, blocks)
        return tuple(chunk.put(x, new, group) for x, new in zip(sums, found, strict=True))

    blank = zeros(*q.shape[:3], v.shape[3]), zeros(*q.shape[:3]), zeros(*q.shape[:3])
    return _each(one, vary_alike(*blank, q)[:3], q, k, blocks)


def backward(
    options: Options, rows: tuple[Array, ...], k: Array, v: Array, facts: Operands, blocks: BlockSchedule
) -> tuple[Array, Array, Array, Any]:
    """(dq, dk, dv) as q, k and v and d bias, float32. rows: q, do `[B, T, N, .]`, lse, rest and delta `[B, T, N]`."""
    q = rows[0]
    group, facts = q.shape[2] // k.shape[2], tied(facts, q)

    def one(chunk: _Chunk, sums: Any) -> Any:
        part = tuple(chunk.cut(x, group) for x in rows)
        *found, by_bias = _backward(options, part, chunk.cut(k), chunk.cut(v), chunk.facts(facts, group), blocks)
        new = tuple(chunk.put(x, y, per) for x, y, per in zip(sums, found, (group, 1, 1), strict=False))
        if options.bias is not None or facts.bias is None:
            return (*new, jax.tree.map(jnp.add, sums[3], by_bias))
        return (*new, chunk.put(sums[3], chunk.cut(sums[3], group, 1) + by_bias, group, 1))

    blank = [zeros(*x.shape) for x in (q, k, v)]
    bias = [zeros(*x.shape) for x in jax.tree.leaves(facts.bias)]
    *blank, _ = vary_alike(*blank, *bias, q)
    return _each(one, (*blank[:3], jax.tree.unflatten(jax.tree.structure(facts.bias), blank[3:])), q, k, blocks)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """The batch rows from `row` on, `rows` of them, and the key heads from `head` on; all of both where row is None."""

    row: Any
    head: Any
    rows: int
    heads: int

    def _at(self, x: Array, per: int, axis: int) -> tuple[list[Any], list[int]]:
        start, size = [jnp.int32(0)] * x.ndim, list(x.shape)
        if x.shape[0] > 1:
            start[0], size[0] = self.row, self.rows
        if axis < x.ndim and x.shape[axis] > 1:
            start[axis], size[axis] = self.head * per, self.heads * per
        return start, size

    def cut(self, x: Array, per: int = 1, axis: int = 2) -> Array:
        """The chunk of an array with `per` heads a key head on `axis`; an axis of 1 stays."""
        return x if self.row is None else lax.dynamic_slice(x, *self._at(x, per, axis), **SLICE)

    def put(self, x: Array, new: Array, per: int = 1, axis: int = 2) -> Array:
        """Undoes `cut`."""
        return new if self.row is None else lax.dynamic_update_slice(x, new, self._at(x, per, axis)[0], **SLICE)

    def facts(self, facts: Operands, per: int) -> Operands:
        """The chunk of the operands."""
        if self.row is None:
            return facts
        batch = {name: getattr(facts, name) for name in ("rows", "columns", "lengths")}
        heads = {name: getattr(facts, name) for name in ("heads", "names", "dense")}
        heads |= {"bias": facts.bias} if isinstance(facts.bias, jax.Array) else {}
        batch = jax.tree.map(lambda x: self.cut(x, axis=9), batch)
        return dataclasses.replace(facts, **batch, **jax.tree.map(lambda x: self.cut(x, per, 1), heads))


def laid(q: Array, k: Array) -> int:
    """How many (batch, query head) are laid out at a time."""
    rows, some = _fitting(q, k, q.shape[0] * k.shape[2])
    return rows * some * (q.shape[2] // k.shape[2])


def _fitting(q: Array, k: Array, most: int) -> tuple[int, int]:
    """How many rows of the batch and key heads go together: at most `most`, and no more than may be laid out."""
    batch, heads, group = q.shape[0], k.shape[2], q.shape[2] // k.shape[2]
    mesh = jax.sharding.get_abstract_mesh()
    sharded = mesh.size > 1 and not all(kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types)
    # An axis that is spread over devices cannot be gone along, and larger devices want all of it.
    if sharded or jax.default_backend() != "cpu":
        return batch, heads
    most = min(most, cost_model.LAID // (group * max(q.shape[1], k.shape[1]) * q.shape[3]))
    largest = lambda n, bound: max(i for i in range(1, n + 1) if n % i == 0 and i <= max(bound, 1))  # noqa: E731
    return largest(batch, most // heads), largest(heads, most)


def _each(one: Callable[..., Any], sums: Any, q: Array, k: Array, blocks: BlockSchedule) -> Any:
    """`one(chunk, sums)` for chunks of batch and heads whose tiles fit the caches, after each other."""
    batch, heads, group = q.shape[0], k.shape[2], q.shape[2] // k.shape[2]
    pairs = max((v.keys[0].size for v in blocks.visits), default=1) * blocks.block * blocks.key_block
    rows, some = _fitting(q, k, cost_model.TILE // (group * pairs))
    if (rows, some) == (batch, heads):
        return one(_Chunk(None, None, batch, heads), sums)

    def step(sums: Any, i: Array) -> tuple[Any, None]:
        return one(_Chunk(i // (heads // some) * rows, i % (heads // some) * some, rows, some), sums), None

    numbers = tied(jnp.arange(batch // rows * (heads // some), dtype=jnp.int32), q)
    return lax.scan(step, sums, numbers)[0]


def _blocks(x: Array, axis: int, block: int, fill: Any = 0) -> Array:
    """Cuts `axis` into blocks, padded at the end, and puts the number of the block in front."""
    axis %= x.ndim
    count = -(-x.shape[axis] // block)
    if count * block != x.shape[axis]:
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, count * block - x.shape[axis])
        x = jnp.pad(x, padding, constant_values=fill)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, block, *x.shape[axis + 1 :]), axis, 0)


def _unblock(x: Array, axis: int, length: int) -> Array:
    """Undoes `_blocks`."""
    axis %= x.ndim - 1
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis)


def _take_rows(tree: Any, first: Array, run: int) -> Any:
    start = _start(first, tree)
    return jax.tree.map(lambda x: lax.dynamic_slice(x, start[: x.ndim], (run, *x.shape[1:]), **SLICE), tree)


def _put_rows(tree: Any, first: Array, new: Any) -> Any:
    start = _start(first, tree)
    return jax.tree.map(lambda x, part: lax.dynamic_update_slice(x, part, start[: x.ndim], **SLICE), tree, new)


def _start(first: Array, tree: Any) -> tuple[Array, ...]:
    """Where slices of arrays begin that have `first` on their first axis."""
    zero, *_ = vary_alike(jnp.int32(0), first)
    return (first, *[zero] * (max(x.ndim for x in jax.tree.leaves(tree)) - 1))


def _take_keys(x: Array, keys: Array, axis: int) -> Array:
    """The blocks `keys` `[R, w]` of `[blocks, ...]`, side by side on `axis` (-1 or -2): `[R, ...]`."""
    found = jnp.moveaxis(x.at[keys].get(**THERE), 1, axis - 1)
    return found.reshape(*found.shape[: axis - 1], -1, *([] if axis == -1 else found.shape[axis + 1 :]))


def _add_keys(x: Array, keys: Array, new: Array) -> Array:
    """x `[blocks, ..., kb]` with the parts of new `[R, ..., w * kb]` added at the blocks `keys`; what is at -1 is 0.

    Not by updating a slice, where one block would do: XLA:CPU then copies all of x at every other visit.
    """
    run, width = keys.shape
    new = jnp.moveaxis(new.reshape(*new.shape[:-1], width, x.shape[-1]), -2, 1)
    return x.at[keys].add(new, **THERE)


def _side(side: TokenInfo, block: int) -> TokenInfo:
    index = to_blocks(side.index, block, fill=-1)
    return dataclasses.replace(jax.tree.map(lambda x: to_blocks(x, block), side), index=index)


class _Square:
    """An operand `[B, K, G, T, S]`, of which any axis may be 1, in blocks of both lengths."""

    def __init__(self, x: Array, block: int, key_block: int) -> None:
        self.shape = x.shape
        x = _blocks(x, 3, block if x.shape[3] > 1 else 1)
        x = _blocks(x, 5, key_block if self.shape[4] > 1 else 1)
        self.blocks = x.swapaxes(0, 1)  # [row blocks, key blocks, B, K, G, r, c]

    def _places(self, first: Array, keys: Array) -> tuple[Array, Array]:
        rows = first + jnp.arange(keys.shape[0], dtype=jnp.int32)[:, None]
        return rows if self.shape[3] > 1 else rows * 0, jnp.maximum(keys, 0) if self.shape[4] > 1 else keys[:, :1] * 0

    def take(self, first: Array, keys: Array) -> Array:
        """`[R, B, K, G, r, w * c]`, an axis of 1 for one of 1."""
        found = jnp.moveaxis(self.blocks.at[self._places(first, keys)].get(**THERE), 1, -2)
        return found.reshape(*found.shape[:-2], -1)

    def add(self, sums: Array, first: Array, keys: Array, new: Array) -> Array:
        """sums, shaped as `blocks`, with `new [R, B, K, G, r, w * c]` added where `take` would find it."""
        target = (keys.shape[0], *self.shape[:3], *self.blocks.shape[5:])
        new = new.sum(axis=tuple(i for i in range(5) if target[i] == 1 != new.shape[i]), keepdims=True)
        new = (
            new.reshape(*new.shape[:-1], keys.shape[1], -1)
            if self.shape[4] > 1
            else new.sum(-1, keepdims=True)[..., None]
        )
        return sums.at[self._places(first, keys)].add(jnp.moveaxis(new, -2, 1), **THERE)

    def whole(self, sums: Array) -> Array:
        """Undoes the cutting: `[B, K, G, T, S]`."""
        return _unblock(_unblock(sums.swapaxes(0, 1), 5, self.shape[4]), 3, self.shape[3])


class _Pairs:
    """What decides about the pairs of each visit of a chunk."""

    def __init__(self, options: Options, facts: Operands, blocks: BlockSchedule, kv_heads: int) -> None:
        self.options, self.facts, self.blocks = options, facts, blocks
        square = lambda x: None if x is None else _Square(by_key_head(x, kv_heads), blocks.block, blocks.key_block)  # noqa: E731
        self.dense, self.bias = square(facts.dense), square(facts.bias) if options.bias is None else None
        self.rows, self.columns = _side(facts.rows, blocks.block), _side(facts.columns, blocks.key_block)
        by_head = lambda x: None if x is None else by_key_head(x, kv_heads)[None]  # noqa: E731
        self.heads: Any = by_head(facts.heads)
        self.names: Any = by_head(facts.names)
        self.bounds = functools.cache(self._bounds)

    def states(self, visits: TileGroup) -> Any:
        """int32 [n]: 0 for a visit of which run-time operands show that no pair is seen, 1 where the plan says that all
        are, 2 for one to be tested, 3 for one that lacks keys only; numpy where the plan alone decides, which knows no 0."""
        facts, rows = self.facts, self.facts.rows
        if all(x is None for x in (facts.lengths, rows.segment, rows.position, rows.everywhere)):
            where = np.where if isinstance(visits.tested, np.ndarray) else jnp.where
            tested = visits.tested.astype(np.int32)
            return where((tested == 1) | (facts.dense is not None), 2, where(tested == 2, 3, 1)).astype(np.int32)
        keys = jnp.asarray(visits.keys)
        runs = jnp.asarray(visits.first)[:, None] + jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
        q = lambda name, op: self.bounds("rows", name, op).at[runs].get(**THERE)[:, :, None]  # noqa: E731
        k = lambda name, op: self.bounds("columns", name, op).at[keys].get(**THERE)  # noqa: E731
        some = keys[..., None] >= 0  # [n, R, w, B]
        if rows.position is not None or rows.everywhere is not None:  # the plan is of all pairs then
            corners = q("at", jnp.min), q("at", jnp.max), k("at", jnp.min), k("at", jnp.max)
            some = some & self.options.mask.tile(*corners)[0]
        if rows.everywhere is not None:
            some = some | q("everywhere", jnp.any) | k("everywhere", jnp.any)
        if rows.segment is not None:
            some = some & (q("segment", jnp.min) <= k("segment", jnp.max))
            some = some & (k("segment", jnp.min) <= q("segment", jnp.max))
        if facts.lengths is not None:
            some = some & (k("index", jnp.min) < facts.lengths[None, None, None])
        return jnp.where(some.any(axis=(1, 2, 3)), 2, 0).astype(jnp.int32)

    def _bounds(self, of: str, name: str, op: Callable[..., Array]) -> Array:
        """`op` over each block of a property of the rows or columns, padding left out: `[blocks, B]`."""
        side, block = getattr(self.facts, of), self.blocks.block if of == "rows" else self.blocks.key_block
        x, info = getattr(side, name), jnp.iinfo(jnp.int32)
        fill = jnp.asarray({jnp.any: False, jnp.min: info.max, jnp.max: info.min}[op], x.dtype)
        return op(to_blocks(jnp.where(side.index >= 0, x, fill), block, fill=fill), axis=2)

    def around(self, first: Array, keys: Array, state: Array, states: Any) -> tuple[TileMask, Any]:
        """What decides about one visit's pairs, and the bias as a function of the bias function's constants."""
        rows = _take_rows(self.rows, first, keys.shape[0])
        columns = jax.tree.map(lambda x: _take_keys(x, keys, -1), self.columns)
        used = jnp.repeat(keys >= 0, self.blocks.key_block, axis=1)[:, None]
        columns = dataclasses.replace(columns, index=jnp.where(used, columns.index, -1))

        def test() -> Array:
            dense = None if self.dense is None else self.dense.take(first, keys)
            lengths = None if self.facts.lengths is None else self.facts.lengths[None]
            see: Any = tile.visible(self.options.mask, rows, columns, lengths, dense)
            inside = (rows.index >= 0)[..., :, None] & (columns.index >= 0)[..., None, :]
            return see & inside[..., None, None, :, :]

        options, facts = self.options, self.facts
        kept = None if facts.seed is None else tile.keep(options, facts.seed, self.heads, rows, columns)
        there = (columns.index >= 0)[..., None, None, None, :]
        around = TileMask(self._see(test, there, state, states), kept)
        if self.bias is not None:
            return dataclasses.replace(around, bias=self.bias.take(first, keys)), None
        if options.bias is None:
            return around, None
        bias = lambda constants: bias_tile(options, constants, self.names, rows, columns)  # noqa: E731
        return dataclasses.replace(around, bias=bias(facts.bias)), bias

    def _see(self, test: Callable[[], Array], there: Array, state: Array, states: Any) -> Array | None:
        """`test()`, or what keys are there if the plan says that this is enough; None where all visits see all.

        A branch of its own, so that XLA does not ask the mask anew in each head and each pass over the scores, which takes a
        quarter of the time of a window; behind a barrier, or XLA would see that the branch is always taken and undo it.
        """
        if isinstance(states, np.ndarray) and (states == 1).all():
            return None
        if isinstance(states, np.ndarray) and not (states == 2).any():
            return there
        like = jax.eval_shape(test)
        operands = jax.tree.leaves((self.rows, self.columns, self.facts.lengths, self.facts.dense))
        every = lambda: vary_alike(jnp.broadcast_to(there, like.shape), *operands)[0]  # noqa: E731
        return lax.cond(lax.optimization_barrier(state) == 2, test, every)


def _run(pairs: _Pairs, visit: Callable[..., Any], visits: TileGroup, sums: Any) -> Any:
    """`sums = visit(sums, first, keys, around, bias)` for each of the visits."""
    states = pairs.states(visits)

    def step(sums: Any, line: tuple[Array, Array, Array]) -> tuple[Any, None]:
        first, keys, *_ = vary_alike(*line[:2], *jax.tree.leaves(sums))  # here, or each of their uses would
        state = line[2]
        work = lambda sums: visit(sums, first, keys, *pairs.around(first, keys, state, states))  # noqa: E731
        return work(sums) if isinstance(states, np.ndarray) else lax.cond(state > 0, work, lambda x: x, sums), None

    # Two at a time, since XLA:CPU's products of a few rows keep one core busy only: a tenth less time.
    unroll = 2 if jax.default_backend() == "cpu" and states.shape[0] % 2 == 0 else 1
    lines = tied((jnp.asarray(visits.first), jnp.asarray(visits.keys), jnp.asarray(states)), pairs.rows.index)
    return lax.scan(step, sums, lines, unroll=unroll)[0]


def _forward(
    options: Options, q: Array, k: Array, v: Array, facts: Operands, blocks: BlockSchedule
) -> tuple[Array, Array, Array]:
    heads = k.shape[2], q.shape[2] // k.shape[2]
    pairs = _Pairs(options, facts, blocks, heads[0])
    q_blocks = to_blocks(q, blocks.block, heads)
    k_blocks, v_blocks = (to_blocks(x, blocks.key_block, heads[:1]) for x in (k, v))

    def visit(sums: Any, first: Array, keys: Array, around: TileMask, _: Any) -> Any:
        run = keys.shape[0]
        queries = _take_rows(q_blocks, first, run)
        part = tile.forward(options, queries, _take_keys(k_blocks, keys, -2), _take_keys(v_blocks, keys, -2), around)
        new = tile.finish(*part) if blocks.once else tile.join(_take_rows(sums, first, run), part)
        return _put_rows(sums, first, new)

    flat = zeros(*q_blocks.shape[:-1])
    weighted = zeros(*flat.shape, v.shape[3])
    sums = (weighted, flat - jnp.inf, flat) if blocks.once else (flat + tile.FLOOR, flat, weighted)
    *sums, _ = vary_alike(*sums, q)
    for visits in blocks.visits:
        sums = _run(pairs, visit, visits, tuple(sums))
    o, *lse = sums if blocks.once else tile.finish(*sums)
    lse, rest = (from_blocks(x[..., None], q.shape[1])[..., 0] for x in lse)
    return from_blocks(o, q.shape[1]), lse, rest


def _backward(
    options: Options, rows: tuple[Array, ...], k: Array, v: Array, facts: Operands, blocks: BlockSchedule
) -> tuple[Array, Array, Array, Any]:
    q, do, lse, rest, delta = rows
    heads = k.shape[2], q.shape[2] // k.shape[2]
    pairs = _Pairs(options, facts, blocks, heads[0])
    cut = lambda x, fill=0.0: to_blocks(x, blocks.block, heads, fill)  # noqa: E731
    given = QueryResiduals(cut(q), cut(do), cut(lse, jnp.inf), cut(rest), cut(delta))
    k_blocks, v_blocks = (to_blocks(x, blocks.key_block, heads[:1]) for x in (k, v))

    def visit(sums: Any, first: Array, keys: Array, around: TileMask, bias: Any) -> Any:
        dq, dk, dv, by_bias = sums
        part = _take_rows(given, first, keys.shape[0])
        taken = _take_keys(k_blocks, keys, -2), _take_keys(v_blocks, keys, -2)
        new_dq, new_dk, new_dv, db = tile.backward(options, part, *taken, around)
        new_dq = new_dq if blocks.once else new_dq + _take_rows(dq, first, keys.shape[0])
        if bias is not None:
            by_bias = add_bias(by_bias, bias, facts.bias, db)
        elif pairs.bias is not None:
            by_bias = pairs.bias.add(by_bias, first, keys, db)
        return _put_rows(dq, first, new_dq), _add_keys(dk, keys, new_dk), _add_keys(dv, keys, new_dv), by_bias

    sums = [zeros(*x.shape) for x in (given.q, k_blocks.swapaxes(-1, -2), v_blocks.swapaxes(-1, -2))]
    bias = facts.bias if pairs.bias is None else pairs.bias.blocks
    bias_sums = [zeros(*x.shape) for x in jax.tree.leaves(bias)]
    *sums, _ = vary_alike(*sums, *bias_sums, q)
    sums = (*sums[:3], jax.tree.unflatten(jax.tree.structure(bias), sums[3:]))
    for visits in blocks.visits:
        sums = _run(pairs, visit, visits, sums)
    dq, dk, dv, by_bias = sums
    by_bias = by_bias if pairs.bias is None else pairs.bias.whole(by_bias).reshape(facts.bias.shape)
    # Turned by themselves: in one pass with the rest, every number would come from far off the last.
    dk, dv = lax.optimization_barrier((dk.swapaxes(-1, -2), dv.swapaxes(-1, -2)))
    return from_blocks(dq, q.shape[1]), from_blocks(dk, k.shape[1]), from_blocks(dv, k.shape[1]), by_bias
