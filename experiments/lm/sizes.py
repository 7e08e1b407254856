"""A sweep of width and depth at a fixed number of tokens: quality against time and memory.

    hpnlp sweep --config=lm/sizes --workdir=runs/sizes

Four sizes of the byte-level language model, 100 steps each.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hpnlp.training.config import default


def get_config() -> ConfigDict:
    config = default()
    config.data.path = "stdlib"
    config.data.seq_len = 256
    config.data.batch_size = 8
    config.data.heldout_bytes = 50_000
    config.model.heads = 4
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.02
    config.optimizer.adam_learning_rate = 0.003
    config.train.steps = 100
    return config


def get_sweep() -> list[dict[str, Any]]:
    return [{"model.dim": dim, "model.layers": layers} for dim in (64, 128) for layers in (2, 4)]
