"""Files to documents, one at a time: text, JSON lines, JSON arrays, Parquet and arrays of token ids.

Text, JSON lines and JSON arrays may be compressed by gzip (`.gz`) or zstd (`.zst`, which needs pyarrow). They are
decompressed as a stream, so that no file is held in memory completely. Files of a directory walk that are UTF-16 or have
a NUL in their first 8 KiB are left out and counted.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import tokenize
from collections.abc import Iterator

import numpy as np

from hpnlp.data.reading import files
from hpnlp.data.reading.fields import Column
from hpnlp.data.reading.files import printable
from hpnlp.data.reading.rows import RecordReader, Row
from hpnlp.data.reading.sources import File, LeftOut, LineCounts, Source
from hpnlp.types import InputError

# Longer text is cut at line ends, so that no document fills the memory.
_MAX_BYTES = 1 << 20
# Bounds in bytes of the maximum size of pieces of a finely cut file, which is about 1/100 of the text.
_MIN_PIECE, _MAX_PIECE = 1 << 10, 1 << 16


@dataclasses.dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
      name: Name by which the document is held out or not; unchanged when data is added after the document.
      text: Text as bytes, or token ids [T] of any integer dtype for pre-tokenised data.
      where: Place of the document, for error messages.
      prompt: Text before `text` that carries no loss.
      offset: Index of the first byte, or id, of `text` in the file that `where` names.
      is_record: True for a complete record, False for a piece of a file.
    """

    name: str
    text: bytes | np.ndarray
    where: str
    prompt: bytes = b""
    offset: int = 0
    is_record: bool = False


@dataclasses.dataclass(frozen=True)
class DocumentReader(RecordReader[Document]):
    """Reads the documents of sources with the options of a `DataConfig`: text, token ids, or records of a text and a prompt.

    Attributes:
      text_field, prompt_field: Fields of records that hold the text and the prompt; "" for no prompt.
      eos_id: Token after which arrays of ids are split into documents; None for no splits.
      skip_bad_lines: Leave out and count lines of text that are not UTF-8, and records without valid text.
      cut_finely: Cut text files into pieces of 1 to 64 KiB, about 1 % of the source, as a source of one file always is.
    """

    text_field: str
    prompt_field: str
    left_out: LeftOut
    eos_id: int | None = None
    skip_bad_lines: bool = False
    cut_finely: bool = False
    line_counts: LineCounts = dataclasses.field(default_factory=LineCounts)
    bad_reason = "bad lines"

    @property
    def columns(self) -> tuple[Column, ...]:
        prompt = [Column(self.prompt_field, "prompt_field", "bytes")] if self.prompt_field else []
        return Column(self.text_field, "text_field", "bytes"), *prompt

    def read_file(self, file: File, source: Source) -> Iterator[Document]:
        """The documents of a file, each with at least one byte or token id of text."""
        for document in self._documents(file, source):
            kept = self._without_bad_lines(document) if self.skip_bad_lines else document
            if kept is None:
                continue
            if len(kept.text):
                yield kept
            else:
                self.left_out.add("empty", kept.where)

    def _documents(self, file: File, source: Source) -> Iterator[Document]:
        """Documents of one file, empty ones and those with bad lines included."""
        if file.kind == "tokens":
            yield from _read_ids(file, self.eos_id)
            return
        if file.kind == "parquet":
            yield from map(_record_document, self.read_records(file))
            return
        walked = source.walked
        with files.open_text(file.path) as stream:
            head = stream.peek()[: files.SNIFF]
            is_text = file.kind == "text" or (file.kind == "json" and not _is_array(head, self.text_field, walked))
            encoding = files.foreign_encoding(head)
            if encoding and not (walked and is_text):
                raise files.not_utf8(file.path, encoding)
            if encoding:
                self.left_out.add(f"in {encoding}, to be converted by iconv -f {encoding} -t UTF-8,", file.name)
            elif not is_text:
                yield from map(_record_document, self.read_records(file, stream))
            elif walked and b"\0" in head:
                self.left_out.add("binary", file.name)
            elif not head:
                self.left_out.add("empty", file.name)
            else:
                cuts_finely = self.cut_finely or len(source.files) == 1
                max_bytes = _piece_size(source.text_bytes) if cuts_finely else _MAX_BYTES
                # Compressing a file does not change the names of its documents, and so not which of them are held out.
                yield from _read_text(stream, files.uncompressed(file.name), printable(file.path), max_bytes)

    def _without_bad_lines(self, document: Document) -> Document | None:
        """`document` without lines that are not UTF-8; a record is dropped as a whole. None if nothing remains."""
        if not isinstance(document.text, bytes) or (_is_utf8(document.text) and _is_utf8(document.prompt)):
            return document
        if document.is_record:
            self.report_bad(document.where, InputError("not UTF-8"))
            return None
        kept, offset = [], document.offset
        for line in document.text.splitlines(keepends=True):
            if _is_utf8(line):
                kept.append(line)
            else:
                self.report_bad(f"{document.where}, byte {offset}", InputError("not UTF-8"))
            offset += len(line)
        return dataclasses.replace(document, text=b"".join(kept)) if kept else None


