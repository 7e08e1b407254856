"""The split into training and held-out data by hashes of names: a fraction, or one of several parts for cross-validation."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from hpnlp.types import InputError

MAX_RANKED = 2**17  # names of which all hashes are compared; parts of more are equal ranges of hashes


def hash_fraction(name: str) -> float:
    """Hashes a name to a multiple of 2^-48 in [0, 1), which decides alone whether the document of that name is held out."""
    digest = hashlib.blake2s(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


@dataclasses.dataclass(frozen=True)
class HeldOutHashes:
    """The hashes of held-out names.

    Attributes:
      end: The least hash above them.
      begin: The lowest of them.
    """

    end: float
    begin: float = 0.0

    def includes(self, name: str) -> bool:
        """Whether the document, example or group of a name is held out."""
        return self.begin <= hash_fraction(name) < self.end


NOTHING = HeldOutHashes(0.0)


class HashRange(NamedTuple):
    """The number of names, the lowest hash of those that may be held out (1 without any), and the highest hash of all."""

    count: int = 0
    lowest: float = 1.0
    highest: float = 0.0

    def has_both(self, fraction: float) -> bool:
        """Whether both sides of a split at `fraction` have a name."""
        return self.lowest < fraction <= self.highest


def hash_range(names: Iterable[tuple[str, bool]], fraction: float, enough: int = 1) -> HashRange:
    """Reads names, each with whether it may be held out, until there are `enough` on both sides of `fraction`, or all."""
    hashes = HashRange()
    for name, may_be_held_out in names:
        value = hash_fraction(name)
        lowest = min(hashes.lowest, value) if may_be_held_out else hashes.lowest
        hashes = HashRange(hashes.count + 1, lowest, max(hashes.highest, value))
        if hashes.count >= enough and hashes.has_both(fraction):
            break
    return hashes


@dataclasses.dataclass(frozen=True)
class Folds:
    """Parts of the data for cross-validation, of which one is held out.

    Attributes:
      count: Number of parts; 0 for a split by a fraction.
      number: The part that is held out, from 1.
    """

    count: int = 0
    number: int = 0

    def __bool__(self) -> bool:
        return self.count > 0

    def fingerprint(self) -> list[int | str]:
        """The part of a cache key, which is empty without folds."""
        return ["folds", self.count, self.number] if self else []

    def held_out(self, names: Iterable[str]) -> HeldOutHashes | None:
        """Hashes of the part that is held out; None if there are fewer names than parts.

        The parts are ranges of hashes that cover all hashes. Up to MAX_RANKED names, which may repeat, the numbers of names
        differ by at most one; parts of more names are ranges of equal width.
        """
        hashes: set[float] = set()
        for name in names:
            hashes.add(hash_fraction(name))
            if len(hashes) > MAX_RANKED:
                return HeldOutHashes(self.number / self.count, (self.number - 1) / self.count)
        if len(hashes) < self.count:
            return None
        bounds = [*sorted(hashes), 1.0]
        first, end = (len(hashes) * number // self.count for number in (self.number - 1, self.number))
        return HeldOutHashes(bounds[end], bounds[first] if first else 0.0)

    def too_few(self, paths: str, noun: str, left_out: str) -> InputError:
        """The error of data with fewer names of what is divided, the plural `noun`, than parts."""
        return InputError(
            f"data.folds={self.count}: data.path={paths!r} holds fewer {noun} than parts{left_out}: lower data.folds "
            f"(--folds of hpnlp sweep), or add {noun}"
        )
