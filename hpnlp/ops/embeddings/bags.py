"""Embedding bags: one vector of each set of ids, from padded ids with lengths, or from ids with segments.

Padded bags are arrays `[B, L]` with the true lengths; segments are all ids one after another with the number of the bag of
each. Padding costs L lookups for each bag, segments cost as many lookups as there are ids: they are the faster form where
lengths differ much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.table_rows import TableRows
from hpnlp.types import InputError

# Name -> exponent p: the sum of the vectors is divided by (number of vectors)^p.
MODES = {"sum": 0.0, "sqrt": 0.5, "mean": 1.0}

Table = Float[Array, "V D"] | TableRows


@array_op("B", ids="B")
def embedding_bag(
    table: Table,
    ids: Int[Array, "B L"],
    lengths: Int[Array, " B"],
    *,
    mode: str = "mean",
    weights: Float[Array, "B L"] | None = None,
    unit: bool = False,
) -> Float[Array, "B D"]:
    """Vectors of padded bags.

    Args:
      table: [V, D] vectors of the ids, or some of the rows.
      ids: [B, L] ids of the bags; ids at a place beyond the length of their bag are padding, of any value from 0 to V - 1.
      lengths: [B] numbers of ids, 0 to L.
      mode: An entry of MODES: "sum"; "mean", the sum divided by the true length; or "sqrt", by its square root.
      weights: [B, L] factors of the vectors; lengths are not changed by them. None for 1.
      unit: Divide each result by its norm.

    Returns:
      [B, D] in the dtype of the table, accumulated in float32; 0, without a gradient, for a bag without ids.

    Raises:
      InputError: Unknown mode, or shapes that do not fit.

    Cost:
      B L D reads; the gradient adds B L rows to a dense table, or to the rows.

    References:
      Joulin et al. 2017, "Bag of tricks for efficient text classification", for the mean.
      Wu et al. 2018, "StarSpace: embed all the things!", for the square root.
    """
    if ids.ndim != 2 or lengths.shape != ids.shape[:1]:
        raise InputError(f"ids {ids.shape}, lengths {lengths.shape}: expected [B, L] and [B]; pad_bags makes them")
    _check(mode, weights, ids.shape)
    is_id = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] < lengths.astype(jnp.int32)[:, None]
    total = _masked(table[ids], is_id, weights).sum(axis=1)
    return _scaled(total, is_id.sum(axis=1), mode, unit).astype(table.dtype)


@array_op("", ids="N")
def segment_embedding_bag(
    table: Table,
    ids: Int[Array, " N"],
    segments: Int[Array, " N"],
    bags: int,
    *,
    mode: str = "mean",
    weights: Float[Array, " N"] | None = None,
    unit: bool = False,
    is_sorted: bool = False,
) -> Float[Array, "bags D"]:
    """Vectors of bags whose ids stand one after another, without padding between them.

    Args:
      table: [V, D] vectors of the ids, or some of the rows.
      ids: [N] ids of all bags.
      segments: [N] number of the bag of each id; ids of other numbers than 0 to bags - 1 are padding.
      bags: Number of bags.
      mode: As for `embedding_bag`.
      weights: [N] factors of the vectors. None for 1.
      unit: Divide each result by its norm.
      is_sorted: The segments ascend.

    Returns:
      [bags, D] in the dtype of the table, accumulated in float32; 0, without a gradient, for a bag without ids.

    Raises:
      InputError: Unknown mode, or shapes that do not fit.

    Cost:
      N D reads and additions.
    """
    return pool_segments(table[ids], segments, bags, mode=mode, weights=weights, unit=unit, is_sorted=is_sorted)


@array_op("", x="N")
def pool_segments(
    x: Float[Array, "N D"],
    segments: Int[Array, " N"],
    bags: int,
    *,
    mode: str = "mean",
    weights: Float[Array, " N"] | None = None,
    unit: bool = False,
    is_sorted: bool = False,
) -> Float[Array, "bags D"]:
    """Pools vectors that are looked up already, as `segment_embedding_bag` pools rows of a table.

    Args:
      x: [N, D] vectors.
      segments: [N] number of the bag of each vector; vectors of other numbers than 0 to bags - 1 do not count.
      bags: Number of bags.
      mode: As for `embedding_bag`.
      weights: [N] factors of the vectors. None for 1.
      unit: Divide each result by its norm.
      is_sorted: The segments ascend.

    Returns:
      [bags, D] in the dtype of x.

    Raises:
      InputError: Unknown mode, or shapes that do not fit.
    """
    if x.ndim != 2 or segments.shape != x.shape[:1]:
        raise InputError(f"vectors {x.shape}, segments {segments.shape}: expected [N, D] and [N]; join_bags makes them")
    if bags < 1:
        raise InputError(f"bags is {bags}: expected the number of bags, at least 1")
    _check(mode, weights, segments.shape)
    is_item = (segments >= 0) & (segments < bags)
    # Padding is added to an extra bag, which is cut off; a negative index would count from the end.
    to = jnp.where(is_item, segments, bags).astype(jnp.int32)
    vectors = _masked(x, is_item, weights)

    def add(values: Array) -> Array:
        return jax.ops.segment_sum(values, to, bags + 1, indices_are_sorted=is_sorted)[:bags]

    return _scaled(add(vectors), add(is_item.astype(jnp.int32)), mode, unit).astype(x.dtype)


@array_op("...", x="...")
def unit_norm(x: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
    """Divides vectors by their Euclidean norms.

    Args:
      x: [..., D] vectors.

    Returns:
      [..., D] in the dtype of x, computed in float32; 0, without a gradient, for a vector of zeros.
    """
    y = x.astype(jnp.float32)
    # Squares of numbers under 1e-19 or over 1e19 are no float32. The result does not depend on the divisor, and so has no
    # gradient by it.
    largest = lax.stop_gradient(jnp.abs(y).max(axis=-1, keepdims=True, initial=0.0))
    is_zero = largest == 0
    y = y / jnp.where(is_zero, 1.0, largest)
    squares = jnp.square(y).sum(axis=-1, keepdims=True)
    # The square root has an infinite slope at 0, which would reach the gradient as 0 times infinity.
    return (y * jnp.where(is_zero, 0.0, lax.rsqrt(jnp.where(is_zero, 1.0, squares)))).astype(x.dtype)


def pad_bags(
    bags: Sequence[Sequence[int] | np.ndarray], *, width: int = 0, vocab: int = 0
) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, " B"]]:
    """Pads bags to one length, on the host.

    Args:
      bags: Ids of each bag.
      width: Length L; 0 for that of the longest bag.
      vocab: Number of rows of the table, V; 0 to leave ids unchecked.

    Returns:
      `(ids [B, L], lengths [B])`, int32; padding is 0.

    Raises:
      InputError: There are no bags, one has no ids, more than `width`, or an id that is no row of the table.
    """
    arrays = _checked(bags, vocab)
    longest = max(range(len(arrays)), key=lambda i: len(arrays[i]))
    if width and len(arrays[longest]) > width:
        raise InputError(f"bag {longest} has {len(arrays[longest])} ids, and width is {width}: cut it, or raise width")
    ids = np.zeros((len(arrays), width or len(arrays[longest])), np.int32)
    for row, bag in zip(ids, arrays, strict=True):
        row[: len(bag)] = bag
    return ids, np.array([len(bag) for bag in arrays], np.int32)


def join_bags(
    bags: Sequence[Sequence[int] | np.ndarray], *, vocab: int = 0
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """Joins bags to ids and segments, on the host.

    Args:
      bags: Ids of each bag.
      vocab: Number of rows of the table, V; 0 to leave ids unchecked.

    Returns:
      `(ids [N], segments [N])`, int32; the segments ascend.

    Raises:
      InputError: There are no bags, one has no ids, or an id that is no row of the table.
    """
    arrays = _checked(bags, vocab)
    return np.concatenate(arrays), np.repeat(np.arange(len(arrays), dtype=np.int32), [len(bag) for bag in arrays])


def _checked(bags: Sequence[Any], vocab: int) -> list[np.ndarray]:
    """The bags as int32 arrays; raises InputError for one without ids, or with an id that is no row."""
    if not len(bags):
        raise InputError("there are no bags: pass at least one")
    arrays = [np.asarray(bag) for bag in bags]
    for number, bag in enumerate(arrays):
        if bag.size == 0:
            raise InputError(
                f"bag {number} is empty: expected at least one id; leave it out, or pass an id for unknown"
            )
        if bag.ndim != 1 or bag.dtype.kind not in "iu":
            raise InputError(f"bag {number} is {bag.dtype} {bag.shape}: expected a list of whole numbers")
        if bag.min() < 0 or bag.max() >= (vocab or 2**31):
            wrong = bag[(bag < 0) | (bag >= (vocab or 2**31))][0]
            expected = f"0 to {vocab - 1}, rows of the table" if vocab else "0 to 2^31 - 1"
            raise InputError(f"bag {number} has the id {wrong}: expected {expected}")
    return [bag.astype(np.int32) for bag in arrays]


def _check(mode: str, weights: Array | None, shape: tuple[int, ...]) -> None:
    """Raises InputError for an unknown mode, or weights of another shape than the ids."""
    if mode not in MODES:
        raise InputError(f"mode {mode!r}: expected {', '.join(map(repr, MODES))}")
    if weights is not None and weights.shape != shape:
        raise InputError(f"weights {weights.shape}: expected {shape}, a factor of each id")


def _masked(x: Array, counts: Array, weights: Array | None) -> Array:
    """Vectors times their weights in float32, and 0 where they do not count, even if one of both is NaN there."""
    # Both are masked before their product: in its gradient, the zeros of a mask behind it would meet the NaN.
    vectors = jnp.where(counts[..., None], x.astype(jnp.float32), 0.0)
    if weights is None:
        return vectors
    return vectors * jnp.where(counts, weights.astype(jnp.float32), 0.0)[..., None]


def _scaled(total: Array, count: Array, mode: str, unit: bool) -> Array:
    """Sums divided as the mode says, and by their norms."""
    if unit:  # a positive factor does not change a unit vector
        return unit_norm(total)
    size = jnp.maximum(count, 1).astype(jnp.float32)
    return total if mode == "sum" else total / (size ** jnp.float32(MODES[mode]))[:, None]
