"""Measures gradients scaled by inverse frequency on bags of titles: ranks of titles that contain rare words.

    python experiments/bench/labelled_bags.py [--seeds=3] [--steps=200] [--powers=0,0.5,1]

The model and the data are those of experiments/embeddings/titles.py: a held-out title is ranked by its similarity to the rest
of its bag (three other titles of the module, and the module), among the held-out titles of other modules. A title has a rare
word if one of its words occurs 1 to 3 times in the training titles. The learning rate of each power is the best one of a grid
by the mean reciprocal rank of the titles of every other bag; the titles of the remaining bags give the figures.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.cli import experiment
from hpnlp.data.examples.dataset import HELDOUT
from hpnlp.models.variables import collections
from hpnlp.tasks import find, make_model
from hpnlp.tasks.labelled_bags import text_ranks
from hpnlp.training.config import resolve
from hpnlp.training.step import make_trainer

RARE = 3  # occurrences of a rare word in the training titles, at most

FLAGS = flags.FLAGS
flags.DEFINE_integer("seeds", 3, "Seeds of each row.")
flags.DEFINE_integer("steps", 200, "Training steps.")
flags.DEFINE_list("powers", ["0", "0.5", "1"], "Values of model.frequency_power.")
flags.DEFINE_list("rates", ["0.3", "1", "3"], "Learning rates.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")


def has_rare_word(dataset: Any, places: np.ndarray) -> np.ndarray:
    """Whether each held-out text has a word that occurs 1 to RARE times in the training texts."""
    train, heldout = dataset.stored["train"], dataset.stored[HELDOUT]
    counts = np.zeros(dataset.tokenizer.vocab_size, np.int64)
    for number in range(train.count):
        np.add.at(counts, train.part(number, 0).astype(np.int64), 1)
    counts[[i for i in (dataset.tokenizer.pad_id, dataset.tokenizer.unk_id) if i is not None]] = 0
    found = []
    for example, text in places:
        ids = heldout.part(int(example), 0)
        number = np.cumsum(heldout.labels(int(example)) >= 0) - 1
        of_text = counts[ids[number == text].astype(np.int64)]
        found.append(bool(np.any((of_text >= 1) & (of_text <= RARE))))
    return np.array(found)


class Experiment:
    """The data, and runs with other powers, learning rates and seeds."""

    def __init__(self) -> None:
        path = str(Path(__file__).parents[1] / "embeddings" / "titles.py")
        self.config = resolve(experiment.read(path))
        self.task = find(self.config.task)
        self.dataset: Any = self.task.dataset(self.config.data, None)

    def ranks(self, power: float, rate: float, seeds: int) -> tuple[list[np.ndarray], np.ndarray]:
        """`(ranks of the held-out titles for each seed, places of the titles)`."""
        config = dataclasses.replace(
            self.config,
            model=dataclasses.replace(self.config.model, frequency_power=power),
            optimizer=dataclasses.replace(self.config.optimizer, learning_rate=rate),
        )
        model = make_model(config, self.task.vocabulary(self.dataset).sizes)
        trainer = make_trainer(model, config.optimizer, config.plan, steps=FLAGS.steps, devices=jax.devices()[:1])
        embed = jax.jit(functools.partial(model.apply, method="embed_bags"))
        result, places = [], np.zeros((0, 2), int)
        for seed in range(seeds):
            state, batches = trainer.init(jax.random.key(seed)), self.dataset.train(seed=seed)
            for _ in range(FLAGS.steps):
                state, _ = trainer.step(state, next(batches), jax.random.key(seed))
            batches.close()
            weights = collections(state.params)
            size = config.data.batch_size
            ranks, places = text_ranks(self.dataset, lambda batch, w=weights: embed(w, batch), size)
            result.append(ranks)
        return result, places


def main(_: list[str]) -> None:
    cli.prepare_jax()
    runs, rows, base = Experiment(), [], np.zeros(0)
    for power in map(float, FLAGS.powers):
        tried = {}
        for rate in map(float, FLAGS.rates):
            ranks, places = runs.ranks(power, rate, 1)
            tried[rate] = float(np.mean(1 / ranks[0][places[:, 0] % 2 == 0]))
        best = max(tried, key=lambda rate: tried[rate])
        ranks, places = runs.ranks(power, best, FLAGS.seeds)
        is_scored, is_rare = places[:, 0] % 2 == 1, has_rare_word(runs.dataset, places)
        row: dict[str, Any] = {
            "power": power, "learning_rate": best, "steps": FLAGS.steps, "tried": list(tried.items()),
            "titles": len(ranks[0]), "rare_titles": int((is_scored & is_rare).sum()),
        }  # fmt: skip
        for name, chosen in (("rare", is_scored & is_rare), ("other", is_scored & ~is_rare)):
            reciprocal = np.array([np.mean(1 / r[chosen]) for r in ranks])
            row |= {
                f"{name}_mrr": float(reciprocal.mean()),
                f"{name}_mrrs": reciprocal.tolist(),
                f"{name}_mean_rank": float(np.mean([r[chosen].mean() for r in ranks])),
                f"{name}_median_rank": float(np.mean([np.median(r[chosen]) for r in ranks])),
                f"{name}_mean_ranks": [float(r[chosen].mean()) for r in ranks],
            }
        base = base if len(base) else np.array(row["rare_mrrs"])
        row["better_seeds"] = int(np.sum(np.array(row["rare_mrrs"]) > base))
        rows.append(row)
        print(row, flush=True)
    print(measure.write_result("labelled_bags", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
