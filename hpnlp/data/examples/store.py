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

        `classes`, the names of the classes by their ids, may grow while examples are added. The digest is of the names, so that
        it does not depend on the numbers of the classes.
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
        """Appends one example: ids and bytes of each text, class ids, and a grade of all examples or of none."""
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
        """JSON-able sizes and a digest, with which `StoredExamples` opens the files."""
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
    """Numbers below `count`, at most `limit`, that are spread evenly: int64 [n], ascending."""
    chosen = min(limit, count)
    return np.arange(chosen) * count // max(1, chosen)


class StoredExamples:
    """Memory-mapped examples of an `ExampleWriter`. Examples are numbered from 0.

    Attributes:
      count: Number of examples.
      parts: Number of texts per example.
      has_grades: Whether each example has a number.
      groups: Number of the group of each example, int32 `[count]`; `[0]` if no two examples share one.
      digest: Digest of token ids and labels.
    """

    def __init__(self, directory: str, name: str, record: Mapping[str, Any], parts: int, classes: np.ndarray):
        """Opens the files of a writer, of which `record` is the result of `ExampleWriter.record`.

        `classes` are the class ids to return, indexed by the class ids that were stored.
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
        self.groups = map_array(f"{prefix}.groups", np.int32, record.get("groups", 0))
        self._classes = np.append(classes, [UNLABELLED, NO_LABEL]).astype(np.int32)  # at the indices -2 and -1

    def part(self, number: int, part: int) -> np.ndarray:
        """Token ids of one text of an example, uint16 or uint32 [T]."""
        return self._tokens.document(number * self.parts + part)

    def text(self, number: int, part: int) -> bytes:
        """Original bytes of one text of an example, in UTF-8."""
        return self._tokens.raw(number * self.parts + part)

    def spread(self, limit: int) -> np.ndarray:
        """Numbers of at most `limit` examples, spread evenly: int64 [n], ascending."""
        return spread(self.count, limit)

    def example(self, number: int) -> tuple[list[np.ndarray], list[bytes], np.ndarray, float | None]:
        """Arguments of `ExampleWriter.add` by which an example is stored again."""
        ids = [self.part(number, part) for part in range(self.parts)]
        texts = [self.text(number, part) for part in range(self.parts)]
        return ids, texts, self.labels(number), self.grade(number) if self.has_grades else None

    def texts(self, numbers: Iterable[int] | None = None) -> Iterator[tuple[bytes, ...]]:
        """Original bytes of the texts of examples, of all for None."""
        for number in range(self.count) if numbers is None else numbers:
            yield tuple(self.text(int(number), part) for part in range(self.parts))

    def labels(self, number: int) -> np.ndarray:
        """Class ids of one example, int32: one, none, or one per token with NO_LABEL for tokens that have none.

        Labels that are missing are UNLABELLED.
        """
        start = int(self._label_ends[number - 1]) if number else 0
        return self._classes[self._labels[start : int(self._label_ends[number])]]

    def all_labels(self) -> np.ndarray:
        """Class ids of all examples, one after another, int32."""
        return self._classes[self._labels]

    def grade(self, number: int) -> float:
        """Grade of an example of a kind with grades."""
        return float(self._grades[number])

    def all_grades(self) -> np.ndarray:
        """Grades of all examples, float32 `[n]`; `[0]` for kinds without grades."""
        return self._grades

    def lengths(self) -> Iterator[np.ndarray]:
        """Numbers of tokens of the texts, int64 [examples, parts], for some thousands of examples at a time."""
        step = _CHUNK * self.parts
        for start in range(0, len(self._tokens.ends), step):
            ends = self._tokens.ends[max(0, start - 1) : start + step]
            yield np.diff(ends, prepend=[] if start else [0]).reshape(-1, self.parts)
