"""Values of records' fields, checked and converted: texts, labels, and lists of words and of labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from hpnlp.data.reading import files

LABEL_FIELDS = ("label_field", "labels_field")  # config fields that name the field of the labels


class FieldError(ValueError):
    """The value of a field is invalid; the message lacks the field and the place of the record."""


class Column(NamedTuple):
    """A field of the records that an example consists of.

    Attributes:
      name: Name of the field in the records.
      argument: Config field that holds the name, or the names of several fields if it ends in "_fields".
      type: Entry of TYPES.
    """

    name: str
    argument: str
    type: str

    @property
    def key(self) -> str:
        """Key of the converted value among those of a record."""
        return f"{self.argument}:{self.name}" if self.argument.endswith("_fields") else self.argument

    @property
    def is_optional(self) -> bool:
        """Whether records may lack the field."""
        return self.type.startswith("optional ")


def text(value: object) -> str:
    """Checks a text: a string that is not empty, or bytes in UTF-8 (Parquet)."""
    value = anything(value)
    if value is None or value == "":
        raise FieldError("is empty")
    if not isinstance(value, str):
        raise FieldError(f"is a {type(value).__name__}, expected a string")
    return value


def anything(value: object) -> Any:
    """Returns a value of any type, bytes (Parquet) as a string; raises FieldError for a string that is not UTF-8."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if not isinstance(value, str):
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, or a byte that `surrogateescape` has kept
        code = ord(value[error.start])
        if not 0xDC80 <= code <= 0xDCFF:
            raise FieldError(f"is not UTF-8 (half a surrogate pair at character {error.start})") from error
        byte = f"byte 0x{code - 0xDC00:02x} at character {error.start}"
        raise FieldError(f"is not UTF-8 ({byte}), {files.CONVERT}") from error
    return value


def stored_bytes(value: object) -> bytes:
    """Converts the text of a document to bytes: UTF-8, half a surrogate pair, or any bytes (Parquet); b"" for None."""
    if value is None or isinstance(value, bytes):
        return value or b""
    if not isinstance(value, str):
        raise FieldError(f"is a {type(value).__name__}, expected a string")
    return value.encode("utf-8", "surrogatepass")  # a tokenizer that needs text raises an error with its place


def label(value: object) -> str:
    """Name of the class of a label: a string, a whole number or a boolean, as CSV would hold it (`true` and `false`).

    Whitespace around the name is kept.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        raise FieldError(f"is the number {value}, expected a string, a whole number or a boolean")
    name = text(value)
    if not name.strip():
        raise FieldError("is an empty class")
    return name


def number(value: Any) -> float:
    """Converts a finite whole or decimal number, or a string of one."""
    try:
        converted = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        converted = math.nan
    if not math.isfinite(converted):
        raise FieldError(f"is {value!r:.40}, expected a number")
    return converted


def _items(value: object, convert: Callable[[Any], str]) -> list[str]:
    """The items of a list, or of a string that is split at whitespace."""
    if isinstance(value, str | bytes):
        value = text(value).split()
    if value is None or value == []:
        raise FieldError("is empty")
    if not isinstance(value, list):
        raise FieldError(f"is a {type(value).__name__}, expected a list, or a string that is split at whitespace")
    items = []
    for number, item in enumerate(value, 1):
        try:
            items.append(convert(item))
        except FieldError as error:
            raise FieldError(f"has an item {number} that {error}") from error
    return items


def words(value: object) -> list[str]:
    """Converts a list of strings, or a string that is split at whitespace."""
    return _items(value, text)


def labels(value: object) -> list[str]:
    """Converts a list of values that `label` converts, or a string that is split at whitespace."""
    return _items(value, label)


def is_missing(value: Any) -> bool:
    """Whether a field is empty or missing: None, an empty list, or a string of blanks."""
    return value is None or value == [] or (isinstance(value, str | bytes) and not value.strip())


def optional_label(value: object) -> str:
    """Converts a label; "" for a value that `is_missing`."""
    return "" if is_missing(value) else label(value)


def optional_labels(value: object) -> list[str]:
    """Converts a list of labels; [] for a value that `is_missing`."""
    return [] if is_missing(value) else labels(value)


def texts(value: object) -> list[str]:
    """Converts a list of strings, or a string with one text in each line."""
    if isinstance(value, str | bytes):
        value = [line for line in text(value).splitlines() if line.strip()]
    return _items(value, text)


_LABELS = frozenset({"string", "list of string", "list of integer", "list of boolean"})
# Name of a type -> (conversion of a value, types of Parquet columns that hold such values: "string", "integer", "bool",
# "list of string", ...; none for columns of any type).
TYPES: dict[str, tuple[Callable[[Any], Any], frozenset[str]]] = {
    "text": (text, frozenset({"string"})),
    "bytes": (stored_bytes, frozenset({"string"})),
    "anything": (anything, frozenset()),
    "number": (number, frozenset({"float", "double", "halffloat", "integer", "string"})),
    "label": (label, frozenset({"string", "integer", "boolean"})),
    "optional label": (optional_label, frozenset({"string", "integer", "boolean", "null"})),
    "words": (words, frozenset({"string", "list of string"})),
    "texts": (texts, frozenset({"string", "list of string"})),
    "labels": (labels, _LABELS),
    "optional labels": (optional_labels, _LABELS | {"null", "list of null"}),
}
