"""Where text comes from: paths to files, files to documents, one at a time and never a whole corpus in memory.

What you name is read: a file or a glob takes every file as it is. A walk through a directory leaves out what is hardly
meant as text: hidden files and directories, `__pycache__`, links to directories, compressed files, and files with a NUL
in their first 8 KiB. All that is left out is counted in a `LeftOut`, for the caller to say so.
"""

from __future__ import annotations

import dataclasses
import glob
import io
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hpnlp.types import InputError

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".tgz", ".npz")
_PACKAGES = frozenset({"site-packages", "dist-packages"})
# What a walk through the standard library does not enter.
_STDLIB = {"stdlib": _PACKAGES | {"test", "tests", "idle_test"}, "stdlib+tests": _PACKAGES}
_SNIFF = 8192
# Longer text is cut at line ends, so that no document fills the memory.
_LONGEST = 1 << 20
_KINDS = {".jsonl": "jsonl", ".parquet": "parquet", ".npy": "tokens"}


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a source. name: its path within the source, the same wherever the source lies."""

    path: str
    name: str
    size: int
    mtime_ns: int

    @property
    def kind(self) -> str:
        """How to read it, by its extension: text, jsonl, parquet or tokens."""
        return _KINDS.get(os.path.splitext(self.path)[1].lower(), "text")


@dataclasses.dataclass(frozen=True)
class Source:
    """What one path stands for. left_out: what a walk through it passed over."""

    path: str
    files: tuple[File, ...]
    walked: bool
    left_out: LeftOut


@dataclasses.dataclass(frozen=True)
class Document:
    """One document. name: stable where data is added after it. text: bytes, or ids for pre-tokenised data. prompt: text
    before it that is read but not predicted. where, offset: for messages, and where in that place the text begins."""

    name: str
    text: bytes | np.ndarray
    where: str
    prompt: bytes = b""
    offset: int = 0


class NotTextError(InputError):
    """Not UTF-8, where text is needed. offset: the first byte at fault; byte: its value."""

    def __init__(self, offset: int, byte: int, where: str = "the text"):
        super().__init__(
            f"{where}: byte {offset} (0x{byte:02x}) is not UTF-8, which this tokenizer needs: convert it to UTF-8, or "
            "pass data.tokenizer=bytes"
        )
        self.offset = offset
        self.byte = byte


def to_text(data: bytes) -> str:
    """`data` as UTF-8; raises NotTextError where it is not."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise NotTextError(error.start, data[error.start]) from error


class LeftOut(dict[str, list[Any]]):
    """Reason -> [how many, the first one]; JSON-able."""

    def add(self, reason: str, name: str) -> None:
        self.setdefault(reason, [0, name])[0] += 1

    def merge(self, other: LeftOut) -> None:
        for reason, (count, first) in other.items():
            self.setdefault(reason, [0, first])[0] += count

    def __str__(self) -> str:
        return ", ".join(
            f"{count} {reason} ({first}{', ...' if count > 1 else ''})" for reason, (count, first) in self.items()
        )


def find(paths: str, argument: str) -> tuple[Source, ...]:
    """The sources that `paths` names: "stdlib" or "stdlib+tests", a file, a directory or a glob; several separated by commas.

    Files are sorted by name. A file that several names lead to is read once. argument: what to call `paths` in messages.
    Raises InputError for a path that does not exist or holds no file to read.
    """
    return distinct([_find_one(path.strip(), argument) for path in paths.split(",")], argument, (), "given twice")


def distinct(sources: Sequence[Source], argument: str, known: Iterable[str], reason: str) -> tuple[Source, ...]:
    """`sources` without the files that are links to, or the same as, one of `known` or one before them.

    A document is held out by its name, so a file of two names could be trained on by one and scored by the other. Within
    a source the name with the fewest directories stands: what a link adds changes nothing. reason: what those left out
    are counted as.
    """
    seen, result = {os.path.realpath(path) for path in known}, []
    for source in sources:
        kept, left_out = set(), LeftOut()
        left_out.merge(source.left_out)
        for file in sorted(source.files, key=lambda file: (file.name.count("/"), file.name)):
            real = os.path.realpath(file.path)
            kept.add(file) if real not in seen else left_out.add(reason, file.name)
            seen.add(real)
        if not kept:
            raise InputError(f"{argument}={source.path!r} adds no file{_but(left_out)}: leave it out, or pass another")
        files = tuple(file for file in source.files if file in kept)
        result.append(dataclasses.replace(source, files=files, left_out=left_out))
    return tuple(result)


