"""A tokenised corpus, and iterators over its batches that shuffle or stream, mix, shard and resume.

`batches` orders rows by number, and `packing` computes the content of a row. The state of an iterator is therefore the
number of batches it has returned, for every packing, mixture and number of processes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hpnlp.data import packing
from hpnlp.data.batches import (
    Batches,
    FiniteBatches,
    Share,
    ordered_batches,
    ordered_streams,
    shuffled_batches,
    streamed_batches,
)
from hpnlp.data.config import DataConfig
from hpnlp.data.random_lengths import RandomLengths
from hpnlp.data.reading import token_store
from hpnlp.data.reading.files import printable
from hpnlp.data.reading.sources import reading_notes
from hpnlp.errors import plural
from hpnlp.types import InputError, Tokenizer

# The summary warns if whole documents take this share of the text from training, or twice the configured fraction.
_LARGE_HELDOUT_SHARE = 0.05


class Corpus:
    """Tokenised text, split and memory-mapped; made by `stream.prepare`.

    Attributes:
      config: Config of the data.
      tokenizer: The tokenizer of the text.
      directory: The cache entry.
      is_cached: True if the cache held the tokens already.
      train_tokens: Number of training tokens, bos and eos included.
      train_documents: Number of training documents.
      heldout_tokens: Number of held-out tokens, bos and eos included.
      heldout_documents: Number of held-out documents.
      heldout_bytes: Size of `read_heldout()`.
      heldout_digest: Digest of the held-out tokens.
      summary: One line with the sizes of both sides, the held-out share, the cache entry if it was used, and counts of
          what is not read.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        directory: str,
        record: Mapping[str, Any],
        is_cached: bool = False,
    ):
        """Opens a cache entry.

        Args:
          config: Config of the data.
          tokenizer: The tokenizer of the text.
          directory: The cache entry.
          record: Result of `TextIngest.write`.
          is_cached: Whether the cache held the entry already.

        Raises:
          InputError: The training text is shorter than one sequence, or the held-out text than two tokens.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.directory = directory
        self._train = token_store.Tokens(directory, "train", record["train"])
        self._heldout = token_store.Tokens(directory, "heldout", record["heldout"])
        self._bounds = record["bounds"]
        self.heldout_digest: str = record["heldout"]["digest"]
        # The held-out text is part of an iterator's state as well: losses on different held-out texts are not comparable.
        self._digests = {"corpus": record["train"]["digest"], "held-out text": self.heldout_digest}
        self.train_tokens: int = record["train"]["tokens"]
        self.train_documents: int = record["train"]["documents"]
        self.heldout_tokens: int = record["heldout"]["tokens"]
        self.heldout_documents: int = record["heldout"]["documents"]
        self.heldout_bytes: int = record["heldout"]["raw_bytes"]
        self.is_cached = is_cached
        self.summary = "; ".join(self._summary_parts(record))
        if self.train_tokens <= config.seq_len + 2 * config.length_deviation:
            raise InputError(
                f"data.path={config.path!r} holds {self.train_tokens} tokens to train on, and a sequence of "
                f"data.seq_len={config.seq_len} takes {config.seq_len + 1}: add text, or lower data.seq_len"
            )
        if self.heldout_tokens < 2:
            raise InputError(
                f"the held-out text is under two tokens: {self._more_heldout()}, or pass data.heldout_path=PATH"
            )

    def _summary_parts(self, record: Mapping[str, Any]) -> Iterator[str]:
        """The parts of the summary."""
        config, aside = self.config, record["aside"]
        total = self.train_tokens + self.heldout_tokens + aside["tokens"]
        percentage = "" if config.heldout_path else f" ({100 * self.heldout_tokens / total:.2g} % of all)"
        yield f"{printable(config.path)}: {_documents(self.train_documents)}, {self.train_tokens:,} tokens to train on"
        part = f", part {config.fold} of {config.folds}" if config.folds else ""
        sizes = f"{self.heldout_bytes:,} bytes, {self.heldout_tokens:,} tokens"
        yield f"{_documents(self.heldout_documents)}, {sizes}{percentage} held out{part}"
        if aside["documents"]:
            yield (
                f"{_documents(aside['documents'])}, {aside['raw_bytes']:,} bytes over data.heldout_bytes="
                f"{config.heldout_bytes} neither trained on nor evaluated"
            )
        has_fraction = not config.heldout_path and not config.folds
        if has_fraction and 0 < config.heldout_bytes < self.heldout_bytes:
            yield f"data.heldout_bytes={config.heldout_bytes} is less than this one document"
        share = 1 - self.train_tokens / total
        if has_fraction and share > max(2 * config.heldout, _LARGE_HELDOUT_SHARE):
            yield (
                f"data.heldout={config.heldout} takes {100 * share:.0f} % from training, because documents are taken whole: "
                "add text, or pass data.heldout_path=PATH with other text"
            )
        if not config.heldout_path and self.heldout_documents == 1:
            yield (
                f"scores on a single document may differ from those on others: {self._more_heldout()}, or pass "
                "data.heldout_path=PATH with other text"
            )
        yield from reading_notes(record, self.directory if self.is_cached else "")

    def _more_heldout(self) -> str:
        """The change of the config that holds out more text."""
        return "lower data.folds" if self.config.folds else "raise data.heldout"

    @property
    def documents(self) -> tuple[token_store.Tokens, token_store.Tokens]:
        """The tokens of the documents for training, and of those that are held out."""
        return self._train, self._heldout

    def read_heldout(self) -> bytes:
        """Reads the original bytes of the held-out text.

        Returns:
          The documents one after another, without prompts.
        """
        return self._heldout.raw()

    def read_training_text(self, limit: int) -> tuple[bytes, float]:
        """Reads the end of the training text, decoded from its tokens, prompts included.

        Args:
          limit: Maximum number of bytes.

        Returns:
          The last `limit` bytes of the concatenated training documents, and the share of all training tokens that these bytes
          are. The text is exact if the tokenizer is lossless.
        """
        documents: list[bytes] = []
        size, index = 0, self.train_documents
        while index and size < limit:
            index -= 1
            documents.append(self.tokenizer.decode(self._train.document(index)))
            size += len(documents[-1])
        tokens = self.train_tokens - (int(self._train.ends[index - 1]) if index else 0)
        return b"".join(reversed(documents))[-limit:], tokens / self.train_tokens * min(1.0, limit / max(1, size))

    def train(self, *, seed: int, process_index: int = 0, process_count: int = 1) -> Batches:
        """Iterates endlessly over training batches, in the order `data.order`; shuffled in a new order each epoch.

        The global batch has `batch_size` sequences. Of n processes with b = `batch_size` / n sequences each, process p gets the
        sequences `[p b, (p + 1) b)`: the shards of all processes together are the batch that a single process would get.

        Args:
          seed: Seed of the order, at least 0.
          process_index: Index of this process.
          process_count: Number of processes, which divides `batch_size`.

        Returns:
          An iterator over batches of arrays [b, T]; see `packing.assemble`.

        Raises:
          InputError: An argument is out of range, or a source has no training text.
        """
        rows, share = self._rows, Share(self.config.batch_size, process_index, process_count, "data.batch_size")
        made_from = {**self._digests, "packing": self.config.packing, "order": self.config.order}
        if self.config.order == "stream":
            made_from |= {"batch size": str(self.config.batch_size), "sequence length": str(self.config.seq_len)}
            total, make = self.train_rows, self._next_rows
            if self.config.length_deviation:
                made_from |= {"lengths of batches": f"{self.config.length_deviation}, seed {seed}"}
                lengths = RandomLengths(seed, self.config.seq_len, self.config.length_deviation)
                total, make = self.train_tokens - 1, functools.partial(self._next_stretches, lengths)
            return streamed_batches(total, make, made_from, seed, share)
        return shuffled_batches(
            rows.ranges,
            self.config.weights,
            lambda numbers, count: self._batch(self._train, rows, count, numbers),
            made_from,
            seed,
            share,
        )

    def heldout(
        self,
        *,
        batch_size: int,
        stride: int | None = None,
        limit: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ) -> Iterator[packing.Batch]:
        """Iterates over the held-out text once; every token is predicted exactly once.

        The processes share the sequences as in `train`. The last batch is filled with sequences of weight 0, so that every
        process gets the same number of batches. With `data.order="stream"`, each example of a batch continues the same example
        of the batch before.

        Args:
          batch_size: Sequences per batch over all processes.
          stride: Distance between the starts of sequences; None for `seq_len`. Below `seq_len`, every token has at least
              `seq_len - stride` tokens of context if its document has them.
          limit: Maximum number of batches, whose sequences are spread evenly over the text; None for all.
          process_index: Index of this process.
          process_count: Number of processes, which divides `batch_size`.

        Returns:
          An iterator over batches of arrays [batch_size / process_count, T]; see `packing.assemble`.

        Raises:
          InputError: An argument is out of range.
        """
        seq_len = self.config.seq_len
        if stride is not None and not 1 <= stride <= seq_len:
            raise InputError(f"stride={stride}: expected 1 to data.seq_len={seq_len}")
        if stride is not None and self.config.order == "stream":
            raise InputError(f"stride={stride}: sequences of data.order='stream' do not overlap: pass None")
        rows = self._heldout_rows(stride)
        batches = self._heldout_order(rows, limit, Share(batch_size, process_index, process_count))
        made = (self._batch(self._heldout, rows, count, numbers) for numbers, count in batches)
        return FiniteBatches(made, operator.length_hint(batches))

    def document_numbers(self, batch_size: int, stride: int | None, limit: int | None) -> np.ndarray:
        """The document of the first scored token of each held-out sequence.

        Args:
          batch_size: As for `heldout`.
          stride: As for `heldout`.
          limit: As for `heldout`.

        Returns:
          int64 [batches, batch_size], in the order of `heldout` over all processes; -1 for sequences that fill a batch.
        """
        rows = self._heldout_rows(stride)
        batches = [numbers for numbers, _ in self._heldout_order(rows, limit, Share(batch_size, 0, 1))]
        documents = np.full((len(batches), batch_size), -1, np.int64)
        for row, numbers in zip(documents, batches, strict=True):
            row[: len(numbers)] = rows.documents(numbers)
        return documents

    def _heldout_rows(self, stride: int | None) -> packing.ConcatRows:
        return packing.ConcatRows(self._heldout, self.config.seq_len, [(0, self.heldout_tokens)], stride)

    def _heldout_order(
        self, rows: packing.ConcatRows, limit: int | None, share: Share
    ) -> Iterator[tuple[np.ndarray, int]]:
        divide = ordered_streams if self.config.order == "stream" else ordered_batches
        return divide(rows.ranges[0][1], limit, share)

    @property
    def train_rows(self) -> int:
        """Number of training sequences in an epoch."""
        return self._rows.ranges[-1][1]

    @functools.cached_property
    def _rows(self) -> packing.ConcatRows | packing.FitRows:
        """The training rows; with weights, one range per source."""
        bounds = self._bounds if self.config.weights else [0, self.train_tokens]
        rows = packing.PACKINGS[self.config.packing](
            self._train, self.config.seq_len, list(zip(bounds[:-1], bounds[1:], strict=True))
        )
        paths = self.config.path.split(",") if self.config.weights else [self.config.path]
        for path, (first, end) in zip(paths, rows.ranges, strict=True):
            if first == end:
                raise InputError(
                    f"data.path: {path!r} leaves nothing to train on, as its only document was held out: pass "
                    "data.heldout_path=PATH with other text to hold out, or add text to it"
                )
        return rows

    def _next_rows(self, first: np.ndarray, batch: int) -> packing.Batch:
        """A batch of a stream, by the number of each example's first row."""
        return self._batch(self._train, self._rows, len(first), first + batch)

    def _next_stretches(self, lengths: RandomLengths, first: np.ndarray, batch: int) -> packing.Batch:
        """A batch of a stream with random lengths, by the index of each example's first token."""
        start, length = lengths.at(batch)
        segments = packing.stretches(self._train, first + start, length)
        return packing.assemble(self._train, segments, len(first), length, self.tokenizer.pad_id)

    def _batch(
        self,
        tokens: token_store.Tokens,
        rows: packing.ConcatRows | packing.FitRows,
        count: int,
        numbers: np.ndarray,
    ) -> packing.Batch:
        """The batch of the rows with these numbers, filled up with padding to `count` rows.

        In a stream, numbers count on after the last row.
        """
        if self.config.order == "stream":
            passes, numbers = np.divmod(numbers, rows.ranges[-1][1])
            segments = packing.continued(rows.segments(numbers), tokens, passes)
        else:
            segments = rows.segments(numbers)
        return packing.assemble(tokens, segments, count, self.config.seq_len, self.tokenizer.pad_id)


def _documents(count: int) -> str:
    return f"{count:,} {plural(count, 'document')}"
