"""The schedule of ring attention: which device computes attention between which chunks of a sequence, and at which hop.

Each of n devices holds two of the 2 n chunks of every sequence. Queries stay; at hop h, device d holds the keys and values of
device (d - h) mod n. In sequence order, device d has chunks 2 d and 2 d + 1. Under a causal mask the last device would then
have the most work, and a zigzag balances it: chunks d and 2 n - 1 - d (Grattafiori et al. 2024, "The Llama 3 herd of models",
sec. 3.3.2; Brandon et al. 2023, "Striped attention", balance by another order). Pairs of chunks that a mask hides are not
computed, and hops at which no device needs the keys are left out.

Everything here is static and computed on the host; `context_parallel` runs the schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpnlp.ops.attention import Mask

# Kinds of pairs of chunks (query chunk, key chunk). A kind k >= FIRST_MASK is partly visible, by `masks[k - FIRST_MASK]`.
HIDDEN = 0
VISIBLE = 1
FIRST_MASK = 2

# Cost of a pair of chunks relative to a visible one. A partly visible pair is taken as half visible, as on the diagonal of a
# causal mask.
PARTIAL_COST = 0.5

Chunks = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class RingSchedule:
    """Schedule of one mask over a ring of devices.

    Attributes:
      chunks: The two chunks of each device.
      masks: For each partly visible kind of pairs, the mask between a query chunk and a key chunk.
      kinds: `[2 n][2 n]`, the kind of each pair (query chunk, key chunk): HIDDEN, VISIBLE or FIRST_MASK + i.
      first_hop: The first hop; before it, keys and values are sent `first_hop` devices on.
      hop_count: Number of hops, each of which ends with sending keys and values one device on, except the last.
    """

    chunks: Chunks
    masks: tuple[Any, ...]
    kinds: tuple[tuple[int, ...], ...]
    first_hop: int
    hop_count: int

    @property
    def hops(self) -> range:
        """The hops, which count on from `first_hop`, and may exceed the number of devices."""
        return range(self.first_hop, self.first_hop + self.hop_count)

    @property
    def pair_counts(self) -> tuple[int, int]:
        """(pairs of chunks that are computed, all pairs of chunks), over all devices."""
        return sum(kind != HIDDEN for row in self.kinds for kind in row), len(self.kinds) ** 2


def make_schedule(mask: Mask, length: int, chunks: Chunks) -> RingSchedule:
    """Schedules a mask over a ring.

    A mask that depends on i - j alone looks the same for all pairs of chunks at the same distance. Any other mask is over
    positions that are known at run time only, so every pair of chunks counts as partly visible.

    Args:
      mask: A mask that is the same for all heads.
      length: Tokens per sequence, a multiple of the number of chunks.
      chunks: The two chunks of each device.

    Returns:
      The schedule.

    Cost: evaluates the mask on at most 4 `length` pairs of tokens.
    """
    devices, chunk_count = len(chunks), 2 * len(chunks)
    if not mask.relative:
        return RingSchedule(chunks, (mask,), ((FIRST_MASK,) * chunk_count,) * chunk_count, 0, devices)
    kinds, distances = _classify_pairs(mask, chunk_count, length // chunk_count)
    hops = _needed_hops(kinds, chunks)
    if not hops:
        return RingSchedule(chunks, (), ((HIDDEN,) * chunk_count,) * chunk_count, 0, 0)
    first_hop, hop_count = _shortest_range(hops, devices)
    masks = tuple(mask.shift(distance) if distance else mask for distance in distances)
    return RingSchedule(chunks, masks, tuple(tuple(row) for row in kinds.tolist()), first_hop, hop_count)


def _classify_pairs(mask: Mask, chunk_count: int, size: int) -> tuple[np.ndarray, list[int]]:
    """`(kinds [chunks, chunks], distances)` of a relative mask over chunks of `size` tokens.

    distances: for each partly visible kind, the index of the query chunk's first token less that of the key chunk.
    """
    kinds = np.zeros((chunk_count, chunk_count), int)
    distances: list[int] = []
    for apart in range(1 - chunk_count, chunk_count):
        gaps = np.arange((apart - 1) * size + 1, (apart + 1) * size)  # index of the query less index of the key
        visible = mask.at(np.maximum(gaps, 0), np.maximum(-gaps, 0))
        if not visible.any():
            kind = HIDDEN
        elif visible.all():
            kind = VISIBLE
        else:
            kind = FIRST_MASK + len(distances)
            distances.append(apart * size)
        np.fill_diagonal(kinds[max(apart, 0) :, max(-apart, 0) :], kind)
    return kinds, distances


def _needed_hops(kinds: np.ndarray, chunks: Chunks) -> set[int]:
    """The hops, out of 0 to n - 1, at which at least one device has a pair of chunks to compute."""
    devices, chunk_table = len(chunks), np.array(chunks)
    return {
        hop
        for hop in range(devices)
        if any(kinds[np.ix_(chunk_table[d], chunk_table[(d - hop) % devices])].any() for d in range(devices))
    }


def _shortest_range(hops: set[int], devices: int) -> tuple[int, int]:
    """`(first, count)` of the shortest range of consecutive hops, modulo the devices, that contains all of `hops`."""
    # The range follows the longest gap, a run of hops that are not needed.
    gaps = [next(n for n in range(devices) if (start + n) % devices in hops) for start in range(devices)]
    start = int(np.argmax(gaps))
    return (start + gaps[start]) % devices, devices - gaps[start]


def assign_chunks(masks: Sequence[Mask], length: int, devices: int) -> Chunks:
    """Assigns chunks to devices, in sequence order or as a zigzag, whichever is faster for all masks together.

    Args:
      masks: The masks of the layers.
      length: Tokens per sequence.
      devices: Number of devices in the ring.

    Returns:
      The two chunks of each device.
    """
    in_order = tuple((2 * d, 2 * d + 1) for d in range(devices))
    zigzag = tuple((d, 2 * devices - 1 - d) for d in range(devices))
    return zigzag if _cost(masks, length, zigzag) < _cost(masks, length, in_order) else in_order


def _cost(masks: Sequence[Mask], length: int, chunks: Chunks) -> float:
    """Work of the slowest device, summed over the hops of all masks, in visible pairs of chunks."""
    cost, devices, chunk_table = 0.0, len(chunks), np.array(chunks)
    for mask in masks:
        schedule = make_schedule(mask, length, chunks)
        work = np.array([0.0, 1.0, *[PARTIAL_COST] * len(schedule.masks)])[np.array(schedule.kinds)]
        for hop in schedule.hops:
            cost += max(work[np.ix_(chunk_table[d], chunk_table[(d - hop) % devices])].sum() for d in range(devices))
    return cost