def _find_one(path: str, argument: str) -> Source:
    left_out = LeftOut()
    full = os.path.expanduser(path)
    walked = False
    if path in _STDLIB:
        base = sysconfig.get_path("stdlib")
        found = [name for name in _walk(base, LeftOut(), _STDLIB[path]) if name.endswith(".py")]
    elif os.path.isdir(full):
        base, walked = full, True
        found = _walk(base, left_out)
    elif os.path.isfile(full):
        base, name = os.path.split(full)
        found = [name]
    elif path and glob.has_magic(full) and not os.path.exists(full):
        base = _fixed_part(full)
        found = []
        for match in glob.glob(full, recursive=True):
            name = os.path.relpath(match, base)
            if os.path.isfile(match):
                found.append(name)
            else:
                left_out.add("directories", name)
    else:
        what = "is not a regular file" if path and os.path.exists(full) else "does not exist"
        raise InputError(f'{argument}={path!r} {what}: pass "stdlib", a file, a directory, or a quoted glob')
    files = []
    for name in sorted(found):
        file = os.path.join(base, name)
        if name.lower().endswith(_COMPRESSED):
            if not walked:
                raise InputError(f"{argument}: {file!r} is compressed, which is not read: unpack it")
            left_out.add("compressed", name)
            continue
        try:
            stat = os.stat(file)
        except OSError as error:
            raise InputError(f"cannot read {file!r}: {error.strerror}: mend or remove it") from error
        files.append(File(os.path.abspath(file), name.replace(os.sep, "/"), stat.st_size, stat.st_mtime_ns))
    if not files:
        raise InputError(f"{argument}={path!r} holds no file to read{_but(left_out)}: pass one that does")
    return Source(path, tuple(files), walked, left_out)


def _but(left_out: LeftOut) -> str:
    return f" (left out: {left_out})" if left_out else ""


def _walk(base: str, left_out: LeftOut, without: frozenset[str] = frozenset()) -> list[str]:
    """Paths of the files under `base`, relative to it."""

    def failed(error: OSError) -> None:
        raise InputError(f"cannot read {error.filename!r}: {error.strerror}: mend its permissions") from error

    found = []
    for directory, subdirectories, files in os.walk(base, onerror=failed):
        entered = []
        for name in subdirectories + files:
            path = os.path.join(directory, name)
            relative = os.path.relpath(path, base)
            if name.startswith(".") or name == "__pycache__":
                left_out.add("hidden", relative)
            elif os.path.isfile(path):
                found.append(relative)
            elif os.path.islink(path) or not os.path.isdir(path):
                left_out.add("links and devices", relative)
            elif name not in without:
                entered.append(name)
        subdirectories[:] = entered
    return found


def _fixed_part(pattern: str) -> str:
    """The directory that a glob cannot change."""
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
    return pattern or "."


def documents(
    source: Source, *, text_field: str, prompt_field: str, eos_id: int | None, left_out: LeftOut
) -> Iterator[Document]:
    """The documents of `source`, in the order of its files. None is empty.

    text_field, prompt_field: of JSONL and Parquet ("" for no prompt). eos_id: where pre-tokenised streams are split.
    left_out: counts what holds no text. Raises InputError with file and place for what cannot be read.
    """
    limit = _limit_of_lone(source.files[0].size) if len(source.files) == 1 else _LONGEST
    for file in source.files:
        try:
            if file.kind == "jsonl":
                found = _read_jsonl(file, text_field, prompt_field)
            elif file.kind == "parquet":
                found = _read_parquet(file, text_field, prompt_field)
            elif file.kind == "tokens":
                found = _read_tokens(file, eos_id)
            else:
                found = _read_text(file, limit, source.walked, left_out)
            for document in found:
                if len(document.text):
                    yield document
                else:
                    left_out.add("empty", document.where)
        except OSError as error:
            raise InputError(f"cannot read {file.path!r}: {error.strerror or error}: mend or remove it") from error


