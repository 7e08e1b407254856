"""Experts against dense MLPs of equal active FLOPs, equal wall-clock time and equal bytes, as byte-level language models.

    hpnlp sweep --config=moe/bytes --workdir=runs/moe
    python experiments/moe/quality.py runs/moe  # writes runs/moe/experts_quality-cpu.json

| model | columns | active FLOPs of the MLPs | bytes of the MLPs |
|---|---|---|---|
| top_k(8,2) | 256 per expert | 1 | 4 |
| switch(8) | 512 per expert | 1 | 8 |
| dense | 512 | 1 | 1 |
| dense, more steps | 512 | 1, in the time of top_k(8,2) | 1 |
| dense, wider | 2048 | 4 | 4 |

Each model is trained with three seeds. The dense model of equal time takes 1.2 times the steps: the time of a step of
top_k(8,2) over that of the dense model, which `quality.py` prints, rounded up. `--config=moe/bytes:1.5` takes another
factor. The optimizer is AdamW, because the cost of Muon grows with the number of experts. About an hour and a half on two
cores. `--config=moe/bytes:tiny` takes some minutes, proves nothing, and shows what the commands write.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hpnlp.training.config import default

RATIO = "1.2"
STEPS, COLUMNS, EXPERTS, K = 2000, 512, 8, 2
SEEDS = (0, 1, 2)


def get_config(argument: str = RATIO) -> ConfigDict:
    config = default()
    tiny = argument == "tiny"
    config.data.path = "stdlib"
    config.data.seq_len = 64 if tiny else 128
    config.data.batch_size = 4 if tiny else 32
    config.data.heldout_bytes = 10_000 if tiny else 100_000
    config.model.layers = 1 if tiny else 2
    config.model.dim = 32 if tiny else 128
    config.model.heads = 2 if tiny else 4
    config.model.mlp = "gelu"
    config.model.mlp_dim = _columns(argument)
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 0.004
    config.optimizer.final = 0.0
    config.train.steps = _steps(argument)
    config.train.eval_every = _steps(argument) // 20
    config.train.eval_batches = 4
    config.train.sample = 0
    config.train.baselines = False
    return config


def get_sweep(argument: str = RATIO) -> list[dict[str, Any]]:
    columns, steps = _columns(argument), _steps(argument)
    longer = round(steps * float(RATIO if argument == "tiny" else argument))
    models = [
        {"model.mlp": f"top_k({EXPERTS},{K},kind=gelu)", "model.mlp_dim": columns // K},
        {"model.mlp": f"switch({EXPERTS},kind=gelu)"},
        {"model.mlp": "gelu"},
        {"model.mlp": "gelu", "train.steps": longer},
        {"model.mlp": "gelu", "model.mlp_dim": columns * EXPERTS // K},
    ]
    seeds = SEEDS[:1] if argument == "tiny" else SEEDS
    return [model | {"train.seed": seed} for seed in seeds for model in models]


def _columns(argument: str) -> int:
    return 64 if argument == "tiny" else COLUMNS


def _steps(argument: str) -> int:
    return 24 if argument == "tiny" else STEPS
