"""Schedule of a grouped product: rows sorted by expert and padded to blocks of one expert each."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of equal size, of which the first `used` hold rows.

    Attributes:
      size: Rows of a block.
      expected: Value of `used` at equal loads, for estimates of cost.
      used: int32 scalar, number of blocks.
      experts: int32 `[n]`, the expert of each block.
      starts: int32 `[n]`, the first row of each block.
    """

    size: int = dataclasses.field(metadata={"static": True})
    expected: int = dataclasses.field(metadata={"static": True})
    used: Any
    experts: Any
    starts: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Rows of a grouped product: assignments sorted by expert, each expert's padded to a multiple of the smallest block.

    Attributes:
      row: int32 `[A]`, the row of each assignment; the number of rows for an assignment to no expert.
      source: int32 `[R]`, the assignment of each row; A for a row of padding.
      counts: int32 `[E]`, assignments of each expert.
      blocks: The blocks of each size, largest first, which together cover the rows of all experts once.
    """

    row: Any
    source: Any
    counts: Any
    blocks: tuple[Blocks, ...]


def block_sizes(assignments: int, experts: int) -> tuple[int, ...]:
    """Sizes of blocks for a number of assignments: large ones for most rows, small ones for the rest of each expert.

    Measured on two cores with experts of 256 x 512; see `experiments/bench/experts.py`.

    Args:
      assignments: Assignments of tokens to experts; a symbol in an exported program that takes any number.
      experts: Number of experts E.

    Returns:
      Sizes in falling order, of which each divides the one before.
    """
    if not isinstance(assignments, int):
        return 128, 32, 8
    mean = assignments // experts
    if mean >= 256:
        return 256, 32
    if mean >= 16:
        return 128, 32
    return (8,) if assignments >= 8 else (1,)


def make_schedule(
    expert_of_assignment: Int[Array, " A"], experts: int, sizes: tuple[int, ...], expected: int
) -> Schedule:
    """Sorts assignments by expert, and divides their rows into blocks.

    Args:
      expert_of_assignment: Expert of each assignment; `experts` for none.
      experts: Number of experts E.
      sizes: Sizes of blocks in falling order, of which each divides the one before.
      expected: Number of assignments for estimates of cost, which assume equal loads.

    Returns:
      The schedule, with R = A + min(E, A) x (smallest size - 1) rows, rounded up to the largest size.

    Cost: a sort of A numbers.
    """
    smallest = sizes[-1]
    (count,) = expert_of_assignment.shape
    used = min(experts, count) if isinstance(count, int) else experts
    rows = -(-(count + used * (smallest - 1)) // sizes[0]) * sizes[0]
    sorted_experts, order = _sorted(expert_of_assignment, experts)
    bounds, counts = _bounds(sorted_experts, experts)
    left = -(-counts // smallest) * smallest
    first = jnp.cumsum(left) - left
    row, source = _rows(sorted_experts, order, bounds, first, rows, rows)
    mean = -(-expected // (experts * smallest)) * smallest
    blocks = []
    for size in sizes:
        number = left // size
        blocks.append(_blocks(number, first, size, rows // size, mean // size * experts))
        first, left, mean = first + number * size, left - number * size, mean % size
    return Schedule(row, source, counts, tuple(blocks))


def equal_schedule(expert_of_assignment: Int[Array, " A"], experts: int, most: int) -> Schedule:
    """Sorts assignments by expert, with the same number of rows for each expert.

    Args:
      expert_of_assignment: Expert of each assignment; `experts` for none.
      experts: Number of experts E.
      most: Rows of an expert. Assignments beyond them, in the order of assignments, get no row.

    Returns:
      The schedule, of E x `most` rows, without blocks.
    """
    sorted_experts, order = _sorted(expert_of_assignment, experts)
    bounds, counts = _bounds(sorted_experts, experts)
    first = jnp.arange(experts, dtype=jnp.int32) * most
    return Schedule(*_rows(sorted_experts, order, bounds, first, experts * most, most), counts, ())


def _bounds(sorted_experts: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """`(index of the first assignment of each expert in sorted order [E], number of its assignments [E])`."""
    numbers = jnp.arange(experts + 1, dtype=jnp.int32)
    if isinstance(sorted_experts.shape[0], int):
        bounds = jnp.searchsorted(sorted_experts, numbers).astype(jnp.int32)
    else:  # the number of steps of a search depends on the number of assignments
        bounds = jnp.sum(sorted_experts[:, None] < numbers[None], axis=0, dtype=jnp.int32)
    return bounds[:-1], bounds[1:] - bounds[:-1]


def _rows(
    sorted_experts: jax.Array, order: jax.Array, bounds: jax.Array, first: jax.Array, rows: int, most: int
) -> tuple[jax.Array, jax.Array]:
    """`(row of each assignment [A], assignment of each row [R])`, for the first row of each expert and its `most` rows."""
    count, experts = sorted_experts.shape[0], bounds.shape[0]
    place = jnp.arange(count, dtype=jnp.int32) - jnp.append(bounds, 0)[sorted_experts]
    sorted_rows = place + jnp.append(first, 0)[sorted_experts]
    has_row = (sorted_experts < experts) & (place < most) & (sorted_rows < rows)
    sorted_rows = jnp.where(has_row, sorted_rows, rows)
    row = jnp.zeros(count, jnp.int32).at[order].set(sorted_rows, unique_indices=True)
    source = jnp.full(rows, count, jnp.int32).at[sorted_rows].set(order, mode="drop")
    return row, source


def _sorted(expert_of_assignment: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """`(experts in ascending order, assignments in that order)`; assignments of one expert keep their order."""
    (count,) = expert_of_assignment.shape
    bits = max(count - 1, 1).bit_length() if isinstance(count, int) else 32
    if (experts + 1) << bits > np.iinfo(np.int32).max:
        order = jnp.argsort(expert_of_assignment, stable=True).astype(jnp.int32)
        return expert_of_assignment[order], order
    # One sort of packed keys takes a fifth of the time of an argsort on a CPU.
    keys = jnp.sort(expert_of_assignment.astype(jnp.int32) << bits | jnp.arange(count, dtype=jnp.int32))
    return keys >> bits, keys & ((1 << bits) - 1)


def _blocks(number: jax.Array, first: jax.Array, size: int, most: int, expected: int) -> Blocks:
    """The blocks of one size. number: `[E]`, of each expert; first: `[E]`, their first row; most: a static bound of all."""
    ends = jnp.cumsum(number)
    index = jnp.arange(max(most, 1), dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(ends, index, side="right"), number.shape[0] - 1).astype(jnp.int32)
    starts = first[expert] + (index - (ends - number)[expert]) * size
    return Blocks(size, expected, ends[-1].astype(jnp.int32), expert, starts.astype(jnp.int32))
