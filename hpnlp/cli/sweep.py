"""`hpnlp sweep`: runs every member of an experiment's get_sweep(), one after another."""

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

FILE defines get_sweep(), a list of overrides as {"model.dim": 128}. All members are checked before the first one trains, each
in a process and a directory of its own under DIR; a finished one is left as it is, an interrupted one goes on, a failed one
does not stop the others. At the end DIR holds the table, compare.md, and the plot, compare.png. Ctrl-C, and what else stops
`hpnlp train`, saves the member that trains and ends the list, with exit code 130.
"""

flags.DEFINE_string("config", None, "An experiment file with get_config() and get_sweep().")
flags.DEFINE_string("workdir", None, "Where the members' directories go.")


def run(argv: Sequence[str]) -> None:
    argv, overrides = experiment.split(argv)
    cli.parse(argv, USAGE)
    path, workdir = cli.required("config", experiment.EXAMPLE), Path(cli.required("workdir", "runs/sweep"))
    members = _resolved(path, _sweep(path), overrides)
    _make(workdir)
    done, failed = [], {}
    for index, (name, member_flags, config) in enumerate(members):
        directory = workdir / name
        label = f"[{index + 1}/{len(members)}] {name}"
        finished = _is_finished(directory, config)
        print(f"{label}: finished before" if finished else label, flush=True)
        if not finished:
            code, stopped_by = _train([f"--config={path}", f"--workdir={directory}", *member_flags])
            if stopped_by:
                signals.say(f"hpnlp: {stopped_by}: stopped in {name}; the same command goes on from there")
                sys.exit(signals.INTERRUPTED)
            if code or not (directory / "report.json").exists():
                failed[name] = code
                print(f"{label}: not finished (exit code {code})", flush=True)
                continue
        done.append(directory)

    if done:
        from hpnlp import report

        table = report.compare(done, workdir / "compare.png")
        print(table, flush=True)
    if failed:
        raise cli.InputError(_advice(failed, len(members)))


def _make(workdir: Path) -> None:
    """Makes the directory of a sweep. Raises InputError where its members could not be saved or read back."""
    from hpnlp.training.checkpoint import checked_directory

    checked_directory(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cli.InputError(f"cannot make --workdir={workdir} ({error.strerror}): name another directory") from error


def _advice(failed: Mapping[str, int], members: int) -> str:
    """failed: name -> exit code."""
    refused = [name for name, code in failed.items() if code == 2]
    broken = [name for name in failed if name not in refused]
    text = f"{len(failed)} of {members} members did not finish:"
    if refused:
        text += f" {', '.join(refused)}, refused for what is said above: mend that first;"
    if broken:
        text += f" {', '.join(broken)}: the same command tries again, from the newest checkpoint;"
    return text.rstrip(";")


def _is_finished(directory: Path, config: Any) -> bool:
    from hpnlp.training.config import differences
    from hpnlp.training.run_directory import load_config

    return (directory / "report.json").exists() and not differences(load_config(directory), config)


def _train(argv: Sequence[str]) -> tuple[int, str]:
    """`hpnlp train` in a process of its own: its exit code, and the signal that came meanwhile, passed on, or ""."""
    received: list[str] = []
    member: subprocess.Popen[bytes] | None = None

    def pass_on(number: int) -> None:
        repeated = bool(received)
        received.append(signal.Signals(number).name)
        if member is not None:
            # The member saves at the first signal, and ends at once at a later Ctrl-C.
            member.send_signal(signal.SIGINT if repeated and number == signal.SIGINT else signal.SIGTERM)

    environment = os.environ | {signals.PARENT: str(os.getpid())}
    with signals.reacting(pass_on):
        # The member inherits what is blocked: signals wait until it can react to them.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals.NUMBERS)
        try:
            member = subprocess.Popen([sys.executable, "-m", "hpnlp", "train", *argv], env=environment)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if received:  # while there was no member to pass it on to
            member.terminate()
        return member.wait(), "".join(received[:1])


def _sweep(config: str) -> list[Mapping[str, Any]]:
    path, *argument = config.split(":", 1)
    module = experiment.load(path)
    if not hasattr(module, "get_sweep"):
        raise cli.InputError(f"{path} has no get_sweep(): define one that returns a list of overrides")
    if not callable(module.get_sweep):
        raise cli.InputError(f"{path}: get_sweep is no function: define one that returns a list of overrides")
    members = experiment.call(path, _members_of, module.get_sweep, argument)
    if not (
        isinstance(members, Sequence)
        and members
        and all(isinstance(member, Mapping) and all(isinstance(name, str) for name in member) for member in members)
    ):
        raise cli.InputError(
            f'{path}: get_sweep() returned {members!r:.80}: return a list as [{{"model.dim": 64}}, ...]'
        )
    return list(members)


def _members_of(get_sweep: Callable[..., Any], argument: Sequence[str]) -> Any:
    return get_sweep(*(argument if signature(get_sweep).parameters else ()))


def _resolved(
    path: str, sweep: Sequence[Mapping[str, Any]], overrides: Sequence[str]
) -> list[tuple[str, list[str], Any]]:
    """`(name, overrides of `hpnlp train`, Config)` of each member, checked as far as it can be without reading its data.

    Raises InputError where one is at fault, where two are the same, and where a member sets what an override sets.
    """
    from hpnlp.training.config import resolve

    members: list[tuple[str, list[str], Any]] = []
    for index, fields in enumerate(sweep):
        text = ",".join(f"{name.split('.')[-1]}={value}" for name, value in fields.items())
        name = f"{index:02d}-{re.sub(r'[^A-Za-z0-9=.,_-]+', '_', text)[:80]}"
        for override in overrides:
            field = override.lstrip("-").removeprefix("config.").partition("=")[0]
            if field in fields and str(fields[field]) != override.partition("=")[2]:
                raise cli.InputError(
                    f"{override}: member {name} of get_sweep() sets {field}={fields[field]} itself: leave the flag out, or "
                    f"take {field} out of get_sweep()"
                )
        flags_of = [*overrides, *(f"--config.{field}={value}" for field, value in fields.items())]
        if "\0" in "".join(flags_of):
            raise cli.InputError(f"member {name} of get_sweep(): a value holds a NUL, which no flag can: take it out")
        try:
            config = resolve(experiment.read(path, flags_of))
            _check_member(config)
        except cli.InputError as error:
            raise cli.InputError(f"member {name} of get_sweep(): {error}; nothing was trained") from error
        if same := [other for other, _, resolved in members if resolved == config]:
            raise cli.InputError(f"members {same[0]} and {name} of get_sweep() are the same config: take one out")
        members.append((name, flags_of, config))
    return members


def _check_member(config: Any) -> None:
    """Raises InputError where a member could not be trained on one device, or where files that it names are missing.

    Nothing is allocated, and accelerators are left to the members.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    from hpnlp.data import text
    from hpnlp.parallel.plan import PLANS, Plan
    from hpnlp.planner.estimate import trainer_of
    from hpnlp.spec import lookup
    from hpnlp.training.metrics import find_writers

    for field in ("path", "heldout_path"):
        if paths := getattr(config.data, field):
            text.find(paths, f"data.{field}")
    find_writers(config.train.writers)
    lookup(PLANS, config.plan.name, "plan.name")
    trainer_of(dataclasses.replace(config, plan=Plan("single", remat=config.plan.remat)), 1)
