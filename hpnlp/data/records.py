"""Records of text from JSON lines, JSON arrays and Parquet, one at a time."""

from __future__ import annotations

import codecs
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hpnlp.data.files import printable
from hpnlp.types import InputError

# Raises its error, or counts the place and returns where bad lines are left out.
Bad = Callable[[str, InputError], None]

# A longer line is no record: the limit keeps a compressed file of zeros from filling the memory.
_LONGEST = 1 << 28
_CHUNK = 1 << 16
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
# Parsing fails at most so many characters before the end of text that is cut short, unless it is within a string.
_LOOK_BACK = 16
_SKIP = "mend or remove the line, or pass data.skip_bad_lines=True to leave such lines out"


class Fields(NamedTuple):
    """The fields of a record that hold its text and its prompt ("" for no prompt)."""

    text: str
    prompt: str


class Record(NamedTuple):
    """One record. number: counted from 0, with those that are left out. where: for messages."""

    number: int
    where: str
    prompt: bytes
    text: bytes


class _FieldError(ValueError):
    """A value that is no record of the fields; the message ends without a fix."""


def json_lines(stream: io.BufferedReader, path: str, fields: Fields, bad: Bad) -> Iterator[Record]:
    """The records of a file of one JSON object a line; empty lines are passed over."""
    for number, where, line in _lines(stream, path, bad):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad(where, InputError(f"{where}: not JSON ({error}): {_SKIP}"))
            continue
        if not isinstance(value, dict):
            bad(where, InputError(f"{where}: expected a JSON object with a field {fields.text!r}: {_SKIP}"))
            continue
        yield from _record(value, number, where, fields, bad)


def _lines(stream: io.BufferedReader, path: str, bad: Bad) -> Iterator[tuple[int, str, bytes]]:
    for number in itertools.count():
        line = stream.readline(_LONGEST + 1)
        if not line:
            return
        where = f"{path}, line {number + 1}"
        if len(line) > _LONGEST:
            bad(where, InputError(f"{where}: longer than {_LONGEST:,} bytes: {_SKIP}"))
            while line and not line.endswith(b"\n"):
                line = stream.readline(_CHUNK)
            continue
        yield number, where, line


def json_array(stream: io.BufferedReader, path: str, fields: Fields, bad: Bad) -> Iterator[Record]:
    """The records of a file that holds one JSON array of objects or strings, which is parsed one element at a time.

    Raises InputError where the file is no such array: what follows a fault in it cannot be told apart.
    """
    for number, value in enumerate(_Array(stream, path)):
        where = f"{path}, record {number + 1}"
        if isinstance(value, str) and not fields.prompt:
            value = {fields.text: value}
        if not isinstance(value, dict):
            expected = "an object" if fields.prompt else "an object or a string"
            bad(where, InputError(f"{where}: a {type(value).__name__}, expected {expected}: {_SKIP}"))
            continue
        yield from _record(value, number, where, fields, bad)


