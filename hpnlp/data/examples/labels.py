"""Classes of a data set: found in the training examples, counted, and saved with a run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpnlp import spec as specs
from hpnlp.atomic_file import replace_bytes
from hpnlp.data.reading.fields import FieldError
from hpnlp.types import InputError

FILE = "labels.json"
_VERSION = 1
_MAX_CLASSES = 10_000  # more classes mean that another field was meant


# Reasons under which examples are left out whose label is no class of the run.
UNKNOWN_HELDOUT, UNKNOWN_TRAINING = "held out with a label of no class", "with a label of no class"
# Reason under which examples are left out that would be scored if they had a label.
UNLABELLED_HELDOUT = "held out without a label"


class UnknownLabelError(FieldError):
    """A label is of none of the classes of a model that exists already.

    Attributes:
      label: The label.
    """

    def __init__(self, message: str, label: str):
        super().__init__(message)
        self.label = label


class ClassIndex:
    """Numbers the classes of labels in the order of their first occurrence.

    Attributes:
      names: Names of the classes, without whitespace around them; with `fold`, as `folded` returns them.
      counts: Number of occurrences of each class in training examples.
    """

    def __init__(self, known: Sequence[str] | None = None, fold: bool = False):
        """Begins with the only classes that labels may have, or None to find them.

        With `fold`, labels that differ only in case and blanks are of one class.
        """
        self._is_fixed, self._fold = known is not None, fold
        self.names: list[str] = list(known or ())
        self.counts = [0] * len(self.names)
        self._ids = {folded(name) if fold else name: i for i, name in enumerate(self.names)}
        self._written: dict[str, tuple[str, str]] = {}  # name -> (first label with the name, its place)

    def add(self, label: str, where: str) -> int:
        """Finds the number of the class of a label as it is written in the data, or adds the class.

        Raises UnknownLabelError if the label is of no known class, and InputError if two labels differ only in whitespace
        around them, or there are too many classes.
        """
        name = folded(label) if self._fold else label.strip()
        self._check_written(name, label, where)
        if name not in self._ids:
            if self._is_fixed:
                raise UnknownLabelError(
                    f"has label {specs.shortened(name, 60)}, of which there is no class: "
                    f"{specs.did_you_mean(name, self.names)}",
                    name,
                )
            if len(self.names) == _MAX_CLASSES:
                raise InputError(
                    f"{where}: more than {_MAX_CLASSES:,} classes, the next is {specs.shortened(name, 60)}: pass the "
                    "field that holds labels, or use fewer classes"
                )
            self._ids[name] = len(self.names)
            self.names.append(name)
            self.counts.append(0)
        return self._ids[name]

    def _check_written(self, name: str, label: str, where: str) -> None:
        """Raises InputError where a class was written with other blanks around it before."""
        written, place = self._written.setdefault(name, (label, where))
        if written != label and not self._fold:
            raise InputError(
                f"{where}: label {label!r} and label {written!r} ({place}) name the class {name!r} twice: write it the same "
                "way everywhere, or pass data.fold_labels=True"
            )

    def count(self, numbers: np.ndarray) -> None:
        """Counts the labels of a training example: numbers of classes, less than 0 for labels that are missing."""
        for number in numbers[numbers >= 0].tolist():
            self.counts[number] += 1

    def place(self, number: int) -> str:
        """The place of the first label of a class."""
        return self._written[self.names[number]][1]


def folded(label: str) -> str:
    """A label in lower case, without blanks around it, and with one space for all blanks within it (`data.fold_labels`)."""
    return " ".join(label.casefold().split())


def in_order(names: Sequence[str]) -> list[str]:
    """Sorts names of classes: as numbers if all are whole numbers, otherwise in alphabetical order."""
    try:
        return sorted(names, key=lambda name: (int(name), name))
    except ValueError:
        return sorted(names)


def save_labels(labels: Sequence[str], directory: str) -> None:
    """Writes the names of classes to `labels.json`, so that neither a kill nor a full disk leaves an incomplete file.

    Args:
      labels: Names of the classes in the order of their ids.
      directory: An existing directory.
    """
    path = os.path.join(directory, FILE)
    replace_bytes(path, json.dumps({"version": _VERSION, "labels": list(labels)}).encode())


def load_labels(path: str) -> tuple[str, ...]:
    """Reads names of classes that `save_labels` has written.

    Args:
      path: Path of a `labels.json`, or of the directory that holds it.

    Returns:
      The names in the order of their ids.

    Raises:
      InputError: The file is missing or damaged.
    """
    if os.path.isdir(path):
        path = os.path.join(path, FILE)
    try:
        with open(path, encoding="utf-8") as file:
            form: Any = json.load(file)
    except OSError as error:
        raise InputError(f"cannot read the classes {path!r}: {error.strerror}: pass the path of a {FILE}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path!r} is no {FILE}: it is not JSON ({error}): save it again") from error
    labels = form.get("labels") if isinstance(form, dict) else None
    if (
        not isinstance(labels, list)
        or not all(isinstance(name, str) for name in labels)
        or len(set(labels)) < len(labels)
    ):
        raise InputError(f"{path!r} is damaged: `labels` is not a list of different strings: save it again")
    if form.get("version") != _VERSION:
        raise InputError(f"{path!r} has format version {form.get('version')!r}, expected {_VERSION}: update hpnlp")
    return tuple(labels)
