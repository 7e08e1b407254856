"""Fine-tunes the model of a run or of a Hugging Face directory, with its sizes and tokenizer, on other data.

hpnlp train --config=lm/finetune:runs/a --workdir=runs/b --data.path=DIR_OR_GLOB
"""

from __future__ import annotations

import dataclasses

from ml_collections import ConfigDict

from hpnlp.training.config import default
from hpnlp.training.starts import warm_start


def get_config(source: str = "runs/x") -> ConfigDict:
    """The config of a run that starts from `source`: the workdir of a run, or a directory in the Hugging Face layout."""
    start = warm_start.find(source)
    config = default(start.task)
    config.train.init_from = source
    config.data.tokenizer = start.tokenizer_field
    of_data = {name: 0 for name in ("classes", "negative_texts") if name in config.model}  # their numbers in the data
    config.model.update(dataclasses.asdict(start.model) | of_data)
    config.data.seq_len = min(512, start.model.max_len)  # learned positions end there
    config.data.batch_size = 8
    config.optimizer.learning_rate = 1e-5
    config.optimizer.warmup = 20
    config.train.steps = 200
    config.train.eval_every = 50
    return config
