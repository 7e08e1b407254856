"""Integer codes of 1 to 16 bits packed into bytes, and ternary codes packed five to a byte.

Binary codes take 1 bit, ternary 2 bits or 1.6, int4 codes 4. Code i takes the bits i * bits to (i + 1) * bits - 1 of the
little-endian stream, where bit 0 is the lowest of the first byte.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from hpnlp.errors import InputError

MAX_BITS = 16
TRITS = 1.6  # the width of a ternary code of which five share a byte, 3^5 = 243 <= 256
_TRITS_PER_BYTE = 5
_TAKEN_TOGETHER = 1 << 15


def code_count(bits: int | float) -> int:
    """Number of codes of a width.

    Args:
      bits: Width of a code: 1 to 16, or 1.6 for ternary codes.

    Returns:
      2^bits, or 3.
    """
    return 3 if bits == TRITS else 1 << int(bits)


def packed_size(count: int, bits: int | float) -> int:
    """Number of bytes of packed codes.

    Args:
      count: Number of codes.
      bits: Width of a code: 1 to 16, or 1.6 for ternary codes.

    Returns:
      The number of bytes.

    Raises:
      InputError: Another width.
    """
    _check_bits(bits)
    return -(-count // _TRITS_PER_BYTE) if bits == TRITS else -(-count * int(bits) // 8)


def pack(codes: np.ndarray, bits: int | float) -> np.ndarray:
    """Packs codes.

    Args:
      codes: Integers from 0 to 2^bits - 1, or from 0 to 2 for 1.6 bits; any shape, read in C order.
      bits: Width of a code: 1 to 16, or 1.6.

    Returns:
      uint8, `packed_size(codes.size, bits)` bytes. Unused bits of the last byte are 0.

    Raises:
      InputError: Another width, another dtype, or a code out of range.
    """
    _check_bits(bits)
    levels = code_count(bits)
    if codes.dtype.kind not in "ui":
        raise InputError(f"codes are {codes.dtype}: expected integers; convert them with .astype(np.uint8)")
    flat = codes.reshape(-1)
    if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < levels:
        raise InputError(
            f"codes lie between {flat.min()} and {flat.max()}: {bits} bits hold 0 to {levels - 1}; subtract the least value, "
            "or take more bits"
        )
    if bits == TRITS:
        digits = _padded(flat, _TRITS_PER_BYTE, np.uint8)
        return functools.reduce(lambda value, column: value * np.uint8(3) + column, digits.T[::-1])
    width = int(bits)
    if width in (8, 16):
        return flat.astype(f"<u{width // 8}").view(np.uint8)
    rows = _padded(flat, 8, np.uint32)  # eight codes take exactly `width` bytes
    packed = np.zeros((len(rows), width + 2), np.uint8)
    for i in range(8):
        value, byte = rows[:, i] << np.uint32(i * width % 8), i * width // 8
        for k in range(-(-(i * width % 8 + width) // 8)):
            packed[:, byte + k] |= (value >> np.uint32(8 * k)).astype(np.uint8)
    return packed[:, :width].reshape(-1)[: packed_size(flat.size, bits)]


def unpack(packed: np.ndarray, bits: int | float, count: int, values: np.ndarray | None = None) -> np.ndarray:
    """Inverse of `pack`.

    Args:
      packed: uint8 bytes that `pack` returned.
      bits: Width of a code.
      count: Number of codes.
      values: [n] values of the codes, of any dtype; the codes themselves by default.

    Returns:
      [count] values, or codes as uint8 up to 8 bits and uint16 above.

    Raises:
      InputError: Another width, another number of bytes, or a code that has no value.

    Cost: Widths 1, 1.6, 2, 4, 8 and 16 read one table entry for each byte or code; others take about five more operations.
    """
    size = packed_size(count, bits)
    if packed.dtype != np.uint8 or packed.shape != (size,):
        raise InputError(
            f"packed codes are {packed.dtype}{list(packed.shape)}: {count} codes of {bits} bits take uint8[{size}]"
        )
    levels = code_count(bits)
    dtype = np.uint8 if bits <= 8 else np.uint16
    table = np.arange(levels, dtype=dtype) if values is None else values[:levels]
    if bits in (1, TRITS, 2, 4):
        codes = _codes_of_bytes(bits)
        _check_codes(packed[:-1], codes, len(table))
        whole = _take(_fill(table, levels)[codes], packed).reshape(-1)
        if size:
            _check_codes(packed[-1:], codes[:, : count - (size - 1) * codes.shape[1]], len(table))
        return whole[:count]
    flat = packed.view(f"<u{int(bits) // 8}") if bits in (8, 16) else _shifted(packed, int(bits), count)
    if len(table) < levels and flat.size and int(flat.max()) >= len(table):
        raise InputError(f"packed codes reach {flat.max()}: expected at most {len(table) - 1}; pack them again")
    return flat if values is None else _take(table, flat)


def _shifted(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """[count] codes of any width."""
    rows = np.zeros((-(-count // 8), bits), np.uint8)
    rows.reshape(-1)[: packed.size] = packed
    unpacked = np.empty((len(rows), 8), np.uint8 if bits <= 8 else np.uint16)
    for i in range(8):
        byte, shift = bits * i // 8, bits * i % 8
        value = rows[:, byte].astype(np.uint32) >> np.uint32(shift)
        for k in range(1, -(-(shift + bits) // 8)):
            value |= rows[:, byte + k].astype(np.uint32) << np.uint32(8 * k - shift)
        unpacked[:, i] = value & np.uint32((1 << bits) - 1)
    return unpacked.reshape(-1)[:count]


def _take(table: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The table's rows at indices that it has, in parts: numpy converts the indices to int64."""
    taken = np.empty((indices.size, *table.shape[1:]), table.dtype)
    for start in range(0, indices.size, _TAKEN_TOGETHER):
        part = slice(start, start + _TAKEN_TOGETHER)
        np.take(table, indices[part], axis=0, out=taken[part], mode="clip")
    return taken


