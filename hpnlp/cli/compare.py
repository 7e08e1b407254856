"""`hpnlp compare`: one table and one plot of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from hpnlp import cli

USAGE = """
hpnlp compare RUN RUN ... [--out=compare.png]

Prints a table of finished runs (directories; one that holds a sweep stands for its members), best first, and draws
quality against time and memory.
"""

flags.DEFINE_string(
    "out", "compare.png", "File of the plot, or a directory for compare.png; the table goes beside it, as .md."
)


def run(argv: Sequence[str]) -> None:
    runs = cli.parse(argv, USAGE, positional=True)
    from hpnlp import report

    members = [member for name in runs for member in _members(Path(name))]
    if not members:
        raise cli.InputError("no run is named: hpnlp compare RUN RUN ..., each a workdir with a report.json")
    out = cli.plot_path(cli.FLAGS.out, "compare.png")
    table = report.compare(members, out)
    print(f"{table}\nwritten: {out}, {out.with_suffix('.md')}")


def _members(path: Path) -> list[Path]:
    inner = sorted(report.parent for report in path.glob("*/report.json"))
    return inner if inner and not (path / "report.json").exists() else [path]
