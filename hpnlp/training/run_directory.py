"""A run's directory: who may train in it, the config and tokenizer that it was begun with, and the model that it holds."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hpnlp.data import tokenizers
from hpnlp.data.files import is_special
from hpnlp.models.huggingface import convert
from hpnlp.models.lm import LM
from hpnlp.parallel.plan import Plan
from hpnlp.training import config as configs
from hpnlp.training.checkpoint import Checkpointer, checked_directory
from hpnlp.training.config import Config
from hpnlp.training.step import make_trainer
from hpnlp.types import InputError, Tokenizer


def make_model(config: Config, tokenizer: Tokenizer) -> LM:
    """The model of a config, with the sizes that depend on the data filled in. Raises InputError as `configs.model_of`."""
    return configs.model_of(config, tokenizer.vocab_size, tokenizer.stats)


def saved_tokenizer(workdir: Path) -> Tokenizer | None:
    """The tokenizer of a run that has begun, so that going on never depends on its being trained again."""
    path = workdir / "tokenizer.json"
    return tokenizers.load(str(path)) if path.exists() else None


def eos_ids(directory: Path, tokenizer: Tokenizer, vocab: int) -> tuple[int, ...]:
    """The ids that end a text: those that generation_config.json of a converted run names, else the tokenizer's eos.

    Ids that the model's `vocab` rows do not have can never end a text, and are left out.
    """
    ids = tuple(i for i in convert.eos_ids(directory) if 0 <= i < vocab)
    return ids or (() if tokenizer.eos_id is None else (tokenizer.eos_id,))


def load_config(workdir: str | Path) -> Config:
    """The config of a run; raises InputError where `workdir` holds none, or one that cannot be read."""
    path = Path(workdir) / "config.json"
    if is_special(path):
        raise InputError(f"{path} is not a regular file: restore it, or name another workdir")
    try:
        text = path.read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if has_checkpoints(workdir):
            raise InputError(
                f"{workdir} has checkpoints and no config.json: restore it, for only with it can they be read"
            ) from None
        raise InputError(
            f"{workdir} holds no run (there is no config.json): train one first, or name another"
        ) from None
    except (OSError, ValueError) as error:  # a ValueError: of bytes that are not UTF-8, or a null in the path
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot read {path} ({reason}): restore it, or name another workdir") from error
    try:
        return configs.from_json(text)
    except InputError as error:
        if '"model_type"' in text:
            raise InputError(
                f"{workdir} holds a Hugging Face checkpoint and no run: hpnlp convert --from={workdir} --to=runs/x makes one"
            ) from None
        raise InputError(f"{workdir}: {error}") from None


def has_checkpoints(workdir: str | Path) -> bool:
    """True where a checkpoint was begun in `workdir`."""
    return any((Path(workdir) / "checkpoints").glob("[0-9]*"))


def has_begun(workdir: str | Path) -> bool:
    """True where a run has left more than its config: a step, or a checkpoint. What stopped before may come back as another."""
    metrics = Path(workdir) / "metrics.jsonl"
    return has_checkpoints(workdir) or (metrics.exists() and metrics.stat().st_size > 0)


@contextlib.contextmanager
def claimed(workdir: Path, config: Config, accept_changes: bool) -> Iterator[None]:
    """Makes the directory this run's own: one process at a time, one config."""
    checked_directory(workdir)
    _check_outside_data(workdir, config)
    for path in (workdir / name for name in (".lock", "config.json", "metrics.jsonl")):
        if os.path.isdir(path) or is_special(path):
            found = "a directory" if os.path.isdir(path) else "not a regular file"
            raise InputError(f"{path} is {found}: move it away, or choose another workdir")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = open(workdir / ".lock", "w")  # noqa: SIM115  (held until the run ends)
    except OSError as error:
        raise InputError(f"cannot write to workdir {workdir} ({error.strerror}): choose another --workdir") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process trains in {workdir}: wait for it, or choose another workdir") from None
        _check_changes(workdir, config, accept_changes)
        try:
            yield
        except OSError as error:
            if _stdout_fails():
                raise
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise InputError(
                    f"cannot write to {workdir}: the disk is full: free some space and run the same command again"
                ) from error
            if error.errno in (errno.EPERM, errno.EACCES, errno.EROFS):
                raise InputError(
                    f"cannot write to {error.filename or workdir} ({error.strerror}): mend its permissions and run the "
                    "same command again"
                ) from error
            if str(error.filename or "").startswith(str(workdir)):
                raise InputError(
                    f"cannot use {error.filename} ({error.strerror}): move it away, or choose another workdir"
                ) from error
            raise


