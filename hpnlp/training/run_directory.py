"""A run's directory: who may train in it, whether a run resumes in it, and the model that it holds.

The directory holds `config.json` with the record of the model's fields (see `architecture`), the vocabulary (`tokenizer.json`),
`metrics.jsonl`, `checkpoints/` (see `checkpoint`) and, when the run is finished, its report. A run has begun when it has left a
training step or a checkpoint. From then on, the same config resumes the run from its newest checkpoint, and another config is
refused unless the user accepts the changes. Before, the directory may be reused with any config. This module checks that a run
may resume (`claimed`); `loop._Run._resume` restores its state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hpnlp import tasks
from hpnlp.atomic_file import replace_bytes
from hpnlp.compress.distillation import Distilled, Extras
from hpnlp.compress.distillation_terms import DistillConfig
from hpnlp.compress.files import WEIGHTS_FILE, has_weights, read_weights
from hpnlp.data.files import is_special
from hpnlp.errors import TemporaryError, is_full_disk, is_temporary
from hpnlp.models.huggingface import generation
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.task import Frozen
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training import architecture, attempts, changed_config
from hpnlp.training import config as configs
from hpnlp.training.attempts import Fence
from hpnlp.training.checkpoint import CONVERTED_STEP, Checkpointer
from hpnlp.training.config import Config
from hpnlp.training.contents import (
    Contents,
    check_run,
    checked_directory,
    contents_of,
    has_begun,
    has_checkpoints,
    locked,
)
from hpnlp.training.step import make_trainer
from hpnlp.types import InputError, Model, Tokenizer

TEACHER_FILE = "teacher.json"  # the teacher of a run, and the variables that it added to the model


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
    ids = tuple(i for i in generation.eos_ids(directory) if 0 <= i < vocab)
    return ids or (() if tokenizer.eos_id is None else (tokenizer.eos_id,))


def load_config(workdir: str | Path, is_checked: bool = True) -> Config:
    """Reads the config of a run.

    Args:
      workdir: The run directory.
      is_checked: The fields of the model must be those that the run's parameters were trained with.

    Returns:
      The config.

    Raises:
      InputError: The directory holds no run, a config.json that cannot be read, or one with other fields of the model.
    """
    check_run(workdir)
    path = Path(workdir) / "config.json"
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        kind = "checkpoints" if has_checkpoints(workdir) else "metrics.jsonl"
        raise InputError(
            f"{workdir} has {kind} and no config.json: restore it, the run cannot be read without it"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot read {path} ({reason}): restore it, or name another workdir") from error
    try:
        config = configs.from_json(text)
    except InputError as error:
        raise InputError(f"{workdir}: {error}") from None
    if is_checked:
        architecture.check(Path(workdir), config.model)
    return config


@contextlib.contextmanager
def claimed(workdir: Path, config: Config, accept_changes: bool) -> Iterator[Fence | None]:
    """Locks a run directory against other processes, and checks that a run in it may resume with this config.

    Args:
      workdir: The run directory; it is created if it does not exist, and removed again if the block raises before it has
        written anything to it.
      config: The config of the run.
      accept_changes: Allow a config that differs from the saved one, except in the tokenizer.

    Yields:
      The fence against processes of earlier attempts, or None without attempts. Errors of the disk in the block become
      InputErrors.

    Raises:
      InputError: The directory cannot be written, or its run has another config.
      TemporaryError: Another process trains in it, a supervisor starts others, or a later attempt has begun.
    """
    checked_directory(workdir)
    _check_outside_data(workdir, config)
    for path in (workdir / name for name in (".lock", "config.json", "metrics.jsonl")):
        if os.path.isdir(path) or is_special(path):
            kind = "a directory" if os.path.isdir(path) else "not a regular file"
            raise InputError(f"{path} is {kind}: move it away, or choose another workdir")
    with locked(workdir):
        _check_changes(workdir, config, accept_changes)
        try:
            yield attempts.claim(workdir, attempts.current())
        except OSError as error:
            message = "" if _stdout_fails() else _disk_error(workdir, error)
            if not message:
                raise
            raise (TemporaryError if is_temporary(error) else InputError)(message) from error


def _check_outside_data(workdir: Path, config: Config) -> None:
    """Raises InputError if `workdir` is in a directory of data, whose files a run that resumes would read."""
    for field in (field.name for field in dataclasses.fields(config.data) if field.name.endswith("path")):
        for path in filter(None, map(str.strip, getattr(config.data, field).split(","))):
            directory = os.path.expanduser(path)
            if path in ("stdlib", "stdlib+tests") or not os.path.isdir(directory):
                continue
            within = os.path.relpath(os.path.realpath(workdir), os.path.realpath(directory))
            # Hidden files and directories are not read as data.
            if within == "." or not any(name.startswith(".") for name in Path(within).parts):
                raise InputError(
                    f"workdir {workdir} lies in data.{field}={path}, and what the run writes would be read as data: choose "
                    "another --workdir, or name the files of data by a glob"
                )


def _disk_error(workdir: Path, error: OSError) -> str:
    """Error message for an OSError in a run; "" if it has nothing to do with the directory."""
    if is_full_disk(error):
        return f"cannot write to {workdir}: the disk is full: free some space and run the same command again"
    if error.errno == errno.ESTALE:
        return f"cannot use {error.filename or workdir} ({error.strerror}): run the same command again"
    if error.errno in (errno.EPERM, errno.EACCES, errno.EROFS):
        return (
            f"cannot write to {error.filename or workdir} ({error.strerror}): correct its permissions and run the same "
            "command again"
        )
    if str(error.filename or "").startswith(str(workdir)):
        return f"cannot use {error.filename} ({error.strerror}): move it away, or choose another workdir"
    return ""


def _stdout_fails() -> bool:
    """True if standard output cannot be written, so that an error, such as a full disk, need not come from the workdir.

    Text that could not be written stays in the buffer of standard output, so that another flush fails again.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    return False


