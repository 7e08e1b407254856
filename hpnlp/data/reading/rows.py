"""Records of documents and examples from JSON lines, JSON arrays, CSV, Parquet and numpy arrays, one at a time."""

from __future__ import annotations

import abc
import csv
import dataclasses
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from hpnlp.data.reading import files, records
from hpnlp.data.reading.fields import LABEL_FIELDS, TYPES, Column, FieldError, is_missing
from hpnlp.data.reading.files import printable
from hpnlp.data.reading.records import LIST_ALL, SKIP, CountedLines, ReportBad
from hpnlp.data.reading.sources import File, LeftOut, LineCounts, Source, extension
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.data.examples.kind import Kind

T = TypeVar("T")
# (index of a record in its file, place for error messages, name of a field -> value)
_Values = tuple[int, str, dict[str, Any]]

_SEPARATORS = ",\t;"  # the separator of a CSV file is the one that its first line holds first
_MAX_FIELD = 1 << 28  # bytes of a field of CSV; longer fields are refused, as longer lines of JSON are

NO_HEADER = "write a line with the names of the columns before the first record, such as text,label"
CARRIAGE_RETURN = (
    "a carriage return outside of quotes: if all lines end so, convert the file by tr '\\r' '\\n' < FILE > NEW_FILE, "
    "or else quote the cell"
)


class Row(NamedTuple):
    """One valid record.

    Attributes:
      name: Name by which the example is held out or not: the value of the group's field, or else file and number.
      where: Place of the record, for error messages.
      values: `Column.key` -> converted value of the field.
      kept: Name of each field of `RowReader.keep` -> its value.
    """

    name: str
    where: str
    values: dict[str, Any]
    kept: dict[str, Any]


class RecordReader(abc.ABC, Generic[T]):
    """Reads the records of sources. Invalid records raise an error, or are left out and counted.

    Attributes:
      left_out: Counts what is not read.
      skip_bad_lines: Leave out and count bad records.
      line_counts: Numbers of records and lines, where they differ.
      bad_reason: Reason under which bad records are counted.
    """

    left_out: LeftOut
    skip_bad_lines: bool
    line_counts: LineCounts
    bad_reason: ClassVar[str] = "invalid"

    @property
    @abc.abstractmethod
    def columns(self) -> tuple[Column, ...]:
        """Fields to read."""

    @abc.abstractmethod
    def read_file(self, file: File, source: Source) -> Iterator[T]:
        """Reads the content of one file of a source."""

    def check(self, values: dict[str, Any]) -> None:
        """Raises FieldError if the values of a record do not fit together."""
        return None

    def fix(self, column: Column) -> str:
        """The fix for a record that lacks a field, besides that of the record; "" for none."""
        return ""

    def read(self, source: Source) -> Iterator[T]:
        """Reads the files of a source in their order.

        Raises InputError if a file cannot be read or holds an invalid record, with the file and the place in it.
        """
        for file in source.files:
            try:
                yield from self.read_file(file, source)
            except OSError as error:
                raise files.unreadable(file.path, error) from error

    def report_bad(self, where: str, error: InputError, reason: str = "") -> None:
        """Counts a bad record, or raises the error, with the command that lists all of them."""
        if not self.skip_bad_lines:
            raise InputError(f"{error}; {LIST_ALL}") from error
        self.left_out.add(reason or self.bad_reason, where)

    def read_records(self, file: File, stream: io.BufferedReader | None = None) -> Iterator[Row]:
        """Valid records of a file in one of FORMATS, whose content is `stream` if it is read as one."""
        columns, name = self.columns, files.uncompressed(file.name)
        for number, where, record in self._unchecked(file, stream, columns):
            row = self._convert(columns, name, number, where, record)
            if row is not None:
                yield row

    def _unchecked(self, file: File, stream: io.BufferedReader | None, columns: Sequence[Column]) -> Iterator[_Values]:
        """Records of one file, before their fields are checked; counts the records and lines of formats of lines."""
        suffix, path, count = file.suffix, printable(file.path), 0
        if stream is None:
            yield from _BY_PATH[suffix](file.path, columns)
            return
        if suffix not in _BY_LINES:
            yield from _BY_STREAM[suffix](stream, path, columns, self.report_bad)
            return

        def report_bad(where: str, error: InputError) -> None:
            nonlocal count
            count += 1
            self.report_bad(where, error)

        counted = CountedLines(stream)
        for record in _BY_STREAM[suffix](counted, path, columns, report_bad):
            count += 1
            yield record
        self.line_counts.add(file.name, count, counted.count - _BY_LINES[suffix])

    def _convert(
        self, columns: Sequence[Column], name: str, number: int, where: str, record: dict[str, Any]
    ) -> Row | None:
        """The record with converted values; None if it is bad and skipped."""
        values, kept = {}, {}
        for column in columns:
            if column.name not in record and not column.is_optional:
                fault = records.missing_in_record(column.name, column.argument, list(record))
                self.report_bad(where, InputError(f"{where}: {fault}{self.fix(column)}"))
                return None
        fix = SKIP
        try:
            for column in columns:
                field = record.get(column.name)
                try:
                    value = TYPES[column.type][0](field)
                except FieldError as error:
                    fix += self.fix(column) if is_missing(field) else ""
                    raise FieldError(f"field {column.name!r} {error}") from error
                if column.argument == "keep":
                    kept[column.name] = value
                else:
                    values[column.key] = value
            self.check(values)
        except FieldError as error:
            self.report_bad(where, InputError(f"{where}: {error}: {fix}"))
            return None
        return Row(values.pop("group_field", f"{name}#{number}"), where, values, kept)


