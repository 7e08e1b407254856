"""Kinds of labelled examples: the fields of a record, the token ids and labels to store, and the arrays of a batch.

Shape letters: B batch, T `seq_len`, U `target_len`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpnlp.data.examples.kind import (
    TEACHER_WEIGHTS,
    Kind,
    Numbers,
    TokenisedExamples,
    distinct,
    example_labels,
    example_weights,
    framed,
    padded,
    sequences,
    special_token,
)
from hpnlp.data.examples.store import NO_LABEL
from hpnlp.data.packing import Batch
from hpnlp.data.reading.fields import Column, FieldError
from hpnlp.types import InputError, Tokenizer

_LABEL_FIX = "; or let a teacher label it: pass data.unlabelled=True and distill.teacher=RUN"


@dataclasses.dataclass(frozen=True)
class Classification(Kind):
    """A text or a pair of texts, with one label.

    A batch has "tokens" (bos text eos, or bos text eos second eos), "segment_ids" (1; 0 on padding), "positions" and
    "token_types" (1 on the second text and its eos, otherwise 0), int32 [B, T]; "labels", int32 [B]; "weights", float32 [B].
    If a pair is too long, the longer text is cut first. With `unlabelled`, it also has TEACHER_WEIGHTS, float32 [B].

    Attributes:
      text_field: Field of the text.
      pair_field: Field of the second text; "" for single texts.
      label_field: Field of the label.
      unlabelled: Whether records may lack the label.
    """

    text_field: str
    pair_field: str
    label_field: str
    unlabelled: bool = dataclasses.field(default=False, kw_only=True)
    has_labels = True
    label_fix = _LABEL_FIX

    @property
    def parts(self) -> int:
        return 2 if self.pair_field else 1

    @property
    def parts_per_sequence(self) -> int:
        return self.parts

    def text_fields(self, parts: Sequence[str]) -> dict[str, Any]:
        return dict(zip(("text_field", "pair_field"), parts, strict=False))

    @property
    def columns(self) -> tuple[Column, ...]:
        pair = [Column(self.pair_field, "pair_field", "text")] if self.pair_field else []
        label = "optional label" if self.unlabelled else "label"
        return Column(self.text_field, "text_field", "text"), *pair, Column(self.label_field, "label_field", label)

    def texts(self, values: Mapping[str, Any]) -> list[str]:
        return [values[name] for name in ("text_field", "pair_field")[: self.parts]]

    def labels(self, values: Mapping[str, Any]) -> list[str]:
        return [values["label_field"]]

    def special_tokens(self, tokenizer: Tokenizer) -> int:
        return (tokenizer.bos_id is not None) + self.parts * (tokenizer.eos_id is not None)

    def is_cut(self, lengths: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
        return lengths.sum(axis=1) > seq_len - self.special_tokens(tokenizer)

    def row_lengths(self, lengths: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
        return np.minimum(lengths.sum(axis=1) + self.special_tokens(tokenizer), seq_len)

    def batch(
        self, examples: TokenisedExamples, numbers: Numbers, count: int, tokenizer: Tokenizer, seq_len: int
    ) -> Batch:
        room = seq_len - self.special_tokens(tokenizer)
        bos, eos = special_token(tokenizer.bos_id), special_token(tokenizer.eos_id)
        rows, types = [], []
        for number in numbers:
            texts = [examples.part(number, part) for part in range(self.parts)]
            first, *second = (text[:length] for text, length in zip(texts, _cut_lengths(texts, room), strict=True))
            pair = [second[0], eos] if second else []
            rows.append(np.concatenate([bos, first, eos, *pair]))
            types.append(np.arange(len(rows[-1])) >= len(bos) + len(first) + len(eos))
        labels = example_labels(examples, numbers, count)
        return {
            **sequences(rows, count, seq_len, tokenizer.pad_id),
            "token_types": padded(types, count, seq_len, 0),
            **_labelled(labels, example_weights(len(numbers), count), self.unlabelled),
        }


def _labelled(labels: np.ndarray, weights: np.ndarray, unlabelled: bool) -> Batch:
    """Labels and weights of a batch. With `unlabelled`, labels below 0 get weight 0, and TEACHER_WEIGHTS has all weights."""
    if not unlabelled:
        return {"labels": labels, "weights": weights}
    is_known = labels >= 0
    return {"labels": labels * is_known, "weights": weights * is_known, TEACHER_WEIGHTS: weights}


def _cut_lengths(texts: Sequence[np.ndarray], room: int) -> list[int]:
    """Lengths to which one or two texts are cut so that they fit into `room` tokens: the longer text is cut first.

    If both are cut and `room` is odd, the longer text keeps one token more, as in Hugging Face `tokenizers`.
    """
    lengths = [len(text) for text in texts]
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    short = min(*lengths, room // 2)
    return [room - short, short] if lengths[0] > lengths[1] else [short, room - short]


# Tokenised with every example: their ids show whether the tokenizer has tokens for the spaces between words.
_SPACES = (" ", "a", "a a")


@dataclasses.dataclass(frozen=True)
class Tagging(Kind):
    """Words with one label each.

    A batch has "tokens" (bos words eos), "segment_ids" (1; 0 on padding), "positions" and "labels", int32 [B, T], and
    "weights", float32 [B, T]. The first token of a word, apart from a token of the space before it, carries the label and has
    weight 1; all other tokens have weight 0. Words are tokenised one by one, each but the first with a space before it, unless
    the tokenizer has no tokens for spaces between words. With `unlabelled`, a batch also has TEACHER_WEIGHTS, float32 [B, T].

    Attributes:
      words_field: Field of the words.
      labels_field: Field of the labels.
      unlabelled: Whether records may lack the labels, all of them.
    """

    words_field: str
    labels_field: str
    unlabelled: bool = dataclasses.field(default=False, kw_only=True)
    has_labels = True
    label_fix = _LABEL_FIX

    def text_fields(self, parts: Sequence[str]) -> dict[str, Any]:
        (text,) = parts
        return {"words_field": words} if (words := text.split()) else {}

    @property
    def columns(self) -> tuple[Column, ...]:
        labels = "optional labels" if self.unlabelled else "labels"
        return Column(self.words_field, "words_field", "words"), Column(self.labels_field, "labels_field", labels)

    def placeholders(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"labels_field": [""] * len(values["words_field"])}

    def check(self, values: Mapping[str, Any]) -> None:
        words, labels = len(values["words_field"]), len(self.labels(values))
        if words != labels:
            raise FieldError(
                f"field {self.words_field!r} has {words} words and field {self.labels_field!r} {labels} labels, expected as "
                "many"
            )

    def texts(self, values: Mapping[str, Any]) -> list[str]:
        return [" ".join(values["words_field"])]

    def labels(self, values: Mapping[str, Any]) -> list[str]:
        return values["labels_field"] or [""] * len(values["words_field"])

    def pieces(self, values: Mapping[str, Any]) -> list[str]:
        first, *others = values["words_field"]
        return [*_SPACES, first, *(f" {word}" for word in others)]

    def join(self, ids: Sequence[np.ndarray], labels: np.ndarray) -> tuple[Sequence[np.ndarray], np.ndarray]:
        space, letter, letters, *words = ids
        # Decoding inserts spaces between words. Tokens that begin with a space (byte-level BPE) differ from those that do not.
        has_no_space = np.array_equal(letters, np.concatenate([letter, letter]))
        stored = []
        for number, label in enumerate(labels):
            word = words[number]
            is_spaced = number > 0 and len(space) > 0 and np.array_equal(word[: len(space)], space)
            if is_spaced and has_no_space:
                words[number] = word = word[len(space) :]
            start = len(space) if is_spaced and not has_no_space else 0
            if len(word) <= start:
                raise FieldError(f"has no tokens for word {number + 1}")
            stored.append(np.full(len(word), NO_LABEL, np.int32))
            stored[-1][start] = label
        return [np.concatenate(words)], np.concatenate(stored)

    def batch(
        self, examples: TokenisedExamples, numbers: Numbers, count: int, tokenizer: Tokenizer, seq_len: int
    ) -> Batch:
        rows = [framed(examples.part(number, 0), tokenizer, seq_len) for number in numbers]
        room = seq_len - self.special_tokens(tokenizer)
        before = np.full(len(special_token(tokenizer.bos_id)), NO_LABEL, np.int32)
        stored = [np.concatenate([before, examples.labels(number)[:room]]) for number in numbers]
        labels = padded(stored, count, seq_len, NO_LABEL)
        is_first = labels != NO_LABEL
        return {
            **sequences(rows, count, seq_len, tokenizer.pad_id),
            **_labelled(np.where(is_first, labels, 0), is_first.astype(np.float32), self.unlabelled),
        }


@dataclasses.dataclass(frozen=True)
class Seq2Seq(Kind):
    """A source text with the target text to produce.

    A batch has "tokens" (bos source eos), "segment_ids" (1; 0 on padding) and "positions", int32 [B, T]; "target_tokens" (bos
    target; pad in place of bos if the tokenizer has none), "target_labels" (target eos), "target_segment_ids" and
    "target_positions", int32 [B, U], and "target_weights", float32 [B, U], 1 on the labels of the target. A target that is cut
    has no eos.

    Attributes:
      source_field: Field of the source.
      target_field: Field of the target.
      target_len: Tokens per target, U.
    """

    source_field: str
    target_field: str
    target_len: int

    @property
    def parts(self) -> int:
        return 2

    @property
    def columns(self) -> tuple[Column, ...]:
        return Column(self.source_field, "source_field", "text"), Column(self.target_field, "target_field", "text")

    @property
    def inputs(self) -> tuple[Column, ...]:
        return self.columns[:1]

    def placeholders(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"target_field": values["source_field"]}

    def texts(self, values: Mapping[str, Any]) -> list[str]:
        return [values["source_field"], values["target_field"]]

    def check_sizes(self, tokenizer: Tokenizer, seq_len: int) -> None:
        super().check_sizes(tokenizer, seq_len)
        if self.target_len < 2:
            raise InputError(f"data.target_len={self.target_len} leaves no room for text and eos: pass at least 2")
        if tokenizer.eos_id is None:
            raise InputError("data.tokenizer has no eos, with which targets end: pass another tokenizer")

    def is_cut(self, lengths: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
        return super().is_cut(lengths[:, :1], tokenizer, seq_len) | (lengths[:, 1] + 1 > self.target_len)

    def row_lengths(self, lengths: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
        return super().row_lengths(lengths[:, :1], tokenizer, seq_len)

    def other_limits(self) -> str:
        return f" and data.target_len={self.target_len}"

    def batch(
        self, examples: TokenisedExamples, numbers: Numbers, count: int, tokenizer: Tokenizer, seq_len: int
    ) -> Batch:
        start = tokenizer.pad_id if tokenizer.bos_id is None else tokenizer.bos_id
        sources = [framed(examples.part(number, 0), tokenizer, seq_len) for number in numbers]
        targets = [examples.part(number, 1) for number in numbers]
        labels = [np.concatenate([text, special_token(tokenizer.eos_id)])[: self.target_len] for text in targets]
        inputs = [np.append(start, row)[:-1] for row in labels]
        target = sequences(inputs, count, self.target_len, tokenizer.pad_id, "target_")
        return {
            **sequences(sources, count, seq_len, tokenizer.pad_id),
            **target,
            "target_labels": padded(labels, count, self.target_len, tokenizer.pad_id),
            "target_weights": target["target_segment_ids"].astype(np.float32),
        }


@dataclasses.dataclass(frozen=True)
class Texts(Kind):
    """A text without a label, as dual encoders read it to make its vector.

    A batch has "tokens" (bos text eos), "segment_ids" (1; 0 on padding) and "positions", int32 [B, T].

    Attributes:
      text_field: Field of the text.
      distinct: As for `Pairs`.
    """

    text_field: str
    distinct: bool = False

    @property
    def columns(self) -> tuple[Column, ...]:
        return (Column(self.text_field, "text_field", "text"),)

    def texts(self, values: Mapping[str, Any]) -> list[str]:
        return [values["text_field"]]

    def join(self, ids: Sequence[np.ndarray], labels: np.ndarray) -> tuple[Sequence[np.ndarray], np.ndarray]:
        ids, labels = super().join(ids, labels)
        return [distinct(text) for text in ids] if self.distinct else ids, labels

    def batch(
        self, examples: TokenisedExamples, numbers: Numbers, count: int, tokenizer: Tokenizer, seq_len: int
    ) -> Batch:
        rows = [framed(examples.part(number, 0), tokenizer, seq_len) for number in numbers]
        return sequences(rows, count, seq_len, tokenizer.pad_id)


@dataclasses.dataclass(frozen=True)
class Pairs(Kind):
    """Two texts that belong together, each in a sequence of its own.

    A batch has "tokens" (bos text eos), "segment_ids" (1; 0 on padding) and "positions" of the first texts, "pair_tokens",
    "pair_segment_ids" and "pair_positions" of the second, int32 [B, T], and "weights", float32 [B]. Names of the arrays of
    more texts, which do not belong to the first, begin with "negative_1_", "negative_2_", ...

    Attributes:
      text_field: Field of the first text.
      pair_field: Field of the second text.
      distinct: Keep each token of a text once, at its first occurrence.
      negative_fields: Fields of texts that do not belong to the first.
    """

    text_field: str
    pair_field: str
    distinct: bool = False
    negative_fields: tuple[str, ...] = ()
    compares_examples = True

    @property
    def parts(self) -> int:
        return 2 + len(self.negative_fields)

    @property
    def columns(self) -> tuple[Column, ...]:
        negatives = (Column(name, "negative_fields", "text") for name in self.negative_fields)
        return Column(self.text_field, "text_field", "text"), Column(self.pair_field, "pair_field", "text"), *negatives

    @property
    def inputs(self) -> tuple[Column, ...]:
        return self.columns[:2]

    def placeholders(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {column.key: values["pair_field"] for column in self.columns[2:]}

    def texts(self, values: Mapping[str, Any]) -> list[str]:
        return [values[column.key] for column in self.columns if column.type == "text"]

    def join(self, ids: Sequence[np.ndarray], labels: np.ndarray) -> tuple[Sequence[np.ndarray], np.ndarray]:
        ids, labels = super().join(ids, labels)
        return [distinct(text) for text in ids] if self.distinct else ids, labels

    def batch(
        self, examples: TokenisedExamples, numbers: Numbers, count: int, tokenizer: Tokenizer, seq_len: int
    ) -> Batch:
        batch: Batch = {"weights": example_weights(len(numbers), count)}
        for part, prefix in enumerate(("", "pair_", *(f"negative_{i}_" for i in range(1, self.parts - 1)))):
            texts = [framed(examples.part(number, part), tokenizer, seq_len) for number in numbers]
            batch = {**batch, **sequences(texts, count, seq_len, tokenizer.pad_id, prefix)}
        return batch
