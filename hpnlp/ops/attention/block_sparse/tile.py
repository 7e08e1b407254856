"""The arithmetic of one tile: a block of queries against some keys, forward and backward.

Arrays inside a tile carry any leading axes, then K key heads and the G query heads that read each: rows of queries
`[..., K, G, r, H]` and of keys `[..., K, c, H]`. The gradients of keys come out with the features in front of the rows, which
is called columns: `[..., K, H, c]`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from hpnlp.ops.attention.masks.base import Mask
from hpnlp.ops.dropout import keep_mask

# A finite stand-in for the maximum of a row that sees nothing, so that exp(-inf - FLOOR) is 0 and not NaN; below no score.
FLOOR = float(np.finfo(np.float32).min)

Visible = Bool[np.ndarray, "*a r c"] | Bool[Array, "*a r c"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenInfo:
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
class TileMask:
    """What decides about the pairs of a tile, each broadcasting to `[..., K, G, r, c]` or None: which query sees which
    key, which weights dropout keeps, and what is added to the scores."""

    see: Any = None
    kept: Any = None
    bias: Any = None


def visible(mask: Mask, rows: TokenInfo, columns: TokenInfo, lengths: Any, dense: Any = None) -> Visible:
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


def drop_hidden(see: Visible, keys: Array) -> Array:
    """Zeroes the keys (or values) that no query of the tile sees: 0 * NaN would be NaN."""
    if see is None:
        return keys
    seen: Any = see.any(axis=(-3, -2))
    if isinstance(seen, np.ndarray) and seen.all():
        return keys
    return jnp.where(seen[..., None], keys, jnp.zeros((), keys.dtype))


def keep(options: Options, seed: Array, heads: Array, rows: TokenInfo, columns: TokenInfo) -> Bool[Array, "*a r c"]:
    """The dropout pattern of a tile. heads `[..., K, G]`: a number that is unique to each (batch, head)."""
    q, k = rows.spot[..., None, None, :, None], columns.spot[..., None, None, None, :]
    return keep_mask(seed, heads[..., None, None], q, k, options.dropout_rate)


def _scores(options: Options, q: Array, k: Array, around: TileMask) -> tuple[Array, Any]:
    """Scores in float32, -inf where hidden: the exponential then gives exact zeros in the same fused pass; and the tanh of
    the soft cap."""
    # In float32 the queries are scaled, not the scores: XLA:CPU would make that a pass of its own.
    early = options.scale if q.dtype == jnp.float32 else 1.0
    s = _with_keys(q * early if early != 1.0 else q, k, 2)
    s = s if early != 1.0 else s * options.scale
    s = s if around.bias is None else s + around.bias.astype(jnp.float32)
    squashed = None
    if options.soft_cap is not None:
        squashed = jnp.tanh(s / options.soft_cap)
        s = options.soft_cap * squashed
    return s if around.see is None else jnp.where(around.see, s, -jnp.inf), squashed


def forward(
    options: Options, q: Array, k: Array, v: Array, around: TileMask
) -> tuple[Float[Array, "*a"], Float[Array, "*a"], Float[Array, "*a Hv"]]:
    """(top, total, sum): the rows' maxima and the sums of exp(score - top), plain and weighted with the values."""
    k, v = drop_hidden(around.see, k), drop_hidden(around.see, v)
    s, _ = _scores(options, q, k, around)
    # A constant to derivatives, since it cancels; second ones through a maximum are wrong in unoptimised XLA:CPU programs.
    top = jax.lax.stop_gradient(jnp.maximum(s.max(axis=-1), FLOOR))
    p = jnp.exp(s - top[..., None])
    return top, p.sum(axis=-1), _with_keys(_dropped(options, p, around.kept).astype(v.dtype), v, 1)


def finish(top: Array, total: Array, weighted: Array) -> tuple[Array, Array, Array]:
    """(o, lse, rest) of rows whose keys have all been summed; see `log_sum`."""
    return weighted / jnp.where(total != 0, total, 1.0)[..., None], *log_sum(top, total)


