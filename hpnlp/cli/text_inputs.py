"""Texts that commands read with a trained model: lines of text, and records of files."""

from __future__ import annotations

import codecs
import dataclasses
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.data.examples.kind import Kind
    from hpnlp.data.reading.sources import LeftOut

STDIN = "-"
WITHOUT_TEXT = "without text"  # reason why lines are left out


class Example(NamedTuple):
    """An example: its place for messages, its inputs, and all fields that are written beside the prediction."""

    place: str
    inputs: list[Any]
    fields: dict[str, Any]

    @property
    def text(self) -> Any:
        """The text, or the list of the texts of a pair."""
        return self.inputs if len(self.inputs) > 1 else self.inputs[0]


@dataclasses.dataclass(frozen=True)
class TextInputs:
    """Reads examples from lines and files.

    Attributes:
      kind: Kind of the examples.
      left_out: Counts what is left out.
      flag: Text before the name of a file in messages, such as "--file=".
      keep: Fields of records to keep beside the texts.
      skip_bad_lines: Leave out, and count, records without a text or that cannot be read.
      keeps_blank: Lines without text are examples too, with an empty text; otherwise they are left out, and counted.
    """

    kind: Kind
    left_out: LeftOut
    flag: str = ""
    keep: Sequence[str] = ()
    skip_bad_lines: bool = False
    keeps_blank: bool = False

    def from_lines(self, lines: Iterable[tuple[int, str]], place: str) -> Iterator[Example]:
        """Reads numbered lines, in which tabs separate the texts of a pair.

        Args:
          lines: Numbers and lines, without their ends.
          place: Name of a line for messages, before its number.

        Yields:
          The examples.

        Raises:
          InputError: A line has too few or too many texts.
        """
        names = [column.name for column in self.kind.inputs]
        for number, line in lines:
            texts = line.split("\t") if len(names) > 1 else [line]
            if not line.strip() and self.keeps_blank:
                texts = [""] * len(names)
            if len(texts) != len(names):
                count = "one text" if len(texts) == 1 else f"{len(texts)} texts"
                raise InputError(
                    f"{place} {number}: {line!r:.60} is {count}, and the run reads {len(names)} ({', '.join(names)}): "
                    "put one tab between them, or use a file of records"
                )
            yield Example(f"{place} {number}", texts, dict(zip(names, texts, strict=True)))

    def from_file(self, name: str) -> Iterator[Example]:
        """Reads a file of lines or records.

        Args:
          name: Path of the file; STDIN for lines of stdin.

        Yields:
          The examples.

        Raises:
          InputError: The file cannot be read, or holds an invalid record.
        """
        from hpnlp.data.reading import files, sources

        if name == STDIN:
            stream = sys.stdin.buffer if sys.stdin else io.BytesIO()
            yield from self.from_lines(self._text_lines(stream, "stdin"), "stdin, line")
            return
        check_exists(name, self.flag)
        if has_records(name):
            yield from self._records(name)
            return
        if fault := sources.compression_fault(name):
            raise InputError(f"{self.flag}{name} {fault}: unpack it first")
        with files.open_text(name) as stream:
            yield from self.from_lines(self._text_lines(stream, name), f"{name}, line")

    def _records(self, name: str) -> Iterator[Example]:
        """Examples of a file of records."""
        from hpnlp.data.reading import rows, sources

        columns = self.kind.inputs
        keep = tuple(field for field in self.keep if field not in [column.name for column in columns])
        reader = rows.RowReader(self.kind, "", self.left_out, self.skip_bad_lines, has_labels=False, keep=keep)
        file = sources.File(os.path.abspath(name), os.path.basename(name), os.path.getsize(name))
        try:
            for row in reader.read(sources.Source(name, (file,), False, self.left_out)):
                inputs = [row.values[column.argument] for column in columns]
                fields = row.kept | {column.name: value for column, value in zip(columns, inputs, strict=True)}
                yield Example(
                    row.where, inputs, {field: fields[field] for field in dict.fromkeys([*self.keep, *fields])}
                )
        except InputError as error:
            # The reader names the fields of configs, in whose place commands have flags.
            message = re.sub(r"data\.\w+_field=", "--fields=", str(error)).replace("data.keep=", "--keep=")
            skip = "" if self.keeps_blank else r", or pass --skip_bad_lines to leave such \1 out"
            message = re.sub(r", or (?:pass )?data\.skip_bad_lines=True to leave such (\w+) out", skip, message)
            raise InputError(message.removesuffix(f"; {rows.LIST_ALL}")) from None

    def _text_lines(self, stream: Iterable[Any], name: str) -> Iterator[tuple[int, str]]:
        """Numbered lines of UTF-8 text without their ends."""
        from hpnlp.data.reading.files import not_utf8_byte

        for number, line in enumerate(stream, 1):
            if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise InputError(f"{name} is UTF-16: convert it, for example with iconv -f UTF-16 -t UTF-8")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise InputError(f"{name}, line {number}: {not_utf8_byte(error)}: use a file of UTF-8 text") from error
            if text.strip() or self.keeps_blank:
                yield number, text
            else:
                self.left_out.add(WITHOUT_TEXT, f"line {number}")


def check_exists(name: str, flag: str = "", otherwise: str = ", or - for stdin") -> None:
    """Checks that there is a file.

    Args:
      name: Path of the file, or STDIN.
      flag: As `TextInputs.flag`.
      otherwise: End of the messages: what may be named in place of a file.

    Raises:
      InputError: There is no such file, or it is a directory.
    """
    if name == STDIN:
        return
    if not os.path.exists(name):
        raise InputError(f"{flag}{name}: there is no such file: name one{otherwise}")
    if os.path.isdir(name):
        raise InputError(f"{flag}{name} is a directory: name one file{otherwise}")


def has_records(name: str) -> bool:
    """Whether the suffix of a file is that of records, which have named fields.

    Args:
      name: Path of the file.

    Returns:
      False for lines of text.
    """
    from hpnlp.data.reading.files import uncompressed
    from hpnlp.data.reading.rows import FORMATS

    return os.path.splitext(uncompressed(name))[1].lower() in FORMATS


def with_fields(kind: Kind, names: Sequence[str]) -> Kind:
    """The kind with other names of its inputs, as --fields gives them.

    Args:
      kind: Kind of the examples.
      names: The names; none to leave the kind as it is.

    Returns:
      The kind.

    Raises:
      InputError: There are too few or too many names, or one is given twice.
    """
    columns = kind.inputs
    if len(set(names)) < len(names):
        raise InputError(f"--fields={','.join(names)} names a field twice: name different ones")
    if names and len(names) != len(columns):
        expected = ", ".join(column.name for column in columns)
        raise InputError(f"--fields={','.join(names)}: expected {len(columns)}, in place of {expected}")
    changes: Any = {column.argument: name for column, name in zip(columns, names, strict=False)}
    return dataclasses.replace(cast(Any, kind), **changes) if names else kind
