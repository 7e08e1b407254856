"""How the layers of the byte-level language model mix: every attention pattern, and one alternation.

    hpnlp sweep --config=experiments/lm/mixers.py --workdir=runs/mixers
    hpnlp compare runs/mixers --out=runs/mixers.png

The demo's model, 100 steps of rows of 512 bytes; patterns are in proportion to that. Patterns save time on longer rows:
raise `data.seq_len` and their sizes to see it.
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
