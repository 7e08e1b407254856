"""`hpnlp sweep`: runs every member of an experiment's get_sweep(), one after another."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment

USAGE = """
hpnlp sweep --config=FILE --workdir=DIR [--config.section.field=value ...]

FILE defines get_sweep(), a list of overrides as {"model.dim": 128}. Each member trains in a process and a directory of
its own under DIR; a finished one is not run again, an interrupted one goes on, a failed one does not stop the others.
"""

flags.DEFINE_string("config", None, "An experiment file with get_config() and get_sweep().")
flags.DEFINE_string("workdir", None, "Where the members' directories go.")


def run(argv: Sequence[str]) -> None:
    argv, passed_on = experiment.split(argv)
    cli.parse(argv, USAGE)
    config, workdir = cli.required("config", experiment.EXAMPLE), Path(cli.required("workdir", "runs/sweep"))
    members = _sweep(config)
    failed = []
    for index, overrides in enumerate(members):
        member = workdir / _name(index, overrides)
        if (member / "report.json").exists():
            print(f"[{index + 1}/{len(members)}] {member.name}: finished before")
            continue
        print(f"[{index + 1}/{len(members)}] {member.name}", flush=True)
        flags_of = [f"--config.{name}={value}" for name, value in overrides.items()]
        command = ["train", f"--config={config}", f"--workdir={member}", *passed_on, *flags_of]
        code = subprocess.run([sys.executable, "-m", "hpnlp", *command], check=False).returncode
        if not (member / "report.json").exists():
            failed.append(member.name)
            print(f"[{index + 1}/{len(members)}] {member.name}: not finished (exit code {code})", flush=True)

    from hpnlp import report

    done = [path.parent for path in sorted(workdir.glob("*/report.json"))]
    if done:
        print(report.compare(done, workdir / "compare.png"))
    if failed:
        raise cli.InputError(f"{len(failed)} of {len(members)} members did not finish ({', '.join(failed)}): run again")


def _sweep(path: str) -> list[Mapping[str, Any]]:
    module = experiment.load(path)
    if not hasattr(module, "get_sweep"):
        raise cli.InputError(f"{path} has no get_sweep(): define one that returns a list of overrides")
    return list(experiment.call(path, module.get_sweep))


def _name(index: int, overrides: Mapping[str, Any]) -> str:
    text = ",".join(f"{name.split('.')[-1]}={value}" for name, value in overrides.items())
    return f"{index:02d}-{re.sub(r'[^A-Za-z0-9=.,_-]+', '_', text)[:80]}"
