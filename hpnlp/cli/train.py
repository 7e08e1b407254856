"""`hpnlp train`: trains the model of an experiment file, or resumes its training, and writes a report."""

from __future__ import annotations

import faulthandler
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment, named_experiments
from hpnlp.cli.errors import at_once
from hpnlp.training.processes import signals
from hpnlp.types import InputError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

USAGE = """
hpnlp train --config=lm/bytes --workdir=runs/bytes [--section.field=value ...]
hpnlp train --task=classification --data.path=FILE [--section.field=value ...]

Trains for train.steps steps and writes a report. Run the same command again to resume from the newest checkpoint.

--config names an experiment of the package or a file of your own; without it, --task has an experiment to start from. Without
--workdir, the run is written to runs/NAME, after the experiment or, with --task, after the file of data. Every field of the
config is a flag, --section.field=value or --config.section.field=value.

Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 save a checkpoint after the current step and exit with code 130; before the first
step they exit at once. A second Ctrl-C, two seconds later or more, exits without saving.

--seeds=0,1,2 trains a run for each seed in WORKDIR/seed_0 and so on, all of them as one program on one device, without
evaluations; it resumes as one run does. The same command with --workdir=WORKDIR/seed_0 --train.seed=0 in place of
--seeds then adds a report.

On several hosts (srun, mpirun, TPU pods), run the same command in each process, with a workdir that all of them share. Without
a launcher, add --coordinator=HOST:PORT --processes=N --process=I.
"""

flags.DEFINE_string("config", None, "Experiment: a name such as lm/bytes, or a file that defines get_config().")
flags.DEFINE_string("workdir", None, "Directory for checkpoints, metrics and the report; runs/NAME by default.")
flags.DEFINE_string("coordinator", "", "HOST:PORT of process 0, for several processes without a launcher.")
flags.DEFINE_integer("processes", 0, "Number of processes; requires --coordinator.")
flags.DEFINE_integer("process", -1, "Index of this process, from 0; requires --coordinator.")
MAX_SECONDS = 10**6
FILES = ("register", "config")  # flags with files that may add tasks
flags.DEFINE_integer("wait", 300, "Seconds to wait for the other processes.", lower_bound=1, upper_bound=MAX_SECONDS)
flags.DEFINE_integer(
    "heartbeat",
    100,
    "Seconds without a heartbeat after which a process counts as failed.",
    lower_bound=1,
    upper_bound=MAX_SECONDS,
)
flags.DEFINE_list("seeds", [], "Seeds of runs that are trained as one program, such as 0,1,2.")
flags.DEFINE_bool(
    "accept_changes",
    False,
    "Resume a run with another config, or start from a train.init_from whose model differs in fields that keep all shapes.",
)


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp train`.

    Args:
      argv: "hpnlp train" and the arguments of the command.

    Raises:
      InputError: A flag, the config, the data or the workdir is invalid.
    """
    faulthandler.enable(file=2)  # an abort, by XLA or by a supervisor, writes the stacks of all threads
    if (parent := os.environ.pop(signals.PARENT, "")).isdecimal():
        signals.follow(int(parent))
    argv, overrides = experiment.split(argv)
    arguments = cli.parse(argv, USAGE + (_help(argv, overrides) if "--help" in argv else ""), positional=True)
    path = experiment.start(cli.FLAGS.config, overrides)
    experiment.check_data_is_named(cli.FLAGS.config, overrides)
    workdir = _workdir(arguments, path, overrides)
    values = experiment.read(path, overrides, workdir)
    cli.prepare_jax()

    from hpnlp.training.processes import distributed
    from hpnlp.training.processes.progress_pipe import PIPE

    f = cli.FLAGS
    PIPE.open()
    PIPE.report("join", 0)
    distributed.join(f.coordinator, f.processes, f.process, seconds=f.wait, heartbeat=f.heartbeat)
    with at_once():
        _train(values, workdir, shlex.join([*cli.register_flags(), f"--config={path}", *overrides]), overrides)


def _train(values: ConfigDict, workdir: str, command: str, overrides: Sequence[str]) -> None:
    """Trains the run of a config, or those of several seeds; `command` has the flags of the config, for the report."""
    from hpnlp import report
    from hpnlp.jobs import out_of_memory
    from hpnlp.training import config, loop
    from hpnlp.training.files.contents import has_begun
    from hpnlp.training.processes import distributed
    from hpnlp.training.processes.progress_pipe import PIPE
    from hpnlp.training.starts import unused_fields

    PIPE.report("setup")
    f = cli.FLAGS
    resolved = config.resolve(values)
    if not any(map(has_begun, [workdir, *Path(workdir).glob("seed_*")])):
        unused_fields.check(resolved, experiment.overridden_fields(overrides))
    if f["seeds"].present:
        from hpnlp.jobs import seeds

        with out_of_memory.advised(resolved):
            members = seeds.train_seeds(resolved, _numbers(f.seeds), workdir, accept_changes=f.accept_changes)
        if members.interrupted:
            sys.exit(signals.INTERRUPTED)
        print("\n".join(map(str, members.paths)))
        return
    distributed.check_same_config(config.to_json(resolved))
    with distributed.exit_on_lost_process(), out_of_memory.advised(resolved):
        result = loop.train(resolved, workdir, accept_changes=f.accept_changes)
    if result.interrupted:
        sys.exit(signals.INTERRUPTED)
    PIPE.report("report")
    if distributed.is_lead():
        report.write(workdir, resolved, result, command)


def _numbers(texts: Sequence[str]) -> list[int]:
    """The numbers of --seeds."""
    if wrong := [text for text in texts if not text.strip().isdecimal()]:
        raise InputError(f"--seeds={','.join(texts)}: {wrong[0]!r} is no whole number: write --seeds=0,1,2")
    return [int(text) for text in texts]


def _workdir(arguments: Sequence[str], path: str, overrides: Sequence[str]) -> str:
    """The directory of the run: that of the flag or the argument, or else runs/NAME, which is printed."""
    if arguments or cli.FLAGS.workdir is not None:
        workdir = cli.named_run(arguments, "hpnlp train --workdir=RUN", "workdir")
    else:
        data = experiment.last_override("data.path", overrides)
        source = path.partition(":")[0] if cli.FLAGS.config or not data else data.rstrip("/")
        workdir = os.path.join(
            "runs", re.sub(r"\W+", "_", os.path.basename(source).partition(".")[0]).strip("_") or "run"
        )
        print(f"workdir: {workdir}", flush=True)
    return cli.check_no_file(workdir, "runs/bytes")


def _help(argv: Sequence[str], overrides: Sequence[str]) -> str:
    """The experiments, and the config fields with the values that the other flags lead to, for --help."""
    from hpnlp.cli import fields

    paths = {name: [arg.partition("=")[2] for arg in argv if arg.startswith(f"--{name}=")] for name in FILES}
    cli.register(paths["register"])
    config = next(reversed(paths["config"]), None)
    path = experiment.start(config, overrides) if config or experiment.last_override("task", overrides) else ""
    return named_experiments.listed() + fields.listed(experiment.read(path, overrides), path)
