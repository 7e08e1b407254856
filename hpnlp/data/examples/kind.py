"""The interface of a kind of labelled examples, and the arrays that batches of several kinds have."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from hpnlp.data.packing import Batch
from hpnlp.data.reading.fields import LABEL_FIELDS, Column, FieldError
from hpnlp.types import InputError, Tokenizer

# Array of the batches of kinds whose records may lack labels: weights of all examples, with a label or without, for losses by
# a teacher. The array of weights of other losses and of metrics is 0 where there is no label.
TEACHER_WEIGHTS = "teacher_weights"
Numbers = Sequence[int] | np.ndarray  # numbers of examples


@runtime_checkable
class TokenisedExamples(Protocol):
    """Examples of which `Kind.batch` makes batches: `StoredExamples`, or `Unlabelled` ones in memory."""

    def part(self, number: int, part: int) -> np.ndarray:
        """Token ids of one text; see `StoredExamples.part`."""
        ...

    def labels(self, number: int) -> np.ndarray:
        """Labels of one example; see `StoredExamples.labels`."""
        ...

    def grade(self, number: int) -> float:
        """Grade of one example; see `StoredExamples.grade`."""
        ...


class Kind(abc.ABC):
    """The form of the examples of one kind of task.

    An example is stored as the token ids of one or two texts (`parts`), with an array of labels. Special tokens are added and
    texts are cut when a batch is made, so that stored examples do not depend on `seq_len`.

    Attributes:
      has_labels: Whether examples have labels.
      unlabelled: Whether records may lack their labels, for training by a teacher.
      label_fix: Fix of a record without a label, for error messages, besides that of the record; "" for none.
      distinct: Whether each token of a text is stored once, at its first occurrence.
      compares_examples: Whether scores depend on which examples are in one batch, as with in-batch negatives.
    """

    has_labels: bool = False
    unlabelled: bool = False
    label_fix: ClassVar[str] = ""
    distinct: bool = False
    compares_examples: bool = False

    @property
    def parts(self) -> int:
        """Number of texts per example."""
        return 1

    @property
    def parts_per_sequence(self) -> int:
        """Number of texts that stand in one sequence."""
        return 1

    @property
    @abc.abstractmethod
    def columns(self) -> tuple[Column, ...]:
        """Fields of the records."""

    @property
    def inputs(self) -> tuple[Column, ...]:
        """Fields of the records that a prediction reads: by default, all but the labels."""
        return tuple(column for column in self.columns if column.argument not in LABEL_FIELDS)

    @property
    def is_scored_by_share(self) -> bool:
        """Whether the score of examples is a share of them, such as an accuracy: by default, unless they have a number."""
        return all(column.type != "number" for column in self.columns)

    def placeholders(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the fields that are not among the `inputs`, for examples without labels.

        Args:
          values: Config field -> converted value, of the fields of `inputs`.

        Returns:
          `Column.key` -> value, without an effect on the arrays that a model reads to predict.
        """
        return {"label_field": ""} if self.has_labels else {}

    @abc.abstractmethod
    def texts(self, values: Mapping[str, Any]) -> list[str]:
        """Texts of an example.

        Args:
          values: `Column.key`, such as "text_field" -> converted value of the record's field.

        Returns:
          One text per part, as it is shown in reports and read by baselines.
        """

    def text_fields(self, parts: Sequence[str]) -> dict[str, Any]:
        """Fields of an example of given texts, of a kind whose texts stand in one sequence of tokens.

        Args:
          parts: Texts as of `texts`.

        Returns:
          Config field -> value of each of the `inputs`; empty for a tagging without words.

        Raises:
          InputError: Examples of this kind have several sequences, or other inputs than texts.
        """
        raise InputError(f"{type(self).__name__} examples have no single sequence of tokens")

    def check(self, values: Mapping[str, Any]) -> None:
        """Checks the fields of a record against each other.

        Args:
          values: As for `texts`.

        Raises:
          FieldError: The fields do not fit together.
        """
        return None  # most kinds have nothing to check

    def labels(self, values: Mapping[str, Any]) -> list[str]:
        """Labels of an example.

        Args:
          values: As for `texts`.

        Returns:
          Names of classes; "" for a label that is missing.
        """
        return []

    def grade(self, values: Mapping[str, Any]) -> float | None:
        """Number to store with an example: the grade of a pair, or the target of a regression.

        Args:
          values: As for `texts`.

        Returns:
          The number; None for kinds without one.
        """
        return None

    def stored_options(self) -> list[Any]:
        """Options on which stored examples depend, besides the names of the fields.

        Returns:
          JSON-able values.
        """
        return ["distinct"] if self.distinct else []

    def pieces(self, values: Mapping[str, Any]) -> list[str]:
        """Texts to tokenise.

        Args:
          values: As for `texts`.

        Returns:
          Texts whose token ids are the arguments of `join`; by default the texts of the example.
        """
        return self.texts(values)

    def join(self, ids: Sequence[np.ndarray], labels: np.ndarray) -> tuple[Sequence[np.ndarray], np.ndarray]:
        """Makes the arrays to store from the token ids of the `pieces` of an example.

        Args:
          ids: Token ids of each piece.
          labels: Class ids of the `labels`, int32.

        Returns:
          Token ids of each part, and the labels to store: one per example, or one per token.

        Raises:
          FieldError: A text has no tokens.
        """
        if not all(map(len, ids)):
            raise FieldError("has a text without tokens")
        return ids, labels

    def special_tokens(self, tokenizer: Tokenizer) -> int:
        """Number of tokens that are added to the texts of a sequence.

        Returns:
          The number of bos and eos tokens.
        """
        return (tokenizer.bos_id is not None) + (tokenizer.eos_id is not None)

    def check_sizes(self, tokenizer: Tokenizer, seq_len: int) -> None:
        """Checks that a sequence has room for at least one token of each text.

        Args:
          tokenizer: The tokenizer.
          seq_len: Tokens per sequence.

        Raises:
          InputError: `seq_len` is too short, or the tokenizer lacks a token.
        """
        least = self.special_tokens(tokenizer) + self.parts_per_sequence
        if seq_len < least:
            raise InputError(f"data.seq_len={seq_len} leaves no room for text: pass at least {least}")

    def is_cut(self, lengths: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
        """Finds the examples that are cut.

        Args:
          lengths: Tokens of each text, integers [n, parts].
          tokenizer: The tokenizer.
          seq_len: Tokens per sequence.

        Returns:
          bool [n].
        """
        return np.any(lengths > seq_len - self.special_tokens(tokenizer), axis=1)

    def row_lengths(self, lengths: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
        """Tokens of the sequences of examples, by which `data.buckets` divides them.

        Args:
          lengths: Tokens of each text, integers [n, parts].
          tokenizer: The tokenizer.
          seq_len: Tokens per sequence, at most.

        Returns:
          Integers [n]: the smallest T with which `batch` makes the same sequences, apart from padding. By default, that of the
          longest text.
        """
        return np.minimum(lengths.max(axis=1) + self.special_tokens(tokenizer), seq_len)

    def other_limits(self) -> str:
        """Limits other than `seq_len` at which texts are cut.

        Returns:
          Text for the summary, such as " and data.target_len=64".
        """
        return ""

    @abc.abstractmethod
    def batch(
        self, examples: TokenisedExamples, numbers: Numbers, count: int, tokenizer: Tokenizer, seq_len: int
    ) -> Batch:
        """Makes a batch.

        Args:
          examples: The examples.
          numbers: Numbers of the examples of the batch, at most `count`.
          count: Size of the batch, B. After the given examples, the batch is filled with padding of weight 0.
          tokenizer: The tokenizer of the examples.
          seq_len: Tokens per sequence, T.

        Returns:
          Arrays whose first axis is B.
        """


def example_labels(examples: TokenisedExamples, numbers: Numbers, count: int) -> np.ndarray:
    """The only label of each example of a batch, int32 [B]; 0 on padding."""
    labels = np.zeros(count, np.int32)
    labels[: len(numbers)] = [int(examples.labels(number)[0]) for number in numbers]
    return labels


def distinct(text: np.ndarray) -> np.ndarray:
    """Keeps each token of a text, integers [n], once, at its first occurrence."""
    return text[np.sort(np.unique(text, return_index=True)[1])]


def special_token(token: int | None) -> np.ndarray:
    """Makes a text of one special token.

    Args:
      token: Id of the token; None if the tokenizer has none.

    Returns:
      int32 [1], or [0] for None.
    """
    return np.array([] if token is None else [token], np.int32)


def framed(text: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
    """Puts bos before a text and eos after it.

    Args:
      text: Token ids, integers [n]; the end of a longer text is cut off.
      tokenizer: The tokenizer.
      seq_len: Maximum number of tokens of the result.

    Returns:
      Token ids, integers [at most seq_len].
    """
    bos, eos = special_token(tokenizer.bos_id), special_token(tokenizer.eos_id)
    return np.concatenate([bos, text[: seq_len - len(bos) - len(eos)], eos])


def padded(rows: Sequence[np.ndarray], count: int, width: int, fill: int) -> np.ndarray:
    """Pads arrays of different lengths to one array.

    Args:
      rows: At most `count` arrays of at most `width` integers.
      count: Size B of the first axis.
      width: Size T of the second axis.
      fill: Value of padding.

    Returns:
      int32 [B, T].
    """
    out = np.full((count, width), fill, np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def sequences(rows: Sequence[np.ndarray], count: int, width: int, pad_id: int, prefix: str = "") -> Batch:
    """Makes the inputs of a model from sequences.

    Args:
      rows: Token ids of each sequence.
      count: Size B of the batch.
      width: Tokens per sequence, T.
      pad_id: Token id of padding.
      prefix: Prefix of the arrays' names.

    Returns:
      "tokens", "segment_ids" (1; 0 on padding) and "positions" (the indices, also on padding, so that masks over positions
      skip the same tiles as masks over indices), int32 [B, T].
    """
    return {
        f"{prefix}tokens": padded(rows, count, width, pad_id),
        f"{prefix}segment_ids": padded([np.ones(len(row), np.int32) for row in rows], count, width, 0),
        f"{prefix}positions": np.tile(np.arange(width, dtype=np.int32), (count, 1)),
    }


def example_weights(examples: int, count: int) -> np.ndarray:
    """Weights of the examples of a batch.

    Args:
      examples: Number of examples.
      count: Size B of the batch.

    Returns:
      float32 [B]: 1 for each example, 0 for the padding after them.
    """
    return (np.arange(count) < examples).astype(np.float32)
