"""Trains a converted model on, with its own sizes and tokenizer.

hpnlp convert --from=DIR --to=runs/x
hpnlp train --config=experiments/lm/finetune.py:runs/x --workdir=runs/x --config.data.path=DIR_OR_GLOB
"""

from __future__ import annotations

import dataclasses

from ml_collections import ConfigDict

from hpnlp.training.config import default
from hpnlp.training.run import load_config


def get_config(run: str = "runs/x") -> ConfigDict:
    config = default()
    config.model.update(dataclasses.asdict(load_config(run).model))
    config.data.seq_len = min(512, config.model.max_len)  # learned positions reach no further
    config.data.batch_size = 8
    config.optimizer.learning_rate = 1e-5
    config.optimizer.warmup = 20
    config.train.steps = 200
    config.train.eval_every = 50
    return config
