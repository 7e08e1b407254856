"""One safetensors file for a tree of named arrays, each stored raw, packed, Huffman coded, sparse, or as non-zeros.

A raw array is the tensor of its name; dtypes that safetensors lacks are stored as bytes. Of an array "a/b" in another encoding,
the parts of `storage.array_encodings` are the tensors "a/b//values", "a/b//codes/0" and so on. The tensor "//header" is JSON,
compressed by zlib:

    {"metadata": ..., "arrays": {name: [encoding, dtype, shape], ...}}

"//checksums" has the checksums of the arrays, see `_checksum`. The few lines here that write and parse the format itself let
readers map raw arrays into memory, which the library copies, and plan the size of a file without its arrays. Reading needs
numpy only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from hpnlp.atomic_file import replaced
from hpnlp.compress.storage import deflate, old_format
from hpnlp.compress.storage.array_encodings import Encoding, decode, encode
from hpnlp.errors import InputError
from hpnlp.ops.helpers.checksum import byte_sum

FORMAT = {"format": "hpnlp"}
# Names of dtypes in safetensors. Its library reads all of them in numpy, but for float8, which it reads in torch.
_STORED = {
    **{"bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "complex64": "C64"},
    **{"uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bfloat16": "BF16"},
    **{"float16": "F16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
_OTHERS = (
    *("complex128", "int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in (*_STORED, *_OTHERS)}
_SEPARATOR = "/"
_PART = "//"  # in no name of an array, since names have no empty parts
_HEADER, _CHECKSUMS = f"{_PART}header", f"{_PART}checksums"
# Bytes of JSON, about 400,000 arrays. Parsed JSON takes up to 25 times its size, and compressed JSON 1/1000.
_MAX_HEADER = 1 << 26
_MAX_DEPTH = 100  # of nested mappings

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
        "sparse" or "sparse(BITS)": gaps of BITS bits between non-zeros, and their values, both Huffman coded; by default 8
          bits, or 16 where fewer than one element of 128 is not zero.
        "nonzeros": the elements that are not zero, as they are, and a Huffman coded bit for each element; for pruned arrays of
          many distinct values.

    Raises:
      InputError: A name, dtype, or encoding that the format does not have, an array with too many distinct values, metadata
        that JSON cannot hold, or a file that cannot be written.

    Cost: Holds all encoded arrays in memory before the first byte is written.
    """
    arrays = dict(_flatten(tensors))
    by_name = dict.fromkeys(arrays, encodings) if isinstance(encodings, str) else dict(encodings)
    unknown = sorted(set(by_name) - set(arrays))
    if unknown:
        raise InputError(
            f"encodings has {unknown[0]!r}, tensors has not: pass names of tensors, such as {next(iter(arrays), '')!r}"
        )
    encoded = {name: _encoded(name, array, by_name.get(name, "raw")) for name, array in arrays.items()}
    head, stored = _layout(encoded, metadata)
    with replaced(path) as file:
        file.write(head)
        for part in stored:
            file.write(part.reshape(-1).view(np.uint8).data)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Any]:
    """Reads all arrays of a file.

    Args:
      path: Path of a file that `write` wrote.

    Returns:
      (tensors, metadata): the tree that was written, with equal arrays, and the metadata. Raw arrays are read-only and
      memory-mapped.

    Raises:
      InputError: The file is absent, damaged, or no container.

    Cost: Reads the file once for its checksums. Several threads decode the arrays.
    """
    file = Container(path)
    return nested(file.arrays()), file.metadata


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of values, which are no dicts, by names such as "outer/inner". Raises ValueError where names conflict."""
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
class EncodedArray:
    """An array in a file."""

    encoding: Encoding
    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Mapping[str, np.ndarray]  # its tensors in the file, by the ends of their names; that of a raw array by ""
    checksum: int  # of the parts


def planned_size(arrays: Mapping[str, EncodedArray], metadata: Any = None) -> int:
    """Bytes of the file that `write` would write, of arrays of which only dtypes and shapes of the parts count."""
    head, stored = _layout(arrays, metadata)
    return len(head) + sum(part.nbytes for part in stored)


class Container(Mapping[str, np.ndarray]):
    """An open file: arrays by their names, read when they are looked up.

    Args:
      path: Path of a file that `write` wrote, or one in the format of earlier versions.

    Attributes:
      metadata: The metadata.
      entries: Name -> EncodedArray, whose parts are bytes in the file.

    Raises:
      InputError: The file is absent, no container, truncated, or its header is damaged. Looking an array up raises InputError
        if the array is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            size = os.path.getsize(self.path)
            data = np.memmap(self.path, np.uint8, "r").view(np.ndarray) if size else np.zeros(0, np.uint8)
        except FileNotFoundError as error:
            raise InputError(f"there is no file {self.path!r}: pass another path") from error
        except OSError as error:
            raise InputError(
                f"cannot read {self.path!r} ({error.strerror or error}): pass a file that can be read"
            ) from error
        self.entries: dict[str, EncodedArray] = {}
        with self._naming_damage():
            if data[:8].tobytes() == old_format.MAGIC:
                arrays, self.metadata = old_format.read(data)
                self.entries = {name: _encoded(name, array, "raw") for name, array in arrays.items()}
            else:
                self.metadata = self._parse(data)
            nested(self.entries)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._decoded(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, decoded by several threads."""
        with ThreadPoolExecutor(deflate.THREADS) as pool:
            return dict(zip(self, pool.map(self._decoded, self), strict=True))

    def _decoded(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        with self._naming_damage(name):
            if _checksum(entry.parts) != entry.checksum:
                raise ValueError("its checksum differs")
            if entry.encoding.kind == "raw":
                return entry.parts[""].view(entry.dtype).reshape(entry.shape)
            return decode(entry.parts, entry.encoding, entry.dtype, entry.shape)

    def _parse(self, data: np.ndarray) -> Any:
        """Sets `entries`, and returns the metadata."""
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        if start > min(data.size, _MAX_HEADER) or data[8:9].tobytes() != b"{":  # before a large file is copied
            raise ValueError("it does not begin with the header of a safetensors file")
        tensors = json.loads(data[8:start].tobytes())
        if tensors.pop("__metadata__", None) != FORMAT:
            raise ValueError(f"it lacks the metadata {FORMAT} of files that hpnlp.compress.container.write wrote")
        parts: dict[str, dict[str, np.ndarray]] = {}
        end = 0
        for key, tensor in tensors.items():
            name, _, part = key.partition(_PART)
            parts.setdefault(name, {})[part] = data[start:][slice(*tensor["data_offsets"])]
            end = max(end, tensor["data_offsets"][1])
        if start + end != data.size:
            raise ValueError(f"it has {data.size} bytes, expected {start + end}")
        described = {f"{_PART}{part}": tensor for part, tensor in parts.pop("", {}).items()}
        if missing := {_HEADER, _CHECKSUMS} - described.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        header = json.loads(deflate.inflate(described[_HEADER], _MAX_HEADER))
        described = zip(header["arrays"].items(), described[_CHECKSUMS].view("<u4").tolist(), strict=True)
        for (name, (encoding, dtype, shape)), checksum in described:
            if name.count(_SEPARATOR) > _MAX_DEPTH or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"its header has {name!r:.80} of shape {shape!r:.80}")
            self.entries[name] = EncodedArray(
                Encoding.parse(encoding), DTYPES[dtype], tuple(shape), parts[name], checksum
            )
        return header["metadata"]

    @contextlib.contextmanager
    def _naming_damage(self, name: str | None = None) -> Iterator[None]:
        """Raises InputError with the file and the array for what a damaged file causes."""
        where = f"{self.path!r}" if name is None else f"tensor {name!r:.200} of {self.path!r}"
        fault = "is no container of hpnlp, or damaged" if name is None else "is damaged"
        try:
            yield
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
            struct.error,
        ) as error:
            raise InputError(f"{where} {fault}: {error}; restore the file, or write it again") from error
        except MemoryError as error:
            raise InputError(
                f"{where} does not fit into memory: restore the file if it is damaged, or read it on a machine with more memory"
            ) from error


def _flatten(tree: Tree, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and arrays of nested mappings."""
    if prefix.count(_SEPARATOR) >= _MAX_DEPTH:
        raise InputError(f"tensors are nested more than {_MAX_DEPTH} deep: pass a flatter mapping")
    for key, value in tree.items():
        if not isinstance(key, str) or not key or _SEPARATOR in key:
            raise InputError(
                f"tensors has the name {key!r}: expected text without {_SEPARATOR!r}; nest mappings instead"
            )
        if key == "__metadata__" and not prefix:
            raise InputError(
                "tensors has the name '__metadata__', which safetensors files reserve: choose another name"
            )
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}{_SEPARATOR}")
        else:
            array = np.asarray(value)
            yield f"{prefix}{key}", array.astype(array.dtype.newbyteorder("=")) if not array.dtype.isnative else array


