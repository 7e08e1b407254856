"""Sparse arrays as gaps between non-zeros, with filler zeros, in Huffman codes.

An entry is (gap, code): `gap` zeros come before it. A gap has `gap_bits` bits; where more zeros follow one another, filler
entries with code 0 are inserted, each behind 2^gap_bits - 1 zeros. Gaps and codes are Huffman streams of their own.

References: Han, Mao and Dally 2016, "Deep Compression", sections 2 (gaps and fillers) and 4 (Huffman coding).
"""

from __future__ import annotations

import dataclasses
import struct

import numpy as np

from hpnlp.compress.storage import huffman
from hpnlp.errors import InputError

GAP_BITS = range(2, 17)
# Elements of the array, bytes of the gaps' stream, width of a gap.
_HEADER = struct.Struct("<QIB3x")
_DAMAGED = "the sparse array is damaged: encode it again, or restore the file"


def split(codes: np.ndarray, gap_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Divides an array into gaps and entries.

    Args:
      codes: [n] integers, of which most are 0.
      gap_bits: Width of a gap, 2 to 16.

    Returns:
      (gaps, uint8 up to 8 bits and uint16 above; codes of the entries), with fillers. Fewer than 2^gap_bits zeros are left
      after the last entry.

    Raises:
      InputError: Another width.
    """
    if gap_bits not in GAP_BITS:
        raise InputError(f"gap_bits={gap_bits}: expected {GAP_BITS[0]} to {GAP_BITS[-1]}")
    used = np.flatnonzero(codes)
    span = 1 << gap_bits
    distances = np.diff(used, prepend=-1, append=codes.size)
    fillers = (distances - 1) // span  # in front of each non-zero, and of the end
    last = np.cumsum(fillers + 1) - 1  # the entry of each non-zero, and of the end
    gaps = np.full(int(last[-1]), span - 1, np.uint8 if gap_bits <= 8 else np.uint16)
    gaps[last[:-1]] = (distances - 1 - fillers * span)[:-1]
    entries = np.zeros(len(gaps), codes.dtype)
    entries[last[:-1]] = codes[used]
    return gaps, entries


def merge(gaps: np.ndarray, entries: np.ndarray, size: int) -> np.ndarray:
    """Inverse of `split`.

    Args:
      gaps: [e] gaps.
      entries: [e] values of the entries, of any dtype.
      size: Number of elements of the array.

    Returns:
      [size] values, zero bits where there is no entry.

    Raises:
      InputError: An entry lies behind the end.
    """
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(len(gaps))
    if len(gaps) and int(positions[-1]) >= size:
        raise InputError(f"{_DAMAGED} (entry {positions[-1]} of an array of {size})")
    array = np.zeros(size, entries.dtype)
    array[positions] = entries
    return array


def choose_gap_bits(codes: np.ndarray) -> int:
    """Width of gaps with the smallest estimated size, by the entropies of gaps and entries.

    Args:
      codes: [n] integers, of which most are 0.

    Returns:
      The width.
    """
    distances = np.diff(np.flatnonzero(codes), prepend=-1)
    if not len(distances):
        return GAP_BITS[-1]
    weights = np.bincount(codes.reshape(-1))
    weights[0] = 0
    estimates = {}
    for bits in range(GAP_BITS[0], 13):
        fillers, rests = divmod(distances - 1, 1 << bits)
        weights[0] = counted = int(fillers.sum())
        gaps = np.bincount(rests, minlength=1 << bits)
        gaps[-1] += counted
        estimates[bits] = sum(float(-(c[c > 0] * np.log2(c[c > 0] / c.sum())).sum()) for c in (gaps, weights))
        if not counted:
            break
    return min(estimates, key=lambda bits: estimates[bits])


def encode(codes: np.ndarray, gap_bits: int | None = None) -> bytes:
    """Encodes an array.

    Args:
      codes: uint8 or uint16 array of any shape, read in C order, of which most elements are 0.
      gap_bits: Width of a gap, 2 to 16; by default the one with the smallest estimated size. The paper has 8 for convolutions
        and 5 for other layers.

    Returns:
      The encoded array, which holds the number of elements but not the shape.

    Raises:
      InputError: Another width or dtype.
    """
    flat = codes.reshape(-1)
    bits = choose_gap_bits(flat) if gap_bits is None else gap_bits
    gaps, entries = split(flat, bits)
    encoded = huffman.encode(gaps)
    return _HEADER.pack(flat.size, len(encoded), bits) + encoded + huffman.encode(entries)


@dataclasses.dataclass(frozen=True)
class Sparse:
    """The parts of an encoded array.

    Attributes:
      size: Number of elements.
      gap_bits: Width of a gap.
      gaps: Huffman stream of the gaps.
      entries: Huffman stream of the codes of the entries.
    """

    size: int
    gap_bits: int
    gaps: bytes
    entries: bytes

    @classmethod
    def parse(cls, data: bytes) -> Sparse:
        """Divides an encoded array into its parts.

        Args:
          data: Result of `encode`.

        Returns:
          The parts, of which nothing is decoded yet.

        Raises:
          InputError: The header is damaged.
        """
        if len(data) < _HEADER.size:
            raise InputError(f"{_DAMAGED} (it has {len(data)} bytes, fewer than its header)")
        size, gaps_size, bits = _HEADER.unpack_from(data)
        gaps, entries = data[_HEADER.size : _HEADER.size + gaps_size], data[_HEADER.size + gaps_size :]
        if bits not in GAP_BITS or len(gaps) != gaps_size or len(entries) < huffman.HEADER_SIZE:
            raise InputError(f"{_DAMAGED} (its header is impossible)")
        if size >= (huffman.count(gaps) + 1) << bits:  # bounds the memory by the bytes of the file
            raise InputError(f"{_DAMAGED} ({size} elements of {huffman.count(gaps)} entries)")
        return cls(size, bits, gaps, entries)

    def merge(self, gaps: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """The array of decoded gaps and entries.

        Args:
          gaps: Decoded `gaps`.
          entries: Decoded `entries`.

        Returns:
          [size] values.

        Raises:
          InputError: The two differ in length, or do not fit the size.
        """
        if len(gaps) != len(entries) or self.size - int(gaps.sum(dtype=np.int64)) - len(gaps) >= 1 << self.gap_bits:
            raise InputError(f"{_DAMAGED} ({len(gaps)} gaps of {len(entries)} entries in {self.size} elements)")
        return merge(gaps, entries, self.size)


def decode(data: bytes, values: np.ndarray | None = None) -> np.ndarray:
    """Inverse of `encode`.

    Args:
      data: Result of `encode`.
      values: [n] values of the codes, of any dtype, with zero bits first; the codes themselves by default.

    Returns:
      [size] values or codes.

    Raises:
      InputError: The data are damaged.
    """
    sparse = Sparse.parse(data)
    return sparse.merge(*huffman.decode_all([(sparse.gaps, None), (sparse.entries, values)]))
