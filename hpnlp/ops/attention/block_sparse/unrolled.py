"""Short sequences: a Python loop over blocks of queries, each against the one span of keys that its mask reaches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from hpnlp.ops.attention.block_sparse import tile
from hpnlp.ops.attention.block_sparse.operands import (
    Operands,
    add_bias,
    bias_tile,
    by_key_head,
    key_rows,
    rows_of,
    zeros,
)
from hpnlp.ops.attention.block_sparse.tile import Options, QueryResiduals, TileMask, TokenInfo
from hpnlp.ops.attention.masks.base import Full, Mask

ROWS = 128
# Up to so many panels and query-key pairs; every panel adds to the program, and holds a gradient of the keys it reaches.
MOST = 8
PAIRS = 1024 * 1024
# From MANY pairs on, panels run only if they compute at most SHARE of them: causal ones of T = S = 512 and 1024 are a tenth to
# a fifth faster than visits, dense ones a third slower; shorter ones are always faster.
MANY, SHARE = 512 * 512, 0.75


def fit(options: Options, length: int, keys: int, facts: Operands) -> bool:
    """Whether a call is short enough, and panels are its faster form."""
    if -(-length // (options.block_size or ROWS)) > MOST or length * keys > PAIRS:
        return False
    if length * keys < MANY:
        return True
    panels = _panels(options, length, keys, facts)
    return sum((panel.q1 - panel.q0) * (panel.k1 - panel.k0) for panel in panels) <= SHARE * length * keys


@dataclasses.dataclass(frozen=True)
class _Panel:
    """Queries q0 <= i < q1 against keys k0 <= j < k1."""

    q0: int
    q1: int
    k0: int
    k1: int


def _panels(options: Options, length: int, keys: int, facts: Operands) -> tuple[_Panel, ...]:
    """One panel a block of queries, its keys trimmed to what the mask reaches where that is known while tracing."""
    known = facts.rows.position is None and facts.rows.everywhere is None
    return _trimmed(options.mask if known else Full(), length, keys, options.block_size or ROWS)


@functools.lru_cache(maxsize=64)
def _trimmed(mask: Mask, length: int, keys: int, block: int) -> tuple[_Panel, ...]:
    panels = []
    for q0 in range(0, length, block):
        q1 = min(q0 + block, length)
        seen = mask.at(np.arange(q0, q1)[:, None], np.arange(keys)[None, :]).any(axis=0).nonzero()[0]
        panels.append(_Panel(q0, q1, int(seen[0]), int(seen[-1]) + 1) if seen.size else _Panel(q0, q1, 0, 0))
    return tuple(panels)


def _cut(side: TokenInfo, start: int, stop: int) -> TokenInfo:
    part = jax.tree.map(lambda x: x[:, start:stop], dataclasses.replace(side, index=None))
    return dataclasses.replace(part, index=np.arange(start, stop)[None])


def _part(x: Any, panel: _Panel) -> Any:
    """The panel of `[B, K, G, T, S]`, where any axis may be 1."""
    rows = slice(None) if x.shape[3] == 1 else slice(panel.q0, panel.q1)
    return x[..., rows, :] if x.shape[4] == 1 else x[..., rows, panel.k0 : panel.k1]


def _around(options: Options, facts: Operands, panel: _Panel, kv_heads: int) -> tuple[TileMask, Any]:
    """What decides about the panel's pairs, and the bias as a function of its operand."""
    rows, columns = _cut(facts.rows, panel.q0, panel.q1), _cut(facts.columns, panel.k0, panel.k1)
    dense = None if facts.dense is None else _part(by_key_head(facts.dense, kv_heads), panel)
    see = tile.visible(options.mask, rows, columns, facts.lengths, dense)
    kept = (
        None
        if facts.seed is None
        else tile.keep(options, facts.seed, by_key_head(facts.heads, kv_heads), rows, columns)
    )
    if facts.bias is None:
        return TileMask(see, kept), None
    if options.bias is None:
        bias = lambda x: _part(by_key_head(x, kv_heads), panel)  # noqa: E731
    else:
        bias = lambda x: bias_tile(options, x, by_key_head(facts.names, kv_heads), rows, columns)  # noqa: E731
    return TileMask(see, kept, bias(facts.bias)), bias


