"""Texts with a hidden span and a document, and the documents of all of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpnlp.data.examples.config import ExampleConfig
from hpnlp.data.examples.dataset import Examples
from hpnlp.data.examples.kind import Kind, Numbers, TokenisedExamples, framed, padded, sequences, special_token
from hpnlp.data.packing import Batch
from hpnlp.data.reading.fields import Column, FieldError
from hpnlp.types import InputError, Tokenizer, option

TEXT, HEAD, ANSWER, DOCUMENT = range(4)  # the texts of an example


@dataclasses.dataclass(frozen=True)
class HiddenSpans(Kind):
    """A text whose answer is hidden, with a document.

    The answer is hidden where the text first has it as whole words ("Iran", not the beginning of "Iranian"), or else first.

    An example is stored as four texts: the text, its part up to the end of the answer, the answer, and the document.

    A batch has "tokens" (bos text eos, with a mask for each token of the answer), "segment_ids" (1; 0 on padding) and
    "positions", int32 [B, T]; "targets", the indices of the masks, and "labels", the tokens of the answer, int32 [B, M], and
    "weights", float32 [B, M], 1 for each token of the answer.

    Attributes:
      text_field: Field of the text.
      answer_field: Field of the answer, a part of the text.
      document_field: Field of the document.
      answer_len: Largest number of tokens of an answer, M.
    """

    text_field: str
    answer_field: str
    document_field: str
    answer_len: int

    @property
    def parts(self) -> int:
        return 4

    @property
    def is_scored_by_share(self) -> bool:
        return False  # the primary metric is the loss

    @property
    def columns(self) -> tuple[Column, ...]:
        return (
            Column(self.text_field, "text_field", "text"),
            Column(self.answer_field, "answer_field", "text"),
            Column(self.document_field, "document_field", "text"),
        )

    def check(self, values: Mapping[str, Any]) -> None:
        if values["answer_field"] not in values["text_field"]:
            raise FieldError(
                f"field {self.answer_field!r} is {values['answer_field']!r:.80}, which is no part of field {self.text_field!r}"
            )

    def texts(self, values: Mapping[str, Any]) -> list[str]:
        before, answer, _, document = self.pieces(values)
        return [values["text_field"], before + answer, answer, document]

    def pieces(self, values: Mapping[str, Any]) -> list[str]:
        text, answer = values["text_field"], values["answer_field"]
        start = text.find(answer)
        if match := re.search(rf"(?!\B\w){re.escape(answer)}(?<!\w\B)", text):  # words do not go on at either end
            start = match.start()
        return [text[:start], answer, text[start + len(answer) :], values["document_field"]]

    def join(self, ids: Sequence[np.ndarray], labels: np.ndarray) -> tuple[Sequence[np.ndarray], np.ndarray]:
        before, answer, after, document = ids
        for tokens, field in ((answer, self.answer_field), (document, self.document_field)):
            if not len(tokens):
                raise FieldError(f"field {field!r} has no tokens")
        if len(answer) > self.answer_len:
            raise FieldError(
                f"field {self.answer_field!r} has {len(answer)} tokens, more than data.answer_len={self.answer_len}: raise it, "
                "or shorten the answer"
            )
        return [np.concatenate([before, answer, after]), np.concatenate([before, answer]), answer, document], labels

    def is_cut(self, lengths: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
        return super().is_cut(lengths[:, :1], tokenizer, seq_len)

    def row_lengths(self, lengths: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
        return super().row_lengths(lengths[:, :1], tokenizer, seq_len)

    def batch(
        self, examples: TokenisedExamples, numbers: Numbers, count: int, tokenizer: Tokenizer, seq_len: int
    ) -> Batch:
        start, rows, targets, answers = len(special_token(tokenizer.bos_id)), [], [], []
        for number in numbers:
            text, head, answer = (examples.part(number, part).astype(np.int32) for part in (TEXT, HEAD, ANSWER))
            hidden = np.arange(len(head) - len(answer), len(head))
            text[hidden] = tokenizer.find_mask_id()
            rows.append(framed(text, tokenizer, seq_len))
            targets.append(start + hidden)
            answers.append(answer)
        weights = padded([np.ones(len(answer)) for answer in answers], count, self.answer_len, 0)
        return {
            **sequences(rows, count, seq_len, tokenizer.pad_id),
            "targets": padded(targets, count, self.answer_len, 0),
            "labels": padded(answers, count, self.answer_len, 0),
            "weights": weights.astype(np.float32),
        }


@dataclasses.dataclass(frozen=True)
class HiddenSpansConfig(ExampleConfig):
    """Texts with a hidden span, and the documents among which a model searches."""

    path: str = option(
        "key_values",
        '"key_values" (generated documents with a key and a value, and texts with a part of the key), "stdlib_names" (passages '
        "of docstrings of the running Python's standard library, with a hidden name), or records: as for other tasks, "
        "files of JSONL, `.json`, CSV, `.tsv`, Parquet or `.npz`.",
    )
    tokenizer: str = option(
        "words(8192)",
        '"words(CAP)", "words(CAP, by=whitespace)", "bytes", "bpe(SIZE)", or the path of a tokenizer.json.',
    )
    seq_len: int = option(64, "Tokens of a text, at most.")
    text_field: str = option("text", "Field of records that holds the text.")
    answer_field: str = option(
        "answer", "Field that holds the span of the text that is hidden, where it first stands as whole words."
    )
    document_field: str = option(
        "document",
        "Field that holds a document. The different documents of all records are searched, but for records that "
        "heldout_examples sets aside.",
    )
    document_role: str = option(
        "gold",
        'Document of a record: "gold", that with the answer, which is counted if it is retrieved first, and not used '
        'otherwise; or "source", that which the text is taken from, and which is never retrieved for it.',
        among=("gold", "source"),
    )
    answer_len: int = option(10, "Largest number of tokens of an answer.", least=1)
    document_len: int = option(64, "Tokens of a document, at most.", least=1)
    buckets: int = option(1, "Not supported: texts are joined with documents of one length.", least=1, most=1)

    def kind(self) -> HiddenSpans:
        return HiddenSpans(self.text_field, self.answer_field, self.document_field, self.answer_len)


class ExamplesWithDocuments(Examples):
    """Texts with hidden spans, whose batches also have the number of each text's document.

    A batch has the arrays of `HiddenSpans`, and "gold" and "source", int32 [B], the number of the document or -1.

    Attributes:
      documents: Token ids of each document (bos document eos).
    """

    config: HiddenSpansConfig

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        ids: dict[bytes, int] = {}
        self.documents: list[np.ndarray] = []
        self._numbers = {side: np.array(list(self._number(side, ids)), np.int32) for side in self.stored}
        longest = max(map(len, self.documents))
        if longest > self.config.document_len:
            raise InputError(
                f"data.document_len={self.config.document_len}: the longest document has {longest} tokens: raise it to "
                "that, or split the documents"
            )
        texts = [lengths for stored in self.stored.values() for lengths in stored.lengths()]
        longest = int(self.kind.row_lengths(np.concatenate(texts), self.tokenizer, 1 << 40).max())
        if longest > self.seq_len:
            raise InputError(
                f"data.seq_len={self.seq_len}: the longest text has {longest} tokens: raise it to that, or shorten the texts"
            )

    def _number(self, side: str, ids: dict[bytes, int]) -> Iterator[int]:
        """Number of the document of each example of a set; new documents are added."""
        for example in range(self.stored[side].count):
            document = self.stored[side].part(example, DOCUMENT).astype(np.int32)
            number = ids.setdefault(document.tobytes(), len(ids))
            if number == len(self.documents):
                self.documents.append(framed(document, self.tokenizer, 1 << 40))
            yield number

    def number_as(self, documents: Sequence[np.ndarray]) -> None:
        """Gives documents the numbers that they have in a run, and -1 to documents that the run lacks.

        Args:
          documents: Token ids of the documents of the run, in their order.

        Raises:
          InputError: The run lacks the document with the answer of a held-out record.
        """
        known = {document.astype(np.int32).tobytes(): number for number, document in enumerate(documents)}
        numbers = np.array([known.get(document.tobytes(), -1) for document in self.documents], np.int32)
        scored = np.unique(np.concatenate([self._numbers[side] for side in self.heldout_sets]))
        unknown = scored[numbers[scored] < 0]
        if unknown.size and self.config.document_role == "gold":
            example = self.tokenizer.decode(self.documents[unknown[0]]).decode("utf-8", "replace")
            raise InputError(
                f"{unknown.size} of {scored.size} documents of held-out records are none of the {len(known)} that the run "
                f"searches, such as {example!r:.60}: leave these records out"
            )
        self._numbers = {side: numbers[old] for side, old in self._numbers.items()}
        self.documents = list(documents)

    def _batch(self, side: str, numbers: np.ndarray, count: int, width: int | None = None) -> Batch:
        none = np.full(count, -1, np.int32)
        documents = none.copy()
        documents[: len(numbers)] = self._numbers[side][numbers]
        is_gold = self.config.document_role == "gold"
        roles = {"gold": documents if is_gold else none, "source": none if is_gold else documents}
        return super()._batch(side, numbers, count, width) | roles
