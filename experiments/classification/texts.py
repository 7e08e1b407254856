"""Labels of texts of your own, from some hundred of them on.

    hpnlp train --task=classification --data.path=reviews.csv

The run starts from this experiment where --config is left out.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from hpnlp.training.config import default


def get_config() -> ConfigDict:
    config = default("classification")
    config.data.tokenizer = "words(8192)"
    config.data.seq_len = 128
    config.data.batch_size = 16
    config.model.layers = 1
    config.model.dim = 128
    config.model.heads = 4
    config.model.mlp = "gelu"
    config.model.pooling = "max"
    config.model.dropout = 0.3
    config.optimizer.learning_rate = 1e-3
    config.train.steps = 300
    config.train.eval_every = 50
    config.train.eval_batches = 0
    return config
