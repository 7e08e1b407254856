"""One file for a tree of named arrays, each stored raw, packed, Huffman coded, sparse and Huffman coded, or as non-zeros.

The file is little-endian: 8 bytes of magic, the version (uint32), the checksum of the header (uint32), the header's size
(uint64), the header, and blocks. Raw blocks begin at multiples of 64 bytes, others at multiples of 8. The header is JSON,
compressed by zlib:

    {"metadata": ..., "tensors": [{"name", "dtype", "shape", "encoding", "offset", "size", "palette", "checksum"}, ...]}

Offsets count from the start of the file. A block that is not raw begins with the distinct values of its array (`palette` of
them), padded to 8 bytes; the codes that follow are indices of these values. A block of "nonzeros" begins with all elements that
are not zero; the codes that follow are 1 at their places. Checksums are those of `hpnlp.ops.helpers.checksum`, of
the block as uint32 words. Reading needs numpy only.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from hpnlp.atomic_file import replaced
from hpnlp.compress.storage.array_encodings import Decoding, Encoding, decoding, encode
from hpnlp.errors import InputError
from hpnlp.ops.helpers.checksum import word_sum

MAGIC = b"hpnlp\0ct"
VERSION = 1
ALIGNMENT = 64  # of raw blocks, in bytes
_PREFIX = struct.Struct("<8sIIQ")
_SEPARATOR = "/"
_NATIVE = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_EXTENDED = (
    *(
        "bfloat16",
        "int2",
        "int4",
        "uint2",
        "uint4",
        "float4_e2m1fn",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
    ),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES = {name: np.dtype(name) for name in _NATIVE} | {name: np.dtype(getattr(ml_dtypes, name)) for name in _EXTENDED}
# Bytes of JSON, about 400,000 arrays. Parsed JSON takes up to 25 times its size, and compressed JSON 1/1000.
_MAX_HEADER = 1 << 26
_LARGEST = 1 << 48  # elements of an array; more is no array of this world, and would overflow sizes
_MAX_AXES = 64  # numpy's limit
_MAX_DEPTH = 100  # of nested mappings
_DECODED_TOGETHER = 256  # arrays; decoding takes up to 1 MB of tables for each, also of a few bytes
_ENTRY = {
    "name": str,
    "dtype": str,
    "shape": list,
    "encoding": str,
    "offset": int,
    "size": int,
    "palette": int,
    "checksum": int,
}
_RESTORE = "restore the file, or write it again"

Tree = Mapping[str, Any]


def write(
    path: str | os.PathLike[str],
    tensors: Tree,
    metadata: Any = None,
    *,
    encodings: str | Mapping[str, str] = "raw",
) -> None:
    """Writes arrays to a file, atomically: a file of that name is replaced once the new one is complete.

    Args:
      path: Path of the file.
      tensors: Arrays of numpy or ml_dtypes dtypes, by names without "/"; mappings may be nested. Empty mappings are left out.
      metadata: Anything that JSON can hold, such as the model's config and the kinds of its weights.
      encodings: Encoding of all arrays, or of each by its name, "outer/inner" in nested mappings; "raw" where absent:
        "raw": the array's bytes, memory-mapped by readers.
        "packed(BITS)": codes of 1 to 16 bits, of at most 2^BITS distinct values; "packed(1.6)" holds three values.
        "huffman": Huffman codes of at most 65,536 distinct values.
        "sparse" or "sparse(BITS)": gaps of BITS bits between non-zeros, and their values, both Huffman coded; by default the
          width of gaps with the smallest estimated size.
        "nonzeros": the elements that are not zero, as they are, and a Huffman coded bit for each element; for pruned arrays of
          many distinct values.

    Raises:
      InputError: A name, dtype, or encoding that the format does not have, an array with too many distinct values, metadata
        that JSON cannot hold, or a file that cannot be written.

    Cost: "huffman" and "sparse" take about 0.2 microseconds for each coded symbol.
    """
    arrays = dict(_flatten(tensors))
    by_name = dict.fromkeys(arrays, encodings) if isinstance(encodings, str) else dict(encodings)
    unknown = sorted(set(by_name) - set(arrays))
    if unknown:
        raise InputError(
            f"encodings has {unknown[0]!r}, tensors has not: pass names of tensors, such as {next(iter(arrays), '')!r}"
        )
    for name, array in arrays.items():
        if DTYPES.get(array.dtype.name) != array.dtype:
            raise InputError(
                f"tensor {name!r} is {array.dtype}: expected one of {', '.join(DTYPES)}; cast it with .astype"
            )
    parsed = {name: Encoding.parse(by_name.get(name, "raw")) for name in arrays}
    with replaced(path) as file:
        _write(file, arrays, parsed, metadata)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Any]:
    """Reads all arrays of a file.

    Args:
      path: Path of a file that `write` wrote.

    Returns:
      (tensors, metadata): the tree that was written, with equal arrays, and the metadata. Raw arrays are read-only and
      memory-mapped.

    Raises:
      InputError: The file is absent, damaged, or of another version.

    Cost: Reads the file once for its checksums. Arrays are decoded together, which is faster than one by one.
    """
    file = Container(path)
    return nested(file.arrays()), file.metadata


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of named values.

    Args:
      flat: Values that are no dicts, by names such as "outer/inner".

    Returns:
      Nested dicts.

    Raises:
      ValueError: A value has the name of a dict that holds other values.
    """
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *outer, last = name.split(_SEPARATOR)
        node: Any = tree
        for key in outer:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(f"the name {name!r:.200} begins with that of another tensor")
        if last in node:
            raise ValueError(f"the name {name!r:.200} is that of another tensor, or begins the name of one")
        node[last] = value
    return tree


