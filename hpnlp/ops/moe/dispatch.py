"""Rows of an expert computation from tokens, and results of tokens from rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.custom_vjp import vary_alike, zeros_alike
from hpnlp.ops.moe.routing import Routing


def rows_of_tokens(
    x: Float[Array, "N D"], routing: Routing, source: Int[Array, " R"], row: Int[Array, " A"]
) -> Float[Array, "R D"]:
    """Copies the token of each row.

    Args:
      x: Tokens.
      routing: Their assignments.
      source: The assignment of each row; A for a row of padding.
      row: The row of each assignment; R for none.

    Returns:
      The rows; 0 in rows of padding. The derivative adds up the rows of a token in float32.
    """
    count = x.shape[0]
    token = token_of_rows(routing, source, count)
    if routing.tokens is None:
        x, token, row = vary_alike(x, token, row.reshape(count, -1))
    else:
        x, token = vary_alike(x, token)
    return _copied(count, x, token, row if routing.tokens is None else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copied(count: int, x: jax.Array, token: jax.Array, rows: jax.Array | None) -> jax.Array:
    """The tokens `[R]` of x `[N, D]`. rows: `[N, k]`, the rows of each token; None if a token may have any number."""
    return x.at[token].get(mode="fill", fill_value=0)


def _copied_forward(
    count: int, x: jax.Array, token: jax.Array, rows: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    # Not _copied itself: products of the Hessian differentiate this function in forward mode.
    return jnp.asarray(x).at[token].get(mode="fill", fill_value=0), (token, rows)


def _copied_backward(
    count: int, residuals: tuple[jax.Array, jax.Array | None], dy: jax.Array
) -> tuple[jax.Array, None, None]:
    token, rows = residuals
    return sums_of_tokens(dy, rows, token, count).astype(dy.dtype), None, None


_copied.defvjp(_copied_forward, _copied_backward)


def tokens_of_rows(
    rows: Float[Array, "R D"], routing: Routing, row: Int[Array, " A"], count: int
) -> Float[Array, "N D"]:
    """Adds up the results of each token's experts, each multiplied by its gate.

    Args:
      rows: Results of experts.
      routing: Assignments of tokens, with gates.
      row: The row of each assignment; R for none.
      count: Number of tokens N.

    Returns:
      The sums in the dtype of `rows`, accumulated in float32 in the order of a token's assignments; 0 for tokens without
      an expert.
    """
    if routing.tokens is None:
        row, gates = row.reshape(count, -1), routing.gates.reshape(count, -1)
        terms = (gates[:, j, None] * _float32_rows(rows, row[:, j]) for j in range(row.shape[1]))
        return sum(terms, jnp.zeros((), jnp.float32)).astype(rows.dtype)
    values = _float32_rows(rows, row) * routing.gates[:, None]
    return jnp.zeros((count, rows.shape[1]), jnp.float32).at[routing.tokens].add(values).astype(rows.dtype)


def sums_of_tokens(values: jax.Array, rows: jax.Array | None, token: jax.Array, count: int) -> jax.Array:
    """The float32 sums `[N, D]` of the values `[R, D]` of each token's rows.

    Args:
      values: A value for each row.
      rows: `[N, k]`, the rows of each token, R for none; None if a token may have any number.
      token: `[R]`, the token of each row; N for none.
      count: Number of tokens N.
    """
    if rows is None:
        sums = zeros_alike(values, (count, values.shape[1]), jnp.float32)
        return sums.at[token].add(values.astype(jnp.float32), mode="drop")
    # Gathers have a fixed order, and are faster than a scatter.
    terms = (_float32_rows(values, rows[:, j]) for j in range(rows.shape[1]))
    return sum(terms, jnp.zeros((), jnp.float32))


def _float32_rows(rows: jax.Array, index: jax.Array) -> jax.Array:
    """The rows at the indices, 0 at those beyond the last row, in float32."""
    return rows.at[index].get(mode="fill", fill_value=0).astype(jnp.float32)


def token_of_rows(routing: Routing, source: jax.Array, count: int) -> jax.Array:
    """The token of each row; `count` for a row of padding."""
    if routing.tokens is not None:
        return routing.tokens.at[source].get(mode="fill", fill_value=count)
    return jnp.where(source < routing.experts.shape[0], source // (routing.experts.shape[0] // count), count)
