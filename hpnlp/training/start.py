"""Where a run starts: anew, from a checkpoint of its own, from another model, or from layers of its teacher.

`find_origin` decides whether another model is read, and which vocabulary the data are read with. `set_up` reads the data and
makes the model and the trainer. `find_start` makes the training state, or restores it from the newest checkpoint if there is
one; before, `files.claim` has refused another config.

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
from hpnlp.training.batch_lengths import check_buckets
from hpnlp.training.config import Config
from hpnlp.training.config_file import write_config
from hpnlp.training.evaluation import batch_share
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.files.claim import check_frozen, check_steps
from hpnlp.training.files.contents import has_begun
from hpnlp.training.files.metrics import QUIET, reading_progress
from hpnlp.training.optimizers.state_shardings import TrainState, place
from hpnlp.training.processes import distributed
from hpnlp.training.trainer import Trainer, check_batch, make_trainer
from hpnlp.types import InputError


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
class Origin:
    """Other model and vocabulary that a run starts with, decided before its data are read.

    Attributes:
      source: The model of `train.init_from`; None without one, and for a run that continues from a checkpoint of its own.
      vocabulary: The vocabulary that data are read with; None to make one from the data.
      is_saved: Whether the run directory already holds the vocabulary.
    """

    source: OtherModel | None
    vocabulary: Vocabulary | None
    is_saved: bool


@dataclasses.dataclass(frozen=True)
class Setup:
    """Data, model and compiled functions of a run, before it has a state.

    Attributes:
      config: Config of the run.
      workdir: The run directory.
      origin: Result of `find_origin`.
      accepted: Differences between the models of the run and of the source that the user has accepted, as text.
      dataset: Data of the task.
      vocabulary: Vocabulary of the data.
      model: The model, with its teacher if it has one.
      teacher: The teacher; None for a run without one.
      frozen: Frozen variables of the task or the teacher; None without.
      trainer: Compiled functions of the model.
    """

    config: Config
    workdir: Path
    origin: Origin
    accepted: str
    dataset: Any
    vocabulary: Vocabulary
    model: Any
    teacher: TeacherOfRun | None
    frozen: Frozen | None
    trainer: Trainer

    @property
    def key(self) -> jax.Array:
        """Key of the run."""
        return jax.random.key(self.config.train.seed)

    def batches(self) -> Any:
        """Iterator over the training batches of this process, with the logits of the teacher where they are stored."""
        index, count = batch_share(self.trainer, self.config)
        batches = self.dataset.train(seed=self.config.train.seed, process_index=index, process_count=count)
        if self.teacher is not None and self.model.stored:
            return self.teacher.stored_batches(batches, self.config.distill.cache, self.model)
        return batches

    def write(self) -> None:
        """Writes vocabulary, record of the teacher and config to the run directory."""
        if not self.origin.is_saved:
            self.vocabulary.save(self.workdir)
        if self.teacher is not None:
            self.teacher.save(self.workdir, self.model)
        write_config(self.workdir, self.config)


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


def find_origin(config: Config, workdir: Path) -> Origin:
    """Finds the model of `train.init_from`, checked against the run's task, tokenizer and lengths, and the vocabulary.

    Args:
      config: Config of the run.
      workdir: The run directory.

    Returns:
      Other model and vocabulary.

    Raises:
      InputError: There is no such model, or the run cannot start from it; or it, or the teacher, was trained on what the run
        holds out.
    """
    is_resumed = distributed.lead_value(has_begun(workdir))
    source = None
    if config.train.init_from or config.distill.teacher:
        READERS["check_start"](config)
    if config.train.init_from and not distributed.lead_value(Checkpointer.exist(workdir)):
        source = READERS["find_first"](config)
    if source is not None:  # even if an earlier attempt in the same directory has saved another vocabulary
        known = source.vocabulary_for(config.task)
    else:
        known = tasks.find(config.task).load_vocabulary(workdir) if is_resumed else None
    of_teacher = teacher_vocabulary(config)
    has_labels = known is not None and (of_teacher is None or known.labels is not None)
    return Origin(source, known if has_labels else of_teacher, is_saved=source is None and known is not None)


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


def set_up(config: Config, workdir: Path, accept_changes: bool = False) -> Setup:
    """Reads the data of a run and makes its model and trainer.

    Args:
      config: Config of the run.
      workdir: The run directory.
      accept_changes: Start although the model of `train.init_from` differs in fields that leave the shapes as they are.

    Returns:
      The set-up.

    Raises:
      InputError: The config, the data, the teacher or the mesh is invalid, or see `find_origin`.
    """
    task, origin = tasks.find(config.task), find_origin(config, workdir)
    progress = reading_progress(console=None if distributed.is_lead() else QUIET)
    dataset = task.dataset(config.data, origin.vocabulary, progress)
    vocabulary = task.vocabulary(dataset)
    model: Any = tasks.make_model(config, vocabulary.sizes)
    accepted = ""
    if origin.source is not None:
        accepted = origin.source.check_model(model.config, accept_changes, config.task)
    frozen = task.frozen(config)
    teacher: TeacherOfRun | None = READERS["find_teacher"](config, vocabulary) if config.distill.teacher else None
    if teacher is not None:
        model = teacher.distilled(config, model)
        frozen = teacher.frozen(model.stored > 0)
    optimizer, batch_size = config.optimizer.for_batch(config.data.batch_size), config.data.batch_size
    trainer = make_trainer(model, optimizer, config.plan, steps=config.train.steps, batch_size=batch_size)
    trainer = trainer.with_frozen(None if frozen is None else frozen.values)
    check_buckets(config, model, trainer.layout)
    check_batch(trainer.layout, batch_size, config.data.seq_len, config.optimizer.accumulate)
    return Setup(config, workdir, origin, accepted, dataset, vocabulary, model, teacher, frozen, trainer)


def find_start(setup: Setup, checkpoints: Checkpointer, batches: Any) -> Start:
    """State from `train.init_from`, the newest checkpoint, a converted model in the directory, or initialization.

    A run resumes wherever its directory holds a checkpoint of its own.

    Args:
      setup: Result of `set_up`.
      checkpoints: Checkpoints of the run directory.
      batches: Training batches, whose position is restored where the run resumes.

    Returns:
      The start.

    Raises:
      InputError: A checkpoint is not complete, cannot be read, or is of another run.
    """
    config, trainer, key, source = setup.config, setup.trainer, setup.key, setup.origin.source
    if source is not None:
        params, phrase = source.load_params(trainer, config.plan, config.task, key, setup.model.config)
        accepted = f" ({setup.accepted})" if setup.accepted else ""
        return Start(trainer.init(key, params), f"starting from {phrase}{accepted}")
    if checkpoints.latest() is None:
        return _new_start(setup, checkpoints)
    if checkpoints.holds_params_only():  # a converted model: all state but the parameters is new
        READERS["check_converted"](config, setup.workdir)
        params = checkpoints.restore_params(trainer.state_shapes)
        phrase = f"starting from the converted model of {setup.workdir}, with its tokenizer"
        return Start(trainer.init(key, params), phrase)
    check_steps(setup.workdir, checkpoints.latest(), config.train.steps)
    state, position, progress = checkpoints.restore(trainer.state_shapes)
    check_frozen(setup.workdir, setup.frozen, progress)
    batches.set_state(position)
    return Start(state, f"going on from step {int(state.step)}", progress)


def _new_start(setup: Setup, checkpoints: Checkpointer) -> Start:
    """The start of a run without a checkpoint and another model: layers of the teacher, or initial parameters."""
    config, trainer, key, teacher = setup.config, setup.trainer, setup.key, setup.teacher
    if config.train.init_from:
        raise InputError(
            f"{checkpoints.directory} holds no complete checkpoint: remove it, and the run starts from "
            f"train.init_from={config.train.init_from}"
        )
    if config.distill.init == "none" or teacher is None:
        return Start(trainer.init(key), "starting")
    shapes = variables.join(trainer.state_shapes.params, trainer.state_shapes.buffers)
    first = jax.tree.map(place, shapes, teacher.first_weights(config.distill.init, setup.model))
    return Start(trainer.init(key, first), f"starting from layers of {teacher.source} ({config.distill.init})")
