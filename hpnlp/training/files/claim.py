"""Claim of a run's directory: who may train in it, and whether a run resumes there.

A run has begun when it has left a training step or a checkpoint. From then on, the same config resumes the run from its newest
checkpoint, and another config is refused unless the user accepts the changes. Before, the directory may be reused with any
config. This module checks that a run may resume (`claimed`); `start.find_start` restores its state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpnlp.data.reading.files import is_special
from hpnlp.errors import InputError, TemporaryError, is_full_disk, is_temporary
from hpnlp.tasks.task import Frozen
from hpnlp.training import config as configs
from hpnlp.training.config import Config
from hpnlp.training.config_file import load_config
from hpnlp.training.files.checkpoint import CONVERTED_STEP
from hpnlp.training.files.contents import (
    Contents,
    checked_directory,
    contents_of,
    has_begun,
    has_checkpoints,
    locked,
)
from hpnlp.training.processes import attempts
from hpnlp.training.processes.attempts import Fence
from hpnlp.training.starts import changed_config


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