@dataclasses.dataclass(frozen=True)
class PlannedBlock:
    """The block of an array whose values are not known.

    Attributes:
      dtype: Name of the dtype.
      shape: Shape of the array.
      encoding: The encoding.
      size: Bytes of the block.
      palette: Number of distinct values.
    """

    dtype: str
    shape: tuple[int, ...]
    encoding: str
    size: int
    palette: int = 0


def planned_size(blocks: Mapping[str, PlannedBlock], metadata: Any = None) -> int:
    """Bytes of the file that `write` would write.

    Args:
      blocks: Blocks of the arrays by name, in the order of the file.
      metadata: As in `write`.

    Returns:
      The number of bytes. The compressed header holds checksums, which depend on the values: its size is that of a header with
      other checksums, some bytes more or less.
    """
    records = [
        {"name": name, "dtype": block.dtype, "shape": list(block.shape), "encoding": block.encoding}
        | {"size": block.size, "palette": block.palette, "checksum": zlib.crc32(name.encode())}
        for name, block in blocks.items()
    ]
    encodings = {name: Encoding.parse(block.encoding) for name, block in blocks.items()}
    header = _header_bytes(records, encodings, metadata)
    return records[-1]["offset"] + records[-1]["size"] if records else _PREFIX.size + len(header)


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array in a file.

    Attributes:
      name: Its name, "outer/inner" in nested mappings.
      dtype: Its dtype.
      shape: Its shape.
      encoding: The encoding.
      offset: Where its block begins in the file, in bytes.
      size: Size of the block in bytes.
      palette: Number of values that the block begins with; 0 if raw.
      checksum: Checksum of the block.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    encoding: Encoding
    offset: int
    size: int
    palette: int
    checksum: int


