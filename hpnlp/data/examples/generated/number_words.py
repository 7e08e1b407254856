"""Whole numbers in digits and in English words, as sources and targets of both directions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from hpnlp.data.examples.generated.entry import Generated
from hpnlp.data.reading.sources import File

_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_ONES += ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SCALES = ("", " thousand", " million", " billion", " trillion")

_COUNT = 20_000  # numbers to train on and hold out
_LONGER_COUNT = 1_000
_MAX_DIGITS = 9
_TRAINED_DIGITS = 6  # significant digits of numbers to train on
_ROUND_SHARE = 0.3  # share of the numbers to train on that have more zeros at the end


def to_words(number: int) -> str:
    """Writes a whole number from 0 to 10^15 - 1 in English words, without "and".

    For example, 1,234,021 is "one million two hundred thirty-four thousand twenty-one".
    """
    if number < 20:
        return _ONES[number]
    groups, scale = [], 0
    while number:
        number, group = divmod(number, 1000)
        if group:
            groups.append(_below_thousand(group) + _SCALES[scale])
        scale += 1
    return " ".join(reversed(groups))


def _below_thousand(number: int) -> str:
    """Words of a number of 1 to 999."""
    hundreds, below_hundred = divmod(number, 100)
    words = [f"{_ONES[hundreds]} hundred"] if hundreds else []
    if below_hundred >= 20:
        tens, ones = divmod(below_hundred, 10)
        words.append(_TENS[tens] + (f"-{_ONES[ones]}" if ones else ""))
    elif below_hundred:
        words.append(_ONES[below_hundred])
    return " ".join(words)


def examples(files: Sequence[File]) -> Iterator[dict[str, str]]:
    """Generates numbers of 1 to 6 significant digits, each in both directions: "source", "target" and "group", the number.

    The number of digits is uniform. 30 % of the numbers have up to 9 digits, of which those after the sixth and some more are
    zeros: all words and all lengths in digits of `longer` occur, and none of its numbers.
    """
    draw = random.Random(0)
    seen: set[int] = set()
    while len(seen) < _COUNT:
        digits = draw.randint(1, _TRAINED_DIGITS)
        number = draw.randrange(10 ** (digits - 1), 10**digits)
        if draw.random() < _ROUND_SHARE:
            number *= 10 ** draw.randint(0, _MAX_DIGITS - digits)
        if number not in seen:
            seen.add(number)
            yield from _both_directions(number)


def longer(files: Sequence[File]) -> Iterator[dict[str, str]]:
    """Generates numbers of 7 to 9 significant digits, each in both directions."""
    draw = random.Random(1)
    seen: set[int] = set()
    while len(seen) < _LONGER_COUNT:
        digits = draw.randint(_TRAINED_DIGITS + 1, _MAX_DIGITS)
        number = draw.randrange(10 ** (digits - 1), 10**digits)
        if number not in seen and number % 10 ** (digits - _TRAINED_DIGITS):
            seen.add(number)
            yield from _both_directions(number)


def _both_directions(number: int) -> Iterator[dict[str, str]]:
    """Two records of one number."""
    digits, words = str(number), to_words(number)
    yield {"source": digits, "target": words, "group": digits}
    yield {"source": words, "target": digits, "group": digits}


NUMBER_WORDS = Generated(examples, challenge=longer)
