"""Members of sweeps and suites: runs of `hpnlp train` in processes of their own, which are validated first and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpnlp import cli
from hpnlp.cli import experiment
from hpnlp.training.processes import signals

if TYPE_CHECKING:
    from hpnlp.training.config import Config

BASE = "base"  # name of a member that changes no field
MAX_NAME = 80  # characters


@dataclasses.dataclass(frozen=True)
class Member:
    """A run to train.

    Attributes:
      flags: Flags of `hpnlp train`, without --workdir.
      config: The resolved config, to which the flags lead.
    """

    flags: list[str]
    config: Any


def name_members(fields: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of members, which are those of their directories: the fields that a member sets.

    A name does not depend on the place of a member in its sweep, so that members may be added and moved.

    Args:
      fields: Name of a field -> value, for each member.

    Returns:
      Distinct names, such as "mixer=window_64,0" for {"model.mixer": "window(64,0)"}.
    """
    names: list[str] = []
    for member in fields:
        text = ",".join(f"{field.split('.')[-1]}={value}" for field, value in member.items())
        text = re.sub(r",\s+", ",", text)  # "window(4, 4)" and "window(4,4)" are one spec
        name = re.sub(r"[^A-Za-z0-9=.,_-]+", "_", text)[:MAX_NAME].strip("_") or BASE
        candidates = [name, *(f"{name}-{number}" for number in range(2, len(fields) + 1))]
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return names


def in_old_directories(members: Mapping[str, Any], workdir: Path) -> dict[str, Any]:
    """Members under the names of the directories that their runs have.

    Earlier versions numbered the members of sweeps, and named runs of `hpnlp lra` without their field. Such a run is found by
    its config, which must be that of the member.

    Args:
      members: Name -> member.
      workdir: Directory of the members' directories, which need not exist.

    Returns:
      The members in the same order. The name of one whose run is in another directory is the name of that directory.
    """
    from hpnlp.training.config import differences
    from hpnlp.training.config_file import load_config
    from hpnlp.training.files.contents import has_begun

    others = {}
    for path in sorted(workdir.glob("*/config.json")):
        if path.parent.name not in members and has_begun(path.parent):
            with contextlib.suppress(cli.InputError):  # a directory that no member needs may hold anything
                others[path.parent.name] = load_config(path.parent)
    result = {}
    for name, member in members.items():
        old = () if has_begun(workdir / name) else [n for n, c in others.items() if not differences(c, member.config)]
        result[next(iter(old), name)] = member
    return result


def check_overrides(
    fields: Mapping[str, Any], overrides: Sequence[str], name: str, other_fix: Callable[[str], str]
) -> None:
    """Checks that no flag changes a field that distinguishes a member from the others.

    Args:
      fields: The fields that the member sets.
      overrides: Flags that set fields of the config of all members.
      name: Name of the member, for the message.
      other_fix: Function of a field that returns the fix beside removing the flag.

    Raises:
      InputError: A flag sets one of the fields to another value.
    """
    for override in overrides:
        field = experiment.overridden_field(override)
        if field in fields and str(fields[field]) != override.partition("=")[2]:
            raise cli.InputError(
                f"{override}: {name} sets {field}={fields[field]}: remove the flag, {other_fix(field)}"
            )


def resolve(path: str, overrides: Sequence[str], name: str) -> Member:
    """Validates a member as far as is possible without reading its data.

    Args:
      path: Value of --config.
      overrides: Flags that set fields of the config.
      name: The member, for error messages, as "member dim=3 of get_sweep()".

    Returns:
      The member.

    Raises:
      InputError: The member is invalid.
    """
    from hpnlp.training.config import resolve

    if "\0" in "".join(overrides):
        raise cli.InputError(f"{name}: a value has a NUL character, which flags cannot hold: remove it")
    try:
        config = resolve(experiment.read(path, overrides))
        _check(config)
    except cli.InputError as error:
        raise cli.InputError(f"{name}: {error}; nothing was started") from error
    return Member([*cli.register_flags(), f"--config={path}", *overrides], config)