class Container(Mapping[str, np.ndarray]):
    """An open file: arrays by their names, read when they are looked up.

    Args:
      path: Path of a file that `write` wrote.

    Attributes:
      metadata: The metadata.
      entries: Name -> Entry.

    Raises:
      InputError: The file is absent, no container, truncated, of another version, or its header is damaged. Looking an array
        up raises InputError if its block is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            size = os.path.getsize(self.path)
            self._bytes = np.memmap(self.path, np.uint8, "r").view(np.ndarray) if size else np.zeros(0, np.uint8)
        except FileNotFoundError as error:
            raise InputError(f"there is no file {self.path!r}: pass another path") from error
        except OSError as error:
            raise InputError(
                f"cannot read {self.path!r} ({error.strerror or error}): pass a file that can be read"
            ) from error
        header, end = self._header()
        self.metadata = header["metadata"]
        self.entries: dict[str, Entry] = {}
        for record in header["tensors"]:
            entry = self._entry(record, end)
            if entry.name in self.entries:
                raise self._error(f"two tensors have the name {entry.name!r}")
            self.entries[entry.name] = entry
            end = entry.offset + entry.size
        try:
            nested(self.entries)
        except ValueError as error:
            raise self._error(str(error)) from error
        if end != size:
            raise self._error(f"it has {size} bytes, expected {end}")

    def __getitem__(self, name: str) -> np.ndarray:
        return self._decode([self.entries[name]])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays, decoded together.

        Returns:
          Name -> array.

        Raises:
          InputError: A block is damaged.
        """
        return self._decode(list(self.entries.values()))

    def _decode(self, entries: list[Entry]) -> dict[str, np.ndarray]:
        for entry in entries:
            block = self._bytes[entry.offset : entry.offset + entry.size]
            if _block_sum(block) != entry.checksum:
                raise self._error("its checksum differs", entry.name)
        arrays: dict[str, np.ndarray] = {}
        for start in range(0, len(entries), _DECODED_TOGETHER):
            arrays |= self._decode_together(entries[start : start + _DECODED_TOGETHER])
        return arrays

    def _decode_together(self, entries: list[Entry]) -> dict[str, np.ndarray]:
        decodings = {}
        for entry in entries:
            block = self._bytes[entry.offset : entry.offset + entry.size]
            decodings[entry.name] = self._checked(
                entry, lambda b=block, e=entry: decoding(b, e.encoding, e.dtype, e.shape, e.palette)
            )
        try:
            flat = Decoding.run(list(decodings.values()))
        except (InputError, MemoryError):  # each by itself, to name the tensor
            flat = [self._checked(e, lambda e=e: Decoding.run([decodings[e.name]])[0]) for e in entries]
        return {entry.name: array for entry, array in zip(entries, flat, strict=True)}

    def _checked(self, entry: Entry, function: Any) -> Any:
        try:
            return function()
        except InputError as error:
            raise self._error(str(error), entry.name) from error
        except MemoryError as error:
            raise InputError(
                f"tensor {entry.name!r} of {self.path!r} has {math.prod(entry.shape)} elements, more than memory holds: "
                "restore the file if it is damaged, or read it on a machine with more memory"
            ) from error

    def _error(self, problem: str, name: str | None = None) -> InputError:
        where = f"{self.path!r}" if name is None else f"tensor {name!r:.200} of {self.path!r}"
        return InputError(f"{where} is damaged: {problem}; {_RESTORE}")

    def _header(self) -> tuple[dict[str, Any], int]:
        """The header, and where it ends."""
        if self._bytes.size < _PREFIX.size:
            if self._bytes.tobytes() != MAGIC[: self._bytes.size] or not self._bytes.size:
                raise InputError(
                    f"{self.path!r} is no container of hpnlp: pass a file that hpnlp.compress.container.write wrote"
                )
            raise self._error(f"it has {self._bytes.size} bytes, fewer than its header")
        magic, version, checksum, size = _PREFIX.unpack(self._bytes[: _PREFIX.size].tobytes())
        if magic != MAGIC:
            raise InputError(
                f"{self.path!r} is no container of hpnlp: pass a file that hpnlp.compress.container.write wrote"
            )
        if version != VERSION:
            raise InputError(
                f"{self.path!r} has version {version}, this hpnlp reads version {VERSION}: write it again, or install the "
                "hpnlp that wrote it"
            )
        end = _PREFIX.size + size
        if end > self._bytes.size:
            raise self._error(f"it has {self._bytes.size} bytes, its header ends at {end}")
        text = self._bytes[_PREFIX.size : end]
        if _block_sum(text) != checksum:
            raise self._error("the checksum of its header differs")
        try:
            header = json.loads(zlib.decompressobj().decompress(text.tobytes(), _MAX_HEADER))
        except (zlib.error, ValueError, RecursionError) as error:
            raise self._error(f"its header is no JSON ({error})") from error
        if not (isinstance(header, dict) and "metadata" in header and isinstance(header.get("tensors"), list)):
            raise self._error("its header has no metadata and tensors")
        return header, end

    def _entry(self, record: Any, end: int) -> Entry:
        """Checks an entry of the header; `end` is the end of the block before."""
        if not (isinstance(record, dict) and record.keys() == _ENTRY.keys()):
            raise self._error(f"its header has an entry {str(record)[:80]}, expected {', '.join(_ENTRY)}")
        name = record["name"]
        for key, expected in _ENTRY.items():
            value = record[key]
            if type(value) is not expected or (expected is int and not 0 <= value < _LARGEST):
                raise self._error(f"{key} is {str(value)[:80]}", str(name))
        if not all(parts := name.split(_SEPARATOR)) or len(parts) > _MAX_DEPTH:
            raise self._error(f"its name has {len(parts)} parts, expected up to {_MAX_DEPTH} that are not empty", name)
        if record["dtype"] not in DTYPES:
            raise self._error(f"dtype is {record['dtype']!r:.80}", name)
        shape = tuple(record["shape"])
        is_valid = len(shape) <= _MAX_AXES and all(type(n) is int and 0 <= n < _LARGEST for n in shape)
        # numpy limits the product of the axes that are not empty.
        if not is_valid or math.prod(n for n in shape if n) >= _LARGEST:
            raise self._error(f"shape is {str(shape)[:80]}", name)
        encoding = self._checked_encoding(record["encoding"], name)
        offset, size = record["offset"], record["size"]
        if offset != _aligned(end, encoding) or offset + size > self._bytes.size:
            raise self._error(f"its block takes bytes {offset} to {offset + size} of {self._bytes.size}", name)
        return Entry(
            name, DTYPES[record["dtype"]], shape, encoding, offset, size, record["palette"], record["checksum"]
        )

    def _checked_encoding(self, text: str, name: str) -> Encoding:
        try:
            return Encoding.parse(text)
        except InputError as error:
            raise self._error(str(error), name) from error