@dataclasses.dataclass(frozen=True)
class RowReader(RecordReader[Row]):
    """Reads the records of sources of examples.

    Attributes:
      kind: Kind of the examples.
      group_field: Field with the name of a record's group; "" for none.
      has_labels: Read all fields of the kind; otherwise its `inputs` only.
      keep: Names of other fields to read as they are.
    """

    kind: Kind
    group_field: str
    left_out: LeftOut
    skip_bad_lines: bool
    has_labels: bool = True
    keep: tuple[str, ...] = ()
    line_counts: LineCounts = dataclasses.field(default_factory=LineCounts)

    @property
    def columns(self) -> tuple[Column, ...]:
        group = [Column(self.group_field, "group_field", "label")] if self.group_field else []
        kept = [Column(name, "keep", "anything") for name in self.keep]
        return (*(self.kind.columns if self.has_labels else self.kind.inputs), *group, *kept)

    def check(self, values: dict[str, Any]) -> None:
        self.kind.check({**self.kind.placeholders(values), **values})

    def fix(self, column: Column) -> str:
        return self.kind.label_fix if column.argument in LABEL_FIELDS else ""

    def read_file(self, file: File, source: Source) -> Iterator[Row]:
        if file.suffix not in FORMATS:
            if not source.walked:
                raise InputError(
                    f"{file.path!r} has another format: expected {', '.join(FORMATS)}: convert or rename it"
                )
            self.left_out.add(f"of other formats ({extension(file.name)})", file.name)
        elif file.suffix in _BY_PATH:
            yield from self.read_records(file)
        else:
            with files.open_text(file.path) as stream:
                head = stream.peek()[: files.SNIFF]
                if encoding := files.foreign_encoding(head):
                    raise files.not_utf8(file.path, encoding)
                if head:
                    yield from self.read_records(file, stream)
                else:
                    self.left_out.add("empty", file.name)


def read_columns(path: str) -> Iterator[dict[str, Any]]:
    """Records of a file of text formats with all of their columns, unchecked and without invalid ones.

    There are none of a file in another format. Raises InputError or OSError if the file cannot be read.
    """

    def leave_out(where: str, error: InputError) -> None:
        pass

    suffix = os.path.splitext(files.uncompressed(path))[1].lower()
    if suffix in _BY_STREAM:
        with files.open_text(path) as stream:
            source = CountedLines(stream) if suffix in _BY_LINES else stream
            yield from (record for _, _, record in _BY_STREAM[suffix](source, printable(path), (), leave_out))


