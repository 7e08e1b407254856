"""An order of words in which similar ones stand side by side: its ranges are classes, and the subtrees of a tree."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpnlp.types import InputError

# How often a direction is looked for.
ROUNDS = 4


def similarity_order(embeddings: Any, seed: int = 0) -> np.ndarray:
    """The ids [V] so that words with similar `embeddings` [V, E] stand side by side: bisecting 2-means, all the way down.

    A set of words is halved along a direction, which then becomes the difference of the halves' means, over and over; the first
    is near the set's principal one. Deterministic for a seed. Raises InputError on embeddings that are not finite [V, E].
    Cost: O(V E log V) time on the host, and some 50 microseconds a word.
    """
    vectors = np.asarray(embeddings, np.float32)
    if vectors.ndim != 2 or not vectors.size or not np.isfinite(vectors).all():
        raise InputError(f"embeddings {vectors.shape}: expected a finite vector for every word, [V, E]")
    rng = np.random.default_rng(seed)
    order = np.arange(len(vectors))
    pending = [(0, len(order))]
    while pending:
        start, end = pending.pop()
        half = (end - start + 1) // 2
        words = order[start:end]
        order[start:end] = words[_halved(vectors[words], half, rng)]
        pending += [(low, high) for low, high in ((start, start + half), (start + half, end)) if high - low > 2]
    return order


def _halved(x: np.ndarray, half: int, rng: np.random.Generator) -> np.ndarray:
    """The rows, the first `half` of them on one side of a direction."""
    x = x - x.mean(axis=0)
    along = rng.standard_normal(x.shape[1]).astype(np.float32)
    for _ in range(ROUNDS):
        along = x.T @ (x @ along)
        along /= max(np.linalg.norm(along), np.finfo(np.float32).tiny)
    for _ in range(ROUNDS):
        ranked = np.argsort(x @ along, kind="stable")
        along = x[ranked[half:]].sum(axis=0) / max(len(x) - half, 1) - x[ranked[:half]].mean(axis=0)
    return ranked


def checked_order(order: Any, vocab: int) -> np.ndarray:
    """`order` as an array [V]; raises InputError where it is not of every id once."""
    order = np.asarray(order)
    if order.shape != (vocab,) or order.dtype.kind not in "iu" or (np.sort(order) != np.arange(vocab)).any():
        raise InputError(f"order: {order.dtype} of shape {order.shape}: expected each of the ids 0 to {vocab - 1} once")
    return order
