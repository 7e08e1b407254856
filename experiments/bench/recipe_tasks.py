"""Tasks of `recipes.py`, each with thousands of held-out examples, and the configs of its trainings.

Masked words of the standard library ("words") and the package of a function ("functions") have the models of
experiments/compression at half the width, and hold out the same files; drawn digits ("digits") have narrow convolutional
networks.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.cli import experiment
from hpnlp.data.examples.generated.images.drawn_digits import image
from hpnlp.data.tokenizers.pixels import to_text
from hpnlp.training.config import Config, resolve

EXPERIMENTS = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of the steps.

    Attributes:
      experiment: Experiment file whose config is changed.
      fields: The changes.
      tiny: Further changes for a trial of seconds.
      seconds: Seconds of one core for a training step, roughly.
    """

    experiment: str
    fields: Mapping[str, Any]
    tiny: Mapping[str, Any]
    seconds: float


_FEW = {"data.tokenizer": "bytes", "data.seq_len": 32, "data.batch_size": 4, "model.dim": 32}
TINY_DATA = "data"  # directory in the workdir
_EVERY = {
    "train.eval_every": 0,
    "train.checkpoint_every": 0,
    "train.log_every": 50,
    "train.baselines": False,
    "plan.name": "single",
}
TASKS = {
    "words": Task(
        "compression/pretrain.py",
        {**_EVERY, "data.batch_size": 16, "data.heldout": 0.35, "data.heldout_bytes": 400_000, "model.dim": 128},
        {**_FEW, "data.path": "words", "data.heldout_bytes": 2000},
        0.25,
    ),
    "functions": Task(
        "compression/finetune.py",
        {
            **_EVERY,
            "data.seq_len": 96,
            "data.heldout": 0.35,
            "data.heldout_examples": 0,
            "model.dim": 128,
            "optimizer.learning_rate": 1e-3,
        },
        {**_FEW, "data.path": "functions.jsonl"},
        0.2,
    ),
    "digits": Task(
        "classification/digits_convnet.py",
        {**_EVERY, "data.heldout": 0.25, "data.heldout_examples": 0, "optimizer.learning_rate": 0.03},
        {"data.path": "digits.jsonl", "data.batch_size": 8},
        0.03,
    ),
}


def config_of(task: str, fields: Mapping[str, Any], tiny_data: Path | None) -> Config:
    """The config of a training.

    Args:
      task: Key of TASKS.
      fields: Fields that differ, without values that depend on runs.
      tiny_data: Directory of `write_tiny_data` for a trial of seconds; None for the measured sizes.

    Returns:
      The config.
    """
    values = experiment.read(str(EXPERIMENTS / TASKS[task].experiment))
    values.update_from_flattened_dict({**TASKS[task].fields, **fields})
    if tiny_data is not None:
        sizes = {name: value for name, value in TASKS[task].tiny.items() if name not in fields}
        values.update_from_flattened_dict({**sizes, "data.path": str(tiny_data / str(sizes["data.path"]))})
    return resolve(values)


def write_tiny_data(directory: Path) -> None:
    """Writes a few examples of each task, from which nothing can be learned but that everything works."""
    texts = [f"def area_{i}(width, height):\n    return {i} * width * height\n" for i in range(100)]
    draw = np.random.default_rng(0)
    records = {
        "functions": [{"text": text, "label": str(i % 3)} for i, text in enumerate(texts)],
        "digits": [{"text": to_text(image(i % 10, draw)), "label": str(i % 10)} for i in range(60)],
    }
    (directory / "words").mkdir(parents=True, exist_ok=True)
    for name, of_task in records.items():
        lines = "".join(f"{json.dumps(record)}\n" for record in of_task)
        (directory / f"{name}.jsonl").write_text(lines, "utf-8")
    for i in range(0, 100, 5):
        (directory / "words" / f"{i}.py").write_text("".join(texts[i : i + 5]), "utf-8")
