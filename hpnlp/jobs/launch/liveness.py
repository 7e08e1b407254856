"""Liveness of processes: progress that they report, limits of each phase, and the process that holds up the others.

Times are those of the supervisor's monotonic clock. Clocks of other hosts and times of files are not used.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence

KNOWN = 5  # durations of a phase from which its limit follows
KEPT = 50  # durations that are kept
TIMES_MEDIAN = 10.0
STRAGGLER_RATIO, STRAGGLER_SHARE, STRAGGLER_SECONDS = 1.5, 0.05, 0.01

# Phase -> seconds without a line after which a process counts as stuck, as long as fewer than KNOWN durations are known. Setup
# holds the reading of data and all compilation.
LIMITS = {
    "setup": 1800.0,
    "data": 600.0,
    "step": 600.0,
    "eval": 1800.0,
    "checkpoint": 600.0,
    "baselines": 1800.0,
    "report": 1800.0,
}
EVALUATION_SECONDS = 120.0  # least limit of a batch of an evaluation; of a step, `hang_seconds`


@dataclasses.dataclass
class Pace:
    """Durations of phases in all processes and attempts of a run, from which limits follow.

    Attributes:
      wait: Seconds that processes wait for each other at the start.
      hang_seconds: Least limit of a step.
      seconds: Phase -> durations, the newest last.
    """

    wait: float
    hang_seconds: float
    seconds: dict[str, collections.deque[float]] = dataclasses.field(
        default_factory=lambda: {phase: collections.deque(maxlen=KEPT) for phase in ("step", "eval")}
    )

    def limit(self, phase: str) -> float:
        """Seconds without a line after which a process in this phase counts as stuck.

        Returns:
          The limit: ten times the median duration, but no less than a floor.
        """
        if phase in ("start", "join"):
            return self.wait + 60.0
        kind = "step" if phase == "data" else phase
        known = self.seconds.get(kind, ())
        default = LIMITS.get(phase, LIMITS["setup"])
        if len(known) < KNOWN:
            return default
        floor = max(EVALUATION_SECONDS, self.hang_seconds) if kind == "eval" else self.hang_seconds
        return min(max(floor, TIMES_MEDIAN * statistics.median(known)), max(default, floor))


class Watch:
    """Progress of one process.

    Attributes:
      phase: Phase of its last line; "start" before the first.
      step: Step of its last line, which it has begun.
      time: Time of its last line.
      has_stepped: True if it has begun a second step, so that it has done one.
      host_seconds: Seconds of the last steps before their dispatch, such as those for data.
    """

    def __init__(self, pace: Pace, now: float) -> None:
        self.phase, self.step, self.time = "start", 0, now
        self._pace = pace
        self._step_seconds, self._is_timed = 0.0, False  # both describe the current step
        self.has_stepped = self._has_begun = self._is_late = False
        self.host_seconds: collections.deque[float] = collections.deque(maxlen=KEPT)  # before the dispatch of each step

    def line(self, text: str, now: float) -> None:
        """Reads a line "PHASE STEP".

        Args:
          text: The line; others are ignored.
          now: The time.
        """
        phase, _, number = text.partition(" ")
        if not phase or not number.isdecimal():
            return
        step, elapsed = int(number), now - self.time
        if self.phase in ("data", "step"):
            self._step_seconds += elapsed
        if phase == "data" and step != self.step:
            if step == self.step + 1 and self._is_timed:
                self._pace.seconds["step"].append(self._step_seconds)
            self.has_stepped |= step == self.step + 1 and self._has_begun
            self._step_seconds, self._is_timed, self._has_begun = 0.0, not self._is_late, True
        self._is_timed &= phase != "setup"  # a step that compiles is not typical
        if phase == "step" and self.phase == "data" and not self._is_late:
            self.host_seconds.append(elapsed)
        if phase == "eval" and self.phase == "eval" and not self._is_late:
            self._pace.seconds["eval"].append(elapsed)
        elif phase == "eval":
            self._pace.seconds["eval"].clear()  # an evaluation may compile first
        self.phase, self.step, self.time = phase, step, now

    def set_late(self, seconds: float) -> None:
        """Leaves a pause of the supervisor out of the silence, since its processes may have been paused with it.

        While lines are read later than they were written, steps and batches are left out of the known durations.

        Args:
          seconds: Length of the pause; 0 if there was none.
        """
        self._is_late = seconds > 0
        self._is_timed &= not self._is_late
        self.time += seconds

    def silent(self, now: float) -> float:
        """Seconds since the last line, without pauses of the supervisor.

        Args:
          now: The time.

        Returns:
          The seconds.
        """
        return now - self.time

    def typical_step(self) -> float:
        """Median seconds of a step of the run.

        Returns:
          The seconds; 0 before the first steps.
        """
        known = self._pace.seconds["step"]
        return statistics.median(known) if known else 0.0

    def is_overdue(self, now: float) -> bool:
        """True if the process counts as stuck, or waits for one that is.

        Args:
          now: The time.

        Returns:
          Whether it does.
        """
        return self.silent(now) > self._pace.limit(self.phase)


def culprit(watches: Sequence[Watch]) -> int:
    """Index of the process that holds up the others, which wait for it in a collective.

    Args:
      watches: Progress of all processes.

    Returns:
      The process of the lowest step; among equals one that is not computing a step; then the one that is silent for longest.
    """
    return min(range(len(watches)), key=lambda i: (watches[i].step, watches[i].phase == "step", watches[i].time))


def straggler(watches: Sequence[Watch]) -> int | None:
    """Index of a process that delays the others in each step, by work on its host such as reading data.

    Args:
      watches: Progress of all processes.

    Returns:
      The process whose median time before the dispatch of a step, over the last KEPT steps, exceeds 1.5 times that of the
      others, and by more than 5 % of a step and 10 ms, which processes that share a core differ by; None if there is none.
    """
    if len(watches) < 2 or any(len(watch.host_seconds) < KEPT for watch in watches):
        return None
    typical = [statistics.median(watch.host_seconds) for watch in watches]
    worst = max(range(len(typical)), key=typical.__getitem__)
    others = statistics.median(seconds for index, seconds in enumerate(typical) if index != worst)
    delay = max(STRAGGLER_SECONDS, STRAGGLER_SHARE * watches[worst].typical_step())
    least = max(STRAGGLER_RATIO * others, others + delay)
    is_straggler = typical[worst] > least
    return worst if is_straggler else None
