"""Labels of texts of your own, from some hundred of them on.

    hpnlp train --task=classification --data.path=reviews.csv

The run starts from this experiment where --config is left out. The model has embeddings of word pieces and no layers, which
some hundred texts would not train. On two CPU cores, a run on 500 docstrings takes about a minute, and predicts the package, of
5, of 81 % of 100 held-out ones; a linear model of words predicts 78 %, one of characters 86 %, the most frequent package 40 %.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from hpnlp.training.config import default


def get_config() -> ConfigDict:
    config = default("classification")
    config.data.tokenizer = "bpe(2000)"
    config.data.seq_len = 256
    config.data.batch_size = 16
    config.model.layers = 0
    config.model.dim = 128
    config.model.pooling = "max"
    config.model.dropout = 0.3
    config.optimizer.learning_rate = 3e-3
    config.train.steps = 300
    config.train.eval_every = 50
    config.train.eval_batches = 0
    return config