def is_array(head: bytes, fields: Fields, walked: bool) -> bool:
    """Whether a `.json` file that starts with `head` is an array of records, and not a text that happens to be JSON.

    In a walk through a directory, an array of objects without the text field is text, as all other JSON is.
    """
    start = re.match(rb'(?:\xef\xbb\xbf)?[ \t\r\n]*\[[ \t\r\n]*(["{\]])', head)
    if not start or not walked or start[1] != b"{":
        return start is not None
    try:
        first, _ = _DECODER.raw_decode(head[start.start(1) :].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return json.dumps(fields.text).encode() in head  # the first record is longer than the head
    return fields.text in first


class _Array:
    """Iterates over the elements of a JSON array; holds one of them, and some text after it, in memory."""

    def __init__(self, stream: io.BufferedReader, path: str):
        self._stream = stream
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._bytes = "", 0, 0
        self._count = 0

    def __iter__(self) -> Iterator[Any]:
        if self._next() != "[":
            raise self._error("expected [")
        self._at += 1
        separator = "" if self._next() == "]" else ","
        while separator == ",":
            self._next()
            yield self._element()
            self._count += 1
            separator = self._next()
            if separator not in (",", "]"):
                raise self._error("expected a comma or ]" if separator else "the array has no end")
            self._at += separator == ","
        self._at += 1
        if self._next():
            raise self._error("text follows the array")

    def _error(self, fault: str) -> InputError:
        return InputError(
            f"{self._path}, record {self._count + 1}: not a JSON array ({fault}): mend it, or save one record a line as .jsonl"
        )

    def _more(self) -> bool:
        """Reads as much again as there is, so that parsing a long element from its start each time is linear in its length."""
        data = self._stream.read(max(_CHUNK, len(self._text) - self._at))
        try:
            decoded = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise self._error(f"{error.reason} near byte {self._bytes + error.start}, not UTF-8") from error
        self._text, self._at, self._bytes = self._text[self._at :] + decoded, 0, self._bytes + len(data)
        return bool(data)

    def _next(self) -> str:
        """Moves to the next character that is not whitespace, and returns it, or "" at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _element(self) -> Any:
        while True:
            fault = "it is cut short"
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or isinstance(value, str | dict | list):  # a number may go on
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                fault = error.msg
                if error.pos < len(self._text) - _LOOK_BACK and not fault.startswith("Unterminated string"):
                    raise self._error(fault) from error
            except (ValueError, RecursionError) as error:
                raise self._error(str(error)) from error
            if len(self._text) - self._at > _LONGEST:
                raise self._error(f"longer than {_LONGEST:,} characters")
            if not self._more():
                raise self._error(fault)


def parquet(path: str, fields: Fields) -> Iterator[Record]:
    """The rows of a Parquet file, of which only the columns that are needed are read, some at a time."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InputError(f"{path}: Parquet needs the pyarrow package: pip install pyarrow") from error
    columns = [fields.text, fields.prompt] if fields.prompt else [fields.text]
    name = printable(path)
    try:
        with pq.ParquetFile(path) as table:
            _check_columns(table.schema_arrow, columns, name)
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=columns):
                # As binary, because pyarrow stores strings that are not UTF-8 and only fails when Python asks for them.
                values = [batch.column(column).cast(pa.large_binary()).to_pylist() for column in columns]
                for text, *prompt in zip(*values, strict=True):
                    yield Record(number, f"{name}, row {number}", prompt[0] or b"" if prompt else b"", text or b"")
                    number += 1
    except (pa.ArrowException, UnicodeDecodeError) as error:
        message = " ".join(str(error).split())  # of several lines, some of them
        raise InputError(f"{name}: not a Parquet file that can be read ({message}): mend or remove it") from error


def _check_columns(schema: Any, columns: list[str], path: str) -> None:
    for argument, column in zip(("text_field", "prompt_field"), columns, strict=False):
        if column not in schema.names:
            raise InputError(f"{path}: {_missing(column, argument, schema.names)}")
        if schema.names.count(column) > 1:
            raise InputError(
                f"{path}: has more than one column {column!r}: rename one, or pass another data.{argument}"
            )
        kind = str(schema.field(column).type)
        if kind not in ("string", "large_string", "binary", "large_binary"):
            raise InputError(f"{path}: column {column!r} holds {kind}, expected strings: pass another data.{argument}")


def _record(value: dict[str, Any], number: int, where: str, fields: Fields, bad: Bad) -> Iterator[Record]:
    """The Record of a JSON object, or nothing where it is bad and bad lines are left out."""
    try:
        prompt = _field(value, fields.prompt, "prompt_field") if fields.prompt else b""
        yield Record(number, where, prompt, _field(value, fields.text, "text_field"))
    except _FieldError as error:
        bad(where, InputError(f"{where}: {error}"))


def _field(row: dict[str, Any], field: str, argument: str) -> bytes:
    if field not in row:
        raise _FieldError(
            f"{_missing(field, argument, list(row))}, or data.skip_bad_lines=True to leave such records out"
        )
    value = row[field]
    if value is None:
        return b""
    if not isinstance(value, str):
        raise _FieldError(f"field {field!r} is a {type(value).__name__}, expected a string: {_SKIP}")
    # JSON may spell half a surrogate pair; as bytes it is kept, and a tokenizer that needs text says where it is.
    return value.encode("utf-8", "surrogatepass")


def _missing(field: str, argument: str, known: list[str]) -> str:
    there = ", ".join(map(repr, known[:20])) + (", ..." if len(known) > 20 else "") or "none"
    return f"no field {field!r}, the fields are {there}: pass data.{argument}=NAME with one of them"
