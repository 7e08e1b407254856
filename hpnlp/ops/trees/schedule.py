"""Orders the nodes of graphs so that equal computations of one height are consecutive rows: a schedule, which is data.

Nodes of one signature, a cell and a number of children, form a block of rows, ordered by height. The children of a node have a
smaller height, so that a program computes the rows of one height after another, in chunks of static width. The last chunk of a
height is wider than the rows that are left, and its other rows belong to nodes that the program computes later, which
overwrites them; in the backward pass, which runs in reverse, they come before the rows in place of after them. Each block
therefore has a margin on both sides, and no row needs a mask.

Shape letters: N nodes, E edges, R rows, K blocks, P parents of a node, F places of children, L levels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.ops.trees.graphs import Graph
from hpnlp.types import AnyArray, InputError

# Nodes of a chunk: enough rows for fast products, and little waste where few nodes are left. On two CPU cores, 200 binary
# trees of 48 nodes on average and H = 128, other widths from (32,) to (1024, 128, 16) take 1.00 to 1.16 times as long.
WIDTHS = (128, 16)
ARITIES = (2, 8)  # widest nodes of the first blocks; the next ones are 8 times as wide


class TreeBlock(NamedTuple):
    """Rows of the nodes of one signature.

    Attributes:
      op: Number of the cell.
      arity: Places for the children of a node.
      capacity: Largest number of nodes.
      row: First row, that of the margin before the nodes.
      place: First place of children.
      margin: Rows before the nodes, and after them; 0 for nodes without children, which one chunk computes.
    """

    op: int
    arity: int
    capacity: int
    row: int
    place: int
    margin: int

    @property
    def rows(self) -> int:
        """Number of rows with both margins."""
        return self.capacity + 2 * self.margin


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Order of computation of the nodes of a graph. Arrays are int32, of numpy or of jax.

    Graphs whose schedules have equal `blocks`, `widths` and shapes run by one compiled program.

    Attributes:
      node: `[R]` node of each row, -1 for none. Row 0 is the state of absent children.
      row: `[N]` row of each node.
      children: `[F]` row of the child at each place, 0 for none. Place 0 belongs to no node.
      uses: `[R, P]` places at which the node of a row is a child, 0 for none.
      starts: `[K, L + 1]` first row of each height within the block.
      levels: Number of heights that occur.
      blocks: The blocks of rows.
      widths: Nodes of a chunk, falling; a height is computed in chunks of the first width, and its rest in chunks of the next.
    """

    node: Any
    row: Any
    children: Any
    uses: Any
    starts: Any
    levels: Any
    blocks: tuple[TreeBlock, ...] = dataclasses.field(metadata={"static": True})
    widths: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def rows(self) -> int:
        """Number of rows, R."""
        return self.node.shape[0]