def _after(parts: list[Any], queries: Array) -> Array:
    """`queries`, which are not there before the last but one of `parts` is.

    XLA:CPU would begin all panels at once, and hold the scores of all; a barrier it removes before it schedules. Two at a
    time keep all cores busy: one by one costs a thirtieth of a training step.
    """
    return queries if len(parts) < 2 else _not_before(next(x for x in parts[-2][::-1] if x.size), queries)


def _not_before(done: Array, x: Array) -> Array:
    """`x`, which is not there before `done` is."""
    return jnp.where(done.reshape(-1)[0] > jnp.inf, jnp.zeros((), x.dtype), x)


def forward(options: Options, q: Array, k: Array, v: Array, facts: Operands) -> tuple[Array, Array, Array]:
    """(o `[B, K, G, T, Hv]`, lse and rest `[B, K, G, T]`), float32."""
    kv_heads = k.shape[2]
    q, k, v = rows_of(q, kv_heads), key_rows(k), key_rows(v)
    parts = []
    for panel in _panels(options, q.shape[3], k.shape[2], facts):
        rows, span = slice(panel.q0, panel.q1), slice(panel.k0, panel.k1)
        if panel.k0 == panel.k1:
            shape = (*q.shape[:3], panel.q1 - panel.q0)
            parts.append((zeros(*shape, v.shape[3]), zeros(*shape) - jnp.inf, zeros(*shape)))
        else:
            around, _ = _around(options, facts, panel, kv_heads)
            queries = _after(parts, q[:, :, :, rows])
            parts.append(tile.finish(*tile.forward(options, queries, k[:, :, span], v[:, :, span], around)))
    o, lse, rest = (jnp.concatenate(found, axis=3) for found in zip(*parts, strict=True))
    return o, lse, rest


def backward(
    options: Options, given: QueryResiduals, k: Array, v: Array, facts: Operands
) -> tuple[Array, Array, Array, Any]:
    """(dq `[B, K, G, T, H]`, dk `[B, K, H, S]`, dv `[B, K, Hv, S]`, d bias), float32."""
    kv_heads = k.shape[2]
    # Or XLA:CPU finds that the forward pass made the same, and keeps it (50 MB a layer of 12 heads of 64, for 8 x 512 tokens).
    k, v = (_not_before(given.do, key_rows(x)) for x in (k, v))
    panels = _panels(options, given.q.shape[3], k.shape[2], facts)
    parts, by_bias = [], jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), facts.bias)
    for panel in panels:
        rows, span = slice(panel.q0, panel.q1), slice(panel.k0, panel.k1)
        part = QueryResiduals(
            _after(parts, given.q[:, :, :, rows]),
            given.do[:, :, :, rows],
            given.lse[..., rows],
            given.rest[..., rows],
            given.delta[..., rows],
        )
        if panel.k0 == panel.k1:
            parts.append((zeros(*part.q.shape), *(zeros(*x.shape[:2], x.shape[3], 0) for x in (k, v))))
            continue
        around, bias = _around(options, facts, panel, kv_heads)
        *found, db = tile.backward(options, part, k[:, :, span], v[:, :, span], around)
        parts.append(tuple(found))
        if bias is not None:
            by_bias = add_bias(by_bias, bias, facts.bias, db)
    spans = [(panel.k0, panel.k1) for panel in panels]
    dk, dv = (_add_spans([part[i] for part in parts], spans, k.shape[2]) for i in (1, 2))
    return jnp.concatenate([part[0] for part in parts], axis=3), dk, dv, by_bias


def _add_spans(parts: Sequence[Array], spans: Sequence[tuple[int, int]], length: int) -> Array:
    """The sum of arrays that each cover a span of the last axis; slices and one concatenation, which XLA fuses."""
    cuts = sorted({0, length, *(edge for span in spans for edge in span)})
    pieces = []
    for a, b in zip(cuts, cuts[1:], strict=False):
        over = [part[..., a - k0 : b - k0] for part, (k0, k1) in zip(parts, spans, strict=True) if k0 <= a and b <= k1]
        pieces.append(sum(over[1:], over[0]) if over else zeros(*parts[0].shape[:-1], b - a))
    return jnp.concatenate(pieces, axis=-1)
