"""A small BERT: masked words of the Python standard library's source, from those on both sides.

    hpnlp train --config=experiments/compression/pretrain.py:short --workdir=runs/bert/pretrained_short
    hpnlp train --config=experiments/compression/pretrain.py --workdir=runs/bert/pretrained \
        --config.train.init_from=runs/bert/pretrained_short

Most steps are of short sequences, as in BERT: each of the learned positions is then trained more often, and without positions,
nothing is learned from the neighbours of a word. The layers are those of BERT, so that `hpnlp convert` writes a checkpoint that
transformers reads. The held-out files are those that classification and tagging hold out as well: no text that these tasks are
scored on is seen in pretraining.
"""

from __future__ import annotations

from typing import Any

from finetune import BERT, HELDOUT, TOKENIZER
from ml_collections import ConfigDict

from hpnlp.spec import lookup
from hpnlp.training.config import default


def get_config(part: str = "long") -> ConfigDict:
    is_short = lookup({"short": True, "long": False}, part, "part of the pretraining")
    config: Any = default("masked_lm")
    config.data.path = "stdlib"
    config.data.tokenizer = TOKENIZER
    config.data.seq_len = 64 if is_short else 128
    config.data.batch_size = 64 if is_short else 32
    config.data.heldout = HELDOUT
    config.data.heldout_bytes = 200_000
    config.model.update(BERT)
    config.model.transform = "gelu_norm"
    config.model.tied = True
    config.optimizer.name = "muon"
    config.optimizer.learning_rate = 0.02 if is_short else 0.01
    config.optimizer.adam_learning_rate = 0.003 if is_short else 0.001
    config.optimizer.warmup = 50 if is_short else 20
    config.optimizer.final = 0.2 if is_short else 0.0
    config.train.steps = 800 if is_short else 300
    config.train.eval_every = 100
    return config
