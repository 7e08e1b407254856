"""Masks as the TPU's splash kernel plans with them: asked on the host, block by block, and never as a T x T array."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

from hpnlp.ops.attention.algebra import And, Mask, PerHead, Shift
from hpnlp.ops.attention.mask import Blockwise, Causal, Window


@dataclasses.dataclass(frozen=True)
class Tiles(splash_masks.Mask):
    """A mask over `length` queries and `keys` keys, padded to `size`: padded keys are hidden from all, and padded queries
    do as the last one does, so that they split no block.

    The kernel skips blocks that are all False, and loads the elements of blocks that are neither all False nor all True;
    equal blocks are stored once.
    """

    mask: Mask
    length: int
    keys: int
    size: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    def __getitem__(self, index: Any) -> np.ndarray:
        """bool [rows, columns] for two slices."""
        rows, columns = index
        q = np.minimum(np.arange(rows.start, rows.stop), self.length - 1)
        k = np.arange(columns.start, columns.stop)
        inside = k < self.keys
        if not inside[0]:
            return _uniform(False, q.size, k.size)
        k = np.minimum(k, self.keys - 1)
        some, every = self.mask.tile(q[0], q[-1], k[0], k[-1])
        if not some:
            return _uniform(False, q.size, k.size)
        if every and inside[-1]:
            return _uniform(True, q.size, k.size)
        return self.mask.at(q[:, None], k[None, :]) & inside[None, :]


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
        return np.arange(self.size[0], dtype=np.int32)

    @property
    def mask_function(self) -> Elements:
        return Elements(self.mask, self.keys if self.keys < self.size[1] else None)


def translated(mask: Mask | PerHead, heads: int, length: int, keys: int, size: tuple[int, int]) -> Any:
    """The kernel's mask of `heads` query heads, padded to `size`."""
    masks = mask.masks if isinstance(mask, PerHead) else (mask,) * heads
    # Where heads differ, the kernel loads the elements of all.
    kind = Computed if len(set(masks)) == 1 and _cheap(masks[0]) else Tiles
    return splash_masks.MultiHeadMask(tuple(kind(one, length, keys, size) for one in masks))


@functools.lru_cache(maxsize=32)
def seen_keys(masks: Any, block: tuple[int, int]) -> np.ndarray:
    """bool [S]: a query of some head sees the key."""
    rows, columns = (range(0, length, step) for length, step in zip(masks.shape[1:], block, strict=True))
    seen = np.zeros(masks.shape[2], bool)
    for one in set(masks.masks):
        for start in columns:
            part = slice(start, start + block[1])
            for row in rows:
                if seen[part][: one.keys - start].all():
                    break
                seen[part] |= one[slice(row, row + block[0]), part].any(axis=0)
    return seen[: masks.masks[0].keys]


def _cheap(mask: Mask) -> bool:
    """Whether a few comparisons tell an element, as in the kernel's own causal, local and chunked masks."""
    parts = (mask.left, mask.right) if isinstance(mask, And) else (mask,)
    return all(isinstance(x.mask if isinstance(x, Shift) else x, Causal | Window | Blockwise) for x in parts)


@functools.lru_cache
def _uniform(value: bool, rows: int, columns: int) -> np.ndarray:
    return np.broadcast_to(np.bool_(value), (rows, columns))
