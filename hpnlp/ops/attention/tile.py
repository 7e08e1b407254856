"""The arithmetic of one tile: a block of queries against some keys, forward and backward.

Arrays inside a tile carry any leading axes, then K key heads and the G query heads that read each: rows of queries
`[..., K, G, r, H]` and of keys `[..., K, c, H]`; the same with the features in front of the rows are called columns,
`[..., K, H, G, r]` and `[..., K, H, c]`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from hpnlp.ops.attention.algebra import Mask
from hpnlp.ops.attention.dropout import keep_mask

# A finite stand-in for the maximum of a row that sees nothing, so that exp(-inf - FLOOR) is 0 and not NaN.
FLOOR = -1e30

Visible = Bool[np.ndarray, "*a r c"] | Bool[Array, "*a r c"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Side:
    """What is known of some queries or keys, `[..., r]` each, numpy where static.

    index: places in the sequence, -1 for padding. position: what dropout and the bias function are asked for, the index
    where None. asked: what the mask is asked for, the position where None. segment. everywhere: sees all and is seen by
    all.
    """

    index: Any
    position: Any = None
    asked: Any = None
    segment: Any = None
    everywhere: Any = None

    @property
    def spot(self) -> Any:
        return self.index if self.position is None else self.position

    @property
    def at(self) -> Any:
        return self.spot if self.asked is None else self.asked


@dataclasses.dataclass(frozen=True)
class Options:
    """The static part of a call. bias: the jaxpr of a bias function."""

    mask: Mask
    scale: float
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    block_size: int | None = None
    bias: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Around:
    """What decides about the pairs of a tile, each broadcasting to `[..., K, G, r, c]` or None: which query sees which
    key, which weights dropout keeps, and what is added to the scores."""

    see: Any = None
    kept: Any = None
    bias: Any = None


def visible(mask: Mask, rows: Side, columns: Side, lengths: Any, dense: Any = None) -> Visible:
    """Which query of the tile may see which key, `[..., 1, 1, r, c]`; None where all see all, numpy where that is known
    while tracing. lengths `[...]`; dense as `see` in Around."""
    see = mask.at(rows.at[..., :, None], columns.at[..., None, :])
    if rows.everywhere is not None:
        see = see | rows.everywhere[..., :, None] | columns.everywhere[..., None, :]
    if rows.segment is not None:
        see = see & (rows.segment[..., :, None] == columns.segment[..., None, :])
    if lengths is not None:
        see = see & (columns.index[..., None, :] < lengths[..., None, None])
    see = see[..., None, None, :, :]
    if dense is not None:
        see = see & dense
    return None if isinstance(see, np.ndarray) and see.all() else see


def drop_hidden(see: Visible, keys: Array, axis: int) -> Array:
    """Zeroes the keys (or values) that no query of the tile sees: 0 * NaN would be NaN. axis: the keys', -1 or -2."""
    if see is None:
        return keys
    seen: Any = see.any(axis=(-3, -2))
    if isinstance(seen, np.ndarray) and seen.all():
        return keys
    return jnp.where(seen[..., None, :] if axis == -1 else seen[..., :, None], keys, jnp.zeros((), keys.dtype))


def keep(options: Options, seed: Array, heads: Array, rows: Side, columns: Side) -> Bool[Array, "*a r c"]:
    """The dropout pattern of a tile. heads `[..., K, G]`: a number that is unique to each (batch, head)."""
    q, k = rows.spot[..., None, None, :, None], columns.spot[..., None, None, None, :]
    return keep_mask(seed, heads[..., None, None], q, k, options.dropout_rate)


def _scores(options: Options, q: Array, k_columns: Array, around: Around) -> tuple[Array, Any]:
    """Scores in float32, -inf where hidden: the exponential then gives exact zeros in the same fused pass; and the tanh of
    the soft cap."""
    if q.dtype == jnp.float32:  # the queries, not the scores: XLA:CPU would make that a pass of its own
        s = _by_row(q * options.scale, k_columns)
    else:
        s = _by_row(q, k_columns) * options.scale
    s = s if around.bias is None else s + around.bias.astype(jnp.float32)
    squashed = None
    if options.soft_cap is not None:
        squashed = jnp.tanh(s / options.soft_cap)
        s = options.soft_cap * squashed
    return s if around.see is None else jnp.where(around.see, s, -jnp.inf), squashed


