"""Records of files of JSON lines, JSON arrays and Parquet, one at a time, before their fields are checked."""

from __future__ import annotations

import codecs
import difflib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from hpnlp.data.reading.files import CONVERT, not_utf8_byte, printable
from hpnlp.types import InputError

# Called with the place of a bad record and its error: raises the error, or counts the record and returns.
ReportBad = Callable[[str, InputError], None]

# Longer lines and elements are refused, so that a small compressed file of zeros cannot fill the memory.
_MAX_BYTES = 1 << 28
_CHUNK = 1 << 16
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
# If the text of an element is incomplete, the parser fails within this distance of the end of the text, or within a string.
_INCOMPLETE_CHARACTERS = 16
LIST_ALL = "hpnlp check-data lists all such faults"
SKIP = "mend or remove the line, or pass data.skip_bad_lines=True to leave such lines out"


@runtime_checkable
class Lines(Protocol):
    """A stream that is read line by line, such as a file."""

    def readline(self, size: int = -1, /) -> bytes: ...


def json_lines(
    stream: Lines, path: str, expected: str, report_bad: ReportBad
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(index of the line, its place for messages, its JSON object) of the lines of a file, without empty ones.

    Lines that hold no object as `expected` are reported as bad.
    """
    for number, where, line in lines(stream, path, report_bad):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except UnicodeDecodeError as error:
            report_bad(where, InputError(f"{where}: {not_utf8_byte(error)}: {SKIP}"))
            continue
        except (ValueError, RecursionError) as error:
            report_bad(where, InputError(f"{where}: not JSON ({error}): {SKIP}"))
            continue
        if isinstance(value, dict):
            yield number, where, value
        else:
            report_bad(where, InputError(f"{where}: expected {expected}: {SKIP}"))


def lines(stream: Lines, path: str, report_bad: ReportBad) -> Iterator[tuple[int, str, bytes]]:
    """(index, place for messages, content with the line end) of lines; lines that are too long are reported as bad."""
    for number in itertools.count():
        line = stream.readline(_MAX_BYTES + 1)
        if not line:
            return
        where = f"{path}, line {number + 1}"
        if len(line) > _MAX_BYTES:
            report_bad(where, InputError(f"{where}: longer than {_MAX_BYTES:,} bytes: {SKIP}"))
            while line and not line.endswith(b"\n"):
                line = stream.readline(_CHUNK)
            continue
        yield number, where, line


class CountedLines:
    """A stream that counts the lines that are read from it."""

    def __init__(self, stream: io.BufferedReader):
        self._stream = stream
        self._within_line = False
        self.count = 0

    def readline(self, size: int = -1) -> bytes:
        """Reads a line, or a part of one that is longer than `size`; b"" at the end."""
        line = self._stream.readline(size)
        self.count += bool(line) and not self._within_line
        self._within_line = bool(line) and not line.endswith(b"\n")
        return line

    def peek(self) -> bytes:
        """Returns the next bytes without reading them."""
        return self._stream.peek()


class ArrayReader:
    """Iterates over the elements of a JSON array, with one element and a chunk of the text after it in memory."""

    def __init__(self, stream: io.BufferedReader, path: str):
        self._stream = stream
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._position, self._bytes_read = "", 0, 0
        self._count = 0

    def __iter__(self) -> Iterator[Any]:
        if self._peek() != "[":
            raise self._error("expected [")
        self._position += 1
        separator = "" if self._peek() == "]" else ","
        while separator == ",":
            self._peek()
            yield self._parse_element()
            self._count += 1
            separator = self._peek()
            if separator not in (",", "]"):
                raise self._error("expected a comma or ]" if separator else "the array has no end")
            self._position += separator == ","
        self._position += 1
        if self._peek():
            raise self._error("text follows the array")

    def _error(self, fault: str) -> InputError:
        """The error for a file that is no JSON array, at the current element."""
        return InputError(
            f"{self._path}, record {self._count + 1}: not a JSON array ({fault}): mend it, or save one record per line "
            "as .jsonl"
        )

    def _read_more(self) -> bool:
        """Appends text from the stream to the buffer; False at its end.

        The buffer doubles, so that parsing a long element from its start each time takes linear time in total.
        """
        data = self._stream.read(max(_CHUNK, len(self._text) - self._position))
        try:
            decoded = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            fault = f"{error.reason} near byte {self._bytes_read + error.start}, not UTF-8, {CONVERT}"
            raise self._error(fault) from error
        self._text = self._text[self._position :] + decoded
        self._position = 0
        self._bytes_read += len(data)
        return bool(data)

    def _peek(self) -> str:
        """Moves to the next character that is not whitespace, and returns it without consuming it; "" at the end."""
        while True:
            space = _SPACE.match(self._text, self._position)
            self._position = space.end() if space else self._position
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_more():
                return ""

    def _parse_element(self) -> Any:
        """Parses the element at the current position, reading more text until it is complete."""
        while True:
            fault = "it is cut short"
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
                # A number may continue in the next chunk.
                if end < len(self._text) or isinstance(value, str | dict | list):
                    self._position = end
                    return value
            except json.JSONDecodeError as error:
                fault = error.msg
                if error.pos < len(self._text) - _INCOMPLETE_CHARACTERS and not fault.startswith("Unterminated string"):
                    raise self._error(fault) from error
            except (ValueError, RecursionError) as error:
                raise self._error(str(error)) from error
            if len(self._text) - self._position > _MAX_BYTES:
                raise self._error(f"longer than {_MAX_BYTES:,} characters")
            if not self._read_more():
                raise self._error(fault)


def parquet_batches(path: str, columns: list[str], check: Callable[[Any], None]) -> Iterator[Any]:
    """Batches (`pyarrow.RecordBatch`) of columns of a Parquet file, after `check` of its schema.

    Raises InputError if pyarrow is missing, or the file is damaged.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InputError(f"{path}: Parquet needs the pyarrow package: pip install pyarrow") from error
    try:
        with pq.ParquetFile(path) as table:
            check(table.schema_arrow)
            yield from table.iter_batches(batch_size=256, columns=columns)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        message = " ".join(str(error).split())  # messages of pyarrow may have several lines
        raise InputError(
            f"{printable(path)}: not a Parquet file that can be read ({message}): mend or remove it"
        ) from error


def missing(field: str, argument: str, known: list[str]) -> str:
    """Message for a field, named by the config field `argument`, that is not among the `known` ones; without its place."""
    names = ", ".join(map(repr, known[:20])) + (", ..." if len(known) > 20 else "") or "none"
    near = "".join(f" (did you mean {name!r}?)" for name in difflib.get_close_matches(field, known, n=1))
    return f"no field {field!r}{near}, the fields are {names}: pass data.{argument}=NAME with one of them"


def missing_in_record(field: str, argument: str, known: list[str]) -> str:
    """As `missing`, for a field that one record lacks."""
    return f"{missing(field, argument, known)}, or data.skip_bad_lines=True to leave such records out"
