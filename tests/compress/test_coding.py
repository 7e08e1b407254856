"""Packing, Huffman coding by zlib and sparse codes: exact round trips, sizes, and errors for damaged data."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpnlp.compress.storage import deflate, packing, sparse_codes
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
    "doubling": np.repeat(np.arange(18, dtype=np.uint8), 1 << np.arange(18)),
}


def entropy_bytes(x):
    counts = np.bincount(x.reshape(-1))
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / x.size)).sum()) / 8


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
def test_huffman_codes_round_trip(name, monkeypatch):
    rng = np.random.default_rng(1)
    symbols = SYMBOLS[name]
    values = rng.normal(size=int(symbols.max(initial=0)) + 1).astype(np.float32)
    for block in (deflate.BLOCK, 1 << 10):  # several threads decode several blocks
        monkeypatch.setattr(deflate, "BLOCK", block)
        blocks = deflate.encode(symbols, len(values))
        np.testing.assert_array_equal(deflate.decode(blocks, len(values), symbols.size), symbols)
        np.testing.assert_array_equal(deflate.decode(blocks, len(values), symbols.size, values), values[symbols])


@pytest.mark.parametrize(("name", "excess"), [("ternary", 1.05), ("uniform bytes", 1.02), ("geometric", 1.02)])
def test_huffman_codes_are_close_to_the_entropy(name, excess):
    blocks = deflate.encode(SYMBOLS[name], int(SYMBOLS[name].max()) + 1)
    assert sum(map(len, blocks)) < excess * entropy_bytes(SYMBOLS[name]) + 80


def test_codes_of_bytes_are_at_most_as_large_as_stated():
    for count in (1, 1000, 100_000):
        (block,) = deflate.encode(DRAW.integers(0, 256, count).astype(np.uint8), 256)
        assert len(block) <= deflate.largest_size(count)


@given(hnp.arrays(np.uint8, st.integers(0, 3000), elements=st.integers(0, 5), fill=st.integers(0, 5)))
@settings(max_examples=40)
def test_drawn_symbols_round_trip(symbols):
    np.testing.assert_array_equal(deflate.decode(deflate.encode(symbols, 6), 6, symbols.size), symbols)
    gaps, entries = sparse_codes.split(symbols, 4)
    np.testing.assert_array_equal(sparse_codes.merge(gaps, entries, symbols.size, 4), symbols)


@pytest.mark.parametrize("gap_bits", [2, 5, 9, 16])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.1, 1.0])
def test_sparse_codes_round_trip(gap_bits, density):
    rng = np.random.default_rng(1)
    codes = np.where(rng.random(5000) < density, rng.integers(1, 33, 5000), 0).astype(np.uint8)
    gaps, entries = sparse_codes.split(codes, gap_bits)
    assert gaps.max(initial=0) < 1 << gap_bits
    np.testing.assert_array_equal(sparse_codes.merge(gaps, entries, codes.size, gap_bits), codes)


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


BLOCKS = deflate.encode(np.arange(9, dtype=np.uint8), 9)


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: packing.pack(np.array([-1, 1]), 2), "between -1 and 1: 2 bits hold 0 to 3"),
        (lambda: packing.pack(np.array([3]), 1.6), "hold 0 to 2"),
        (lambda: packing.unpack(np.zeros(3, np.uint8), 2, 3), "3 bytes for 3 codes of 2 bits: expected 1"),
        (lambda: deflate.decode(BLOCKS, 9, 11), "5 bytes for 11 codes of 4 bits"),
        (lambda: deflate.inflate(BLOCKS[0][:-1]), "does not end within 1048576 bytes"),
        (lambda: deflate.inflate(BLOCKS[0], 4), "does not end within 4 bytes"),
        (lambda: deflate.inflate(BLOCKS[0] ^ 1), "zlib cannot decode it"),
        (lambda: sparse_codes.split(np.zeros(3, np.uint8), 1), "gap_bits=1: expected 2 to 16"),
        (lambda: sparse_codes.merge(np.array([3]), np.array([1]), 3, 2), "entry 3 is the last of a sparse array of 3"),
        (lambda: word_sum(np.zeros(3)), "expected elements of 1, 2 or 4 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
