"""A small encoder: masked words of the Python standard library's source, from those on both sides.

    hpnlp train --config=experiments/compression/pretrain.py --workdir=runs/bert/pretrained

The held-out files are those that classification and tagging hold out as well: no text that these tasks are scored on is seen in
pretraining.
"""

from __future__ import annotations

from typing import Any

from finetune import HELDOUT, MODEL, TOKENIZER
from ml_collections import ConfigDict

from hpnlp.training.config import default


def get_config() -> ConfigDict:
    config: Any = default("masked_lm")
    config.data.path = "stdlib"
    config.data.tokenizer = TOKENIZER
    config.data.seq_len = 128
    config.data.batch_size = 32
    config.data.heldout = HELDOUT
    config.data.heldout_bytes = 200_000
    config.model.update(MODEL)
    config.model.transform = "gelu_norm"
    config.model.tied = True
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.02
    config.optimizer.adam_learning_rate = 0.003
    config.optimizer.final = 0.0
    config.train.steps = 1000
    config.train.eval_every = 100
    return config