def _check_changes(workdir: Path, config: Config, accept_changes: bool) -> None:
    """Raises InputError if the run in `workdir` was begun with another config, and may not resume with this one."""
    held = contents_of(workdir)
    if held in (Contents.COMPRESSED, Contents.CHECKPOINT, Contents.EXPORTED):
        raise InputError(
            f"{workdir} holds {held.value}, which the run would overwrite: choose another workdir; train.init_from={workdir} "
            "begins with its parameters"
        )
    if held is Contents.UNFINISHED:
        raise InputError(f"{workdir} holds {held.value}, which the run would overwrite: choose another workdir")
    if not os.path.lexists(workdir / "config.json"):
        if has_begun(workdir) and not accept_changes:
            raise InputError(
                f"{workdir} has {'checkpoints' if has_checkpoints(workdir) else 'metrics.jsonl'} and no config.json: restore "
                "it, choose another workdir, or pass --accept_changes to resume with this config and the saved tokenizer"
            )
        return
    if not has_begun(workdir):
        return
    saved = load_config(workdir, is_checked=not accept_changes)
    if saved.task != config.task:
        raise InputError(
            f"{workdir} holds a run of task={saved.task!r}, and this config has task={config.task!r}: choose another workdir"
        )
    changes = configs.differences(saved, config)
    if config.train.init_from and os.path.realpath(config.train.init_from) == os.path.realpath(workdir):
        # A run that resumes does not read train.init_from again, so that its own directory there changes nothing.
        changes = [change for change in changes if not change.startswith("train.init_from")]
    if {path.name for path in (workdir / "checkpoints").glob("*")} == {str(CONVERTED_STEP)}:
        # A converted model that was not trained yet: only the model must be the same.
        changes = [change for change in changes if change.startswith("model.")]
    for change in changes:
        if change.startswith("data.tokenizer") and accept_changes:
            raise InputError(
                f"a run that has begun keeps its tokenizer ({change}): choose another workdir, or give it its old one"
            )
    if changes and not accept_changes:
        fields = [change.partition(":")[0] for change in changes]
        reason = changed_config.reason_against(workdir, saved, config, fields)
        fix = "" if reason else ", or pass --accept_changes to resume with the new config"
        raise InputError(
            f"{workdir} was made by another config ({'; '.join(changes)}){', and ' * bool(reason)}{reason}: choose another "
            f"workdir{fix}"
        )


