"""Encodings of one array as a block of bytes: raw, packed, Huffman coded, sparse, non-zeros.

A block that is not raw begins with the palette: the distinct elements of the array, as bits. The codes behind it are indices of
the palette, so that every dtype can be encoded, and arrays are decoded directly to their dtype. In a block of non-zeros, all
elements that are not zero stand in place of the palette, and the codes are 1 where one of them belongs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from hpnlp.compress.storage import huffman, packing, sparse_codes
from hpnlp.errors import InputError

_SPEC = re.compile(r"(raw|packed|huffman|sparse|nonzeros)(?:\((\d+(?:\.\d+)?)\))?")
_MAX_PALETTE = 1 << 16
# Bits of an element that count; ml_dtypes keeps these types in whole bytes.
_USED_BITS = {"int2": 0x3, "uint2": 0x3, "int4": 0xF, "uint4": 0xF, "float4_e2m1fn": 0xF}


@dataclasses.dataclass(frozen=True)
class Encoding:
    """An encoding.

    Attributes:
      kind: "raw", "packed", "huffman", "sparse" or "nonzeros".
      bits: Width of packed codes, or of the gaps of sparse arrays; None where the kind has none, or chooses.
    """

    kind: str
    bits: int | float | None = None

    @classmethod
    def parse(cls, spec: str) -> Encoding:
        """Reads an encoding.

        Args:
          spec: Such as "raw", "packed(4)", "packed(1.6)", "huffman", "sparse", "sparse(5)" or "nonzeros".

        Returns:
          The encoding.

        Raises:
          InputError: Not an encoding.
        """
        match = _SPEC.fullmatch(spec)
        bits = float(match[2]) if match and match[2] else None
        if match and bits is not None and bits != packing.TRITS:
            bits = int(bits) if bits.is_integer() else -1
        allowed = {
            "packed": bits == packing.TRITS or bits in range(1, packing.MAX_BITS + 1),
            "sparse": bits is None or bits in sparse_codes.GAP_BITS,
        }
        if not match or not allowed.get(match[1], bits is None):
            raise InputError(
                f"encoding {spec!r}: expected raw, huffman, nonzeros, sparse, sparse(BITS) with gaps of "
                f"{sparse_codes.GAP_BITS[0]} to {sparse_codes.GAP_BITS[-1]} bits, packed(BITS) with 1 to {packing.MAX_BITS} "
                f"bits, or packed({packing.TRITS})"
            )
        return cls(match[1], bits)

    def __str__(self) -> str:
        return self.kind if self.bits is None else f"{self.kind}({self.bits})"


def encode(array: np.ndarray, encoding: Encoding) -> tuple[int, np.ndarray]:
    """Encodes an array.

    Args:
      array: The array.
      encoding: The encoding.

    Returns:
      (number of elements in the palette, the block as uint8[size]).

    Raises:
      InputError: The array has more distinct elements than the encoding holds.
    """
    if encoding.kind == "raw":
        return 0, np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if encoding.kind == "nonzeros":
        bits = _bits(array)
        values = bits[bits != 0]
        return len(values), _block(values, np.frombuffer(huffman.encode((bits != 0).astype(np.uint8)), np.uint8))
    limit = _MAX_PALETTE
    if encoding.kind == "packed":
        limit = 3 if encoding.bits == packing.TRITS else 1 << int(encoding.bits or 0)
    palette, codes = _palette(array, zero_first=encoding.kind == "sparse")
    if len(palette) > limit:
        raise InputError(
            f"{len(palette)} distinct elements: {encoding} holds {limit}; quantize the array, or store it in another encoding"
        )
    codes = codes.astype(np.uint8 if len(palette) <= 256 else np.uint16)
    if encoding.kind == "packed":
        payload = packing.pack(codes, encoding.bits or 0)
    else:
        stream = (
            huffman.encode(codes) if encoding.kind == "huffman" else sparse_codes.encode(codes, _int(encoding.bits))
        )
        payload = np.frombuffer(stream, np.uint8)
    return len(palette), _block(palette, payload)


def _block(palette: np.ndarray, payload: np.ndarray) -> np.ndarray:
    """The palette, padded, and what follows it."""
    head = np.zeros(_palette_size(len(palette), palette.itemsize), np.uint8)
    head[: palette.nbytes] = palette.view(np.uint8)
    return np.concatenate([head, payload])


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A block that was checked, and is not decoded yet.

    Attributes:
      streams: Huffman streams in the block, and the values of their symbols.
      finish: Makes the array of the decoded streams.
    """

    streams: Sequence[tuple[bytes | np.ndarray, np.ndarray | None]]
    finish: Callable[[list[np.ndarray]], np.ndarray]

    @staticmethod
    def run(decodings: Sequence[Decoding]) -> list[np.ndarray]:
        """Decodes several blocks together.

        Args:
          decodings: The blocks.

        Returns:
          Their arrays.

        Raises:
          InputError: A block is damaged.
        """
        decoded = iter(huffman.decode_all([stream for item in decodings for stream in item.streams]))
        return [item.finish([next(decoded) for _ in item.streams]) for item in decodings]


