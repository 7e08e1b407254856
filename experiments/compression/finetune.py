"""The encoder of `pretrain.py` with a classifier of texts, or of tokens.

    hpnlp train --config=experiments/compression/finetune.py --workdir=runs/bert/classification/teacher \
        --train.init_from=runs/bert/pretrained
    hpnlp train --config=experiments/compression/finetune.py:tagging --workdir=runs/bert/tagging/teacher \
        --train.init_from=runs/bert/pretrained

`finetune.py:bert` is a classifier with the layers of BERT. Without `train.init_from`, a model is trained without pretraining.
There is one evaluation, at the end, so that no checkpoint is chosen by the held-out examples.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hpnlp.spec import lookup
from hpnlp.training.config import default

# Positions are rotary: with BERT's learned ones, masked words are not predicted from their neighbours in so few steps (12 % of
# the held-out ones after 400 steps of 4,096 tokens).
MODEL = {
    "layers": 4,
    "dim": 256,
    "heads": 4,
    "mlp": "gelu",
    "vocab": 2408,  # pieces of words, the mask, and unused rows up to a multiple of 8
}
# Further fields of the layers of BERT, which `hpnlp convert` writes as a checkpoint in the Hugging Face layout.
BERT = {
    "mlp": "gelu_exact",
    "norm": "layer",
    "norm_eps": 1e-12,
    "norm_placement": "post",
    "embed_norm": True,
    "position": "learned",
    "token_types": 2,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "max_len": 128,
    "pooling": "first",
    "transform": "tanh",
}
HELDOUT = 0.1  # share of the files, by a hash of their names; the same in all tasks
TOKENIZER = "bpe(2400)"
# Task -> fields.
TASKS: dict[str, dict[str, Any]] = {
    "classification": {
        "data.path": "stdlib_functions",
        "data.seq_len": 128,
        "data.batch_size": 16,
        "model.pooling": "max",
        "train.steps": 1000,
    },
    "tagging": {"data.path": "stdlib_tokens", "data.seq_len": 64, "data.batch_size": 32, "train.steps": 600},
}


def get_config(task: str = "classification") -> ConfigDict:
    fields = lookup(TASKS, "classification" if task == "bert" else task, "task")
    config: Any = default("classification" if task == "bert" else task)
    config.data.tokenizer = TOKENIZER
    config.data.heldout = HELDOUT
    config.model.update(MODEL)
    config.model.dropout = 0.1
    config.optimizer.learning_rate = 5e-4
    config.optimizer.warmup = 50
    config.optimizer.final = 0.0
    config.optimizer.weight_decay = 0.01
    config.train.eval_every = 0
    config.train.checkpoint_every = 500
    config.update_from_flattened_dict(fields)
    if task == "bert":
        config.model.update(BERT)
    return config
