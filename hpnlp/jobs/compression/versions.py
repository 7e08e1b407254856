"""The model of a run after stages of a recipe, and the data that stages read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hpnlp.compress.recipe import Calibration, Stage
from hpnlp.models import variables
from hpnlp.training import gradients, run_directory
from hpnlp.training.config import Config
from hpnlp.types import InputError

ORIGINAL = "original"


@dataclasses.dataclass(frozen=True)
class Version:
    """The model after a stage."""

    stage: str
    config: Config
    model: Any
    params: Any


@dataclasses.dataclass(frozen=True)
class CalibrationData:
    """The first training batches of a run, and gradients of a model's loss on them; `dataset` is None without data."""

    run: run_directory.Run
    dataset: Any
    batches: int

    def gradients(self, config: Any, weights: Any) -> Any:
        """The sum over batches of the gradients of the mean loss."""
        return self._sum(config, weights, lambda mean, params, batch: jax.grad(mean)(params, batch))

    def squares(self, config: Any, weights: Any) -> Any:
        """The sum over sequences or texts of the squared gradients of the mean loss of each."""

        def of_batch(mean: Any, params: Any, batch: Any) -> Any:
            def add(total: Any, example: Any) -> tuple[Any, None]:
                gradient = jax.grad(mean)(params, example)
                return jax.tree.map(lambda sums, g: sums + jnp.square(g), total, gradient), None

            examples = {name: array[:, None] for name, array in batch.items()}
            return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), examples)[0]

        return self._sum(config, weights, of_batch)

    def _sum(self, config: Any, weights: Any, of_batch: Callable[[Any, Any, Any], Any]) -> Any:
        """The sum over batches of a function of the mean loss of a batch, parameters and the batch."""
        if self.dataset is None:
            raise InputError(
                "it reads training batches, and the model was converted without data: add --data.path=PATH"
            )
        model = self.run.model.clone(config=config)
        params, buffers = variables.split(weights)

        def mean(params: Any, batch: Any) -> Any:
            out = gradients.loss(model, variables.join(params, buffers), batch, None)
            return out.sum / jnp.maximum(out.weight, 1.0)

        summed = jax.jit(lambda params, batch: of_batch(mean, params, batch))
        total = None
        for batch in itertools.islice(self.dataset.train(seed=0), self.batches):
            new = summed(params, {name: jnp.asarray(batch[name]) for name in model.batch_axes()})
            total = new if total is None else jax.tree.map(jnp.add, total, new)
        return total


def after(version: Version, stage: Stage, calibration: Calibration, run: run_directory.Run) -> Version:
    """The version after a stage."""
    old = version.model.config
    new, params = stage.compress(old, version.params, calibration)
    changed = {
        f.name: getattr(new, f.name) for f in dataclasses.fields(new) if getattr(new, f.name) != getattr(old, f.name)
    }
    config = dataclasses.replace(version.config, model=dataclasses.replace(version.config.model, **changed))
    return Version(stage.text, config, run_directory.make_model(config, run.vocabulary), params)
