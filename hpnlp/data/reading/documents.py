"""Files to documents, one at a time: text, JSON lines, JSON arrays, Parquet and arrays of token ids.

Text, JSON lines and JSON arrays may be compressed by gzip (`.gz`) or zstd (`.zst`, which needs pyarrow). They are
decompressed as a stream, so that no file is held in memory completely. Files of a directory walk that are UTF-16 or have
a NUL in their first 8 KiB are left out and counted.
"""

from __future__ import annotations

import dataclasses
import io
import tokenize
from collections.abc import Iterator

import numpy as np

from hpnlp.data.reading import files, records
from hpnlp.data.reading.files import printable
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


class NotTextError(InputError):
    """Bytes that are not UTF-8, given to a tokenizer that needs text.

    Attributes:
      offset: Index of the first invalid byte.
      byte: Value of that byte.
    """

    def __init__(self, offset: int, byte: int, where: str = ""):
        skip = ", pass data.skip_bad_lines=True to leave such lines out," if where else ","
        super().__init__(
            f"{where or 'the text'}: byte {offset} (0x{byte:02x}) is not UTF-8, which this tokenizer needs, {files.CONVERT}: "
            f"convert it{skip} or pass data.tokenizer=bytes"
        )
        self.offset = offset
        self.byte = byte


def to_text(data: bytes) -> str:
    """Decodes UTF-8.

    Args:
      data: Encoded text.

    Returns:
      The decoded text.

    Raises:
      NotTextError: `data` is not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise NotTextError(error.start, data[error.start]) from error


@dataclasses.dataclass(frozen=True)
class DocumentReader:
    """Reads the documents of sources with the options of a `DataConfig`.

    Attributes:
      fields: Fields of records that hold the text and the prompt.
      left_out: Counts what is not read.
      eos_id: Token after which arrays of ids are split into documents; None for no splits.
      skip_bad_lines: Leave out and count lines of text that are not UTF-8, and records without valid text.
      cut_finely: Cut text files into pieces of 1 to 64 KiB, about 1 % of the source, as a source of one file always is.
      line_counts: Numbers of records and lines, where they differ.
    """

    fields: records.Fields
    left_out: LeftOut
    eos_id: int | None = None
    skip_bad_lines: bool = False
    cut_finely: bool = False
    line_counts: LineCounts = dataclasses.field(default_factory=LineCounts)

    def read(self, source: Source) -> Iterator[Document]:
        """Reads the documents of a source in the order of its files.

        Args:
          source: The files.

        Yields:
          Documents with at least one byte or token id of text.

        Raises:
          InputError: A file cannot be read or holds an invalid record. The message names the file and the place in it.
        """
        cuts_finely = self.cut_finely or len(source.files) == 1
        max_bytes = _piece_size(sum(file.text_bytes for file in source.files)) if cuts_finely else _MAX_BYTES
        for file in source.files:
            try:
                for document in self._read_file(file, max_bytes, source.walked):
                    if self.skip_bad_lines and isinstance(document.text, bytes):
                        document = self._without_bad_lines(document)
                        if document is None:
                            continue
                    if len(document.text):
                        yield document
                    else:
                        self.left_out.add("empty", document.where)
            except OSError as error:
                raise files.unreadable(file.path, error) from error

    def _report_bad(self, where: str, error: InputError) -> None:
        """Counts a bad line or record at `where`, or raises `error` if bad lines are not skipped."""
        if not self.skip_bad_lines:
            raise InputError(f"{error}; {records.LIST_ALL}") from error
        self.left_out.add("bad lines", where)

    def _read_file(self, file: File, max_bytes: int, walked: bool) -> Iterator[Document]:
        """Documents of one file, empty ones and those with bad lines included."""
        if file.kind == "tokens":
            yield from _read_ids(file, self.eos_id)
            return
        # Compressing a file does not change the names of its documents, and so not which of them are held out.
        name = files.uncompressed(file.name)
        if file.kind == "parquet":
            yield from (_record_document(name, record) for record in records.parquet(file.path, self.fields))
            return
        with files.open_text(file.path) as stream:
            head = stream.peek()[: files.SNIFF]
            is_text = file.kind == "text" or (file.kind == "json" and not records.is_array(head, self.fields, walked))
            encoding = files.foreign_encoding(head)
            if encoding and not (walked and is_text):
                raise files.not_utf8(file.path, encoding)
            if encoding:
                self.left_out.add(f"in {encoding}, to be converted by iconv -f {encoding} -t UTF-8,", file.name)
            elif not is_text:
                for record in self._read_records(stream, file):
                    yield _record_document(name, record)
            elif walked and b"\0" in head:
                self.left_out.add("binary", file.name)
            elif not head:
                self.left_out.add("empty", file.name)
            else:
                yield from _read_text(stream, name, printable(file.path), max_bytes)

    def _read_records(self, stream: io.BufferedReader, file: File) -> Iterator[records.FileRecord]:
        """Records of a JSON file; counts the records and lines of JSON lines."""
        path = printable(file.path)
        if file.kind == "json":
            yield from records.json_array(stream, path, self.fields, self._report_bad)
            return
        counted, records_read = records.CountedLines(stream), records.CountedRecords(self._report_bad)
        yield from records_read.count_each(records.json_lines(counted, path, self.fields, records_read.report_bad))
        self.line_counts.add(file.name, records_read.count, counted.count)

    def _without_bad_lines(self, document: Document) -> Document | None:
        """`document` without lines that are not UTF-8; a record is dropped as a whole. None if nothing remains."""
        assert isinstance(document.text, bytes)
        if _is_utf8(document.text) and _is_utf8(document.prompt):
            return document
        if document.is_record:
            self._report_bad(document.where, InputError("not UTF-8"))
            return None
        kept, offset = [], document.offset
        for line in document.text.splitlines(keepends=True):
            if _is_utf8(line):
                kept.append(line)
            else:
                self._report_bad(f"{document.where}, byte {offset}", InputError("not UTF-8"))
            offset += len(line)
        return dataclasses.replace(document, text=b"".join(kept)) if kept else None


def _record_document(name: str, record: records.FileRecord) -> Document:
    """The document of one record of the file `name`."""
    return Document(f"{name}#{record.number}", record.text, record.where, record.prompt, is_record=True)


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
    """Cuts a stream into pieces that end at line ends, or else between UTF-8 characters.

    Args:
      stream: The stream, which is read once.
      limit: Maximum size of a piece in bytes.

    Yields:
      Non-empty pieces that concatenate to the stream's content.
    """
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
    """Splits an array of token ids into documents that end with eos.

    If the first 2^20 ids hold no eos other than a final one, the array is cut into pieces as a single text file is.

    Args:
      ids: Integers [tokens].
      eos_id: The id of eos, or None.

    Yields:
      Ranges `(start, end)`, one after another.
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
