"""A small BERT: masked words of the Python standard library's source, from those on both sides.

    hpnlp train --config=experiments/compression/pretrain.py --workdir=runs/bert/pretrained

The layers are those of BERT, so that `hpnlp convert` writes a checkpoint that transformers reads. The held-out files are those
that classification and tagging hold out as well: no text that these tasks are scored on is seen in pretraining.
"""

from __future__ import annotations

from typing import Any

from finetune import BERT, HELDOUT, TOKENIZER
from ml_collections import ConfigDict

from hpnlp.training.config import default


def get_config() -> ConfigDict:
    config: Any = default("masked_lm")
    config.data.path = "stdlib"
    config.data.tokenizer = TOKENIZER
    config.data.seq_len = 256
    config.data.batch_size = 16
    config.data.heldout = HELDOUT
    config.data.heldout_bytes = 200_000
    config.model.update(BERT)
    config.model.transform = "gelu_norm"
    config.model.tied = True
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.02
    config.optimizer.adam_learning_rate = 0.003
    config.optimizer.warmup = 100
    config.optimizer.final = 0.0
    config.train.steps = 1000
    config.train.eval_every = 200
    return config
