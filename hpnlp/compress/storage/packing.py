"""Integer codes of 1 to 16 bits packed into bytes, and ternary codes packed five to a byte.

Code i takes the bits i * bits to (i + 1) * bits - 1 of the little-endian stream, where bit 0 is the lowest of the first byte.
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
    """Number of codes of a width: 1 to 16 bits, or TRITS."""
    return 3 if bits == TRITS else 1 << int(bits)


def packed_size(count: int, bits: int | float) -> int:
    """Number of bytes of packed codes."""
    return -(-count // _TRITS_PER_BYTE) if bits == TRITS else math.ceil(count * int(bits) / 8)


def pack(codes: np.ndarray, bits: int | float) -> np.ndarray:
    """Packs codes from 0 to `code_count(bits)` - 1, of any shape, to uint8[packed_size]; unused bits are 0."""
    levels, flat = code_count(bits), codes.reshape(-1)
    if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < levels:
        raise InputError(f"codes lie between {flat.min()} and {flat.max()}: {bits} bits hold 0 to {levels - 1}")
    if bits == TRITS:
        digits = np.zeros((packed_size(flat.size, bits), _TRITS_PER_BYTE), np.uint8)
        digits.reshape(-1)[: flat.size] = flat
        return functools.reduce(lambda value, column: value * np.uint8(3) + column, digits.T[::-1])
    dtype = np.dtype("<u1" if bits <= 8 else "<u2")
    codes = flat.astype(dtype).view(np.uint8)
    if bits in (8, 16):
        return codes
    digits = np.unpackbits(codes, bitorder="little").reshape(flat.size, 8 * dtype.itemsize)
    return np.packbits(digits[:, : int(bits)], bitorder="little")


def unpack(packed: np.ndarray, bits: int | float, count: int, values: np.ndarray | None = None) -> np.ndarray:
    """Inverse of `pack`: [count] values of the codes, or the codes as uint8 up to 8 bits and uint16 above.

    Widths 1, 1.6, 2, 4, 8 and 16 read one table entry for each byte or code; others take some more operations.
    """
    if packed.size != packed_size(count, bits):
        raise InputError(f"{packed.size} bytes for {count} codes of {bits} bits: expected {packed_size(count, bits)}")
    dtype = np.dtype("<u1" if bits <= 8 else "<u2")
    given = np.arange(code_count(bits), dtype=dtype) if values is None else values[: code_count(bits)]
    table = np.zeros(code_count(bits) + 1, given.dtype)  # also of codes that only padding has
    table[: len(given)] = given
    if bits in (1, TRITS, 2, 4):
        return _take(table[_codes_of_bytes(bits)], packed).reshape(-1)[:count]
    if bits in (8, 16):
        codes = packed.view(dtype)
    else:
        digits = np.zeros((count, 8 * dtype.itemsize), np.uint8)
        digits[:, : int(bits)] = np.unpackbits(packed, count=count * int(bits), bitorder="little").reshape(
            count, int(bits)
        )
        codes = np.packbits(digits, bitorder="little").view(dtype)
    return codes if values is None else _take(table, codes)


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
        return codes
    return byte >> np.arange(0, 8, int(bits)) & (1 << int(bits)) - 1
