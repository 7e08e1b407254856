"""Where text comes from: paths to files, files to documents, one at a time and never a whole corpus in memory.

What you name is read: a file or a glob takes every file as it is. A walk through a directory leaves out what is hardly
meant as text: hidden files and directories, `__pycache__`, links to directories, compressed files other than `.txt`, `.md`,
`.json` and `.jsonl` with `.gz` or `.zst` added, and files that are UTF-16 or have a NUL in their first 8 KiB. All that is left
out is counted in a `LeftOut`, for the caller to say so.

Text, JSON lines and JSON arrays may be compressed by gzip (`.gz`) or zstd (`.zst`, which needs pyarrow); they are decompressed
as they are read, never as a whole.
"""

from __future__ import annotations

import dataclasses
import glob
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hpnlp.data import files, records
from hpnlp.data.files import printable
from hpnlp.types import InputError

_ARCHIVES = (".bz2", ".xz", ".zip", ".7z", ".tgz", ".npz", ".tar.gz", ".tar.zst")
# Compressed files with other extensions below .gz and .zst are left out of a walk.
_WALKED_COMPRESSED = (".txt", ".md", ".json", ".jsonl")
_PACKAGES = frozenset({"site-packages", "dist-packages"})
# What a walk through the standard library does not enter.
_STDLIB = {"stdlib": _PACKAGES | {"test", "tests", "idle_test"}, "stdlib+tests": _PACKAGES}
# Longer text is cut at line ends, so that no document fills the memory.
_LONGEST = 1 << 20
_KINDS = {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet", ".npy": "tokens"}
_EXPANSION = 4  # of compressed text, typically


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a source. name: its path within the source, the same wherever the source lies."""

    path: str
    name: str
    size: int

    @property
    def kind(self) -> str:
        """The format by the extension: text, jsonl, json (an array of records, or else text), parquet or tokens."""
        return _KINDS.get(os.path.splitext(files.uncompressed(self.path))[1].lower(), "text")

    @property
    def text_bytes(self) -> int:
        """The size of the file's text; an estimate where it is compressed."""
        return self.size * _EXPANSION if files.compression(self.path) else self.size


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
    before it that is read but not predicted. where, offset: for messages, and where in that place the text begins.
    is_record: it is a whole record, and not a piece of a text file."""

    name: str
    text: bytes | np.ndarray
    where: str
    prompt: bytes = b""
    offset: int = 0
    is_record: bool = False


class NotTextError(InputError):
    """Not UTF-8, where text is needed. offset: the first byte at fault; byte: its value."""

    def __init__(self, offset: int, byte: int, where: str = ""):
        skip = ", pass data.skip_bad_lines=True to leave such lines out," if where else ","
        super().__init__(
            f"{where or 'the text'}: byte {offset} (0x{byte:02x}) is not UTF-8, which this tokenizer needs: convert it to "
            f"UTF-8{skip} or pass data.tokenizer=bytes"
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
            f"{count} {reason} ({printable(first)}{', ...' if count > 1 else ''})"
            for reason, (count, first) in self.items()
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
        remaining = tuple(file for file in source.files if file in kept)
        result.append(dataclasses.replace(source, files=remaining, left_out=left_out))
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
        raise InputError(f'{argument}={path!r} {_fault(full)}: pass "stdlib", a file, a directory, or a quoted glob')
    result = []
    for name in sorted(found):
        file = os.path.join(base, name)
        if fault := _cannot_unpack(name):
            if not walked:
                raise InputError(f"{argument}: {file!r} {fault}: unpack it")
            left_out.add("compressed", name)
        elif walked and files.compression(name) and not files.uncompressed(name).lower().endswith(_WALKED_COMPRESSED):
            left_out.add("compressed", name)
        else:
            size = files.check_regular(file).st_size
            result.append(File(os.path.abspath(file), name.replace(os.sep, "/"), size))
    if not result:
        raise InputError(f"{argument}={path!r} holds no file to read{_but(left_out)}: pass one that does")
    return Source(path, tuple(result), walked, left_out)


def _fault(path: str) -> str:
    """The reason why nothing can be read at `path`."""
    if not path or "\0" in path:
        return "does not exist"
    try:
        os.stat(path)
    except FileNotFoundError:
        return "is a link to nothing" if os.path.islink(path) else "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "is not a regular file"


def _cannot_unpack(name: str) -> str:
    """The reason why a compressed file cannot be read as a stream, or "" where it can, or is not compressed."""
    if name.lower().endswith(_ARCHIVES):
        return "is compressed in a form that is not read"
    if files.compression(name) and files.uncompressed(name).lower().endswith((".parquet", ".npy")):
        return "is compressed, and this format is not read from its start to its end"
    return ""


def _but(left_out: LeftOut) -> str:
    return f" (left out: {left_out})" if left_out else ""


def _walk(base: str, left_out: LeftOut, without: frozenset[str] = frozenset()) -> list[str]:
    """Paths of the files under `base`, relative to it."""

    def failed(error: OSError) -> None:
        raise InputError(f"cannot read {error.filename!r}: {error.strerror}: mend its permissions") from error

    found = []
    for directory, subdirectories, names in os.walk(base, onerror=failed):
        entered = []
        for name in subdirectories + names:
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
    source: Source,
    *,
    text_field: str,
    prompt_field: str,
    eos_id: int | None,
    left_out: LeftOut,
    skip_bad_lines: bool = False,
    cut_finely: bool = False,
) -> Iterator[Document]:
    """The documents of `source`, in the order of its files. None is empty.

    Args:
      source: the files.
      text_field: the field of JSONL, JSON arrays and Parquet that holds the text.
      prompt_field: the field that holds the prompt, "" for none.
      eos_id: the token after which streams of ids are split.
      left_out: counts what holds no text.
      skip_bad_lines: leave out and count lines of text that are not UTF-8, and records without valid text.
      cut_finely: cut text files into pieces of 1 to 64 KiB, about 1 % of the source, as a lone file always is.

    Raises:
      InputError: a file cannot be read, with the file and the place in it.
    """
    is_fine = cut_finely or len(source.files) == 1
    limit = _limit_of_lone(sum(file.text_bytes for file in source.files)) if is_fine else _LONGEST
    fields = records.Fields(text_field, prompt_field)

    def bad(where: str, error: InputError) -> None:
        if not skip_bad_lines:
            raise error
        left_out.add("bad lines", where)

    for file in source.files:
        try:
            for document in _read(file, limit, source.walked, left_out, fields, eos_id, bad):
                if skip_bad_lines and isinstance(document.text, bytes):
                    document = _without_bad_lines(document, bad)
                    if document is None:
                        continue
                if len(document.text):
                    yield document
                else:
                    left_out.add("empty", document.where)
        except OSError as error:
            raise files.unreadable(file.path, error) from error


def _read(
    file: File,
    limit: int,
    walked: bool,
    left_out: LeftOut,
    fields: records.Fields,
    eos_id: int | None,
    bad: records.Bad,
) -> Iterator[Document]:
    if file.kind == "tokens":
        yield from _read_tokens(file, eos_id)
        return
    # A document keeps its name, and so its side of the split, when its file is compressed.
    name = files.uncompressed(file.name)
    if file.kind == "parquet":
        yield from (_document(name, row) for row in records.parquet(file.path, fields))
        return
    with files.open_text(file.path) as stream:
        head = stream.peek()[: files.SNIFF]
        is_text = file.kind == "text" or (file.kind == "json" and not records.is_array(head, fields, walked))
        encoding = files.foreign_encoding(head)
        if encoding and not (walked and is_text):
            raise files.not_utf8(file.path, encoding)
        if encoding:
            left_out.add(f"in {encoding}, to be converted by iconv -f {encoding} -t UTF-8,", file.name)
        elif not is_text:
            read = records.json_lines if file.kind == "jsonl" else records.json_array
            yield from (_document(name, row) for row in read(stream, printable(file.path), fields, bad))
        elif walked and b"\0" in head:
            left_out.add("binary", file.name)
        elif not head:
            left_out.add("empty", file.name)
        else:
            offset = 0
            for i, piece in enumerate(pieces(stream, limit)):
                yield Document(f"{name}#{i}" if i else name, piece, printable(file.path), offset=offset)
                offset += len(piece)


def _document(name: str, row: records.Record) -> Document:
    return Document(f"{name}#{row.number}", row.text, row.where, row.prompt, is_record=True)


def _without_bad_lines(document: Document, bad: records.Bad) -> Document | None:
    """`document` with the lines that are not UTF-8 left out; of a record, all. None where nothing is left."""
    assert isinstance(document.text, bytes)
    if _is_utf8(document.text) and _is_utf8(document.prompt):
        return document
    if document.is_record:
        bad(document.where, InputError("not UTF-8"))
        return None
    kept, offset = [], document.offset
    for line in document.text.splitlines(keepends=True):
        if _is_utf8(line):
            kept.append(line)
        else:
            bad(f"{document.where}, byte {offset}", InputError("not UTF-8"))
        offset += len(line)
    return dataclasses.replace(document, text=b"".join(kept)) if kept else None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _limit_of_lone(size: int) -> int:
    """The most that a document of a lone file, of few files, or of a stream of ids without ends, may hold: cut finer, so that
    some of it can be held out. A power of 2, so that what is held out stays the same while a file grows a little."""
    return min(1 << 16, max(1 << 10, 1 << (size // 100).bit_length()))


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


def _read_tokens(file: File, eos_id: int | None) -> Iterator[Document]:
    try:
        ids = np.load(file.path, mmap_mode="r", allow_pickle=False)
        if not isinstance(ids, np.ndarray):
            raise ValueError("it is an archive of arrays")
    except (ValueError, EOFError, SyntaxError, OverflowError, MemoryError, tokenize.TokenError) as error:
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
