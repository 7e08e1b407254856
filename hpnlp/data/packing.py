"""Packs documents of any length into sequences of a fixed length, the rows of a batch.

A row is a list of segments: runs of consecutive tokens of one document. `ConcatRows` and `FitRows` compute the segments of a
row from the row's number alone, so that rows can be shuffled, divided among processes and resumed by number. `assemble` turns
segments into arrays.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from hpnlp.data.reading.token_store import Tokens

Batch = dict[str, np.ndarray]

_LARGEST_ID = 2**31 - 1  # segment ids are int32


@dataclasses.dataclass(frozen=True)
class Segments:
    """Segments of the rows of a batch, sorted by row. All arrays are integers [segments].

    Attributes:
      row: Index of the segment's row in the batch.
      start: Index of the segment's first token in `Tokens.tokens`.
      length: Number of the segment's tokens that are inputs.
      loss_from: Labels before this token carry no loss; None for no such limit.
      segment_id: Segment id, at least 1; None to count from 1 within a row.
      position: Position of the segment's first token; None for 0.
    """

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    loss_from: np.ndarray | None = None
    segment_id: np.ndarray | None = None
    position: np.ndarray | None = None


class ConcatRows:
    """Rows of consecutive documents, cut every `seq_len` inputs; only the last row of a range is shorter.

    The label of a row's last input is the first input of the next row.
    """

    def __init__(self, tokens: Tokens, seq_len: int, ranges: Sequence[tuple[int, int]], stride: int | None = None):
        """Lays out the rows.

        Args:
          tokens: The documents.
          seq_len: Number of inputs per row.
          ranges: Token ranges `(start, end)` of complete documents; no row holds tokens of two ranges.
          stride: Distance between the starts of consecutive rows; None for `seq_len`. Below `seq_len`, rows overlap, and the
              overlap is context without loss.
        """
        self._tokens = tokens
        self._seq_len = seq_len
        self._stride = stride or seq_len
        self._starts, self._ends = np.array(ranges, np.int64).reshape(-1, 2).T
        labels = np.maximum(self._ends - self._starts - 1, 0)
        overflow = np.maximum(labels - seq_len, 0)
        self._first_rows = np.concatenate([[0], np.cumsum((labels > 0) + -(-overflow // self._stride))])

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Row numbers `(first, end)` of each token range."""
        return list(zip(self._first_rows[:-1].tolist(), self._first_rows[1:].tolist(), strict=True))

    def segments(self, rows: np.ndarray) -> Segments:
        """Segments of rows with these numbers, integers [B]."""
        ends = self._tokens.ends
        range_index = np.searchsorted(self._first_rows, rows, "right") - 1
        row_in_range = rows - self._first_rows[range_index]
        start = self._starts[range_index] + row_in_range * self._stride
        # The last token of a range is a label only, because no label follows it.
        end = np.minimum(start + self._seq_len, self._ends[range_index] - 1)
        segments = _cut_at_documents(ends, start, end)
        # Labels up to here are labels of the row before, too.
        loss_from = np.where(row_in_range > 0, start + self._seq_len - self._stride + 1, 0)
        return dataclasses.replace(segments, loss_from=loss_from[segments.row])

    def documents(self, rows: np.ndarray) -> np.ndarray:
        """Number of the document of the first label with loss of rows with these numbers, integers [B]."""
        segments = self.segments(rows)
        last_label = segments.start + segments.length
        first = np.full(len(rows), len(segments.row))
        has_loss = np.flatnonzero(last_label >= (0 if segments.loss_from is None else segments.loss_from))
        np.minimum.at(first, segments.row[has_loss], has_loss)
        return np.searchsorted(self._tokens.ends, segments.start[first], "right")