def _encoded(name: str, array: np.ndarray, spec: str) -> EncodedArray:
    if DTYPES.get(array.dtype.name) != array.dtype:
        raise InputError(f"tensor {name!r} is {array.dtype}: expected one of {', '.join(DTYPES)}; cast it with .astype")
    encoding, parts = Encoding.parse(spec), {"": np.asarray(array, order="C")}
    if encoding.kind != "raw":
        try:
            encoding, parts = encode(array, encoding)
        except InputError as error:
            raise InputError(f"tensor {name!r}: {error}") from error
    return EncodedArray(encoding, array.dtype, array.shape, parts, _checksum(parts))


def _checksum(parts: Mapping[str, np.ndarray]) -> int:
    total = 0
    for name in sorted(parts):
        total = (31 * total + byte_sum(parts[name])) & 0xFFFFFFFF
    return total


def _layout(arrays: Mapping[str, EncodedArray], metadata: Any) -> tuple[bytes, list[np.ndarray]]:
    """The bytes in front of the tensors, and the tensors."""
    described = {name: [str(x.encoding), x.dtype.name, x.shape] for name, x in arrays.items()}
    try:
        text = json.dumps({"metadata": metadata, "arrays": described}, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"metadata cannot be stored as JSON ({error}): pass numbers, text, lists and dicts") from error
    if len(text) > _MAX_HEADER:
        raise InputError(
            f"the header has {len(text)} bytes of JSON, expected at most {_MAX_HEADER}: store large metadata as an array"
        )
    stored = {
        f"{name}{_PART}{part}" if part else name: tensor
        for name, x in arrays.items()
        for part, tensor in x.parts.items()
    }
    stored[_CHECKSUMS] = np.array([x.checksum for x in arrays.values()], np.uint32)
    # The largest elements come first, so that all are aligned.
    stored = dict(sorted(stored.items(), key=lambda item: -item[1].dtype.itemsize))
    stored[_HEADER] = np.frombuffer(zlib.compress(text.encode(), 9), np.uint8)
    tensors: dict[str, Any] = {"__metadata__": FORMAT}
    end = 0
    for name, tensor in stored.items():
        dtype, shape = _STORED.get(tensor.dtype.name), list(tensor.shape)
        start, end = end, end + tensor.nbytes
        content = {"dtype": dtype, "shape": shape} if dtype else {"dtype": "U8", "shape": [tensor.nbytes]}
        tensors[name] = {**content, "data_offsets": [start, end]}
    head = json.dumps(tensors, separators=(",", ":"))
    head += " " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head.encode(), list(stored.values())
