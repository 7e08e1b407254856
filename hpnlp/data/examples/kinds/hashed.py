"""Labelled texts whose words are hashes of 128 bits, for projection networks."""

from __future__ import annotations

import dataclasses

import numpy as np

from hpnlp.data.examples.kind import Numbers, TokenisedExamples, example_labels, example_weights, padded
from hpnlp.data.examples.kinds import Classification
from hpnlp.data.packing import Batch
from hpnlp.data.tokenizers.word_hashes import WORDS
from hpnlp.types import InputError, Tokenizer


@dataclasses.dataclass(frozen=True)
class HashedTexts(Classification):
    """A text with one label, as the hashes of its words.

    A batch has "tokens", int32 [B, T, 4], the bits of the hash of each word; "segment_ids" (1; 0 on padding), int32 [B, T];
    "labels", int32 [B]; "weights", float32 [B]. The first `seq_len` words of a text are read; there are no special tokens.
    The fields are those of `Classification`, without a second text.
    """

    label_fix = ""

    def special_tokens(self, tokenizer: Tokenizer) -> int:
        return 0

    def check_sizes(self, tokenizer: Tokenizer, seq_len: int) -> None:
        if not tokenizer.hashes_words:
            raise InputError(
                f"a {type(tokenizer).__name__} gives no hashes of words: set data.tokenizer='hashed_words', or choose "
                "task='classification'"
            )

    def is_cut(self, lengths: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
        return lengths[:, 0] > WORDS * seq_len

    def row_lengths(self, lengths: np.ndarray, tokenizer: Tokenizer, seq_len: int) -> np.ndarray:
        return np.minimum(lengths[:, 0] // WORDS, seq_len)

    def batch(
        self, examples: TokenisedExamples, numbers: Numbers, count: int, tokenizer: Tokenizer, seq_len: int
    ) -> Batch:
        rows = [examples.part(number, 0)[: WORDS * seq_len].view(np.int32) for number in numbers]
        labels = example_labels(examples, numbers, count)
        ones = [np.ones(len(row) // WORDS, np.int32) for row in rows]
        return {
            "tokens": padded(rows, count, WORDS * seq_len, 0).reshape(count, seq_len, WORDS),
            "segment_ids": padded(ones, count, seq_len, 0),
            "labels": labels,
            "weights": example_weights(len(numbers), count),
        }
