"""Logits of a teacher that are computed once and stored, for runs that see the same sequences again.

A directory of a store has a subdirectory for each teacher and number of logits. It holds blocks, one for each batch that had
new sequences: keys, which are digests of what the teacher reads of a sequence, float16 logits, and their classes if only the
largest logits are stored. A block is complete when its file of keys exists.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import PyTree

from hpnlp.compress.distilling.distillation import Distillation
from hpnlp.compress.distilling.distillation_losses import IDS, VALUES, largest
from hpnlp.data.reading.files import is_special
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.data.batches import Batches
    from hpnlp.training.starts.teacher import Teacher

_KEY_BYTES = 16
_FORMAT = 1
# Arrays of a batch that are no input of a teacher.
_NOT_READ = ("labels", "weights")
Key = bytes


class Store:
    """Logits of one teacher by the digest of a sequence."""

    def __init__(self, directory: str | Path, digest: str, stored: int) -> None:
        """Opens a store, which need not exist.

        Args:
          directory: `distill.cache`.
          digest: Digest of the teacher.
          stored: Number of logits of a label.

        Raises:
          InputError: The directory cannot be read.
        """
        self.directory = Path(directory) / f"{digest}-{stored}-v{_FORMAT}"
        self._places: dict[Key, tuple[str, int]] = {}
        self._block: tuple[str, dict[str, np.ndarray]] = ("", {})
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            names = sorted(path.name for path in self.directory.glob("*.keys.npy"))
        except OSError as error:
            raise InputError(f"distill.cache={directory} cannot be used ({error.strerror}): name another") from error
        for name in names:
            self._add(name.removesuffix(".keys.npy"), self._read(name))

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def read(self, key: Key) -> dict[str, np.ndarray]:
        """Logits of a sequence.

        Args:
          key: Digest of the sequence, which the store has.

        Returns:
          VALUES and, if only the largest are stored, IDS.

        Raises:
          InputError: A file is damaged.
        """
        name, row = self._places[key]
        if self._block[0] != name:
            arrays = {VALUES: self._read(f"{name}.values.npy")}
            if (self.directory / f"{name}.ids.npy").exists():
                arrays[IDS] = self._read(f"{name}.ids.npy")
            self._block = name, arrays
        try:
            return {kind: array[row] for kind, array in self._block[1].items()}
        except IndexError as error:
            raise self._damaged(f"{name}.values.npy", error) from error

    def write(self, keys: list[Key], arrays: Mapping[str, np.ndarray]) -> None:
        """Adds sequences.

        Args:
          keys: Their digests.
          arrays: VALUES and IDS, with a first axis of sequences.

        Raises:
          InputError: The disk is full, or the directory cannot be written.
        """
        name = hashlib.blake2b(b"".join(keys), digest_size=_KEY_BYTES).hexdigest()
        table = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), _KEY_BYTES)
        files = {"values": arrays[VALUES], **({"ids": arrays[IDS]} if IDS in arrays else {}), "keys": table}
        try:
            for kind, array in files.items():
                temporary = self.directory / f".{name}.{kind}.{os.getpid()}.npy"
                np.save(temporary, array)
                os.replace(temporary, self.directory / f"{name}.{kind}.npy")
        except OSError as error:
            raise InputError(
                f"cannot write to {self.directory} ({error.strerror}): free some space, or name another distill.cache"
            ) from error
        self._add(name, table)

    def _add(self, name: str, table: np.ndarray) -> None:
        if table.ndim != 2 or table.shape[1] != _KEY_BYTES or table.dtype != np.uint8:
            raise self._damaged(f"{name}.keys.npy", f"keys are {table.dtype}{list(table.shape)}")
        self._places.update((row.tobytes(), (name, index)) for index, row in enumerate(table))

    def _read(self, name: str) -> np.ndarray:
        path = self.directory / name
        try:
            if is_special(path):
                raise ValueError("it is not a regular file")
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise self._damaged(name, error) from error

    def _damaged(self, name: str, reason: object) -> InputError:
        return InputError(f"{self.directory / name} is damaged ({reason}): delete {self.directory}, and run again")


class StoredBatches:
    """Training batches with the logits of a teacher, which runs for sequences that the store lacks."""

    def __init__(self, batches: Batches, directory: str, model: Distillation, teacher: Teacher) -> None:
        """Wraps an iterator.

        Args:
          batches: The iterator over batches of this process.
          directory: `distill.cache`.
          model: The student with its teacher.
          teacher: A `teacher.Teacher`.

        Raises:
          InputError: The directory cannot be read.
        """
        self._batches = batches
        self._model, self._stored = model.teacher, model.stored
        self._store = Store(directory, teacher.digest, model.stored)
        self._weights: Any = None
        self._values = teacher.values
        self._logits = jax.jit(self._compute)

    def __iter__(self) -> StoredBatches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._batches)
        read = {name: batch[name] for name in self._model.batch_axes()}
        keys = sequence_keys(read)
        missing = {key: row for row, key in enumerate(keys) if key not in self._store}
        if missing:
            if self._weights is None:
                self._weights = jax.device_put(self._values, jax.local_devices()[0])
            logits = np.asarray(self._logits(self._weights, read))[list(missing.values())]
            values, ids = largest(logits, self._stored)
            self._store.write(list(missing), {VALUES: values, **({} if ids is None else {IDS: ids})})
        rows = [self._store.read(key) for key in keys]
        return {**batch, **{name: np.stack([row[name] for row in rows]) for name in rows[0]}}

    def get_state(self) -> Any:
        """State of the wrapped iterator."""
        return self._batches.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Sets the state of the wrapped iterator.

        Args:
          state: Result of `get_state`.
        """
        self._batches.set_state(state)

    def _compute(self, weights: PyTree, batch: Mapping[str, Any]) -> Any:
        return self._model.apply(weights, batch, True, ("logits",), method="loss").taps["logits"]


def sequence_keys(batch: Mapping[str, np.ndarray]) -> list[Key]:
    """Digests of the sequences of a batch.

    Args:
      batch: Arrays with a first axis of sequences.

    Returns:
      A digest of each sequence's arrays, without labels and weights.
    """
    names = sorted(name for name in batch if name not in _NOT_READ)
    arrays = [np.ascontiguousarray(batch[name]) for name in names]
    kinds = ";".join(f"{n} {a.dtype} {a.shape[1:]}" for n, a in zip(names, arrays, strict=True)).encode()
    count = len(arrays[0])
    return [
        hashlib.blake2b(kinds + b"".join(array[row].tobytes() for array in arrays), digest_size=_KEY_BYTES).digest()
        for row in range(count)
    ]
