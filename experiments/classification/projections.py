"""Trains the models of `prado.py` with several seeds, and stores their accuracy beside linear models of words and characters.

    python experiments/classification/projections.py --workdir=runs/projections [--models=prado,pqrnn,ngrams,lstm] [--seeds=3]

Finished runs of the directory are not trained again. Differences to PRADO are paired: over the held-out functions, of the runs
with the same seed. Kozareva and Ravi 2019, "PRADO: projection attention networks for document classification on-device", report
that a model of under 200 kB is better than convolutional and recurrent classifiers of many times its size.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure, report
from hpnlp.training.example_scores import ExampleScores

ROOT = Path(__file__).parents[2]
REFERENCE = "prado"

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "runs/projections", "Directory of the runs.")
flags.DEFINE_list("models", ["prado", "pqrnn", "ngrams", "lstm"], "Models of prado.py; prado is the first.")
flags.DEFINE_integer("seeds", 3, "Number of seeds.", lower_bound=1)
flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Directory of the result.")


def trained(model: str, seed: int) -> Path:
    """The directory of a finished run."""
    workdir = Path(FLAGS.workdir, f"{model}-{seed}")
    if not (workdir / "report.json").exists():
        config = f"--config=experiments/classification/prado.py:{model}"
        command = [sys.executable, "-m", "hpnlp", "train", config, f"--workdir={workdir.absolute()}"]
        subprocess.run([*command, f"--train.seed={seed}"], check=True, cwd=ROOT)
    return workdir


def row_of(model: str, runs: list[Path], reference: list[Path]) -> dict[str, Any]:
    """A row of the result."""
    reports = [report.read_report(run) for run in runs]
    accuracies = [content["heldout_accuracy"] for content in reports]
    differences, errors = [], []
    for run, other in zip(runs, reference, strict=True):
        scores, others = ExampleScores.read(run), ExampleScores.read(other)
        if scores is None or others is None:
            sys.exit(f"{run} or {other} has no scores of single examples: train them again")
        differences.append(report.read_report(run)["heldout_accuracy"] - report.read_report(other)["heldout_accuracy"])
        errors.append(scores.paired_error(others, "accuracy"))
    first = reports[0]
    known = [error for error in errors if error is not None]
    return {
        "what": model,
        "seeds": len(runs),
        "parameters": first["parameters"],
        "accuracy": statistics.mean(accuracies),
        "deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "accuracies": accuracies,
        "difference_to_prado": statistics.mean(differences),
        # Held-out functions are the same for all seeds, so that their error does not become smaller with more of them.
        "half_interval": 1.96 * math.sqrt(statistics.mean(e * e for e in known))
        if known and model != REFERENCE
        else None,
        "seconds": statistics.median(content["seconds"] for content in reports),
        "words_accuracy": first.get("words_accuracy"),
        "characters_accuracy": first.get("characters_accuracy"),
        "heldout_examples": first["heldout_examples"],
    }


def main(_: Any) -> None:
    if FLAGS.models[0] != REFERENCE:
        sys.exit(
            f"--models={','.join(FLAGS.models)}: the first must be {REFERENCE}, which the others are compared with"
        )
    runs = {model: [trained(model, seed) for seed in range(FLAGS.seeds)] for model in FLAGS.models}
    rows = [row_of(model, paths, runs[REFERENCE]) for model, paths in runs.items()]
    for row in rows:
        print(row)
    print(measure.write_result("projection_quality", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
