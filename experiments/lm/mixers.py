"""A sweep of the byte-level language model over the attention patterns, and one alternation of two.

    hpnlp sweep --config=lm/mixers --workdir=runs/mixers
    hpnlp compare runs/mixers --out=runs/mixers.png

The model of `make demo`, 100 steps on sequences of 512 bytes, with patterns of corresponding sizes. Patterns save time on
longer sequences: increase `data.seq_len` and the sizes of the patterns to measure that.

On two CPU cores each of the eleven runs takes about a minute.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hpnlp.training.config import default

MIXERS = (
    "full",
    "window(128,0)",
    "window(64,0)*3,full",
    "dilated(32,4)",
    "blockwise(128)",
    "strided(32)",
    "fixed(32,4)",
    "random(32,3)",
    "global(32)",
    "longformer(256,8)",
    "bigbird(32,3,1,2)",
)


def get_config() -> ConfigDict:
    config = default()
    config.data.path = "stdlib"
    config.data.seq_len = 512
    config.data.batch_size = 4
    config.data.heldout_bytes = 50_000
    config.model.layers = 4
    config.model.dim = 192
    config.model.heads = 6
    config.model.mlp = "gelu"
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.02
    config.optimizer.adam_learning_rate = 0.003
    config.optimizer.final = 0.0
    config.train.steps = 100
    return config


def get_sweep() -> list[dict[str, Any]]:
    return [{"model.mixer": mixer} for mixer in MIXERS]
