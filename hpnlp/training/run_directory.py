"""The model that a run directory holds.

The directory has `config.json` with the record of the model's fields (see `architecture`), the vocabulary (`tokenizer.json`),
`metrics.jsonl`, `checkpoints/` (see `checkpoint`) and, when the run is finished, its report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp import tasks
from hpnlp.compress.distilling.distill_config import DistillConfig
from hpnlp.compress.weights_file import WEIGHTS_FILE, has_weights
from hpnlp.parallel.plan import Plan
from hpnlp.table import Table
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training import config as configs
from hpnlp.training.config import Config
from hpnlp.training.config_file import load_config
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError, Model, Tokenizer

# Functions for directories that hold more than checkpoints of a plain run.
_READERS: Table[Callable[..., Any]] = Table(
    {
        "student": "hpnlp.training.starts.teacher_file:student",
        "weights": "hpnlp.compress.files:read_weights",
        "eos_ids": "hpnlp.models.huggingface.generation:eos_ids",
    }
)


def make_model(config: Config, vocabulary: Vocabulary) -> Model:
    """Model of a config, with the sizes that depend on the data filled in.

    Args:
      config: The config.
      vocabulary: The vocabulary of the run.

    Returns:
      The model.

    Raises:
      InputError: See `tasks.make_model`.
    """
    return tasks.make_model(config, vocabulary.sizes)


def eos_ids(directory: Path, tokenizer: Tokenizer, vocab: int) -> tuple[int, ...]:
    """Ids that end a text.

    Args:
      directory: A run directory, or one in the Hugging Face layout.
      tokenizer: Tokenizer of the directory.
      vocab: Number of ids of the model; larger ids are left out, since the model cannot generate them.

    Returns:
      The ids that generation_config.json names (converted models have one), or else the tokenizer's end-of-text id, if any.
    """
    ids = tuple(i for i in _READERS["eos_ids"](directory) if 0 <= i < vocab)
    return ids or (() if tokenizer.eos_id is None else (tokenizer.eos_id,))


@dataclasses.dataclass(frozen=True)
class Run:
    """Content of a run directory.

    Attributes:
      config: Config of the run.
      vocabulary: Vocabulary of the run.
      model: Model of the run.
      params: Weights for generation and export: averaged parameters where the run keeps an average, and buffers.
      step: Step of the checkpoint that the parameters are from.
      eos_ids: Ids that end a text, see the function `eos_ids`.
    """

    config: Config
    vocabulary: Vocabulary
    model: Any
    params: Any
    step: int
    eos_ids: tuple[int, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the run."""
        return self.vocabulary.tokenizer


def load_vocabulary(workdir: str | Path, config: Config) -> Vocabulary:
    """Reads the vocabulary of a run that has begun.

    Args:
      workdir: The run directory.
      config: Config of the run.

    Returns:
      The vocabulary.

    Raises:
      InputError: A file of it is absent or cannot be read.
    """
    task = tasks.find(config.task)
    vocabulary = task.load_vocabulary(Path(workdir))
    if vocabulary is None:
        absent = " or ".join(name for name in task.vocabulary_files if not (Path(workdir) / name).exists())
        raise InputError(f"{workdir} has no {absent}: put back the one that the run was trained with")
    return vocabulary


def check_task(workdir: str | Path, config: Config, allowed: Sequence[str], command: str, fix: str = "") -> None:
    """Checks that a run is of a task that a command works on.

    Args:
      workdir: The run directory.
      config: Config of the run.
      allowed: The tasks that the command works on.
      command: Name of the command, for the message.
      fix: Another fix than to name such a run, for the message.

    Raises:
      InputError: The run is of another task.
    """
    if config.task not in allowed:
        names = " or ".join(map(repr, allowed))
        raise InputError(
            f"{workdir} holds a run of task={config.task!r}, and {command} works on runs of task={names}: name one of "
            f"these{fix}"
        )


def load(
    workdir: str | Path,
    step: int | None = None,
    plan: Plan = Plan("single"),  # noqa: B008  (frozen)
) -> Run:
    """Loads the model of a run.

    Args:
      workdir: The run directory.
      step: Step of the checkpoint; None for the one with the best held-out score, or the newest if none was evaluated.
      plan: Layout of the parameters over devices.

    Returns:
      The run.

    Raises:
      InputError: The directory holds no run or lacks a part of it, or a parameter is NaN or infinite.
    """
    workdir = Path(workdir)
    config = load_config(workdir)
    vocabulary = load_vocabulary(workdir, config)
    model: Any = make_model(config, vocabulary)
    if has_weights(workdir):
        return _load_compressed(workdir, config, vocabulary, model, step)
    optimizer = config.optimizer.for_batch(config.data.batch_size)
    student: Any = _READERS["student"](model, workdir) if config.distill.teacher else None
    shapes = make_trainer(student or model, optimizer, plan, steps=config.train.steps).state_shapes
    metric, higher_is_better = tasks.find(config.task).primary_metric(configs.flat(config))
    checkpoints = Checkpointer(workdir, read_only=True, metric=metric, higher_is_better=higher_is_better)
    try:
        step = checkpoints.best() if step is None else step
        params = checkpoints.restore_params(shapes, step)
        _check_finite(params, f"checkpoint {checkpoints.step_of(step)} of {workdir}")
        eos = eos_ids(workdir, vocabulary.tokenizer, model.config.vocab)
        if student is not None:
            params = student.student_weights(params)
            config = dataclasses.replace(config, distill=DistillConfig())
        if config.train.weights:
            # What was trained is of no use for generation and export; the matrices that layers read are.
            params = jax.jit(model.finished)(params)
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, weights=""))
            model = make_model(config, vocabulary)
        return Run(config, vocabulary, model, params, checkpoints.step_of(step), eos)
    finally:
        checkpoints.close()


def _load_compressed(workdir: Path, config: Config, vocabulary: Vocabulary, model: Model, step: int | None) -> Run:
    """`load` of a directory whose parameters are in one file, as `hpnlp compress` writes it."""
    if step is not None:
        raise InputError(f"{workdir} holds a compressed model and no checkpoints: leave out the step {step}")
    path = workdir / WEIGHTS_FILE
    params, metadata = _READERS["weights"](path)
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("step"), int):
        raise InputError(
            f"{path} does not have the step of its run: write it by hpnlp compress, or with {{'step': 0}} as metadata"
        )
    _check_finite(params, str(path))
    eos = eos_ids(workdir, vocabulary.tokenizer, model.config.vocab)
    return Run(config, vocabulary, model, params, metadata["step"], eos)


@jax.jit
def _are_finite(tree: Any) -> Any:
    """For each array of a tree, whether all its numbers are finite; True for integers."""
    return jax.tree.map(lambda x: jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else True, tree)


def _check_finite(params: PyTree, source: str) -> None:
    """Raises InputError if a parameter holds NaN or infinity; `source` names the checkpoint in the message."""
    finite = jax.device_get(_are_finite(params))
    for path, is_finite in jax.tree_util.tree_leaves_with_path(finite):
        if not is_finite:
            raise InputError(
                f"{source}: params{jax.tree_util.keystr(path)} holds NaN or infinity, the model is unusable: use an earlier "
                "checkpoint or another run"
            )