def _check_outside_data(workdir: Path, config: Config) -> None:
    """Raises InputError where the run would read its own files as text when it goes on: `workdir` is in a directory of data."""
    for field in ("path", "heldout_path"):
        for path in filter(None, map(str.strip, getattr(config.data, field).split(","))):
            directory = os.path.expanduser(path)
            if path in ("stdlib", "stdlib+tests") or not os.path.isdir(directory):
                continue
            within = os.path.relpath(os.path.realpath(workdir), os.path.realpath(directory))
            # A walk leaves hidden files and directories out.
            if within == "." or not any(part.startswith(".") for part in Path(within).parts):
                raise InputError(
                    f"workdir {workdir} lies in data.{field}={path}, and what the run writes would become text: choose another "
                    "--workdir, or name the files of text by a glob"
                )


def _stdout_fails() -> bool:
    """True where standard output takes nothing: its errors, as of a full disk, say nothing about the workdir.

    What could not be written stays in its buffer, so that another flush fails again.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    return False


def _check_changes(workdir: Path, config: Config, accept_changes: bool) -> None:
    """Raises InputError where the run in `workdir` was begun with another config, and may not go on with this one."""
    if not os.path.lexists(workdir / "config.json"):
        if has_begun(workdir) and not accept_changes:
            raise InputError(
                f"{workdir} has {'checkpoints' if has_checkpoints(workdir) else 'metrics.jsonl'} and no config.json: restore "
                "it, choose another workdir, or pass --accept_changes to go on with this config and the tokenizer that is there"
            )
        return
    if not has_begun(workdir):
        if b'"model_type"' in _content(workdir / "config.json"):
            raise InputError(
                f"{workdir} holds a Hugging Face checkpoint, which the run would overwrite: choose another workdir; "
                f"train.init_from={workdir} begins with the checkpoint's parameters"
            )
        return
    changes = configs.differences(load_config(workdir), config)
    if config.train.init_from and os.path.realpath(config.train.init_from) == os.path.realpath(workdir):
        # A run that goes on does not read train.init_from again: its own directory changes nothing.
        changes = [change for change in changes if not change.startswith("train.init_from")]
    if {path.name for path in (workdir / "checkpoints").glob("*")} == {"0"}:  # converted, not trained yet
        changes = [change for change in changes if change.startswith("model.")]
    for change in changes:
        if change.startswith("data.tokenizer") and accept_changes:
            raise InputError(
                f"a run that has begun keeps its tokenizer ({change}): choose another workdir, or give it its old one"
            )
    if changes and not accept_changes:
        raise InputError(
            f"{workdir} was made by another config ({'; '.join(changes)}): choose another workdir, or pass "
            "--accept_changes to go on with the new one"
        )


def _content(path: Path) -> bytes:
    """The bytes of a file, or none where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def write_config(workdir: Path, config: Config) -> None:
    """config.json, whole or not at all."""
    fresh = workdir / "config.json.tmp"
    fresh.write_text(configs.to_json(config))
    os.replace(fresh, workdir / "config.json")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run directory holds. params: those that generation and export use; step: of the checkpoint they are from.
    eos_ids: see `eos_ids`."""

    config: Config
    tokenizer: Tokenizer
    model: LM
    params: Any
    step: int
    eos_ids: tuple[int, ...]


def load(workdir: str | Path, step: int | None = None, plan: Plan = Plan("single")) -> Run:  # noqa: B008  (frozen)
    """The model of a run: from checkpoint `step`, by default the best, or the newest where none was scored.

    Args:
        workdir: of the run.
        step: of the checkpoint; None takes the best.
        plan: how the parameters are laid out, by default on one device.

    Raises:
        InputError: the directory holds no run, or lacks a part of it, or a parameter holds NaN or infinity.
    """
    workdir = Path(workdir)
    config, tokenizer = load_config(workdir), saved_tokenizer(workdir)
    if tokenizer is None:
        raise InputError(f"{workdir} has no tokenizer.json: put back the one that the run was trained with")
    model = make_model(config, tokenizer)
    optimizer = config.optimizer.for_batch(config.data.batch_size)
    shapes = make_trainer(model, optimizer, plan, steps=config.train.steps).state_shapes
    checkpoints = Checkpointer(workdir, read_only=True)
    try:
        step = checkpoints.best() if step is None else step
        params = checkpoints.restore_params(shapes, step)
        _check_finite(params, f"checkpoint {checkpoints.step_of(step)} of {workdir}")
        eos = eos_ids(workdir, tokenizer, model.config.vocab)
        return Run(config, tokenizer, model, params, checkpoints.step_of(step), eos)
    finally:
        checkpoints.close()


def _check_finite(params: Any, name: str) -> None:
    """Raises InputError with the first parameter that holds NaN or infinity. name: what the parameters are of."""
    finite = jax.device_get(jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), params))
    for path, is_finite in jax.tree_util.tree_leaves_with_path(finite):
        if not is_finite:
            raise InputError(
                f"{name}: params{jax.tree_util.keystr(path)} holds NaN or infinity: the model is of no use; take an earlier "
                "checkpoint or another run"
            )