class FitRows:
    """Rows of complete documents. A longer document is cut into pieces of `seq_len` inputs and a shorter last piece.

    Short pieces share rows by first-fit decreasing.

    Cost: O(documents + seq_len^2) time, once, because rows with equal lengths of pieces are packed together; about 20 bytes of
    memory per piece.

    References: Krell et al. 2021, "Efficient sequence packing without cross-contamination", arXiv 2107.02027 (packing over the
    histogram of lengths).
    """

    def __init__(self, tokens: Tokens, seq_len: int, ranges: Sequence[tuple[int, int]]):
        """Packs all rows.

        `ranges` are token ranges `(start, end)` of complete documents; no row holds tokens of two ranges.
        """
        self._first_rows = [0]
        packed = []
        for start, end in ranges:
            packed.append(_fit(*_pieces(tokens, seq_len, start, end), seq_len))
            self._first_rows.append(self._first_rows[-1] + len(packed[-1][2]))
        self._piece_starts, self._piece_lengths, sizes = (
            np.concatenate(arrays) for arrays in zip(*packed, strict=True)
        )
        self._row_ends = np.cumsum(sizes)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Row numbers `(first, end)` of each token range."""
        return list(zip(self._first_rows[:-1], self._first_rows[1:], strict=True))

    def segments(self, rows: np.ndarray) -> Segments:
        """Segments of rows with these numbers, integers [B]."""
        first = np.where(rows > 0, self._row_ends[rows - 1], 0)
        count = self._row_ends[rows] - first
        row = np.repeat(np.arange(len(rows)), count)
        piece = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first, count)
        return Segments(row, self._piece_starts[piece], self._piece_lengths[piece])


def fit_lengths(lengths: np.ndarray, seq_len: int) -> list[np.ndarray]:
    """Numbers of the texts of each row, if texts are packed into rows by first-fit decreasing, as `FitRows` does.

    `lengths` are the tokens of each text, integers [n], 1 to `seq_len`.
    """
    numbers, _, sizes = _fit(np.arange(len(lengths)), np.asarray(lengths, np.int32), seq_len)
    return np.split(numbers, np.cumsum(sizes)[:-1])


# Name in `DataConfig.packing` -> class of the rows.
PACKINGS = {"concat": ConcatRows, "fit": FitRows}


def _pieces(tokens: Tokens, seq_len: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """(index of the first token, number of inputs) of the pieces of the documents in the token range `[start, end)`."""
    first, after = np.searchsorted(tokens.ends, [start, end], "right")
    doc_ends = tokens.ends[first:after]
    doc_starts = np.concatenate([[start], doc_ends])[:-1]
    # The last token of a document is a label only.
    inputs = doc_ends - doc_starts - 1
    counts = -(-inputs // seq_len)
    piece_in_doc = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    lengths = np.minimum(seq_len, np.repeat(inputs, counts) - piece_in_doc * seq_len)
    return np.repeat(doc_starts, counts) + piece_in_doc * seq_len, lengths.astype(np.int32)


def _fit(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Orders pieces by row and returns (starts, lengths, number of pieces per row).

    First-fit decreasing fills a row with the longest piece that still fits until none does, then fills the next row from the
    remaining pieces. Since pieces of equal length are interchangeable, the same recipe (length, number of pieces) is repeated
    in more rows as long as the pieces of its lengths last.
    """
    order = np.argsort(-lengths, kind="stable")
    remaining = np.bincount(lengths, minlength=seq_len + 1)
    taken = np.cumsum(remaining[::-1])[::-1] - remaining  # index in `order` of the next piece of each length
    present = np.flatnonzero(remaining).tolist()
    rows, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    while present:
        recipe = _row_recipe(remaining, present, seq_len)
        repeats = min(int(remaining[length]) // count for length, count in recipe)
        columns = []
        for length, count in recipe:
            used = repeats * count
            columns.append(order[taken[length] : taken[length] + used].reshape(repeats, count))
            taken[length] += used
            remaining[length] -= used
            if not remaining[length]:
                present.remove(length)
        rows.append(np.concatenate(columns, axis=1).ravel())
        sizes.append(np.full(repeats, sum(count for _, count in recipe)))
    pieces = np.concatenate(rows)
    return starts[pieces], lengths[pieces], np.concatenate(sizes)


def _row_recipe(remaining: np.ndarray, present: list[int], seq_len: int) -> list[tuple[int, int]]:
    """(length, number of pieces) of the next row by first-fit decreasing; `present` holds the lengths that remain, rising."""
    space, longest, recipe = seq_len, seq_len, []
    while i := bisect.bisect_right(present, longest):
        length = present[i - 1]
        count = min(int(remaining[length]), space // length)
        recipe.append((length, count))
        space -= length * count
        longest = min(space, length - 1)
    return recipe


def continued(segments: Segments, tokens: Tokens, passes: np.ndarray) -> Segments:
    """Gives segments the ids and positions of a stream, in which a document continues in the next row.

    Segments of one document in one pass have the same id, and neighbours in a stream have different ids. A position is that of
    the token in its document. `passes` are the numbers of earlier passes over the text, of each row, integers [B].
    """
    doc = np.searchsorted(tokens.ends, segments.start, "right")
    position = segments.start - np.where(doc > 0, tokens.ends[doc - 1], 0)
    number = passes[segments.row].astype(np.int64) * len(tokens.ends) + doc
    return dataclasses.replace(segments, segment_id=1 + number % _LARGEST_ID, position=position)


def stretches(tokens: Tokens, starts: np.ndarray, length: int) -> Segments:
    """Segments, as of `continued`, of rows that begin at any token of a text, whose first token follows its last.

    `starts` are the indices of the first input of each row, int64 [B], which count on after the last input of the text, and
    `length` is the number of inputs of a row, less than the tokens of the text.
    """
    total = int(tokens.ends[-1]) - 1  # the last token is a label only
    passes, starts = np.divmod(starts, total)
    rows = np.repeat(np.arange(len(starts)), 2)
    first = np.stack([starts, np.zeros_like(starts)], axis=1).reshape(-1)
    end = np.stack([np.minimum(starts + length, total), np.maximum(starts + length - total, 0)], axis=1).reshape(-1)
    passes = np.stack([passes, passes + 1], axis=1).reshape(-1)
    used = end > first
    segments = continued(_cut_at_documents(tokens.ends, first[used], end[used]), tokens, passes[used])
    return dataclasses.replace(segments, row=rows[used][segments.row])


def _cut_at_documents(ends: np.ndarray, start: np.ndarray, end: np.ndarray) -> Segments:
    """Segments of rows of consecutive tokens `[start, end)`, int64 [B], where documents end at `ends`."""
    first_doc = np.searchsorted(ends, start, "right")
    documents = np.searchsorted(ends, end - 1, "right") - first_doc + 1
    row = np.repeat(np.arange(len(start)), documents)
    doc = np.arange(len(row)) - np.repeat(np.cumsum(documents) - documents - first_doc, documents)
    segment_start = np.maximum(np.where(doc > 0, ends[doc - 1], 0), start[row])
    return Segments(row, segment_start, np.minimum(ends[doc], end[row]) - segment_start)


def assemble(tokens: Tokens, segments: Segments, rows: int, seq_len: int, pad_id: int) -> Batch:
    """Makes the arrays of a batch. Rows without segments are padding.

    A label is the token after its input. Weights are 0 on padding, on labels of another document, and on labels that carry no
    loss, and 1 elsewhere. Segment ids count from 1 within a row, and 0 is padding. Positions count from 0 within a segment.
    Both may be those of a stream, see `continued`.

    Args:
      tokens: The documents.
      segments: Segments of the rows.
      rows: Number of rows, B.
      seq_len: Number of inputs per row, T.
      pad_id: Token id of padding.

    Returns:
      "tokens", "labels", "segment_ids" and "positions", int32 [B, T], and "weights", float32 [B, T].

    Cost: O(B T); no other tokens are read.
    """
    length = segments.length
    before = np.cumsum(length) - length
    first = np.searchsorted(segments.row, segments.row)  # index of the first segment in the same row
    column = before - before[first]
    step = np.arange(length.sum())
    source = np.repeat(segments.start - before, length) + step
    target = np.repeat(segments.row * seq_len + column - before, length) + step
    doc = np.searchsorted(tokens.ends, segments.start, "right")
    loss_from = np.where(doc > 0, tokens.ends[doc - 1], 0) + tokens.skips[doc]
    if segments.loss_from is not None:
        loss_from = np.maximum(loss_from, segments.loss_from)
    label = source + 1
    segment_id = np.arange(len(first)) - first + 1 if segments.segment_id is None else segments.segment_id
    position = 0 if segments.position is None else segments.position
    carries_loss = (label < np.repeat(tokens.ends[doc], length)) & (label >= np.repeat(loss_from, length))
    shape = (rows, seq_len)
    return {
        "tokens": _scatter(tokens.tokens[source], target, pad_id, np.int32, shape),
        "labels": _scatter(tokens.tokens[label], target, pad_id, np.int32, shape),
        "segment_ids": _scatter(np.repeat(segment_id, length), target, 0, np.int32, shape),
        "positions": _scatter(np.repeat(position - before, length) + step, target, 0, np.int32, shape),
        "weights": _scatter(carries_loss, target, 0, np.float32, shape),
    }


def _scatter(values: np.ndarray, target: np.ndarray, fill: int, dtype: type, shape: tuple[int, int]) -> np.ndarray:
    """An array of `shape` with `values` at the flat indices `target`, and `fill` elsewhere."""
    out = np.full(shape[0] * shape[1], fill, dtype)
    out[target] = values
    return out.reshape(shape)
