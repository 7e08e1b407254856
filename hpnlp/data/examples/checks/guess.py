"""The columns of a table of labelled texts, guessed from their names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hpnlp.data.examples import generated
from hpnlp.data.examples.config import ClassificationConfig
from hpnlp.data.reading import sources
from hpnlp.data.reading.records import missing
from hpnlp.data.reading.rows import FORMATS, NO_HEADER, read_columns
from hpnlp.types import InputError

TEXT_NAMES = ("text", "sentence", "review", "content", "body", "message", "comment", "document", "title", "question")
LABEL_NAMES = ("label", "class", "category", "target", "sentiment", "intent", "topic", "tag", "stars", "rating")
_RECORDS = 1000  # records whose values are compared where the names of columns do not decide


def guessed_fields(config: ClassificationConfig) -> dict[str, str]:
    """Guesses the columns of texts and labels, if a table lacks the columns that the config names.

    Args:
      config: The config. A name other than the default was given by the user, and stays.

    Returns:
      Those of the fields text_field and label_field of the config that have another column; empty where the columns of the
      config are there, or others cannot be told apart.

    Raises:
      InputError: There is no column of a name that the user gave; or the column of the labels has the name of a label, so that
        the first line is a record.
    """
    records = _first_records(config.path)
    names = list(records[0]) if records else []
    if config.text_field in names and config.label_field in names:
        return {}
    defaults = ClassificationConfig()
    is_given = config.text_field != defaults.text_field, config.label_field != defaults.label_field
    for field, is_set in zip(("text_field", "label_field"), is_given, strict=True):
        is_optional = field == "label_field" and config.unlabelled
        if records and is_set and not is_optional and not any(getattr(config, field) in record for record in records):
            raise InputError(f"data.path={config.path!r}: {missing(getattr(config, field), field, names)}")
    text = config.text_field if is_given[0] else _named(names, TEXT_NAMES)
    label = config.label_field if is_given[1] else _named(names, LABEL_NAMES)
    if any(name is not None and name not in names for name in (text, label)):
        return {}
    if len(names) == 2 and text is None and label is None:
        label = _repeated(names, records)
        if label is not None and any(str(record.get(label)) == label for record in records):
            raise InputError(
                f"data.path={config.path!r}: the first line has {label!r}, which is a label of other lines, in place of the "
                f"name of a column: {NO_HEADER}"
            )
    if len(names) == 2 and text is None and label is not None:
        text = names[1 - names.index(label)]
    elif len(names) == 2 and text is not None and label is None:
        label = names[1 - names.index(text)]
    if text is None or label is None:
        return {}
    guessed = {"text_field": text, "label_field": label}
    return {field: name for field, name in guessed.items() if getattr(config, field) != name}


def _named(names: Sequence[str], known: Sequence[str]) -> str | None:
    """The one column with a known name; None if there is none, or there are several."""
    matching = [name for name in names if name.strip().lower() in known]
    return matching[0] if len(matching) == 1 else None


def _repeated(names: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str | None:
    """The only column whose values repeat; None if there is none, or there are several."""
    repeated = [name for name in names if 2 * len({str(record.get(name)) for record in records}) <= len(records)]
    return repeated[0] if len(repeated) == 1 else None


def _first_records(path: str) -> list[Mapping[str, Any]]:
    """The first records of the first file of a path; none if they cannot be read (the reader of the data reports that)."""
    if generated.is_generated(path):
        return []
    try:
        file = next((file.path for source in sources.find(path, "data.path", FORMATS) for file in source.files), "")
        return list(itertools.islice(read_columns(file), _RECORDS))
    except (InputError, OSError):
        return []
