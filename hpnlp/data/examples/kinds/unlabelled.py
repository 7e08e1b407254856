"""Examples without labels, in memory: the texts that a trained model predicts the labels of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpnlp.data.examples.kind import Kind
from hpnlp.data.reading.fields import TYPES, Column, FieldError
from hpnlp.types import Tokenizer


def _refuse(number: int, error: FieldError) -> None:
    raise error


class Unlabelled:
    """Tokenised examples of a kind, for `Kind.batch`. Labels are class 0.

    Attributes:
      values: Config field -> value of the field that it names, for each example.
      lengths: Tokens of each text, int64 [n, parts].
    """

    def __init__(
        self,
        kind: Kind,
        tokenizer: Tokenizer,
        values: Sequence[Mapping[str, Any]],
        report_bad: Callable[[int, FieldError], None] = _refuse,
    ):
        """Tokenises examples.

        Args:
          kind: Kind of the examples.
          tokenizer: The tokenizer.
          values: For each example, the values of `kind.inputs` by their arguments, as `converted` returns them.
          report_bad: Called with the number of an example and its error (a text without tokens, or fields that do not fit
            together), which it raises, or else the example is empty.
        """
        self.values = values
        complete = [{**kind.placeholders(example), **example} for example in values]
        pieces = [[piece.encode() for piece in kind.pieces(example)] for example in complete]
        encoded = iter(tokenizer.encode_batch([piece for example in pieces for piece in example]))
        self._parts: list[Sequence[np.ndarray]] = []
        self._labels: list[np.ndarray] = []
        for number, (texts, example) in enumerate(zip(pieces, complete, strict=True)):
            ids, labels = [next(encoded) for _ in texts], np.zeros(len(kind.labels(example)), np.int32)
            try:
                token_ids, labels = kind.join(ids, labels)
            except FieldError as error:
                report_bad(number, error)
                token_ids = [np.zeros(0, np.int32)] * kind.parts
            self._parts.append(token_ids)
            self._labels.append(labels)
        self.lengths = np.array([[len(part) for part in token_ids] for token_ids in self._parts], np.int64)
        self.lengths = self.lengths.reshape(-1, kind.parts)

    def part(self, number: int, part: int) -> np.ndarray:
        """Token ids of one text; see `StoredExamples.part`."""
        return self._parts[number][part]

    def labels(self, number: int) -> np.ndarray:
        """Class 0 in the place of each label; see `StoredExamples.labels`."""
        return self._labels[number]

    def grade(self, number: int) -> float:
        """0 in the place of a grade; see `StoredExamples.grade`."""
        return 0.0


def converted(kind: Kind, record: Mapping[str, Any]) -> dict[str, Any]:
    """`Column.key`, such as "text_field" -> converted value, of the fields of a record that a prediction reads.

    Raises FieldError if a field is absent or invalid, or the fields do not fit together.
    """
    values = {}
    for column in kind.inputs:
        if column.name not in record:
            raise FieldError(f"has no field {column.name!r}, only {', '.join(map(repr, record)) or 'none'}")
        try:
            values[column.key] = TYPES[column.type][0](record[column.name])
        except FieldError as error:
            raise FieldError(f"field {column.name!r} {error}") from error
    kind.check({**kind.placeholders(values), **values})
    return values


def as_record(kind: Kind, text: Any) -> Mapping[str, Any]:
    """The record of an example that is given as a text, or as the texts of a pair in a sequence; a mapping is a record already.

    Raises FieldError for another number of texts than examples of this kind have.
    """
    if isinstance(text, Mapping):
        return text
    columns: Sequence[Column] = kind.inputs
    fields = [text] if len(columns) == 1 else text
    if len(columns) > 1 and (
        isinstance(text, str | bytes) or not isinstance(text, Sequence) or len(text) != len(columns)
    ):
        names = ", ".join(column.name for column in columns)
        raise FieldError(f"is {text!r:.80}: expected {len(columns)} texts ({names}): pass ({names})")
    return {column.name: field for column, field in zip(columns, fields, strict=True)}
