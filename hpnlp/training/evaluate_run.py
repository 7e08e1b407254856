"""Evaluation of a finished run with another config, such as a longer memory than that of its training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from hpnlp import tasks
from hpnlp.models import variables
from hpnlp.ops.weight import dense_tree
from hpnlp.parallel.plan import Plan
from hpnlp.spec import did_you_mean
from hpnlp.training.config import Config, flat, with_changes
from hpnlp.training.evaluation import Evaluation, evaluate, further_scores
from hpnlp.training.run_directory import load, load_config, make_model
from hpnlp.training.step import make_trainer
from hpnlp.types import InputError

# Fields of a run's config that an evaluation can change. The fields of other tasks than the run's are unknown.
FIELDS = (
    "model.mixer",
    "data.seq_len",
    "data.batch_size",
    "data.heldout_path",
    "data.heldout_bytes",
    "data.heldout_examples",
    "data.challenge_path",
    "train.eval_stride",
)


@dataclasses.dataclass(frozen=True)
class RunEvaluation(Evaluation):
    """Result of the evaluation of a run.

    Attributes:
      step: Step of the checkpoint that the parameters are from.
    """

    step: int


def evaluate_run(
    workdir: str | Path, changes: Mapping[str, Any], limit: int | None = None, step: int | None = None
) -> RunEvaluation:
    """Scores the parameters of a run on held-out data, with changes of its config.

    Args:
      workdir: The run directory.
      changes: Fields of the run's config and their values, such as {"model.mixer": "transformer_xl(512)"}. The changed model
        must have parameters of the same names and shapes.
      limit: Largest number of batches; None for all, and for the scores of further sets (`Task.further_heldout`).
      step: Step of the checkpoint; None for the best, or the newest if none was evaluated.

    Returns:
      Scores, sums and the step.

    Raises:
      InputError: The directory holds no run, a field is unknown or not one of FIELDS, or the changed config is invalid or has
        other parameters.
    """
    config = _changed(load_config(workdir), changes)
    run = load(workdir, step)
    model = make_model(config, run.vocabulary)
    optimizer = config.optimizer.for_batch(config.data.batch_size)
    trainer = make_trainer(model, optimizer, Plan("single"), steps=1, batch_size=config.data.batch_size)
    shapes = trainer.state_shapes
    _check_shapes(jax.eval_shape(dense_tree, run.params), variables.join(shapes.params, shapes.buffers), changes)
    dataset = tasks.find(config.task).dataset(config.data, run.vocabulary)
    result = evaluate(trainer, run.params, dataset, config, limit)
    scores = dict(result.scores)
    if limit is None:
        scores |= further_scores(trainer, run.params, dataset, config)
    return RunEvaluation(scores, result.sums, run.step)


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values of fields, which are named "section.field"."""
    known = flat(config)
    for name, value in changes.items():
        if name not in known:
            raise InputError(f"a run's config has no field {name!r}: {did_you_mean(name, known)}")
        if name not in FIELDS:
            fields = ", ".join(field for field in FIELDS if field in known)
            raise InputError(
                f"{name}={value!r} would not be the run that was trained: leave it out, an evaluation can change {fields}"
            )
    return with_changes(config, changes)


def _check_shapes(params: Any, expected: Any, changes: Mapping[str, Any]) -> None:
    """Raises InputError unless the changed model has the parameters of the run."""
    here, there = (
        {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (expected, params)
    )
    if differing := [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]:
        name = differing[0]
        changed = ", ".join(f"{field}={value}" for field, value in changes.items())
        if name in here and name in there:
            difference = f"params{name} has shape {here[name]}, and {there[name]} in the run"
        elif name in here:
            difference = f"the model has params{name}, and the run does not"
        else:
            difference = f"the run has params{name}, and the model does not"
        raise InputError(f"with {changed}, {difference}: change fields that leave the parameters as they are")