def _flatten(tree: Tree, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and arrays of nested mappings."""
    if prefix.count(_SEPARATOR) >= _MAX_DEPTH:
        raise InputError(f"tensors are nested more than {_MAX_DEPTH} deep: pass a flatter mapping")
    for key, value in tree.items():
        if not isinstance(key, str) or not key or _SEPARATOR in key:
            raise InputError(
                f"tensors has the name {key!r}: expected text without {_SEPARATOR!r}; nest mappings instead"
            )
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}{_SEPARATOR}")
        else:
            array = np.asarray(value)
            yield f"{prefix}{key}", array.astype(array.dtype.newbyteorder("=")) if not array.dtype.isnative else array


def _write(file: BinaryIO, arrays: Mapping[str, np.ndarray], encodings: Mapping[str, Encoding], metadata: Any) -> None:
    blocks, records = [], []
    for name, array in arrays.items():
        try:
            palette, block = encode(array, encodings[name])
        except InputError as error:
            raise InputError(f"tensor {name!r}: {error}") from error
        blocks.append(block)
        records.append(
            {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "encoding": str(encodings[name])}
            | {"size": len(block), "palette": palette, "checksum": _block_sum(block)}
        )
    header = _header_bytes(records, encodings, metadata)
    file.write(_PREFIX.pack(MAGIC, VERSION, _block_sum(np.frombuffer(header, np.uint8)), len(header)) + header)
    for record, block in zip(records, blocks, strict=True):
        file.write(bytes(record["offset"] - file.tell()))
        file.write(memoryview(block))


def _header_bytes(records: list[dict[str, Any]], encodings: Mapping[str, Encoding], metadata: Any) -> bytes:
    """The header. Sets the offsets, which depend on its size: it is made again until it fits in front of them."""
    room = 0
    while True:
        end = _PREFIX.size + room
        for record in records:
            record["offset"] = _aligned(end, encodings[record["name"]])
            end = record["offset"] + record["size"]
        try:
            text = json.dumps({"metadata": metadata, "tensors": records}, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"metadata cannot be stored as JSON ({error}): pass numbers, text, lists and dicts"
            ) from error
        if len(text) > _MAX_HEADER:
            raise InputError(
                f"the header has {len(text)} bytes of JSON, expected at most {_MAX_HEADER}: store large metadata as an array"
            )
        header = zlib.compress(text.encode(), 9)
        if len(header) <= room:
            return header.ljust(room, b"\0")
        room = len(header) + 8  # other offsets may change the size by a few bytes


def _aligned(offset: int, encoding: Encoding) -> int:
    alignment = ALIGNMENT if encoding.kind == "raw" else 8
    return -(-offset // alignment) * alignment


def _block_sum(block: np.ndarray) -> int:
    """Checksum of bytes as uint32 words; the last one is padded with zeros."""
    whole = block.size // 4 * 4
    tail = np.frombuffer(block[whole:].tobytes().ljust(4, b"\0"), "<u4")
    head = word_sum(block[:whole].view("<u4")) if whole else 0
    return (head + int(tail[0]) * (2 * (whole // 4) + 1)) & 0xFFFFFFFF
