"""The package of the Python standard library that a function comes from, by projection networks of about 100,000 parameters.

hpnlp train --config=classification/prado --workdir=runs/prado
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hpnlp.spec import lookup
from hpnlp.training.config import default

ENCODERS = {"prado": "prado(bigram=64, trigram=64)", "pqrnn": "pqrnn(64, layers=2)"}


def get_config(encoder: str = "prado") -> ConfigDict:
    config: Any = default("hashed_classification")
    config.data.path = "stdlib_functions"
    config.data.tokenizer = "hashed_words(by=letters)"
    config.data.seq_len = 256
    config.data.batch_size = 16
    config.data.buckets = 4
    config.model.encoder = lookup(ENCODERS, encoder, "encoder")
    config.optimizer.learning_rate = 1e-3
    config.train.weights = "quantized(8)"
    config.train.steps = 800
    config.train.eval_every = 100
    config.train.eval_batches = 0
    return config
