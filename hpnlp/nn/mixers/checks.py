"""Checks of arguments that all mixers have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hpnlp.ops.attention import Mask
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import InputError, MixerInputs


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


def check_mask(mixer: str, mask: AnyMask, *supported: Mask, reason: str = "") -> Any:
    """Checks that a mixer can honour a mask.

    Args:
      mixer: The mixer, for the message.
      mask: A static Mask.
      *supported: The masks that the mixer can honour.
      reason: Reason why it cannot honour others, a clause for the message.

    Returns:
      The mask.

    Raises:
      InputError: The mask is not one of those.
    """
    if mask not in supported:
        expected = " or ".join(map(str, supported))
        raise InputError(
            f"{mixer} cannot apply the mask {mask}{', since ' * bool(reason)}{reason}: pass {expected}, or choose another "
            "model.mixer"
        )
    return mask


def check_has_effect(entry: str, choice: str, fix: str, **arguments: Any) -> None:
    """Checks that a mixer is not given arguments that it would ignore.

    Args:
      entry: Name of the entry of MIXERS.
      choice: The argument by which the entry ignores these, for the message.
      fix: The choice by which they have an effect.
      **arguments: The arguments; None for those that are not given.

    Raises:
      InputError: An argument is given.
    """
    for name, value in arguments.items():
        if value is not None:
            raise InputError(
                f"model.mixer={entry}({name}={value}) has no effect with {choice}: leave it out, or choose {fix}"
            )


def check_decoding(inputs: MixerInputs, dropout: float) -> None:
    """Checks that dropout is off in decoding, which is deterministic.

    Args:
      inputs: Inputs of `extend`.
      dropout: The mixer's rate of dropout.

    Raises:
      InputError: Dropout is on.
    """
    if dropout and not inputs.deterministic:
        raise InputError("extend with dropout: decoding is deterministic, pass deterministic=True")
