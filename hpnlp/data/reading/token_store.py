"""Tokenised text on disk: flat memory-mapped arrays in a cache, whose entries appear complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np
from jax.typing import DTypeLike

from hpnlp.types import InputError

_INDEX = "index.json"
# Directories of unfinished entries have this prefix and hold this marker. A cache may be a directory with other content, so
# only directories with both are ever removed.
_UNFINISHED = ".hpnlp-unfinished-"
_MARKER = "made-by-hpnlp"
_STALE_SECONDS = 7 * 24 * 3600  # the process of an unfinished entry counts as killed after this time without a write
_BUFFER = 1 << 18


def cache_root(configured: str) -> str:
    """Path of the cache: `configured`, else $HPNLP_CACHE, else hpnlp under $XDG_CACHE_HOME or ~/.cache."""
    if "\0" in configured:
        raise InputError(f"data.cache={configured!r} has a NUL in it: pass a directory")
    xdg = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.abspath(
        os.path.expanduser(configured or os.environ.get("HPNLP_CACHE") or os.path.join(xdg, "hpnlp"))
    )


def json_hash(value: Any) -> str:
    """Hashes a JSON-able value to 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def cached(root: str, name: str, write: Callable[[str], Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Finds an entry of the cache, or makes it; returns its directory and its record.

    `write(directory)` fills a temporary directory and returns a JSON-able record. The directory is renamed when it is complete:
    a kill leaves nothing that would be read, and of two processes that write the same entry the first wins. An entry in which a
    file is missing or has another size than recorded is made again. Raises InputError if the disk is full or cannot be written.
    """
    final = os.path.join(root, name)
    record = _read_record(final)
    if record is not None:
        return final, record
    work = ""
    try:
        os.makedirs(root, exist_ok=True)
        _remove_stale(root)
        work = _workspace(root)
        fresh = os.path.join(work, "entry")
        os.mkdir(fresh)  # has the permissions of the umask, so that other users can read a shared cache
        record = dict(write(fresh))
        sizes = {file: os.path.getsize(os.path.join(fresh, file)) for file in sorted(os.listdir(fresh))}
        with open(os.path.join(fresh, _INDEX), "w", encoding="utf-8") as file:
            json.dump({"files": sizes, "record": record}, file)
        _move_into_place(fresh, final)
    except OSError as error:
        raise InputError(
            f"cannot write the data cache {root!r}: {error.strerror or error}: free some space there, or pass "
            "data.cache=DIR on a disk that can be written"
        ) from error
    finally:
        if work:
            shutil.rmtree(work, ignore_errors=True)
    return final, record


def find(root: str, name: str) -> dict[str, Any] | None:
    """The record of an entry of the cache, or None if there is no complete entry."""
    return _read_record(os.path.join(root, name))


def _read_record(path: str) -> dict[str, Any] | None:
    """The record of a complete entry, or None."""
    try:
        with open(os.path.join(path, _INDEX), encoding="utf-8") as file:
            index = json.load(file)
        if all(os.path.getsize(os.path.join(path, file)) == size for file, size in index["files"].items()):
            return index["record"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # missing, truncated, or of another program: the entry is made again
    return None


def _workspace(root: str) -> str:
    """A new directory under `root`; a later process removes it if this process is killed."""
    work = tempfile.mkdtemp(prefix=_UNFINISHED, dir=root)
    with open(os.path.join(work, _MARKER), "wb"):
        return work


def _move_into_place(fresh: str, final: str) -> None:
    """Renames `fresh` to `final`, unless another process has completed `final` first."""
    while True:
        try:
            os.rename(fresh, final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if _read_record(final) is not None:
            return  # another process was first
        # A damaged entry is moved aside before it is removed, so that no process reads a part of it.
        with contextlib.suppress(FileNotFoundError):
            aside = _workspace(os.path.dirname(final))
            os.rename(final, os.path.join(aside, "damaged"))
            shutil.rmtree(aside, ignore_errors=True)


def _remove_stale(root: str) -> None:
    """Removes unfinished entries of killed processes, judged by the time of the newest write."""
    for entry in os.scandir(root):
        if not (entry.name.startswith(_UNFINISHED) and entry.is_dir(follow_symlinks=False)):
            continue
        with contextlib.suppress(OSError):
            content = [
                os.path.join(directory, name)
                for directory, subdirectories, files in os.walk(entry.path)
                for name in subdirectories + files
            ]
            newest = max(os.lstat(path).st_mtime for path in [entry.path, *content])
            if os.path.join(entry.path, _MARKER) in content and newest < time.time() - _STALE_SECONDS:
                shutil.rmtree(entry.path, ignore_errors=True)


def remove_files(directory: str, name: str) -> None:
    """Removes the files `directory/name.*`."""
    for file in os.listdir(directory):
        if file.startswith(f"{name}."):
            os.remove(os.path.join(directory, file))


class TokenWriter:
    """Appends documents to the files `directory/name.*`; a context manager. No document stays in memory."""

    def __init__(self, directory: str, name: str, vocab_size: int, keep_raw: bool = False):
        """Creates the files, with ids as uint16 for up to 2^16 ids and as uint32 for more.

        With `keep_raw`, the original bytes of each document are stored too, for `Tokens.raw`.
        """
        self.tokens = 0
        self.documents = 0
        self.raw_bytes = 0
        self._dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._hash = hashlib.blake2b(digest_size=16)
        arrays = ("tokens", "ends", "skips", *(("raw", "raw_ends") if keep_raw else ()))
        self._stack = contextlib.ExitStack()
        self._files = {array: self._create(os.path.join(directory, f"{name}.{array}")) for array in arrays}

    def _create(self, path: str) -> BinaryIO:
        return self._stack.enter_context(open(path, "wb", buffering=_BUFFER))

    def add(self, ids: np.ndarray, skip: int, raw: bytes = b"") -> None:
        """Appends one document of at least one token.

        Args:
          ids: Token ids, integers [T].
          skip: Number of initial tokens that carry no loss, at least one, because no token precedes the first.
          raw: The original bytes; used if `keep_raw`.
        """
        self.tokens += len(ids)
        self.documents += 1
        self.raw_bytes += len(raw)
        self._write("tokens", ids.astype(self._dtype))
        self._write("ends", np.array([self.tokens], np.int64))
        self._write("skips", np.array([skip], np.int32))
        if "raw" in self._files:
            self._files["raw"].write(raw)
            self._files["raw_ends"].write(np.array([self.raw_bytes], np.int64).tobytes())

    def _write(self, array: str, values: np.ndarray) -> None:
        """Appends `values` to the file of `array`, and to the digest."""
        data = values.tobytes()
        self._hash.update(data)
        self._files[array].write(data)

    def record(self) -> dict[str, Any]:
        """JSON-able sizes and a digest of the tokens, with which `Tokens` opens the files."""
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "raw_bytes": self.raw_bytes,
            "dtype": self._dtype.name,
            "keeps_raw": "raw" in self._files,
            "digest": self._hash.hexdigest(),
        }

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class Tokens:
    """Memory-mapped documents of a `TokenWriter`.

    Attributes:
      tokens: Token ids of all documents one after another, uint16 or uint32 [tokens].
      ends: Index in `tokens` after the last token of each document, int64 [documents].
      skips: Number of initial tokens of each document that carry no loss, int32 [documents].
    """

    def __init__(self, directory: str, name: str, record: Mapping[str, Any]):
        """Opens the files of a writer, of which `record` is the result of `TokenWriter.record`."""
        prefix = os.path.join(directory, name)
        self.tokens = map_array(f"{prefix}.tokens", np.dtype(record["dtype"]), record["tokens"])
        self.ends = map_array(f"{prefix}.ends", np.int64, record["documents"])
        self.skips = map_array(f"{prefix}.skips", np.int32, record["documents"])
        self._raw_ends = map_array(f"{prefix}.raw_ends", np.int64, record["documents"] if record["keeps_raw"] else 0)
        self._raw_path = f"{prefix}.raw"

    def document(self, index: int) -> np.ndarray:
        """Token ids of one document, uint16 or uint32 [T]."""
        return self.tokens[self.ends[index - 1] if index else 0 : self.ends[index]]

    def raw(self, index: int | None = None) -> bytes:
        """Original bytes of a document, of all documents for None; the writer must have had `keep_raw`."""
        start = int(self._raw_ends[index - 1]) if index else 0
        try:
            with open(self._raw_path, "rb") as file:
                file.seek(start)
                return file.read(-1 if index is None else int(self._raw_ends[index]) - start)
        except OSError as error:
            raise InputError(
                f"cannot read {self._raw_path!r}: {error.strerror}: if the data cache was removed meanwhile, run the "
                "same command again, which restores it"
            ) from error


def map_array(path: str, dtype: DTypeLike, length: int) -> np.ndarray:
    """Memory-maps a file of `length` values, read-only; no file is opened for 0 values.

    np.memmap refuses empty files, and indexing is faster on a plain ndarray than on its subclass.
    """
    return np.asarray(np.memmap(path, dtype, "r", shape=(length,))) if length else np.zeros(0, dtype)
