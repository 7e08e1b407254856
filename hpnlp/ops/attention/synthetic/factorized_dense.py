"""Softmax attention with the scores of a Factorized Dense Synthesizer, by blocks of keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.attention.block_sparse.flash import flash
from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.operands import Operands
from hpnlp.ops.attention.pair_bias import PairBias, Span
from hpnlp.ops.attention.validate import validate
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError

# Queries and about the number of keys of a tile.
QUERIES, KEYS = 512, 512


@array_op("B T N", v="B T")
def factorized_dense_attend(
    v: Float[Array, "B S N H"],
    a: Float[Array, "B T N A"],
    b: Float[Array, "_ _ _ C"],
    mask: Mask = Full(),  # noqa: B008  (frozen)
    operands: Operands = Operands(),  # noqa: B008  (frozen)
) -> Float[Array, "B T N H"]:
    """Softmax attention with scores `a[t, s % A] * b[t, s // A]`, without an array of all pairs.

    Args:
      v: Values.
      a: Scores within blocks of A keys.
      b: Factors of C blocks.
      mask: The pairs that may influence each other, the same for all heads.
      operands: Segments, positions (for the mask and for dropout) and dropout, as for `attend`.

    Returns:
      The mixed values, in the dtype of v; computed in float32. A token that sees none has 0.

    Raises:
      InputError: There are more keys than A C, each head has a mask of its own, there are other operands, or arguments do not
        fit, as for `attend`.

    Cost: O(B N H) time for each visible pair and O(B N (T + S) (A + H)) memory, also in the backward pass.

    References:
      Tay et al. 2020, "Synthesizer", sec. 3.2.
    """
    (batch, keys, heads, _), (length, block), blocks = v.shape, a.shape[1::2], b.shape[3]
    if a.shape[:3] != (batch, length, heads) or b.shape[:3] != a.shape[:3]:
        raise InputError(f"a {a.shape}, b {b.shape}, v {v.shape}: expected equal B and N, and equal T in a and b")
    if keys > block * blocks:
        raise InputError(f"{keys} keys: expected at most {block} x {blocks}, the sizes of both factors")
    if mask.heads is not None:
        raise InputError(f"{mask}: expected one mask for all heads")
    operands.check_only(
        "factorized_dense_attend", "segment_ids", "kv_segment_ids", "positions", "kv_positions", "dropout_rate"
    )
    a, b, values = (x.astype(jnp.float32) for x in (a, b, v))
    bias = FactorizedBias(a.transpose(0, 2, 1, 3), b.transpose(0, 2, 1, 3))
    operands = dataclasses.replace(operands, bias=bias)
    # The executor has no form without queries: those of one feature are the cheapest.
    q, k = (jnp.zeros((batch, count, heads, 1), jnp.float32) for count in (length, keys))
    validate(q, k, values, mask, operands)
    tile = min(QUERIES, 1 << (length - 1).bit_length()), block * max(1, min(KEYS, keys) // block)
    o: Any = flash(q, k, values, mask, operands, block_size=tile)
    return o.astype(v.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FactorizedBias(PairBias):
    """The bias `within[t, s % A] * blocks[t, s // A]` of query t and key s. Tiles have a multiple of A keys.

    Attributes:
      within: float32 `[B, N, T, A]`.
      blocks: float32 `[B, N, T, C]`.
    """

    within: Any
    blocks: Any

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.within, self.blocks

    def with_arrays(self, arrays: tuple[Array, ...]) -> FactorizedBias:
        within, blocks = arrays
        return FactorizedBias(within, blocks)

    def windows(self, queries: Span, keys: Span) -> tuple[tuple[Span, Span], ...]:
        size, (first, count) = self.within.shape[3], keys
        return (queries, (0, size)), (queries, (first // size, count // size))

    def combine(self, *tiles: Array) -> Float[Array, "B N r c"]:
        within, blocks = tiles
        return (blocks[..., None] * within[..., None, :]).reshape(*within.shape[:3], -1)

    def gradients(self, db: Array, *tiles: Array) -> tuple[Array, ...]:
        # Rows that see nothing may hold NaN, and 0 * NaN is NaN.
        within, blocks = (jnp.where(jnp.isfinite(x), x, jnp.float32(0)) for x in tiles)
        db = db.reshape(*blocks.shape, within.shape[3])
        d_within = jnp.einsum("bntca,bntc->bnta", db, blocks, precision="highest")
        return d_within, jnp.einsum("bntca,bnta->bntc", db, within, precision="highest")