def forward(
    options: Options, q: Array, k_columns: Array, v: Array, around: Around
) -> tuple[Float[Array, "*a"], Float[Array, "*a"], Float[Array, "*a Hv"]]:
    """(top, total, sum): the rows' maxima and the sums of exp(score - top), plain and weighted with the values."""
    k_columns, v = drop_hidden(around.see, k_columns, -1), drop_hidden(around.see, v, -2)
    s, _ = _scores(options, q, k_columns, around)
    top = jnp.maximum(s.max(axis=-1), FLOOR)
    p = jnp.exp(s - top[..., None])
    return top, p.sum(axis=-1), _by_row(_dropped(options, p, around.kept).astype(v.dtype), v)


def finish(top: Array, total: Array, weighted: Array) -> tuple[Array, Array]:
    """(o, lse) of rows whose keys have all been summed."""
    some = total > 0
    total = jnp.where(some, total, 1.0)
    return weighted / total[..., None], jnp.where(some, top + jnp.log(total), -jnp.inf)


def join(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """`forward` of two tiles of the same rows, as of one."""
    top = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp(a[0] - top), jnp.exp(b[0] - top)
    return top, a[1] * wa + b[1] * wb, a[2] * wa[..., None] + b[2] * wb[..., None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Given:
    """What the backward pass knows of the queries of a tile, both ways round where both are needed.

    q `[..., K, G, r, H]`, do `[..., K, G, r, Hv]`, and the same as columns, `[..., K, H, G, r]`. lse and delta
    `[..., K, G, r]`: lse is +inf for rows that saw nothing, so that their probabilities are 0; delta is
    rowsum(do * o) - dlse, which is what the softmax's derivative subtracts.
    """

    q: Any
    q_columns: Any
    do: Any
    do_columns: Any
    lse: Any
    delta: Any


def backward(
    options: Options, given: Given, k: Array, k_columns: Array, v_columns: Array, around: Around
) -> tuple[Array, Array, Array, Array]:
    """(dq rows, dk columns, dv columns, d bias `[..., K, G, r, c]`), float32 (FlashAttention, algorithm 4)."""
    see = around.see
    k, k_columns, v_columns = drop_hidden(see, k, -2), drop_hidden(see, k_columns, -1), drop_hidden(see, v_columns, -1)
    s, squashed = _scores(options, given.q, k_columns, around)
    p = jnp.exp(s - given.lse[..., None])
    dp = _dropped(options, _by_row(given.do, v_columns), around.kept)
    db = p * (dp - given.delta[..., None])
    if squashed is not None:
        db = db * (1.0 - (squashed if see is None else jnp.where(see, squashed, 0.0)) ** 2)
    ds = (db * options.scale).astype(k.dtype)
    dq = _by_row(ds, k)
    dk = _by_column(given.q_columns, ds)
    dv = _by_column(given.do_columns, _dropped(options, p, around.kept).astype(k.dtype))
    return dq, dk, dv, db


def _dropped(options: Options, p: Array, kept: Array | None) -> Array:
    return p if kept is None else jnp.where(kept, p * (1.0 / (1.0 - options.dropout_rate)), 0.0)


def _by_row(a: Array, b: Array) -> Array:
    """`[..., K, G, r, i]` with `[..., K, i, c]`: `[..., K, G, r, c]`."""
    return _product(a.reshape(*a.shape[:-3], -1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])


def _by_column(a: Array, b: Array) -> Array:
    """`[..., K, i, G, r]` with `[..., K, G, r, c]`: `[..., K, i, c]`."""
    return _product(a.reshape(*a.shape[:-2], -1), b.reshape(*b.shape[:-3], -1, b.shape[-1]))


def _product(a: Array, b: Array) -> Array:
    """Matrix products in float32, all leading axes as one: an einsum would give axes of size 1 another layout, and XLA:CPU
    then copies every score."""
    flat = lambda x: x.reshape(-1, *x.shape[-2:])  # noqa: E731
    out = jax.lax.dot_general(flat(a), flat(b), (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return out.reshape(*a.shape[:-1], b.shape[-1])
