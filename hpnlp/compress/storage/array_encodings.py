"""Encodings of one array as parts: raw, packed, Huffman coded, sparse, non-zeros.

Encodings but "raw" and "nonzeros" store the distinct elements of the array as "values", and indices of these as "codes", so
that every dtype can be encoded, and arrays are decoded directly to their dtype. "nonzeros" stores all elements that are not
zero as "values", and codes that are 1 where one of them belongs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from hpnlp.compress.storage import deflate, packing, sparse_codes
from hpnlp.errors import InputError

_SPEC = re.compile(r"(raw|packed|huffman|sparse|nonzeros)(?:\((\d+(?:\.\d+)?)\))?")
_MAX_PALETTE = 1 << 16
# Bits of an element that count; ml_dtypes keeps these types in whole bytes.
_USED_BITS = {"int2": 0x3, "uint2": 0x3, "int4": 0xF, "uint4": 0xF, "float4_e2m1fn": 0xF}


@dataclasses.dataclass(frozen=True)
class Encoding:
    """An encoding, and the width of its packed codes or of its gaps; None where it has none, or chooses."""

    kind: str
    bits: int | float | None = None

    @classmethod
    def parse(cls, spec: str) -> Encoding:
        """Reads an encoding such as "raw", "packed(4)", "packed(1.6)", "huffman", "sparse", "sparse(5)" or "nonzeros"."""
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


def encode(array: np.ndarray, encoding: Encoding) -> tuple[Encoding, dict[str, np.ndarray]]:
    """Returns the encoding, with the bits that it chose, and the parts of the array by name.

    Parts are "values", the bits of elements as unsigned integers; "codes", packed; or "codes/0", "codes/1" and so on, "gaps/0"
    and so on, the blocks of `deflate.encode`.
    """
    if encoding.kind == "nonzeros":
        bits = _bits(array)
        return encoding, {"values": bits[bits != 0], **_coded("codes", (bits != 0).view(np.uint8), 2)}
    limit = packing.code_count(encoding.bits or 0) if encoding.kind == "packed" else _MAX_PALETTE
    palette, codes = _palette(array, zero_first=encoding.kind == "sparse")
    if len(palette) > limit:
        raise InputError(
            f"{len(palette)} distinct elements: {encoding} holds {limit}; quantize the array, or store it in another encoding"
        )
    codes = codes.astype(np.uint8 if len(palette) <= 256 else np.uint16)
    if encoding.kind == "packed":
        return encoding, {"values": palette, "codes": packing.pack(codes, encoding.bits or 0)}
    if encoding.kind == "huffman":
        return encoding, {"values": palette, **_coded("codes", codes, len(palette))}
    # Wider gaps take two bytes, narrower ones more fillers: 8 bits have one for each 256 zeros.
    gap_bits = int(encoding.bits or (8 if array.size <= 128 * np.count_nonzero(codes) else 16))
    gaps, entries = sparse_codes.split(codes, gap_bits)
    coded = _coded("gaps", gaps, _gap_levels(gap_bits)) | _coded("codes", entries, len(palette))
    return Encoding("sparse", gap_bits), {"values": palette, **coded}


def decode(parts: Mapping[str, np.ndarray], encoding: Encoding, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Inverse of `encode`: the array of the parts, which are given as bytes."""
    values, count = parts["values"].view(f"<u{dtype.itemsize}"), math.prod(shape)
    if encoding.kind == "packed":
        elements = packing.unpack(parts["codes"], encoding.bits or 0, count, values)
    elif encoding.kind == "huffman":
        elements = deflate.decode(_blocks(parts, "codes"), len(values), count, values)
    elif encoding.kind == "nonzeros":
        mask = deflate.decode(_blocks(parts, "codes"), 2, count)
        if np.count_nonzero(mask) != len(values):
            raise InputError(f"{len(values)} non-zeros for {np.count_nonzero(mask)} places")
        elements = np.zeros(count, values.dtype)
        elements[mask.view(bool)] = values
    else:
        gap_bits = int(encoding.bits or 0)
        gaps = deflate.decode(_blocks(parts, "gaps"), _gap_levels(gap_bits))
        entries = deflate.decode(_blocks(parts, "codes"), len(values), len(gaps), values)
        elements = sparse_codes.merge(gaps, entries, count, gap_bits)
    return elements.view(dtype).reshape(shape)


def _coded(name: str, codes: np.ndarray, levels: int) -> dict[str, np.ndarray]:
    return {f"{name}/{i}": block for i, block in enumerate(deflate.encode(codes, levels))}


def _blocks(parts: Mapping[str, np.ndarray], name: str) -> list[np.ndarray]:
    numbered = (f"{name}/{i}" for i in itertools.count())
    return [parts[key] for key in itertools.takewhile(parts.__contains__, numbered)]


def _gap_levels(gap_bits: int) -> int:
    """Whole bytes, so that the number of gaps is that of the decoded bytes."""
    return 1 << (8 if gap_bits <= 8 else 16)


def _bits(array: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers, [size]."""
    size = array.dtype.itemsize
    if size > 8:
        raise InputError(f"dtype {array.dtype} has more than 8 bytes: store it raw")
    bits = np.ascontiguousarray(array).reshape(-1).view(f"<u{size}")
    return bits & np.uint8(_USED_BITS[array.dtype.name]) if array.dtype.name in _USED_BITS else bits


def _palette(array: np.ndarray, zero_first: bool) -> tuple[np.ndarray, np.ndarray]:
    """(distinct elements as unsigned integers, index of each element). Zero comes first, if present or with `zero_first`."""
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
