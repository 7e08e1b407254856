"""Trains a model on: a run, or a model in the Hugging Face layout, with its own sizes and tokenizer, on other data.

hpnlp train --config=experiments/lm/finetune.py:runs/a --workdir=runs/b --config.data.path=DIR_OR_GLOB
"""

from __future__ import annotations

import dataclasses

from ml_collections import ConfigDict

from hpnlp.training import warm_start
from hpnlp.training.config import default


def get_config(source: str = "runs/x") -> ConfigDict:
    """The config of a run that starts from `source`: a run's workdir, or a directory in the Hugging Face layout."""
    found = warm_start.find(source)
    config = default()
    config.train.init_from = source
    config.data.tokenizer = found.tokenizer_field
    config.model.update(dataclasses.asdict(found.model))
    config.data.seq_len = min(512, config.model.max_len)  # learned positions reach no further
    config.data.batch_size = 8
    config.optimizer.learning_rate = 1e-5
    config.optimizer.warmup = 20
    config.train.steps = 200
    config.train.eval_every = 50
    return config