def _json_lines(stream: CountedLines, path: str, columns: Sequence[Column], report_bad: ReportBad) -> Iterator[_Values]:
    return records.json_lines(stream, path, f"a JSON object with {_fields(columns)}", report_bad)


def _json_array(
    stream: io.BufferedReader, path: str, columns: Sequence[Column], report_bad: ReportBad
) -> Iterator[_Values]:
    """Elements of an array. A string is a document, if documents have no other field."""
    is_text = [column.type for column in columns] == ["bytes"]
    for number, value in enumerate(records.ArrayReader(stream, path)):
        where = f"{path}, record {number + 1}"
        if isinstance(value, dict):
            yield number, where, value
        elif is_text and isinstance(value, str):
            yield number, where, {columns[0].name: value}
        else:
            expected = "an object or a string" if is_text else f"an object with {_fields(columns)}"
            report_bad(where, InputError(f"{where}: a {type(value).__name__}, expected {expected}: {SKIP}"))


def _fields(columns: Sequence[Column]) -> str:
    """Names of fields, for messages."""
    names = ", ".join(repr(column.name) for column in columns)
    return f"fields {names}" if len(columns) > 1 else f"a field {names}"


def _csv(stream: CountedLines, path: str, columns: Sequence[Column], report_bad: ReportBad) -> Iterator[_Values]:
    """Records of comma-separated values (RFC 4180); separated by tabs or semicolons where the first line has no comma."""
    first = stream.peek()[: files.SNIFF].partition(b"\n")[0].decode("utf-8", "replace")
    delimiter = next((mark for mark in _SEPARATORS if mark in first), ",")
    hint = f'quote cells with a {delimiter!r} or "'
    yield from _cells(stream, path, columns, report_bad, hint, delimiter=delimiter)


def _tsv(stream: CountedLines, path: str, columns: Sequence[Column], report_bad: ReportBad) -> Iterator[_Values]:
    """Records of tab-separated values in lines without quotes, as those of GLUE: a quotation mark is a character of a text."""
    hint = "cells have no tabs and no quotes; name a file with quoted cells .csv"
    yield from _cells(stream, path, columns, report_bad, hint, delimiter="\t", quoting=csv.QUOTE_NONE)


def _cells(
    stream: CountedLines, path: str, columns: Sequence[Column], report_bad: ReportBad, hint: str, **form: Any
) -> Iterator[_Values]:
    """Records of separated values, whose first line names the columns. hint: the fix of too many cells."""
    csv.field_size_limit(_MAX_FIELD)  # Python's default, a setting of the process, refuses texts of more than 128 KiB
    # Bytes that are not UTF-8 are kept, so that the error names the record and not the file alone.
    text = (
        line.decode("utf-8-sig" if number == 0 else "utf-8", "surrogateescape")
        for number, _, line in records.lines(stream, path, report_bad)
    )
    reader = csv.reader(text, strict=True, **form)
    header: list[str] | None = None
    number = 0
    while True:
        where = f"{path}, line {reader.line_num + 1}"  # a record may have several lines
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fault = CARRIAGE_RETURN if "new-line character" in str(error) else f"not CSV ({error}): {SKIP}"
            report_bad(where, InputError(f"{where}: {fault}"))
            continue
        if header is None:
            header = cells
            try:
                _check_header(header, columns, where)
            except InputError as error:
                raise InputError(f"{error}; if this line is a record, {NO_HEADER}") from error
        elif cells:
            if len(cells) == len(header):
                yield number, where, dict(zip(header, cells, strict=True))
            else:
                fault = f"{len(cells)} cells, expected {len(header)} as in the first line"
                fix = hint if len(cells) > len(header) else "cells are missing, or one has a line break without quotes"
                report_bad(where, InputError(f"{where}: {fault}; {fix}: {SKIP}"))
            number += 1


def _check_header(header: Sequence[str], columns: Sequence[Column], where: str) -> None:
    """Raises InputError unless each column occurs once; optional columns may be missing."""
    for column in columns:
        if column.name not in header and not column.is_optional:
            raise InputError(f"{where}: {records.missing(column.name, column.argument, list(header))}")
        if header.count(column.name) > 1:
            raise InputError(
                f"{where}: has more than one column {column.name!r}: rename one, or pass another data.{column.argument}"
            )


