"""Progress of this process, written to a pipe for the supervisor that started the process.

Lines are "PHASE STEP": the phase of work that begins (one of `metrics.Clock`, or join or report), and the number of the step
that it is a part of. A line is repeated while a phase makes progress. A process that is stopped or stuck writes none, although
its threads may still answer the heartbeats of JAX. Nothing is written without a supervisor.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

VARIABLE = "HPNLP_PROGRESS"  # environment variable with the descriptor of the pipe
LOOKAHEAD = 2  # steps that may run on the devices behind the one that is reported
REPEAT_SECONDS = 0.1  # least time between equal lines


class ProgressPipe:
    """The pipe of this process, if it has one.

    Attributes:
      base: Phase of work outside of `metrics.Clock`: "setup", then "step", and after the last step "report".
    """

    def __init__(self) -> None:
        self.base = "setup"
        self._descriptor = -1
        self._line, self._time = ("", 0), 0.0

    def open(self) -> None:
        """Opens the pipe that the environment names, for this process only and not for those that it starts."""
        if (text := os.environ.pop(VARIABLE, "")).isdecimal():
            with contextlib.suppress(OSError):
                os.set_inheritable(int(text), False)
                os.set_blocking(int(text), False)
                self._descriptor = int(text)

    def report(self, phase: str = "", step: int | None = None) -> None:
        """Writes a line. A line that does not fit into the pipe is dropped.

        Args:
          phase: Phase that begins; "" if the current phase continues.
          step: Step that begins; None if the current step continues.
        """
        line = (phase or self._line[0], self._line[1] if step is None else step)
        now = time.monotonic()
        if self._descriptor < 0 or (line == self._line and now - self._time < REPEAT_SECONDS):
            return
        self._line, self._time = line, now
        try:
            os.write(self._descriptor, f"{line[0]} {line[1]}\n".encode())
        except BlockingIOError:
            pass
        except OSError:  # the supervisor has ended
            self._descriptor = -1

    def pace(self, results: Sequence[tuple[int, Any]]) -> None:
        """Waits for the step before the last LOOKAHEAD, so that a step is not reported long before the devices do it.

        Args:
          results: `(step, arrays)` of the last steps.
        """
        if self._descriptor >= 0 and len(results) > LOOKAHEAD:
            import jax  # only here, since the supervisor imports this module

            jax.block_until_ready(results[-1 - LOOKAHEAD][1])


PIPE = ProgressPipe()
