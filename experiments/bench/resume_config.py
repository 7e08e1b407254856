"""The language model that resume.py trains: one of its two layers has buffers, an average of its keys."""

from __future__ import annotations

from ml_collections import ConfigDict

from hpnlp.nn.mixers import MIXERS
from hpnlp.training.config import default
from tests.centered_keys import centered_keys

MIXERS["centered"] = centered_keys


def get_config() -> ConfigDict:
    config = default()
    config.model.layers = 2
    config.model.dim = 64
    config.model.heads = 4
    config.model.mixer = "centered,full"
    config.data.seq_len = 64
    config.data.batch_size = 8
    config.data.heldout_bytes = 5000
    config.optimizer.aux = "keys_loss(0.1), hidden_loss(0.1)"
    # The intervals of logging, evaluation and checkpoints do not divide each other.
    config.train.log_every = 7
    config.train.eval_every = 25
    config.train.eval_batches = 1
    config.train.checkpoint_every = 10
    config.train.sample = 0
    return config
