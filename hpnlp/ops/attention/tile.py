"""The arithmetic of one tile: a block of queries against a span of keys, forward and backward.

Arrays inside a tile carry the heads in front, K key heads and the G query heads that read each: rows of queries
`[B, K, G, r, H]` and of keys `[B, K, c, H]`; the same with the features in front of the rows are called columns,
`[B, K, H, G, r]` and `[B, K, H, c]`.
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

Visible = Bool[np.ndarray, "b r c"] | Bool[Array, "b r c"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Side:
    """What is known of some queries or keys: indices [r] (numpy where static), and positions and segments [B, r]."""

    index: Any
    position: Any = None
    segment: Any = None

    @property
    def at(self) -> Any:
        """The positions that the mask is asked about, [B, r] or [1, r]."""
        return self.index[None] if self.position is None else self.position


@dataclasses.dataclass(frozen=True)
class Options:
    """The static part of a call."""

    mask: Mask
    scale: float
    dropout_rate: float
    block_size: int | None


def visible(mask: Mask, rows: Side, columns: Side, lengths: Any) -> Visible:
    """Which query of the tile may see which key; None where all see all, numpy where that is known while tracing."""
    see = mask.at(rows.at[:, :, None], columns.at[:, None, :])
    if rows.segment is not None:
        see = see & (rows.segment[:, :, None] == columns.segment[:, None, :])
    if lengths is not None:
        see = see & (columns.index[None, None, :] < lengths[:, None, None])
    return None if isinstance(see, np.ndarray) and see.all() else see


def drop_hidden(see: Visible, keys: Array, axis: int) -> Array:
    """Zeroes the keys (or values) that no query of the tile sees: 0 * NaN would be NaN."""
    if see is None:
        return keys
    seen: Any = see.any(axis=1)
    if isinstance(seen, np.ndarray) and seen.all():
        return keys
    shape = [1] * keys.ndim
    shape[0], shape[axis] = seen.shape[0], seen.shape[1]
    return jnp.where(seen.reshape(shape), keys, jnp.zeros((), keys.dtype))


def keep(options: Options, seed: Array, rows: Side, columns: Side, shape: tuple[int, ...]) -> Bool[Array, "B K G r c"]:
    """The dropout pattern of a tile of `shape`."""
    batch, kv_heads, groups, r, c = shape
    heads = jnp.arange(batch * kv_heads * groups).reshape(batch, kv_heads * groups)
    q, k = jnp.broadcast_to(rows.at, (batch, r)), jnp.broadcast_to(columns.at, (batch, c))
    return keep_mask(seed, heads, q, k, options.dropout_rate).reshape(shape)


def scores(options: Options, q: Array, k_columns: Array, see: Visible) -> Float[Array, "B K G r c"]:
    """Scaled scores in float32, -inf where hidden: the exponential then gives exact zeros in the same fused pass."""
    s = _dot("bkgrh,bkhc->bkgrc", q, k_columns) * options.scale
    return s if see is None else jnp.where(see[:, None, None], s, -jnp.inf)


def forward(
    options: Options, q: Array, k_columns: Array, v: Array, see: Visible, kept: Array | None
) -> tuple[Array, Array, Array]:
    """(top, total, sum): the rows' maxima and the sums of exp(score - top), plain and weighted with the values."""
    k_columns, v = drop_hidden(see, k_columns, 3), drop_hidden(see, v, 2)
    s = scores(options, q, k_columns, see)
    top = jnp.maximum(s.max(axis=-1), FLOOR)
    p = jnp.exp(s - top[..., None])
    return top, p.sum(axis=-1), _dot("bkgrc,bkch->bkgrh", _dropped(options, p, kept).astype(v.dtype), v)


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

    q `[B, K, G, r, H]`, do `[B, K, G, r, Hv]`, and the same as columns, `[B, K, H, G, r]`. lse and delta
    `[B, K, G, r]`: lse is +inf for rows that saw nothing, so that their probabilities are 0; delta is
    rowsum(do * o) - dlse, which is what the softmax's derivative subtracts.
    """

    q: Any
    q_columns: Any
    do: Any
    do_columns: Any
    lse: Any
    delta: Any


def backward(
    options: Options, given: Given, k: Array, k_columns: Array, v_columns: Array, see: Visible, kept: Array | None
) -> tuple[Array, Array, Array]:
    """(dq rows, dk columns, dv columns), float32 (FlashAttention, algorithm 4)."""
    k, k_columns, v_columns = drop_hidden(see, k, 2), drop_hidden(see, k_columns, 3), drop_hidden(see, v_columns, 3)
    p = jnp.exp(scores(options, given.q, k_columns, see) - given.lse[..., None])
    dp = _dropped(options, _dot("bkgrh,bkhc->bkgrc", given.do, v_columns), kept)
    ds = (p * (dp - given.delta[..., None]) * options.scale).astype(k.dtype)
    dq = _dot("bkgrc,bkch->bkgrh", ds, k)
    dk = _dot("bkhgr,bkgrc->bkhc", given.q_columns, ds)
    dv = _dot("bkhgr,bkgrc->bkhc", given.do_columns, _dropped(options, p, kept).astype(k.dtype))
    return dq, dk, dv


def _dropped(options: Options, p: Array, kept: Array | None) -> Array:
    return p if kept is None else jnp.where(kept, p * (1.0 / (1.0 - options.dropout_rate)), 0.0)


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
