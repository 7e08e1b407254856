"""`hpnlp sweep`: trains every member of an experiment's get_sweep(), one after another."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment
from hpnlp.training import signals

USAGE = """
hpnlp sweep --config=FILE --workdir=DIR [--config.section.field=value ...]

FILE defines get_sweep(), which returns a list of overrides such as {"model.dim": 128}, one for each member. All members are
validated before the first one trains. Each member trains in its own process and directory under DIR. Finished members are
skipped, interrupted ones are resumed, and a failed one does not stop the others. At the end, a table (compare.md) and a plot
(compare.png) are written to DIR. Ctrl-C and the other signals that stop `hpnlp train` save the current member, skip the
remaining ones, and exit with code 130.
"""

flags.DEFINE_string("config", None, "Experiment file, which defines get_config() and get_sweep().")
flags.DEFINE_string("workdir", None, "Directory of the members' directories.")


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp sweep`.

    Args:
      argv: "hpnlp sweep" and the arguments of the command.

    Raises:
      InputError: A flag or a member is invalid, or a member did not finish.
    """
    argv, overrides = experiment.split(argv)
    cli.parse(argv, USAGE)
    path, workdir = cli.required("config", experiment.EXAMPLE), Path(cli.required("workdir", "runs/sweep"))
    members = _resolve_members(path, _load_sweep(path), overrides)
    _make_directory(workdir)
    finished, failed = [], {}
    for index, (name, (member_flags, config)) in enumerate(members.items()):
        directory, label = workdir / name, f"[{index + 1}/{len(members)}] {name}"
        code = _train_unfinished([*cli.register_flags(), f"--config={path}", *member_flags], directory, config, label)
        if code is None:
            finished.append(directory)
        else:
            failed[name] = code
            print(f"{label}: not finished (exit code {code})", flush=True)

    if finished:
        from hpnlp import report

        print(report.compare(finished, workdir / "compare.png"), flush=True)
    if failed:
        raise cli.InputError(_failure_message(failed, len(members)))


def _train_unfinished(member_flags: Sequence[str], directory: Path, config: Any, label: str) -> int | None:
    """Trains a member that has not finished: None when it is finished, else its exit code. Exits if a signal stopped it."""
    already_finished = _is_finished(directory, config)
    print(f"{label}: finished before" if already_finished else label, flush=True)
    if already_finished:
        return None
    code, signal_name = _MemberProcess().run([*member_flags, f"--workdir={directory}"])
    if signal_name:
        signals.write_line(f"hpnlp: {signal_name}: stopped in {directory.name}; the same command resumes there")
        sys.exit(signals.INTERRUPTED)
    return code if code or not (directory / "report.json").exists() else None


