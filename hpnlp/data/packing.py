"""Rows of a fixed length from documents of any length.

A row is a list of segments: runs of neighbouring tokens of one document. `ConcatRows` and `FitRows` say which segments
a row has, by its number, so that rows can be shuffled, dealt to processes and resumed by number alone; `assemble` turns
segments into arrays.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from hpnlp.data.token_store import Tokens

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Segments:
    """Segments of some rows, sorted by row. row: which row of the batch; start: the first token, counted over all
    documents; length: how many tokens it gives as inputs; loss_from: labels before this token carry no loss."""

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    loss_from: np.ndarray | None = None


class ConcatRows:
    """Documents one after another, cut into rows of `seq_len` inputs; the label of a row's last input is the next row's
    first input. Only the last row of a range is short.

    ranges: token ranges `[start, end)` that rows do not cross, each of whole documents. stride: how far a row starts
    after the one before it; under `seq_len`, rows overlap and the tokens seen before are context without loss.
    """

    def __init__(self, tokens: Tokens, seq_len: int, ranges: Sequence[tuple[int, int]], stride: int | None = None):
        self._tokens = tokens
        self._seq_len = seq_len
        self._stride = stride or seq_len
        self._starts, self._ends = np.array(ranges, np.int64).reshape(-1, 2).T
        labels = np.maximum(self._ends - self._starts - 1, 0)
        overflow = np.maximum(labels - seq_len, 0)
        self._first_rows = np.concatenate([[0], np.cumsum((labels > 0) + -(-overflow // self._stride))])

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The row numbers of each token range."""
        return list(zip(self._first_rows[:-1].tolist(), self._first_rows[1:].tolist(), strict=True))

    def segments(self, rows: np.ndarray) -> Segments:
        """The segments of `rows`."""
        ends = self._tokens.ends
        of_range = np.searchsorted(self._first_rows, rows, "right") - 1
        in_range = rows - self._first_rows[of_range]
        start = self._starts[of_range] + in_range * self._stride
        # The last token of a range is a label only: it has none of its own.
        end = np.minimum(start + self._seq_len, self._ends[of_range] - 1)
        first_doc = np.searchsorted(ends, start, "right")
        documents = np.searchsorted(ends, end - 1, "right") - first_doc + 1
        row = np.repeat(np.arange(len(rows)), documents)
        doc = np.arange(len(row)) - np.repeat(np.cumsum(documents) - documents - first_doc, documents)
        segment_start = np.maximum(np.where(doc > 0, ends[doc - 1], 0), start[row])
        segment_end = np.minimum(ends[doc], end[row])
        fresh = np.where(in_range > 0, start + self._seq_len - self._stride + 1, 0)
        return Segments(row, segment_start, segment_end - segment_start, fresh[row])


