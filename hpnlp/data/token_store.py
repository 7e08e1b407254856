"""Tokenised text on disk: flat arrays that are memory-mapped, in cache entries that appear whole or not at all."""

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

from hpnlp.types import InputError

_INDEX = "index.json"
# Entries in the making. A cache may lie in a directory that holds other things, so what is removed there must be
# unmistakably ours: it has this prefix, and the marker in it.
_WORK = ".hpnlp-unfinished-"
_MARKER = "made-by-hpnlp"
_STALE_SECONDS = 7 * 24 * 3600
_BUFFER = 1 << 18


def cache_root(configured: str) -> str:
    """Where entries are kept: `configured`, else $HPNLP_CACHE, else hpnlp under $XDG_CACHE_HOME or ~/.cache."""
    if "\0" in configured:
        raise InputError(f"data.cache={configured!r} has a NUL in it: pass a directory")
    xdg = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.abspath(
        os.path.expanduser(configured or os.environ.get("HPNLP_CACHE") or os.path.join(xdg, "hpnlp"))
    )


def key_of(value: Any) -> str:
    """A short name for a JSON-able value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def cached(root: str, name: str, write: Callable[[str], Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The directory `root/name` and its record, made by `write(directory) -> record` where it is not there yet.

    `write` fills a directory of its own, which is renamed into place when it is complete: a kill leaves nothing that
    would be read, and of two processes that write the same entry the first wins. An entry of which a file is missing or
    has another size than recorded is made again. Raises InputError where the disk does not take it.
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
        os.mkdir(fresh)  # with the permissions of the umask, so that others can read a shared cache
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
    """Returns the record of the entry `root/name`, or None where there is no complete one."""
    return _read_record(os.path.join(root, name))


def _read_record(path: str) -> dict[str, Any] | None:
    """The record of a complete entry, or None."""
    try:
        with open(os.path.join(path, _INDEX), encoding="utf-8") as file:
            index = json.load(file)
        if all(os.path.getsize(os.path.join(path, file)) == size for file, size in index["files"].items()):
            return index["record"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # not there, cut short, or not ours: all are made again
    return None


def _workspace(root: str) -> str:
    """A new directory under `root`, which a later process removes where this one dies."""
    work = tempfile.mkdtemp(prefix=_WORK, dir=root)
    with open(os.path.join(work, _MARKER), "wb"):
        return work


def _move_into_place(fresh: str, final: str) -> None:
    while True:
        try:
            os.rename(fresh, final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if _read_record(final) is not None:
            return  # another process was first
        # What stands there is damaged. It is moved aside first, so that nobody meets half of it.
        with contextlib.suppress(FileNotFoundError):
            aside = _workspace(os.path.dirname(final))
            os.rename(final, os.path.join(aside, "damaged"))
            shutil.rmtree(aside, ignore_errors=True)


def _remove_stale(root: str) -> None:
    """Removes what killed processes left behind, judged by the newest write."""
    for entry in os.scandir(root):
        if not (entry.name.startswith(_WORK) and entry.is_dir(follow_symlinks=False)):
            continue
        with contextlib.suppress(OSError):
            inside = [os.path.join(at, name) for at, *names in os.walk(entry.path) for name in sum(names, [])]
            newest = max(os.lstat(path).st_mtime for path in [entry.path, *inside])
            if os.path.join(entry.path, _MARKER) in inside and newest < time.time() - _STALE_SECONDS:
                shutil.rmtree(entry.path, ignore_errors=True)


class TokenWriter:
    """Appends documents to `directory/name.*`; a context manager. Nothing of a document stays in memory."""

    def __init__(self, directory: str, name: str, vocab_size: int, keep_raw: bool = False):
        """keep_raw: also keep the bytes that a document came from, for `Tokens.raw`."""
        self.tokens = 0
        self.documents = 0
        self.raw_bytes = 0
        self._dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._hash = hashlib.blake2b(digest_size=16)
        parts = ("tokens", "ends", "skips", *(("raw", "raw_ends") if keep_raw else ()))
        self._stack = contextlib.ExitStack()
        self._files = {part: self._create(os.path.join(directory, f"{name}.{part}")) for part in parts}

    def _create(self, path: str) -> BinaryIO:
        return self._stack.enter_context(open(path, "wb", buffering=_BUFFER))

    def add(self, ids: np.ndarray, skip: int, raw: bytes = b"") -> None:
        """One document. ids: its tokens, at least one. skip: how many of the first ones carry no loss, at least one,
        because nothing predicts the first. raw: the bytes that it came from."""
        self.tokens += len(ids)
        self.documents += 1
        self.raw_bytes += len(raw)
        self._write("tokens", ids.astype(self._dtype))
        self._write("ends", np.array([self.tokens], np.int64))
        self._write("skips", np.array([skip], np.int32))
        if "raw" in self._files:
            self._files["raw"].write(raw)
            self._files["raw_ends"].write(np.array([self.raw_bytes], np.int64).tobytes())

    def _write(self, part: str, values: np.ndarray) -> None:
        data = values.tobytes()
        self._hash.update(data)
        self._files[part].write(data)

    def record(self) -> dict[str, Any]:
        """What `Tokens` needs to read the files back."""
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
    """Documents of a TokenWriter, memory-mapped.

    tokens: `[tokens]`, all documents one after another. ends: `[documents]` int64, where each one ends. skips:
    `[documents]` int32, how many of its first tokens carry no loss.
    """

    def __init__(self, directory: str, name: str, record: Mapping[str, Any]):
        def mapped(part: str, dtype: Any, length: int) -> np.ndarray:
            # np.memmap refuses empty files; as a plain ndarray, indexing skips the subclass's bookkeeping.
            path = os.path.join(directory, f"{name}.{part}")
            return np.asarray(np.memmap(path, dtype, "r", shape=(length,))) if length else np.zeros(0, dtype)

        self.tokens = mapped("tokens", np.dtype(record["dtype"]), record["tokens"])
        self.ends = mapped("ends", np.int64, record["documents"])
        self.skips = mapped("skips", np.int32, record["documents"])
        self._raw_ends = mapped("raw_ends", np.int64, record["documents"] if record["keeps_raw"] else 0)
        self._raw_path = os.path.join(directory, f"{name}.raw")

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document."""
        return self.tokens[self.ends[index - 1] if index else 0 : self.ends[index]]

    def raw(self, index: int | None = None) -> bytes:
        """The bytes that document `index` came from; those of all documents for None. Only where they were kept."""
        start = int(self._raw_ends[index - 1]) if index else 0
        try:
            with open(self._raw_path, "rb") as file:
                file.seek(start)
                return file.read(-1 if index is None else int(self._raw_ends[index]) - start)
        except OSError as error:
            raise InputError(
                f"cannot read {self._raw_path!r}: {error.strerror}: where the data cache was removed meanwhile, run the "
                "same command again, which makes it anew"
            ) from error
