"""`hpnlp launch`: trains with several processes of this machine, restarts them, or writes a manifest for several machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from absl import flags

from hpnlp import cli
from hpnlp.errors import InputError
from hpnlp.jobs.launch import command, devices, manifests, processes, supervisor
from hpnlp.jobs.launch.command import Command
from hpnlp.training.processes import signals

USAGE = """
hpnlp launch --processes=2 [--min_processes=1] [--max_restarts=2] -- train --config=lm/bytes --workdir=runs/bytes
hpnlp launch --write=slurm --hosts=4 -- train --config=lm/bytes --workdir=/shared/bytes > job.sh

Starts `hpnlp train` in several processes of this machine, and starts all of them again from the newest checkpoint when one of
them dies or makes no progress. It gives up when restarts save no newer checkpoint, when the same step fails twice, and at once
for invalid input. With --min_processes, fewer processes go on where the given number fails twice in a row.

WORKDIR/logs/attempt_N/process_I.log has the output of each process; that of process 0 is printed too. WORKDIR/events.jsonl has
the starts, ends, causes and delays. The exit code is 0 when the run has finished, 130 after a signal, and otherwise that of the
process that failed: see the page "Supervise a run".

--write prints a script or manifest for SLURM, JobSet or xpk, whose engine then starts and restarts the processes of several
machines. Nothing is started.
"""

PROCESSES_PER_CORE = 4  # most processes without GPUs, whose number is otherwise the limit
RESTARTS, RESTARTS_OF_ENGINES = 2, 10  # engines count all restarts, also those after which the run went on

flags.DEFINE_integer("processes", None, "Number of processes, among which GPUs are divided.", lower_bound=1)
flags.DEFINE_integer("min_processes", None, "Least number of processes; by default that of --processes.", lower_bound=1)
flags.DEFINE_integer(
    "max_restarts",
    None,
    f"Restarts in a row without newer checkpoint, {RESTARTS} by default; 0 for none. With --write all: {RESTARTS_OF_ENGINES}.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "hang_seconds", 30, "Least seconds without a step after which a process counts as stuck.", lower_bound=1
)
flags.DEFINE_enum("write", None, list(manifests.WRITERS), "Print a manifest for this engine, and start nothing.")
flags.DEFINE_integer("hosts", None, "With --write: number of hosts, each with one process.", lower_bound=1)


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp launch`.

    Args:
      argv: "hpnlp launch" and the arguments of the command.

    Raises:
      InputError: A flag or the command is invalid, or the directory cannot be used.
    """
    if (parent := os.environ.pop(signals.PARENT, "")).isdecimal():
        signals.follow(int(parent))
    argv, separator, inner = _split(argv)
    if not separator and "train" in argv[1:]:
        raise InputError(f"write -- before train, as in {command.EXAMPLE}")
    cli.parse(argv, USAGE)
    if not separator:
        raise InputError(f"no command to start: write it after --, as in {command.EXAMPLE}")
    parsed, f = command.parse(inner), cli.FLAGS
    if f.write:
        cli.refuse(["processes", "min_processes", "hang_seconds"], f"with --write={f.write}: leave it out")
        if f.hosts is None:
            raise InputError(f"--write={f.write} needs the number of hosts: add --hosts=4")
        restarts = RESTARTS_OF_ENGINES if f.max_restarts is None else f.max_restarts
        print(manifests.WRITERS[f.write](parsed, f.hosts, restarts), end="")
        return
    cli.refuse(["hosts"], "without --write: launch starts processes of this machine only")
    if f.processes is None:
        raise InputError("--processes is required, for example --processes=2")
    options = supervisor.LaunchOptions(
        counts=_counts(parsed, f.processes, f.processes if f.min_processes is None else f.min_processes),
        max_restarts=RESTARTS if f.max_restarts is None else f.max_restarts,
        wait=parsed.wait,
        hang_seconds=f.hang_seconds,
    )
    with supervisor.locked(parsed.workdir):
        processes.become_subreaper()
        show = supervisor.Supervisor(parsed.workdir, parsed.process_command, options, show=_show)
        sys.exit(show.run())


def _split(argv: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Arguments before "--", whether it is there, and those after it."""
    if "--" not in argv:
        return list(argv), False, []
    place = list(argv).index("--")
    return list(argv[:place]), True, list(argv[place + 1 :])


def _show(line: str) -> None:
    print(line, flush=True)


def _counts(parsed: Command, most: int, least: int) -> tuple[int, ...]:
    """Numbers of processes that may be used, decreasing. Fewer than --processes are planned first, by `hpnlp plan`."""
    if least > most:
        raise InputError(f"--min_processes={least} is more than --processes={most}: lower it")
    gpus = devices.visible_gpus(os.environ)
    largest = PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if not gpus and most > largest:
        raise InputError(
            f"--processes={most} are too many for this machine: expected at most {largest}, {PROCESSES_PER_CORE} for each core"
        )
    counts = [most]
    for count in range(most - 1, least - 1, -1):
        if len(gpus) % count:
            continue
        of_process = len(gpus) // count if gpus else max(1, devices.simulated(os.environ))
        plan = [sys.executable, "-m", "hpnlp", "plan", *parsed.config_arguments(), f"--devices={count * of_process}"]
        planned = subprocess.run(plan, capture_output=True, text=True, check=False)
        if planned.returncode:
            _show(f"launch: {count} processes cannot be used: {planned.stderr.strip().removeprefix('hpnlp: ')}")
        else:
            counts.append(count)
    if least < most and len(counts) == 1:
        raise InputError(f"--min_processes={least}: no number of processes from {least} to {most - 1} has a valid plan")
    return tuple(counts)
