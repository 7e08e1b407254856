"""Huffman coding of integer arrays, decoded by numpy in lockstep over many lanes.

The symbols are divided into lanes of about 512 look-ups each, whose bits follow one another in the stream. All lanes are
decoded together: one step of a few array operations reads the next code of every lane. Symbols of small alphabets are coded in
groups of 2, 4 or 8, so that one look-up gives several symbols and frequent symbols take less than a bit. Look-up s of lane j
is group number s * lanes + j of the array, so that the decoded matrix [steps, lanes] is the array in order.

A stream consists of a header, the lengths of the codes (zlib), the lengths of the lanes (packed), and the codes.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from hpnlp.compress.storage import huffman_codes, packing
from hpnlp.errors import InputError
from hpnlp.ops.helpers.checksum import word_sum

STEPS = 512  # look-ups of a lane
GROUPS = (1, 2, 4, 8)  # symbols of a look-up
# A larger alphabet of groups needs longer tables, of codes in the stream and of look-ups in memory.
_MAX_GROUPED = 1 << 13
_MAX_ALPHABET = 1 << 16
_MAX_LANES = 1 << 13  # decoded together; more would leave the L2 cache
# Checksum of what follows, symbols, symbols of the alphabet, bytes of the code lengths, shortest lane in bits, steps of a lane,
# symbols of a group, width of the packed lane lengths.
_HEADER = struct.Struct("<IQIIIHBB")
HEADER_SIZE = _HEADER.size
_DAMAGED = "the Huffman stream is damaged: encode the array again, or restore the file"


def encode(symbols: np.ndarray) -> bytes:
    """Encodes an array.

    Args:
      symbols: uint8 or uint16 array of any shape, read in C order. Alphabets without gaps, 0 to n - 1, give the smallest
        streams.

    Returns:
      The stream, which holds the number of symbols but not the shape.

    Raises:
      InputError: Another dtype.

    Cost: About 20 array operations for each symbol, and 16 sorts of the alphabet of groups.
    """
    if symbols.dtype not in (np.uint8, np.uint16):
        raise InputError(f"symbols are {symbols.dtype}: expected uint8 or uint16; number the distinct values from 0")
    flat = np.ascontiguousarray(symbols).reshape(-1)
    if not flat.size:
        return _with_checksum((0, 0, 0, 0, 0, 1, 0), b"")
    alphabet = int(flat.max()) + 1
    group, ids, lengths = _choose_group(flat, alphabet)
    lanes = -(-len(ids) // STEPS)
    steps = -(-len(ids) // lanes)
    padding = np.full(lanes * steps - len(ids), np.flatnonzero(lengths)[np.argmin(lengths[lengths > 0])], np.uint16)
    matrix = np.concatenate([ids, padding]).reshape(steps, lanes).T
    bits = np.take(lengths, matrix).sum(axis=1, dtype=np.int64)
    shortest = int(bits.min())
    width = int(bits.max() - shortest).bit_length()
    lane_bits = packing.pack(bits - shortest, width).tobytes() if width else b""
    compressed = zlib.compress(lengths.tobytes(), 9)
    codes = _concatenate_codes(matrix, lengths, int(bits.sum()))
    fields = (flat.size, alphabet, len(compressed), shortest, steps, group, width)
    return _with_checksum(fields, compressed + lane_bits + codes)


def count(stream: bytes) -> int:
    """Number of symbols according to the header of a stream, which is not checked.

    Args:
      stream: Result of `encode`.

    Returns:
      The number; 0 if the stream is shorter than a header.
    """
    return _HEADER.unpack_from(stream)[1] if len(stream) >= HEADER_SIZE else 0


def decode(stream: bytes | np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
    """Decodes a stream of `encode`.

    Args:
      stream: The stream, as bytes or a uint8 array.
      values: [n] values of the symbols, of any dtype; the symbols themselves by default.

    Returns:
      [count] values, or symbols as uint8 if the alphabet has at most 256, otherwise uint16.

    Raises:
      InputError: The stream is damaged, or has symbols without a value.

    Cost: 3 to 10 ns for each look-up on one core, of which a symbol takes 1/8 to 1; streams of fewer than 1,000 lanes
    (500,000 symbols) take longer for each symbol, so decode several together with `decode_all`.
    """
    return decode_all([(stream, values)])[0]


def decode_all(streams: Sequence[tuple[bytes | np.ndarray, np.ndarray | None]]) -> list[np.ndarray]:
    """Decodes several streams together, which is faster than one after another where they are short.

    Args:
      streams: (stream, values) of each, as `decode` takes them.

    Returns:
      The arrays that `decode` returns.

    Raises:
      InputError: A stream is damaged, or has symbols without a value. Nothing is decoded before all streams are checked.
    """
    parsed = [_parse(stream, values) for stream, values in streams]
    tables = [_Tables(stream) for stream in parsed]
    outputs = [stream.allocate() for stream in parsed]
    for block in _blocks(parsed):
        _decode_block(block, parsed, tables, outputs)
    return [output.reshape(-1)[: stream.count] for output, stream in zip(outputs, parsed, strict=True)]


def _choose_group(flat: np.ndarray, alphabet: int) -> tuple[int, np.ndarray, np.ndarray]:
    """(group, uint16 group numbers, code lengths) of the group size that gives the smallest stream."""
    best: tuple[float, int, np.ndarray, np.ndarray] | None = None
    for group in GROUPS:
        size = alphabet**group
        if group > 1 and (size > _MAX_GROUPED or group > flat.size):
            break
        padded = np.concatenate([flat, np.full(-flat.size % group, flat[-1], flat.dtype)])
        columns = padded.reshape(-1, group)
        ids = columns[:, -1].astype(np.uint16)
        for column in reversed(range(group - 1)):
            ids = ids * np.uint16(alphabet) + columns[:, column]
        counts = np.bincount(ids, minlength=size)
        lengths = huffman_codes.choose_lengths(counts)
        bits = int(counts @ lengths.astype(np.int64)) + 8 * len(zlib.compress(lengths.tobytes(), 9))
        if best is None or bits < best[0]:
            best = bits, group, ids, lengths
    assert best is not None
    return best[1:]


def _concatenate_codes(matrix: np.ndarray, lengths: np.ndarray, total: int) -> bytes:
    """The codes of the rows of [lanes, steps] symbols, `total` bits, one after another, in whole bytes."""
    codes = huffman_codes.canonical_codes(lengths).astype(np.uint64)
    words = np.zeros(-(-total // 32) + 1, np.uint64)
    position = 0
    rows = max(1, (1 << 20) // matrix.shape[1])
    for start in range(0, len(matrix), rows):  # in parts, to bound the memory
        symbols = matrix[start : start + rows].reshape(-1)
        ends = position + np.cumsum(np.take(lengths, symbols), dtype=np.int64)
        starts = np.concatenate([[position], ends[:-1]])
        position = int(ends[-1])
        word = starts >> 5
        shifted = np.take(codes, symbols) << (starts & 31).astype(np.uint64)
        first = np.flatnonzero(np.diff(word, prepend=-1))  # of the codes that begin in the same word
        # The bits of different codes are disjoint, so that sums are unions.
        sums = np.add.reduceat(shifted, first)
        words[word[first]] += sums & np.uint64(0xFFFFFFFF)
        words[word[first] + 1] += sums >> np.uint64(32)
    return words.astype("<u4").tobytes()[: -(-total // 8)]


def _with_checksum(fields: tuple[int, ...], payload: bytes) -> bytes:
    rest = _HEADER.pack(0, *fields)[4:] + payload
    return struct.pack("<I", _checksum(rest)) + rest


def _checksum(data: bytes) -> int:
    return word_sum(np.frombuffer(data + bytes(-len(data) % 4), "<u4"))


@dataclasses.dataclass(frozen=True)
class _Stream:
    """A checked stream. `starts` are the bits at which lanes begin in `data`, and the end of the last one."""

    count: int
    group: int
    alphabet: int
    steps: int
    lanes: int
    lengths: np.ndarray
    starts: np.ndarray
    data: np.ndarray
    values: np.ndarray

    def allocate(self) -> np.ndarray:
        return np.empty((self.steps, self.lanes, self.group), self.values.dtype)


class _Tables:
    """Look-up tables of a stream."""

    def __init__(self, stream: _Stream):
        self.group_values = np.empty((0, stream.group), stream.values.dtype)
        self.bits, self.mask = 0, 0
        if stream.count:
            self.bits, self.entries = huffman_codes.decoding_table(stream.lengths)
            self.mask = (1 << self.bits) - 1
            numbers = np.arange(len(stream.lengths))[:, None]
            self.group_values = stream.values[numbers // stream.alphabet ** np.arange(stream.group) % stream.alphabet]


def _parse(stream: bytes | np.ndarray, values: np.ndarray | None) -> _Stream:
    """Checks a stream. Nothing is allocated that is larger than the stream allows for."""
    data = bytes(stream) if isinstance(stream, bytes) else stream.tobytes()
    if len(data) < HEADER_SIZE:
        raise InputError(f"{_DAMAGED} (it has {len(data)} bytes, fewer than its header)")
    checksum, count, alphabet, compressed, shortest, steps, group, width = _HEADER.unpack_from(data)
    if checksum != _checksum(data[4:]):
        raise InputError(f"{_DAMAGED} (its checksum differs)")
    dtype = np.uint8 if alphabet <= 256 else np.uint16
    symbols = np.arange(min(alphabet, _MAX_ALPHABET), dtype=dtype) if values is None else values
    empty = np.zeros(0, np.uint8)
    if not count:
        return _Stream(0, group or 1, 1, 0, 0, empty, np.zeros(1, np.int64), empty, symbols)
    looks = -(-count // group) if group in GROUPS else 0
    if not (
        1 <= looks <= 8 * len(data)
        and 1 <= alphabet**group <= _MAX_ALPHABET
        and 1 <= steps <= STEPS  # lanes of several streams are decoded in one matrix of the most steps
        and width <= packing.MAX_BITS
    ):
        raise InputError(f"{_DAMAGED} (its header is impossible)")
    if values is not None and len(values) < alphabet:
        raise InputError(f"the Huffman stream has {alphabet} symbols: got {len(values)} values; pass one for each")
    body = HEADER_SIZE + compressed
    lengths = _code_lengths(data[HEADER_SIZE:body], alphabet**group)
    lanes = -(-looks // steps)
    bits = np.full(lanes, shortest, np.int64)
    if width:
        size = packing.packed_size(lanes, width)
        lane_bits = np.frombuffer(data[body : body + size], np.uint8)
        bits += packing.unpack(lane_bits, width, lanes)
        body += size
    starts = np.concatenate([[0], np.cumsum(bits)])
    codes = np.frombuffer(data[body:], np.uint8)
    if -(-int(starts[-1]) // 8) != len(codes):
        raise InputError(f"{_DAMAGED} ({len(codes)} bytes of codes, expected {-(-int(starts[-1]) // 8)})")
    return _Stream(count, group, alphabet, -(-looks // lanes), lanes, lengths, starts, codes, symbols)


def _code_lengths(compressed: bytes, size: int) -> np.ndarray:
    try:
        lengths = np.frombuffer(zlib.decompressobj().decompress(compressed, size + 1), np.uint8)
    except zlib.error as error:
        raise InputError(f"{_DAMAGED} ({error})") from error
    if len(lengths) != size:
        raise InputError(f"{_DAMAGED} ({len(lengths)} code lengths, expected {size})")
    huffman_codes.check_lengths(lengths)
    return lengths


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Lanes `start` to `stop` of stream number `stream`."""

    stream: int
    start: int
    stop: int


