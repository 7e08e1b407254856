"""Contents of a directory that commands write: what it holds, and the lock of the command that writes it."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from hpnlp.compress.files import has_weights
from hpnlp.types import InputError

LOCK = ".lock"
# Record of `hpnlp compress` in a directory that it has begun to write, removed when the model is finished.
UNFINISHED_FILE = ".compression"
_MODEL_TYPE = b'"model_type"'  # field of the config.json of a Hugging Face checkpoint


class Contents(enum.Enum):
    """Kinds of directories; the value completes "DIRECTORY holds ..."."""

    NOTHING = "nothing"
    RUN = "a run"
    COMPRESSED = "a compressed model"
    UNFINISHED = "an unfinished compression"
    CHECKPOINT = "a Hugging Face checkpoint"
    OTHER = "other files"


def contents_of(directory: str | os.PathLike[str]) -> Contents:
    """Determines what a directory holds, by its config.json and by the records that commands leave.

    Args:
      directory: The directory, which need not exist.

    Returns:
      Its contents; NOTHING for an absent directory, and for one with nothing but a lock.
    """
    path = Path(directory)
    try:
        if not any(name != LOCK for name in os.listdir(path)):
            return Contents.NOTHING
    except OSError:
        return Contents.OTHER if os.path.lexists(path) else Contents.NOTHING
    config = path / "config.json"
    if config.is_file():
        try:
            is_checkpoint = _MODEL_TYPE in config.read_bytes()
        except OSError:
            is_checkpoint = False
        if is_checkpoint:
            return Contents.CHECKPOINT
        return Contents.COMPRESSED if has_weights(path) else Contents.RUN
    if (path / UNFINISHED_FILE).exists():
        return Contents.UNFINISHED
    return Contents.RUN if has_begun(path) else Contents.OTHER


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
      InputError: The directory cannot be written, or another process has locked it.
    """
    is_new = not os.path.lexists(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / LOCK, "w")  # noqa: SIM115  (held until the end of the block)
    except OSError as error:
        raise InputError(f"cannot write to {directory} ({error.strerror}): choose another directory") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another process writes to {directory}: wait for it, or choose another directory"
            ) from None
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
