"""Digests of the content of files, so that a cache never takes changed files for those that its entries were made from."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence

from hpnlp.data.reading import token_store
from hpnlp.data.reading.files import Progress, check_regular, ignore_progress, unreadable
from hpnlp.types import InputError

_FORMAT = 1  # version of a cached digest; part of its key
_CHUNK = 1 << 20
# Smaller sets of files are hashed every time: hashing takes as long as looking a digest up.
_REMEMBERED_BYTES = 1 << 24
# File systems count change times in steps: up to 10 ms on Linux, 2 s on some network file systems. A file that was changed
# within such a step of being hashed may change again and keep its change time.
_STEP_SECONDS = 3.0


class Snapshot:
    """A set of files at one moment: the digest of their content, and a check that the files have not changed since.

    The digest is the SHA-256 of all bytes of all files, at about 1 GB/s. For 16 MiB and more it is kept in the cache
    under each file's path, inode, size, modification time and change time. The change time (ctime) is set by the kernel
    whenever content or metadata changes, and neither `touch` nor `os.utime` can set it back: new content of the same size with
    the old modification time is detected. Digests of files that changed in the last 3 seconds are not cached, because a
    second change may fall into the same step of the clock. Two cases are not detected, for 16 MiB and more only: a file system
    without change times (FAT, some FUSE mounts), and a clock that was set back; empty `data.cache` by hand in these cases.
    """

    def __init__(self, paths: Sequence[str]):
        """Takes the snapshot; raises InputError if a path is not a regular file."""
        self._paths = tuple(paths)
        self._taken = time.time()
        self._stamps = [_stamp(path) for path in self._paths]
        self._bytes = sum(size for _, _, size, _, _ in self._stamps)
        self._digest = ""

    @property
    def _is_settled(self) -> bool:
        """Whether every change of the files is long enough ago to have a change time of its own."""
        return all(changed / 1e9 < self._taken - _STEP_SECONDS for *_, changed in self._stamps)

    def digest(self, root: str, progress: Progress) -> str:
        """Digest, in hexadecimal, of the content of all files in the order of the paths; `root` is the cache that keeps it."""
        if not self._digest:
            if self._bytes < _REMEMBERED_BYTES or not self._is_settled:
                self._digest = self._hash_content(progress)
            else:
                name = f"digest-{token_store.json_hash([_FORMAT, self._stamps])}"
                self._digest = (token_store.find(root, name) or {}).get("digest") or self._hash_content(progress)
                with contextlib.suppress(InputError):  # if the cache cannot be written, the next run hashes again
                    token_store.cached(root, name, lambda directory: {"digest": self._digest})
        return self._digest

    def check(self) -> None:
        """Raises InputError if a file has changed since the snapshot was taken."""
        for path, stamp in zip(self._paths, self._stamps, strict=True):
            if _stamp(path) != stamp:
                raise InputError(f"{path!r} changes while it is read: run again when it is complete, or pass a copy")
        if self._digest and not self._is_settled and self._hash_content(ignore_progress) != self._digest:
            raise InputError("files of data.path change while they are read: run again when they are complete")

    def _hash_content(self, progress: Progress) -> str:
        """SHA-256 of the concatenated SHA-256 digests of the files."""
        content, done = hashlib.sha256(), 0
        for path in self._paths:
            file_hash = hashlib.sha256()
            try:
                with open(path, "rb", buffering=0) as file:
                    while chunk := file.read(_CHUNK):
                        file_hash.update(chunk)
                        done += len(chunk)
                        if self._bytes >= _REMEMBERED_BYTES:
                            progress("hashing", min(done, self._bytes), self._bytes)
            except OSError as error:
                raise unreadable(path, error) from error
            content.update(file_hash.digest())
        return content.hexdigest()


def _stamp(path: str) -> tuple[str, int, int, int, int]:
    """(path, inode, size, modification time, change time) of a file; times in ns."""
    status = check_regular(path)
    return os.path.abspath(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
