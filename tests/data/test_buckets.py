"""Padding, buckets and packing of texts of different lengths."""

import itertools

import numpy as np
import pytest

from hpnlp.data import buckets
from tests.messages import raises

RNG = np.random.default_rng(0)
LENGTHS = np.minimum(RNG.geometric(0.03, 300), 100)


def padding(lengths, widths):
    return int(np.sum(np.array(widths)[np.searchsorted(widths, lengths)] - lengths))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_widths_leave_the_least_padding(count):
    lengths = RNG.integers(1, 14, 60)
    widths = buckets.bucket_widths(lengths, count)
    candidates = np.unique(lengths)
    choices = [(*c, candidates[-1]) for n in range(count) for c in itertools.combinations(candidates[:-1], n)]
    assert len(widths) == count and padding(lengths, widths) == min(padding(lengths, c) for c in choices)


def test_widths_are_multiples_and_few():
    widths = buckets.bucket_widths(LENGTHS, 4, multiple=16)
    assert all(width % 16 == 0 for width in widths) and widths == sorted(widths) and len(widths) == 4
    assert widths[-1] == 112 and buckets.bucket_widths(np.full(9, 7), 4) == [7]


BATCHES = {
    "padded": buckets.padded_batches(LENGTHS, 128, 512),
    "bucketed": buckets.bucketed_batches(LENGTHS, [16, 32, 64, 128], 512),
    "packed": buckets.packed_batches(LENGTHS, 128, 512),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_have_every_text_once_and_no_row_is_too_long(name):
    batches = BATCHES[name]
    rows = [(batch.width, row) for batch in batches for row in batch.rows]
    assert sorted(number for _, row in rows for number in row) == list(range(len(LENGTHS)))
    assert all(LENGTHS[row].sum() <= width for width, row in rows)
    assert all(batch.width * len(batch.rows) <= 512 for batch in batches)


def test_shares_of_padding_fall():
    shares = {name: buckets.padding_share(LENGTHS, batches) for name, batches in BATCHES.items()}
    assert shares["padded"] == pytest.approx(1 - LENGTHS.mean() / 128) and shares["packed"] < 0.05
    assert shares["padded"] > shares["bucketed"] > shares["packed"]


def test_arrays_have_a_segment_for_each_text():
    texts = [np.array([5, 6]), np.array([7]), np.array([8, 9, 10])]
    batch = buckets.batch_arrays(texts, buckets.Rows(4, [[1, 0], [2]]), 3, pad_id=1)
    assert batch["tokens"].tolist() == [[7, 5, 6, 1], [8, 9, 10, 1], [1, 1, 1, 1]]
    assert batch["segment_ids"].tolist() == [[1, 2, 2, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 0, 1, 0], [0, 1, 2, 0], [0, 0, 0, 0]]


def test_no_texts_have_no_batches():
    none = np.zeros(0, int)
    for batches in (buckets.padded_batches(none, 8, 8), buckets.packed_batches(none, 8, 8)):
        assert batches == [] and buckets.padding_share(none, batches) == 0


def test_invalid_arguments_raise():
    for function, arguments, message in (
        (buckets.bucket_widths, ([], 2), "0 lengths, count=2, multiple=1: expected at least 1"),
        (buckets.padded_batches, ([5], 4, 8), "a text has 5 tokens, and rows have 4: cut the text"),
        (buckets.bucket_widths, ([2, 0], 2), "text 1 has 0 tokens: expected at least 1: leave it out"),
        (buckets.bucketed_batches, ([5], [8, 4], 8), r"widths=\[8, 4\]: expected numbers from 1 on that rise"),
        (buckets.packed_batches, ([5], 8, 7), "tokens=7: a row has 8: pass at least as many"),
    ):
        raises(message, function, np.array(arguments[0], int), *arguments[1:])
