"""Pairs of texts with a label or a grade, from which dual encoders learn the losses of single pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpnlp.data.examples.kind import Numbers, TokenisedExamples, example_labels
from hpnlp.data.examples.kinds import Pairs
from hpnlp.data.packing import Batch
from hpnlp.data.reading.fields import Column, FieldError
from hpnlp.types import Tokenizer


@dataclasses.dataclass(frozen=True)
class LabelledPairs(Pairs):
    """Two texts with a label of the pair, such as that of natural language inference.

    A batch of `Pairs` with "labels", int32 [B], besides.

    Attributes:
      label_field: Field of the label.
    """

    label_field: str = ""
    has_labels = True
    compares_examples = False

    @property
    def columns(self) -> tuple[Column, ...]:
        return *super().columns, Column(self.label_field, "label_field", "label")

    def placeholders(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"label_field": ""}

    def labels(self, values: Mapping[str, Any]) -> list[str]:
        return [values["label_field"]]

    def batch(
        self, examples: TokenisedExamples, numbers: Numbers, count: int, tokenizer: Tokenizer, seq_len: int
    ) -> Batch:
        labels = example_labels(examples, numbers, count)
        return {**super().batch(examples, numbers, count, tokenizer, seq_len), "labels": labels}


@dataclasses.dataclass(frozen=True)
class GradedPairs(Pairs):
    """Two texts with a grade of their similarity.

    A batch of `Pairs` with "grades", float32 [B], besides.

    Attributes:
      grade_field: Field of the grade, a number.
      argument: Config field that holds the name of that field.
      grade_range: Lowest and highest grade, which are stored as 0 and 1, and grades between them in proportion; None to keep
        any grade as it is.
    """

    grade_field: str = ""
    argument: str = "label_field"
    grade_range: tuple[float, float] | None = None
    compares_examples = False

    @property
    def columns(self) -> tuple[Column, ...]:
        return *super().columns, Column(self.grade_field, self.argument, "number")

    def placeholders(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self.argument: self.grade_range[0] if self.grade_range else 0.0}

    def check(self, values: Mapping[str, Any]) -> None:
        if self.grade_range and not self.grade_range[0] <= values[self.argument] <= self.grade_range[1]:
            least, most = self.grade_range
            raise FieldError(
                f"field {self.grade_field!r} is {values[self.argument]:g}, expected {least:g} to {most:g} (data.label_range)"
            )

    def grade(self, values: Mapping[str, Any]) -> float:
        least, most = self.grade_range or (0.0, 1.0)
        return (values[self.argument] - least) / (most - least)

    def stored_options(self) -> list[Any]:
        return [*super().stored_options(), ["grade_range", self.grade_range]]

    def batch(
        self, examples: TokenisedExamples, numbers: Numbers, count: int, tokenizer: Tokenizer, seq_len: int
    ) -> Batch:
        grades = np.zeros(count, np.float32)
        grades[: len(numbers)] = [examples.grade(number) for number in numbers]
        return {**super().batch(examples, numbers, count, tokenizer, seq_len), "grades": grades}
