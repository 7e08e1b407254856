"""Attempts of a run that is restarted: their names, and a fence that keeps processes of earlier attempts from writing.

`hpnlp launch`, or the script of a scheduler, starts all processes of an attempt with the same HPNLP_ATTEMPT=NUMBER:TOKEN. The
file `attempt` of the run directory has the newest attempt. Process 0 compares it with its own before each write. Locks of files
do not suffice: a process that was stopped, or cut off from a network file system, may wake up after its lock was lost.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from hpnlp.atomic_file import replace_bytes
from hpnlp.errors import InputError, TemporaryError

VARIABLE = "HPNLP_ATTEMPT"
FILE = "attempt"
LOCK = ".lock"  # locked by the process that writes to the directory; its content names the process
SUPERVISOR_LOCK = "launch.lock"  # locked by `hpnlp launch` while it runs; its content names the process
EVENTS, LOGS = "events.jsonl", "logs"  # what `hpnlp launch` writes
FILES = (FILE, LOCK, SUPERVISOR_LOCK, EVENTS, LOGS)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of all processes of a run.

    Attributes:
      number: Number of the attempt.
      token: Text without blanks. Attempts with equal tokens are ordered by their numbers, as are restarts of one job.
    """

    number: int
    token: str

    def __str__(self) -> str:
        return f"{self.number}:{self.token}"

    def next(self) -> Attempt:
        """An attempt that follows this one, with a token of its own."""
        return Attempt(self.number + 1, secrets.token_hex(4))


def parse(text: str) -> Attempt | None:
    """The attempt of a text NUMBER:TOKEN; None for other texts.

    Returns:
      The attempt.
    """
    match = re.fullmatch(r"(\d{1,9}):(\S{1,100})", text.strip())
    return Attempt(int(match[1]), match[2]) if match else None


def current(environment: Mapping[str, str] = os.environ) -> Attempt | None:
    """The attempt that this process belongs to.

    Args:
      environment: Environment variables.

    Returns:
      The attempt; None without HPNLP_ATTEMPT.

    Raises:
      InputError: HPNLP_ATTEMPT is malformed.
    """
    text = environment.get(VARIABLE, "")
    if text and parse(text) is None:
        raise InputError(
            f"{VARIABLE}={text}: expected NUMBER:TOKEN, as in 1:job17, the same in all processes of an attempt"
        )
    return parse(text)


def newest(workdir: Path) -> Attempt | None:
    """The newest attempt in a run directory.

    Args:
      workdir: The run directory.

    Returns:
      The attempt; None if there is no record.
    """
    try:
        return parse((workdir / FILE).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def record(workdir: Path, attempt: Attempt) -> None:
    """Makes an attempt the newest one of a run directory.

    Args:
      workdir: The run directory.
      attempt: The attempt.
    """
    replace_bytes(workdir / FILE, f"{attempt}\n".encode())


def holder(lock: Path) -> str:
    """Names the process that holds a lock.

    Args:
      lock: The file that is locked.

    Returns:
      Its process, as "process 12 on HOST"; "" if no process of this host, or of a file system with locks, holds it.
    """
    try:
        with open(lock, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(100).strip() or "another process"
    except OSError:
        pass
    return ""


def process_name() -> str:
    """Name of this process, for messages of others.

    Returns:
      Text such as "process 12 on HOST".
    """
    return f"process {os.getpid()} on {socket.gethostname()}"


class Fence:
    """Keeps a process from writing to a run directory after a newer attempt has begun there."""

    def __init__(self, workdir: Path, attempt: Attempt) -> None:
        self.workdir, self.attempt = workdir, attempt

    def check(self) -> None:
        """Checks that the attempt is the newest one of the directory.

        Raises:
          TemporaryError: It is not.
        """
        if (other := newest(self.workdir)) != self.attempt:
            raise TemporaryError(
                f"this process belongs to attempt {self.attempt} of {self.workdir}, and the newest is {other or 'none'}: it "
                "ends without writing"
            )


def claim(workdir: Path, attempt: Attempt | None) -> Fence | None:
    """Begins to write to a run directory, which is locked.

    Args:
      workdir: The run directory.
      attempt: The attempt of this process, if it has one.

    Returns:
      The fence; None for a directory without attempts.

    Raises:
      TemporaryError: A supervisor runs other processes in the directory, or a later attempt has begun.
    """
    last = newest(workdir)
    if attempt is None and last is None:
        return None
    if attempt != last and (process := holder(workdir / SUPERVISOR_LOCK)):
        raise TemporaryError(
            f"{workdir} is supervised by hpnlp launch, {process}, whose attempt is {last or 'none'}: this process is of "
            f"{f'attempt {attempt}' if attempt else 'no attempt'}: wait for the supervisor, stop it, or choose another workdir"
        )
    if attempt is None and last is not None:
        attempt = last.next()  # so that processes of earlier attempts are refused
    if attempt is not None and last is not None and attempt.token == last.token and attempt.number < last.number:
        raise TemporaryError(f"attempt {attempt} of {workdir} is over: attempt {last} has begun")
    assert attempt is not None
    if attempt != last:
        record(workdir, attempt)
    return Fence(workdir, attempt)