def _check_type(path: str, noun: str, column: Column, held: str, form: str = "") -> None:
    """Raises InputError unless a column may hold values of a type; in arrays, `form` follows the names of types."""
    types = sorted(kind for kind in TYPES[column.type][1] if not form or not kind.startswith("list"))
    accepted = [f"{kind}{form}" for kind in types]
    if accepted and held not in accepted:
        raise InputError(
            f"{path}: {noun} {column.name!r} holds {held}, expected {' or '.join(accepted)}: convert it, or pass another "
            f"data.{column.argument}"
        )


def _parquet(path: str, columns: Sequence[Column]) -> Iterator[_Values]:
    """Rows of a Parquet file."""
    name, number = printable(path), 0

    def check(schema: Any) -> None:
        _check_header(schema.names, columns, name)
        for column in columns:
            if column.name not in schema.names:
                continue
            _check_type(name, "column", column, _arrow_type(schema.field(column.name).type))

    names = [column.name for column in columns]
    for batch in records.parquet_batches(path, names, check):
        present = [column for column in names if column in batch.schema.names]  # optional columns may be absent
        values = [_python_values(batch.column(column)) for column in present]
        for row in zip(*values, strict=True):
            yield number, f"{name}, row {number}", dict(zip(present, row, strict=True))
            number += 1


def _arrays(path: str, columns: Sequence[Column]) -> Iterator[_Values]:
    """Elements of arrays that have the names of fields; the arrays of a file are read into memory."""
    name = printable(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {field: archive[field] for field in archive.files}
    except (ValueError, EOFError, AttributeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            f"{name}: no arrays that can be read ({error}): save them by numpy.savez, strings as dtype=str"
        ) from error
    _check_header(list(arrays), columns, name)
    columns = [column for column in columns if column.name in arrays]
    read = [arrays[column.name] for column in columns]
    for column, array in zip(columns, read, strict=True):
        held = f"{_DTYPES.get(array.dtype.kind, array.dtype)} in {array.ndim} dimensions"
        _check_type(name, "array", column, held, " in 1 dimensions")
    lengths = {column.name: len(array) for column, array in zip(columns, read, strict=True)}
    if len(set(lengths.values())) > 1:
        raise InputError(f"{name}: arrays of different lengths {lengths}: save arrays of the same examples")
    for number, row in enumerate(zip(*read, strict=True)):
        values = {column.name: value.item() for column, value in zip(columns, row, strict=True)}
        yield number, f"{name}, row {number}", values


# Kind of a numpy dtype -> name of the type as in `fields.TYPES`.
_DTYPES = {"U": "string", "S": "string", "i": "integer", "u": "integer", "b": "boolean"}


def _arrow_type(kind: Any) -> str:
    """Name of a type of Arrow as in `fields.TYPES`, or Arrow's name for other types."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _arrow_type(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return f"list of {_arrow_type(kind.value_type)}"
    if any(
        is_text(kind) for is_text in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    ):
        return "string"
    if types.is_integer(kind):
        return "integer"
    return "boolean" if types.is_boolean(kind) else str(kind)


def _python_values(column: Any) -> list[Any]:
    """Values of a column; if one is not UTF-8, which pyarrow detects only here, texts become bytes."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        import pyarrow as pa

        kind, binary = column.type, pa.large_binary()
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        return column.cast(pa.large_list(binary) if is_list else binary).to_pylist()


# Extension -> function from (stream, path, columns, report_bad) to the records.
_BY_STREAM: dict[str, Callable[..., Iterator[_Values]]] = {
    ".jsonl": _json_lines,
    ".json": _json_array,
    ".csv": _csv,
    ".tsv": _tsv,
}
# Extension of formats that are read line by line -> number of lines with the names of columns.
_BY_LINES = {".jsonl": 0, ".csv": 1, ".tsv": 1}
# Extension -> function from (path, columns) to the records.
_BY_PATH: dict[str, Callable[..., Iterator[_Values]]] = {".parquet": _parquet, ".npz": _arrays}
FORMATS = (*_BY_STREAM, *_BY_PATH)
