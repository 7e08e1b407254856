"""Rows of an expert computation from tokens, and results of tokens from rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.moe.routing import Routing


def rows_of_tokens(x: Float[Array, "N D"], routing: Routing, source: Int[Array, " R"]) -> Float[Array, "R D"]:
    """Copies the token of each row.

    Args:
      x: Tokens.
      routing: Their assignments.
      source: The assignment of each row; A for a row of padding.

    Returns:
      The rows; 0 in rows of padding.
    """
    return x.at[_token(routing, source, x.shape[0])].get(mode="fill", fill_value=0)


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
        terms = (
            gates[:, j, None] * rows.at[row[:, j]].get(mode="fill", fill_value=0).astype(jnp.float32)
            for j in range(row.shape[1])
        )
        return sum(terms, jnp.zeros((), jnp.float32)).astype(rows.dtype)
    values = rows.at[row].get(mode="fill", fill_value=0).astype(jnp.float32) * routing.gates[:, None]
    return jnp.zeros((count, rows.shape[1]), jnp.float32).at[routing.tokens].add(values).astype(rows.dtype)


def _token(routing: Routing, source: jax.Array, count: int) -> jax.Array:
    """The token of each row; `count` for a row of padding."""
    if routing.tokens is not None:
        return routing.tokens.at[source].get(mode="fill", fill_value=count)
    return jnp.where(source < routing.experts.shape[0], source // (routing.experts.shape[0] // count), count)
