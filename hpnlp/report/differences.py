"""Differences of scores as text, with their standard errors, which are None where they are unknown."""

from __future__ import annotations


def with_error(text: str, error: float | None, digits: str) -> str:
    """A number with its standard error, such as "0.8123 ± 0.0040"."""
    return text if error is None else f"{text} ± {error:{digits}}"


def is_within_noise(difference: float, error: float | None, width: float = 2.0) -> bool:
    """Whether a difference is at most `width` standard errors."""
    return error is not None and abs(difference) <= width * error


def described_difference(difference: float, error: float | None, digits: str, width: float = 2.0) -> str:
    """A difference such as "+0.0102 ± 0.0040", or "no difference (+0.0002 ± 0.0040)" up to `width` standard errors."""
    text = with_error(f"{difference:+{digits}}", error, digits)
    return f"no difference ({text})" if is_within_noise(difference, error, width) else text
