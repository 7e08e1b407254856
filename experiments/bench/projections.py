"""Trains projection networks beside fastText's classifier, an LSTM of 10 times the parameters and the Encoder, on one task.

    python experiments/bench/projections.py --workdir=runs/projections [--models=prado,pqrnn,ngrams,lstm,encoder] [--seeds=3]

The models are those of experiments/classification/prado.py, and self-attention of encoders.py. Each is trained with every seed;
finished runs of the directory are not trained again. Then steps of all of them are timed side by side, on the same number of
texts of similar lengths; seconds of an epoch are those of its steps. The accuracy is that of the best checkpoint. Differences
to the first model are paired, by function and seed; their 95 % intervals are over functions and seeds. Bytes are those of the
weights as int8, of models that have been trained with them. Linear models are those of the report, which have no interval.

Kaliamoorthi et al. 2019, "PRADO: projection attention networks for document classification on-device", report that a model of
under 200 kB is better than convolutional and recurrent classifiers of many times its size.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from hpnlp import cli, measure, report, tasks
from hpnlp.cli import experiment
from hpnlp.compress.files import write_weights
from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.data.examples.baselines import linear_accuracy
from hpnlp.training import run_directory
from hpnlp.training.config import Config, resolve
from hpnlp.training.evaluation import on_devices
from hpnlp.training.files.example_scores import ExampleScores
from hpnlp.training.trainer import make_trainer

DIRECTORY = Path(__file__).parents[1] / "classification"
PROJECTIONS, ENCODERS = (experiment.load(str(DIRECTORY / name)) for name in ("prado.py", "encoders.py"))
MODELS = [*PROJECTIONS.MODELS, "encoder"]
TIMED = 8  # batches of a measurement

FLAGS = flags.FLAGS
flags.DEFINE_list("models", MODELS, "Models to train.")
flags.DEFINE_string("workdir", "runs/projections", "Directory of the runs.")
flags.DEFINE_integer("seeds", 3, "Runs of each model, with the seeds 0, 1, ...", lower_bound=1)
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


def changed_flags(model: str) -> list[str]:
    """Flags of `hpnlp train` that make the config of an experiment that of `config_of`."""
    config = config_of(model)
    return [
        f"--train.steps={config.train.steps}",
        f"--data.batch_size={config.data.batch_size}",
        "--train.baselines=False",
        "--plan.name=single",
    ]


def trained(model: str, seed: int) -> Path:
    """The directory of a finished run."""
    workdir = Path(FLAGS.workdir, f"{model}-{seed}")
    if not (workdir / "report.json").exists():
        name = "encoders.py:attention" if model == "encoder" else f"prado.py:{model}"
        command = [sys.executable, "-m", "hpnlp", "train", f"--config={DIRECTORY / name}", f"--workdir={workdir}"]
        subprocess.run([*command, f"--train.seed={seed}", *changed_flags(model)], check=True)
    return workdir


def int8_bytes(directory: Path) -> int:
    """Bytes of a run's weights as int8."""
    run = run_directory.load(directory)
    *_, (_, _, weights) = compress(run.model.config, run.params, parse_recipe("int8"))
    with tempfile.NamedTemporaryFile() as file:
        write_weights(Path(file.name), weights, {"step": run.step})
        return Path(file.name).stat().st_size


def row_of(model: str, runs: list[Path], first_runs: list[Path]) -> dict[str, Any]:
    """A row of the result: accuracies, and their paired differences to the first model."""
    reports = [report.read_report(run) for run in runs]
    accuracies = [content["heldout_accuracy"] for content in reports]
    differences, errors = [], []
    for run, other, accuracy in zip(runs, first_runs, accuracies, strict=True):
        scores, others = ExampleScores.read(run), ExampleScores.read(other)
        if scores is None or others is None:
            sys.exit(f"{run} or {other} has no scores of single examples: train them again")
        differences.append(accuracy - report.read_report(other)["heldout_accuracy"])
        errors.append(scores.paired_error(others, "accuracy"))
    half = None
    if runs != first_runs and None not in errors:
        # All seeds have the same held-out functions, so that more seeds reduce only the variance between seeds.
        variance = statistics.mean(error * error for error in errors)
        variance += statistics.variance(differences) / len(runs) if len(runs) > 1 else 0.0
        half = 1.96 * math.sqrt(variance)
    return {
        "what": model,
        "seeds": len(runs),
        "steps": reports[0]["steps"],
        "parameters": reports[0]["parameters"],
        "accuracy": statistics.mean(accuracies),
        "deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "accuracies": accuracies,
        "difference": statistics.mean(differences),
        "differences": differences,
        "half_interval": half,
        "heldout_examples": reports[0]["heldout_examples"],
        "int8_bytes": int8_bytes(runs[0]) if config_of(model).train.weights else None,
    }


def main(_: list[str]) -> None:
    cli.prepare_jax()
    runs = {model: [trained(model, seed) for seed in range(FLAGS.seeds)] for model in FLAGS.models}
    prepared = {model: timed(config_of(model)) for model in FLAGS.models}
    times = measure.timeit({model: run for model, (run, _) in prepared.items()}, rounds=FLAGS.rounds)
    rows = [row_of(model, paths, runs[FLAGS.models[0]]) for model, paths in runs.items()]
    for row in rows:
        dataset, config = prepared[row["what"]][1], config_of(row["what"])
        row["epoch_seconds"] = times[row["what"]].median / TIMED * dataset.train_examples / config.data.batch_size
    linear = linear_accuracy(next(iter(prepared.values()))[1])
    rows += [{"what": f"linear model of {features}", "accuracy": value} for features, value in linear.items()]
    for row in rows:
        print(row)
    print(measure.write_result("projections", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
