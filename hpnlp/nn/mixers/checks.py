"""Checks of arguments that all mixers have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hpnlp.types import InputError


def checked_dropout(name: str, entry: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a check of the rate of dropout to an entry of MIXERS.

    Args:
      name: Name of the entry, for the message.
      entry: A function with the keyword argument `dropout` that returns a mixer.

    Returns:
      A function with the signature of `entry`. It raises InputError for a rate of dropout outside of [0, 1), also where the
      mixer ignores it.
    """

    @functools.wraps(entry)
    def make_mixer(*args: Any, dropout: float = 0.0, **kwargs: Any) -> Any:
        if not 0.0 <= dropout < 1.0:
            raise InputError(f"model.mixer={name}(dropout={dropout}): expected a probability in [0, 1)")
        return entry(*args, dropout=dropout, **kwargs)

    return make_mixer
