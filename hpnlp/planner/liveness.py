"""Arrays that have places in a device's memory, step after step, and the most bytes of them that are live at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax


@dataclasses.dataclass(eq=False)
class Value:
    """What an equation makes. size: of a device's part, in bytes. parts: how many devices share it out. roots: the placed
    arrays that it is computed from on the way, itself where it is one. given: in a place that is not the program's. cut: out
    of a stack, by a loop. turns: what it is a stack of, where a loop has made it turn by turn."""

    size: int
    parts: int
    roots: frozenset[Value]
    given: bool = False
    cut: bool = False
    turns: tuple[Value, ...] = ()


@dataclasses.dataclass(eq=False)
class Step:
    """reads, makes: placed arrays. inside: bytes that it takes beside them. over: pairs of these of which the latter may take
    the former's place."""

    reads: Sequence[Value]
    makes: Sequence[Value]
    inside: int
    over: Sequence[tuple[Value, Value]] = ()


def peak(steps: Sequence[Step], results: Sequence[Value], donated: bool) -> int:
    """The most bytes that are live at once, of arrays that are in no place of a caller's. donated: results are in the place of
    what was given."""
    last = {array: at for at, step in enumerate(steps) for array in (*step.reads, *step.makes)}
    apart = {array for array in last if array.given or (donated and array in results)}
    last.update(dict.fromkeys((array for array in results if array in last), len(steps)))
    ends: dict[int, list[Value]] = {}
    for array, at in last.items():
        ends.setdefault(at, []).append(array)
    live = most = 0
    for at, step in enumerate(steps):
        dead = {array for array in ends.get(at, ()) if array not in apart}
        fresh = {array for array in step.makes if array not in apart}
        for old, new in step.over:
            if old in dead and new in fresh and old.size == new.size:
                dead.remove(old)
                fresh.remove(new)
        live += sum(array.size for array in fresh)
        most = max(most, live + step.inside)
        live -= sum(array.size for array in dead)
    return most


def is_hosted(aval: Any) -> bool:
    """Whether it rests in the host's memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def size_of(aval: Any) -> int:
    """Bytes on the device."""
    if is_hosted(aval):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "dtype") else 0
