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
      size: Largest number of rows of a block.
      expected: Value of `used` at equal loads, for estimates of cost.
      is_first: No expert has two of these blocks, or a block of an earlier group.
      used: int32 scalar, number of blocks.
      experts: int32 `[n]`, the expert of each block.
      starts: int32 `[n]`, the first row of each block.
      rows: int32 `[n]`, number of rows of each block.
    """

    size: int = dataclasses.field(metadata={"static": True})
    expected: int = dataclasses.field(metadata={"static": True})
    is_first: bool = dataclasses.field(metadata={"static": True})
    used: Any
    experts: Any
    starts: Any
    rows: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertSchedule:
    """Rows of a grouped product: assignments sorted by expert.

    Attributes:
      row: int32 `[A]`, the row of each assignment; the number of rows for an assignment to no expert.
      source: int32 `[R]`, the assignment of each row; A for a row without one.
      counts: int32 `[E]`, assignments of each expert.
      blocks: The blocks of each size, smallest first, which together cover the rows of all experts once.
    """

    row: Any
    source: Any
    counts: Any
    blocks: tuple[Blocks, ...]


def block_sizes(assignments: int, experts: int) -> tuple[int, ...]:
    """Sizes of blocks for a number of assignments: few steps between them, since each block reads the matrices of its expert.

    Measured on two cores with experts of 128 x 256 to 512 x 1,024; see `experiments/bench/experts.py`.

    Args:
      assignments: Assignments of tokens to experts; a symbol in an exported program that takes any number.
      experts: Number of experts E.

    Returns:
      Sizes in falling order.
    """
    if not isinstance(assignments, int):
        return 128, 32, 8
    mean = assignments // experts
    if mean >= 384:
        return 512, 384, 256, 128, 64
    if mean >= 256:
        return 256, 192, 128, 64
    if mean >= 16:
        unit = 2 ** (mean.bit_length() - 3) if mean >= 64 else 8
        return 5 * unit, 4 * unit, 3 * unit, 2 * unit
    return (8,) if mean >= 2 else (1,)


def make_schedule(
    expert_of_assignment: Int[Array, " A"], experts: int, sizes: tuple[int, ...], expected: int
) -> ExpertSchedule:
    """Sorts assignments by expert, and divides the rows of each expert into blocks.

    An expert has as many blocks of the largest size as it fills, and one block of the smallest size that holds the rest.

    Args:
      expert_of_assignment: Expert of each assignment; `experts` for none.
      experts: Number of experts E.
      sizes: Sizes of blocks in falling order; () for none.
      expected: Number of assignments for estimates of cost, which assume equal loads.

    Returns:
      The schedule, with R = A rows.

    Cost: a sort of A numbers.
    """
    (count,) = expert_of_assignment.shape
    sorted_experts, order = _sorted(expert_of_assignment, experts)
    first, counts = _bounds(sorted_experts, experts)
    row, source = _rows(sorted_experts, order, first, first, count, count)
    if not sizes:
        return ExpertSchedule(row, source, counts, ())
    full, left = counts // sizes[0], counts % sizes[0]
    usual_full, usual_left = divmod(expected // experts, sizes[0])
    if not isinstance(expected, int):  # a symbol cannot be compared with sizes
        usual_left = sizes[-1]
    used = min(experts, count) if isinstance(count, int) else experts
    blocks = []
    for size, smaller in zip(sizes, (*sizes[1:], 0), strict=True):
        number = ((left > smaller) & (left <= size)).astype(jnp.int32)
        usual, most, start = int(smaller < usual_left <= size), used, first + full * sizes[0]
        if size == sizes[0]:
            number, usual, most, start = number + full, usual + usual_full, most + count // size, first
        is_first = size != sizes[0]
        blocks.append(_blocks(number, start, first + counts, size, most, usual * experts, is_first))
    return ExpertSchedule(row, source, counts, tuple(blocks[::-1]))


def equal_schedule(expert_of_assignment: Int[Array, " A"], experts: int, most: int) -> ExpertSchedule:
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
    return ExpertSchedule(*_rows(sorted_experts, order, bounds, first, experts * most, most), counts, ())


def _bounds(sorted_experts: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """`(index of the first assignment of each expert in sorted order [E], number of its assignments [E])`."""
    numbers = jnp.arange(experts + 1, dtype=jnp.int32)
    count = sorted_experts.shape[0]
    if isinstance(count, int) and count > 256:
        bounds = jnp.searchsorted(sorted_experts, numbers).astype(jnp.int32)
    else:  # faster for a few; the number of steps of a search would depend on a symbolic number of assignments
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


def _blocks(
    number: jax.Array, first: jax.Array, last: jax.Array, size: int, most: int, expected: int, is_first: bool
) -> Blocks:
    """The blocks of one size.

    Args:
      number: `[E]`, blocks of each expert.
      first: `[E]`, the first row of these blocks.
      last: `[E]`, the row behind the expert's last one.
      size: Largest number of rows of a block.
      most: A static bound of the number of blocks.
      expected: Number of blocks for estimates of cost.
      is_first: See `Blocks`.
    """
    ends = jnp.cumsum(number)
    index = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.sum(ends[:-1][None] <= index[:, None], axis=1, dtype=jnp.int32)
    starts = (first[expert] + (index - (ends - number)[expert]) * size).astype(jnp.int32)
    rows = jnp.minimum(last[expert] - starts, size)
    return Blocks(size, expected, is_first, ends[-1].astype(jnp.int32), expert, starts, rows)
