"""Changes of a config with which a run cannot resume, even if the user accepts changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from hpnlp import tasks
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training.config import Config
from hpnlp.training.files.checksum import first_difference
from hpnlp.training.files.contents import has_checkpoints
from hpnlp.training.optimizers.state_shardings import TrainState
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError

_DECIDE_SHAPES = ("model.", "optimizer.", "train.weights")


def reason_against(workdir: Path, saved: Config, config: Config, fields: Collection[str]) -> str:
    """The reason why a run cannot go on with another config.

    Args:
      workdir: The run directory.
      saved: Config of the run.
      config: The other config, of the same task.
      fields: Names of the fields that differ, as "section.field".

    Returns:
      The reason; "" if none is found without reading the data.

    Cost: the shapes of both training states are traced where fields of the model or the optimizer differ.
    """
    if "data.tokenizer" in fields:
        return "a run that has begun keeps its tokenizer"
    task = tasks.find(saved.task)
    if any(f"data.{name}" in fields for name in task.label_fields):
        return "a run that has begun keeps its classes"
    vocabulary = task.load_vocabulary(workdir)
    if vocabulary is None or not has_checkpoints(workdir) or not any(f.startswith(_DECIDE_SHAPES) for f in fields):
        return ""
    before = _state_shapes(saved, vocabulary)
    try:
        after = _state_shapes(config, vocabulary)
    except InputError as error:
        return f"this config has no model ({error})"
    if difference := first_difference(before, after):
        return f"its checkpoints do not fit this config (state{difference[0]} is {difference[1]}, expected {difference[2]})"
    return ""


def _state_shapes(config: Config, vocabulary: Vocabulary) -> TrainState:
    """Shapes of the training state, without what is carried from batch to batch."""
    model = tasks.make_model(config, vocabulary.sizes)
    optimizer = config.optimizer.for_batch(config.data.batch_size)
    trainer = make_trainer(
        model, optimizer, Plan("single"), steps=config.train.steps, batch_size=config.data.batch_size
    )
    return dataclasses.replace(trainer.state_shapes, carry=None)
