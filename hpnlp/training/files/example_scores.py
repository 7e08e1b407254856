"""Scores of single held-out examples, from which comparisons of runs compute intervals.

The loss of a batch and its metrics are sums over examples of weight times value. The derivative of such a sum with respect to
the weights is therefore the value of each token or example (`with_examples`), for any model whose devices hold whole examples.
"""

from __future__ import annotations

import dataclasses
import io
import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from hpnlp.atomic_file import replace_bytes
from hpnlp.errors import InputError

FILE = "scores.npz"  # beside report.json
EXAMPLES = "examples"  # key of the scores of examples among the sums of a batch
IDENTITY = "identity"
DOCUMENTS = "documents"
LEAST_DOCUMENTS = 5  # with fewer, single examples are the unit of intervals
MAX_EXAMPLES = 2**20  # more are added up in groups of consecutive ones, so that a file has at most about 20 MB
_WEIGHTS = ("weights", "target_weights")  # names of the array of weights in batches
_LABELS = ("labels", "target_labels", "tokens")
_TOLERANCE = 1e-3  # relative difference between the sum over examples and that of the batch, by rounding

Sums = dict[str, Any]


def with_examples(
    function: Callable[[Mapping[str, Any]], tuple[Sums, Any]], batch: Mapping[str, Any]
) -> tuple[Sums, Any]:
    """Calls a function that sums over a batch, and adds the sums of each example.

    Args:
      function: A function of the batch that returns `(sums, other results)`; sums are (total, weight) by name.
      batch: Arrays whose first axis is that of the examples.

    Returns:
      The results of the function. If the batch has weights, the sums also have EXAMPLES: (total, weight) of each example,
      `[B]`, for the loss and each metric, and under IDENTITY a number `[B]` that depends on the labels.
    """
    name = next((name for name in _WEIGHTS if name in batch), None)
    if name is None:
        return function(batch)
    weights = batch[name].astype(jnp.float32)

    def scalars(weights: jax.Array) -> tuple[Sums, Any]:
        sums, other = function({**batch, name: weights})
        metrics = {key: pair for key, pair in sums.items() if key == "loss" or not key.endswith("_loss")}
        return {key: pair for key, pair in metrics.items() if all(map(_is_scalar, pair))}, (sums, other)

    values, pullback, (sums, other) = jax.vjp(scalars, weights, has_aux=True)
    zeros = jax.tree.map(jnp.zeros_like, values)

    def by_example(key: str, part: int) -> jax.Array:
        unit = tuple(jnp.full_like(value, float(i == part)) for i, value in enumerate(values[key]))
        (gradient,) = pullback({**zeros, key: unit})
        return jnp.where(weights == 0, 0.0, weights * gradient).reshape(len(weights), -1).sum(axis=1)

    examples: Sums = {key: (by_example(key, 0), by_example(key, 1)) for key in values}
    return {**sums, EXAMPLES: {**examples, IDENTITY: _identity(batch, weights)}}, other


def _is_scalar(value: ArrayLike) -> bool:
    return jnp.ndim(value) == 0 and jnp.issubdtype(jnp.result_type(value), jnp.floating)


def _identity(batch: Mapping[str, Any], weights: jax.Array) -> jax.Array:
    """A uint32 for each example that depends on its labels of weights other than 0 and their order."""
    labels = batch[next(name for name in _LABELS if name in batch)]
    flat = labels.astype(jnp.uint32).reshape(len(labels), -1) + 1
    if labels.shape == weights.shape:
        flat = jnp.where(weights.reshape(flat.shape) == 0, 0, flat)
    factors = (2 * jnp.arange(flat.shape[1], dtype=jnp.uint32) + 1) * jnp.uint32(2654435761)
    return (flat * factors[None]).sum(axis=1, dtype=jnp.uint32)


@dataclasses.dataclass(frozen=True)
class ExampleScores:
    """Sums of each held-out example, in the order of the evaluation.

    Attributes:
      sums: Name -> float64 (total, weight), `[n]` each. The score is the sum of the totals over that of the weights.
      identity: uint32 `[n]`, which differs for examples with other labels.
      documents: int64 `[n]`, equal for examples of one document or group, whose scores are not independent; None if each is
        independent, or this is not known.
    """

    sums: Mapping[str, tuple[np.ndarray, np.ndarray]]
    identity: np.ndarray
    documents: np.ndarray | None = None

    def write(self, workdir: Path) -> None:
        """Writes FILE to a run directory.

        Args:
          workdir: The directory.
        """
        arrays: dict[str, Any] = {IDENTITY: self.identity}
        if self.documents is not None:
            arrays[DOCUMENTS] = self.documents
        for name, pair in self.sums.items():
            arrays |= {f"{name}_{part}": x.astype(np.float32) for part, x in zip(("sum", "weight"), pair, strict=True)}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        replace_bytes(workdir / FILE, buffer.getvalue())

    @classmethod
    def read(cls, workdir: Path) -> ExampleScores | None:
        """Reads FILE from a run directory.

        Args:
          workdir: The directory.

        Returns:
          The scores; None if there is no file, or it is damaged.
        """
        try:
            with np.load(workdir / FILE, allow_pickle=False) as file:
                arrays = {name: np.asarray(file[name]) for name in file.files}
            identity, documents = arrays.pop(IDENTITY), arrays.pop(DOCUMENTS, None)
            names = sorted(name.removesuffix("_sum") for name in arrays if name.endswith("_sum"))
            sums = {
                name: (arrays[f"{name}_sum"].astype(np.float64), arrays[f"{name}_weight"].astype(np.float64))
                for name in names
            }
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        columns = [array for pair in sums.values() for array in pair] + ([] if documents is None else [documents])
        is_whole = all(array.shape == identity.shape and identity.ndim == 1 for array in columns)
        return cls(sums, identity, documents) if is_whole else None

    @property
    def document_count(self) -> int:
        """Number of documents, if examples share them and there are at least LEAST_DOCUMENTS; otherwise 0."""
        count = 0 if self.documents is None else len(np.unique(self.documents))
        return count if LEAST_DOCUMENTS <= count < len(self.identity) else 0

    def by_document(self) -> ExampleScores:
        """The scores of the documents.

        Returns:
          Sums of the examples of each document, in the order of their numbers; the same scores for a `document_count` of 0.
        """
        if self.documents is None or not self.document_count:
            return self
        numbers, index = np.unique(self.documents, return_inverse=True)
        identity = np.zeros(len(numbers), np.uint32)
        np.add.at(identity, index, self.identity)
        sums = {name: (np.bincount(index, total), np.bincount(index, n)) for name, (total, n) in self.sums.items()}
        return ExampleScores(sums, identity)

    def standard_error(self, name: str) -> float | None:
        """Standard error of a score, over documents or examples.

        Args:
          name: Name of the score.

        Returns:
          The error; None if the examples do not have this score, or are fewer than two.
        """
        return None if name not in self.sums else _error(*self.by_document().sums[name])

    def paired_error(self, other: ExampleScores, name: str) -> float | None:
        """Standard error of the difference to another run's score on the same examples, of the same weights.

        Args:
          other: Scores of the other run.
          name: Name of the score.

        Returns:
          The error; None if the examples or their weights differ, or they do not have this score.
        """
        if name not in self.sums or name not in other.sums or not np.array_equal(self.identity, other.identity):
            return None
        (total, weight), (other_total, other_weight) = self.sums[name], other.sums[name]
        if not np.array_equal(weight, other_weight):
            return None
        difference = dataclasses.replace(self, sums={name: (total - other_total, weight)})
        return difference.standard_error(name)


