"""An order of words in which similar ones stand side by side: its ranges are classes, and the subtrees of a tree."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpnlp.types import InputError

# Power steps to a first direction, and as many of 2-means after it; sets of a few words need fewer.
ROUNDS, FEW = 4, 32


def similarity_order(embeddings: Any, seed: int = 0) -> np.ndarray:
    """The ids [V] so that words with similar `embeddings` [V, E] stand side by side: bisecting 2-means, all the way down.

    A set of words is halved along a direction, which then becomes the difference of the halves' means, over and over; the first
    is near the set's principal one, and looks the way that led to the set. The same for a seed, up to the machine's rounding.
    Raises InputError on embeddings that are not finite [V, E].
    Cost: O(V E log V) time on the host, and some 0.1 ms a word.
    """
    wide = np.asarray(embeddings, np.float64)
    if wide.ndim != 2 or not wide.size or not np.isfinite(wide).all():
        raise InputError(f"embeddings {wide.shape}: expected a finite vector for every word, [V, E]")
    vectors = (wide / max(np.abs(wide).max(), np.finfo(np.float64).tiny)).astype(np.float32)
    rng = np.random.default_rng(seed)
    order = np.arange(len(vectors))
    pending = [(0, len(order), np.zeros(vectors.shape[1], np.float32))] if len(order) > 1 else []
    while pending:
        start, end, way = pending.pop()
        half = (end - start + 1) // 2
        words = order[start:end]
        ranked, along = _halved(vectors[words], half, way, rng)
        order[start:end] = words[ranked]
        pending += [(low, high, along) for low, high in ((start, start + half), (start + half, end)) if high - low > 1]
    return order


def _halved(x: np.ndarray, half: int, way: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The rows, the first `half` of them on one side of a direction that looks the given way, and the direction."""
    x = x - x.mean(axis=0)
    rounds = ROUNDS if len(x) > FEW else 1
    along = rng.standard_normal(x.shape[1]).astype(np.float32)
    for _ in range(rounds):
        along = x.T @ (x @ along)
        along /= max(np.linalg.norm(along), np.finfo(np.float32).tiny)
    along = -along if along @ way < 0 else along
    ranked = np.argsort(x @ along, kind="stable")
    for _ in range(rounds):
        along = x[ranked[half:]].mean(axis=0) - x[ranked[:half]].mean(axis=0)
        ranked = np.argsort(x @ along, kind="stable")
    return ranked, along


def checked_order(order: Any, vocab: int) -> np.ndarray:
    """`order` as an array [V]; raises InputError where it is not of every id once."""
    order = np.asarray(order)
    if order.shape != (vocab,) or order.dtype.kind not in "iu" or (np.sort(order) != np.arange(vocab)).any():
        raise InputError(f"order: {order.dtype} of shape {order.shape}: expected each of the ids 0 to {vocab - 1} once")
    return order
