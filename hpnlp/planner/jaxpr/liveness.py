"""Peak memory of a program, by liveness analysis of its buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(eq=False)
class Value:
    """The result of an equation, in a buffer of its own or fused into the equations that read it."""

    size: int  #: bytes of the buffer on one device, 0 where the value is fused
    shards: int  #: number of devices that the array is divided over
    sources: frozenset[Value]  #: buffers that the value is computed from; only itself where it has a buffer
    external: bool = False  #: whether its buffer belongs to the caller: arguments and constants
    sliced: bool = False  #: whether a loop cuts it out of a stacked operand
    iterations: tuple[Value, ...] = ()  #: results of the iterations, for the stacked result of an unrolled loop
    part: str = ""  #: part of the model that computes a fused value

    @property
    def has_buffer(self) -> bool:
        return self in self.sources


@dataclasses.dataclass(eq=False)
class Step:
    """An operation of a program that reads and writes buffers."""

    reads: Sequence[Value]  #: buffers that the step reads
    writes: Sequence[Value]  #: buffers that the step writes
    scratch: int = 0  #: bytes that the step needs besides these buffers while it runs
    aliases: Sequence[tuple[Value, Value]] = ()  #: (input, output) pairs that may share a buffer


def peak_memory(steps: Sequence[Step], results: Sequence[Value], donated: bool) -> int:
    """Peak memory of the buffers that a sequence of steps writes.

    A buffer lives from the step that writes it to the last step that reads it, or to the end where it is a result. An output
    takes the buffer of an input that it may alias where that input is not read again and has the same size.

    Args:
      steps: Steps of the program, in the order in which they run.
      results: Values that the program returns.
      donated: Whether results are written to the buffers of donated arguments, and take no memory of their own.

    Returns:
      Bytes on one device; external buffers do not count.
    """
    last_use = {buffer: index for index, step in enumerate(steps) for buffer in (*step.reads, *step.writes)}
    excluded = {buffer for buffer in last_use if buffer.external or (donated and buffer in results)}
    last_use.update(dict.fromkeys((buffer for buffer in results if buffer in last_use), len(steps)))
    last_used_at: dict[int, list[Value]] = {}
    for buffer, index in last_use.items():
        last_used_at.setdefault(index, []).append(buffer)
    live = peak = 0
    for index, step in enumerate(steps):
        freed = {buffer for buffer in last_used_at.get(index, ()) if buffer not in excluded}
        allocated = {buffer for buffer in step.writes if buffer not in excluded}
        for source, target in step.aliases:
            if source in freed and target in allocated and source.size == target.size:
                freed.remove(source)
                allocated.remove(target)
        live += sum(buffer.size for buffer in allocated)
        peak = max(peak, live + step.scratch)
        live -= sum(buffer.size for buffer in freed)
    return peak