def check_steps(workdir: Path, newest: int | None, steps: int) -> None:
    """Checks that a run has not passed its last step.

    Args:
      workdir: The run directory.
      newest: Step of its newest checkpoint; None without one.
      steps: `train.steps`.

    Raises:
      InputError: The checkpoint is of a later step.
    """
    if (newest or 0) > steps:
        raise InputError(
            f"train.steps={steps}: the run in {workdir} has reached step {newest}: set train.steps to at least that, or choose "
            "another workdir"
        )


def frozen_record(frozen: Frozen | None) -> dict[str, Any]:
    """The entry of a checkpoint's progress for frozen variables.

    Args:
      frozen: The frozen variables, or None.

    Returns:
      Their source and digest under "frozen"; empty for None.
    """
    return {} if frozen is None else {"frozen": {"source": frozen.source, "digest": frozen.digest}}


def check_frozen(workdir: Path, frozen: Frozen | None, progress: Mapping[str, Any]) -> None:
    """Checks that a run resumes with the frozen variables that it was trained with.

    Args:
      workdir: The run directory.
      frozen: The frozen variables of the task, if there are some.
      progress: Progress of the checkpoint, with `frozen_record` of those that it was trained with.

    Raises:
      InputError: The digests differ.
    """
    old, new = progress.get("frozen", {}), frozen_record(frozen).get("frozen", {})
    if old.get("digest") != new.get("digest"):
        then, now = (f"{record['source']} (digest {record['digest']})" if record else "none" for record in (old, new))
        raise InputError(
            f"{workdir} was trained with other frozen variables: then {then}, now {now}: put back those that it was trained "
            "with, or choose another workdir"
        )


def write_config(workdir: Path, config: Config) -> None:
    """Writes config.json, and the record of the fields that decide what the parameters beside it compute, atomically.

    Args:
      workdir: The run directory.
      config: The config.
    """
    architecture.write(workdir, config.model)
    replace_bytes(workdir / "config.json", configs.to_json(config).encode())


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
    student: Any = Distilled(model, _read_extras(workdir)) if config.distill.teacher else None
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


def write_teacher(workdir: Path, frozen: Frozen, extras: Extras) -> None:
    """Writes TEACHER_FILE, without which the checkpoints of a run with a teacher cannot be read.

    Args:
      workdir: The run directory.
      frozen: The teacher.
      extras: Variables that the distillation added to the model.
    """
    record = {"source": frozen.source, "digest": frozen.digest, **extras.to_json()}
    replace_bytes(workdir / TEACHER_FILE, (json.dumps(record, indent=1) + "\n").encode())


def _read_extras(workdir: Path) -> Extras:
    """Variables that the distillation of a run added to its model."""
    try:
        return Extras.from_json(json.loads((workdir / TEACHER_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise InputError(
            f"cannot read {workdir / TEACHER_FILE} ({error!r}): put back the file that the run has written"
        ) from error


def _load_compressed(workdir: Path, config: Config, vocabulary: Vocabulary, model: Any, step: int | None) -> Run:
    """`load` of a directory whose parameters are in one file, as `hpnlp compress` writes it."""
    if step is not None:
        raise InputError(f"{workdir} holds a compressed model and no checkpoints: leave out the step {step}")
    path = workdir / WEIGHTS_FILE
    params, metadata = read_weights(path)
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("step"), int):
        raise InputError(
            f"{path} does not have the step of its run: write it by hpnlp compress, or with {{'step': 0}} as metadata"
        )
    _check_finite(params, str(path))
    eos = eos_ids(workdir, vocabulary.tokenizer, model.config.vocab)
    return Run(config, vocabulary, model, params, metadata["step"], eos)


@jax.jit
def _are_finite(tree: Any) -> Any:
    """Whether all numbers of an array are finite, for each array of a tree; arrays of integers are."""
    return jax.tree.map(lambda x: jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else True, tree)


def _check_finite(params: Any, source: str) -> None:
    """Raises InputError if a parameter holds NaN or infinity; `source` names the checkpoint in the message."""
    finite = jax.device_get(_are_finite(params))
    for path, is_finite in jax.tree_util.tree_leaves_with_path(finite):
        if not is_finite:
            raise InputError(
                f"{source}: params{jax.tree_util.keystr(path)} holds NaN or infinity, the model is unusable: use an earlier "
                "checkpoint or another run"
            )
