"""Collects runs and measurements of `hpnlp lra` as result files of the documentation.

    hpnlp lra --mixers=all --tasks=listops_short --budget=1min --workdir=runs/lra
    python experiments/bench/arena.py --runs=runs/lra
    hpnlp lra --efficiency --mixers=all --tasks=text_stdlib --data.batch_size=1 --workdir=runs/efficiency
    hpnlp lra --efficiency --mixers=all --tasks=language_model --data.batch_size=1 --workdir=runs/efficiency
    python experiments/bench/arena.py --efficiency=runs/efficiency

The first two write arena-cpu.json: accuracy, steps, speed and memory of each mixer. The others write
arena_efficiency-cpu.json: steps per second and peak memory by length. `python experiments/bench/results.py` draws both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure
from hpnlp.lra import efficiency

RESULTS = Path(__file__).parents[1] / "results"

FLAGS = flags.FLAGS
flags.DEFINE_string("runs", "", "Directory of runs of hpnlp lra.")
flags.DEFINE_string("efficiency", "", "Directory of measurements of hpnlp lra --efficiency.")
flags.DEFINE_string("out", str(RESULTS), "Where the results go.")


def runs(directory: Path) -> list[dict[str, Any]]:
    """A row for each finished run, with the speed that was measured before the runs."""
    rows = []
    for task in sorted(path for path in directory.iterdir() if path.is_dir()):
        speeds = {row["mixer"]: row["steps_per_second"] for row in efficiency.read_rows(task / "speed.json")}
        for path in sorted(task.glob("*/report.json")):
            report = json.loads(path.read_text("utf-8"))
            mixer = report["config"]["model.mixer"]
            rows.append(
                {
                    "task": task.name,
                    "mixer": mixer,
                    "accuracy": report["heldout_accuracy"],
                    "majority_accuracy": report["majority_accuracy"],
                    "heldout_examples": report["heldout_examples"],
                    "steps": report["config"]["train.steps"],
                    "batch_size": report["config"]["data.batch_size"],
                    "length": report["config"]["data.seq_len"],
                    "steps_per_second": speeds.get(mixer),
                    "peak_memory_bytes": report["peak_memory_bytes"],
                }
            )
    return rows


def main(_: Any) -> None:
    if FLAGS.runs:
        print(measure.write_result("arena", runs(Path(FLAGS.runs)), FLAGS.out))
    if FLAGS.efficiency:
        kept = ("task", "mixer", "length", "batch_size", "steps_per_second", "peak_memory_bytes")
        rows = efficiency.read_rows(Path(FLAGS.efficiency) / "efficiency.json")
        rows = [{name: row[name] for name in kept} for row in rows]
        print(measure.write_result("arena_efficiency", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
