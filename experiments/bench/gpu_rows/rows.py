"""Types of the GPU benchmark (rows, cases, what a case gets), and the comparison of programs that all cases share."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hpnlp import measure

ROUNDS = 7  # the least and the largest of seven ratios bound the median with a probability of 98 %
# Results of programs that a row compares may differ by this much, relative to the norm of each vector (`difference`).
TOLERANCES = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 4e-2}


@dataclasses.dataclass(frozen=True)
class Card:
    """Rates of the device, measured before the rows.

    Attributes:
      bandwidth: Bytes per second of a copy, read and written.
      products: FLOP/s of a square product by dtype.
    """

    bandwidth: float
    products: Mapping[str, float]

    def least_seconds(self, work: Work) -> float:
        """Time that the products or the bytes of some work take at the measured rates, whichever is longer."""
        return max(work.flops / self.products.get(work.dtype, float("inf")), work.bytes / self.bandwidth)


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs of products in a dtype, and the fewest bytes that must be read and written."""

    flops: float = 0.0
    dtype: str = "bfloat16"
    bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Context:
    """Settings of a case.

    Attributes:
      rehearse: Whether everything is tiny and on a CPU.
      card: Rates of the device; None while they are measured.
      differing: Names of the parity groups that differ, which are not timed.
    """

    rehearse: bool
    card: Card | None = None
    differing: frozenset[str] = frozenset()

    @property
    def rounds(self) -> int:
        return 2 if self.rehearse else ROUNDS


Record = dict[str, Any]  # plain values, for JSON


@dataclasses.dataclass(frozen=True)
class Case:
    """The smallest part of a row that is planned, run under a time limit and written.

    Attributes:
      name: Distinct within the row.
      seconds: Expected duration with compilation.
      run: Function of a Context that returns records.
      later: Whether the case waits until the other cases of all rows are measured.
      rehearsed: Whether a rehearsal runs it; others differ from rehearsed ones in sizes only.
    """

    name: str
    seconds: float
    run: Callable[[Context], Sequence[Record]]
    later: bool = False
    rehearsed: bool = True


@dataclasses.dataclass(frozen=True)
class Target:
    """A figure that a row reports.

    Attributes:
      bar: The least that counts; None for a figure without one.
      goal: The figure that is aimed for.
      more_is_better: Whether larger figures are better, as of utilisation.
    """

    bar: float | None = None
    goal: float | None = None
    more_is_better: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the benchmark.

    Attributes:
      name: Name for --only.
      title: Description of the measurement.
      peer: Description of the other side of the comparison, empty without one.
      targets: Figure -> Target.
      cases: Cases in their order.
      checks: Names of parity cases that must have finished, and of groups of them that must agree, for the row to be measured.
      alone: Whether the row has a process of its own, whose arrays may take all of the device's memory.
    """

    name: str
    title: str
    peer: str
    targets: Mapping[str, Target]
    cases: Sequence[Case]
    checks: tuple[str, ...] = ()
    alone: bool = False

    def target(self, figure: str) -> Target:
        """Target of a figure, which a kernel of ours beside the default one has as well ("pallas: FIGURE")."""
        return self.targets.get(figure) or self.targets.get(figure.rpartition(": ")[2], Target())


class AbsentPeerError(Exception):
    """The library of a peer is missing, or does not see the device."""


class Calls:
    """Calls without arguments that are compared.

    Attributes:
      running: Name -> call.
      failed: Name -> reason, of calls that do not run or whose results differ.
      absent: Name -> reason, of peers that are not installed.
    """

    def __init__(self) -> None:
        self.running: dict[str, Callable[[], Any]] = {}
        self.failed: dict[str, str] = {}
        self.absent: dict[str, str] = {}

    def add(self, name: str, make: Callable[[], Callable[[], Any]]) -> Any:
        """Makes a call and runs it once; a failure is recorded.

        Args:
          name: Name of the call.
          make: Function that compiles the program and returns the call.

        Returns:
          The result of the call, or None if it failed.
        """
        try:
            call = make()
            result = jax.block_until_ready(call())
        except AbsentPeerError as error:
            self.absent[name] = str(error)
            return None
        except Exception as error:  # any library may raise anything on a device that it does not know
            self.failed[name] = reason(error)
            print(f"  {name} does not run: {self.failed[name]}", flush=True)
            return None
        self.running[name] = call
        return result


def reason(error: BaseException) -> str:
    """The first line of an error's message, with its type."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"


def plural(count: int, noun: str) -> str:
    """A count and its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def interval(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest of the figures of some rounds."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def compare(context: Context, what: str, calls: Calls, works: Mapping[str, Work] | Work = Work()) -> Record:
    """Times calls side by side.

    Args:
      context: Settings.
      what: Name of the record.
      calls: The calls. Those named "ours" and "ours, NAME" are divided by each of the others.
      works: Work of all calls, or of each by its name.

    Returns:
      The record: milliseconds, ratios with their least and largest, achieved shares of the roofline, and failures.
    """
    times = measure.timeit(
        calls.running, rounds=context.rounds, warmup=2, min_seconds=0.0 if context.rehearse else 0.03, enqueue=True
    )
    ours = {name: f"{name.removeprefix('ours, ')}: " * (name != "ours") for name in times if name.startswith("ours")}
    figures = {
        f"{prefix}time over {peer}": interval(times[name].ratios(times[peer]))
        for name, prefix in ours.items()
        for peer in times
        if peer not in ours
    }
    shares = {}
    for name, timing in times.items():
        work = works if isinstance(works, Work) else works.get(name, Work())
        if context.card and (least := context.card.least_seconds(work)):
            shares[name] = least / timing.median
    return {
        "what": what,
        "figures": figures,
        "ms": {name: 1e3 * timing.median for name, timing in times.items()},
        "roofline": shares,
        "failed": calls.failed,
        "absent": calls.absent,
        "all_ms": {name: [1e3 * s for s in timing.all] for name, timing in times.items()},
    }


def difference(actual: Any, expected: Any) -> float | None:
    """Largest relative difference of two trees of arrays, vector by vector along the last axis.

    A vector's difference is relative to its own norm, or to the mean norm of all vectors if that is larger, so that one wrong
    vector among thousands is seen.

    Args:
      actual: A tree of arrays.
      expected: A tree with arrays of the same shapes.

    Returns:
      The difference, or None if a number is not finite or shapes differ.
    """
    largest = 0.0
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for a, b in ((np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs):
        if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
            return None
        a, b = np.atleast_1d(a), np.atleast_1d(b)
        norms = np.linalg.norm(b, axis=-1)
        scale = np.maximum(norms, np.sqrt(np.mean(np.square(norms))))
        gaps = np.linalg.norm(a - b, axis=-1)
        largest = max(largest, float(np.max(np.where(gaps == 0, 0.0, gaps / np.where(scale == 0, 1e-30, scale)))))
    return largest
