"""Checks of arguments that all mixers have in common."""

from __future__ import annotations

from typing import Any

from hpnlp.ops.attention import Mask
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import InputError, MixerInputs, keyword_only, option


def dropout_option(help: str = "Rate of dropout on attention probabilities.", has_effect: bool = True) -> Any:
    """The field `dropout` of a mixer, which the model sets.

    Args:
      help: Meaning of the field.
      has_effect: Whether the mixer reads it; otherwise mixers of different rates are equal.

    Returns:
      The field.
    """
    return keyword_only(option(0.0, help, least=0, below=1), compare=has_effect)


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
