"""Tokenised examples on disk: texts as documents of `token_store`, and labels as a flat memory-mapped array."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from hpnlp.data.reading.token_store import Tokens, TokenWriter, json_hash, map_array

NO_LABEL = -1  # stored on tokens that carry no label
UNLABELLED = -2  # stored in the place of a label that is missing
_CHUNK = 1 << 16  # examples whose lengths are read at once


class ExampleWriter:
    """Appends examples to the files `directory/name.*`; a context manager. No example stays in memory."""

    def __init__(self, directory: str, name: str, vocab_size: int, classes: Sequence[str]):
        """Creates the files.

        Args:
          directory: An existing directory.
          name: First part of the files' names.
          vocab_size: Number of ids of the tokenizer.
          classes: Names of the classes by their ids; may grow while examples are added. The digest is of the names, so that it
              does not depend on the numbers of the classes.
        """
        self.examples = 0
        self._classes = classes
        self._label_count = self._grade_count = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._tokens = TokenWriter(directory, name, vocab_size, keep_raw=True)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._tokens)
        self._files = {
            array: self._create(os.path.join(directory, f"{name}.{array}"))
            for array in ("labels", "label_ends", "grades")
        }

    def _create(self, path: str) -> BinaryIO:
        return self._stack.enter_context(open(path, "wb"))

    def add(
        self, token_ids: Sequence[np.ndarray], texts: Sequence[bytes], labels: np.ndarray, grade: float | None = None
    ) -> None:
        """Appends one example.

        Args:
          token_ids: Token ids of each text.
          texts: The original bytes of each text.
          labels: Class ids, integers.
          grade: A number, of all examples or of none.
        """
        for ids, text in zip(token_ids, texts, strict=True):
            self._tokens.add(ids, 1, text)
        self._label_count += len(labels)
        self._files["labels"].write(labels.astype(np.int32).tobytes())
        self._files["label_ends"].write(np.array([self._label_count], np.int64).tobytes())
        has_label = labels != NO_LABEL
        names = [None if label == UNLABELLED else self._classes[label] for label in labels[has_label].tolist()]
        content = [len(labels), np.flatnonzero(has_label).tolist(), names]
        if grade is not None:
            self._files["grades"].write(np.float32(grade).tobytes())
            self._grade_count += 1
            content.append(float(np.float32(grade)))
        self._hash.update(json.dumps(content).encode())
        self.examples += 1

    def record(self) -> dict[str, Any]:
        """Describes the files.

        Returns:
          A JSON-able record with sizes and a digest, with which `StoredExamples` opens the files.
        """
        tokens = self._tokens.record()
        return {
            "examples": self.examples,
            "labels": self._label_count,
            "grades": self._grade_count,
            "tokens": tokens,
            "digest": json_hash([tokens["digest"], self._hash.hexdigest()]),
        }

    def __enter__(self) -> ExampleWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def spread(count: int, limit: int) -> np.ndarray:
    """Numbers that are spread evenly.

    Args:
      count: The numbers are those below `count`.
      limit: Maximum number of them.

    Returns:
      int64 [n], ascending; all numbers if there are at most `limit`.
    """
    chosen = min(limit, count)
    return np.arange(chosen) * count // max(1, chosen)


class StoredExamples:
    """Memory-mapped examples of an `ExampleWriter`. Examples are numbered from 0.

    Attributes:
      count: Number of examples.
      parts: Number of texts per example.
      has_grades: Whether each example has a number.
      digest: Digest of token ids and labels.
    """

    def __init__(self, directory: str, name: str, record: Mapping[str, Any], parts: int, classes: np.ndarray):
        """Opens the files.

        Args:
          directory: Directory of the files.
          name: First part of the files' names.
          record: Result of `ExampleWriter.record`.
          parts: Number of texts per example.
          classes: Class ids to return, indexed by the class ids that were stored.
        """
        self.count: int = record["examples"]
        self.parts = parts
        self.digest: str = record["digest"]
        self._tokens = Tokens(directory, name, record["tokens"])
        prefix = os.path.join(directory, name)
        self._labels = map_array(f"{prefix}.labels", np.int32, record["labels"])
        self._label_ends = map_array(f"{prefix}.label_ends", np.int64, self.count)
        # Caches of early versions have no grades.
        self._grades = map_array(f"{prefix}.grades", np.float32, record.get("grades", 0))
        self.has_grades = len(self._grades) > 0
        self._classes = np.append(classes, [UNLABELLED, NO_LABEL]).astype(np.int32)  # at the indices -2 and -1

    def part(self, number: int, part: int) -> np.ndarray:
        """Token ids of one text.

        Args:
          number: Number of the example.
          part: Index of the text.

        Returns:
          uint16 or uint32 [T].
        """
        return self._tokens.document(number * self.parts + part)

    def text(self, number: int, part: int) -> bytes:
        """The original bytes of one text.

        Args:
          number: Number of the example.
          part: Index of the text.

        Returns:
          The text in UTF-8.
        """
        return self._tokens.raw(number * self.parts + part)

    def spread(self, limit: int) -> np.ndarray:
        """Numbers of some examples, spread evenly.

        Args:
          limit: Maximum number of examples.

        Returns:
          int64 [n], ascending; all numbers if there are at most `limit` examples.
        """
        return spread(self.count, limit)

    def texts(self, numbers: Iterable[int] | None = None) -> Iterator[tuple[bytes, ...]]:
        """Reads the original bytes of examples.

        Args:
          numbers: Numbers of the examples; None for all.

        Yields:
          The texts of one example.
        """
        for number in range(self.count) if numbers is None else numbers:
            yield tuple(self.text(int(number), part) for part in range(self.parts))

    def labels(self, number: int) -> np.ndarray:
        """Labels of one example: one, none, or one per token with NO_LABEL for tokens that have none.

        Labels that are missing are UNLABELLED.

        Args:
          number: Number of the example.

        Returns:
          Class ids, int32.
        """
        start = int(self._label_ends[number - 1]) if number else 0
        return self._classes[self._labels[start : int(self._label_ends[number])]]

    def all_labels(self) -> np.ndarray:
        """Labels of all examples, one after another.

        Returns:
          Class ids, int32.
        """
        return self._classes[self._labels]

    def grade(self, number: int) -> float:
        """Number of one example.

        Args:
          number: Number of the example, of a kind with grades.

        Returns:
          The grade.
        """
        return float(self._grades[number])

    def all_grades(self) -> np.ndarray:
        """Numbers of all examples.

        Returns:
          float32 `[n]`; `[0]` for kinds without grades.
        """
        return self._grades

    def lengths(self) -> Iterator[np.ndarray]:
        """Numbers of tokens of the texts, for some thousands of examples at a time.

        Yields:
          int64 [examples, parts].
        """
        step = _CHUNK * self.parts
        for start in range(0, len(self._tokens.ends), step):
            ends = self._tokens.ends[max(0, start - 1) : start + step]
            yield np.diff(ends, prepend=[] if start else [0]).reshape(-1, self.parts)