def _record_document(row: Row) -> Document:
    return Document(row.name, row.values["text_field"], row.where, row.values.get("prompt_field", b""), is_record=True)


def _is_array(head: bytes, text_field: str, walked: bool) -> bool:
    """Whether a `.json` file that begins with `head` is an array of records; otherwise it is read as text.

    In a file that was found in a directory, an array of objects without the text field is text.
    """
    start = re.match(rb'(?:\xef\xbb\xbf)?[ \t\r\n]*\[[ \t\r\n]*(["{\]])', head)
    if not start or not walked or start[1] != b"{":
        return start is not None
    try:
        first, _ = json.JSONDecoder().raw_decode(head[start.start(1) :].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return json.dumps(text_field).encode() in head  # the first record is longer than `head`
    return text_field in first


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _piece_size(size: int) -> int:
    """Maximum size of a document that is cut from `size` bytes or ids of one file, or of a few files.

    Small pieces allow a part of the file to be held out. The size is a power of 2, so that the pieces, and which of them are
    held out, stay the same while a file grows a little.
    """
    return min(_MAX_PIECE, max(_MIN_PIECE, 1 << (size // 100).bit_length()))


def _read_text(stream: io.BufferedIOBase, name: str, path: str, max_bytes: int) -> Iterator[Document]:
    """Documents of at most `max_bytes` from a text file."""
    offset = 0
    for i, piece in enumerate(pieces(stream, max_bytes)):
        yield Document(f"{name}#{i}" if i else name, piece, path, offset=offset)
        offset += len(piece)


def pieces(stream: io.BufferedIOBase, limit: int) -> Iterator[bytes]:
    """Cuts a stream into non-empty pieces of at most `limit` bytes that end at line ends, or else between UTF-8 characters."""
    carried = b""
    while True:
        block = carried + stream.read(limit - len(carried))
        if len(block) < limit:
            break
        cut = block.rfind(b"\n") + 1 or _character_boundary(block)
        yield block[:cut]
        carried = block[cut:]
    if block:
        yield block


def _character_boundary(block: bytes) -> int:
    """The last index among the final bytes of `block` that does not split a UTF-8 character."""
    for back in range(1, 4):
        if block[-back] >= 0xC0:
            return len(block) - back
        if block[-back] < 0x80:
            break
    return len(block)


def _read_ids(file: File, eos_id: int | None) -> Iterator[Document]:
    """Documents of an array of token ids, which is memory-mapped."""
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
    """Ranges `(start, end)` of the documents of an array of token ids, integers [tokens], which end with eos.

    If the first 2^20 ids hold no eos other than a final one, the array is cut into pieces as a single text file is.
    """
    start = 0
    has_ends = eos_id is not None and np.any(ids[:-1][:_MAX_BYTES] == eos_id)  # a final eos separates nothing
    limit = _MAX_BYTES if has_ends else _piece_size(len(ids))
    while start < len(ids):
        window = ids[start : start + limit]
        ends = (start + 1 + np.flatnonzero(window == eos_id)).tolist() if eos_id is not None else []
        for end in ends or [start + len(window)]:
            yield start, end
            start = end
