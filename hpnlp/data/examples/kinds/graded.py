"""Pairs of texts with grades of their similarity (semantic textual similarity), by which dual encoders are scored."""

from __future__ import annotations

import numpy as np

from hpnlp.data.examples.config import PairsConfig
from hpnlp.data.examples.kinds.labelled_pairs import GradedPairs
from hpnlp.data.examples.kinds.unlabelled import Unlabelled
from hpnlp.data.reading import sources
from hpnlp.data.reading.fields import FieldError
from hpnlp.data.reading.rows import FORMATS, RowReader
from hpnlp.data.reading.sources import LeftOut
from hpnlp.types import InputError, Tokenizer


def read_graded(config: PairsConfig, tokenizer: Tokenizer) -> tuple[Unlabelled, np.ndarray]:
    """Reads the pairs of `data.graded_path`.

    Args:
      config: Config of the data.
      tokenizer: The tokenizer of the texts.

    Returns:
      `(pairs, grades)`: examples of `config.kind()`, and float64 [n].

    Raises:
      InputError: A file cannot be read or holds an invalid record, or all grades are equal.
    """
    kind = GradedPairs(config.text_field, config.pair_field, grade_field=config.grade_field, argument="grade_field")
    reader = RowReader(kind, "", LeftOut(), config.skip_bad_lines)
    files = sources.find(config.graded_path, "data.graded_path", FORMATS)
    rows = [row for source in files for row in reader.read(source)]
    grades = np.array([row.values["grade_field"] for row in rows], np.float64)
    if len(np.unique(grades)) < 2:
        raise InputError(
            f"data.graded_path={config.graded_path!r} holds {len(rows)} pairs, which have no different grades to compare "
            f"similarities with: name records whose field {config.grade_field!r} differs"
        )

    def refuse(number: int, error: FieldError) -> None:
        raise InputError(f"{rows[number].where}: {error}") from error

    return Unlabelled(config.kind(), tokenizer, [row.values for row in rows], refuse), grades
