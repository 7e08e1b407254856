"""The command that a supervisor starts: `hpnlp train` with a directory of its own."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from hpnlp.errors import InputError

HEARTBEAT = 15  # seconds; without a supervisor, 100
WAIT = 300  # default of hpnlp train
EXAMPLE = "hpnlp launch --processes=2 -- train --config=lm/bytes --workdir=runs/bytes"
# Flags of `hpnlp train` that have no place under a supervisor, with the reason.
_REFUSED = {
    "coordinator": "launch chooses it",
    "processes": "it is a flag of launch: write it before --",
    "process": "launch numbers the processes",
    "seeds": "several seeds train in one process: leave out launch",
}


@dataclasses.dataclass(frozen=True)
class Command:
    """`hpnlp train` with its arguments.

    Attributes:
      arguments: The arguments after "train".
      workdir: Directory of the run.
      wait: Seconds that processes wait for each other.
    """

    arguments: tuple[str, ...]
    workdir: Path
    wait: int

    def process_command(self, process: int, processes: int, port: int) -> list[str]:
        """The command line of a process.

        Args:
          process: Index of the process.
          processes: Number of processes.
          port: Port of process 0.

        Returns:
          Program and arguments.
        """
        command = [sys.executable, "-m", "hpnlp", "train", *self.arguments]
        if processes == 1:
            return command
        command += [f"--coordinator=127.0.0.1:{port}", f"--processes={processes}", f"--process={process}"]
        has_heartbeat = _value(self.arguments, "heartbeat") is not None
        return command if has_heartbeat else [*command, f"--heartbeat={HEARTBEAT}"]

    def config_arguments(self) -> list[str]:
        """The arguments that decide the config, for other commands.

        Returns:
          --config, --register, --task and all fields.
        """
        kept = []
        for argument, following in zip(self.arguments, [*self.arguments[1:], ""], strict=True):
            name, equals, _ = argument.lstrip("-").partition("=")
            if argument.startswith("-") and (name in ("config", "register", "task") or "." in name):
                kept.append(argument if equals or following.startswith("-") else f"--{name}={following}")
        return kept


def parse(arguments: Sequence[str]) -> Command:
    """Reads the arguments of `hpnlp launch` after --.

    Args:
      arguments: "train" and its arguments.

    Returns:
      The command.

    Raises:
      InputError: It is not `train`, has no --workdir, or has flags that launch sets.
    """
    if not arguments or arguments[0] != "train":
        name = arguments[0] if arguments else "nothing"
        raise InputError(f"launch starts hpnlp train, and was given {name!r}: write {EXAMPLE}")
    train_arguments = list(arguments[1:])
    for flag, reason in _REFUSED.items():
        if _value(train_arguments, flag) is not None:
            raise InputError(f"--{flag} after --: {reason}")
    workdir, wait = _value(train_arguments, "workdir"), _value(train_arguments, "wait")
    if not workdir:
        raise InputError(f"launch needs the directory of the run: add --workdir=DIR after --, as in {EXAMPLE}")
    if wait is not None and not wait.isdecimal():
        raise InputError(f"--wait={wait}: expected a whole number of seconds")
    return Command(tuple(train_arguments), Path(workdir), int(wait) if wait else WAIT)


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """The last value of a flag, written --flag=value or --flag value; None if it is absent."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):  # without arguments, one is longer
        name, equals, text = argument.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            value = text if equals else following
    return value
