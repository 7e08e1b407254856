"""Where a run starts: anew, from a checkpoint of its own, from another model, or from layers of its teacher.

The modules that read other models and teachers are imported by runs that name one (`train.init_from`, `distill.teacher`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from hpnlp import tasks
from hpnlp.data.reading.files import Progress
from hpnlp.models import variables
from hpnlp.parallel.plan import Plan
from hpnlp.table import Table
from hpnlp.tasks.task import Frozen
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training.config import Config
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.optimizers.state_shardings import TrainState, place
from hpnlp.training.processes import distributed
from hpnlp.training.trainer import Trainer


@runtime_checkable
class OtherModel(Protocol):
    """A model that training may start from (`training.starts.warm_start.Source`)."""

    @property
    def remarks(self) -> list[str]: ...

    def vocabulary_for(self, task: str) -> Vocabulary: ...

    def check_model(self, model: Any, accept_changes: bool = False, task: str = "") -> str: ...

    def load_params(
        self, trainer: Trainer, plan: Plan, task: str = "", key: jax.Array | None = None, model: Any = None
    ) -> tuple[Any, str]: ...


@runtime_checkable
class TeacherOfRun(Protocol):
    """A model whose outputs another one learns (`training.starts.teacher.Teacher`)."""

    @property
    def source(self) -> str: ...

    def distilled(self, config: Config, model: Any) -> Any: ...

    def frozen(self, is_stored: bool) -> Frozen: ...

    def save(self, workdir: Path, student: Any) -> None: ...

    def first_weights(self, kind: str, student: Any) -> Mapping[str, Any]: ...

    def stored_batches(self, batches: Any, directory: str, student: Any) -> Any: ...

    def scores(self, dataset: Any, config: Config, progress: Progress) -> dict[str, float]: ...


# Functions of modules that most runs do not need.
READERS: Table[Any] = Table(
    {
        "check_start": "hpnlp.jobs.fold_leakage:check_start",
        "find_first": "hpnlp.training.starts.warm_start:find_first",
        "check_converted": "hpnlp.training.starts.warm_start:check_converted",
        "find_teacher": "hpnlp.training.starts.teacher:find_teacher",
        "first_vocabulary": "hpnlp.training.starts.teacher:first_vocabulary",
    }
)


@dataclasses.dataclass(frozen=True)
class Start:
    """State that a run starts from.

    Attributes:
      state: Parameters, optimizer state and step.
      phrase: Origin of the state, for the first line of output.
      progress: Best held-out score and evaluations since, `best` and `bad_evals`, and what else a checkpoint holds.
    """

    state: TrainState
    phrase: str
    progress: dict[str, Any] = dataclasses.field(default_factory=lambda: {"best": None, "bad_evals": 0})


def find_source(config: Config, workdir: Path) -> OtherModel | None:
    """The model of `train.init_from`, checked against the run's task, tokenizer and lengths.

    Args:
      config: Config of the run.
      workdir: The run directory.

    Returns:
      The model; None without `train.init_from`, or if the run continues from a checkpoint of its own.

    Raises:
      InputError: There is no such model, or the run cannot start from it; or it, or the teacher, was trained on what the run
        holds out.
    """
    if config.train.init_from or config.distill.teacher:
        READERS["check_start"](config)
    if not config.train.init_from or distributed.lead_value(Checkpointer.exist(workdir)):
        return None
    return READERS["find_first"](config)


def find_teacher(config: Config, vocabulary: Vocabulary) -> TeacherOfRun | None:
    """The teacher of a run.

    Args:
      config: Config of the run.
      vocabulary: Vocabulary of the run.

    Returns:
      The teacher; None for a run without one.

    Raises:
      InputError: `distill.teacher` is no model, has no checkpoint, or is of another task, tokenizer or labels.
    """
    return READERS["find_teacher"](config, vocabulary) if config.distill.teacher else None


def teacher_vocabulary(config: Config) -> Vocabulary | None:
    """The vocabulary of the teacher, with which data whose examples may lack labels are read.

    Args:
      config: Config of a run.

    Returns:
      The vocabulary; None for other data, which have a vocabulary of their own.

    Raises:
      InputError: There is no teacher, or one of another task or tokenizer.
    """
    return READERS["first_vocabulary"](config) if tasks.find(config.task).may_lack_labels(config.data) else None


def first_start(
    config: Config,
    trainer: Trainer,
    key: jax.Array,
    model: Any,
    source: OtherModel | None,
    teacher: TeacherOfRun | None,
    accepted: str,
) -> Start:
    """The start of a run without a checkpoint of its own.

    Args:
      config: Config of the run.
      trainer: Its trainer.
      key: Key of the run.
      model: Its model.
      source: Result of `find_source`.
      teacher: Result of `find_teacher`.
      accepted: The differences between the models that the user has accepted, as text.

    Returns:
      Parameters of the source, layers of the teacher, or initial parameters.
    """
    if source is not None:
        params, phrase = source.load_params(trainer, config.plan, config.task, key, model.config)
        return Start(trainer.init(key, params), f"starting from {phrase}{f' ({accepted})' if accepted else ''}")
    if config.distill.init != "none" and teacher is not None:
        shapes = variables.join(trainer.state_shapes.params, trainer.state_shapes.buffers)
        first = jax.tree.map(place, shapes, teacher.first_weights(config.distill.init, model))
        return Start(trainer.init(key, first), f"starting from layers of {teacher.source} ({config.distill.init})")
    return Start(trainer.init(key), "starting")


def converted_start(
    config: Config, workdir: Path, trainer: Trainer, key: jax.Array, checkpoints: Checkpointer
) -> Start:
    """The start from a converted model in the run's directory: all state but the parameters is new.

    Args:
      config: Config of the run.
      workdir: The run directory.
      trainer: Its trainer.
      key: Key of the run.
      checkpoints: Its checkpoints.

    Returns:
      The start.

    Raises:
      InputError: `train.init_from` names another model, or the tokenizers differ.
    """
    READERS["check_converted"](config, workdir)
    params = checkpoints.restore_params(trainer.state_shapes)
    return Start(trainer.init(key, params), f"starting from the converted model of {workdir}, with its tokenizer")
