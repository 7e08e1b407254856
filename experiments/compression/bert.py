"""Trains a small encoder as BERT is trained, applies every technique of compression to it, and makes the table of the results.

    python experiments/compression/bert.py --workdir=runs/bert
    python experiments/compression/bert.py --workdir=runs/trial --trial  # a few steps: checks all commands
    python experiments/compression/bert.py --workdir=runs/bert --only=pretrained,classification/teacher,tagging/teacher

The last command rebuilds the teachers alone: pretraining on masked words, and a classifier of functions and a tagger of tokens
that start from it. Each command is `hpnlp train`, `compress` or `convert` in a process of its own, whose output is in
WORKDIR/logs; finished ones are skipped when the script runs again. Ctrl-C and SIGTERM stop the script; a training that they
interrupt saves a checkpoint, from which it resumes. WORKDIR/table.json has a row for each technique and task: bytes on disk and
in memory, the time of the loss of 1, 8 and 32 sequences beside that of the original in the same process, and the held-out
score. With --out=experiments/results, it is written as a result file, too. --only chooses steps by the names of their
directories, without those that make their inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging
from runs import check_packages, check_settings, choose, run_all, table, write_table
from steps import TASKS, Settings, all_steps

from hpnlp import measure
from hpnlp.types import InputError

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "Directory of all results.", required=True)
flags.DEFINE_float("budget", 1.0, "Factor of the numbers of training steps.", lower_bound=0.0)
flags.DEFINE_bool("trial", False, "A few steps and held-out examples, so that scores mean nothing.")
flags.DEFINE_list("tasks", [*TASKS], "Tasks to fine-tune on.")
flags.DEFINE_list("only", [], "Beginnings of the names of steps to do; all by default.")
flags.DEFINE_string("out", "", "Where the result file goes; nowhere by default.")


def main(argv: Sequence[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # JAX reports each kind of device that the machine lacks
    workdir = Path(FLAGS.workdir).absolute()
    try:
        if argv[1:]:
            raise InputError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        if unknown := set(FLAGS.tasks) - set(TASKS):
            raise InputError(f"--tasks: no task {', '.join(sorted(unknown))}, expected some of {', '.join(TASKS)}")
        check_packages()
        settings = Settings(workdir, FLAGS.budget, FLAGS.trial, tuple(FLAGS.tasks))
        steps = all_steps(settings)
        chosen = choose(steps, FLAGS.only)
        check_settings(settings)
    except InputError as error:
        sys.exit(str(error))
    failed = run_all(steps, chosen, workdir)
    write_table(steps, workdir)
    print(f"written: {workdir / 'table.json'}")
    if FLAGS.out:
        name = "compression_trial" if FLAGS.trial else "compression"
        print(f"written: {measure.write_result(name, table(steps, workdir), FLAGS.out)}")
    if failed:
        sys.exit(
            f"{len(failed)} of {len(chosen)} steps failed or were left out, first {failed[0]}: their output is in "
            f"{workdir / 'logs'}; the same command runs them again"
        )


if __name__ == "__main__":
    app.run(main)
