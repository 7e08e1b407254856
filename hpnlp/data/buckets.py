"""Batches of texts of different lengths: padding, buckets of similar lengths, and several texts in one sequence.

A batch is a list of rows, and a row a list of texts. `padded_batches`, `bucketed_batches` and `packed_batches` divide the same
texts into batches of the same number of tokens, padding included; `padding_share` is the share of padding. `BucketOrder` is an
endless order of training batches of the same number of texts, for `data.buckets`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpnlp.data.packing import Batch, fit_lengths
from hpnlp.types import InputError


class Rows(NamedTuple):
    """Texts of a batch.

    Attributes:
      width: Tokens of a row, padding included.
      rows: Numbers of the texts of each row.
    """

    width: int
    rows: list[list[int]]


def bucket_widths(lengths: np.ndarray, count: int, multiple: int = 1) -> list[int]:
    """Chooses the widths of buckets that leave the least padding, if each text is padded to the next width.

    Args:
      lengths: Tokens of each text, integers [n].
      count: Largest number of buckets.
      multiple: Divisor of the widths.

    Returns:
      At most `count` widths, rising; the last one has room for the longest text.

    Raises:
      InputError: There are no texts, or a text, `count` or `multiple` is below 1.

    Cost: O(count L^2) for L different lengths, in multiples of `multiple`.
    """
    if count < 1 or multiple < 1 or len(lengths) == 0:
        raise InputError(f"{len(lengths)} lengths, count={count}, multiple={multiple}: expected at least 1 of each")
    _check_lengths(lengths)
    widths, texts = np.unique(-(-np.asarray(lengths) // multiple) * multiple, return_counts=True)
    below = np.concatenate([[0], np.cumsum(texts)])
    # cost[j]: tokens of the texts up to width j in the best buckets so far; each pass adds one bucket.
    cost = widths * below[1:]
    choice: list[np.ndarray] = []
    for _ in range(min(count, len(widths)) - 1):
        # A last bucket of the widths i + 1 to j, after the best buckets up to i.
        totals = cost[:, None] + widths[None, :] * (below[1:][None, :] - below[1:][:, None])
        totals = np.where(
            np.arange(len(widths))[:, None] < np.arange(len(widths))[None, :], totals, np.iinfo(np.int64).max
        )
        choice.append(np.where(totals.min(axis=0) < cost, totals.argmin(axis=0), -1))
        cost = np.minimum(cost, totals.min(axis=0))
    chosen, last = [len(widths) - 1], len(widths) - 1
    for before in reversed(choice):
        if before[last] >= 0:
            last = int(before[last])
            chosen.append(last)
    return widths[sorted(chosen)].tolist()


def padded_batches(lengths: np.ndarray, width: int, tokens: int, seed: int = 0) -> list[Rows]:
    """Batches of texts in random order, each padded to one width.

    Args:
      lengths: Tokens of each text, at most `width`.
      width: Tokens of a row.
      tokens: Tokens of a batch, padding included.
      seed: Seed of the order.

    Returns:
      The batches; the last one may have fewer rows.

    Raises:
      InputError: A text is empty, or longer than `width`, or a batch has no room for a row.
    """
    return bucketed_batches(lengths, [width], tokens, seed)


def bucketed_batches(lengths: np.ndarray, widths: Sequence[int], tokens: int, seed: int = 0) -> list[Rows]:
    """Batches of texts of similar lengths, each padded to the width of its bucket, in random order.

    Args:
      lengths: Tokens of each text.
      widths: Widths of the buckets, rising; see `bucket_widths`.
      tokens: As for `padded_batches`.
      seed: Seed of the order of texts within buckets, and of the batches.

    Returns:
      The batches; the last one of each bucket may have fewer rows.

    Raises:
      InputError: As for `padded_batches`, or the widths do not rise.
    """
    if len(widths) == 0 or any(a >= b for a, b in zip([0, *widths], widths, strict=False)):
        raise InputError(f"widths={list(widths)}: expected numbers from 1 on that rise: sort them")
    _check(lengths, widths[-1], tokens)
    rng = np.random.default_rng(seed)
    bucket, batches = np.searchsorted(widths, lengths), []
    for index, width in enumerate(widths):
        texts = rng.permutation(np.flatnonzero(bucket == index))
        rows = tokens // width
        batches += [Rows(width, [[n] for n in texts[i : i + rows].tolist()]) for i in range(0, len(texts), rows)]
    return [batches[i] for i in rng.permutation(len(batches))]


def packed_batches(lengths: np.ndarray, width: int, tokens: int, seed: int = 0) -> list[Rows]:
    """Batches of rows with several complete texts each, by first-fit decreasing, in random order.

    Args:
      lengths: Tokens of each text.
      width: Tokens of a row.
      tokens: As for `padded_batches`.
      seed: Seed of the order of rows.

    Returns:
      The batches; the last one may have fewer rows.

    Raises:
      InputError: As for `padded_batches`.
    """
    _check(lengths, width, tokens)
    rows = fit_lengths(lengths, width) if len(lengths) else []
    order, count = np.random.default_rng(seed).permutation(len(rows)), tokens // width
    return [
        Rows(width, [rows[i].tolist() for i in order[start : start + count]]) for start in range(0, len(rows), count)
    ]


def _check_lengths(lengths: np.ndarray) -> None:
    empty = np.flatnonzero(np.asarray(lengths) < 1)
    if empty.size:
        number = int(empty[0])
        raise InputError(f"text {number} has {lengths[number]} tokens: expected at least 1: leave it out")


def width_multiple(longest: int) -> int:
    """The divisor of the widths of `BucketOrder`: 8, or more where there would be over 256 different widths."""
    return max(8, -(-longest // 256))


class BucketOrder:
    """An endless order of batches of texts of similar lengths, each padded to the width of its bucket.

    In each epoch, texts and batches are in a new random order. A text that is left over when its bucket has been divided into
    batches goes into the next wider one. All texts of an epoch are there once, but for those by which their number exceeds a
    multiple of the batch size, and which are drawn anew in each epoch. Fewer texts than a batch has are repeated.

    Attributes:
      widths: Widths of the buckets, rising.

    Cost: an epoch is made when its first batch is asked for, in O(n); the last two are kept, at 8 bytes for each text.
    """

    def __init__(self, lengths: np.ndarray, count: int, longest: int, batch_size: int, seed: int) -> None:
        """Chooses the widths, by `bucket_widths`; they are multiples of 8, and of at most 256 different sizes.

        Args:
          lengths: Tokens of each text, integers [n], at most `longest`.
          count: Largest number of buckets.
          longest: Largest width.
          batch_size: Texts of a batch, B.
          seed: Seed of the order.

        Raises:
          InputError: As for `bucket_widths`.
        """
        multiple = width_multiple(longest)
        self.widths = sorted({min(width, longest) for width in bucket_widths(lengths, count, multiple)})
        self._bucket = np.searchsorted(self.widths, lengths).astype(np.int32)
        self._batch_size, self._seed = batch_size, seed
        self._batches = max(1, len(lengths) // batch_size)  # in an epoch
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    def batch(self, number: int) -> tuple[np.ndarray, int]:
        """A batch.

        Args:
          number: Number of the batch, from 0 on.

        Returns:
          `(numbers of its texts, int64 [B]; their width)`.
        """
        epoch, index = divmod(number, self._batches)
        texts, buckets = self._epoch(epoch)
        return texts[index], self.widths[buckets[index]]

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The texts of each batch [n, B], and the bucket of each batch [n]."""
        rng, size = np.random.default_rng([self._seed, epoch]), self._batch_size
        texts = np.empty(0, np.int64)
        while len(texts) < self._batches * size:
            texts = np.concatenate([texts, rng.permutation(len(self._bucket))])
        texts = texts[: self._batches * size]
        batches, buckets, remaining = [], [], texts[:0]
        for index in range(len(self.widths)):
            members = np.concatenate([remaining, texts[self._bucket[texts] == index]])
            full = len(members) // size
            batches.append(members[: full * size].reshape(full, size))
            buckets += [index] * full
            remaining = members[full * size :]
        order = rng.permutation(self._batches)
        return np.concatenate(batches)[order], np.array(buckets)[order]