def _check(config: Config) -> None:
    """Raises InputError where a member could not be trained on one device, or its data files are missing.

    Nothing is allocated, and no accelerator is occupied.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    from hpnlp import tasks
    from hpnlp.jobs import fold_leakage
    from hpnlp.parallel.plan import PLANS, Plan
    from hpnlp.planner.estimate import planned_trainer
    from hpnlp.spec import lookup
    from hpnlp.training.files.metrics import find_writers

    tasks.find(config.task).check_data(config.data)
    fold_leakage.check_start(config)
    find_writers(config.train.writers)
    lookup(PLANS, config.plan.name, "plan.name")
    planned_trainer(dataclasses.replace(config, plan=Plan("single", remat=config.plan.remat)), 1)


def check_directories(members: Mapping[str, Any], workdir: Path) -> None:
    """Checks that no member's directory holds a run of another config, which could not be resumed, and the config of new runs.

    Args:
      members: Name -> member; the name is that of its directory.
      workdir: Directory of the members' directories.

    Raises:
      InputError: A directory holds such a run, or a field of a new run has no effect.
    """
    from hpnlp.training.config import differences
    from hpnlp.training.config_file import load_config
    from hpnlp.training.files.contents import has_begun
    from hpnlp.training.starts import unused_fields

    for name, member in members.items():
        directory = workdir / name
        if not has_begun(directory):
            try:
                unused_fields.check(member.config, experiment.overridden_fields(member.flags))
            except cli.InputError as error:
                raise cli.InputError(f"member {name}: {error}; nothing was started") from error
        if has_begun(directory) and (changes := differences(load_config(directory), member.config)):
            raise cli.InputError(
                f"{directory} holds a run of another config ({'; '.join(changes)}): use another --workdir, or remove that "
                "directory; nothing was started"
            )


def train(members: Mapping[str, Any], workdir: Path, launch: Sequence[str] = ()) -> tuple[list[Path], dict[str, int]]:
    """Trains members one after another. Finished ones are skipped, and interrupted ones are resumed.

    Exits with the code of interrupted commands if a signal stopped a member.

    Args:
      members: Name -> member; the name is that of its directory.
      workdir: Directory of the members' directories.
      launch: Flags of `hpnlp launch`, which then supervises each member; empty to train it in one process.

    Returns:
      Directories of the finished members; and the exit codes of the others by name.
    """
    finished, failed = [], {}
    for index, (name, member) in enumerate(members.items()):
        directory, label = workdir / name, f"[{index + 1}/{len(members)}] {name}"
        code = _train_unfinished(member, directory, label, launch)
        if code is None:
            finished.append(directory)
        else:
            failed[name] = code
            print(f"{label}: not finished (exit code {code})", flush=True)
    return finished, failed


def _train_unfinished(member: Member, directory: Path, label: str, launch: Sequence[str]) -> int | None:
    """Trains a member that has not finished: None when it is finished, else its exit code. Exits if a signal stopped it."""
    already_finished = is_finished(member, directory)
    print(f"{label}: finished before" if already_finished else label, flush=True)
    if already_finished:
        return None
    supervised = ["launch", *launch, "--"] if launch else []
    code = run([*supervised, "train", *member.flags, f"--workdir={directory}"], directory.name)
    return code if code or not (directory / "report.json").exists() else None


def is_finished(member: Member, directory: Path) -> bool:
    """Whether a directory holds the report of a run with the config of a member.

    Args:
      member: The member.
      directory: Its directory, which need not exist.

    Returns:
      True if nothing is left to train.
    """
    from hpnlp.training.config import differences
    from hpnlp.training.config_file import load_config

    return (directory / "report.json").exists() and not differences(load_config(directory), member.config)


@contextlib.contextmanager
def written(workdir: Path) -> Iterator[None]:
    """Makes the directory of members, and locks it against other processes.

    Args:
      workdir: The directory.

    Yields:
      None, while the directory is locked.

    Raises:
      InputError: The directory holds a run or a model itself, cannot be written, or another process has locked it; or
        checkpoints in it could not be read back.
    """
    from hpnlp.training.files.contents import Contents, checked_directory, contents_of, locked

    checked_directory(workdir)
    if (held := contents_of(workdir)) not in (Contents.NOTHING, Contents.OTHER):
        raise cli.InputError(
            f"--workdir={workdir} holds {held.value}: choose another directory, which holds the directories of all runs"
        )
    with locked(workdir):
        yield


def failure_message(failed: Mapping[str, int], members: int) -> str:
    """The error of a command with members that did not finish.

    Args:
      failed: Exit codes by name.
      members: Number of all members.

    Returns:
      The message.
    """
    invalid = [name for name, code in failed.items() if code == 2]
    crashed = [name for name in failed if name not in invalid]
    message = f"{len(failed)} of {members} members did not finish:"
    if invalid:
        message += f" {', '.join(invalid)} (see the errors above, and fix them first);"
    if crashed:
        message += f" {', '.join(crashed)} (the same command resumes from the newest checkpoint);"
    return message.rstrip(";")


def run(argv: Sequence[str], name: str, **options: Any) -> int:
    """Runs a command of hpnlp in a process of its own. Exits if a signal stopped it.

    Args:
      argv: The command and its arguments.
      name: The member, for the message about a signal.
      **options: Options of `subprocess.Popen`.

    Returns:
      The exit code.
    """
    code, signal_name = Process().run(argv, **options)
    if signal_name:
        signals.write_line(f"hpnlp: {signal_name}: stopped in {name}; the same command resumes there")
        sys.exit(signals.INTERRUPTED)
    return code


class Process:
    """A process of `hpnlp COMMAND`, to which signals are passed on."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[Any] | None = None
        self.received: list[str] = []  # names of signals

    def run(self, argv: Sequence[str], **options: Any) -> tuple[int, str]:
        """Runs the command.

        Args:
          argv: The command and its arguments.
          **options: Options of `subprocess.Popen`.

        Returns:
          The exit code, and the name of the first signal that was received, or "".
        """
        environment = os.environ | {signals.PARENT: str(os.getpid())}
        with signals.reacting(self.pass_on):
            # The member inherits the blocked signals, which wait until it has set its handlers.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals.NUMBERS)
            try:
                self.process = subprocess.Popen([sys.executable, "-m", "hpnlp", *argv], env=environment, **options)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if self.received:  # before there was a process to pass the signal on to
                self.process.terminate()
            return self.process.wait(), "".join(self.received[:1])

    def pass_on(self, number: int) -> None:
        """Passes a signal on: the member saves a checkpoint at the first one, and exits at once at a later Ctrl-C.

        Args:
          number: The signal.
        """
        repeated = bool(self.received)
        self.received.append(signal.Signals(number).name)
        if self.process is not None:
            self.process.send_signal(signal.SIGINT if repeated and number == signal.SIGINT else signal.SIGTERM)
