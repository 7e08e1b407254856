"""Bounds on how far back the queries of a mask see: they decide what a cache keeps of a growing sequence."""

from __future__ import annotations

import math
from typing import NamedTuple


class Lookback(NamedTuple):
    """Bound on the keys of a mask: query i sees key j only where `j < pinned` or `i - j <= back`.

    Both are integers or infinities, and may be negative: `(-inf, -1)` describes a mask whose keys all lie after the query.
    """

    pinned: float
    back: float

    def union(self, other: Lookback) -> Lookback:
        """The bound of the union of two masks."""
        return Lookback(max(self.pinned, other.pinned), max(self.back, other.back))

    def intersection(self, other: Lookback) -> Lookback:
        """The bound of the intersection of two masks: both hold, and the one that keeps fewer keys is returned."""
        return min(self, other, key=lambda bound: max(bound.pinned, 0) + max(bound.back, 0))

    def shifted(self, keys: int) -> Lookback:
        """The bound after the keys of the mask have moved by `keys` positions to the right."""
        return Lookback(self.pinned + keys, self.back - keys)

    def slots(self) -> tuple[int, int | None]:
        """`(pinned, back)` as a cache needs them.

        Returns:
          The number of first keys, and the number of keys before the query's own, that any later query may see; `(0, None)`
          where the mask has no bound.
        """
        return (0, None) if self.back == math.inf else (int(max(self.pinned, 0)), int(max(self.back, 0)))


NO_KEYS = Lookback(-math.inf, -math.inf)
ALL_KEYS = Lookback(-math.inf, math.inf)
