"""Tokenised examples, and iterators over their batches that shuffle, shard and resume."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hpnlp.data.batches import (
    Batches,
    FiniteBatches,
    Share,
    bucketed_batches,
    check_seed,
    ordered_batches,
    shuffled_batches,
)
from hpnlp.data.buckets import BucketOrder, bucket_widths, width_multiple
from hpnlp.data.examples.config import ExampleConfig
from hpnlp.data.examples.labels import UNKNOWN_HELDOUT
from hpnlp.data.examples.store import StoredExamples
from hpnlp.data.packing import Batch
from hpnlp.data.reading.files import printable
from hpnlp.data.reading.sources import LeftOut, reading_notes
from hpnlp.data.reading.token_store import json_hash
from hpnlp.errors import plural
from hpnlp.types import InputError, Tokenizer

# Names of the sets of examples that are scored. A data set may have no examples in the second one.
HELDOUT, CHALLENGE = "heldout", "challenge"
_SET_NAMES = {HELDOUT: "held-out examples", CHALLENGE: "challenge examples"}
_SHOWN_CLASSES = 10
_FEW_HELDOUT = 30  # held-out examples, below which the summary has a line on them
_UNLIMITED = 1 << 40  # tokens, more than a sequence has
# Shares of padding from which the summary has a line on it, and settings with less of it.
_LITTLE_PADDING, _MUCH_PADDING = 0.2, 0.5
_BUCKETS = 4  # value of data.buckets that the summary proposes


class Examples:
    """Labelled examples, split and memory-mapped; made by `prepare_examples`.

    Attributes:
      config: Config of the data.
      kind: Kind of the examples, which documents the arrays of a batch.
      tokenizer: The tokenizer of the texts.
      labels: Names of the classes in the order of their ids; () for kinds without labels.
      directory: The cache entry.
      is_cached: True if the cache held the examples already.
      train_examples: Number of training examples.
      unlabelled: Number of training examples without a label.
      heldout_examples: Number of held-out examples.
      class_counts: Number of training labels of each class, int64 [classes].
      heldout_digest: Digest of the held-out examples and the classes.
      stored: "train", "heldout" and "challenge" -> the examples, for reports and baselines.
      remarks: Lines on the classes and of `Examination.remarks`; none if the cache held the examples already.
      summary: A line with the sizes of the sets, the classes, the number of cut examples, and counts of what is not read; lines
          on few held-out examples; `remarks`; a line on lengths if the cache did not hold the examples already; and a line on
          padding.
    """

    def __init__(
        self,
        config: ExampleConfig,
        tokenizer: Tokenizer,
        directory: str,
        record: Mapping[str, Any],
        is_cached: bool = False,
    ):
        """Opens a cache entry.

        Args:
          config: Config of the data.
          tokenizer: The tokenizer of the texts.
          directory: The cache entry.
          record: Result of `ExampleIngest.write`.
          is_cached: Whether the cache held the entry already.

        Raises:
          InputError: A sequence has no room for text, or the tokenizer lacks a token.
        """
        self.config = config
        self.kind = config.kind()
        self.tokenizer = tokenizer
        self.directory = directory
        self.is_cached = is_cached
        self.kind.check_sizes(tokenizer, config.seq_len)
        self.labels: tuple[str, ...] = tuple(record["labels"])
        ids = {name: i for i, name in enumerate(self.labels)}
        classes = np.array([ids.get(name, 0) for name in record["names"]], np.int32)
        self.class_counts = np.zeros(len(self.labels), np.int64)
        for name, count in zip(record["names"], record["counts"], strict=True):
            if count:
                self.class_counts[ids[name]] = count
        self.stored = {
            name: StoredExamples(directory, name, record[name], self.kind.parts, classes)
            for name in ("train", HELDOUT, CHALLENGE)
        }
        self.train_examples: int = record["train"]["examples"]
        self.unlabelled: int = record.get("unlabelled", 0)  # absent from caches of early versions
        self.heldout_examples: int = record[HELDOUT]["examples"]
        self.heldout_digest: str = self._digest(HELDOUT, record)
        self._digests = {"data set": self._digest("train", record), "held-out examples": self.heldout_digest}
        self.remarks = () if is_cached else (*self._class_lines(), *record.get("remarks", ()))
        self._left_out = {name: LeftOut(counts) for name, counts in record["scored_left_out"].items()}
        self._aside: int = record["aside"]
        lines = [*self._heldout_lines(), *self.remarks, *self._length_lines()]
        self.summary = "\n".join(["; ".join(self._summary_parts(record)), *lines])

    def _digest(self, side: str, record: Mapping[str, Any]) -> str:
        """Digest of the examples of one set with their classes."""
        return json_hash([record[side]["digest"], record["labels"]])

    @property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        return self.config.seq_len

    @property
    def heldout_sets(self) -> tuple[str, ...]:
        """Names of the sets that have examples to score, HELDOUT first."""
        return (HELDOUT, CHALLENGE) if self.stored[CHALLENGE].count else (HELDOUT,)

    def unknown_labels(self) -> list[str]:
        """Counts of examples that are not scored because their label is none of the run's classes.

        Returns:
          A line for each set with such examples.
        """
        lines = []
        for name, noun in _SET_NAMES.items():
            left_out = self._left_out[name]
            if UNKNOWN_HELDOUT in left_out:
                count, *places = left_out[UNKNOWN_HELDOUT]
                total = count + self.stored[name].count + (self._aside if name == HELDOUT else 0)
                place = f" ({printable(places[0])}{', ...' * (count > 1)})" if places else ""
                share = f"{count:,} of {total:,} {noun} ({100 * count / total:.2g} %)"
                lines.append(f"{share} have a label that is no class of the run{place}")
        return lines

    def left_out(self) -> list[str]:
        """Counts of what is left out of the files of the scored sets, except for `unknown_labels`.

        Returns:
          A line for each set of which something is left out.
        """
        lines = []
        for name, noun in _SET_NAMES.items():
            counts = LeftOut({r: entry for r, entry in self._left_out[name].items() if r != UNKNOWN_HELDOUT})
            source = noun if name != HELDOUT or self.config.heldout_path else "all examples"
            lines += [f"left out of {source}: {counts}"] if counts else []
        return lines

    def _summary_parts(self, record: Mapping[str, Any]) -> Iterator[str]:
        """The parts of the summary."""
        config, challenge = self.config, self.stored[CHALLENGE].count
        total = self.train_examples + self.heldout_examples + record["aside"]
        percentage = "" if config.heldout_path else f" ({100 * self.heldout_examples / total:.2g} % of all)"
        without = f" ({self.unlabelled:,} without a label)" if self.unlabelled else ""
        yield f"{printable(config.path)}: {_count(self.train_examples)} to train on{without}"
        part = f", part {config.fold} of {config.folds}" if config.folds else ""
        yield f"{_count(self.heldout_examples)}{percentage} held out{part}"
        if challenge:
            yield f"{_count(challenge)} scored apart"
        if self.labels:
            yield f"{len(self.labels):,} classes"
        if absent := [name for name, count in zip(self.labels, self.class_counts, strict=True) if not count]:
            labelled = "labelled " * bool(self.unlabelled)
            yield f"no {labelled}training example of {', '.join(absent[:5])}{', ...' if len(absent) > 5 else ''}"
        if record["aside"]:
            yield (
                f"{_count(record['aside'])} over data.heldout_examples={config.heldout_examples} neither trained "
                "on nor evaluated"
            )
        cut = sum(
            int(np.sum(self.kind.is_cut(lengths, self.tokenizer, config.seq_len)))
            for stored in self.stored.values()
            for lengths in stored.lengths()
        )
        if cut:
            yield f"{_count(cut)} cut, at data.seq_len={config.seq_len}{self.kind.other_limits()}"
        yield from reading_notes(record, self.directory if self.is_cached else "")

    def _heldout_lines(self) -> Iterator[str]:
        """Remarks on held-out examples of no class, and on few held-out examples."""
        for line in self.unknown_labels():
            yield f"{line}, and are not scored"
        count = self.heldout_examples
        if count < _FEW_HELDOUT and not self.config.folds:  # all parts together have more
            error = f" (an accuracy has a standard error of up to {50 / count**0.5:.0f} %)"
            yield (
                f"scores on {_count(count)} depend on chance{error if self.kind.is_scored_by_share else ''}: add examples, "
                "raise data.heldout, or pass data.heldout_path=PATH with others"
            )

    def _class_lines(self) -> Iterator[str]:
        """The sizes of the classes, largest first."""
        order = np.argsort(-self.class_counts, kind="stable")
        if len(order):
            shown = ", ".join(f"{self.labels[i]} {self.class_counts[i]:,}" for i in order[:_SHOWN_CLASSES].tolist())
            more = f" and {len(order) - _SHOWN_CLASSES:,} more" if len(order) > _SHOWN_CLASSES else ""
            yield f"training labels of each class: {shown}{more}"

    def _length_lines(self) -> Iterator[str]:
        """The lengths of training sequences, unless they are cached, and their padding."""
        config = self.config
        if not self.is_cached:
            lengths = self._lengths("train", longest=_UNLIMITED)
            low, median, high, top = np.percentile(lengths, [0, 50, 95, 100], method="higher").tolist()
            cut = 100 * float(np.mean(lengths > config.seq_len))
            remark = f", of which data.seq_len={config.seq_len} cuts {cut:.2g} %" if cut else ""
            yield f"tokens of training sequences: {low} to {top}, median {median}, 95th percentile {high}{remark}"
        share = self._padding(config.seq_len, config.buckets)
        if share >= _LITTLE_PADDING:
            fix = "".join(f"; {remedy}" for remedy in self._less_padding()) if share > _MUCH_PADDING else ""
            yield f"padding: {100 * share:.0f} % of the tokens of a batch{fix}"

    def _padding(self, seq_len: int, buckets: int) -> float:
        """Share of padding in training batches."""
        lengths = self._lengths("train", seq_len)
        widths = [seq_len] if buckets == 1 else bucket_widths(lengths, buckets, width_multiple(seq_len))
        widths = np.minimum(widths, seq_len)
        return 1 - float(lengths.sum() / widths[np.searchsorted(widths, lengths)].sum())

    def fitting_length(self) -> tuple[int, float]:
        """The least value of `data.seq_len` that cuts hardly any training example.

        Returns:
          A length that holds 99.9 % of the training sequences, which is a multiple of 8 where they differ, at most the
          `data.seq_len` of the config; and the share of the sequences that it holds.
        """
        lengths = self._lengths("train", longest=_UNLIMITED)
        length = int(np.percentile(lengths, 99.9, method="higher"))
        length = min(length if lengths.min() == length else 8 * math.ceil(length / 8), self.config.seq_len)
        return length, float(np.mean(lengths <= length))

    def _less_padding(self) -> Iterator[str]:
        """Settings with less padding, by the lengths of uncut sequences."""
        config = self.config
        length, held = self.fitting_length()
        if length < config.seq_len:
            share = 100 * self._padding(length, config.buckets)
            yield f"with data.seq_len={length}, which holds {100 * held:.5g} % of the sequences, {share:.0f} %"
        if config.buckets < _BUCKETS:
            share = 100 * self._padding(config.seq_len, _BUCKETS)
            yield f"with data.buckets={_BUCKETS}, batches of similar lengths, {share:.0f} %"

    def train(self, *, seed: int, process_index: int = 0, process_count: int = 1) -> Batches:
        """Iterates endlessly over training batches, in a new order each epoch.

        With `data.buckets` over 1, the length T of the sequences differs from batch to batch. The processes share the examples
        of a batch as in `Corpus.train`.

        Args:
          seed: Seed of the order, at least 0.
          process_index: Index of this process.
          process_count: Number of processes, which divides `batch_size`.

        Returns:
          An iterator over batches; see `kind`.

        Raises:
          InputError: An argument is out of range.
        """
        share = Share(self.config.batch_size, process_index, process_count, "data.batch_size")
        if self.config.buckets > 1:
            return self._bucketed(seed, share)
        return shuffled_batches(
            [(0, self.train_examples)],
            (),
            lambda numbers, count: self._batch("train", numbers, count),
            self._digests,
            seed,
            share,
        )

    def _bucketed(self, seed: int, share: Share) -> Batches:
        """Training batches of examples of similar lengths."""
        check_seed(seed)
        config, order = self.config, self._bucket_order(seed)
        widths = ", ".join(map(str, order.widths))
        return bucketed_batches(
            order.batch,
            lambda numbers, count, width: self._batch("train", numbers, count, width),
            self._digests | {"division into buckets": f"{widths} by {config.batch_size}"},
            share,
        )

    def _bucket_order(self, seed: int) -> BucketOrder:
        config = self.config
        return BucketOrder(self._lengths("train"), config.buckets, config.seq_len, config.batch_size, seed)

    def _lengths(self, side: str, longest: int | None = None) -> np.ndarray:
        """Tokens of the sequences of a set, integers [n], cut at `longest`, by default at `data.seq_len`."""
        kind, seq_len = self.kind, longest or self.config.seq_len
        return np.concatenate(
            [kind.row_lengths(lengths, self.tokenizer, seq_len) for lengths in self.stored[side].lengths()]
        )

    def heldout(
        self,
        *,
        batch_size: int,
        name: str = HELDOUT,
        limit: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ) -> Iterator[Batch]:
        """Iterates over held-out examples once.

        Examples are in the order of `stored`. With `data.buckets` over 1, batches are padded to the widths of training batches,
        and examples are in the order of their lengths unless scores depend on which examples are in one batch. The last batch
        is filled with padding of weight 0, so that every process gets the same number of batches.

        Args:
          batch_size: Examples per batch over all processes.
          name: One of `heldout_sets`.
          limit: Maximum number of batches, whose examples are spread evenly; None for all.
          process_index: Index of this process.
          process_count: Number of processes, which divides `batch_size`.

        Returns:
          An iterator over batches; see `kind`.

        Raises:
          InputError: An argument is out of range.
        """
        if name not in self.heldout_sets:
            raise InputError(f"there are no examples {name!r}: expected {' or '.join(map(repr, self.heldout_sets))}")
        total, share = self.stored[name].count, Share(batch_size, process_index, process_count)
        batches = ordered_batches(total, limit, share)
        if self.config.buckets == 1:
            made = (self._batch(name, numbers, count) for numbers, count in batches)
            return FiniteBatches(made, operator.length_hint(batches))
        whole = self._heldout_numbers(name, batch_size, limit)
        return FiniteBatches(self._bucketed_heldout(name, whole, share), len(whole))

    def group_numbers(self, batch_size: int, limit: int | None) -> np.ndarray | None:
        """The group (`data.group_field`) of each held-out example.

        Args:
          batch_size: As for `heldout`.
          limit: As for `heldout`.

        Returns:
          int64 [batches, batch_size], in the order of `heldout` over all processes, and -1 for what fills a batch; None if
          no two examples share a group.
        """
        groups = self.stored[HELDOUT].groups
        if not len(groups):
            return None
        batches = self._heldout_numbers(HELDOUT, batch_size, limit)
        result = np.full((len(batches), batch_size), -1, np.int64)
        for row, numbers in zip(result, batches, strict=True):
            row[: len(numbers)] = groups[numbers]
        return result

    def _heldout_numbers(self, name: str, batch_size: int, limit: int | None) -> list[np.ndarray]:
        """Numbers of the examples of each batch, over all processes."""
        batches = [n for n, _ in ordered_batches(self.stored[name].count, limit, Share(batch_size, 0, 1))]
        if self.config.buckets == 1 or self.kind.compares_examples:
            return batches
        numbers = np.concatenate(batches)
        numbers = numbers[np.argsort(self._lengths(name)[numbers], kind="stable")]
        return np.split(numbers, np.cumsum([len(batch) for batch in batches[:-1]]))

    def _bucketed_heldout(self, name: str, batches: list[np.ndarray], share: Share) -> Iterator[Batch]:
        """The batches of a process: its examples of each whole batch, whose longest one decides the width."""
        lengths, widths = self._lengths(name), [*self._bucket_order(0).widths, self.config.seq_len]
        for numbers in batches:
            width = widths[int(np.searchsorted(widths, lengths[numbers].max()))]
            yield self._batch(name, numbers[share.span], share.rows, width)

    def _batch(self, side: str, numbers: np.ndarray, count: int, width: int | None = None) -> Batch:
        """The batch of the examples with these numbers, filled up with padding to `count` examples of `width` tokens."""
        width = self.config.seq_len if width is None else width
        return self.kind.batch(self.stored[side], numbers.tolist(), count, self.tokenizer, width)


def _count(count: int) -> str:
    return f"{count:,} {plural(count, 'example')}"
