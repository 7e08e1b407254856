"""Packing, Huffman codes and sparse codes: exact round trips, sizes, and errors for damaged data."""

import contextlib
import heapq

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpnlp.compress.storage import huffman, huffman_codes, packing, sparse_codes
from hpnlp.errors import InputError
from hpnlp.ops.helpers.checksum import word_sum

DRAW = np.random.default_rng(0)
SYMBOLS = {
    "empty": np.zeros(0, np.uint8),
    "one symbol": np.full(2000, 7, np.uint8),
    "one element": np.array([300], np.uint16),
    "skewed": np.where(DRAW.random(20_000) < 0.98, 0, DRAW.integers(0, 30, 20_000)).astype(np.uint8),
    "ternary": DRAW.integers(0, 3, 5003).astype(np.uint8),
    "uniform bytes": DRAW.integers(0, 256, 30_000).astype(np.uint8),
    "geometric": np.minimum(DRAW.geometric(0.1, 30_000), 255).astype(np.uint8),
    "16 bits": DRAW.integers(0, 1 << 16, 90_000).astype(np.uint16),
    "every symbol": np.arange(1 << 16, dtype=np.uint16),
    "doubling": np.repeat(np.arange(18, dtype=np.uint8), 1 << np.arange(18)),  # unlimited codes have 17 bits
}


def entropy_bytes(x):
    counts = np.bincount(x.reshape(-1))
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / x.size)).sum()) / 8


def huffman_bits(counts):
    """Total bits of an unlimited Huffman code, by merging the two rarest symbols."""
    heap, total = sorted(int(c) for c in counts if c), 0
    while len(heap) > 1:
        weight = heapq.heappop(heap) + heapq.heappop(heap)
        total += weight
        heapq.heappush(heap, weight)
    return total


@pytest.mark.parametrize("bits", [*range(1, 17), packing.TRITS])
def test_packing_round_trips(bits):
    rng = np.random.default_rng(1)
    levels = 3 if bits == packing.TRITS else 1 << bits
    for count in (0, 1, 2, 7, 8, 9, 41):
        codes = rng.integers(0, levels, count)
        packed = packing.pack(codes, bits)
        assert packed.nbytes == packing.packed_size(count, bits)
        np.testing.assert_array_equal(packing.unpack(packed, bits, count), codes)
        values = rng.normal(size=levels).astype(np.float32)
        unpacked = packing.unpack(packed, bits, count, values)
        assert unpacked.dtype == np.float32
        np.testing.assert_array_equal(unpacked, values[codes])


def test_packed_bits_are_a_little_endian_stream():
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 32, 21)
    stream = sum(int(code) << (5 * i) for i, code in enumerate(codes))
    assert packing.pack(codes, 5).tobytes() == stream.to_bytes(14, "little")
    assert packing.pack(np.array([1, 2, 0, 1, 2, 2]), 1.6).tolist() == [1 + 2 * 3 + 27 + 2 * 81, 2]


@pytest.mark.parametrize("name", SYMBOLS)
def test_huffman_round_trips(name):
    rng = np.random.default_rng(1)
    symbols = SYMBOLS[name]
    stream = huffman.encode(symbols)
    decoded = huffman.decode(stream)
    np.testing.assert_array_equal(decoded, symbols)
    assert decoded.dtype == (np.uint8 if symbols.max(initial=0) < 256 else np.uint16)
    values = rng.normal(size=1 << 16).astype(np.float32)
    np.testing.assert_array_equal(huffman.decode(stream, values), values[symbols])


@pytest.mark.parametrize(("name", "excess"), [("ternary", 1.05), ("uniform bytes", 1.02), ("geometric", 1.02)])
def test_huffman_streams_are_close_to_the_entropy(name, excess):
    assert len(huffman.encode(SYMBOLS[name])) < excess * entropy_bytes(SYMBOLS[name]) + 30


@given(hnp.arrays(np.uint8, st.integers(0, 3000), elements=st.integers(0, 5), fill=st.integers(0, 5)))
@settings(max_examples=40)
def test_drawn_symbols_round_trip(symbols):
    np.testing.assert_array_equal(huffman.decode(huffman.encode(symbols)), symbols)
    np.testing.assert_array_equal(sparse_codes.decode(sparse_codes.encode(symbols)), symbols)


def test_streams_decode_together():
    arrays = list(SYMBOLS.values())
    decoded = huffman.decode_all([(huffman.encode(x), None) for x in arrays])
    for x, y in zip(arrays, decoded, strict=True):
        np.testing.assert_array_equal(x, y)


def test_lanes_of_several_blocks_decode(monkeypatch):
    monkeypatch.setattr(huffman, "_MAX_LANES", 7)
    test_streams_decode_together()


@given(st.lists(st.integers(0, 100), min_size=2, max_size=20), st.integers(7, 16))
@settings(max_examples=40)
def test_code_lengths_are_complete_and_optimal(counts, limit):
    counts = np.array(counts)
    lengths = huffman_codes.code_lengths(counts, limit)
    assert lengths.max() <= limit
    assert ((lengths > 0) == (counts > 0)).all()
    if np.count_nonzero(counts):
        huffman_codes.check_lengths(lengths)
    if np.count_nonzero(counts) > 1 and limit == 16:  # 20 counts up to 100 need fewer than 16 bits
        assert counts @ lengths.astype(int) == huffman_bits(counts)


