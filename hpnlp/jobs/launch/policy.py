"""Decisions after an attempt: done, stop, or start again, with how many processes and after which delay.

A restart is worth its time as long as attempts save newer checkpoints. Failures that repeat at the same step, and errors of the
input, are not repeated.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Sequence

from hpnlp.errors import TRY_AGAIN, InputError
from hpnlp.training.processes.signals import INTERRUPTED

ABORTED = 128 + signal.SIGABRT  # code of a process that was stuck and was aborted, or that aborted by itself
KILLED = 128 + signal.SIGKILL
MAX_DELAY = 60.0  # seconds
MAX_PORTS = 20  # ports that are tried in a row
SAME_STEP = 2  # steps between two failures that count as failures of one step: hosts run ahead of devices by as much


class Action(enum.Enum):
    """The step of the supervisor after an attempt."""

    DONE = "done"
    STOP = "stop"
    RESTART = "restart"


@dataclasses.dataclass(frozen=True)
class AttemptOutcome:
    """End of an attempt.

    Attributes:
      code: Exit code of the process that ended it, 128 + N for signal N; 0 if all processes succeeded.
      process: Index of that process.
      phase: Phase that the process was in.
      step: Step that the process had begun.
      last_step: Largest step that a process had begun.
      checkpoint: Step of the newest complete checkpoint afterwards; None without one.
      is_stuck: True if the process made no progress and was aborted.
      port_failed: True if the port of the attempt could not be used.
      stopped: Name of the signal to the supervisor that ended the attempt; "" without one.
    """

    code: int
    process: int = 0
    phase: str = "start"
    step: int = 0
    last_step: int = 0
    checkpoint: int | None = None
    is_stuck: bool = False
    port_failed: bool = False
    stopped: str = ""


@dataclasses.dataclass(frozen=True)
class Decision:
    """Result of `Policy.decide`.

    Attributes:
      action: What follows.
      code: Exit code of the supervisor unless it restarts.
      reason: The reason, for messages.
      delay: Seconds before the restart.
      processes: Number of processes of the next attempt.
    """

    action: Action
    code: int
    reason: str
    delay: float = 0.0
    processes: int = 0


class Policy:
    """Budget of restarts of a run."""

    def __init__(self, max_restarts: int, counts: Sequence[int], checkpoint: int | None) -> None:
        """Begins to count.

        Args:
          max_restarts: Restarts in a row that save no newer checkpoint; 0 for no restarts at all.
          counts: Numbers of processes that may be used, decreasing.
          checkpoint: Step of the newest checkpoint at the start; None without one.
        """
        self._max_restarts = max_restarts
        self._counts = list(counts)
        self._checkpoint = -1 if checkpoint is None else checkpoint
        self._failures = 0  # attempts in a row that saved nothing newer
        self._unsaved = 0  # as before, with those that were preempted, for the delays
        self._ports = 0
        self._last: AttemptOutcome | None = None

    def decide(self, outcome: AttemptOutcome, jitter: float) -> Decision:
        """Decides what follows an attempt.

        Args:
          outcome: End of the attempt.
          jitter: Random number from 0 to 1, which shortens the delay by up to a half.

        Returns:
          The decision.
        """
        processes, code = self._counts[0], outcome.code
        if code == 0:
            return Decision(Action.DONE, 0, "all processes have finished")
        if outcome.stopped:
            return Decision(Action.STOP, INTERRUPTED, f"{outcome.stopped}: stopped")
        if code == InputError.exit_code:
            return Decision(Action.STOP, code, "the input is invalid, and a restart would not change it")
        if outcome.port_failed and self._ports < MAX_PORTS:
            self._ports += 1
            return Decision(Action.RESTART, code, "the port could not be used: another port", 0.0, processes)
        self._ports = 0
        has_saved = self._note_checkpoint(outcome)
        delay = min(MAX_DELAY, 2.0 ** min(self._unsaved, 10)) * (1.0 - 0.5 * jitter)
        self._unsaved += 1
        if code == INTERRUPTED:
            return Decision(Action.RESTART, code, "a process was preempted", delay, processes)
        if self._repeats(outcome):
            return Decision(Action.STOP, code, f"step {outcome.step} fails every time")
        self._last = outcome
        if not self._max_restarts:
            return Decision(Action.STOP, code, "there are no restarts")
        if has_saved:
            return Decision(Action.RESTART, code, "restart from a newer checkpoint", delay, processes)
        self._failures += 1
        if self._failures > self._max_restarts:
            reason = f"{self._failures} attempts in a row have saved no newer checkpoint"
            return Decision(Action.STOP, code, reason)
        reason = f"restart {self._failures} of {self._max_restarts} without a newer checkpoint"
        if len(self._counts) > 1 and self._failures > 1:
            del self._counts[0]
            self._failures = 0
            reason = f"{processes} processes have failed twice: {self._counts[0]} processes"
        return Decision(Action.RESTART, code, reason, delay, self._counts[0])

    def _note_checkpoint(self, outcome: AttemptOutcome) -> bool:
        """Whether the attempt has saved a newer checkpoint, which resets the counts."""
        newest = -1 if outcome.checkpoint is None else outcome.checkpoint
        if newest <= self._checkpoint:
            return False
        self._checkpoint, self._failures, self._unsaved = newest, 0, 0
        return True

    def _repeats(self, outcome: AttemptOutcome) -> bool:
        """True if the last attempt failed in the same way at the same step. A kill from outside has no step.

        A step before the newest checkpoint has been passed, whatever the next one does. Processes that are stuck wait for the
        same result every time, so that hangs at neighbouring steps have different causes.
        """
        last = self._last
        if last is not None and (outcome.checkpoint or 0) >= last.step:
            return False
        is_cause = outcome.code not in (TRY_AGAIN, KILLED) and outcome.step > 0
        return (
            last is not None
            and is_cause
            and (last.code, last.is_stuck) == (outcome.code, outcome.is_stuck)
            and abs(last.step - outcome.step) <= (0 if outcome.is_stuck else SAME_STEP)
        )


def cause(codes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The end that the others follow from, of several processes that end at about the same time.

    Args:
      codes: `(process, exit code)` in the order of their ends, without those of successful processes.

    Returns:
      The first invalid input; or else the first end that is neither an interruption nor the loss of another process.
    """
    secondary = {TRY_AGAIN: 3, INTERRUPTED: 2, ABORTED: 1}
    rank = {InputError.exit_code: -1}
    return min(codes, key=lambda end: rank.get(end[1], secondary.get(end[1], 0)))
