"""Measures how good the advice of `hpnlp advise` is, on models for which the best technique is known.

    python experiments/advise/measure.py --workdir=runs/advise [--fixtures=feed_forward,null]
    python experiments/advise/measure.py --workdir=runs/trial --trial  # a few steps: checks that everything works

For each fixture of fixtures.py, the model is trained and advice is asked for. All techniques that fit it, and pairs of the
best, are then measured in more rounds and without the shortcuts of the search (`exhaustive.py`). The regret is 1 - gain / best
gain, with the gains of the recommended candidate and of the best one in that set. Finished fixtures are skipped when the script
runs again, and an interrupted one goes on. Rows of fixtures that are not in --workdir stay as they are in the result. Hours on
two cores, which must do nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from absl import flags
from fixtures import FIXTURES
from regret import ROW, TRIAL, Scale, measured, summary

from hpnlp import cli, measure
from hpnlp.cli.errors import run_script
from hpnlp.spec import lookup

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "runs/advise", "Directory of runs and measurements.")
flags.DEFINE_list("fixtures", [fixture.name for fixture in FIXTURES], "Fixtures to measure.")
flags.DEFINE_bool(
    "trial", False, "A few steps, techniques and rounds, whose figures mean nothing; the result stays in --workdir."
)
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")


def main(_: list[str]) -> None:
    cli.prepare_jax()
    by_name = {fixture.name: fixture for fixture in FIXTURES}
    chosen = [lookup(by_name, name, "--fixtures") for name in FLAGS.fixtures]
    workdir = Path(FLAGS.workdir).absolute() / ("trial" if FLAGS.trial else "full")
    for number, fixture in enumerate(chosen, 1):
        print(f"{fixture.name} ({number} of {len(chosen)}): {fixture.why}", flush=True)
        measured(fixture, workdir / fixture.name, TRIAL if FLAGS.trial else Scale())
    found = {name: json.loads(p.read_text("utf-8")) for name in by_name if (p := workdir / name / ROW).exists()}
    earlier = {} if FLAGS.trial else _earlier(Path(FLAGS.out))
    rows = [(earlier | found)[name] for name in by_name if name in earlier | found]
    print(summary(rows), flush=True)
    print(measure.write_result("advise", rows, workdir if FLAGS.trial else FLAGS.out))


def _earlier(directory: Path) -> dict[str, Any]:
    """Name of a fixture -> its row in the result of another run of the script."""
    path = directory / "advise-cpu.json"
    return {row["fixture"]: row for row in json.loads(path.read_text("utf-8"))["rows"]} if path.exists() else {}


if __name__ == "__main__":
    run_script(main)
