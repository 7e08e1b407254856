"""Files that are replaced atomically. Only the standard library is imported."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hpnlp.errors import InputError, TemporaryError, is_full_disk, is_temporary


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str], content: str = "") -> Iterator[BinaryIO]:
    """A context with a new file that replaces the file of a path at the end of the context.

    A symbolic link stays, and its target is replaced. A process that is killed in the context leaves the old file as it was.
    After an exception in the context, the new file is removed.

    Args:
      path: Path of the file.
      content: What the file holds, for the message of an error, as in "the index".

    Yields:
      The new file, open for writing bytes.

    Raises:
      InputError: The file cannot be written, or the path is that of a directory, a device or another special file.
      TemporaryError: The disk is full.
    """
    try:
        with _replacement(Path(path)) as file:
            yield file
    except OSError as error:
        shown = f"{content} {str(path)!r}".strip()
        reason = error.strerror or ("the disk is full" if is_full_disk(error) else error)
        raise (TemporaryError if is_temporary(error) else InputError)(
            f"cannot write {shown} ({reason}): pass a path in a directory that exists and has space"
        ) from error


def replace_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a small file, atomically: as `replaced`, for callers that name the fix of an error themselves.

    Args:
      path: Path of the file.
      content: Its content.

    Raises:
      OSError: The file cannot be written.
    """
    with _replacement(Path(path)) as file:
        file.write(content)


@contextlib.contextmanager
def _replacement(path: Path) -> Iterator[BinaryIO]:
    """`replaced`, which raises OSError."""
    path = Path(os.path.realpath(path))  # through a symbolic link, its target is replaced
    if os.path.exists(path) and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    # A name that neither another process nor the user has.
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk names no file
    finally:
        part.unlink(missing_ok=True)
