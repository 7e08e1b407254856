"""Techniques that are applied together, and the changed run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from hpnlp.advise.technique import Technique
from hpnlp.compress.recipe import ORDER, Calibration, parse_recipe
from hpnlp.jobs.compression.versions import ORIGINAL, CalibrationData, Version, after
from hpnlp.models import variables
from hpnlp.ops.weight import dense_tree
from hpnlp.parallel.plan import Plan
from hpnlp.training import run_directory
from hpnlp.training.config import Config, with_changes
from hpnlp.training.files.checksum import first_difference, shape_text
from hpnlp.training.run_directory import Run
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError, Model

UNCHANGED = "the model as it is"
CALIBRATION_BATCHES = 8


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Techniques that are applied together.

    Attributes:
      techniques: Their names; () for the model as it is.
      recipe: Stages of `hpnlp compress`.
      changes: Fields of the config -> values.
    """

    techniques: tuple[str, ...] = ()
    recipe: str = ""
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name in tables."""
        return " + ".join(self.techniques) or UNCHANGED

    def plus(self, technique: Technique) -> Candidate:
        """This candidate with one more technique.

        Args:
          technique: The technique.

        Returns:
          The candidate, whose stages are in the order that recipes need.

        Raises:
          InputError: The techniques exclude each other.
        """
        names = (*self.techniques, technique.name)
        if not technique.is_recipe:
            if taken := [name for name in technique.changes if name in self.changes]:
                raise InputError(f"{technique.name} and {self.name} both set {taken[0]}: leave out one of them")
            return Candidate(names, self.recipe, {**self.changes, **technique.changes})
        stages = parse_recipe(self.recipe) if self.recipe else []
        stages = sorted([*stages, *parse_recipe(technique.name)], key=lambda stage: ORDER.index(stage.changes))
        recipe = ",".join(stage.text for stage in stages)
        parse_recipe(recipe)  # raises
        return Candidate(names, recipe, self.changes)

    def applied(self, run: Run, dataset: Any) -> Run:
        """The run with the changes.

        Args:
          run: The run.
          dataset: Its data, of which stages may read training batches; None if it has none.

        Returns:
          The run with another config, model and weights.

        Raises:
          InputError: A change does not fit the run.
        """
        if self.changes:
            config = with_changes(run.config, self.changes)
            model = run_directory.make_model(config, run.vocabulary)
            run = dataclasses.replace(run, config=config, model=model, params=_fitting(run, config, model))
        if not self.recipe:
            return run
        version = Version(ORIGINAL, run.config, run.model, run.params)
        data = CalibrationData(run, dataset, CALIBRATION_BATCHES)
        for stage in parse_recipe(self.recipe):
            version = after(version, stage, Calibration(data.gradients, data.squares), run)
        return dataclasses.replace(run, config=version.config, model=version.model, params=version.params)


def _fitting(run: Run, config: Config, model: Model) -> Any:
    """The run's weights if a changed model has such weights, otherwise new ones."""
    trainer = make_trainer(model, config.optimizer.for_batch(config.data.batch_size), Plan("single"), steps=1)
    shapes = variables.join(trainer.state_shapes.params, trainer.state_shapes.buffers)
    if first_difference(shapes, jax.eval_shape(dense_tree, run.params), shape_text) is None:
        return run.params
    state = trainer.init(jax.random.key(0))
    return variables.join(state.params, state.buffers)