def with_equal_documents(first: ExampleScores, second: ExampleScores) -> tuple[ExampleScores, ExampleScores]:
    """Scores of the same examples, both with the documents of the first; of the second where it has none.

    Args:
      first: Scores of a model.
      second: Scores of another model.

    Returns:
      Both.
    """
    documents = first.documents if first.documents is not None else second.documents
    return dataclasses.replace(first, documents=documents), dataclasses.replace(second, documents=documents)


def _error(total: np.ndarray, weight: np.ndarray) -> float | None:
    """Standard error of sum(total) / sum(weight), a ratio estimator over independent examples."""
    count, total_weight = int((weight != 0).sum()), float(weight.sum())
    if count < 2 or total_weight <= 0 or not np.isfinite(total).all():
        return None
    residuals = total - total.sum() / total_weight * weight
    return math.sqrt(count / (count - 1) * float((residuals**2).sum())) / total_weight


class Collector:
    """Collects the sums of examples over the batches of an evaluation."""

    def __init__(self, documents: np.ndarray | None = None) -> None:
        """Starts without batches.

        Args:
          documents: Number of the document of each example of the batches, `[batches, B]`; None if it is not known.
        """
        self._documents = documents
        self._sums: dict[str, list[np.ndarray]] = {}  # [2, n] for each batch
        self._identity: list[np.ndarray] = []
        self._of_examples: list[np.ndarray] = []  # documents of the examples
        self._invalid: set[str] = set()

    def add(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Takes the scores of examples from the sums of a batch.

        Args:
          sums: Sums on the host, see `with_examples`.

        Returns:
          The other sums.
        """
        examples = dict(sums.get(EXAMPLES, {}))
        others = {name: value for name, value in sums.items() if name != EXAMPLES}
        if not examples:
            return others
        identity, is_example = np.asarray(examples.pop(IDENTITY)), np.asarray(examples["loss"][1]) != 0
        if self._documents is not None:
            number = len(self._identity)
            if number >= len(self._documents) or self._documents[number].shape != is_example.shape:
                raise InputError(
                    "the held-out batches of the task are not those of its heldout_documents: a task that defines heldout "
                    "defines heldout_documents too, or returns None there"
                )
            self._of_examples.append(self._documents[number][is_example])
        self._identity.append(identity[is_example])
        for name, pair in examples.items():
            values = np.asarray(pair, np.float64)
            # Scores that are no such sums, such as the share of sequences without an error, differ.
            if not np.allclose(
                values.sum(axis=1), np.asarray(sums[name], np.float64), rtol=_TOLERANCE, atol=_TOLERANCE
            ):
                self._invalid.add(name)
            self._sums.setdefault(name, []).append(values[:, is_example])
        return others

    def result(self) -> ExampleScores | None:
        """The scores of all examples.

        Returns:
          The scores; None if the model gives none.
        """
        names = [name for name in self._sums if name not in self._invalid]
        if not names:
            return None
        size = -(-sum(map(len, self._identity)) // MAX_EXAMPLES)
        sums = {name: grouped(np.concatenate(self._sums[name], axis=1), size) for name in names}
        identity = grouped(np.concatenate(self._identity)[None].astype(np.uint32), size)[0]
        documents = np.concatenate(self._of_examples)[:: max(size, 1)] if self._of_examples else None
        return ExampleScores({name: (pair[0], pair[1]) for name, pair in sums.items()}, identity, documents)


def grouped(values: np.ndarray, size: int) -> np.ndarray:
    """Adds up groups of consecutive examples.

    Args:
      values: `[k, n]`.
      size: Examples of a group.

    Returns:
      `[k, groups]`.
    """
    return (
        values
        if size <= 1
        else np.add.reduceat(values, np.arange(0, values.shape[1], size), axis=1, dtype=values.dtype)
    )
