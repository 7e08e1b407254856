"""Masks of selected queries or keys: the terms into which patterns of global tokens are decomposed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hpnlp.ops.attention.masks.base import Mask, Places


@dataclasses.dataclass(frozen=True)
class FirstQueries(Mask):
    """The first `count` queries see every key: i < count."""

    count: int

    def at(self, q: Places, k: Places) -> Any:
        return (q < self.count) & (k == k)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        return q0 < self.count, q1 < self.count

    def query_indices(self, length: int) -> Sequence[int]:
        return range(min(self.count, length))


@dataclasses.dataclass(frozen=True)
class QueriesAt(Mask):
    """The queries at `indices` see every key. `indices` ascend."""

    indices: tuple[int, ...]

    def at(self, q: Places, k: Places) -> Any:
        return (count_between(self.indices, q, q) > 0) & (k == k)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        count = count_between(self.indices, q0, q1)
        return count > 0, count == q1 - q0 + 1

    def query_indices(self, length: int) -> Sequence[int]:
        return [i for i in self.indices if i < length]


@dataclasses.dataclass(frozen=True)
class KeysAt(Mask):
    """Every query sees the keys at `indices`. `indices` ascend."""

    indices: tuple[int, ...]

    def at(self, q: Places, k: Places) -> Any:
        return (count_between(self.indices, k, k) > 0) & (q == q)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        count = count_between(self.indices, k0, k1)
        return count > 0, count == k1 - k0 + 1

    def key_indices(self, length: int) -> Sequence[int]:
        return [i for i in self.indices if i < length]


def count_between(indices: tuple[int, ...], first: Any, last: Any) -> Any:
    """Number of indices within ranges.

    Args:
      indices: Positions, ascending.
      first: First position of each range, an array of int or an int.
      last: Last position of each range, included, shaped as `first`.

    Returns:
      int, shaped as `first`: a jax array if a bound is one, and numpy otherwise.
    """
    if isinstance(first, jax.Array) or isinstance(last, jax.Array):
        table = np.asarray(indices, np.int32)
        up_to_last = jax.numpy.searchsorted(table, last.astype(np.int32), side="right")
        return up_to_last - jax.numpy.searchsorted(table, first.astype(np.int32))
    table = np.asarray(indices, np.int64)
    return np.searchsorted(table, last, side="right") - np.searchsorted(table, first)
