"""Random lengths of the batches of a stream (truncated back-propagation through time over varying numbers of tokens).

Merity et al. 2018 draw a length for each batch, so that the sequences of every epoch are cut at other tokens: around the base
length for 95 % of the batches and around half of it for the others, with a standard deviation of 5 tokens. Here, lengths are
rounded to VALUES values, because the program of a step is compiled once for every length.
"""

from __future__ import annotations

import numpy as np

BASE_SHARE = 0.95
LARGEST_DEVIATIONS = 2  # lengths are limited to so many standard deviations from the mean
SMALLEST = 5
VALUES = 2 * LARGEST_DEVIATIONS + 2
_BLOCK = 1024  # batches whose lengths are drawn at once


class RandomLengths:
    """Lengths of batches, functions of a seed and the number of the batch.

    Attributes:
      values: The lengths that occur, at most VALUES, ascending.
    """

    def __init__(self, seed: int, base: int, deviation: float):
        """Lengths around `base` for 95 % of the batches, with a standard deviation of `deviation` tokens."""
        self._seed = seed
        self._base, self._half = base, max(SMALLEST, base // 2)
        self._deviation = deviation
        self._starts = [0]  # sum of the lengths before each block
        steps = np.arange(-LARGEST_DEVIATIONS, LARGEST_DEVIATIONS + 1)
        self.values = sorted({self._half, *self._around_base(steps).tolist()})

    def at(self, batch: int) -> tuple[int, int]:
        """Position and length of a batch.

        Args:
          batch: Number of the batch.

        Returns:
          `(sum of the lengths of all batches before, length of this one)`.

        Cost: the first call draws the lengths of all batches before, about 50 ns for each.
        """
        block, index = divmod(batch, _BLOCK)
        while len(self._starts) <= block:
            self._starts.append(self._starts[-1] + int(self._block(len(self._starts) - 1).sum()))
        lengths = self._block(block)
        return self._starts[block] + int(lengths[:index].sum()), int(lengths[index])

    def _around_base(self, deviations: np.ndarray) -> np.ndarray:
        """Lengths at these many standard deviations from the base length, int64."""
        lengths = np.rint(self._base + self._deviation * deviations).astype(np.int64)
        return np.maximum(SMALLEST, lengths)

    def _block(self, block: int) -> np.ndarray:
        """Lengths of the batches of a block, int64 `[_BLOCK]`."""
        draw = np.random.default_rng([self._seed, block])
        is_base = draw.random(_BLOCK) < BASE_SHARE
        steps = np.clip(np.rint(draw.standard_normal(_BLOCK)), -LARGEST_DEVIATIONS, LARGEST_DEVIATIONS)
        return np.where(is_base, self._around_base(steps), self._half)
