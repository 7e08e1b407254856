"""Masks in the form that the TPU's splash kernels take: evaluated on the host, block by block, never as a T x S array."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

from hpnlp.ops.attention.block_sparse.block_mask import active_tiles
from hpnlp.ops.attention.masks.base import Mask, Places
from hpnlp.ops.attention.masks.per_head import PerHead


@dataclasses.dataclass(frozen=True)
class LoadedMask(splash_masks.Mask):
    """A mask padded to whole blocks, whose partly allowed blocks the kernel loads.

    Padded keys are hidden from all queries, and padded queries see what the last query sees, so that padding makes no block
    partly allowed. The kernel skips blocks that are all False, and stores equal blocks once.

    Attributes:
      mask: The pattern.
      length: T.
      keys: S.
      block: Queries and keys of a block.
    """

    mask: Mask
    length: int
    keys: int
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """T and S padded to whole blocks."""
        rows, columns = self.block
        return self.length + -self.length % rows, self.keys + -self.keys % columns

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """The elements of one block, of which the splash kernels compute any() and all().

        Args:
          index: Slices of the queries and of the keys of a block.

        Returns:
          bool [rows, columns], or [1, 1] where all elements are equal.
        """
        rows, columns = index
        at = (rows.start // self.block[0], columns.start // self.block[1])
        all_allowed = _active_blocks(self.mask, self.length, self.keys, self.block).get(at)
        if all_allowed is None or (all_allowed and columns.stop <= self.keys):
            return np.array([[all_allowed is not None]])
        q, k = np.arange(rows.start, rows.stop), np.arange(columns.start, columns.stop)
        visible = self.mask.at(np.minimum(q, self.length - 1)[:, None], np.minimum(k, self.keys - 1)[None, :])
        return visible & (k < self.keys)[None, :]


@dataclasses.dataclass(frozen=True)
class ElementFunction:
    """A mask as a function of index arrays, which the kernel evaluates.

    Attributes:
      mask: The pattern.
      keys: Number of keys without padding; None if there is no padding.
    """

    mask: Mask
    keys: int | None

    def __call__(self, q: Places, k: Places) -> Any:
        visible = self.mask.at(q, k)
        return visible if self.keys is None else visible & (k < self.keys)


@dataclasses.dataclass(frozen=True)
class ComputedMask(LoadedMask):
    """A mask whose elements the kernel computes from indices instead of loading them.

    The kernel recognises it by the names of its two properties. It computes the elements of every block that it does not skip,
    also of fully allowed ones, so that only cheap masks gain by it.
    """

    @property
    def q_sequence(self) -> np.ndarray:
        """int32 [padded T], the indices of the queries."""
        return np.arange(self.shape[0], dtype=np.int32)

    @property
    def mask_function(self) -> ElementFunction:
        """The elements as a function of indices."""
        return ElementFunction(self.mask, self.keys if self.keys < self.shape[1] else None)


def translate(mask: Mask | PerHead, heads: int, length: int, keys: int, block: tuple[int, int]) -> Any:
    """The splash mask of a mask.

    Args:
      mask: Mask of the attention.
      heads: N.
      length: T.
      keys: S.
      block: Queries and keys of a block.

    Returns:
      splash_masks.MultiHeadMask of N masks, padded to whole blocks.
    """
    groups = mask.by_head(heads)
    # Where heads differ, the kernel loads the elements of all heads.
    kind = ComputedMask if len(groups) == 1 and next(iter(groups)).cheap else LoadedMask
    by_head = {head: kind(each, length, keys, block) for each, members in groups.items() for head in members}
    return splash_masks.MultiHeadMask(tuple(by_head[head] for head in range(heads)))


@functools.lru_cache(maxsize=32)
def seen_keys(masks: Any) -> np.ndarray:
    """Keys that some query of some head sees.

    Args:
      masks: The result of `translate`.

    Returns:
      bool [S].
    """
    seen = np.zeros(masks.shape[2], bool)
    for mask in set(masks.masks):
        blocks = _active_blocks(mask.mask, mask.length, mask.keys, mask.block)
        for row, column in sorted(blocks, key=lambda at: not blocks[at]):  # fully allowed blocks first
            (rows, columns), stop = mask.block, min((column + 1) * mask.block[1], mask.keys)
            if not seen[column * columns : stop].all():
                span = slice(column * columns, (column + 1) * columns)
                seen[span] |= mask[slice(row * rows, (row + 1) * rows), span].any(axis=0)
    return seen[: masks.masks[0].keys]


@functools.lru_cache(maxsize=32)
def _active_blocks(mask: Mask, length: int, keys: int, block: tuple[int, int]) -> dict[tuple[int, int], bool]:
    """(row, column) of each block that the mask does not rule out -> whether it allows all of it."""
    tiles = active_tiles(mask, length, keys, *block)
    return dict(zip(zip(tiles.rows.tolist(), tiles.columns.tolist(), strict=True), tiles.every.tolist(), strict=True))
