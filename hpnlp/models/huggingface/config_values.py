"""Checks of the values in a config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from hpnlp.types import InputError

_EXPECTED = {int: "a whole number of at least 1", float: "a positive number", bool: "true or false"}


def checked_value(raw: Mapping[str, Any], key: str, kind: type, source: str) -> Any:
    """Reads a value of a config.json.

    Args:
      raw: Content of the file.
      key: Key of the value.
      kind: int or float for a positive number, or bool.
      source: Name of the file, for error messages.

    Returns:
      The value, of type `kind`.

    Raises:
      InputError: The value is missing or invalid.
    """
    if key not in raw:
        raise InputError(f"{source}: {key} is missing: add it, or take the file from where the weights came from")
    value = float(raw[key]) if kind is float and type(raw[key]) is int else raw[key]
    if type(value) is not kind or (kind is not bool and not 0 < value < math.inf):
        raise InputError(f"{source}: {key} is {value!r}: expected {_EXPECTED[kind]}")
    return value


def unsupported(source: str, key: str, value: object, supported: Iterable[Any]) -> InputError:
    """Makes the error for a setting under which `LM` would compute something else.

    Args:
      source: Name of the file.
      key: Key of the setting.
      value: Its value in the file.
      supported: Values that are supported.

    Returns:
      The InputError to raise.
    """
    fix = f"choose a model with {key}={' or '.join(map(json.dumps, supported))}"
    return InputError(f"{source}: {key}={json.dumps(value)} is not supported: {fix}")