def decoding(block: np.ndarray, encoding: Encoding, dtype: np.dtype, shape: tuple[int, ...], palette: int) -> Decoding:
    """Checks a block against the array's dtype and shape.

    Args:
      block: uint8[size] the block. It may be memory-mapped: raw arrays are views of it.
      encoding: Its encoding.
      dtype: Dtype of the array.
      shape: Shape of the array.
      palette: Number of elements that the block begins with.

    Returns:
      The block, ready to be decoded.

    Raises:
      InputError: The block does not fit dtype and shape.
    """
    count = math.prod(shape)
    if encoding.kind == "raw":
        if block.size != count * dtype.itemsize or palette:
            raise InputError(f"{block.size} bytes for {dtype}{list(shape)} of {count * dtype.itemsize} bytes")
        return Decoding((), lambda _: block.view(dtype).reshape(shape))
    head = _palette_size(palette, dtype.itemsize)
    limit = count if encoding.kind == "nonzeros" else _MAX_PALETTE
    if head > block.size or palette > limit or dtype.itemsize > 8:
        raise InputError(f"{block.size} bytes for {palette} elements of {dtype}")
    values = block[: palette * dtype.itemsize].view(f"<u{dtype.itemsize}")
    payload = block[head:]
    if encoding.kind == "packed":
        bits = encoding.bits or 0
        if payload.size != packing.packed_size(count, bits):
            raise InputError(f"{payload.size} bytes for {count} codes of {bits} bits")
        return Decoding((), lambda _: packing.unpack(payload, bits, count, values).view(dtype).reshape(shape))
    stream = payload.tobytes()
    if encoding.kind in ("huffman", "nonzeros"):
        if huffman.count(stream) != count:
            raise InputError(f"{huffman.count(stream)} symbols for {count} elements")
        if encoding.kind == "nonzeros":
            return Decoding([(stream, None)], lambda decoded: _filled(decoded[0], values).view(dtype).reshape(shape))
        return Decoding([(stream, values)], lambda decoded: decoded[0].view(dtype).reshape(shape))
    sparse = sparse_codes.Sparse.parse(stream)
    if sparse.size != count or (palette and values[0]):
        raise InputError(f"a sparse array of {sparse.size} elements for {count}, or one without zero in its palette")
    streams = [(sparse.gaps, None), (sparse.entries, values)]
    return Decoding(streams, lambda decoded: sparse.merge(*decoded).view(dtype).reshape(shape))


def _filled(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Zeros, with the values where the mask is 1."""
    if np.count_nonzero(mask) != len(values):
        raise InputError(f"{len(values)} non-zeros for {np.count_nonzero(mask)} places")
    array = np.zeros(len(mask), values.dtype)
    array[mask.astype(bool)] = values
    return array


def _bits(array: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers, [size]."""
    size = array.dtype.itemsize
    if size > 8:
        raise InputError(f"dtype {array.dtype} has more than 8 bytes: store it raw")
    bits = np.ascontiguousarray(array).reshape(-1).view(f"<u{size}")
    return bits & np.uint8(_USED_BITS[array.dtype.name]) if array.dtype.name in _USED_BITS else bits


def _palette(array: np.ndarray, zero_first: bool) -> tuple[np.ndarray, np.ndarray]:
    """(distinct elements as unsigned integers, index of each element). Zero is the first, if present or `zero_first`."""
    bits, size = _bits(array), array.dtype.itemsize
    if size <= 2:
        used = np.zeros(1 << 8 * size, bool)
        used[bits] = True
        used[0] |= zero_first
        palette = np.flatnonzero(used).astype(bits.dtype)
        numbers = (np.cumsum(used) - 1).astype(np.uint16)
        return palette, np.take(numbers, bits)
    nonzero = np.flatnonzero(bits)
    with_zero = zero_first or len(nonzero) < bits.size
    palette, inverse = np.unique(bits[nonzero], return_inverse=True)
    codes = np.zeros(bits.size, np.int64)
    codes[nonzero] = inverse + with_zero
    return np.concatenate([np.zeros(int(with_zero), bits.dtype), palette]), codes


def _palette_size(count: int, itemsize: int) -> int:
    """Bytes of a palette, padded to 8."""
    return -(-count * itemsize // 8) * 8


def _int(bits: int | float | None) -> int | None:
    return None if bits is None else int(bits)