def _limit_of_lone(size: int) -> int:
    """The most that a document of a lone file, or of a stream of ids without ends, may hold: cut finer, so that some of
    it can be held out. A power of 2, so that what is held out stays the same while a file grows a little."""
    return min(1 << 16, max(1 << 10, 1 << (size // 100).bit_length()))


def _read_text(file: File, limit: int, walked: bool, left_out: LeftOut) -> Iterator[Document]:
    with open(file.path, "rb") as stream:
        offset = 0
        for i, piece in enumerate(pieces(stream, limit)):
            if walked and not offset and b"\0" in piece[:_SNIFF]:
                left_out.add("binary", file.name)
                return
            yield Document(f"{file.name}#{i}" if i else file.name, piece, file.path, offset=offset)
            offset += len(piece)
        if not offset:
            left_out.add("empty", file.name)


def pieces(stream: io.BufferedIOBase, limit: int) -> Iterator[bytes]:
    """The bytes of `stream` in pieces of at most `limit`, that end at line ends, or else between characters."""
    rest = b""
    while True:
        block = rest + stream.read(limit - len(rest))
        if len(block) < limit:
            break
        cut = block.rfind(b"\n") + 1 or _character_boundary(block)
        yield block[:cut]
        rest = block[cut:]
    if block:
        yield block


def _character_boundary(block: bytes) -> int:
    """The last place in the last four bytes where no UTF-8 character goes on."""
    for back in range(1, 4):
        if block[-back] >= 0xC0:
            return len(block) - back
        if block[-back] < 0x80:
            break
    return len(block)


def _read_jsonl(file: File, text_field: str, prompt_field: str) -> Iterator[Document]:
    with open(file.path, "rb") as stream:
        for i, line in enumerate(stream):
            if not line.strip():
                continue
            where = f"{file.path}, line {i + 1}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: not JSON ({error}): mend or remove the line") from error
            if not isinstance(row, dict):
                raise InputError(
                    f"{where}: expected a JSON object with a field {text_field!r}: mend or remove the line"
                )
            prompt = _field(row, prompt_field, "prompt_field", where) if prompt_field else b""
            yield Document(f"{file.name}#{i}", _field(row, text_field, "text_field", where), where, prompt)


def _field(row: dict[str, Any], field: str, argument: str, where: str) -> bytes:
    if field not in row:
        raise _missing_field(field, argument, list(row), where)
    value = row[field]
    if value is None:
        return b""
    if not isinstance(value, str):
        raise InputError(f"{where}: field {field!r} is a {type(value).__name__}, expected a string: mend the line")
    # JSON may spell half a surrogate pair; as bytes it is kept, and a tokenizer that needs text says where it is.
    return value.encode("utf-8", "surrogatepass")


def _missing_field(field: str, argument: str, known: list[str], where: str) -> InputError:
    there = ", ".join(map(repr, known)) or "none"
    return InputError(
        f"{where}: no field {field!r}, the fields are {there}: pass data.{argument}=NAME with one of them"
    )


def _read_parquet(file: File, text_field: str, prompt_field: str) -> Iterator[Document]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InputError(f"{file.path}: Parquet needs the pyarrow package: pip install pyarrow") from error
    columns = [text_field, prompt_field] if prompt_field else [text_field]
    try:
        with pq.ParquetFile(file.path) as table:
            _check_columns(table.schema_arrow, columns, file.path)
            row = 0
            for batch in table.iter_batches(batch_size=256, columns=columns):
                # As binary, because pyarrow stores strings that are not UTF-8 and only fails when Python asks for them.
                values = [batch.column(column).cast(pa.large_binary()).to_pylist() for column in columns]
                for text, *prompt in zip(*values, strict=True):
                    where = f"{file.path}, row {row}"
                    yield Document(f"{file.name}#{row}", text or b"", where, prompt[0] or b"" if prompt else b"")
                    row += 1
    except pa.ArrowException as error:
        raise InputError(f"{file.path}: not a Parquet file that can be read ({error}): mend or remove it") from error


def _check_columns(schema: Any, columns: list[str], path: str) -> None:
    for argument, column in zip(("text_field", "prompt_field"), columns, strict=False):
        if column not in schema.names:
            raise _missing_field(column, argument, schema.names, path)
        if schema.names.count(column) > 1:
            raise InputError(
                f"{path}: has more than one column {column!r}: rename one, or pass another data.{argument}"
            )
        kind = str(schema.field(column).type)
        if kind not in ("string", "large_string", "binary", "large_binary"):
            raise InputError(f"{path}: column {column!r} holds {kind}, expected strings: pass another data.{argument}")


def _read_tokens(file: File, eos_id: int | None) -> Iterator[Document]:
    try:
        ids = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{file.path}: not an array that can be memory-mapped ({error}): save it by numpy.save"
        ) from error
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise InputError(
            f"{file.path}: an array of {ids.dtype} and shape {ids.shape}, expected one dimension of integer token ids: "
            "save it as such"
        )
    for i, (start, end) in enumerate(split_ids(ids, eos_id)):
        yield Document(f"{file.name}#{i}", ids[start:end], file.path, offset=start)


def split_ids(ids: np.ndarray, eos_id: int | None) -> Iterator[tuple[int, int]]:
    """Ranges that end after an eos. Without one in sight, a stream is cut as a lone text file is."""
    start = 0
    has_ends = eos_id is not None and np.any(ids[:-1][:_LONGEST] == eos_id)  # the last one ends nothing else
    limit = _LONGEST if has_ends else _limit_of_lone(len(ids))
    while start < len(ids):
        window = ids[start : start + limit]
        ends = (start + 1 + np.flatnonzero(window == eos_id)).tolist() if eos_id is not None else []
        for end in ends or [start + len(window)]:
            yield start, end
            start = end
