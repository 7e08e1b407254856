"""Masked language modelling: masks of single tokens (BERT) or of spans, reproducible for each sequence and epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpnlp.data.batches import Batches
from hpnlp.data.corpus import Corpus
from hpnlp.data.packing import Batch
from hpnlp.types import InputError, Tokenizer

_MASK, _RANDOM = 0.8, 0.1  # shares of the selected tokens that become the mask or a random token; the others stay
_MAX_SPAN = 100
_HELDOUT_SEED = 0  # every evaluation of every run masks the same tokens of held-out text


def sequence_rng(seed: int, number: int) -> np.random.Generator:
    """The counter-based random generator of one sequence, which depends on (seed, number) alone.

    The number is that of the sequence in the stream of all epochs, so that each epoch masks other tokens of a sequence.
    """
    return np.random.Generator(np.random.Philox(key=np.array([seed, number], np.uint64)))


def mask_tokens(
    tokens: np.ndarray,
    segment_ids: np.ndarray,
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    mask_id: int,
    rate: float = 0.15,
    span: float = 0.0,
) -> Batch:
    """Selects tokens to predict and hides them from the model.

    Each token is selected with probability `rate`, except bos, eos, pad and padding. Of the selected tokens, 80 % become the
    mask, 10 % a random token of the vocabulary that is not special, and 10 % stay. With `span`, runs of consecutive tokens
    are selected by a stationary Markov chain: the lengths of runs are geometric, and every token is still selected with
    probability `rate`. All tokens of a run become masks, or all become random tokens, or all stay.

    Args:
      tokens: Token ids of one sequence, integers [T].
      segment_ids: Segments, integers [T]; 0 on padding.
      rng: Generator of this sequence; see `sequence_rng`.
      tokenizer: The tokenizer of the sequence.
      mask_id: Id of the mask; see `Tokenizer.find_mask_id`.
      rate: Probability that a token is selected, between 0 and 1.
      span: Mean length of runs, at least 1; 0 for single tokens, which are selected independently.

    Returns:
      "tokens", the sequence with hidden tokens, and "labels", the original tokens where they are selected and 0 elsewhere,
      int32 [T]; "weights", float32 [T], 1 where tokens are selected.

    Raises:
      InputError: `rate` or `span` is out of range.

    References: Devlin et al. 2019, "BERT", arXiv 1810.04805, section 3.1; Joshi et al. 2020, "SpanBERT", arXiv 1907.10529,
    section 3.1 (which limits spans to 10 tokens and selects until a budget is spent).
    """
    check_mask(rate, span)
    special = sorted({tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id} - {None})
    is_text = (segment_ids > 0) & ~np.isin(tokens, special)
    if span:
        run, is_selected = _runs(len(tokens), rng, rate, span)
    else:
        run, is_selected = np.arange(len(tokens)), rng.random(len(tokens)) < rate
    is_selected &= is_text
    draw = rng.random(len(tokens))[run]
    random = rng.integers(0, tokenizer.vocab_size - len(special), len(tokens))
    for token in special:  # in ascending order, so that the random ids skip all of them
        random += random >= token
    replaced = np.where(draw < _MASK, mask_id, np.where(draw < _MASK + _RANDOM, random, tokens))
    return {
        "tokens": np.where(is_selected, replaced, tokens).astype(np.int32),
        "labels": np.where(is_selected, tokens, 0).astype(np.int32),
        "weights": is_selected.astype(np.float32),
    }


def check_mask(rate: float, span: float) -> None:
    """Raises InputError if an argument of `mask_tokens` is out of range."""
    if not 0 < rate < 1:
        raise InputError(f"rate={rate}: expected a probability between 0 and 1, such as 0.15")
    if span and not 1 <= span <= _MAX_SPAN:
        raise InputError(f"span={span}: expected a mean length of 1 to {_MAX_SPAN}, or 0 for single tokens")
    if span and rate / (1 - rate) > span:
        raise InputError(
            f"rate={rate} with span={span}: runs would touch each other: pass a longer span or a lower rate"
        )


def _runs(length: int, rng: np.random.Generator, rate: float, span: float) -> tuple[np.ndarray, np.ndarray]:
    """`(index of each token's run, whether each token is selected)`. Selected runs alternate with runs that are not."""
    leave, enter = 1 / span, rate / (1 - rate) / span
    starts_selected = rng.random() < rate
    lengths = np.empty(length, np.int64)  # each run has at least one token, so this many are enough
    selected = (np.arange(length) % 2 == 0) == starts_selected
    lengths[selected] = rng.geometric(leave, int(selected.sum()))
    lengths[~selected] = rng.geometric(enter, int((~selected).sum()))
    run = np.searchsorted(np.cumsum(np.minimum(lengths, length)), np.arange(length), "right")
    return run, selected[run]


class MaskedCorpus:
    """The sequences of a text corpus with masked tokens.

    With `packing="fit"`, the documents of training batches are kept whole. Held-out documents are always concatenated.

    A batch has "tokens", "labels" (the original tokens), "segment_ids" and "positions", int32 [B, T], and "weights", float32
    [B, T], 1 on masked tokens.

    Attributes:
      corpus: The corpus.
      mask_id: Id of the mask.
    """

    def __init__(self, corpus: Corpus, rate: float = 0.15, span: float = 0.0):
        """Wraps a corpus.

        Args:
          corpus: The corpus.
          rate: See `mask_tokens`.
          span: See `mask_tokens`.

        Raises:
          InputError: `rate` or `span` is out of range.
        """
        check_mask(rate, span)
        self.corpus = corpus
        self.mask_id = corpus.tokenizer.find_mask_id()
        self._rate = rate
        self._span = span

    def train(self, *, seed: int, process_index: int = 0, process_count: int = 1) -> Batches:
        """Iterates endlessly over training batches; see `Corpus.train`. The masks of a sequence change from epoch to epoch.

        Args:
          seed: Seed of the order and of the masks, at least 0.
          process_index: Index of this process.
          process_count: Number of processes, which divides `batch_size`.

        Returns:
          The iterator.

        Raises:
          InputError: As `Corpus.train`.
        """
        batches = self.corpus.train(seed=seed, process_index=process_index, process_count=process_count)

        def mask(batch: Batch, number: int) -> Batch:
            first = (number * process_count + process_index) * len(batch["tokens"])
            return self.mask(batch, seed, first)

        return batches.changed(mask)

    def heldout(
        self, *, batch_size: int, limit: int | None = None, process_index: int = 0, process_count: int = 1
    ) -> Iterator[Batch]:
        """Iterates over the held-out text once; see `Corpus.heldout`. The masks are the same in every evaluation.

        Args:
          batch_size: Sequences per batch over all processes.
          limit: Maximum number of batches; None for all.
          process_index: Index of this process.
          process_count: Number of processes, which divides `batch_size`.

        Returns:
          An iterator over batches.

        Raises:
          InputError: As `Corpus.heldout`.
        """
        batches = self.corpus.heldout(
            batch_size=batch_size, limit=limit, process_index=process_index, process_count=process_count
        )
        first = process_index * batch_size // process_count
        return (self.mask(batch, _HELDOUT_SEED, first + i * batch_size) for i, batch in enumerate(batches))

    def mask(self, batch: Batch, seed: int, first: int) -> Batch:
        """Masks a batch of the corpus, whose first sequence has the number `first` in the stream of all processes."""
        rows = [
            mask_tokens(
                tokens,
                segments,
                sequence_rng(seed, first + i),
                self.corpus.tokenizer,
                self.mask_id,
                self._rate,
                self._span,
            )
            for i, (tokens, segments) in enumerate(zip(batch["tokens"], batch["segment_ids"], strict=True))
        ]
        masked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return {**masked, "segment_ids": batch["segment_ids"], "positions": batch["positions"]}
