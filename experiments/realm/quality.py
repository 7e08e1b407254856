"""Writes the scores of runs of `stdlib.py` as a result file: retrieval that learns, a fixed index, and no documents.

python experiments/realm/quality.py runs/realm [--out=DIR]

The argument is a directory with a run for each of `model.refresh=rolling`, `model.refresh=never` and `model.candidates=0`, and
for each seed.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from absl import app, flags

from hpnlp import measure, report

FLAGS = flags.FLAGS
flags.DEFINE_string("out", "", "Directory of the result; that of the runs by default.")
LEARNED, FIXED, ALONE = "retrieval that learns", "index of the first step", "no documents"


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        sys.exit("usage: python experiments/realm/quality.py DIR, the directory of the runs")
    losses: dict[str, dict[int, float]] = {LEARNED: {}, FIXED: {}, ALONE: {}}
    utilities: dict[str, dict[int, float]] = {LEARNED: {}, FIXED: {}}
    for path in sorted(Path(argv[1]).glob("*/report.json")):
        content = report.read_report(path.parent)
        config = content["config"]
        if config["task"] != "realm":
            continue
        stale = FIXED if config["model.refresh"] == "never" else LEARNED
        name = stale if config["model.candidates"] else ALONE
        losses[name][config["train.seed"]] = content["heldout_loss"]
        if name in utilities:
            utilities[name][config["train.seed"]] = content["heldout_utility"]
    seeds = sorted(losses[LEARNED])
    if not seeds or any(sorted(of_name) != seeds for of_name in losses.values()):
        sys.exit(
            f"{argv[1]} lacks finished runs of the three models with the same seeds: let `hpnlp train` finish them"
        )
    rows = []
    for name, of_name in losses.items():
        differences = [losses[LEARNED][seed] - of_name[seed] for seed in seeds]
        difference, half = measure.mean_interval(differences)
        row = {
            "what": name,
            "heldout_loss": statistics.mean(of_name.values()),
            "by_seed": [of_name[seed] for seed in seeds],
            "learned_over_this": None if name == LEARNED else {"difference": difference, "half_interval": half},
        }
        if name in utilities:
            utility, half = measure.mean_interval([utilities[name][seed] for seed in seeds])
            row["utility"] = {"mean": utility, "half_interval": half}
        rows.append(row)
        print(row, flush=True)
    print(measure.write_result("realm_stdlib", rows, FLAGS.out or argv[1]))


if __name__ == "__main__":
    app.run(main)
