"""What both drivers of the executor share: the operands that are known at run time, and the layouts of a tile's arrays."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float

from hpnlp.ops.attention.block_sparse.tile import Options, TokenInfo


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The run-time operands of a call.

    rows, columns: what is known of the queries and the keys, `[B or 1, T]` and `[B or 1, S]`. lengths `[B]`. seed: the
    dropout key's words. heads `[B, N]`: a number for each (batch, head), for dropout; names `[1, N]`: what a bias
    function is asked for. dense `[B, N, T, S]`: what may be seen, any axis 1. bias: an array `[B, N, T, S]`, any axis 1, or
    the constants of the bias function.
    """

    rows: TokenInfo
    columns: TokenInfo
    lengths: Any = None
    seed: Any = None
    heads: Any = None
    names: Any = None
    dense: Any = None
    bias: Any = None


def zeros(*shape: int) -> Float[Array, "..."]:
    """float32, whatever the default of the process."""
    return jnp.zeros(shape, jnp.float32)


def rows_of(x: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B K G T H"]:
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[3]).transpose(0, 2, 3, 1, 4)


def key_rows(x: Float[Array, "B S K H"]) -> Float[Array, "B K S H"]:
    return x.transpose(0, 2, 1, 3)


def from_rows(x: Float[Array, "B K G T H"]) -> Float[Array, "B T N H"]:
    return x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[4])


def from_columns(x: Float[Array, "B K H S"]) -> Float[Array, "B S K H"]:
    return x.transpose(0, 3, 1, 2)


def per_row(x: Float[Array, "B T N"], kv_heads: int) -> Float[Array, "B K G T"]:
    return x.reshape(*x.shape[:2], kv_heads, -1).transpose(0, 2, 3, 1)


# Each of these is one transpose: XLA:CPU makes a pass of each step of one that takes several.


def to_blocks(x: Array, block: int, heads: tuple[int, ...] = (), fill: Any = 0) -> Array:
    """Cuts T into blocks, padded at the end: `[B, T, N, ...]` with N as `heads` (`[B, T]` where there are none) as
    `[blocks, B, *heads, block, ...]`."""
    count, n = -(-x.shape[1] // block), len(heads)
    if count * block != x.shape[1]:
        padding = [(0, 0), (0, count * block - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, padding, constant_values=fill)
    x = x.reshape(x.shape[0], count, block, *heads, *x.shape[2 + (n > 0) :])
    return x.transpose(1, 0, *range(3, 3 + n), 2, *range(3 + n, x.ndim))


def from_blocks(x: Array, length: int) -> Array:
    """Undoes `to_blocks` of arrays with heads and features."""
    x = x.transpose(1, 0, x.ndim - 2, *range(2, x.ndim - 2), x.ndim - 1)
    return x.reshape(x.shape[0], -1, math.prod(x.shape[3:-1]), x.shape[-1])[:, :length]


def by_key_head(x: Any, kv_heads: int) -> Any:
    """`[B, N or 1, ...]` as `[B, K or 1, G or 1, ...]`."""
    if x is None or x.shape[1] == 1:
        return None if x is None else x[:, :, None]
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def bias_tile(
    options: Options, constants: Any, names: Array, rows: TokenInfo, columns: TokenInfo
) -> Float[Array, "*a r c"]:
    """The bias function over a tile, `[..., K, G, r, c]`; names `[..., K, G]`."""
    function = jaxpr_as_fun(ClosedJaxpr(options.bias, constants))
    one = lambda head, q, k: function(head, q, k)[0]  # noqa: E731
    tile = jax.vmap(jax.vmap(one, (None, None, 0)), (None, 0, None))
    heads = jax.vmap(jax.vmap(tile, (0, None, None)), (0, None, None))
    lead = jnp.broadcast_shapes(names.shape[:-2], rows.spot.shape[:-1], columns.spot.shape[:-1])
    flat = lambda x, keep: jnp.broadcast_to(x, lead + x.shape[-keep:]).reshape(-1, *x.shape[-keep:])  # noqa: E731
    spot = lambda side: flat(jnp.where(side.index >= 0, side.spot, 0), 1)  # noqa: E731  (padding asks for a place that is there)
    out = jax.vmap(heads)(flat(names, 2), spot(rows), spot(columns))
    return out.reshape(*lead, *out.shape[1:]).astype(jnp.float32)


def add_bias(sums: Any, bias: Any, operand: Any, db: Array) -> Any:
    """`sums` and what a tile's `db` means for the operand of its bias."""
    shape = jax.eval_shape(bias, operand)
    axes = tuple(axis for axis in range(db.ndim) if shape.shape[axis] == 1 != db.shape[axis])
    db = db.sum(axis=axes, keepdims=True).astype(shape.dtype) if axes else db.astype(shape.dtype)
    (found,) = jax.vjp(bias, operand)[1](db)
    return jax.tree.map(lambda a, b: a if b.dtype == jax.dtypes.float0 else a + b.astype(a.dtype), sums, found)
