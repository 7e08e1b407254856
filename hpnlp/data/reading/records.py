"""Records of text from JSON lines, JSON arrays and Parquet, one at a time.

`line_objects`, `ArrayReader` and `parquet_batches` read the same files for records with other fields.
"""

from __future__ import annotations

import codecs
import difflib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from hpnlp.data.reading.files import CONVERT, not_utf8_byte, printable
from hpnlp.types import InputError

T = TypeVar("T")

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


class Fields(NamedTuple):
    """Names of the fields that hold a record's text and its prompt; "" for no prompt."""

    text: str
    prompt: str


class FileRecord(NamedTuple):
    """One record.

    Attributes:
      number: Index in the file, from 0; records that are left out count as well.
      where: Place of the record, for error messages.
      prompt: Bytes of the prompt field.
      text: Bytes of the text field.
    """

    number: int
    where: str
    prompt: bytes
    text: bytes


@runtime_checkable
class Lines(Protocol):
    """A stream that is read line by line, such as a file."""

    def readline(self, size: int = -1, /) -> bytes: ...


class _FieldError(ValueError):
    """The value of a field is missing or invalid; the message lacks the place of the record."""


def json_lines(stream: Lines, path: str, fields: Fields, report_bad: ReportBad) -> Iterator[FileRecord]:
    """Reads a file with one JSON object per line; empty lines are ignored.

    Args:
      stream: Content of the file.
      path: Name of the file, for error messages.
      fields: Fields of the records to read.
      report_bad: Called for lines that hold no valid record.

    Yields:
      The valid records.
    """
    expected = f"a JSON object with a field {fields.text!r}"
    for number, where, value in line_objects(stream, path, expected, report_bad):
        yield from _record(value, number, where, fields, report_bad)


