"""Differences of scores as text, with their standard errors."""

from __future__ import annotations


def with_error(text: str, error: float | None, digits: str) -> str:
    """A number with its standard error.

    Args:
      text: The number.
      error: The standard error; None if it is unknown.
      digits: Format of the error.

    Returns:
      Text such as "0.8123 ± 0.0040".
    """
    return text if error is None else f"{text} ± {error:{digits}}"


def is_within_noise(difference: float, error: float | None) -> bool:
    """Whether a difference of scores is at most two standard errors; False if the error is unknown."""
    return error is not None and abs(difference) <= 2 * error


def described_difference(difference: float, error: float | None, digits: str) -> str:
    """A difference of scores, which is called none up to two standard errors.

    Args:
      difference: The difference.
      error: Its standard error; None if it is unknown.
      digits: Format of both.

    Returns:
      Text such as "+0.0102 ± 0.0040" or "no difference (+0.0002 ± 0.0040)".
    """
    text = with_error(f"{difference:+{digits}}", error, digits)
    return f"no difference ({text})" if is_within_noise(difference, error) else text
