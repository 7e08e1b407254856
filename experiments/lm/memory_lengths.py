"""A byte-level language model of short sequences with three kinds of memory, and without one.

    hpnlp sweep --config=lm/memory_lengths --workdir=runs/lengths
    python experiments/lm/evaluate_memory.py --workdir=runs/lengths --memories=48,96,192

The first command trains a segment memory with RoPE, Transformer-XL (Dai et al. 2019, arXiv 1901.02860), a Compressive
Transformer (Rae et al. 2020, arXiv 1911.05507), and full attention to the sequence alone; each memory has 48 tokens, and the
Compressive Transformer 48 compressed memories of 3 tokens. The second evaluates the same parameters with other lengths of the
memory: context length against loss. `hpnlp train` with this file trains Transformer-XL.

Two cores: about a minute for each run; the guide of mixers has the losses.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hpnlp.training.config import default

MEMORY = 48
MIXERS = (
    f"transformer_xl({MEMORY})",
    f"segment_memory({MEMORY})",
    f"compressive({MEMORY},{MEMORY},3)",
    f"compressive({MEMORY},{MEMORY},3,mean)",
    "full",
)


def get_config() -> ConfigDict:
    config = default()
    config.data.path = "stdlib"
    config.data.order = "stream"
    config.data.seq_len = 48
    config.data.batch_size = 32
    config.data.heldout_bytes = 100_000
    config.model.mixer = MIXERS[0]
    config.model.layers = 4
    config.model.dim = 128
    config.model.heads = 4
    config.model.mlp = "gelu"
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.02
    config.optimizer.adam_learning_rate = 0.003
    config.optimizer.final = 0.0
    config.train.steps = 500
    config.train.sample = 0
    return config


def get_sweep() -> list[dict[str, Any]]:
    return [{"model.mixer": mixer} for mixer in MIXERS]
