"""Huffman coding of integer codes by zlib, as deflate streams of literals only.

Codes of small alphabets are first packed several to a byte, so that frequent ones take less than a bit. The bytes are coded in
blocks of 1 MiB, one zlib stream each: several threads decode the blocks of a large array.

References: Deutsch 1996, RFC 1951, "DEFLATE Compressed Data Format Specification"; zlib's strategy Z_HUFFMAN_ONLY.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hpnlp.compress.storage import packing
from hpnlp.errors import InputError

BLOCK = 1 << 20  # bytes before they are coded
THREADS = min(4, os.cpu_count() or 1)  # zlib releases Python's lock
_MEMORY_LEVEL = 9  # Huffman codes change every 32,767 bytes, fewer than at other levels


def encode(codes: np.ndarray, levels: int) -> list[np.ndarray]:
    """Codes integers from 0 to levels - 1, of any shape, to zlib streams, uint8[size] each."""
    packed = packing.pack(codes, _width(levels))
    if _width(levels) == 16:
        packed = packed.reshape(-1, 2).T.reshape(-1)  # low bytes are unlike high bytes
    return [_deflated(packed[start : start + BLOCK]) for start in range(0, packed.size, BLOCK)]


def decode(
    blocks: Sequence[np.ndarray], levels: int, count: int | None = None, values: np.ndarray | None = None
) -> np.ndarray:
    """Inverse of `encode`: [count] values of the codes, or the codes as uint8 up to 256 levels and uint16 above.

    Of 256 and 65,536 levels, `count` may be None: all decoded codes.
    """
    packed, bits = np.frombuffer(_joined(blocks), np.uint8), _width(levels)
    if bits == 16 and not packed.size % 2:
        packed = np.ascontiguousarray(packed.reshape(2, -1).T).reshape(-1)
    return packing.unpack(packed, bits, packed.size * 8 // int(bits) if count is None else count, values)


def largest_size(count: int) -> int:
    """Bytes of a block of `count` bytes that does not become smaller."""
    return count + count // 1024 + 16  # 5 for each 32,767, and those around the stream


def _width(levels: int) -> int | float:
    """Bits of a code: the least of which whole codes fill a byte."""
    return next(bits for bits in (1, packing.TRITS, 2, 4, 8, 16) if levels <= packing.code_count(bits))


def _deflated(data: np.ndarray) -> np.ndarray:
    coder = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, _MEMORY_LEVEL, zlib.Z_HUFFMAN_ONLY)
    return np.frombuffer(coder.compress(data.tobytes()) + coder.flush(), np.uint8)


def inflate(block: np.ndarray, limit: int = BLOCK) -> bytes:
    """Decodes a zlib stream of at most `limit` bytes; no more are allocated."""
    decoder = zlib.decompressobj()
    try:
        data = decoder.decompress(block.data, limit + 1)
    except zlib.error as error:
        raise InputError(f"zlib cannot decode it ({error})") from error
    if not decoder.eof or len(data) > limit:
        raise InputError(f"its zlib stream does not end within {limit} bytes")
    return data


def _joined(blocks: Sequence[np.ndarray]) -> bytes:
    if len(blocks) < 2:
        return inflate(blocks[0]) if blocks else b""
    with ThreadPoolExecutor(THREADS) as pool:
        return b"".join(pool.map(inflate, blocks))
