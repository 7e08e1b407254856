"""Reads files of weights in the format of hpnlp before they became safetensors. Such files are no longer written.

The next release reads safetensors only: `files.write_weights(path, *read_weights(path), encoding_of)` converts a file.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import ml_dtypes
import numpy as np

from hpnlp.compress.storage import deflate, packing, sparse_codes
from hpnlp.ops.helpers.checksum import byte_sum

MAGIC = b"hpnlp\0ct"
_PREFIX = struct.Struct("<8sIIQ")  # magic, version, checksum and size of the header
# Checksum of what follows, symbols, symbols of the alphabet, bytes of the code lengths, shortest lane in bits, steps of a lane,
# symbols of a look-up, width of the packed lane lengths.
_HUFFMAN = struct.Struct("<IQIIIHBB")
_SPARSE = struct.Struct("<QIB3x")  # elements, bytes of the stream of gaps, width of a gap
_MAX_HEADER = 1 << 26


def read(data: np.ndarray) -> tuple[dict[str, np.ndarray], Any]:
    """Decodes the bytes of a file to arrays by name, and its metadata. Damage raises errors that `Container` converts."""
    _, version, checksum, size = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    if version != 1:
        raise ValueError(f"it has version {version}, expected 1")
    text = data[_PREFIX.size : _PREFIX.size + size]
    if byte_sum(text) != checksum:
        raise ValueError("the checksum of its header differs")
    header = json.loads(deflate.inflate(text, _MAX_HEADER))
    end = max((entry["offset"] + entry["size"] for entry in header["tensors"]), default=_PREFIX.size + size)
    if end != data.size:
        raise ValueError(f"it has {data.size} bytes, expected {end}")
    return {entry["name"]: _array(data, entry) for entry in header["tensors"]}, header["metadata"]


def _array(data: np.ndarray, entry: dict[str, Any]) -> np.ndarray:
    block = data[entry["offset"] : entry["offset"] + entry["size"]]
    if byte_sum(block) != entry["checksum"]:
        raise ValueError(f"the checksum of {entry['name']!r} differs")
    dtype = np.dtype(getattr(ml_dtypes, entry["dtype"], entry["dtype"]))
    count, kind, _, bits = math.prod(entry["shape"]), *entry["encoding"].rstrip(")").partition("(")
    if kind == "raw":
        return block.view(dtype).reshape(entry["shape"])
    # Distinct elements, or all that are not zero, padded to 8 bytes, stand in front of the codes.
    values = block[: entry["palette"] * dtype.itemsize].view(f"<u{dtype.itemsize}")
    coded = block[-(-values.nbytes // 8) * 8 :]
    if kind == "packed":
        elements = packing.unpack(coded, packing.TRITS if bits == "1.6" else int(bits), count, values)
    elif kind == "huffman":
        elements = values[_symbols(coded)]
    elif kind == "nonzeros":
        elements = np.zeros(count, values.dtype)
        elements[_symbols(coded) == 1] = values
    else:
        size, gaps, gap_bits = _SPARSE.unpack(coded[: _SPARSE.size].tobytes())
        gaps, entries = np.split(coded[_SPARSE.size :], [gaps])
        elements = sparse_codes.merge(_symbols(gaps), values[_symbols(entries)], size, gap_bits)
    return elements.view(dtype).reshape(entry["shape"])


def _symbols(stream: np.ndarray) -> np.ndarray:
    """Decodes a Huffman stream. Look-up s of lane j gives group number s * lanes + j of the symbols."""
    _, count, alphabet, compressed, shortest, steps, group, width = _HUFFMAN.unpack(stream[: _HUFFMAN.size].tobytes())
    if not count:
        return np.zeros(0, np.int64)
    body = _HUFFMAN.size + compressed
    lengths = np.frombuffer(deflate.inflate(stream[_HUFFMAN.size : body], 1 << 16), np.uint8).astype(np.int64)
    looks = -(-count // group)
    lanes = -(-looks // steps)
    bits = np.full(lanes, shortest, np.int64)
    if width:
        size = packing.packed_size(lanes, width)
        bits += packing.unpack(stream[body : body + size], width, lanes)
        body += size
    codes = np.concatenate([stream[body:], np.zeros(4, np.uint8)]).astype(np.int64)
    words = codes[:-3] | codes[1:-2] << 8 | codes[2:-1] << 16  # the 24 bits from each byte on
    table = _table(lengths)
    position, found = np.cumsum(bits) - bits, np.empty((-(-looks // lanes), lanes), np.int64)
    for step in range(len(found)):
        found[step] = table[words[position >> 3] >> (position & 7) & 0xFFFF]
        position += lengths[found[step]]
    return (found.reshape(-1, 1) // alphabet ** np.arange(group) % alphabet).reshape(-1)[:count]


def _table(lengths: np.ndarray) -> np.ndarray:
    """int64[2^16] the symbol whose canonical code begins the 16 bits of an index, the first of which is the lowest."""
    order = np.flatnonzero(lengths)
    order = order[np.argsort(lengths[order], kind="stable")]
    table = np.repeat(order, 1 << (16 - lengths[order]))
    reverse = np.zeros(1, np.int64)
    for bit in range(15, -1, -1):
        reverse = np.concatenate([reverse, reverse + (1 << bit)])
    return np.resize(table, 1 << 16)[reverse]
