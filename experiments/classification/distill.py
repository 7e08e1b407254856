"""The classifier of `stdlib.py` with 40 % fewer parameters, with and without that classifier as its teacher.

    hpnlp train --config=classification/stdlib --workdir=runs/packages
    hpnlp sweep --config=classification/distill:runs/packages --workdir=runs/packages_small
    hpnlp train --config=classification/distill:runs/packages --workdir=runs/packages_student

The sweep trains the student three times by its labels alone, and three times with the logits of the teacher, with the same
three seeds; its table has the held-out accuracy of each. The report of a run has the teacher's accuracy beside the student's.
Tokenizer and labels of the teacher's data are the student's, since both are made from the same data.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hpnlp.training.config import default

SEEDS = (0, 1, 2)
LOSSES = "logits(temperature=2, weight=0.7),labels(0.3)"


def get_config(teacher: str = "") -> ConfigDict:
    config: Any = default("classification")
    config.data.path = "stdlib_functions"
    config.data.tokenizer = "bpe(4096)"
    config.data.seq_len = 256
    config.data.batch_size = 16
    config.model.layers = 2
    config.model.dim = 88
    config.model.heads = 4
    config.model.mlp = "gelu"
    config.model.pooling = "max"
    config.model.dropout = 0.3
    config.optimizer.learning_rate = 1e-3
    config.train.steps = 800
    config.train.eval_every = 100
    config.train.eval_batches = 0
    config.distill.teacher = teacher
    config.distill.losses = LOSSES
    return config


def get_sweep(teacher: str = "") -> list[dict[str, Any]]:
    """The student without and with the teacher, for each seed."""
    return [{"distill.teacher": name, "train.seed": seed} for name in dict.fromkeys(("", teacher)) for seed in SEEDS]
