"""`hpnlp train`: trains what an experiment file describes, or goes on with it, and reports."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment, fields
from hpnlp.training import signals

USAGE = """
hpnlp train --config=experiments/lm/bytes.py --workdir=runs/bytes [--config.section.field=value ...]

Trains to config.train.steps and reports. The same command in the same workdir goes on where it stopped. Ctrl-C,
SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 have it saved after the step that it is at; before the first step they end it at once. Then
it exits with 130. Ctrl-C again, two seconds later or more, ends it unsaved.

Several hosts: under srun, mpirun or on a TPU pod, the same command in each process, and one workdir that all see. Without a
launcher, add --coordinator=HOST:PORT --processes=N --process=I.
"""

flags.DEFINE_string("config", None, "An experiment file with get_config().")
flags.DEFINE_string("workdir", None, "Where checkpoints, metrics and the report go.")
flags.DEFINE_string("coordinator", "", "HOST:PORT of process 0, for several processes that no launcher has started.")
flags.DEFINE_integer("processes", 0, "How many there are; with --coordinator.")
flags.DEFINE_integer("process", -1, "Which one this is, from 0; with --coordinator.")
SECONDS = 10**6  # at most
flags.DEFINE_integer("wait", 300, "Seconds to wait for the other processes.", lower_bound=1, upper_bound=SECONDS)
flags.DEFINE_integer(
    "heartbeat",
    100,
    "Seconds without a sign of life after which a process is given up.",
    lower_bound=1,
    upper_bound=SECONDS,
)
flags.DEFINE_bool(
    "accept_changes",
    False,
    "Go on in a workdir that another config made, or from a train.init_from whose model differs but for its shapes.",
)


def run(argv: Sequence[str]) -> None:
    if (parent := os.environ.pop(signals.PARENT, "")).isdecimal():
        signals.follow(int(parent))
    argv, overrides = experiment.split(argv)
    cli.parse(argv, USAGE + (fields.listed() if "--help" in argv else ""))
    path, workdir = cli.required("config", experiment.EXAMPLE), cli.required("workdir", "runs/bytes")
    values = experiment.read(path, overrides)
    cli.prepare_jax()

    from hpnlp import report
    from hpnlp.planner import out_of_memory
    from hpnlp.training import config, distributed, loop

    f = cli.FLAGS
    distributed.join(f.coordinator, f.processes, f.process, seconds=f.wait, heartbeat=f.heartbeat)
    resolved = config.resolve(values)
    distributed.check_alike(config.to_json(resolved))
    with distributed.others_may_die(), out_of_memory.advised(resolved):
        result = loop.train(resolved, workdir, accept_changes=cli.FLAGS.accept_changes)
    if result.interrupted:
        sys.exit(signals.INTERRUPTED)
    if distributed.is_lead():
        report.write(workdir, resolved, result, shlex.join([f"--config={path}", *overrides]))