def _blocks(streams: Sequence[_Stream]) -> Iterator[list[_Piece]]:
    """Divides the lanes of all streams into blocks that are decoded together; lanes of most steps come first."""
    block, size = [], 0
    for i in sorted(range(len(streams)), key=lambda i: -streams[i].steps):
        start = 0
        while start < streams[i].lanes:
            stop = min(streams[i].lanes, start + _MAX_LANES - size)
            block.append(_Piece(i, start, stop))
            size += stop - start
            start = stop
            if size == _MAX_LANES:
                yield block
                block, size = [], 0
    if block:
        yield block


def _decode_block(
    block: list[_Piece], streams: Sequence[_Stream], tables: Sequence[_Tables], outputs: Sequence[np.ndarray]
) -> None:
    """Decodes lanes in lockstep, into `outputs`."""
    cursor = _Cursor(block, streams, tables)
    entries = np.empty((streams[block[0].stream].steps, len(cursor.position)), np.int32)
    active, step, end = len(block), 0, len(cursor.position)
    while active:
        last = streams[block[active - 1].stream].steps  # the pieces behind have fewer steps, and are complete
        cursor.decode(entries[step:last, :end])
        step = last
        while active and streams[block[active - 1].stream].steps == last:
            active -= 1
            end -= block[active].stop - block[active].start
    for piece, columns, expected in cursor.slices(streams):
        if not np.array_equal(cursor.position[columns], expected):
            raise InputError(f"{_DAMAGED} (its lanes do not end where the next ones begin)")
        stream, table = streams[piece.stream], tables[piece.stream]
        output = outputs[piece.stream][:, piece.start : piece.stop]
        rows = max(1, (1 << 15) // (piece.stop - piece.start))  # in parts, because numpy converts the indices to int64
        for row in range(0, stream.steps, rows):
            part = slice(row, min(stream.steps, row + rows))
            numbers = entries[part, columns] >> huffman_codes.SYMBOL_SHIFT
            output[part] = np.take(table.group_values, numbers, axis=0, mode="clip")


class _Cursor:
    """Positions of the lanes of a block in one buffer of codes, with one table of all its streams.

    Attributes:
      position: int64[lanes] next bit of each lane.
    """

    def __init__(self, block: list[_Piece], streams: Sequence[_Stream], tables: Sequence[_Tables]):
        windows, position, base, mask, self._ends = [], [], [], [], []
        offset = table_size = 0
        for piece in block:
            stream, lanes = streams[piece.stream], piece.stop - piece.start
            starts = stream.starts[piece.start : piece.stop + 1]
            first = int(starts[0]) >> 4  # the first 16-bit word
            words = np.zeros((int(starts[-1]) >> 4) - first + 5, "<u2")
            codes = stream.data[2 * first : 2 * first + 2 * len(words) - 8]
            words.view(np.uint8)[: len(codes)] = codes
            windows.append(_windows(words))
            shifted = starts + 16 * (offset - first)
            position.append(shifted[:-1])
            self._ends.append((piece, shifted[1:]))
            base.append(np.full(lanes, table_size))
            mask.append(np.full(lanes, tables[piece.stream].mask))
            offset += len(windows[-1])
            table_size += tables[piece.stream].mask + 1
        used = [tables[piece.stream] for piece in block]
        self.position = np.concatenate(position)
        self._windows = np.concatenate(windows)
        self._table = np.concatenate([table.entries for table in used])
        self._base = np.concatenate(base) if len(block) > 1 else None
        self._mask = np.concatenate(mask)
        self._per_window = 49 // max(table.bits for table in used)  # 64 bits less the 15 in front of the position

    def decode(self, entries: np.ndarray) -> None:
        """Looks up the table's entries for the next [steps, lanes] codes of the first lanes."""
        steps, lanes = entries.shape
        position, mask = self.position[:lanes], self._mask[:lanes]
        window, index, length = (np.empty(lanes, np.int64) for _ in range(3))
        for start in range(0, steps, self._per_window):
            np.right_shift(position, 4, out=index)
            np.take(self._windows, index, out=window, mode="clip")
            np.bitwise_and(position, 15, out=index)
            np.right_shift(window, index, out=window)
            for step in range(start, min(steps, start + self._per_window)):
                np.bitwise_and(window, mask, out=index)
                if self._base is not None:
                    np.add(index, self._base[:lanes], out=index)
                np.take(self._table, index, out=entries[step], mode="clip")
                np.bitwise_and(entries[step], huffman_codes.LENGTH_MASK, out=length)
                np.right_shift(window, length, out=window)
                np.add(position, length, out=position)

    def slices(self, streams: Sequence[_Stream]) -> Iterator[tuple[_Piece, slice, np.ndarray]]:
        """Yields each piece with its lanes in the block and the positions where they must end."""
        start = 0
        for piece, ends in self._ends:
            stop = start + piece.stop - piece.start
            yield piece, slice(start, stop), ends
            start = stop


def _windows(words: np.ndarray) -> np.ndarray:
    """int64[n - 4] the 64 bits that begin at each of n 16-bit words."""
    size = len(words) - 4
    windows = words[:size].astype(np.int64)
    for k in range(1, 4):
        windows |= words[k : size + k].astype(np.int64) << (16 * k)
    return windows
