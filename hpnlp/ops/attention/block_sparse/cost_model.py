"""Constants of the cost model by which a mask is decomposed into parts and cut into blocks."""

from __future__ import annotations

import jax

# Blocks of queries and of keys to choose from, and what a score costs where the smaller is at least so large.
SIZES = (1024, 1024), (512, 1024), (512, 512), (256, 256), (128, 128), (64, 64)


PRICES = {1024: 0.92, 512: 1.0, 256: 1.2, 128: 1.25, 0: 1.5}


# How many rows of blocks an estimate looks at.
SAMPLE = 96


# What a token costs, in scores, where a part has to be merged, and where it has to be laid out in another order.
MERGING, FOLDING = 30, 80


# A pattern runs on its own keys or queries alone if it has at most so many.
FEW = 2048


def block_sizes() -> tuple[tuple[int, int], ...]:
    """The largest are for CPUs, which go through the heads one by one; elsewhere a tile has all of them."""
    return SIZES if jax.default_backend() == "cpu" else SIZES[1:]


# A tile of so many scores, in all heads together, fills the caches and keeps all cores busy.
TILE = 1 << 20


# At most so many numbers of the queries are copied into blocks at a time, as heads allow: of long sequences, copies of all
# heads would double the memory.
LAID = 1 << 23


# What a visit costs beside its keys, in keys.
OVERHEAD = 48


# At most so many keys a visit.
KEYS = 1024


# What a visit of any size costs, in scores, and what the test of a score costs beside the score.
VISIT, TEST = 1 << 17, 0.08