def log_sum(top: Array, total: Array) -> tuple[Array, Array]:
    """(lse, rest): top + log(total), rounded, and what the rounding took away. Where scores are large, as those of rows
    that a bias of -1e9 hides, exp(score - lse) is a weight no more; exp(score - lse - rest) is."""
    some = total != 0  # NaN is something
    log = jnp.log(jnp.where(some, total, 1.0))
    lse = top + log
    return jnp.where(some, lse, -jnp.inf), jnp.where(some, (top - lse) + log, 0.0)


def join(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """`forward` of two tiles of the same rows, as of one."""
    top = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp(a[0] - top), jnp.exp(b[0] - top)
    return top, a[1] * wa + b[1] * wb, a[2] * wa[..., None] + b[2] * wb[..., None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryResiduals:
    """What the backward pass knows of the queries of a tile.

    q `[..., K, G, r, H]`, do `[..., K, G, r, Hv]`, lse, rest and delta `[..., K, G, r]`: lse is +inf for rows that saw
    nothing, so that their probabilities are 0; delta is rowsum(do * o) - dlse, which the softmax's derivative subtracts.
    """

    q: Any
    do: Any
    lse: Any
    rest: Any
    delta: Any


def backward(
    options: Options, given: QueryResiduals, k: Array, v: Array, around: TileMask
) -> tuple[Array, Array, Array, Array]:
    """(dq rows, dk columns, dv columns, d bias `[..., K, G, r, c]`), float32 (FlashAttention, algorithm 4)."""
    see = around.see
    k, v = drop_hidden(see, k), drop_hidden(see, v)
    s, squashed = _scores(options, given.q, k, around)
    p = jnp.exp(s - given.lse[..., None] - given.rest[..., None])
    dp = _dropped(options, _with_keys(given.do, v, 2), around.kept)
    db = p * (dp - given.delta[..., None])
    if squashed is not None:
        db = db * (1.0 - (squashed if see is None else jnp.where(see, squashed, 0.0)) ** 2)
    # Not in float16, whose largest number is 65504: a loss that is scaled up reaches it here before it does at the inputs.
    dtype = jnp.float32 if k.dtype == jnp.float16 else k.dtype
    ds = (db * options.scale).astype(dtype)
    dv = _over_queries(given.do, _dropped(options, p, around.kept).astype(k.dtype))
    return _with_keys(ds, k.astype(dtype), 1), _over_queries(given.q.astype(dtype), ds), dv, db


def _dropped(options: Options, p: Array, kept: Array | None) -> Array:
    return p if kept is None else jnp.where(kept, p * (1.0 / (1.0 - options.dropout_rate)), 0.0)


# The products take all leading axes as one: an einsum would give axes of size 1 another layout, and XLA:CPU then copies every
# score. They have a transposed left side only where it is a block of queries: turning scores takes three times the product.


def _with_keys(a: Array, keys: Array, axis: int) -> Float[Array, "*a r x"]:
    """`[..., K, G, r, i]` with `[..., K, c, i]` (axis 2) or `[..., K, i, h]` (axis 1): `[..., K, G, r, c or h]`."""
    left, right = a.reshape(-1, math.prod(a.shape[-3:-1]), a.shape[-1]), keys.reshape(-1, *keys.shape[-2:])
    found = _product(left, right, 2, axis)
    return found.reshape(*a.shape[:-1], found.shape[-1])


def _over_queries(rows: Array, scores: Array) -> Float[Array, "*a h c"]:
    """`[..., K, G, r, h]` with `[..., K, G, r, c]`: `[..., K, h, c]`."""
    left, right = (x.reshape(-1, math.prod(x.shape[-3:-1]), x.shape[-1]) for x in (rows, scores))
    return _product(left, right, 1, 1).reshape(*rows.shape[:-3], rows.shape[-1], scores.shape[-1])


def _product(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    return jax.lax.dot_general(a, b, (((of_a,), (of_b,)), ((0,), (0,))), preferred_element_type=jnp.float32)
