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
from hpnlp.training.config import Config
from hpnlp.training.evaluation import Evaluation, evaluate
from hpnlp.training.run_directory import load, make_model
from hpnlp.training.step import make_trainer
from hpnlp.types import InputError


def evaluate_run(workdir: str | Path, changes: Mapping[str, Any], limit: int | None = None) -> Evaluation:
    """Scores the parameters of a run on held-out data, with changes of its config.

    Args:
      workdir: The run directory.
      changes: Fields of the run's config and their values, such as {"model.mixer": "transformer_xl(512)"}. The changed model
        must have parameters of the same names and shapes.
      limit: Largest number of batches; None for all.

    Returns:
      Scores and sums.

    Raises:
      InputError: The directory holds no run, a field is unknown, or the changed config is invalid or has other parameters.
    """
    run = load(workdir)
    config = _changed(run.config, changes)
    model = make_model(config, run.vocabulary)
    optimizer = config.optimizer.for_batch(config.data.batch_size)
    trainer = make_trainer(model, optimizer, Plan("single"), steps=1, batch_size=config.data.batch_size)
    shapes = trainer.state_shapes
    _check_shapes(jax.eval_shape(dense_tree, run.params), variables.join(shapes.params, shapes.buffers), changes)
    dataset = tasks.find(config.task).dataset(config.data, run.vocabulary)
    return evaluate(trainer, run.params, dataset, config, limit)


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values of fields, which are named "section.field"."""
    for name, value in changes.items():
        section_name, _, field = name.partition(".")
        section = getattr(config, section_name, None)
        fields = [x.name for x in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else []
        if field not in fields:
            known = [f"{section_name}.{x}" for x in fields] or [x.name for x in dataclasses.fields(config)]
            raise InputError(f"a run's config has no field {name!r}: {did_you_mean(name, known)}")
        assert dataclasses.is_dataclass(section) and not isinstance(section, type)
        config = dataclasses.replace(config, **{section_name: dataclasses.replace(section, **{field: value})})
    return config


def _check_shapes(params: Any, expected: Any, changes: Mapping[str, Any]) -> None:
    """Raises InputError unless the changed model has the parameters of the run."""
    here, there = (
        {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (expected, params)
    )
    if differing := [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]:
        name = differing[0]
        raise InputError(
            f"with {dict(changes)}, the model has params{name} of shape {here.get(name, 'none')}, and the run has "
            f"{there.get(name, 'none')}: change fields that leave the parameters as they are"
        )
