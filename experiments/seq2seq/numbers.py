"""Whole numbers in digits to English words, and back.

    hpnlp train --config=experiments/seq2seq/numbers.py --workdir=runs/numbers

On two CPU cores the run takes about TIME minutes, and produces HELDOUT % of the held-out numbers exactly. Of the longer numbers,
with more digits than any in training that are not zeros at the end, it produces LONGER %.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from hpnlp.training.config import default


def get_config() -> ConfigDict:
    config = default("seq2seq")
    config.data.path = "number_words"
    config.data.seq_len = 96
    config.data.target_len = 96
    config.data.batch_size = 64
    config.data.heldout_examples = 1000
    config.model.layers = 2
    config.model.dim = 128
    config.model.heads = 4
    config.model.mlp = "gelu"
    config.optimizer.learning_rate = 2e-3
    config.optimizer.final = 0.0
    config.train.steps = 1500
    config.train.eval_every = 500
    config.train.eval_batches = 0
    return config
