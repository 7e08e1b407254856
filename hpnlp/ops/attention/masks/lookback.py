"""Bounds on the keys that queries may see, which decide how much of a growing sequence a cache keeps."""

from __future__ import annotations

import math
from typing import NamedTuple


class Lookback(NamedTuple):
    """Bound on the keys of a mask: query i sees key j only if `j < pinned` or `i - j <= back`.

    Both numbers are integers or infinities, and may be negative: with the bound `(-inf, -1)`, all keys lie after the query.

    Attributes:
      pinned: Number of keys at the start of the sequence that any query may see.
      back: Largest distance from a query back to any other key that it may see.
    """

    pinned: float
    back: float

    def union(self, other: Lookback) -> Lookback:
        """The bound of the union of two masks.

        Args:
          other: The bound of the other mask.

        Returns:
          The bound.
        """
        return Lookback(max(self.pinned, other.pinned), max(self.back, other.back))

    def intersection(self, other: Lookback) -> Lookback:
        """A bound of the intersection of two masks, for which both bounds hold.

        Args:
          other: The bound of the other mask.

        Returns:
          The bound with which a cache keeps fewer keys.
        """
        return min(self, other, key=lambda bound: max(bound.pinned, 0) + max(bound.back, 0))

    def shifted(self, keys: int) -> Lookback:
        """The bound of a mask whose keys are moved.

        Args:
          keys: Number of positions by which the keys are moved to the right.

        Returns:
          The bound.
        """
        return Lookback(self.pinned + keys, self.back - keys)

    def slots(self) -> tuple[int, int | None]:
        """The bound as the size of a cache.

        Returns:
          `(pinned, back)`: the number of first keys, and the number of keys before the query's own position, that a later query
          may see; `(0, None)` if `back` is infinite.
        """
        return (0, None) if self.back == math.inf else (int(max(self.pinned, 0)), int(max(self.back, 0)))


NO_KEYS = Lookback(-math.inf, -math.inf)
ALL_KEYS = Lookback(-math.inf, math.inf)
