"""Measures variants of labelled bags of titles: scaled gradients of rare words, memories, and topics in place of labels.

    python experiments/bench/labelled_bags.py [--seeds=3] [--steps=200] [--powers=0,0.5,1]
    python experiments/bench/labelled_bags.py --compare=memory --seeds=5
    python experiments/bench/labelled_bags.py --compare=positives --seeds=5

The model and the data are those of experiments/embeddings/titles.py: a held-out title is ranked by its similarity to the rest
of its bag (three other titles of the module, and the module), among the held-out titles of other modules. A title has a rare
word if one of its words occurs 1 to 3 times in the training titles. The learning rate of each power is the best one of a grid
by the mean reciprocal rank of the titles of every other bag; the titles of the remaining bags give the figures.

--compare=memory measures the accuracy of labels of held-out bags with a memory h || nn(mem, h) and without. --compare=positives
trains with labels, with topics, and with the same topics in a random order of the bags, so that only the texts of a bag belong
together; a title is then ranked by the other titles of its bag alone, among the held-out titles of other modules. Both have the
difference to the first row for each seed, with a 95 % interval of its mean over seeds by Student's distribution.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from hpnlp.tasks.labelled.labelled_bags import text_ranks
from hpnlp.training.config import resolve
from hpnlp.training.trainer import make_trainer

RARE = 3  # occurrences of a rare word in the training titles, at most

FLAGS = flags.FLAGS
flags.DEFINE_enum("compare", "powers", ["powers", "memory", "positives"], "Variants to measure.")
flags.DEFINE_integer("seeds", 3, "Seeds of each row.")
flags.DEFINE_integer("steps", 200, "Training steps.")
flags.DEFINE_list("powers", ["0", "0.5", "1"], "Values of model.frequency_power.")
flags.DEFINE_list(
    "memories", ["bags(4096)", "bags(4096;k=8)", "table(256)"], "Values of model.memory, with ; in place of commas."
)
flags.DEFINE_list("topics", ["20"], "Numbers of topics.")
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
    """The data, and runs with other fields, learning rates and seeds."""

    def __init__(self, positives: str = "labels") -> None:
        path = str(Path(__file__).parents[1] / "embeddings" / "titles.py")
        config = resolve(experiment.read(path))
        self.config = dataclasses.replace(config, data=dataclasses.replace(config.data, positives=positives))
        self.task = find(self.config.task)
        self.dataset: Any = self.task.dataset(self.config.data, None)

    def trained(self, rate: float, seed: int, **fields: Any) -> tuple[Any, Any]:
        """`(model, weights)` of a run."""
        config = dataclasses.replace(
            self.config,
            model=dataclasses.replace(self.config.model, **fields),
            optimizer=dataclasses.replace(self.config.optimizer, learning_rate=rate),
        )
        model = make_model(config, self.task.vocabulary(self.dataset).sizes)
        trainer = make_trainer(model, config.optimizer, config.plan, steps=FLAGS.steps, devices=jax.devices()[:1])
        state, batches = trainer.init(jax.random.key(seed)), self.dataset.train(seed=seed)
        for _ in range(FLAGS.steps):
            state, _ = trainer.step(state, next(batches), jax.random.key(seed))
        batches.close()
        return model, collections(state.best_params)

    def ranks(self, power: float, rate: float, seeds: int) -> tuple[list[np.ndarray], np.ndarray]:
        """`(ranks of the held-out titles for each seed, places of the titles)`."""
        result, places = [], np.zeros((0, 2), int)
        for seed in range(seeds):
            model, weights = self.trained(rate, seed, frequency_power=power)
            embed = jax.jit(functools.partial(model.apply, method="embed_bags"))
            size = self.config.data.batch_size
            ranks, places = text_ranks(self.dataset, lambda batch, e=embed, w=weights: e(w, batch), size)
            result.append(ranks)
        return result, places

    def outputs(self, model: Any, weights: Any, method: str) -> list[Any]:
        """Outputs of a method for the held-out bags, all in one batch."""
        stored = self.dataset.stored[HELDOUT]
        numbers = np.arange(stored.count)
        batch = self.dataset.kind.batch(stored, numbers, stored.count, self.dataset.tokenizer, self.dataset.seq_len)
        return jax.tree.leaves(
            jax.tree.map(np.asarray, jax.jit(functools.partial(model.apply, method=method))(weights, batch))
        )


def heldout_labels(dataset: Any) -> np.ndarray:
    """The label of each held-out bag."""
    stored = dataset.stored[HELDOUT]
    return np.array([stored.labels(number)[0] for number in range(stored.count)])


def title_scores(texts: np.ndarray, exists: np.ndarray, modules: np.ndarray) -> np.ndarray:
    """Mean reciprocal rank of the titles of each bag, by the other titles of the bag, among those of other modules."""
    texts = np.where(exists[..., None], texts, 0.0)
    contexts = texts.sum(axis=1, keepdims=True) - texts
    contexts /= np.maximum(np.linalg.norm(contexts, axis=-1, keepdims=True), 1e-12)
    module = np.broadcast_to(modules[:, None], exists.shape)[exists]
    scores = contexts[exists] @ texts[exists].T
    ranks = 1 + ((scores >= np.diag(scores)[:, None]) & (module[:, None] != module[None])).sum(axis=1)
    bag = np.broadcast_to(np.arange(len(modules))[:, None], exists.shape)[exists]
    return np.bincount(bag, 1 / ranks) / np.bincount(bag)


def compare(variants: dict[str, Callable[[float, int], np.ndarray]]) -> list[dict[str, Any]]:
    """A row for each variant, a function of learning rate and seed that returns the score of each held-out bag."""
    rows: list[dict[str, Any]] = []
    for name, scores in variants.items():
        tried = {rate: float(scores(rate, 0)[::2].mean()) for rate in map(float, FLAGS.rates)}
        best = max(tried, key=lambda rate: tried[rate])
        values = [float(scores(best, seed)[1::2].mean()) for seed in range(FLAGS.seeds)]
        row = {
            "variant": name, "learning_rate": best, "steps": FLAGS.steps, "tried": list(tried.items()),
            "scores": values, "mean": float(np.mean(values)),
        }  # fmt: skip
        if rows:
            row["difference"], row["interval"] = difference(values, rows[0]["scores"])
        rows.append(row)
        print(row, flush=True)
    return rows


def difference(values: Sequence[float], others: Sequence[float]) -> tuple[float, list[float] | None]:
    """Mean difference of paired scores, with a 95 % interval; None for a single seed."""
    mean, half = measure.mean_interval(np.subtract(values, others).tolist())
    return mean, None if half is None else [mean - half, mean + half]


def memories() -> list[dict[str, Any]]:
    """Accuracy of the labels of held-out bags, without a memory and with each."""
    runs = Experiment()
    labels = heldout_labels(runs.dataset)

    def accuracies(rate: float, seed: int, memory: str) -> np.ndarray:
        logits = runs.outputs(*runs.trained(rate, seed, memory=memory), "logits")[0]
        return (logits.argmax(axis=1) == labels).astype(np.float64)

    values = ["", *(memory.replace(";", ",") for memory in FLAGS.memories)]
    return compare({value or "none": functools.partial(accuracies, memory=value) for value in values})


def positives() -> list[dict[str, Any]]:
    """Mean reciprocal rank of held-out titles after training with labels, topics, and topics of other bags."""
    labelled = Experiment()
    modules = heldout_labels(labelled.dataset)

    def scores(rate: float, seed: int, runs: Experiment) -> np.ndarray:
        texts, exists, _ = runs.outputs(*runs.trained(rate, seed), "vectors")
        return title_scores(texts, exists, modules)

    variants = {"labels": functools.partial(scores, runs=labelled)}
    for count in FLAGS.topics:
        for name in (f"topics({count})", f"topics({count}) of other bags"):
            runs = Experiment(f"topics({count})")
            if "other" in name:
                stored = runs.dataset.stored["train"]
                stored.topics = np.random.default_rng(0).permutation(stored.topics)
            same = list(runs.dataset.stored[HELDOUT].texts()) == list(labelled.dataset.stored[HELDOUT].texts())
            assert same, "the held-out bags differ"
            variants[name] = functools.partial(scores, runs=runs)
    return compare(variants)


def powers() -> list[dict[str, Any]]:
    """Ranks of held-out titles with rare words and without, for each power of the frequency."""
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
    return rows


# Name of the comparison -> function of its rows, and name of the result.
COMPARISONS = {
    "powers": (powers, "labelled_bags"),
    "memory": (memories, "bag_memory"),
    "positives": (positives, "bag_positives"),
}


def main(_: list[str]) -> None:
    cli.prepare_jax()
    rows, name = COMPARISONS[FLAGS.compare]
    print(measure.write_result(name, rows(), FLAGS.out))


if __name__ == "__main__":
    app.run(main)