def signatures_of(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Signatures for the nodes of a graph: for each cell, no children, and up to 2, 8, 64, ... children.

    Args:
      graph: A graph of numpy arrays.

    Returns:
      `(op, largest number of children)` of each signature that a node needs.
    """
    signatures = []
    for op in np.unique(graph.op).tolist():
        arity = graph.arity[(graph.op == op) & (graph.height >= 0)]
        bounds = [0, *ARITIES]
        while arity.size and bounds[-1] < arity.max():
            bounds.append(8 * bounds[-1])
        for low, high in zip([-1, *bounds], bounds, strict=False):
            if np.any((arity > low) & (arity <= high)):
                signatures.append((op, high))
    return tuple(signatures)


def rounded(count: int) -> int:
    """The next of sizes that grow by at most a quarter, so that few programs are compiled.

    Args:
      count: A number.

    Returns:
      A number that is at least as large, and at least 16.
    """
    step = 1 << max(2, max(count - 1, 1).bit_length() - 3)
    return max(16, -(-count // step) * step)


def make_schedule(
    graph: Graph,
    signatures: Sequence[tuple[int, int]] | None = None,
    *,
    capacities: Sequence[int] | None = None,
    levels: int | None = None,
    uses: int | None = None,
    widths: tuple[int, ...] = WIDTHS,
) -> Schedule:
    """Makes the schedule of a graph.

    Args:
      graph: The nodes and edges. For a graph of jax arrays, as inside `jax.jit`, all other arguments are required, and whether
        the nodes fit is not checked.
      signatures: `(op, largest number of children)` of each block, ascending for each op. A node belongs to the first of its
        op that has places for its children. None for `signatures_of(graph)`.
      capacities: Largest number of nodes of each block; None for the numbers of the graph, rounded.
      levels: Largest height + 1; None for that of the graph, rounded.
      uses: Largest number of parents of a node; None for that of the graph.
      widths: As in `Schedule`.

    Returns:
      The schedule, of arrays of the same kind as the graph.

    Raises:
      InputError: A node has no block, or a size is too small.

    Cost: O(N log N) on the host.
    """
    xp: Any = np if isinstance(graph.height, np.ndarray) else jnp
    if xp is np:
        signatures = tuple(signatures_of(graph) if signatures is None else signatures)
        levels = -(-(int(graph.height.max(initial=0)) + 1) // 16) * 16 if levels is None else levels
        uses = int(graph.use.max(initial=0)) + 1 if uses is None else uses
    if signatures is None or levels is None or uses is None or (xp is jnp and capacities is None):
        raise InputError(
            "make_schedule: a graph of jax arrays needs signatures, capacities, levels and uses: pass them"
        )
    _check_arguments(signatures, capacities, widths)
    kind = _kinds(xp, graph, signatures)
    if xp is np:
        capacities = _checked_capacities(graph, kind, signatures, capacities, levels, uses)
    assert capacities is not None
    blocks = _blocks(signatures, capacities, max(widths))
    return _schedule(xp, graph, kind, blocks, levels, uses, widths)


def _check_arguments(
    signatures: Sequence[tuple[int, int]], capacities: Sequence[int] | None, widths: Sequence[int]
) -> None:
    """Raises InputError for no signatures, signatures or widths in the wrong order, or another number of capacities."""
    if not signatures:
        raise InputError(
            "signatures: none, as for a graph without nodes: pass at least one node, or signatures=((0, 0),)"
        )
    if any(a[0] == b[0] and a[1] >= b[1] for i, b in enumerate(signatures) for a in signatures[:i]):
        raise InputError(f"signatures={tuple(signatures)}: the numbers of children of an op must ascend: sort them")
    if not widths or any(a <= b for a, b in zip(widths, [*widths[1:], 0], strict=True)):
        raise InputError(f"widths={tuple(widths)}: expected positive numbers that fall, such as {WIDTHS}")
    if capacities is not None and len(capacities) != len(signatures):
        raise InputError(f"capacities: {len(capacities)} for {len(signatures)} signatures: pass one for each of them")


def _kinds(xp: ModuleType, graph: Graph, signatures: Sequence[tuple[int, int]]) -> Any:
    """`[N]` block of each node; K for padding and for nodes without a block."""
    kind = xp.full(graph.height.shape, len(signatures), np.int32)
    for index, (op, arity) in reversed(list(enumerate(signatures))):
        fits = (graph.op == op) & (graph.arity <= arity) & (graph.height >= 0)
        kind = xp.where(fits, np.int32(index), kind)
    return kind


def _checked_capacities(
    graph: Graph,
    kind: np.ndarray,
    signatures: Sequence[tuple[int, int]],
    capacities: Sequence[int] | None,
    levels: int,
    uses: int,
) -> Sequence[int]:
    """The capacities; raises InputError for a graph that has no room in the schedule."""
    counts = np.bincount(kind, minlength=len(signatures) + 1)
    missing = np.flatnonzero((kind == len(signatures)) & (graph.height >= 0))
    if missing.size:
        node = int(missing[0])
        raise InputError(
            f"node {node} has op {graph.op[node]} and {graph.arity[node]} children, which no entry of "
            f"signatures={tuple(signatures)} has places for: add ({graph.op[node]}, {graph.arity[node]})"
        )
    if capacities is None:
        capacities = [rounded(int(count)) for count in counts[:-1]]
    for signature, capacity, count in zip(signatures, capacities, counts, strict=False):
        if count > capacity:
            raise InputError(f"{count} nodes of signature {signature}, with capacity {capacity}: raise the capacity")
    for name, size, largest in (
        ("levels", levels, graph.height.max(initial=0) + 1),
        ("uses", uses, graph.use.max(initial=0) + 1),
    ):
        if size < largest:
            raise InputError(f"{name}={size}: the graph needs {largest}: raise {name}")
    return capacities


def _blocks(signatures: Sequence[tuple[int, int]], capacities: Sequence[int], width: int) -> tuple[TreeBlock, ...]:
    blocks, row, place = [], 1, 1
    for (op, arity), capacity in zip(signatures, capacities, strict=True):
        block = TreeBlock(op, arity, int(capacity), row, place, width if arity else 0)
        blocks.append(block)
        row, place = row + block.rows, place + block.rows * arity
    return tuple(blocks)


def _schedule(
    xp: Any, graph: Graph, kind: Any, blocks: tuple[TreeBlock, ...], levels: int, uses: int, widths: tuple[int, ...]
) -> Schedule:
    """The schedule of nodes whose blocks are known."""
    count, last = len(blocks), blocks[-1]
    rows, places = last.row + last.rows, last.place + last.rows * last.arity
    key = kind * levels + xp.maximum(graph.height, 0)
    order = np.argsort(key, kind="stable").astype(np.int32) if xp is np else jnp.argsort(key).astype(jnp.int32)
    bounds = xp.searchsorted(key[order], np.arange(count * levels + 1, dtype=np.int32)).astype(np.int32)
    before = np.arange(count)[:, None] * levels + np.arange(levels + 1)
    margins = np.array([block.margin for block in blocks], np.int32)
    starts = bounds[before] - bounds[before[:, :1]] + margins[:, None]

    # Tables by block, with an entry for nodes without one, whose row has no place in an array.
    first = np.array([block.row + block.margin for block in blocks] + [rows], np.int32)
    ordered_kind = kind[order]
    ordered_row = xp.asarray(first)[ordered_kind] + np.arange(len(key), dtype=np.int32)
    ordered_row = ordered_row - bounds[np.arange(count + 1) * levels][ordered_kind]
    ordered_row = xp.where(ordered_kind < count, ordered_row, rows)
    row = _put(xp, xp.zeros(key.shape, np.int32), order, ordered_row)
    node = [xp.full(1, -1, np.int32)]
    for index, block in enumerate(blocks):
        places_of_block = np.arange(-block.margin, block.capacity + block.margin, dtype=np.int32)
        of_block = bounds[(index + 1) * levels] - bounds[index * levels]
        at = xp.clip(bounds[index * levels] + places_of_block, 0, len(key) - 1)
        node.append(xp.where((places_of_block >= 0) & (places_of_block < of_block), order[at], -1))

    table = np.array([(b.row, b.place, b.arity) for b in blocks] + [(0, 0, 0)], np.int32)
    parent, exists = xp.maximum(graph.parent, 0), graph.parent >= 0
    of_parent = xp.asarray(table)[kind[parent]]
    place = of_parent[:, 1] + (row[parent] - of_parent[:, 0]) * of_parent[:, 2] + graph.slot
    place = xp.where(exists, place, places)
    below = row[graph.child]
    used = xp.where(exists, below * uses + graph.use, rows * uses)
    return Schedule(
        node=xp.concatenate(node).astype(np.int32),
        row=row,
        children=_put(xp, xp.zeros(places, np.int32), place, below),
        uses=_put(xp, xp.zeros(rows * uses, np.int32), used, place).reshape(rows, uses),
        starts=starts,
        levels=xp.max(graph.height, initial=0).astype(np.int32) + np.int32(1),
        blocks=blocks,
        widths=tuple(widths),
    )


def _put(xp: ModuleType, array: Any, index: AnyArray, values: AnyArray) -> Any:
    """The array with values at distinct indices; an index beyond its end is left out."""
    if xp is np:
        array, size = np.append(array, 0).astype(np.int32), len(array)
        array[np.minimum(index, size)] = values
        return array[:size]
    return array.at[index].set(values, mode="drop")
