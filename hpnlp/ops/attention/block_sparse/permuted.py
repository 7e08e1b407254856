"""The parts of a mask, each run in its own order of the tokens, and put together again."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from hpnlp.ops.attention.block_sparse import scan
from hpnlp.ops.attention.block_sparse.decompose import Order, Part, parts
from hpnlp.ops.attention.block_sparse.operands import Operands
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule
from hpnlp.ops.attention.block_sparse.tile import Options, TokenInfo, log_sum
from hpnlp.ops.attention.masks.base import Full


def merge_partials(*parts: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """`merge` of (o, lse, rest)."""
    lses = jnp.stack([lse for _, lse, _ in parts])
    top = jax.lax.stop_gradient(lses.max(axis=0))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(lses - top[None] + jnp.stack([rest for _, _, rest in parts]))
    sums = weights.sum(axis=0)
    total = jnp.where(sums != 0, sums, 1.0)
    # A part that saw nothing adds nothing, whatever its o holds.
    outs = [
        jnp.where(w[..., None] == 0, 0.0, o.astype(jnp.float32)) for w, (o, _, _) in zip(weights, parts, strict=True)
    ]
    out = sum((w / total)[..., None] * o for w, o in zip(weights, outs, strict=True))
    return jnp.asarray(out).astype(parts[0][0].dtype), *log_sum(top, sums)


def forward(
    options: Options, q: Array, k: Array, v: Array, facts: Operands, blocks: BlockSchedule | None
) -> tuple[Array, Array, Array]:
    """(o `[B, T, N, Hv]`, lse and rest `[B, T, N]`), float32."""
    sums: Any = ()
    for part in _parts(options, q, k, facts, blocks):
        own, rows, keys = _within(options, part, facts, q.shape[0])
        found = scan.forward(own[0], rows(q), keys(k), keys(v), own[1], part.blocks)
        whole = tuple(rows.back(x, q.shape[1]) for x in found)
        if part.order.rows is None:
            sums = merge_partials(sums, whole) if sums else whole
        else:
            chosen = np.asarray(part.order.rows)
            sums = sums or tuple(x + fill for x, fill in zip(map(jnp.zeros_like, whole), (0, -jnp.inf, 0), strict=True))
            both = merge_partials(tuple(x[:, chosen] for x in sums), found)
            sums = tuple(x.at[:, chosen].set(new) for x, new in zip(sums, both, strict=True))
    return sums


def backward(
    options: Options, by_row: tuple[Array, ...], k: Array, v: Array, facts: Operands, blocks: BlockSchedule | None
) -> tuple[Array, Array, Array, Any]:
    """(dq, dk, dv) as q, k and v and d bias, float32. by_row: q, do `[B, T, N, .]`, lse, rest and delta `[B, T, N]`."""
    q, do, lse, rest, delta = by_row
    sums: Any = None
    for part in _parts(options, q, k, facts, blocks):
        own, rows, keys = _within(options, part, facts, q.shape[0])
        given = rows(q), rows(do), rows(lse, jnp.inf), rows(rest), rows(delta)
        dq, dk, dv, by_bias = scan.backward(own[0], given, keys(k), keys(v), own[1], part.blocks)
        found = rows.back(dq, q.shape[1]), keys.back(dk, k.shape[1]), keys.back(dv, k.shape[1]), by_bias
        sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
    return sums


def _parts(options: Options, q: Array, k: Array, facts: Operands, blocks: BlockSchedule | None) -> tuple[Part, ...]:
    if blocks is not None:
        return (Part(options.mask, Order(), blocks, False),)
    # Positions and global tokens are known at run time only: every block may then meet every other.
    late = facts.rows.position is not None or facts.rows.everywhere is not None
    one = late or facts.dense is not None or isinstance(facts.bias, jax.Array)
    mask = Full() if late else options.mask
    found = parts(mask, q.shape[1], k.shape[1], options.block_size, scan.laid(q, k), one)
    return tuple(dataclasses.replace(part, mask=options.mask) for part in found) if late else found


class _Axis:
    """Arrays `[B, T, ...]` in the order of a part."""

    def __init__(self, stride: int, chosen: tuple[int, ...] | None) -> None:
        self.stride, self.chosen = stride, None if chosen is None else np.asarray(chosen, np.int32)

    def __call__(self, x: Array, fill: Any = 0) -> Array:
        if self.chosen is not None:
            return x[:, self.chosen]
        if self.stride == 1:
            return x
        count = -(-x.shape[1] // self.stride)
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, count * self.stride - x.shape[1])
        x = jnp.pad(x, padding, constant_values=fill).reshape(x.shape[0], count, self.stride, *x.shape[2:])
        # By itself, in pieces of all heads: with the next order of the axes in one pass, it would take twice as long.
        return jax.lax.optimization_barrier(x.swapaxes(1, 2).reshape(-1, count, *x.shape[3:]))

    def back(self, x: Array, length: int) -> Array:
        """Undoes it; what was not chosen is 0."""
        if self.chosen is not None:
            return jnp.zeros((x.shape[0], length, *x.shape[2:]), x.dtype).at[:, self.chosen].set(x)
        if self.stride == 1:
            return x
        x = x.reshape(-1, self.stride, *x.shape[1:]).swapaxes(1, 2)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _within(options: Options, part: Part, facts: Operands, batch: int) -> tuple[tuple[Options, Operands], _Axis, _Axis]:
    """The call's options and operands as the part has them, and its queries' and keys' axes."""
    stride = part.order.stride
    rows, keys = _Axis(stride, part.order.rows), _Axis(stride, part.order.keys)

    def side(side: TokenInfo, axis: _Axis) -> TokenInfo:
        if stride > 1:
            side = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, x.shape[1])), side)
        found = jax.tree.map(axis, side)
        asked = jnp.arange(found.index.shape[1], dtype=jnp.int32)[None] if part.quotients else None
        return dataclasses.replace(found, index=axis(side.index, -1), asked=asked)

    repeat = lambda x: None if x is None else jnp.repeat(x, stride, axis=0)  # noqa: E731
    own = dataclasses.replace(
        facts,
        rows=side(facts.rows, rows),
        columns=side(facts.columns, keys),
        lengths=repeat(facts.lengths),
        heads=repeat(facts.heads),
    )
    return (dataclasses.replace(options, mask=part.mask), own), rows, keys