class FitRows:
    """Whole documents, each in one row; longer ones are cut into pieces of `seq_len` inputs and a rest.

    Rests and short documents share rows by first-fit decreasing. The plan is made once, over the histogram of lengths
    (rows of equal make-up are packed together, as in Krell et al. 2021, arXiv 2107.02027): time O(documents +
    seq_len^2), memory about 20 bytes a piece. ranges: token ranges whose documents do not share rows.
    """

    def __init__(self, tokens: Tokens, seq_len: int, ranges: Sequence[tuple[int, int]]):
        self._first_rows = [0]
        plans = []
        for start, end in ranges:
            plans.append(_fit(*_pieces(tokens, seq_len, start, end), seq_len))
            self._first_rows.append(self._first_rows[-1] + len(plans[-1][2]))
        self._piece_starts, self._piece_lengths, sizes = (np.concatenate(parts) for parts in zip(*plans, strict=True))
        self._row_ends = np.cumsum(sizes)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The row numbers of each token range."""
        return list(zip(self._first_rows[:-1], self._first_rows[1:], strict=True))

    def segments(self, rows: np.ndarray) -> Segments:
        """The segments of `rows`."""
        first = np.where(rows > 0, self._row_ends[rows - 1], 0)
        count = self._row_ends[rows] - first
        row = np.repeat(np.arange(len(rows)), count)
        piece = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first, count)
        return Segments(row, self._piece_starts[piece], self._piece_lengths[piece])


def _pieces(tokens: Tokens, seq_len: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """(first token, number of inputs) of the pieces of the documents within `[start, end)`."""
    first, after = np.searchsorted(tokens.ends, [start, end], "right")
    doc_ends = tokens.ends[first:after]
    doc_starts = np.concatenate([[start], doc_ends])[:-1]
    # The last token of a document is a label only.
    inputs = doc_ends - doc_starts - 1
    counts = -(-inputs // seq_len)
    in_doc = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    lengths = np.minimum(seq_len, np.repeat(inputs, counts) - in_doc * seq_len)
    return np.repeat(doc_starts, counts) + in_doc * seq_len, lengths.astype(np.int32)


def _fit(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Orders pieces by row: (starts, lengths, pieces a row).

    First-fit decreasing fills the first row with the longest piece that still fits until none does, then the next row
    from what is left. As pieces of one length are alike, so are rows, for as long as the lengths in them last.
    """
    order = np.argsort(-lengths, kind="stable")
    left = np.bincount(lengths, minlength=seq_len + 1)
    taken = np.cumsum(left[::-1])[::-1] - left  # where, in `order`, the pieces of a length begin
    present = np.flatnonzero(left).tolist()
    rows, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    while present:
        space, recipe, longest = seq_len, [], seq_len
        while i := bisect.bisect_right(present, longest):
            length = present[i - 1]
            times = min(int(left[length]), space // length)
            recipe.append((length, times))
            space -= length * times
            longest = min(space, length - 1)
        alike = min(int(left[length]) // times for length, times in recipe)
        block = []
        for length, times in recipe:
            used = alike * times
            block.append(order[taken[length] : taken[length] + used].reshape(alike, times))
            taken[length] += used
            left[length] -= used
            if not left[length]:
                present.remove(length)
        rows.append(np.concatenate(block, axis=1).ravel())
        sizes.append(np.full(alike, sum(times for _, times in recipe)))
    pieces = np.concatenate(rows)
    return starts[pieces], lengths[pieces], np.concatenate(sizes)


def assemble(tokens: Tokens, segments: Segments, rows: int, seq_len: int, pad_id: int) -> Batch:
    """The arrays of `rows` rows: tokens, labels, segment_ids, positions int32 and weights float32, `[rows, seq_len]`.

    A label is the token after its input. Weights are 0 or 1: 0 on padding, on labels of another document, and on tokens
    that carry no loss. Segment ids count from 1 within a row, 0 is padding; positions count from 0 within a segment.
    Cost: O(rows * seq_len), the tokens of these rows are read and no others.
    """
    length = segments.length
    before = np.cumsum(length) - length
    first = np.searchsorted(segments.row, segments.row)  # the first segment of the same row
    column = before - before[first]
    step = np.arange(length.sum())
    source = np.repeat(segments.start - before, length) + step
    target = np.repeat(segments.row * seq_len + column - before, length) + step
    doc = np.searchsorted(tokens.ends, segments.start, "right")
    loss_from = np.where(doc > 0, tokens.ends[doc - 1], 0) + tokens.skips[doc]
    if segments.loss_from is not None:
        loss_from = np.maximum(loss_from, segments.loss_from)
    label = source + 1
    carries_loss = (label < np.repeat(tokens.ends[doc], length)) & (label >= np.repeat(loss_from, length))

    def spread(values: np.ndarray, fill: int, dtype: type) -> np.ndarray:
        out = np.full(rows * seq_len, fill, dtype)
        out[target] = values
        return out.reshape(rows, seq_len)

    return {
        "tokens": spread(tokens.tokens[source], pad_id, np.int32),
        "labels": spread(tokens.tokens[label], pad_id, np.int32),
        "segment_ids": spread(np.repeat(np.arange(len(first)) - first + 1, length), 0, np.int32),
        "positions": spread(np.repeat(-before, length) + step, 0, np.int32),
        "weights": spread(carries_loss, 0, np.float32),
    }
