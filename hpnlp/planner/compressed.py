"""Sizes of compressed models: of a config or a run by a recipe, without weights, and of a finished compressed run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpnlp import tasks
from hpnlp.compress.distilling.distill_config import DistillConfig
from hpnlp.compress.recipe import parse_recipe
from hpnlp.compress.sizes import ORIGINAL, Size, file_sizes, planned_sizes, planned_weights
from hpnlp.compress.weights_file import WEIGHTS_FILE, has_weights
from hpnlp.models import variables
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training import run_directory
from hpnlp.training.config import Config, flat
from hpnlp.training.config_file import load_config
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class ModelOutline:
    """A model without its weights.

    Attributes:
      config: Its config.
      shapes: Shapes of its weights.
      step: Step of its checkpoint.
    """

    config: Any
    shapes: Any
    step: int

    def sizes(self, recipe: str) -> list[Size]:
        """Sizes of the model after each stage of a recipe, first those of the original. Raises InputError."""
        return list(planned_sizes(self.config, self.shapes, parse_recipe(recipe) if recipe else [], self.step))

    def refusal(self, recipe: str) -> str:
        """The reason why the model cannot have the stages of a recipe, "" if there is none."""
        config, shapes = self.config, self.shapes
        try:
            for stage in parse_recipe(recipe):
                config, shapes = planned_weights(config, shapes, stage)
        except InputError as error:
            return str(error)
        return ""


def run_outline(workdir: str | Path) -> ModelOutline:
    """The model of a run, without its weights, its teacher and its training of other weights.

    Args:
      workdir: The run directory, of which the config, the vocabulary and the steps of the checkpoints are read.

    Returns:
      The outline.

    Raises:
      InputError: The directory holds no run, or a compressed one.
    """
    config = load_config(workdir)
    if has_weights(workdir):
        raise InputError(f"{workdir} is compressed already: plan the run that it was made of, with all stages")
    sizes = run_directory.load_vocabulary(workdir, config).sizes
    return _outline(config, sizes, saved_step(workdir, config))


def sizes_of_config(config: Config, recipe: str) -> list[Size]:
    """Sizes of the model of a config after each stage of a recipe. Nothing is allocated.

    Args:
      config: A resolved config. The vocabulary is taken to reach its largest size.
      recipe: Stages, see `hpnlp.compress.recipe`; "" for none.

    Returns:
      The sizes, first those of the original.

    Raises:
      InputError: The recipe is invalid, does not fit the model, or has sizes that depend on the weights.
    """
    return _outline(config, tasks.find(config.task).planned_sizes(config), config.train.steps).sizes(recipe)


def sizes_of_run(workdir: str | Path, recipe: str) -> list[Size]:
    """Sizes of the model of a run after each stage of a recipe; of a compressed run, those of its file.

    Args:
      workdir: The run directory. Of an uncompressed run, only the config, the vocabulary and the steps of its checkpoints are
        read.
      recipe: As in `sizes_of_config`; must be "" for a compressed run.

    Returns:
      The sizes, first those of the original.

    Raises:
      InputError: The directory holds no run, or see `sizes_of_config`.
    """
    if recipe or not has_weights(workdir):
        return run_outline(workdir).sizes(recipe)
    load_config(workdir)  # raises
    return [file_sizes(Path(workdir) / WEIGHTS_FILE, _stated_recipe(Path(workdir)))]


def table(sizes: Sequence[Size]) -> str:
    """Text table of sizes.

    Args:
      sizes: Sizes, as `sizes_of_config` returns them.

    Returns:
      Lines of text.
    """
    rows = [("stage", "parameters", "bytes in memory", "bytes on disk", "")]
    rows += [
        (
            size.stage,
            f"{size.parameters:,}",
            f"{size.memory_bytes:,}",
            ("at most " if size.is_bound else "") + f"{size.disk_bytes:,}",
            _relative(sizes[0].memory_bytes / size.memory_bytes) if size is not sizes[0] else "",
        )
        for size in sizes
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{row[0]:{widths[0]}}  " + "  ".join(f"{cell:>{n}}" for cell, n in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _relative(ratio: float) -> str:
    """The memory after a stage, by that of the original over it."""
    shown = f"{ratio:.3g}"
    return "as much memory" if shown == "1" else f"1/{shown} of the memory"


def saved_step(workdir: str | Path, config: Config) -> int:
    """Step of the checkpoint that a compression of a run would read.

    Args:
      workdir: The run directory.
      config: Its config.

    Returns:
      The step; the last one of a run without checkpoints.
    """
    workdir = Path(workdir)
    if not Checkpointer.exist(workdir):
        return config.train.steps
    metric, higher_is_better = tasks.find(config.task).primary_metric(flat(config))
    checkpoints = Checkpointer(workdir, read_only=True, metric=metric, higher_is_better=higher_is_better)
    try:
        return checkpoints.step_of(checkpoints.best())
    finally:
        checkpoints.close()


def _outline(config: Config, sizes: Sizes, step: int) -> ModelOutline:
    """The outline of the model of a config."""
    train = dataclasses.replace(config.train, weights="")
    config = dataclasses.replace(config, distill=DistillConfig(), train=train)
    model = tasks.make_model(config, sizes)
    optimizer = config.optimizer.for_batch(config.data.batch_size)
    shapes = make_trainer(model, optimizer, Plan("single"), steps=1).state_shapes
    return ModelOutline(model.config, variables.join(shapes.params, shapes.buffers), step)


def _stated_recipe(workdir: Path) -> str:
    """The recipe that a compressed run states in compress.json, or the name of its file."""
    try:
        return str(json.loads((workdir / "compress.json").read_text())["recipe"])
    except (OSError, ValueError, KeyError, TypeError):
        return WEIGHTS_FILE


__all__ = ["ORIGINAL", "ModelOutline", "Size", "run_outline", "sizes_of_config", "sizes_of_run", "table"]
