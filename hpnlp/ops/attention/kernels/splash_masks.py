"""Masks as the TPU's splash kernel plans with them: asked on the host, block by block, and never as a T x T array."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

from hpnlp.ops.attention.block_sparse.block_mask import live
from hpnlp.ops.attention.masks.base import Mask, PerHead


@dataclasses.dataclass(frozen=True)
class Tiles(splash_masks.Mask):
    """A mask over `length` queries and `keys` keys, padded to whole blocks: padded keys are hidden from all, and padded
    queries do as the last one does, so that they split no block.

    The kernel skips blocks that are all False, and loads the elements of blocks that are neither all False nor all True;
    equal blocks are stored once.
    """

    mask: Mask
    length: int
    keys: int
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.block
        return self.length + -self.length % rows, self.keys + -self.keys % columns

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """bool [rows, columns] of one block, or [1, 1] where all of it is alike: the planner asks for any() and all()."""
        rows, columns = index
        at = (rows.start // self.block[0], columns.start // self.block[1])
        whole = _live(self.mask, self.length, self.keys, self.block).get(at)
        if whole is None or (whole and columns.stop <= self.keys):
            return np.array([[whole is not None]])
        q, k = np.arange(rows.start, rows.stop), np.arange(columns.start, columns.stop)
        see = self.mask.at(np.minimum(q, self.length - 1)[:, None], np.minimum(k, self.keys - 1)[None, :])
        return see & (k < self.keys)[None, :]


@dataclasses.dataclass(frozen=True)
class Elements:
    """The same mask as a function of index arrays, which the kernel computes by."""

    mask: Mask
    keys: int | None

    def __call__(self, q: Any, k: Any) -> Any:
        see = self.mask.at(q, k)
        return see if self.keys is None else see & (k < self.keys)


@dataclasses.dataclass(frozen=True)
class Computed(Tiles):
    """Tiles whose elements the kernel computes from indices instead of loading them, by the two names that it looks for.

    It does so in every block that it visits, also in those that are all True, so that only cheap masks gain by it.
    """

    @property
    def q_sequence(self) -> np.ndarray:
        return np.arange(self.shape[0], dtype=np.int32)

    @property
    def mask_function(self) -> Elements:
        return Elements(self.mask, self.keys if self.keys < self.shape[1] else None)


def translated(mask: Mask | PerHead, heads: int, length: int, keys: int, block: tuple[int, int]) -> Any:
    """The kernel's mask of `heads` query heads, padded to whole blocks."""
    groups = mask.by_head(heads)
    # Where heads differ, the kernel loads the elements of all.
    kind = Computed if len(groups) == 1 and next(iter(groups)).cheap else Tiles
    of_head = {head: kind(each, length, keys, block) for each, members in groups.items() for head in members}
    return splash_masks.MultiHeadMask(tuple(of_head[head] for head in range(heads)))


@functools.lru_cache(maxsize=32)
def seen_keys(masks: Any) -> np.ndarray:
    """bool [S]: a query of some head sees the key."""
    seen = np.zeros(masks.shape[2], bool)
    for one in set(masks.masks):
        tiles = _live(one.mask, one.length, one.keys, one.block)
        for row, column in sorted(tiles, key=lambda at: not tiles[at]):
            (rows, columns), stop = one.block, min((column + 1) * one.block[1], one.keys)
            if not seen[column * columns : stop].all():
                span = slice(column * columns, (column + 1) * columns)
                seen[span] |= one[slice(row * rows, (row + 1) * rows), span].any(axis=0)
    return seen[: masks.masks[0].keys]


@functools.lru_cache(maxsize=32)
def _live(mask: Mask, length: int, keys: int, block: tuple[int, int]) -> dict[tuple[int, int], bool]:
    """(row, column) of each block that the mask does not rule out -> whether it allows all of it."""
    tiles = live(mask, length, keys, *block)
    return dict(zip(zip(tiles.rows.tolist(), tiles.columns.tolist(), strict=True), tiles.every.tolist(), strict=True))
