"""Measures the share of a training step of `task=realm` that the search and the refresh of the index take.

    python experiments/bench/realm.py [--documents=100000] [--rounds=7]

The step is the trainer's, on random texts and documents, with an index that is encoded already. Three steps with the same
texts are timed, interleaved: with a rolling refresh, without refresh, and without refresh among 256 documents, whose search
takes nothing. The share of the refresh is 1 minus the second time over the first, that of search and refresh 1 minus the
third over the first, in each round; the medians and their intervals of at least 95 % are reported. To encode queries and
candidates with the trained tower is no part of the shares: their gradients need it. Takes two minutes on two cores;
the result is written after each number of texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.models.pairs.documents import Documents
from hpnlp.models.pairs.realm import Realm, RealmConfig
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer

RESULTS = Path(__file__).parents[1] / "results"
MODEL = RealmConfig(layers=2, dim=128, heads=4, mlp_dim=512, mlp="gelu", vocab=8192)
LENGTH, SHORTEST, HIDDEN = 64, 32, 4  # tokens of texts and documents, at most; of a document, at least; hidden tokens
FEW = 256  # documents of the step without a search

FLAGS = flags.FLAGS
flags.DEFINE_integer("documents", 100_000, "Documents of the index.")
flags.DEFINE_list("texts", ["16", "32"], "Texts of a step, of each measurement.")
flags.DEFINE_integer("rounds", 7, "Measurements of each step; medians are reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def random_documents(count: int) -> Documents:
    draw = np.random.default_rng(0)
    lengths = draw.integers(SHORTEST, LENGTH + 1, count)
    tokens = draw.integers(1, MODEL.vocab, (count, LENGTH))
    return Documents(np.where(np.arange(LENGTH) < lengths[:, None], tokens, 0), lengths)


def random_batch(texts: int) -> Any:
    draw = np.random.default_rng(1)
    return jax.device_put(
        {
            "tokens": draw.integers(1, MODEL.vocab, (texts, LENGTH)).astype(np.int32),
            "segment_ids": np.ones((texts, LENGTH), np.int32),
            "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (texts, 1)),
            "targets": np.tile(np.arange(HIDDEN, dtype=np.int32), (texts, 1)),
            "labels": draw.integers(1, MODEL.vocab, (texts, HIDDEN)).astype(np.int32),
            "weights": np.ones((texts, HIDDEN), np.float32),
            "source": np.arange(texts, dtype=np.int32),
            "gold": np.full(texts, -1, np.int32),
        }
    )


def step_of(config: RealmConfig, documents: Documents, batch: Any) -> Callable[[], Any]:
    """A function that takes one step after another, with an index of random vectors that counts as encoded."""
    trainer = make_trainer(
        Realm(config, documents),
        OptimizerConfig(learning_rate=1e-4),
        Plan("single"),
        steps=1000,
        devices=jax.devices()[:1],
    )
    key = jax.random.key(0)
    state = trainer.init(key)
    vectors = np.random.default_rng(2).standard_normal((len(documents), config.dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    encoded = {"index": vectors, "back": vectors, "age": np.ones(1, np.float32)}
    buffers = {name: jax.device_put(encoded.get(name, x), x.sharding) for name, x in state.buffers.items()}
    held = [dataclasses.replace(state, buffers=buffers)]

    def step() -> Any:
        held[0], metrics = trainer.step(held[0], batch, key)
        return metrics

    return step


def main(_: Any) -> None:
    cli.prepare_jax()
    many, few = random_documents(FLAGS.documents), random_documents(FEW)
    never = dataclasses.replace(MODEL, refresh="never")
    cases = {"rolling": (MODEL, many), "never": (never, many), "few": (never, few)}
    rows = []
    for texts in map(int, FLAGS.texts):
        batch = random_batch(texts)
        steps = {name: step_of(config, documents, batch) for name, (config, documents) in cases.items()}
        times = measure.timeit(steps, rounds=FLAGS.rounds)
        row = {
            "texts": texts, "documents": len(many), "documents_per_step": MODEL.documents_per_step,
            "candidates": MODEL.candidates, "layers": MODEL.layers, "dim": MODEL.dim, "length": LENGTH,
        }  # fmt: skip
        for share, without in {"refresh": "never", "search_and_refresh": "few"}.items():
            low, high = times[without].interval(times["rolling"])
            row |= {
                f"{share}_share": 1 - times[without].over(times["rolling"]),
                f"{share}_interval": [1 - high, 1 - low],
            }
        row |= {f"{name}_ms": 1e3 * timing.median for name, timing in times.items()}
        print(row, flush=True)
        rows.append(
            row | {f"{name}_all_ms": [1e3 * seconds for seconds in timing.all] for name, timing in times.items()}
        )
        print(measure.write_result("realm", rows, FLAGS.out), flush=True)


if __name__ == "__main__":
    app.run(main)
