"""Documents that a model retrieves: their token ids, which are a part of the model."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import numpy as np

from hpnlp.atomic_file import replaced
from hpnlp.types import InputError

FILE = "documents.npz"  # name in a run directory


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Token ids of documents. Compared and hashed by content, so that a Flax module can have them as a field.

    Attributes:
      tokens: int32 `[N, U]`, padded.
      lengths: int32 `[N]`, numbers of tokens.
    """

    tokens: np.ndarray
    lengths: np.ndarray

    def __post_init__(self) -> None:
        for name in ("tokens", "lengths"):
            array = np.array(getattr(self, name), np.int32)
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @functools.cached_property
    def _content(self) -> tuple[Any, bytes, bytes]:
        return self.tokens.shape, self.tokens.tobytes(), self.lengths.tobytes()

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the documents to the file `documents.npz`, atomically.

        Args:
          directory: An existing directory.

        Raises:
          InputError: The file cannot be written.
        """
        with replaced(os.path.join(directory, FILE), "the documents") as file:
            np.savez_compressed(file, tokens=self.tokens, lengths=self.lengths)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Documents:
        """Reads the documents that `save` has written.

        Returns:
          The documents.

        Raises:
          InputError: The file is absent or damaged.
        """
        path = os.path.join(directory, FILE)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls(arrays["tokens"], arrays["lengths"])
        except Exception as error:  # damaged files raise all kinds of errors in zipfile and numpy
            raise InputError(
                f"{path!r} is absent or damaged ({error}): restore it, or train in another directory"
            ) from error


def blank_documents(count: int, length: int) -> Documents:
    """Documents of a given shape, for plans of runs whose data are not read.

    Args:
      count: Number of documents, N.
      length: Tokens of each document, U.

    Returns:
      Documents of id 0 only.
    """
    return Documents(np.zeros((count, length)), np.full(count, length))
