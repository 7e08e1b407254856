"""Writes the result of a study of scaling laws, and its figure, for the documentation.

hpnlp sweep --config=scaling/bytes --workdir=runs/scaling
hpnlp scaling fit runs/scaling
python experiments/bench/scaling_study.py --study=runs/scaling
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure

ROOT = Path(__file__).parents[2]

FLAGS = flags.FLAGS
flags.DEFINE_string("study", None, "Directory of the study.", required=True)
flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")
flags.DEFINE_string("images", str(ROOT / "docs" / "images"), "Where the figure goes.")


def main(_: Any) -> None:
    record = json.loads((Path(FLAGS.study) / "scaling.json").read_text("utf-8"))
    rows = [{"part": "study", **{name: record[name] for name in ("convention", "delta", "level", "noise", "warnings")}}]
    rows += [{"part": "point", **point} for point in record["points"]]
    rows += [{"part": "fit", "convention": name, **each} for name, each in record["fits"].items()]
    rows += [{"part": "other", "form": name, "fit": each} for name, each in record["others"].items()]
    rows += [{"part": part, **each} for part in ("optimum", "prediction") for each in record[_PLURALS[part]]]
    print(measure.write_result("scaling_study", rows, FLAGS.out, record["environment"]))
    shutil.copyfile(Path(FLAGS.study) / "scaling.png", Path(FLAGS.images) / "scaling_study-cpu.png")


_PLURALS = {"optimum": "optima", "prediction": "predictions"}

if __name__ == "__main__":
    app.run(main)