def _make_directory(workdir: Path) -> None:
    """Makes the directory of a sweep. Raises InputError where checkpoints could not be written to it or read back."""
    from hpnlp.training.checkpoint import checked_directory

    checked_directory(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cli.InputError(f"cannot make --workdir={workdir} ({error.strerror}): use another directory") from error


def _failure_message(failed: Mapping[str, int], members: int) -> str:
    """The error of a sweep with failed members, which have an exit code by name."""
    invalid = [name for name, code in failed.items() if code == 2]
    crashed = [name for name in failed if name not in invalid]
    message = f"{len(failed)} of {members} members did not finish:"
    if invalid:
        message += f" {', '.join(invalid)} (see the errors above, and fix them first);"
    if crashed:
        message += f" {', '.join(crashed)} (the same command resumes from the newest checkpoint);"
    return message.rstrip(";")


def _is_finished(directory: Path, config: Any) -> bool:
    """Whether a directory holds the report of a run with this config."""
    from hpnlp.training.config import differences
    from hpnlp.training.run_directory import load_config

    return (directory / "report.json").exists() and not differences(load_config(directory), config)


class _MemberProcess:
    """A process of `hpnlp train`, to which signals are passed on."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.received: list[str] = []  # names of signals

    def run(self, argv: Sequence[str]) -> tuple[int, str]:
        """Trains. Returns the exit code and the name of the first signal that was received, or ""."""
        environment = os.environ | {signals.PARENT: str(os.getpid())}
        with signals.reacting(self.pass_on):
            # The member inherits the blocked signals, which wait until it has set its handlers.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals.NUMBERS)
            try:
                self.process = subprocess.Popen([sys.executable, "-m", "hpnlp", "train", *argv], env=environment)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if self.received:  # before there was a process to pass the signal on to
                self.process.terminate()
            return self.process.wait(), "".join(self.received[:1])

    def pass_on(self, number: int) -> None:
        """Passes a signal on: the member saves a checkpoint at the first one, and exits at once at a later Ctrl-C."""
        repeated = bool(self.received)
        self.received.append(signal.Signals(number).name)
        if self.process is not None:
            self.process.send_signal(signal.SIGINT if repeated and number == signal.SIGINT else signal.SIGTERM)


def _load_sweep(config: str) -> list[Mapping[str, Any]]:
    """The overrides of all members. Raises InputError where get_sweep() does not return a list of them."""
    path, *argument = config.split(":", 1)
    module = experiment.load(path)
    if not hasattr(module, "get_sweep"):
        raise cli.InputError(f"{path} has no get_sweep(): define one that returns a list of overrides")
    if not callable(module.get_sweep):
        raise cli.InputError(f"{path}: get_sweep is not a function: define one that returns a list of overrides")
    members = experiment.call(path, _call_get_sweep, module.get_sweep, argument)
    if not (
        isinstance(members, Sequence)
        and members
        and all(isinstance(member, Mapping) and all(isinstance(name, str) for name in member) for member in members)
    ):
        raise cli.InputError(
            f'{path}: get_sweep() returned {members!r:.80}: return a list such as [{{"model.dim": 64}}, ...]'
        )
    return list(members)


def _call_get_sweep(get_sweep: Callable[..., Any], argument: Sequence[str]) -> Any:
    """Calls get_sweep() with the argument of --config=FILE:ARGUMENT, if it takes one."""
    return get_sweep(*(argument if signature(get_sweep).parameters else ()))


def _resolve_members(
    path: str, sweep: Sequence[Mapping[str, Any]], overrides: Sequence[str]
) -> dict[str, tuple[list[str], Any]]:
    """All members, validated as far as is possible without reading their data: name -> (flags of `hpnlp train`, config).

    Raises InputError where a member is invalid, two are equal or of different tasks, or a member sets a field that an override
    sets to another value.
    """
    members: dict[str, tuple[list[str], Any]] = {}
    for index, fields in enumerate(sweep):
        text = ",".join(f"{field.split('.')[-1]}={value}" for field, value in fields.items())
        name = f"{index:02d}-{re.sub(r'[^A-Za-z0-9=.,_-]+', '_', text)[:80]}"
        member_flags, config = _resolve_member(path, name, fields, overrides)
        if equal := [other for other, (_, other_config) in members.items() if other_config == config]:
            raise cli.InputError(
                f"members {equal[0]} and {name} of get_sweep() have the same config: remove one of them"
            )
        members[name] = member_flags, config
    if len({config.task for _, config in members.values()}) > 1:
        tasks = ", ".join(f"{name}: {config.task}" for name, (_, config) in members.items())
        raise cli.InputError(
            f"members of get_sweep() have different tasks ({tasks}), whose scores do not compare: write a sweep for each task"
        )
    return members


def _resolve_member(path: str, name: str, fields: Mapping[str, Any], overrides: Sequence[str]) -> tuple[list[str], Any]:
    """Flags of `hpnlp train` and config of a member. Raises InputError where the member is invalid."""
    from hpnlp.training.config import resolve

    for override in overrides:
        field = override.lstrip("-").removeprefix("config.").partition("=")[0]
        if field in fields and str(fields[field]) != override.partition("=")[2]:
            raise cli.InputError(
                f"{override}: member {name} of get_sweep() sets {field}={fields[field]}: remove the flag, or remove {field} "
                "from get_sweep()"
            )
    member_flags = [*overrides, *(f"--config.{field}={value}" for field, value in fields.items())]
    if "\0" in "".join(member_flags):
        raise cli.InputError(
            f"member {name} of get_sweep(): a value has a NUL character, which flags cannot hold: remove it"
        )
    try:
        config = resolve(experiment.read(path, member_flags))
        _check_member(config)
    except cli.InputError as error:
        raise cli.InputError(f"member {name} of get_sweep(): {error}; nothing was trained") from error
    return member_flags, config


def _check_member(config: Any) -> None:
    """Raises InputError where a member could not be trained on one device, or its data files are missing.

    Nothing is allocated, and no accelerator is occupied.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    from hpnlp import tasks
    from hpnlp.parallel.plan import PLANS, Plan
    from hpnlp.planner.estimate import trainer_of
    from hpnlp.spec import lookup
    from hpnlp.training.metrics import find_writers

    tasks.find(config.task).check_data(config.data)
    find_writers(config.train.writers)
    lookup(PLANS, config.plan.name, "plan.name")
    trainer_of(dataclasses.replace(config, plan=Plan("single", remat=config.plan.remat)), 1)
