"""Checks that the tokenizers of spec strings and files share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpnlp.types import InputError

# Maximum number of ids: 16 times the largest published vocabulary, and few enough for a model's table to be allocated.
_LARGEST = 1 << 24


def check_size(value: object, least: int, example: str) -> int:
    """`value` as a number of ids, or an InputError."""
    if not isinstance(value, int) or not least <= value <= _LARGEST:
        raise InputError(f"tokenizer size {value!r}: expected a number of ids, {least} to {_LARGEST}, as in {example}")
    return value


def check_version(form: Mapping[str, Any], version: int, path: str) -> None:
    """Raises InputError if the JSON object of a tokenizer has another version."""
    if form.get("version") != version:
        raise InputError(f"{path!r} has format version {form.get('version')!r}, expected {version}: update hpnlp")


def integers(form: Mapping[str, Any], name: str, path: str) -> np.ndarray:
    """A list of a JSON object as an int64 array, or an InputError."""
    value = form[name]
    if not (isinstance(value, list) and all(isinstance(n, int) and abs(n) < 2**63 for n in value)):
        raise InputError(f"{path!r} is damaged: `{name}` is not a list of whole numbers: save it again")
    return np.array(value, np.int64)