@functools.cache
def _codes_of_bytes(bits: int | float) -> np.ndarray:
    """[256, codes per byte] the codes in each byte. A byte above 242 holds no trits; its last one reads as 3."""
    byte = np.arange(256)[:, None]
    if bits == TRITS:
        codes = byte // 3 ** np.arange(_TRITS_PER_BYTE)
        codes[:, :-1] %= 3
        return codes.astype(np.uint8)
    shifts = np.arange(0, 8, int(bits))
    return ((byte >> shifts) & ((1 << int(bits)) - 1)).astype(np.uint8)


def _fill(table: np.ndarray, levels: int) -> np.ndarray:
    """The table with entries for codes that `_check_codes` has excluded, or that lie in the padding of the last byte."""
    filled = np.zeros(levels + 1, table.dtype)
    filled[: len(table)] = table
    return filled


def _check_codes(packed: np.ndarray, codes: np.ndarray, levels: int) -> None:
    """Raises InputError if a byte holds a code that has no value."""
    invalid = (codes >= levels).any(axis=1)
    if invalid.any() and packed.size and np.take(invalid, packed).any():
        raise InputError(f"packed codes have values above {levels - 1}: the bytes are damaged; pack them again")


def _padded(flat: np.ndarray, multiple: int, dtype: type) -> np.ndarray:
    """[n, multiple] the codes, followed by zeros."""
    padded = np.zeros((-(-flat.size // multiple), multiple), dtype)
    padded.reshape(-1)[: flat.size] = flat
    return padded


def _check_bits(bits: int | float) -> None:
    if not (bits == TRITS or (bits == math.floor(bits) and 1 <= bits <= MAX_BITS)):
        raise InputError(f"bits={bits}: expected an integer from 1 to {MAX_BITS}, or {TRITS} for ternary codes")
