"""Contents of a directory that commands write: what it holds, and the lock of the command that writes it."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hpnlp.compress.weights_file import has_weights
from hpnlp.data.reading.files import is_special
from hpnlp.errors import TemporaryError
from hpnlp.training.processes import attempts
from hpnlp.training.processes.attempts import LOCK as LOCK  # part of this module's interface
from hpnlp.types import InputError

# Record of `hpnlp compress` in a directory that it has begun to write, removed when the model is finished.
UNFINISHED_FILE = ".compression"
EXPORT_FILE = "export.json"  # record of `hpnlp export` in a directory that it has written
EXPORT_SCRATCH = ".export-"  # prefix of the directory of an export that is being written
# Parts of a path that orbax and tensorstore do not take literally. Orbax globs the whole path to merge the files of all
# processes, tensorstore reads a backslash as a slash, and etils turns the directory `gs:` into an address.
_NOT_LITERAL = re.compile(r"[*?\[\\]|(?<=/)gs:(?=/)")
_MODEL_TYPE = b'"model_type"'  # field of the config.json of a Hugging Face checkpoint
_CHECKPOINT_FILES = (".safetensors", ".safetensors.index.json")  # a run has no such files


class Contents(enum.Enum):
    """Kinds of directories; the value completes "DIRECTORY holds ..."."""

    NOTHING = "nothing"
    RUN = "a run"
    COMPRESSED = "a compressed model"
    UNFINISHED = "an unfinished compression"
    CHECKPOINT = "a Hugging Face checkpoint"
    EXPORTED = "an exported model"
    OTHER = "other files"


_READABLE = (Contents.RUN, Contents.COMPRESSED)  # what commands that read a run take


def checked_directory(workdir: str | Path, argument: str = "workdir") -> Path:
    """Absolute path of a run directory whose checkpoints can be read back.

    Args:
      workdir: The directory, which need not exist.
      argument: Name of the argument in error messages.

    Returns:
      The absolute path.

    Raises:
      InputError: The absolute path is not UTF-8, or has a character that the checkpoint libraries do not take literally.
    """
    directory = Path(workdir).absolute()
    try:
        str(directory).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{argument} {str(workdir)!r}: the path {str(directory)!r} is not UTF-8, and checkpoints in it could not be "
            "written: rename that directory, or choose another one"
        ) from None
    if match := _NOT_LITERAL.search(f"{directory}/"):
        raise InputError(
            f"{argument} {str(workdir)!r}: checkpoints under a path with {match[0]!r} could not be read back ({directory}): "
            "rename that directory, or choose another one"
        )
    return directory


def contents_of(directory: str | os.PathLike[str]) -> Contents:
    """Determines what a directory holds, by its config.json, its weights and the records that commands leave.

    Args:
      directory: The directory, which need not exist.

    Returns:
      Its contents; NOTHING for an absent directory, and for one with nothing but locks and files of a supervisor.
    """
    path = Path(directory)
    try:
        names = [name for name in os.listdir(path) if name not in attempts.FILES]
    except (OSError, ValueError):  # ValueError: a null character in the path
        return Contents.OTHER if os.path.lexists(path) else Contents.NOTHING
    if not names:
        return Contents.NOTHING
    config = path / "config.json"
    is_run = "checkpoints" in names and config.is_file()  # the user may have put files beside those of the run
    if not is_run and (EXPORT_FILE in names or any(name.startswith(EXPORT_SCRATCH) for name in names)):
        return Contents.EXPORTED
    if _has_model_type(config) or (not is_run and any(name.endswith(_CHECKPOINT_FILES) for name in names)):
        return Contents.CHECKPOINT
    if config.is_file():
        return Contents.COMPRESSED if has_weights(path) else Contents.RUN
    if (path / UNFINISHED_FILE).exists():
        return Contents.UNFINISHED
    return Contents.RUN if has_begun(path) else Contents.OTHER


def _has_model_type(config: Path) -> bool:
    """Whether a config.json is that of a Hugging Face checkpoint."""
    try:
        return config.is_file() and _MODEL_TYPE in config.read_bytes()
    except OSError:
        return False


def check_run(directory: str | os.PathLike[str], alternative: str = "") -> None:
    """Checks that a directory holds a run or a compressed model, before a command reads it.

    Args:
      directory: The directory, which need not exist.
      alternative: Other contents that the command reads, for the message, as in " and no Hugging Face checkpoint".

    Raises:
      InputError: It holds something else; the message names the contents and the command that makes a run of them.
    """
    path, held = Path(directory), contents_of(directory)
    if held in _READABLE:
        return
    if held is Contents.CHECKPOINT:
        raise InputError(f"{path} holds {held.value} and no run: hpnlp convert {path} --to=runs/x makes one of it")
    if held is Contents.EXPORTED:
        raise InputError(f"{path} holds {held.value}: name the run that it was made of; its predict.py predicts texts")
    if held is Contents.UNFINISHED:
        raise InputError(f"{path} holds {held.value}: run its `hpnlp compress` command again")
    try:
        os.listdir(path)
        _check_readable(path / "config.json")
        reason = "it is empty" if held is Contents.NOTHING else "there is no config.json"
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    fix = "train one first, or name another directory"
    if runs := sorted(child.parent for child in path.glob("*/config.json") if contents_of(child.parent) in _READABLE):
        fix = f"name one of the runs in it, such as {runs[0]}"
    raise InputError(f"{path} holds no run{alternative} ({reason}): {fix}")


def _check_readable(config: Path) -> None:
    """Raises InputError if config.json exists and is not a readable file."""
    if is_special(config):
        raise InputError(f"{config} is not a regular file: restore it, or name another workdir")
    try:
        if os.path.lexists(config):
            config.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {config} ({error.strerror}): restore it, or name another workdir") from error


def has_checkpoints(workdir: str | os.PathLike[str]) -> bool:
    """True if a checkpoint was begun in a run directory; it may be incomplete.

    Args:
      workdir: The run directory.

    Returns:
      Whether there is one.
    """
    return any((Path(workdir) / "checkpoints").glob("[0-9]*"))


def has_begun(workdir: str | os.PathLike[str]) -> bool:
    """True if a run has left a training step or a checkpoint. Without these, the directory may be used with another config.

    Args:
      workdir: The run directory.

    Returns:
      Whether the run has begun.
    """
    metrics = Path(workdir) / "metrics.jsonl"
    return has_checkpoints(workdir) or (metrics.exists() and metrics.stat().st_size > 0)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Creates a directory if it does not exist, and locks it against other processes that write it.

    Args:
      directory: The directory; if the block raises before it has written anything to a new one, it is removed again.

    Yields:
      None, while the directory is locked.

    Raises:
      InputError: The directory cannot be written.
      TemporaryError: Another process has locked it.
    """
    is_new = not os.path.lexists(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / LOCK, "a+", encoding="utf-8")  # noqa: SIM115  (held until the end of the block)
    except OSError as error:
        raise InputError(f"cannot write to {directory} ({error.strerror}): choose another directory") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            name = f" ({holder})" if (holder := lock.read(100).strip()) else ""
            raise TemporaryError(
                f"another process writes to {directory}{name}: wait for it, or choose another directory"
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the name is for messages only
            lock.truncate(0)
            lock.write(f"{attempts.process_name()}\n")
            lock.flush()
        try:
            yield
        except BaseException:
            if is_new:
                _remove_unused(directory)
            raise


def _remove_unused(workdir: Path) -> None:
    """Removes a directory that holds nothing but the lock and an empty directory of checkpoints."""
    if any(path.name != LOCK for path in workdir.rglob("*") if not path.is_dir()):
        return
    with contextlib.suppress(OSError):
        if (workdir / "checkpoints").is_dir():
            (workdir / "checkpoints").rmdir()
        if os.listdir(workdir) == [LOCK]:
            (workdir / LOCK).unlink()
            workdir.rmdir()
