"""`hpnlp sweep`: runs every member of an experiment's get_sweep(), one after another."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment

USAGE = """
hpnlp sweep --config=FILE --workdir=DIR [--config.section.field=value ...]

FILE defines get_sweep(), a list of overrides as {"model.dim": 128}. Each member trains in a process and a directory of
its own under DIR; a finished one is left as it is, an interrupted one goes on, a failed one does not stop the others.
Ctrl-C saves the member that trains and ends the list.
"""

flags.DEFINE_string("config", None, "An experiment file with get_config() and get_sweep().")
flags.DEFINE_string("workdir", None, "Where the members' directories go.")


def run(argv: Sequence[str]) -> None:
    argv, passed_on = experiment.split(argv)
    cli.parse(argv, USAGE)
    config, workdir = cli.required("config", experiment.EXAMPLE), Path(cli.required("workdir", "runs/sweep"))
    members = _sweep(config)
    from hpnlp.training.config import differences, resolve
    from hpnlp.training.run import load_config

    done, failed = [], []
    for index, overrides in enumerate(members):
        name = ",".join(f"{name.split('.')[-1]}={value}" for name, value in overrides.items())
        member = workdir / f"{index:02d}-{re.sub(r'[^A-Za-z0-9=.,_-]+', '_', name)[:80]}"
        label = f"[{index + 1}/{len(members)}] {member.name}"
        flags_of = [*passed_on, *(f"--config.{name}={value}" for name, value in overrides.items())]
        asked_for = lambda: resolve(experiment.read(config, flags_of))  # noqa: B023, E731
        finished = (member / "report.json").exists() and not differences(load_config(member), asked_for())
        print(f"{label}: finished before" if finished else label, flush=True)
        if not finished:
            code, stopped_by = _train([f"--config={config}", f"--workdir={member}", *flags_of])
            if stopped_by:
                raise cli.InputError(f"{stopped_by}: stopped in {member.name}; the same command goes on from there")
            if code or not (member / "report.json").exists():
                failed.append(member.name)
                print(f"{label}: not finished (exit code {code})", flush=True)
                continue
        done.append(member)

    from hpnlp import report

    if done:
        print(report.compare(done, workdir / "compare.png"), flush=True)
    if failed:
        raise cli.InputError(f"{len(failed)} of {len(members)} members did not finish ({', '.join(failed)}): run again")


def _train(argv: Sequence[str]) -> tuple[int, str]:
    """`hpnlp train` in a process of its own: its exit code, and the signal that came meanwhile, passed on, or ""."""
    received, member = [], None

    def pass_on(number: int, frame: Any) -> None:
        received.append(signal.Signals(number).name)
        if member is not None:
            member.terminate()

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        # The member inherits what is blocked: a terminal sends Ctrl-C to both, and to the member that is once too often.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        member = subprocess.Popen([sys.executable, "-m", "hpnlp", "train", *argv])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        if received:  # while there was no member to pass it on to
            member.terminate()
        return member.wait(), "".join(received[:1])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _sweep(config: str) -> list[Mapping[str, Any]]:
    path, *argument = config.split(":", 1)
    module = experiment.load(path)
    if not hasattr(module, "get_sweep"):
        raise cli.InputError(f"{path} has no get_sweep(): define one that returns a list of overrides")
    members = experiment.call(path, module.get_sweep, *(argument if signature(module.get_sweep).parameters else ()))
    if not (isinstance(members, Sequence) and members and all(isinstance(member, Mapping) for member in members)):
        raise cli.InputError(
            f'{path}: get_sweep() returned {members!r:.80}: return a list as [{{"model.dim": 64}}, ...]'
        )
    return list(members)
