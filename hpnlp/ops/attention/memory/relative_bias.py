"""Scores of distances as a bias that attention computes tile by tile (Transformer-XL)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hpnlp.ops.attention.pair_bias import PairBias, Span
from hpnlp.ops.helpers.custom_vjp import vary_alike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativeBias(PairBias):
    """The bias `queries[i] . embeddings[top - d] * scale` of query i and key j, at the distance d = i + offset - j.

    Embedding x of those that a tile reads belongs to the pairs of query t and key s with r - 1 - t + s = x. The bias of a tile
    is therefore a product of r rows and r + c columns, of which each row is moved by one column.

    Attributes:
      queries: `[B, N, T, H]`.
      embeddings: `[1, N, Y, H]`, from the distance `top` down to 0.
      top: The largest distance of a tile.
      offset: Number of keys before those of the queries.
      scale: Factor of the products.
    """

    queries: Any
    embeddings: Any
    top: int = dataclasses.field(metadata={"static": True})
    offset: int = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.queries, self.embeddings

    def with_arrays(self, arrays: tuple[Array, ...]) -> RelativeBias:
        queries, embeddings = arrays
        return dataclasses.replace(self, queries=queries, embeddings=embeddings)

    def windows(self, queries: Span, keys: Span) -> tuple[tuple[Span, Span], ...]:
        features = 0, self.queries.shape[3]
        first = self.top - (self.offset + queries[0] + queries[1] - 1 - keys[0])
        # Tiles without visible pairs, which a schedule may contain, may be outside of the embeddings.
        first = min(max(first, 0), self.top) if isinstance(first, int) else jnp.clip(first, 0, self.top)
        return (queries, features), ((first, queries[1] + keys[1]), features)

    def combine(self, *tiles: Array) -> Float[Array, "B N r c"]:
        queries, embeddings = tiles
        rows, columns = queries.shape[2], embeddings.shape[2]
        scores = _product(queries, _alike(embeddings, queries), 2, 2)
        # Rows of one number less, so that each row starts one column before the row above.
        flat = scores.reshape(-1, rows * columns)[:, rows - 1 : rows - 1 + rows * (columns - 1)]
        return flat.reshape(*queries.shape[:3], columns - 1)[..., : columns - rows] * self.scale

    def gradients(self, db: Array, *tiles: Array) -> tuple[Array, ...]:
        queries, embeddings = tiles
        # float16 overflows under loss scaling before it does at the inputs.
        dtype = jnp.float32 if queries.dtype == jnp.float16 else queries.dtype
        scores = _unshifted((db * self.scale).reshape(-1, *db.shape[2:])).astype(dtype)
        queries, embeddings = queries.astype(dtype), _alike(embeddings.astype(dtype), queries)
        d_queries = _product(scores, embeddings, 2, 1).reshape(queries.shape)
        # Rows that see nothing may hold NaN, and 0 * NaN is NaN.
        queries = jnp.where(jnp.isfinite(queries), queries, jnp.zeros((), dtype))
        # Features before embeddings, because XLA:CPU takes three times as long for products with transposed scores.
        d_embeddings = _product(queries, scores, 1, 1).reshape(*queries.shape[:2], queries.shape[3], -1)
        return d_queries, d_embeddings.sum(axis=0, keepdims=True).swapaxes(2, 3)


def _alike(embeddings: Array, queries: Array) -> Array:
    """The embeddings of each example."""
    return jnp.broadcast_to(embeddings, (queries.shape[0], *embeddings.shape[1:]))


def _unshifted(x: Array) -> Float[Array, "tiles r L"]:
    """Scores by column from scores by key [tiles, r, c]: row t begins r - 1 - t columns later.

    First by the remainder of t, and then by its quotient, in copies of rows. Reshapes of padded rows, as for the scores, would
    take as long as a product: XLA:CPU fuses them to one loop that divides for each number.
    """
    tiles, rows, keys = x.shape
    inner = next(i for i in range(int(rows**0.5), 0, -1) if rows % i == 0)
    outer = rows // inner
    x = x.reshape(tiles, outer, inner, keys)
    by_remainder = _zeros_like(x, (tiles, outer, inner, keys + inner - 1))
    for i in range(inner):
        by_remainder = lax.dynamic_update_slice(by_remainder, x[:, :, i : i + 1], (0, 0, i, inner - 1 - i))
    columns = _zeros_like(x, (tiles, outer, inner, rows + keys))
    for i in range(outer):
        row = by_remainder[:, i : i + 1]
        columns = lax.dynamic_update_slice(columns, row, (0, i, 0, inner * (outer - 1 - i)))
    return columns.reshape(tiles, rows, rows + keys)


def _zeros_like(x: Array, shape: tuple[int, ...]) -> Array:
    """Zeros of a shape, in the dtype of x, that vary over its mesh axes."""
    return vary_alike(jnp.zeros(shape, x.dtype), x)[0]


def _product(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """float32 product of matrices over an axis of each; other axes are joined."""
    a, b = (x.reshape(-1, *x.shape[-2:]) for x in (a, b))
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((0,), (0,))), preferred_element_type=jnp.float32)
