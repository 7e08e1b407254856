"""Arithmetic of one tile: a block of queries against some keys, forward and backward.

Arrays of a tile have any leading axes, then K key heads and the G query heads that read each of them: queries
`[..., K, G, r, H]` and keys `[..., K, c, H]`. Gradients of keys have the features before the tokens, `[..., K, H, c]`, because
XLA:CPU takes three times as long for the transposed score products `p^T do` and `ds^T q` as for their transposes; they are
transposed once at the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from hpnlp.ops.attention.block_sparse.operands import Options, TokenInfo
from hpnlp.ops.attention.masks.base import Mask
from hpnlp.ops.dropout import keep_mask

# A finite stand-in for the maximum of a row that sees nothing, below every score: exp(-inf - FLOOR) is 0 and not NaN.
FLOOR = float(np.finfo(np.float32).min)

Visible = Bool[np.ndarray, "*a r c"] | Bool[Array, "*a r c"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileMask:
    """Visibility, dropout pattern and bias of one tile; each broadcasts to `[..., K, G, r, c]`.

    Attributes:
      visible: bool, query r sees key c; None where all queries see all keys.
      kept: bool, dropout keeps the weight; None without dropout.
      bias: float, added to the scaled scores; None without bias.
    """

    visible: Any = None
    kept: Any = None
    bias: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryResiduals:
    """Residuals of queries for the backward pass, in the axes of a call `[B, T, N, ...]` or of a tile `[..., K, G, r, ...]`.

    Attributes:
      q: Queries [..., H].
      do: Cotangent of the output [..., Hv].
      lse: float32, log-sum-exp; +inf in rows that see nothing, so that their probabilities are 0.
      lse_low: float32, what rounding took away from the log-sum-exp, see `log_sum`.
      delta: float32, rowsum(do * o) - dlse, which the derivative of the softmax subtracts.
    """

    q: Any
    do: Any
    lse: Any
    lse_low: Any
    delta: Any


def visible_pairs(
    mask: Mask, queries: TokenInfo, keys: TokenInfo, lengths: Array | None, dense: Array | None = None
) -> Visible:
    """The pairs of a tile that the mask and the operands allow.

    Args:
      mask: The pattern.
      queries: Properties of the queries, [..., r] each.
      keys: Properties of the keys, [..., c] each.
      lengths: int32 [...], or None.
      dense: bool, broadcasts to [..., K, G, r, c], or None.

    Returns:
      bool [..., 1, 1, r, c], or of the shape of dense: numpy where all arguments are. None where all pairs are allowed and
      this is known while tracing.
    """
    visible = mask.at(queries.position_in_mask[..., :, None], keys.position_in_mask[..., None, :])
    if queries.is_global is not None:
        visible = visible | queries.is_global[..., :, None] | keys.is_global[..., None, :]
    if queries.segment is not None:
        visible = visible & (queries.segment[..., :, None] == keys.segment[..., None, :])
    if lengths is not None:
        visible = visible & (keys.index[..., None, :] < lengths[..., None, None])
    visible = visible[..., None, None, :, :]
    if dense is not None:
        visible = visible & dense
    return None if isinstance(visible, np.ndarray) and visible.all() else visible


def zero_hidden(visible: Visible, keys: Array) -> Array:
    """Keys or values, with 0 for those that no query of the tile sees, because 0 * NaN is NaN.

    Args:
      visible: As in `TileMask`.
      keys: [..., K, c, H].

    Returns:
      [..., K, c, H].
    """
    if visible is None:
        return keys
    seen: Any = visible.any(axis=(-3, -2))
    if isinstance(seen, np.ndarray) and seen.all():
        return keys
    return jnp.where(seen[..., None], keys, jnp.zeros((), keys.dtype))


def kept_weights(
    options: Options, seed: Array, streams: Array, queries: TokenInfo, keys: TokenInfo
) -> Bool[Array, "*a r c"]:
    """The dropout pattern of a tile.

    Args:
      options: Static settings of the executor.
      seed: uint32 [words].
      streams: int32 [..., K, G], a distinct number for each (batch, head).
      queries: Properties of the queries, [..., r] each.
      keys: Properties of the keys, [..., c] each.

    Returns:
      bool [..., K, G, r, c], True for weights that are kept.
    """
    q, k = queries.position_or_index[..., None, None, :, None], keys.position_or_index[..., None, None, None, :]
    return keep_mask(seed, streams[..., None, None], q, k, options.dropout_rate)


def bias_of_function(
    options: Options, closed_over: PyTree, heads: Array, queries: TokenInfo, keys: TokenInfo
) -> Float[Array, "*a r c"]:
    """The bias function over a tile.

    Args:
      options: Static settings of the executor, with a bias_jaxpr.
      closed_over: Arrays that the function closes over.
      heads: int32 [..., K, G], numbers of the heads.
      queries: Properties of the queries, [..., r] each.
      keys: Properties of the keys, [..., c] each.

    Returns:
      float32 [..., K, G, r, c].
    """
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun  # here, because jax.extend takes 0.07 s to import

    function = jaxpr_as_fun(ClosedJaxpr(options.bias_jaxpr, closed_over))

    def pair_value(head: Array, q: Array, k: Array) -> Array:
        return function(head, q, k)[0]

    of_pairs = jax.vmap(jax.vmap(pair_value, (None, None, 0)), (None, 0, None))
    of_heads = jax.vmap(jax.vmap(of_pairs, (0, None, None)), (0, None, None))
    lead = jnp.broadcast_shapes(
        heads.shape[:-2], queries.position_or_index.shape[:-1], keys.position_or_index.shape[:-1]
    )

    def flat(x: Array, axes: int) -> Array:
        return jnp.broadcast_to(x, lead + x.shape[-axes:]).reshape(-1, *x.shape[-axes:])

    def positions(tokens: TokenInfo) -> Array:  # padding takes position 0, at which the function is defined
        return flat(jnp.where(tokens.index >= 0, tokens.position_or_index, 0), 1)

    out = jax.vmap(of_heads)(flat(heads, 2), positions(queries), positions(keys))
    return out.reshape(*lead, *out.shape[1:]).astype(jnp.float32)


def add_bias_gradient(sums: PyTree, bias: Callable[[Any], Array], operand: PyTree, db: Array) -> Any:
    """Adds the gradient of a tile's bias to the gradient of the operand that the bias is computed from.

    Args:
      sums: Gradients so far, a tree like `operand`.
      bias: Function that maps the operand to the bias of the tile; the axes of its result may be 1 where those of db are not.
      operand: Bias array, or arrays that a bias function closes over.
      db: float32 [..., K, G, r, c], gradient of the tile's bias.

    Returns:
      The new sums.
    """
    shape = jax.eval_shape(bias, operand)
    axes = tuple(axis for axis in range(db.ndim) if shape.shape[axis] == 1 != db.shape[axis])
    db = db.sum(axis=axes, keepdims=True).astype(shape.dtype) if axes else db.astype(shape.dtype)
    (gradient,) = jax.vjp(bias, operand)[1](db)
    return jax.tree.map(lambda a, b: a if b.dtype == jax.dtypes.float0 else a + b.astype(a.dtype), sums, gradient)


def forward(
    options: Options, q: Array, k: Array, v: Array, tile_mask: TileMask, *, finite: bool = False
) -> tuple[Float[Array, "*a"], Float[Array, "*a"], Float[Array, "*a Hv"]]:
    """Unnormalised attention of a tile.

    Args:
      options: Static settings of the executor.
      q: [..., K, G, r, H].
      k: [..., K, c, H].
      v: [..., K, c, Hv].
      tile_mask: Visibility, dropout pattern and bias of the tile.
      finite: Hidden keys and values are finite, and need not be set to 0.

    Returns:
      (top, total, weighted), float32: maximum of each row's scores, at least FLOOR, and the sums of exp(score - top),
      [..., K, G, r], and of exp(score - top) * v, [..., K, G, r, Hv].
    """
    if not finite:
        k, v = zero_hidden(tile_mask.visible, k), zero_hidden(tile_mask.visible, v)
    s, _ = _scores(options, q, k, tile_mask)
    # A constant to derivatives, since it cancels; second derivatives through a maximum are wrong in unoptimised XLA:CPU
    # programs.
    top = jax.lax.stop_gradient(jnp.maximum(s.max(axis=-1), FLOOR))
    p = jnp.exp(s - top[..., None])
    return top, p.sum(axis=-1), _times_keys(_drop(options, p, tile_mask.kept).astype(v.dtype), v, 1)


def backward(
    options: Options, residuals: QueryResiduals, k: Array, v: Array, tile_mask: TileMask
) -> tuple[Array, Array, Array, Array]:
    """Gradients of a tile (Dao et al. 2022, "FlashAttention", algorithm 4).

    Args:
      options: Static settings of the executor.
      residuals: Residuals of the queries, [..., K, G, r, ...].
      k: [..., K, c, H].
      v: [..., K, c, Hv].
      tile_mask: Visibility, dropout pattern and bias of the tile.

    Returns:
      float32 (dq [..., K, G, r, H], dk [..., K, H, c], dv [..., K, Hv, c], db [..., K, G, r, c]), db of the bias.
    """
    visible = tile_mask.visible
    k, v = zero_hidden(visible, k), zero_hidden(visible, v)
    s, tanh = _scores(options, residuals.q, k, tile_mask)
    p = jnp.exp(s - residuals.lse[..., None] - residuals.lse_low[..., None])
    dp = _drop(options, _times_keys(residuals.do, v, 2), tile_mask.kept)
    db = p * (dp - residuals.delta[..., None])
    if tanh is not None:
        db = db * (1.0 - (tanh if visible is None else jnp.where(visible, tanh, 0.0)) ** 2)
    # float16, whose largest number is 65504, overflows here under loss scaling before it does at the inputs.
    dtype = jnp.float32 if k.dtype == jnp.float16 else k.dtype
    ds = (db * options.scale).astype(dtype)
    dv = _over_queries(residuals.do, _drop(options, p, tile_mask.kept).astype(k.dtype))
    return _times_keys(ds, k.astype(dtype), 1), _over_queries(residuals.q.astype(dtype), ds), dv, db


def combine(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """`forward` of two disjoint sets of keys for the same queries, as of their union.

    Args:
      a: (top, total, weighted).
      b: (top, total, weighted).

    Returns:
      (top, total, weighted).
    """
    top = jnp.maximum(a[0], b[0])
    wa, wb = jnp.exp(a[0] - top), jnp.exp(b[0] - top)
    return top, a[1] * wa + b[1] * wb, a[2] * wa[..., None] + b[2] * wb[..., None]


def normalize(top: Array, total: Array, weighted: Array) -> tuple[Array, Array, Array]:
    """Attention of queries over all keys that `forward` and `combine` have summed.

    Args:
      top: [...].
      total: [...].
      weighted: [..., Hv].

    Returns:
      (o [..., Hv], lse [...], lse_low [...]); see `log_sum`.
    """
    return weighted / jnp.where(total != 0, total, 1.0)[..., None], *log_sum(top, total)


def log_sum(top: Array, total: Array) -> tuple[Array, Array]:
    """The log-sum-exp top + log(total) as a rounded number and what rounding took away.

    Where scores are large, as in rows that a bias of -1e9 hides, exp(score - lse) is far from the weight, while
    exp(score - lse - lse_low) is exact.

    Args:
      top: [...].
      total: [...].

    Returns:
      (lse, lse_low), [...] each; lse is -inf and lse_low 0 where total is 0.
    """
    sees_any = total != 0  # also where the total is NaN
    log = jnp.log(jnp.where(sees_any, total, 1.0))
    lse = top + log
    return jnp.where(sees_any, lse, -jnp.inf), jnp.where(sees_any, (top - lse) + log, 0.0)


def _scores(options: Options, q: Array, k: Array, tile_mask: TileMask) -> tuple[Array, Any]:
    """Scores in float32, -inf where hidden, and the tanh of the soft cap (None without one).

    With -inf before the exponential, one fused pass reads scores and writes probabilities that are exactly 0 where hidden.
    """
    # In float32 the queries are scaled and not the scores, for which XLA:CPU would make a pass of its own.
    early = options.scale if q.dtype == jnp.float32 else 1.0
    s = _times_keys(q * early if early != 1.0 else q, k, 2)
    s = s if early != 1.0 else s * options.scale
    s = s if tile_mask.bias is None else s + tile_mask.bias.astype(jnp.float32)
    tanh = None
    if options.soft_cap is not None:
        tanh = jnp.tanh(s / options.soft_cap)
        s = options.soft_cap * tanh
    return s if tile_mask.visible is None else jnp.where(tile_mask.visible, s, -jnp.inf), tanh


def _drop(options: Options, p: Array, kept: Array | None) -> Array:
    """Weights after dropout, the kept ones scaled up."""
    return p if kept is None else jnp.where(kept, p * (1.0 / (1.0 - options.dropout_rate)), 0.0)


# The products take all leading axes as one: einsum would give axes of size 1 another layout, and XLA:CPU then copies every
# score. Their left side is transposed only where it is a block of queries, because transposing scores takes three times as
# long as the product.


def _times_keys(a: Array, keys: Array, axis: int) -> Float[Array, "*a r x"]:
    """`[..., K, G, r, i]` with `[..., K, c, i]` (axis 2) or `[..., K, i, h]` (axis 1): `[..., K, G, r, c or h]`."""
    left, right = a.reshape(-1, math.prod(a.shape[-3:-1]), a.shape[-1]), keys.reshape(-1, *keys.shape[-2:])
    product = _product(left, right, 2, axis)
    return product.reshape(*a.shape[:-1], product.shape[-1])


def _over_queries(queries: Array, scores: Array) -> Float[Array, "*a h c"]:
    """`[..., K, G, r, h]` with `[..., K, G, r, c]`, summed over G and r: `[..., K, h, c]`."""
    left, right = (x.reshape(-1, math.prod(x.shape[-3:-1]), x.shape[-1]) for x in (queries, scores))
    return _product(left, right, 1, 1).reshape(*queries.shape[:-3], queries.shape[-1], scores.shape[-1])


def _product(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """float32 product over an axis of each, batched over the first axis."""
    return jax.lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((0,), (0,))), preferred_element_type=jnp.float32)
