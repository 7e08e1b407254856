"""`hpnlp compare`: a table and a plot of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from hpnlp import cli

USAGE = """
hpnlp compare RUN RUN ... [--out=compare.png] [--each_fold]

Prints a table of finished runs, best first, and plots quality against time, memory and size. RUN is the workdir of a run, or a
directory of runs and sweeps, which stands for all of them. Runs of several tasks have a table and a plot for each task, such as
compare-classification.png.

Scores have 95 % intervals over the held-out examples, and so have the differences to the best run, which are paired example by
example and called "no difference" if the interval contains 0. Runs that differ only in train.seed also have a mean over seeds,
below the table. Compressed, converted and exported models are listed beside the runs, with their size, and with a score if
hpnlp compress or hpnlp evaluate has scored them.

Runs of hpnlp sweep --folds=K that differ only in the fold that they hold out are one row, with the mean score, its standard
deviation over folds and a 95 % interval. --each_fold lists the run of each fold below its row.
"""

flags.DEFINE_string(
    "out", "compare.png", "File of the plot, or a directory for compare.png; the table is written beside it as .md."
)
flags.DEFINE_bool("each_fold", False, "List each run of a cross-validation below the row of its folds.")


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp compare`.

    Args:
      argv: "hpnlp compare" and the arguments of the command.

    Raises:
      InputError: There is no run, or one has no valid report.
    """
    runs = cli.parse(argv, USAGE, positional=True)
    from hpnlp import report

    members = [member for name in runs for member in report.members(Path(name))]
    if not members:
        raise cli.InputError("no run: write hpnlp compare RUN RUN ..., each a workdir with a report.json")
    path, by_task = cli.plot_path(cli.FLAGS.out, "compare.png"), report.by_task(members)
    for task, of_task in by_task.items():
        out = path if len(by_task) == 1 else path.with_stem(f"{path.stem}-{task}")
        report.compare(of_task, out, print, each_fold=cli.FLAGS.each_fold)
        print(f"written: {', '.join(str(path) for path in (out, out.with_suffix('.md')) if path.exists())}")