def test_limited_lengths_are_optimal():
    counts = 1 << np.arange(12)
    lengths = huffman_codes.code_lengths(counts, 5).astype(int)
    huffman_codes.check_lengths(lengths.astype(np.uint8))
    assert lengths.max() == 5

    def cheapest(symbol, room, longest):
        """Least bits of symbols up to `symbol`, whose codes take `room` 32nds, with lengths up to `longest`."""
        if symbol < 0:
            return 0 if room == 0 else np.inf
        options = [n for n in range(1, longest + 1) if 32 >> n <= room]
        return min((n * counts[symbol] + cached(symbol - 1, room - (32 >> n), 5) for n in options), default=np.inf)

    known = {}

    def cached(*key):
        if key not in known:
            known[key] = cheapest(*key)
        return known[key]

    assert counts @ lengths == cached(11, 32, 5)


def test_codes_are_canonical():
    lengths = np.array([2, 1, 3, 0, 3], np.uint8)
    assert huffman_codes.canonical_codes(lengths).tolist() == [0b01, 0b0, 0b011, 0, 0b111]  # first bit lowest


@pytest.mark.parametrize("name", ["skewed", "16 bits", "ternary"])
def test_damaged_streams_raise(name):
    stream = huffman.encode(SYMBOLS[name])
    for byte in {0, 5, 13, 30, len(stream) // 2, len(stream) - 1}:
        flipped = bytearray(stream)
        flipped[byte] ^= 4
        with pytest.raises(InputError, match="damaged"):
            huffman.decode(bytes(flipped))
    for size in (0, 10, huffman.HEADER_SIZE, len(stream) - 1):
        with pytest.raises(InputError, match="damaged"):
            huffman.decode(stream[:size])


def test_lanes_of_more_steps_than_are_written_raise(monkeypatch):
    """A long lane beside thousands of short ones would take a matrix of the product of both."""
    monkeypatch.setattr(huffman, "STEPS", 513)
    stream = huffman.encode(SYMBOLS["uniform bytes"][:513])
    monkeypatch.undo()
    with pytest.raises(InputError, match="its header is impossible"):
        huffman.decode(stream)


def test_streams_with_valid_checksums_and_wrong_contents_raise():
    stream = huffman.encode(SYMBOLS["geometric"])
    draw = np.random.default_rng(1)
    for byte in [*range(4, huffman.HEADER_SIZE + 40), *draw.integers(0, len(stream), 100)]:
        flipped = bytearray(stream)
        flipped[byte] ^= 1 << int(draw.integers(8))
        data = bytes(flipped[4:])
        sealed = huffman._checksum(data).to_bytes(4, "little") + data
        with contextlib.suppress(InputError):
            huffman.decode(sealed)  # a flipped bit may give other symbols of the same lengths


@pytest.mark.parametrize("gap_bits", [2, 5, 9, 16, None])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.1, 1.0])
def test_sparse_codes_round_trip(gap_bits, density):
    rng = np.random.default_rng(1)
    codes = np.where(rng.random(5000) < density, rng.integers(1, 33, 5000), 0).astype(np.uint8)
    np.testing.assert_array_equal(sparse_codes.decode(sparse_codes.encode(codes, gap_bits)), codes)


def test_fillers_follow_the_paper():
    # Figure 2 of Han et al. 2016: positions 1, 4 and 15 with gaps of 3 bits; their indices count from the previous entry.
    codes = np.zeros(16, np.uint8)
    codes[[1, 4, 15]] = 34, 9, 17
    gaps, entries = sparse_codes.split(codes, 3)
    assert (gaps + 1).tolist() == [2, 3, 8, 3]
    assert entries.tolist() == [34, 9, 0, 17]


def test_checksums_equal_those_of_checkpoints():
    rng = np.random.default_rng(1)
    from hpnlp.training.files.checksum import checksum

    for x in (rng.integers(0, 255, (300, 301)).astype(np.uint8), rng.normal(size=(7, 9)).astype(np.float32)):
        assert checksum({"x": x})["['x']"].endswith(f":{word_sum(x)}")
        assert word_sum(x[:0]) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: packing.pack(np.zeros(3, int), 17), "bits=17: expected an integer from 1 to 16"),
        (lambda: packing.pack(np.array([-1, 1]), 2), "between -1 and 1: 2 bits hold 0 to 3"),
        (lambda: packing.pack(np.array([3]), 1.6), "hold 0 to 2"),
        (lambda: packing.pack(np.zeros(3), 2), "float64: expected integers"),
        (lambda: packing.unpack(np.zeros(3, np.uint8), 2, 3), r"uint8\[3\]: 3 codes of 2 bits take uint8\[1\]"),
        (lambda: packing.unpack(np.full(2, 255, np.uint8), 1.6, 6), "above 2"),
        (lambda: packing.unpack(np.full(2, 255, np.uint8), 2, 6, np.zeros(3)), "above 2"),
        (lambda: packing.unpack(np.full(3, 255, np.uint8), 3, 8, np.zeros(7)), "at most 6"),
        (lambda: huffman.encode(np.zeros(3, int)), "int64: expected uint8 or uint16"),
        (lambda: huffman.decode(huffman.encode(np.arange(9, dtype=np.uint8)), np.zeros(8)), "9 symbols: got 8 values"),
        (lambda: huffman_codes.code_lengths(np.ones(5), 2), "5 symbols occur: codes of 2 bits exist for 4"),
        (lambda: sparse_codes.split(np.zeros(3, np.uint8), 1), "gap_bits=1: expected 2 to 16"),
        (lambda: sparse_codes.decode(b"12"), "2 bytes, fewer than its header"),
        (lambda: sparse_codes.merge(np.array([3]), np.array([1]), 3), "entry 3 of an array of 3"),
        (lambda: word_sum(np.zeros(3)), "expected elements of 1, 2 or 4 bytes"),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()
