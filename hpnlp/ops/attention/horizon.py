"""How far back a mask reaches: what a cache must keep of a sequence that goes on."""

from __future__ import annotations

import functools
import math

from hpnlp.ops.attention.algebra import And, Mask, Not, Or, PerHead, Shift
from hpnlp.ops.attention.mask import (
    Blockwise,
    Causal,
    Dilated,
    Full,
    Global,
    GlobalAt,
    Prefix,
    RandomBlocks,
    Sinks,
    Window,
)

# (pinned, back), with infinities: a query i sees a key j only where j < pinned or i - j <= back.
Bound = tuple[int | float, int | float]
NOTHING: Bound = (-math.inf, -math.inf)
ALL: Bound = (-math.inf, math.inf)


def horizon(mask: Mask | PerHead) -> tuple[int, int | None]:
    """(pinned, back), such that the query i sees the key j only where j < pinned or i - j <= back.

    So a cache needs the first `pinned` keys, the last `back`, and the query's own. back is None where no bound is found;
    a mask of a class of one's own, and `Where`, have none. The bound is safe, not always the smallest. Cost: O(1) a part.
    """
    pinned, back = _bound(mask)
    if back == math.inf:
        return 0, None
    return int(max(pinned, 0)), int(max(back, 0))


def _bound(mask: Mask | PerHead) -> Bound:
    if isinstance(mask, And):
        return _both(_bound(mask.left), _bound(mask.right))
    if isinstance(mask, Or):
        return _either(_bound(mask.left), _bound(mask.right))
    if isinstance(mask, PerHead):
        return functools.reduce(_either, map(_bound, mask.masks))
    if isinstance(mask, Shift):
        pinned, back = _bound(mask.mask)
        return pinned + mask.keys, back - mask.keys
    return _outside(mask.mask) if isinstance(mask, Not) else _of_pattern(mask)


def _either(a: Bound, b: Bound) -> Bound:
    return max(a[0], b[0]), max(a[1], b[1])


def _both(a: Bound, b: Bound) -> Bound:
    """Whichever needs fewer keys: either holds."""
    return min(a, b, key=lambda bound: max(bound[0], 0) + max(bound[1], 0))


def _outside(mask: Mask) -> Bound:
    """The bound of what `mask` forbids."""
    if isinstance(mask, Not):
        return _bound(mask.mask)
    if isinstance(mask, And):
        return _either(_outside(mask.left), _outside(mask.right))
    if isinstance(mask, Or):
        return _both(_outside(mask.left), _outside(mask.right))
    if isinstance(mask, Shift):
        return _bound(Shift(Not(mask.mask), mask.keys))
    if isinstance(mask, Full):
        return NOTHING
    return (-math.inf, -1) if isinstance(mask, Causal) else ALL


def _of_pattern(mask: Mask) -> Bound:
    if isinstance(mask, Window):
        return -math.inf, mask.left
    if isinstance(mask, Dilated):
        return -math.inf, mask.width * mask.dilation
    if isinstance(mask, Blockwise):
        return -math.inf, mask.block - 1
    if isinstance(mask, Global):
        return mask.count, -1  # a query below count has the keys from count on ahead of it
    if isinstance(mask, GlobalAt):
        return (mask.indices[-1] + 1, -1) if mask.indices else NOTHING
    if isinstance(mask, Sinks | Prefix):
        return mask.count, -math.inf
    if isinstance(mask, RandomBlocks) and (mask.among is not None or not mask.count):
        return (mask.among or 0) * mask.block, -math.inf
    return ALL
