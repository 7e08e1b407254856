"""Labels of the words of texts of your own.

    hpnlp train --task=tagging --data.path=tags.jsonl

The run starts from this experiment where --config is left out. It is that of stdlib.py with a tokenizer that encodes a word in
a text as it does alone, so that `hpnlp export` writes a directory that tags whole texts. Byte-pair encoding of 8,000 tokens
predicts 99.0 % of the kinds of stdlib.py, which are 99.6 % with its words.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from hpnlp.training.config import default


def get_config() -> ConfigDict:
    config = default("tagging")
    config.data.tokenizer = "bpe(4000)"
    config.data.seq_len = 64
    config.data.batch_size = 32
    config.model.layers = 2
    config.model.dim = 128
    config.model.heads = 4
    config.model.mlp = "gelu"
    config.optimizer.learning_rate = 2e-3
    config.train.steps = 600
    config.train.eval_every = 100
    config.train.eval_batches = 0
    return config