def line_objects(
    stream: Lines, path: str, expected: str, report_bad: ReportBad
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Reads a file with one JSON object per line; empty lines are ignored.

    Args:
      stream: Content of the file.
      path: Name of the file, for error messages.
      expected: Description of a line, for error messages.
      report_bad: Called for lines that hold no JSON object.

    Yields:
      (index of the line, its place for error messages, the object).
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
    """Reads lines; lines that are too long are reported as bad.

    Args:
      stream: Content of the file.
      path: Name of the file, for error messages.
      report_bad: Called for lines that are too long.

    Yields:
      (index of the line, its place for error messages, its content with the line end).
    """
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


class CountedRecords:
    """Counts the records of a file, bad ones included.

    Attributes:
      count: Number of records so far.
    """

    def __init__(self, report_bad: ReportBad):
        """Begins to count.

        Args:
          report_bad: Called for bad records.
        """
        self._report_bad = report_bad
        self.count = 0

    def report_bad(self, where: str, error: InputError) -> None:
        """Counts and reports a bad record."""
        self.count += 1
        self._report_bad(where, error)

    def count_each(self, read: Iterator[T]) -> Iterator[T]:
        """Yields records, and counts them."""
        for record in read:
            self.count += 1
            yield record


class CountedLines:
    """A stream that counts the lines that are read from it.

    Attributes:
      count: Number of lines so far.
    """

    def __init__(self, stream: io.BufferedReader):
        """Begins to count.

        Args:
          stream: Content of a file.
        """
        self._stream = stream
        self._within_line = False
        self.count = 0

    def readline(self, size: int = -1) -> bytes:
        """Reads a line.

        Args:
          size: Largest number of bytes; -1 for no limit.

        Returns:
          The line, or a part of one that is longer than `size`; b"" at the end.
        """
        line = self._stream.readline(size)
        self.count += bool(line) and not self._within_line
        self._within_line = bool(line) and not line.endswith(b"\n")
        return line

    def peek(self) -> bytes:
        """Returns the next bytes without reading them."""
        return self._stream.peek()


def json_array(stream: io.BufferedReader, path: str, fields: Fields, report_bad: ReportBad) -> Iterator[FileRecord]:
    """Reads a file that holds one JSON array of objects or strings, one element at a time.

    Args:
      stream: Content of the file.
      path: Name of the file, for error messages.
      fields: Fields of the records to read; an element that is a string is the text of a record.
      report_bad: Called for elements that are no valid record.

    Yields:
      The valid records.

    Raises:
      InputError: The file is not a JSON array. The error is raised even if bad records are skipped, because
          after a syntax error the end of an element cannot be detected.
    """
    for number, value in enumerate(ArrayReader(stream, path)):
        where = f"{path}, record {number + 1}"
        if isinstance(value, str) and not fields.prompt:
            value = {fields.text: value}
        if not isinstance(value, dict):
            expected = "an object" if fields.prompt else "an object or a string"
            report_bad(where, InputError(f"{where}: a {type(value).__name__}, expected {expected}: {SKIP}"))
            continue
        yield from _record(value, number, where, fields, report_bad)


def is_array(head: bytes, fields: Fields, walked: bool) -> bool:
    """Detects whether a `.json` file is an array of records; otherwise it is read as text.

    Args:
      head: The first bytes of the file.
      fields: Fields of the records to read.
      walked: True if the file was found in a directory. An array of objects without the text field is then text.

    Returns:
      True for an array of records.
    """
    start = re.match(rb'(?:\xef\xbb\xbf)?[ \t\r\n]*\[[ \t\r\n]*(["{\]])', head)
    if not start or not walked or start[1] != b"{":
        return start is not None
    try:
        first, _ = _DECODER.raw_decode(head[start.start(1) :].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return json.dumps(fields.text).encode() in head  # the first record is longer than `head`
    return fields.text in first


class ArrayReader:
    """Iterates over the elements of a JSON array, with one element and a chunk of the text after it in memory."""

    def __init__(self, stream: io.BufferedReader, path: str):
        """Begins to read.

        Args:
          stream: Content of the file.
          path: Name of the file, for error messages.
        """
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


def parquet(path: str, fields: Fields) -> Iterator[FileRecord]:
    """Reads the rows of a Parquet file in batches, and only the columns of `fields`.

    Args:
      path: Path of the file.
      fields: Columns that hold the text and the prompt.

    Yields:
      The rows; null is an empty text.

    Raises:
      InputError: pyarrow is missing, the file is damaged, or a column is missing or holds no strings.
    """
    columns = [fields.text, fields.prompt] if fields.prompt else [fields.text]
    name = printable(path)
    number = 0
    for batch in parquet_batches(path, columns, lambda schema: _check_columns(schema, columns, name)):
        # As binary, because pyarrow stores strings that are not UTF-8 and fails only when it converts them to str.
        values = [batch.column(column).cast("large_binary").to_pylist() for column in columns]
        for text, *prompt in zip(*values, strict=True):
            yield FileRecord(number, f"{name}, row {number}", prompt[0] or b"" if prompt else b"", text or b"")
            number += 1


def parquet_batches(path: str, columns: list[str], check: Callable[[Any], None]) -> Iterator[Any]:
    """Reads columns of a Parquet file in batches of rows.

    Args:
      path: Path of the file.
      columns: Names of the columns.
      check: Called with the schema of the file before columns are read.

    Yields:
      `pyarrow.RecordBatch` of at most 256 rows.

    Raises:
      InputError: pyarrow is missing, or the file is damaged.
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


def _check_columns(schema: Any, columns: list[str], path: str) -> None:
    """Raises InputError unless the columns exist once each and hold strings."""
    for argument, column in zip(("text_field", "prompt_field"), columns, strict=False):
        if column not in schema.names:
            raise InputError(f"{path}: {missing(column, argument, schema.names)}")
        if schema.names.count(column) > 1:
            raise InputError(
                f"{path}: has more than one column {column!r}: rename one, or pass another data.{argument}"
            )
        kind = str(schema.field(column).type)
        if kind not in ("string", "large_string", "binary", "large_binary"):
            raise InputError(f"{path}: column {column!r} holds {kind}, expected strings: pass another data.{argument}")


def _record(
    value: dict[str, Any], number: int, where: str, fields: Fields, report_bad: ReportBad
) -> Iterator[FileRecord]:
    """Yields the record of a JSON object, or reports it as bad."""
    try:
        prompt = _field(value, fields.prompt, "prompt_field") if fields.prompt else b""
        yield FileRecord(number, where, prompt, _field(value, fields.text, "text_field"))
    except _FieldError as error:
        report_bad(where, InputError(f"{where}: {error}"))


def _field(record: dict[str, Any], field: str, argument: str) -> bytes:
    """The bytes of one field, which the config field data.`argument` names; raises _FieldError."""
    if field not in record:
        raise _FieldError(missing_in_record(field, argument, list(record)))
    value = record[field]
    if value is None:
        return b""
    if not isinstance(value, str):
        raise _FieldError(f"field {field!r} is a {type(value).__name__}, expected a string: {SKIP}")
    # JSON can hold half a surrogate pair. It is kept as bytes; a tokenizer that needs text raises an error with its place.
    return value.encode("utf-8", "surrogatepass")


def missing(field: str, argument: str, known: list[str]) -> str:
    """Formats the message for a missing field.

    Args:
      field: Name of the field.
      argument: Config field that holds the name.
      known: Names of the fields that exist.

    Returns:
      The message, without the place of the record.
    """
    names = ", ".join(map(repr, known[:20])) + (", ..." if len(known) > 20 else "") or "none"
    near = "".join(f" (did you mean {name!r}?)" for name in difflib.get_close_matches(field, known, n=1))
    return f"no field {field!r}{near}, the fields are {names}: pass data.{argument}=NAME with one of them"


def missing_in_record(field: str, argument: str, known: list[str]) -> str:
    """Formats the message for a field that one record lacks.

    Args:
      field: Name of the field.
      argument: Config field that holds the name.
      known: Names of the fields that the record has.

    Returns:
      The message, without the place of the record.
    """
    return f"{missing(field, argument, known)}, or data.skip_bad_lines=True to leave such records out"
