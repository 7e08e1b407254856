"""Trains projection networks beside fastText's classifier, an LSTM of 10 times the parameters and the Encoder, on one task.

    python experiments/bench/projections.py [--models=prado,pqrnn,ngrams,lstm,encoder] [--seeds=1] [--steps=0]

The models are those of experiments/classification/prado.py, and self-attention of encoders.py. First, steps of all of them are
timed side by side, on the same number of texts of similar lengths; seconds of an epoch are those of its steps. Then each is
trained with every seed. The accuracy is that of the best checkpoint, with the standard error over the held-out examples. Bytes
are those of the weights as int8, of models that have been trained with them. Linear models are those of the report.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from hpnlp import cli, measure, tasks
from hpnlp.cli import experiment
from hpnlp.compress.files import write_weights
from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.data.examples.baselines import linear_accuracy
from hpnlp.training import loop, run_directory
from hpnlp.training.config import Config, resolve
from hpnlp.training.evaluation import on_devices
from hpnlp.training.step import make_trainer

DIRECTORY = Path(__file__).parents[1] / "classification"
PROJECTIONS, ENCODERS = (experiment.load(str(DIRECTORY / name)) for name in ("prado.py", "encoders.py"))
MODELS = [*PROJECTIONS.MODELS, "encoder"]
TIMED = 8  # batches of a measurement

FLAGS = flags.FLAGS
flags.DEFINE_list("models", MODELS, "Models to train.")
flags.DEFINE_integer("seeds", 1, "Runs of each model, with the seeds 0, 1, ...")
flags.DEFINE_integer("steps", 0, "Steps of each run; 0 for those of the experiment.")
flags.DEFINE_integer("rounds", 5, "Measurements of each model's steps.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")


def config_of(model: str) -> Config:
    """The config of a model."""
    values = ENCODERS.get_config("attention") if model == "encoder" else PROJECTIONS.get_config(model)
    if model == "encoder":
        values.data.batch_size = 32
    values.train.update(baselines=False, steps=FLAGS.steps or values.train.steps)
    values.plan.name = "single"
    return resolve(values)


def timed(config: Config) -> tuple[Callable[[], Any], Any]:
    """`(steps on TIMED batches, the data)`."""
    task = tasks.find(config.task)
    dataset: Any = task.dataset(config.data, None)
    model = run_directory.make_model(config, task.vocabulary(dataset))
    trainer = make_trainer(model, config.optimizer, config.plan, steps=10_000, batch_size=config.data.batch_size)
    state, key = trainer.init(jax.random.key(0)), jax.random.key(0)
    batches = [
        on_devices(trainer, batch, config) for batch, _ in zip(dataset.train(seed=0), range(TIMED), strict=False)
    ]

    def run() -> Any:
        nonlocal state
        for batch in batches:
            state, metrics = trainer.step(state, batch, key)
        return metrics["loss"]

    return run, dataset


def trained(config: Config, seed: int) -> dict[str, Any]:
    """Figures of one run."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
    with tempfile.TemporaryDirectory() as directory:
        result = loop.train(config, Path(directory, "run"))
        figures = {"parameters": result.parameters, "accuracy": result.heldout["accuracy"]}
        if config.train.weights:
            run = run_directory.load(Path(directory, "run"))
            *_, (_, _, weights) = compress(run.model.config, run.params, parse_recipe("int8"))
            file = Path(directory, "weights")
            write_weights(file, weights, {"step": run.step})
            figures["int8_bytes"] = file.stat().st_size
    return figures


def main(_: list[str]) -> None:
    cli.prepare_jax()
    configs = {name: config_of(name) for name in FLAGS.models}
    prepared = {name: timed(config) for name, config in configs.items()}
    times = measure.timeit({name: run for name, (run, _) in prepared.items()}, rounds=FLAGS.rounds)
    rows = []
    for name, config in configs.items():
        dataset = prepared[name][1]
        runs = [trained(config, seed) for seed in range(FLAGS.seeds)]
        accuracy = float(np.mean([run["accuracy"] for run in runs]))
        epoch = times[name].median / TIMED * dataset.train_examples / config.data.batch_size
        rows.append(
            {
                "model": name,
                **runs[0],
                "accuracy": accuracy,
                "accuracies": [run["accuracy"] for run in runs],
                "standard_error": math.sqrt(accuracy * (1 - accuracy) / dataset.heldout_examples),
                "steps": config.train.steps,
                "epoch_seconds": epoch,
            }
        )
        print(rows[-1], flush=True)
    linear = linear_accuracy(next(iter(prepared.values()))[1])
    rows += [{"model": f"linear model of {features}", "accuracy": value} for features, value in linear.items()]
    print(rows[-2:], flush=True)
    print(measure.write_result("projections", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
