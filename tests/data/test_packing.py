"""Packed rows predict every token exactly once from its document, with correct segment ids and positions."""

import collections
import tempfile

import grain
import hypothesis
import numpy as np
from hypothesis import strategies as st

from hpnlp.data import packing
from hpnlp.data.reading.token_store import Tokens, TokenWriter

PAD = 2**31 - 1
documents = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=25)
sources = st.lists(documents | st.just([]), min_size=1, max_size=4).filter(any)
row_lengths = st.integers(1, 17)


def write(docs: list[tuple[int, int]]) -> Tokens:
    """Documents of these lengths and skips, in which a token's id is its index."""
    with tempfile.TemporaryDirectory() as directory:
        with TokenWriter(directory, "x", vocab_size=1 << 20) as writer:
            for length, skip in docs:
                writer.add(np.arange(writer.tokens, writer.tokens + length), skip)
        return Tokens(directory, "x", writer.record())


def build(tokens: Tokens, rows, seq_len: int) -> packing.Batch:
    total = rows.ranges[-1][1]
    return packing.assemble(tokens, rows.segments(np.arange(total)), total, seq_len, PAD)


def expected_targets(docs: list[tuple[int, int]]) -> set[int]:
    """The tokens that carry loss: all but the first `skip` of each document."""
    targets, start = set(), 0
    for length, skip in docs:
        targets |= set(range(start + skip, start + length))
        start += length
    return targets


def check(docs: list[tuple[int, int]], tokens: Tokens, batch: packing.Batch, targets: set[int]) -> None:
    document = np.repeat(np.arange(len(docs)), [length for length, _ in docs])
    predicted = batch["labels"][batch["weights"] > 0].tolist()
    assert collections.Counter(predicted) == collections.Counter(targets)
    for name in ("tokens", "labels", "segment_ids", "positions"):
        assert batch[name].dtype == np.int32
    assert batch["weights"].dtype == np.float32
    for row in range(len(batch["tokens"])):
        ids, segments, positions, labels, weights = (
            batch[name][row].tolist() for name in ("tokens", "segment_ids", "positions", "labels", "weights")
        )
        for t, (i, segment, position) in enumerate(zip(ids, segments, positions, strict=True)):
            if segment == 0:
                assert (i, position, labels[t], weights[t]) == (PAD, 0, PAD, 0)
                continue
            assert labels[t] == i + 1
            assert not weights[t] or document[labels[t]] == document[i]
            continues = t > 0 and ids[t - 1] == i - 1 and document[i - 1] == document[i]
            assert segment == (segments[t - 1] if t else 0) + (not continues)
            assert position == (positions[t - 1] + 1 if continues else 0)


@hypothesis.settings(max_examples=40)
@hypothesis.given(documents, row_lengths)
def test_concat_predicts_every_token_once(docs, seq_len):
    tokens = write(docs)
    rows = packing.ConcatRows(tokens, seq_len, [(0, len(tokens.tokens))])
    batch = build(tokens, rows, seq_len)
    check(docs, tokens, batch, expected_targets(docs))
    assert np.all(batch["segment_ids"][:-1] > 0)  # only the last row is short


@hypothesis.settings(max_examples=40)
@hypothesis.given(documents, row_lengths)
def test_fit_predicts_every_token_once(docs, seq_len):
    tokens = write(docs)
    rows = packing.FitRows(tokens, seq_len, [(0, len(tokens.tokens))])
    batch = build(tokens, rows, seq_len)
    check(docs, tokens, batch, expected_targets(docs))
    begins = (batch["segment_ids"] > 0) & (batch["positions"] == 0)
    pieces = sum(-(-(length - 1) // seq_len) for length, _ in docs)
    assert begins.sum() == pieces  # no document has more pieces than necessary


@hypothesis.settings(max_examples=40)
@hypothesis.given(documents, row_lengths, st.data())
def test_stride_gives_context(docs, seq_len, data):
    tokens = write(docs)
    stride = data.draw(st.integers(1, seq_len))
    rows = packing.ConcatRows(tokens, seq_len, [(0, len(tokens.tokens))], stride)
    batch = build(tokens, rows, seq_len)
    predicted = batch["weights"] > 0
    assert collections.Counter(batch["labels"][predicted].tolist()) == collections.Counter(expected_targets(docs))
    starts = tokens.ends - [length for length, _ in docs]
    in_document = batch["tokens"] - starts[np.searchsorted(starts, batch["tokens"], "right") - 1]
    context = np.minimum(in_document, seq_len - stride)
    assert np.all(batch["positions"][predicted] >= context[predicted])


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.lists(documents | st.just([]), min_size=1, max_size=4).filter(any),
    row_lengths,
    st.sampled_from(["concat", "fit"]),
)
def test_rows_do_not_cross_ranges(sources, seq_len, kind):
    docs = [doc for source in sources for doc in source]
    tokens = write(docs)
    bounds = np.cumsum([0] + [sum(length for length, _ in source) for source in sources]).tolist()
    ranges = list(zip(bounds[:-1], bounds[1:], strict=True))
    make = packing.ConcatRows if kind == "concat" else packing.FitRows
    rows = make(tokens, seq_len, ranges)
    batch = build(tokens, rows, seq_len)
    check(docs, tokens, batch, expected_targets(docs))
    for (start, end), (first, last) in zip(ranges, rows.ranges, strict=True):
        here = batch["tokens"][first:last][batch["segment_ids"][first:last] > 0]
        assert np.all((start <= here) & (here < end))


@hypothesis.settings(max_examples=40)
@hypothesis.given(documents, row_lengths, st.data())
def test_rows_do_not_depend_on_the_batch(docs, seq_len, data):
    tokens = write(docs)
    rows = packing.ConcatRows(tokens, seq_len, [(0, len(tokens.tokens))])
    total = rows.ranges[0][1]
    hypothesis.assume(total)
    chosen = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=6)), np.int64)
    everything = build(tokens, rows, seq_len)
    batch = packing.assemble(tokens, rows.segments(chosen), len(chosen) + 1, seq_len, PAD)
    for name, values in everything.items():
        np.testing.assert_array_equal(batch[name][:-1], values[chosen])
    assert not batch["weights"][-1].any() and not batch["segment_ids"][-1].any()


def first_fit_decreasing(lengths: list[int], seq_len: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        row = next((row for row in rows if sum(row) + length <= seq_len), None)
        if row is None:
            rows.append(row := [])
        row.append(length)
    return rows


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.lists(st.integers(2, 18), min_size=1, max_size=60))
def test_fit_is_first_fit_decreasing(lengths):
    tokens = write([(length, 1) for length in lengths])
    rows = packing.FitRows(tokens, 17, [(0, len(tokens.tokens))])
    batch = build(tokens, rows, 17)
    made = [[n for n in np.bincount(row)[1:].tolist() if n] for row in batch["segment_ids"]]
    naive = first_fit_decreasing([length - 1 for length in lengths], 17)
    assert sorted(map(sorted, made)) == sorted(map(sorted, naive))


def test_fit_needs_no_more_rows_than_grain():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(0.02, 2000), 128)
    tokens = write([(int(length) + 1, 1) for length in lengths])
    fit_rows = packing.FitRows(tokens, 128, [(0, len(tokens.tokens))]).ranges[0][1]
    source = grain.MapDataset.source(lengths.tolist()).map(lambda length: {"x": np.zeros(length, np.int32)})
    grain_rows = grain.experimental.FirstFitPackIterDataset(
        source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct={"x": 128},
        num_packing_bins=64,
    )
    assert lengths.sum() / 128 <= fit_rows <= sum(1 for _ in grain_rows)
