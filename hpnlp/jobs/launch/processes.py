"""Processes that a supervisor starts: each has a session, a log and a pipe of progress of its own, and none outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from hpnlp.jobs.launch.liveness import Watch
from hpnlp.training.processes import signals
from hpnlp.training.processes.progress_pipe import VARIABLE

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from <linux/prctl.h>
# Becomes the program of its arguments, which the kernel continues if the parent ends while it is stopped: `signals.follow` then
# ends it. A process may be stopped long before it has imported that.
_PRCTL = f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGCONT)})"
_WAKE = f"import ctypes, os, sys; {_PRCTL}; os.execvp(sys.argv[1], sys.argv[1:])"
_AWAKENED = (sys.executable, "-I", "-S", "-c", _WAKE)
_CHUNK = 1 << 16
_FATAL = re.compile(r"F\d{4} \d\d:\d\d:\d\d")  # a fatal error of the C++ log of JAX
REAP_SECONDS = 10.0  # until killed processes have ended

_adopts = False  # whether all children of this process are those of the supervisor and their orphans


@dataclasses.dataclass
class Child:
    """A process of an attempt.

    Attributes:
      index: Index of the process.
      popen: The process.
      pipe: Reading end of the pipe of progress.
      log: File of its output.
      watch: Its progress.
      code: Exit code, 128 + N after signal N; None while it runs.
    """

    index: int
    popen: subprocess.Popen[bytes]
    pipe: int
    log: Path
    watch: Watch
    code: int | None = None
    _incomplete: bytes = b""

    def read(self, now: float) -> bool:
        """Reads the lines that are in the pipe.

        Args:
          now: The time.

        Returns:
          False at the end of the pipe.
        """
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe, _CHUNK):
                *lines, self._incomplete = (self._incomplete + data).split(b"\n")
                for line in lines:
                    self.watch.line(line.decode("ascii", "replace"), now)
            return False
        return True

    def send(self, number: int) -> None:
        """Sends a signal to the process group.

        Args:
          number: The signal.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def send_to_process(self, number: int) -> None:
        """Sends a signal to the process alone, if it runs.

        Args:
          number: The signal.
        """
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.popen.pid, number)


def start(index: int, command: Sequence[str], environment: Mapping[str, str], log: Path, watch: Watch) -> Child:
    """Starts a process in a session of its own.

    Args:
      index: Index of the process.
      command: Program and arguments.
      environment: Environment variables.
      log: File that its output is appended to.
      watch: Receives its progress.

    Returns:
      The process.

    Raises:
      FileNotFoundError: There is no such program.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no program {command[0]}")
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    log.parent.mkdir(parents=True, exist_ok=True)
    # The process inherits the blocked signals, which wait until it has set its handlers.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals.NUMBERS)
    try:
        with open(log, "ab") as output:
            popen = subprocess.Popen(
                [*_AWAKENED, *command] if sys.platform == "linux" else command,
                env={**environment, VARIABLE: str(writer), signals.PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[writer],
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(writer)
    return Child(index, popen, reader, log, watch)


def become_subreaper() -> None:
    """Makes orphans of the started processes children of this process, on Linux, so that it can end them."""
    global _adopts
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _adopts = True


def reap(children: Iterable[Child]) -> list[Child]:
    """Collects processes that have ended, orphans among them.

    Args:
      children: The processes that were started.

    Returns:
      Those of them that have ended since the last call, in the order of their ends.
    """
    running = {child.popen.pid: child for child in children if child.code is None}
    ended = []
    for pid in [-1] if _adopts else list(running):
        with contextlib.suppress(ChildProcessError):
            while (status := os.waitpid(pid, os.WNOHANG))[0]:
                if child := running.pop(status[0], None):
                    code = os.waitstatus_to_exitcode(status[1])
                    child.code = child.popen.returncode = code if code >= 0 else 128 - code
                    ended.append(child)
    return ended


def end_all(
    children: Sequence[Child], sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
) -> list[int]:
    """Kills the process groups and their orphans, and waits for their ends.

    Args:
      children: The processes that were started.
      sleep: Waits for seconds.
      clock: Returns the time.

    Returns:
      Ids of processes that do not end, such as those that wait for a device or a network file system.
    """
    deadline = clock() + REAP_SECONDS
    while True:
        for child in children:
            child.send(signal.SIGKILL)
        reap(children)
        remaining = [child.popen.pid for child in children if child.code is None]
        for orphan in orphans({child.popen.pid for child in children}):
            remaining.append(orphan)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(orphan, signal.SIGKILL)
        if not remaining or clock() > deadline:
            break
        sleep(0.01)
    for child in children:
        with contextlib.suppress(OSError):
            os.close(child.pipe)
    return remaining


def orphans(started: set[int]) -> list[int]:
    """Ids of processes that this one has adopted when their parents, which it had started, ended.

    Args:
      started: Ids of the processes that it has started itself.

    Returns:
      The ids; empty before `become_subreaper`.
    """
    ids: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children") if _adopts else ():
        with contextlib.suppress(OSError, ValueError):
            ids |= set(map(int, path.read_text("ascii").split()))
    return sorted(ids - started)


def is_stopped(pid: int) -> bool:
    """True if a process was stopped by a signal such as SIGSTOP.

    Args:
      pid: Id of the process.

    Returns:
      Whether it is; False where there is no /proc.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def tail(log: Path, lines: int = 20) -> list[str]:
    """Last lines of a log, after the line with the cause of an abort, which the stack of the abort may follow by 70 lines.

    Args:
      log: The file.
      lines: Number of lines.

    Returns:
      The lines; empty if the log cannot be read.
    """
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - _CHUNK))
            content = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    cause = [line for line in content[:-lines] if _FATAL.match(line)][-1:]
    return [*cause, *content[-lines:]]
