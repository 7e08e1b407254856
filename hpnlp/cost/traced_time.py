"""Time of a compiled program by part of the model, from a trace of JAX's profiler.

The profiler records when each operation of the program ran, and the text of the compiled program names the part that each
operation belongs to (`cost.parts`). At times when operations of several parts run side by side, each counts for its share.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hpnlp.cost.parts import OTHER, operation_part
from hpnlp.errors import InputError

# Operations that the compiler added without a name: copies, slices and stacks of loops, and initial values.
COPIES = "loops and copies"
CALLS = 6  # calls of a trace

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Span:
    """A time in which one operation ran in one thread or stream, in seconds."""

    begin: float | int
    end: float | int
    operation: str


@dataclasses.dataclass(frozen=True)
class TracedTime:
    """Time of a call by part.

    Attributes:
      seconds: Part -> seconds, among them OTHER for named operations outside of all parts and COPIES.
      together: Parts that ran side by side, in alphabetical order and joined by "+" -> seconds.
      idle: Seconds in which no operation of the program was recorded.
    """

    seconds: Mapping[str, float]
    together: Mapping[str, float]
    idle: float

    @property
    def total(self) -> float:
        """Seconds of a call."""
        return sum(self.seconds.values()) + self.idle

    @property
    def coverage(self) -> float:
        """Share of the time in which operations were recorded."""
        return 1 - self.idle / self.total if self.total else 0.0

    def bound(self, *names: str) -> float:
        """Largest factor by which a call becomes faster if some parts take no time.

        Args:
          *names: Parts of `seconds`.

        Returns:
          The factor, of 1 or more.
        """
        saved = sum(seconds for key, seconds in self.together.items() if set(key.split("+")) <= set(names))
        return self.total / (self.total - saved) if saved < self.total else float("inf")


def operation_parts(program: str) -> dict[str, str]:
    """The part of each operation of a compiled program.

    Args:
      program: Its text, as `jax.stages.Compiled.as_text` returns it.

    Returns:
      Name of the operation -> entry of `parts.PARTS`, OTHER, or COPIES. A fusion without a name has the most frequent part of
      its operations.
    """
    own: dict[str, str] = {}
    called: dict[str, str] = {}
    inside: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    computation = ""
    for line in program.splitlines():
        if match := _INSTRUCTION.match(line):
            name = match[1]
            path = _NAME.search(line)
            own[name] = (operation_part(path[1]) or OTHER) if path else COPIES
            if path:
                inside[computation][own[name]] += 1
            if target := _CALLED.search(line):
                called[name] = target[1]
        elif match := _COMPUTATION.match(line):
            computation = match[1]
    return {
        name: inside[called[name]].most_common(1)[0][0] if part == COPIES and inside[called.get(name, "")] else part
        for name, part in own.items()
    }


def exclusive(spans: Iterable[Span]) -> list[Span]:
    """Spans of one thread without the time of those that lie within them, such as the operations of a loop.

    Args:
      spans: Spans that lie within each other or apart.

    Returns:
      Spans that do not overlap, in the order of time.
    """
    result: list[Span] = []
    stack: list[Span] = []
    now: float | int = 0.0

    def advance(to: float | int) -> None:
        nonlocal now
        while stack and stack[-1].end <= to:
            top = stack.pop()
            if top.end > now:
                result.append(Span(now, top.end, top.operation))
            now = max(now, top.end)
        if stack and to > now:
            result.append(Span(now, to, stack[-1].operation))
        now = max(now, to)

    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        advance(span.begin)
        stack.append(span)
    advance(float("inf"))
    return [span for span in result if span.end < float("inf")]


def divide(threads: Sequence[Sequence[Span]], part_of: Mapping[str, str], calls: int = 1) -> TracedTime:
    """Divides the time of a trace among parts.

    Args:
      threads: Spans of each thread or stream; operations that `part_of` lacks are left out.
      part_of: Result of `operation_parts`.
      calls: Number of calls in the trace.

    Returns:
      The time of one call. Times without an operation between the first and the last one are idle.
    """
    edges: list[tuple[float, int, str]] = []
    for spans in threads:
        for span in exclusive(span for span in spans if span.operation in part_of):
            part = part_of[span.operation]
            edges += [(span.begin, 1, part), (span.end, -1, part)]
    edges.sort()
    seconds: dict[str, float] = collections.defaultdict(float)
    together: dict[str, float] = collections.defaultdict(float)
    active: collections.Counter[str] = collections.Counter()
    idle, last = 0.0, edges[0][0] if edges else 0.0
    for time, change, part in edges:
        running = {name: count for name, count in active.items() if count}
        if not running:
            idle += time - last
        for name, count in running.items():
            seconds[name] += (time - last) * count / sum(running.values())
        if running:
            together["+".join(sorted(running))] += time - last
        active[part] += change
        last = time
    by_call = [{name: value / calls for name, value in values.items()} for values in (seconds, together)]
    return TracedTime(by_call[0], by_call[1], idle / calls)


def trace(program: Callable[[], Any], text: str, calls: int = CALLS) -> TracedTime:
    """Traces some calls of a program that is compiled and warm.

    Args:
      program: Function without arguments that runs the compiled program.
      text: Text of the compiled program.
      calls: Number of calls.

    Returns:
      The time of one call by part.

    Raises:
      InputError: The trace holds no operation of the program.
    """
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(calls):
                jax.block_until_ready(program())
        (path,) = Path(directory).glob("**/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        threads = [list(_spans(line, plane.name)) for plane in data.planes for line in plane.lines]
    divided = divide(threads, operation_parts(text), calls)
    if not divided.seconds:
        raise InputError(
            "the trace holds no operation of the program: on a GPU, compile it with xla_gpu_enable_command_buffer='', since "
            "command buffers hide operations from the profiler"
        )
    return divided


def _spans(line: Any, plane: str) -> Iterable[Span]:
    """Spans of a line of a trace. The operation is the name of an event on a CPU, and its statistic `hlo_op` on a GPU."""
    for event in line.events:
        begin, operation = event.start_ns * 1e-9, event.name
        if plane.startswith("/device"):
            with warnings.catch_warnings():  # a warning of jaxlib 0.12 that is an error would end the process
                warnings.simplefilter("ignore")
                operation = next((str(value) for name, value in event.stats if name == "hlo_op"), operation)
        yield Span(begin, begin + event.duration_ns * 1e-9, operation)
