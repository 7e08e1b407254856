"""Measures the loss of a batch 16 times as large at the same number of tokens, by optimizer and learning-rate scaling.

    python experiments/bench/large_batch.py --workdir=runs/large_batch [--tokens=4194304] [--optimizers=adamw,lamb,lars]

A byte-level language model of the standard library's source is trained on the same number of tokens in batches of B sequences
and of 16 B, so that the large batch takes 1/16 of the steps. Learning rates are tuned for B only: each optimizer takes the
best of RATES, a factor of two apart, by the held-out loss of the first seed; while the best rate is the lowest or highest
one, the next one is tried too, up to MOST_ADDED. For 16 B nothing is tuned: rates are scaled
by `optimizer.scaling`, or unchanged ("none"). Warm-up always lasts for the same fraction of the tokens. Losses are of the same
held-out text, in nats per byte; no times are measured, so that other load on the machine does not change the result.
Differences to the best small batch are paired by seed, with a 95 % interval by Student's distribution.

Rows of optimizers that are not measured are kept, if they are of as many tokens. Finished runs of the directory are not trained
again.

You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes" (LAMB, square-root scaling); You,
Gitman and Ginsburg 2017, "Large batch training of convolutional networks" (LARS, linear scaling); Goyal et al. 2017, "Accurate,
large minibatch SGD" (linear scaling, warm-up); Malladi et al. 2022, "On the SDEs and scaling rules for adaptive gradient
algorithms" (square-root scaling for Adam).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import small_runs
from absl import app, flags
from form_scores import compared

from hpnlp import cli, measure
from hpnlp.data.stream import prepare
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training.config import Config, default, resolve
from hpnlp.training.evaluation import evaluate
from hpnlp.training.run_directory import make_model
from hpnlp.training.trainer import make_trainer

ROWS, LENGTH, FACTOR = 1, 32, 16
WARMUP = 1 / 16  # of the tokens
RATES = {"adamw": (2.5e-4, 5e-4, 1e-3, 2e-3), "lamb": (1.25e-3, 2.5e-3, 5e-3, 1e-2), "lars": (0.25, 0.5, 1.0, 2.0)}
MOST_ADDED = 6  # rates beyond RATES
RULES = ("none", "sqrt", "linear")

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "runs/large_batch", "Directory of the losses of finished runs.")
flags.DEFINE_list("optimizers", list(RATES), "Optimizers to measure, of RATES.")
flags.DEFINE_integer("tokens", 2**22, "Training tokens of each run.")
flags.DEFINE_integer("seeds", 3, "Runs of each recipe; the mean of their losses is reported.")
flags.DEFINE_string("path", "stdlib", "The text, as data.path.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Where the result goes.")


def config_of(optimizer: str, rate: float, batch: int, rule: str, tokens: int, seed: int) -> Config:
    """The configuration of a run. rate: learning rate at ROWS sequences. rule: how it scales with the batch."""
    steps = tokens // (batch * LENGTH)
    values = default()
    values.data.update(path=FLAGS.path, seq_len=LENGTH, batch_size=batch, heldout_bytes=min(100_000, tokens))
    values.model.update(layers=2, dim=64, heads=2)
    values.optimizer.update(name=optimizer, learning_rate=rate, warmup=round(WARMUP * steps), b2=0.99, final=0.0)
    if rule != "none":
        values.optimizer.update(base_batch=ROWS, scaling=rule)
    values.train.update(steps=steps, seed=seed)
    return resolve(values)


def final_loss(config: Config) -> float:
    """Held-out loss after training, in nats per byte; trains if the run is not finished."""
    batch = config.data.batch_size
    optimizer = config.optimizer.for_batch(batch)
    name = f"{optimizer.name}-{optimizer.learning_rate:g}-{batch}-{config.train.steps}-{config.train.seed}"
    directory = Path(FLAGS.workdir, name)
    if not small_runs.is_finished(directory):
        small_runs.write(directory, {"loss": trained_loss(config)})
    return small_runs.read(directory)["loss"]


def trained_loss(config: Config) -> float:
    """Held-out loss after training, in nats per byte."""
    corpus = prepare(config.data)
    optimizer = config.optimizer.for_batch(config.data.batch_size)
    model = make_model(config, Vocabulary(corpus.tokenizer))
    trainer = make_trainer(model, optimizer, config.plan, steps=config.train.steps, devices=jax.devices()[:1])
    key = jax.random.key(config.train.seed)
    state, batches = trainer.init(key), corpus.train(seed=config.train.seed)
    for _ in range(config.train.steps):
        state, _ = trainer.step(state, next(batches), key)
    batches.close()
    return evaluate(trainer, state.best_params, corpus, config).scores["loss"]


def row_of(rule: str, configs: list[Config], losses: list[float]) -> dict[str, Any]:
    """The row of runs that differ only in their seeds."""
    config = configs[0]
    optimizer = config.optimizer.for_batch(config.data.batch_size)
    row = {"optimizer": optimizer.name, "rule": rule, "batch": config.data.batch_size, "length": LENGTH}
    row |= {"steps": config.train.steps, "learning_rate": optimizer.learning_rate, "losses": losses}
    print(row | {"loss": float(np.mean(losses))}, flush=True)
    return row | {"loss": float(np.mean(losses))}


def best_rate(losses: Mapping[float, float]) -> float:
    return min(losses, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)


def tuned(loss: Callable[[float], float], rates: Sequence[float]) -> dict[float, float]:
    """Loss by learning rate; rates are added until the best one is between two others, at most MOST_ADDED."""
    tried = {rate: loss(rate) for rate in rates}
    for _ in range(MOST_ADDED):
        best = best_rate(tried)
        if min(tried) < best < max(tried):
            break
        rate = best * 2 if best == max(tried) else best / 2
        tried[rate] = loss(rate)
    return dict(sorted(tried.items()))


def bench(optimizers: Sequence[str], tokens: int, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for name in optimizers:
        tried = tuned(lambda rate, name=name: final_loss(config_of(name, rate, ROWS, "none", tokens, 0)), RATES[name])
        print(f"{name}, {ROWS} rows, loss by rate: {tried}", flush=True)
        rate = best_rate(tried)
        configs = [config_of(name, rate, ROWS, "none", tokens, seed) for seed in range(seeds)]
        row = row_of("small", configs, [tried[rate], *map(final_loss, configs[1:])])
        rows.append(row | {"tried": list(tried.items())})
        for rule in RULES:
            configs = [config_of(name, rate, FACTOR * ROWS, rule, tokens, seed) for seed in range(seeds)]
            rows.append(row_of(rule, configs, [final_loss(config) for config in configs]))
    return rows


def kept_rows(optimizers: Sequence[str], tokens: int) -> list[dict[str, Any]]:
    """Rows of an earlier result of optimizers that are not measured."""
    path = measure.result_path("large_batch", FLAGS.out, jax.devices()[0].device_kind)
    rows = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    same = {row["optimizer"] for row in rows if row["rule"] == "small" and row["steps"] == tokens // (ROWS * LENGTH)}
    return [row for row in rows if row["optimizer"] in same - set(optimizers)]


def over_small(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their loss relative to the least of small batches, and the difference of equally many seeds."""
    best = min((row for row in rows if row["rule"] == "small"), key=lambda row: row["loss"])
    results = []
    for row in rows:
        result = row | {"over_small": row["loss"] / best["loss"]}
        if row is not best and len(row["losses"]) == len(best["losses"]):
            scores = compared(row["losses"], best["losses"])
            result |= {name: scores[name] for name in ("difference", "half_interval")}
        results.append(result)
    return results


def main(_: Any) -> None:
    cli.prepare_jax()
    rows = kept_rows(FLAGS.optimizers, FLAGS.tokens) + bench(FLAGS.optimizers, FLAGS.tokens, FLAGS.seeds)
    print(measure.write_result("large_batch", over_small(rows), FLAGS.out))


if __name__ == "__main__":
    app.run(main)