def _check(lengths: np.ndarray, width: int, tokens: int) -> None:
    _check_lengths(lengths)
    if (longest := int(np.max(lengths, initial=0))) > width:
        raise InputError(f"a text has {longest} tokens, and rows have {width}: cut the text, or pass a larger width")
    if tokens < width:
        raise InputError(f"tokens={tokens}: a row has {width}: pass at least as many")


def padding_share(lengths: np.ndarray, batches: Sequence[Rows]) -> float:
    """Share of padding among the tokens of batches.

    Args:
      lengths: Tokens of each text.
      batches: Batches of these texts. Rows that the last batches lack do not count.

    Returns:
      A fraction of 1; 0 without batches.
    """
    if not batches:
        return 0.0
    total = sum(batch.width * len(batch.rows) for batch in batches)
    used = sum(int(lengths[number]) for batch in batches for row in batch.rows for number in row)
    return 1 - used / total


def batch_arrays(texts: Sequence[np.ndarray], batch: Rows, rows: int, pad_id: int) -> Batch:
    """Arrays of a batch, with a segment for each text.

    Args:
      texts: Token ids of all texts.
      batch: Numbers of the texts of each row.
      rows: Rows of the arrays, B; those that the batch lacks are padding.
      pad_id: Token id of padding.

    Returns:
      "tokens", "segment_ids" (from 1 within a row; 0 on padding), and "positions" (from 0 within a text), int32 [B, T].
    """
    out = {
        "tokens": np.full((rows, batch.width), pad_id, np.int32),
        "segment_ids": np.zeros((rows, batch.width), np.int32),
        "positions": np.zeros((rows, batch.width), np.int32),
    }
    for row, numbers in enumerate(batch.rows):
        start = 0
        for segment, number in enumerate(numbers, 1):
            place = slice(start, start + len(texts[number]))
            out["tokens"][row, place] = texts[number]
            out["segment_ids"][row, place] = segment
            out["positions"][row, place] = np.arange(len(texts[number]))
            start = place.stop
    return out
