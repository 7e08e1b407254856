"""Measures how much the loss of a language model rises by rounding and pruning, with and without second-order information.

    python experiments/bench/second_order.py --run=runs/bytes [--calibration=8]

Each group of rows is one format of the weights: 8 bits with rounded inputs, 4 bits in groups of 32, 50 %, 30 % and 20 % of the
weights, 50 % and 20 % also with equally many in each column, so that products skip the zeros, 2:4 sparsity. The first row of a
group rounds to the nearest number, or keeps the largest weights; the others read the inputs of the matrices, or gradients, on
training batches. Nothing is trained. The ratio is that of the increases of the held-out loss, with a 95 % interval by drawing
the held-out sequences again with replacement, the same ones for both rows.

Published: GPTQ (Frantar et al. 2023), OPT-175B in 4 bits: perplexity 8.37 on WikiText-2 (float16: 8.34; to the nearest: 10.54).
SparseGPT (Frantar and Alistarh 2023), OPT-175B with 50 % zeros: 8.21 (dense: 8.35; by magnitude: over 1,000).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from hpnlp import cli, measure, tasks
from hpnlp.compress.recipe import Calibration, compress, parse_recipe
from hpnlp.jobs.compression.versions import CalibrationData
from hpnlp.parallel.plan import Plan
from hpnlp.training import run_directory
from hpnlp.training.evaluation import evaluate
from hpnlp.training.trainer import make_trainer

GROUPS = (
    ("int8", "int8(smooth=0.5)", "int8(by=inputs)", "int8(by=inputs,smooth=0.5)"),
    (
        "int4",
        "int4(limits=mse)",
        "int4(scaled=True)",
        "int4(by=inputs)",
        "int4(limits=mse,by=inputs)",
        "int4(by=inputs,scaled=True)",
    ),
    (
        "magnitude(0.5)",
        "magnitude(0.5,by=fisher)",
        "magnitude(0.5,by=inputs)",
        "balanced(0.5)",
        "balanced(0.5,by=inputs)",
    ),
    ("magnitude(0.3)", "magnitude(0.3,by=fisher)", "magnitude(0.3,by=inputs)"),
    ("magnitude(0.2)", "balanced(0.2)", "balanced(0.2,by=inputs)", "blocks(0.2,block=16)"),
    ("two_four", "two_four(by=inputs)"),
)
DRAWS = 1000

FLAGS = flags.FLAGS
flags.DEFINE_string("run", None, "Directory of a finished run of a language model.", required=True)
flags.DEFINE_integer("calibration", 8, "Training batches that are read.")
flags.DEFINE_integer("batches", 0, "Largest number of held-out batches; 0 for all.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Where the result goes.")


def interval(increase: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """95 % interval of the ratio of two sums over sequences."""
    counts = np.random.default_rng(0).multinomial(len(other), np.full(len(other), 1 / len(other)), size=DRAWS)
    low, high = np.percentile((counts @ increase) / (counts @ other), [2.5, 97.5])
    return float(low), float(high)


def main(_: Any) -> None:
    cli.prepare_jax()
    run = run_directory.load(FLAGS.run)
    dataset = tasks.find(run.config.task).dataset(run.config.data, run.vocabulary)
    data = CalibrationData(run, dataset, FLAGS.calibration)
    calibration = Calibration(data.gradients, data.squares)

    def losses(config: Any, params: Any) -> np.ndarray:
        """Share of each held-out sequence in the loss, in nats per token."""
        model, training = run.model.clone(config=config), run.config
        optimizer = training.optimizer.for_batch(training.data.batch_size)
        trainer = make_trainer(model, optimizer, Plan("single"), steps=1, batch_size=training.data.batch_size)
        evaluation = evaluate(trainer, params, dataset, training, FLAGS.batches or None)
        assert evaluation.examples is not None
        total, weight = evaluation.examples.sums["loss"]
        return total / weight.sum()

    original = losses(run.model.config, run.params)
    rows = []
    for group in GROUPS:
        first: np.ndarray | None = None
        for recipe in group:
            *_, (_, config, params) = compress(run.model.config, run.params, parse_recipe(recipe), calibration)
            increase = losses(config, params) - original
            first = increase if first is None else first
            row: dict[str, Any] = {
                "what": recipe,
                "compared_with": group[0],
                "loss_before": float(original.sum()),
                "increase": float(increase.sum()),
            }
            if recipe != group[0]:
                row |= {"ratio": float(increase.sum() / first.sum()), "interval": interval(increase, first)}
            rows.append(row)
            print(row, flush=True)
    print(measure.write_result("second_order", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
