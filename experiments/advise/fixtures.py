"""Models for which the best technique is known by construction, and techniques that must not be recommended for them.

Sizes are for two cores: a training takes about a minute, and the call that is measured 3 to 300 ms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from growth import AddColumns, AddLayers
from ml_collections import ConfigDict
from planted_texts import write_chain, write_labelled

from hpnlp.advise import AdviseSettings, Goal, Needs, Technique
from hpnlp.compress.stages import Stage
from hpnlp.training.config import default

BUDGET = 600.0  # seconds of a search: the default of `hpnlp advise`


@dataclasses.dataclass(frozen=True)
class Fixture:
    """A model with a planted answer.

    Attributes:
      name: Name in tables.
      why: Construction, and the reason why the winners win.
      task: The task of the run.
      fields: Fields of its config.
      write_data: Writes the data to a file.
      settings: Settings of the search.
      winners: Techniques of which one must be in the recommended candidate; () if nothing may be recommended.
      decoys: Techniques that must not be in it.
      grow: Adds units that compute next to nothing to the trained model; None for the model as it was trained.
      techniques: Techniques to choose among, in place of those of the table.
    """

    name: str
    why: str
    task: str
    fields: Mapping[str, Any]
    write_data: Callable[[Path], None]
    settings: AdviseSettings
    winners: tuple[str, ...]
    decoys: tuple[str, ...] = ()
    grow: Stage | None = None
    techniques: tuple[Technique, ...] = ()

    def make_config(self, data: Path) -> ConfigDict:
        """The config of the run.

        Args:
          data: The file that `write_data` has written.

        Returns:
          The config.
        """
        config = default(self.task)
        config.update_from_flattened_dict({**COMMON, "data.path": str(data), **self.fields})
        return config


COMMON = {
    "plan.name": "single",
    "optimizer.learning_rate": 3e-3,
    "optimizer.warmup": 10,
    "train.baselines": False,
    "train.sample": 0,
    "train.checkpoint_every": 0,
}
ENCODER = {"data.heldout": 0.2, "model.pooling": "mean", "model.mlp": "gelu"}
# The layers of BERT, see experiments/compression/finetune.py.
BERT = {
    "model.norm": "layer",
    "model.norm_placement": "post",
    "model.embed_norm": True,
    "model.position": "learned",
    "model.qkv_bias": True,
    "model.out_bias": True,
    "model.mlp_bias": True,
    "model.pooling": "first",
    "model.transform": "tanh",
    "optimizer.learning_rate": 5e-4,
}
# Mixers that do not compute all pairs of tokens.
SPARSE_OR_LINEAR = (
    "window(64, 64)", "dilated(63, 2)", "blockwise(128)", "strided(64)", "fixed(64, 8)", "random(32, 3)", "global(64)",
    "longformer(128, 16)", "bigbird(32, 3, 1, 1)", "reformer(16, 2, window=64)", "routing(16, window=128)", "sinkhorn",
    "clustered", "clustered_improved", "linformer(128)", "nystrom(64)", "fnet", "linear", "performer", "rfa", "lightconv",
    "dynamicconv", "convolution",
)  # fmt: skip
EVERY = (Goal.LATENCY, Goal.THROUGHPUT, Goal.TRAINING)
IDENTITIES = 40


def _short_texts(path: Path) -> None:
    write_labelled(path, 3000, 62, 62)


def _identities() -> tuple[Technique, ...]:
    """Programs of equal work: the constant of the norms differs by less than the rounding of a variance."""
    values = [1e-6 * (1 + 1e-3 * (number + 1)) for number in range(IDENTITIES)]
    return tuple(
        Technique(f"norm_eps={value:.4g}", "Identity", EVERY, Needs.NOTHING, changes={"model.norm_eps": value})
        for value in values
    )


def _traps() -> tuple[Technique, ...]:
    """Fast programs with wrong outputs: new weights, and the first letters of each text."""
    changes = ({"model.layers": 1}, {"model.mlp_dim": 8}, {"data.seq_len": 4})
    names = [", ".join(f"{field}={value}" for field, value in each.items()) for each in changes]
    return tuple(Technique(n, "Trap", EVERY, Needs.NOTHING, changes=c) for n, c in zip(names, changes, strict=True))


FIXTURES = [
    Fixture(
        "attention",
        "an encoder of 2,048 letters with D 64: 89 % of the products are those of attention, and no label needs it",
        "classification",
        ENCODER
        | {
            "data.seq_len": 2048,
            "data.batch_size": 2,
            "model.layers": 2,
            "model.dim": 64,
            "model.heads": 2,
            "model.mlp_dim": 128,
            "train.steps": 150,
        },
        lambda path: write_labelled(path, 2000, 2046, 2046),
        AdviseSettings(seconds=BUDGET, train_seconds=600.0),
        tuple(f"model.mixer={spec}" for spec in SPARSE_OR_LINEAR),
        ("factorize(0.5)", "mlp(0.5)", "mlp(0.25)", "int8"),
    ),
    Fixture(
        "vocabulary",
        "a language model with 65,536 rows of 64 features and one GRU: nearly all of the step is in the table",
        "rnn_lm",
        {
            "data.seq_len": 32,
            "data.batch_size": 8,
            "data.heldout_bytes": 50_000,
            "model.cells": "gru(64)",
            "model.vocab": 65_536,
            "model.tied": False,
            "optimizer.learning_rate": 1e-2,
            "train.steps": 200,
        },
        lambda path: write_chain(path, 6000),
        AdviseSettings(Goal.TRAINING, seconds=BUDGET, train_seconds=600.0),
        tuple(
            f"model.output={name}"
            for name in (
                "sampled(1024)",
                "importance(1024)",
                "nce(1024)",
                "adaptive",
                "class",
                "hierarchical",
                "binary",
            )
        ),
        # Their losses are smaller numbers, which do not compare with that of a softmax.
        ("model.output=negative_sampling", "model.output=margin", "model.output=vmf"),
    ),
    Fixture(
        "feed_forward",
        "a classifier whose feed-forward networks were trained with 512 columns and have 4,096: 7 of 8 compute nothing",
        "classification",
        ENCODER
        | {
            "data.seq_len": 64,
            "data.batch_size": 16,
            "model.layers": 2,
            "model.dim": 256,
            "model.mlp_dim": 512,
            "train.steps": 150,
        },
        _short_texts,
        AdviseSettings(Goal.THROUGHPUT, seconds=BUDGET, batch_size=16),
        ("mlp(0.25)", "mlp(0.5)"),
        ("two_four",),
        grow=AddColumns(width=4096, text="add_columns(4096)"),
    ),
    Fixture(
        "padding",
        "a classifier whose texts are mostly short, in batches of 256 tokens: most of a step is padding",
        "classification",
        ENCODER
        | {
            "data.seq_len": 256,
            "data.batch_size": 16,
            "model.layers": 2,
            "model.dim": 128,
            "model.mlp_dim": 512,
            "train.steps": 100,
        },
        lambda path: write_labelled(path, 3000, 16, 254, long=0.1),
        AdviseSettings(Goal.TRAINING, seconds=BUDGET),
        ("data.buckets=4",),
    ),
    Fixture(
        "optimizer",
        "a classifier with a table of 125,000 rows of 256 features, of which a batch reads 16: the step is the table's update",
        "classification",
        ENCODER
        | {
            "data.seq_len": 16,
            "data.batch_size": 4,
            "model.layers": 1,
            "model.dim": 256,
            "model.mlp_dim": 256,
            "model.vocab": 125_000,
            "model.pooling": "max",
            "train.steps": 200,
        },
        lambda path: write_labelled(path, 3000, 14, 14),
        AdviseSettings(Goal.TRAINING, seconds=BUDGET, train_seconds=600.0),
        ("optimizer.rows=True", *(f"optimizer.name={name}" for name in ("sgd", "lion", "adagrad", "adafactor"))),
        ("model.dtype=bfloat16", "data.buckets=4"),
    ),
    Fixture(
        "memory",
        "a language model of 8 layers with batches of 2,048 tokens: activations take most of the memory of a step",
        "lm",
        {
            "data.seq_len": 256,
            "data.batch_size": 8,
            "data.heldout_bytes": 100_000,
            "model.layers": 8,
            "model.dim": 128,
            "train.steps": 50,
        },
        lambda path: write_chain(path, 10_000),
        AdviseSettings(Goal.MEMORY, seconds=BUDGET),
        ("optimizer.accumulate=4", "plan.remat=full", "plan.remat=names(mixed)"),
    ),
    Fixture(
        "bert",
        "a classifier with the layers of BERT and texts of 128 tokens, for which one text is called at a time",
        "classification",
        ENCODER
        | BERT
        | {
            "data.seq_len": 128,
            "data.batch_size": 16,
            "model.layers": 4,
            "model.dim": 256,
            "train.steps": 150,
        },
        lambda path: write_labelled(path, 6000, 126, 126),
        AdviseSettings(seconds=BUDGET),
        ("model.dtype=bfloat16", "bf16", "int8", "layers(2)", "heads(0.5)", "heads(0.75)", "mlp(0.25)", "mlp(0.5)"),
        ("two_four",),
    ),
    Fixture(
        "decoding",
        "a language model of two trained layers, with two between them that compute nothing, which continues one prompt",
        "lm",
        {
            "data.seq_len": 128,
            "data.batch_size": 16,
            "data.heldout_bytes": 100_000,
            "model.layers": 2,
            "model.dim": 192,
            "model.heads": 4,
            "train.steps": 150,
        },
        lambda path: write_chain(path, 10_000),
        AdviseSettings(seconds=BUDGET),
        ("layers(2)",),
        ("int8",),
        grow=AddLayers(count=2, text="add_layers(2)"),
    ),
    Fixture(
        "nothing",
        "a recurrent classifier of 4,096 letters with 32 features, which spends its time between the products, and keep 0.999",
        "rnn_classification",
        {
            "data.heldout": 0.2,
            "data.seq_len": 4096,
            "data.batch_size": 4,
            "model.cells": "sru(32)",
            "model.embed_dim": 32,
            "train.steps": 60,
        },
        lambda path: write_labelled(path, 1000, 4094, 4094),
        AdviseSettings(seconds=BUDGET, keep=0.999),
        (),
    ),
    Fixture(
        "null",
        f"{IDENTITIES} programs of equal work beside a classifier",
        "classification",
        ENCODER
        | {
            "data.seq_len": 64,
            "data.batch_size": 16,
            "model.layers": 2,
            "model.dim": 128,
            "model.mlp_dim": 512,
            "train.steps": 100,
        },
        _short_texts,
        AdviseSettings(seconds=BUDGET),
        (),
        tuple(technique.name for technique in _identities()),
        techniques=_identities(),
    ),
    Fixture(
        "trap",
        "fast programs with wrong outputs beside a classifier of eight layers",
        "classification",
        ENCODER
        | {
            "data.seq_len": 64,
            "data.batch_size": 16,
            "model.layers": 8,
            "model.dim": 128,
            "model.mlp_dim": 512,
            "optimizer.learning_rate": 1e-3,
            "train.steps": 100,
        },
        _short_texts,
        AdviseSettings(seconds=BUDGET),
        (),
        tuple(technique.name for technique in _traps()),
        techniques=_traps(),
    ),
]
