"""Runs the experiment of each task from the command line and stores what its report says, the baselines' figures included.

    python experiments/bench/task_runs.py [--experiments=classification/stdlib,seq2seq/numbers]

About 20 minutes on two cores. The baselines of classification, seq2seq and dual_encoder need scikit-learn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure

ROOT = Path(__file__).parents[2]
EXPERIMENTS = (
    "classification/stdlib",
    "dual_encoder/stdlib",
    "seq2seq/numbers",
    "tagging/stdlib",
    "masked_lm/bytes",
)

FLAGS = flags.FLAGS
flags.DEFINE_list("experiments", [*EXPERIMENTS], "Files below experiments/ to run, without .py.")
flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")


def run(experiment: str) -> dict[str, Any]:
    """Trains as an experiment file says. Returns its report, with the seconds from the start of the process to its end."""
    with tempfile.TemporaryDirectory() as workdir:
        command = [sys.executable, "-m", "hpnlp", "train", f"--config=experiments/{experiment}.py"]
        start = time.perf_counter()
        subprocess.run([*command, f"--workdir={workdir}"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        report = json.loads(Path(workdir, "report.json").read_text())
    figures = {name: value for name, value in report.items() if name not in ("environment", "seconds")}
    return {"experiment": experiment, "seconds": seconds, **figures}


def main(_: Any) -> None:
    rows = []
    for experiment in FLAGS.experiments:
        rows.append(run(experiment))
        print({name: value for name, value in rows[-1].items() if name != "config"}, flush=True)
    print(measure.write_result("task_runs", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
