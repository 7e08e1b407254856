"""Trains encoders of texts of different lengths for equal times on one task: convolutions, self-attention and an LSTM.

    python experiments/bench/encoders.py [--seconds=30] [--encoders=convolution,attention,lstm]

The encoders are those of experiments/classification/encoders.py, with batches of similar lengths. First, steps of all of them
are timed side by side, on the same batches, and on batches that are padded to `data.seq_len`. Then each is trained by
`hpnlp train`'s loop for as many steps as it does in `--seconds`; compilation and evaluation do not count. Tokens per second are
those of texts, without padding.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from hpnlp import cli, measure, tasks
from hpnlp.cli import experiment
from hpnlp.training import loop
from hpnlp.training.config import Config, resolve
from hpnlp.training.evaluation import on_devices
from hpnlp.training.run_directory import make_model
from hpnlp.training.trainer import make_trainer

EXPERIMENT = experiment.load(str(Path(__file__).parents[1] / "classification" / "encoders.py"))
TIMED = 8  # batches of a measurement

FLAGS = flags.FLAGS
flags.DEFINE_list("encoders", list(EXPERIMENT.ENCODERS), "Entries of ENCODERS.")
flags.DEFINE_float("seconds", 30.0, "Seconds of training steps of each encoder.")
flags.DEFINE_integer("rounds", 3, "Measurements of each encoder's steps.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")


def config_of(encoder: str) -> Config:
    """The config of an encoder, without evaluations during the training."""
    values = EXPERIMENT.get_config(encoder)
    values.data.linear_baselines = False
    values.train.update(eval_every=0, log_every=50, checkpoint_every=0)
    values.plan.name = "single"
    return resolve(values)


def timed(config: Config) -> tuple[tuple[Callable[[], Any], ...], float]:
    """`((steps on TIMED batches of similar lengths, steps on as many padded batches), mean tokens of a text)`."""
    task = tasks.find(config.task)
    dataset: Any = task.dataset(config.data, None)
    padded: Any = task.dataset(dataclasses.replace(config.data, buckets=1), None)
    model = make_model(config, task.vocabulary(dataset))
    trainer = make_trainer(model, config.optimizer, config.plan, steps=10_000, batch_size=config.data.batch_size)
    state, key = trainer.init(jax.random.key(0)), jax.random.key(0)
    batches = [
        [on_devices(trainer, batch, config) for batch, _ in zip(data.train(seed=0), range(TIMED), strict=False)]
        for data in (dataset, padded)
    ]

    def run(chosen: list[Any]) -> Any:
        nonlocal state
        for batch in chosen:
            state, metrics = trainer.step(state, batch, key)
        return metrics["loss"]

    lengths = np.concatenate(list(dataset.stored["train"].lengths()))
    tokens = dataset.kind.row_lengths(lengths, dataset.tokenizer, config.data.seq_len).mean()
    return (lambda: run(batches[0]), lambda: run(batches[1])), float(tokens)


def main(_: list[str]) -> None:
    cli.prepare_jax()
    configs = {encoder: config_of(encoder) for encoder in FLAGS.encoders}
    prepared = {encoder: timed(config) for encoder, config in configs.items()}
    functions = {f"{name} {padded}": prepared[name][0][padded] for name in configs for padded in (0, 1)}
    times = measure.timeit(functions, rounds=FLAGS.rounds)
    rows = []
    for name, config in configs.items():
        of_buckets, of_padded = (times[f"{name} {padded}"] for padded in (0, 1))
        steps = max(1, round(FLAGS.seconds / (of_buckets.median / TIMED)))
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
        with tempfile.TemporaryDirectory() as workdir:
            result = loop.train(config, Path(workdir, "run"))
        busy = result.seconds["data"] + result.seconds["step"]
        texts, tokens = steps * config.data.batch_size, prepared[name][1]
        trained = texts * result.timed_tokens / result.tokens  # without the steps that were compiled
        rows.append(
            {
                "encoder": name,
                "parameters": result.parameters,
                "steps": steps,
                "seconds": busy,
                "compile_seconds": result.seconds["setup"],
                "accuracy": result.heldout["accuracy"],
                "loss": result.heldout["loss"],
                "texts_per_second": trained / busy,
                "tokens_per_second": trained * tokens / busy,
                "padding": 1 - texts * tokens / result.tokens,
                "time_over_padded": of_buckets.over(of_padded),
                "flops_per_step": result.flops_per_step,
            }
        )
        print(rows[-1], flush=True)
    print(measure.write_result("encoders", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
