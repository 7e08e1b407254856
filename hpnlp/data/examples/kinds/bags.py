"""Labelled bags: several texts with one label, each of which is left out in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpnlp.data.examples.kind import Kind, Numbers, TokenisedExamples, distinct, example_weights, padded
from hpnlp.data.examples.store import NO_LABEL, UNLABELLED
from hpnlp.data.packing import Batch
from hpnlp.data.reading.fields import Column, FieldError
from hpnlp.types import InputError, Tokenizer


@dataclasses.dataclass(frozen=True)
class LabelledBags(Kind):
    """Texts that belong together, such as titles of the documentation of one module, with one label of all.

    A batch has "tokens" (the texts one after another, without special tokens), "segment_ids" (number of the text from 1 on;
    0 on padding) and "positions", int32 [B, T]; "labels", int32 [B]; "bag", -1, int32 [B], in place of which
    `bag_examples.BagExamples` puts the number of a training bag; "weights", float32 [B]. If the texts have more than `seq_len`
    tokens, each keeps at most `seq_len` / number of texts.

    Attributes:
      texts_field: Field of the texts.
      label_field: Field of the label; not read without `has_labels`.
      max_texts: Largest number of texts.
      distinct: Keep each token of a text once, at its first occurrence.
      has_labels: Whether records have labels; otherwise topics take their place.
    """

    texts_field: str
    label_field: str
    max_texts: int
    distinct: bool = False
    has_labels: bool = True
    compares_examples = True

    @property
    def columns(self) -> tuple[Column, ...]:
        label = [Column(self.label_field, "label_field", "label")] if self.has_labels else []
        return Column(self.texts_field, "texts_field", "texts"), *label

    def check(self, values: Mapping[str, Any]) -> None:
        count = len(values["texts_field"])
        if count < 2:
            raise FieldError(
                f"field {self.texts_field!r} has one text, expected at least 2, of which each is compared with the others: "
                "leave the record out, or join bags of one label"
            )
        if count > self.max_texts:
            raise FieldError(
                f"field {self.texts_field!r} has {count} texts, and data.max_texts={self.max_texts}: raise it, or divide it"
            )

    def texts(self, values: Mapping[str, Any]) -> list[str]:
        return ["\n".join(values["texts_field"])]

    def pieces(self, values: Mapping[str, Any]) -> list[str]:
        return values["texts_field"]

    def labels(self, values: Mapping[str, Any]) -> list[str]:
        return [values["label_field"]] if self.has_labels else []

    def join(self, ids: Sequence[np.ndarray], labels: np.ndarray) -> tuple[Sequence[np.ndarray], np.ndarray]:
        if empty := [number for number, text in enumerate(ids, 1) if not len(text)]:
            raise FieldError(f"has no tokens in text {empty[0]} of its bag")
        if self.distinct:
            ids = [distinct(text) for text in ids]
        # The first token of each text carries the label, by which `batch` finds the texts.
        label = labels[0] if len(labels) else UNLABELLED
        stored = [np.where(np.arange(len(text)) == 0, label, NO_LABEL).astype(np.int32) for text in ids]
        return [np.concatenate(ids)], np.concatenate(stored)

    def special_tokens(self, tokenizer: Tokenizer) -> int:
        return 0

    def check_sizes(self, tokenizer: Tokenizer, seq_len: int) -> None:
        if seq_len < self.max_texts:
            raise InputError(
                f"data.seq_len={seq_len} leaves no room for a token of each of data.max_texts={self.max_texts} texts: raise it"
            )

    def batch(
        self, examples: TokenisedExamples, numbers: Numbers, count: int, tokenizer: Tokenizer, seq_len: int
    ) -> Batch:
        rows, segments, labels = [], [], np.zeros(count, np.int32)
        for row, number in enumerate(numbers):
            ids, of_tokens = examples.part(number, 0), examples.labels(number)
            starts = of_tokens != NO_LABEL
            labels[row] = max(of_tokens[starts][0], 0)  # texts to predict the topic of have none
            segment = np.cumsum(starts)
            if len(ids) > seq_len:
                first = np.flatnonzero(starts)
                is_kept = np.arange(len(ids)) - first[segment - 1] < seq_len // len(first)
                ids, segment = ids[is_kept], segment[is_kept]
            rows.append(ids)
            segments.append(segment)
        return {
            "tokens": padded(rows, count, seq_len, tokenizer.pad_id),
            "segment_ids": padded(segments, count, seq_len, 0),
            "positions": np.tile(np.arange(seq_len, dtype=np.int32), (count, 1)),
            "labels": labels,
            "bag": np.full(count, -1, np.int32),
            "weights": example_weights(len(numbers), count),
        }
