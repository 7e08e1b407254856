"""An order of words in which similar words stand side by side: its ranges are classes, and the subtrees of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from hpnlp.types import InputError

# Steps of the power method for the first direction, and then as many of 2-means, for sets of more than FEW words.
ROUNDS, FEW = 4, 32


def similarity_order(embeddings: ArrayLike, seed: int = 0) -> np.ndarray:
    """Orders words by bisecting 2-means, recursively, so that words with similar embeddings stand side by side.

    A set of words is halved along a direction, which then becomes the difference of the halves' means; this repeats. The first
    direction is near the principal one, and its sign is that of the direction that led to the set. The result is the same for
    the same seed, up to the machine's rounding.

    Args:
      embeddings: [V, E] finite numbers.
      seed: Seed of the first directions.

    Returns:
      [V] ids.

    Raises:
      InputError: embeddings are not finite numbers [V, E].

    Cost:
      O(V E log V) time on the host, and about 0.1 ms a word.
    """
    wide = np.asarray(embeddings, np.float64)
    if wide.ndim != 2 or not wide.size or not np.isfinite(wide).all():
        raise InputError(f"embeddings {wide.shape}: expected a finite vector for every word, [V, E]")
    vectors = (wide / max(np.abs(wide).max(), np.finfo(np.float64).tiny)).astype(np.float32)
    rng = np.random.default_rng(seed)
    order = np.arange(len(vectors))
    pending = [(0, len(order), np.zeros(vectors.shape[1], np.float32))] if len(order) > 1 else []
    while pending:
        start, end, parent_direction = pending.pop()
        half = (end - start + 1) // 2
        words = order[start:end]
        ranked, direction = _bisect(vectors[words], half, parent_direction, rng)
        order[start:end] = words[ranked]
        halves = (start, start + half), (start + half, end)
        pending += [(low, high, direction) for low, high in halves if high - low > 1]
    return order


def _bisect(
    x: np.ndarray, half: int, parent_direction: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(indices of the rows [n, E], the first `half` of them on one side of a direction; the direction [E])."""
    x = x - x.mean(axis=0)
    rounds = ROUNDS if len(x) > FEW else 1
    direction = rng.standard_normal(x.shape[1]).astype(np.float32)
    for _ in range(rounds):
        direction = x.T @ (x @ direction)
        direction /= max(np.linalg.norm(direction), np.finfo(np.float32).tiny)
    direction = -direction if direction @ parent_direction < 0 else direction
    ranked = np.argsort(x @ direction, kind="stable")
    for _ in range(rounds):
        direction = x[ranked[half:]].mean(axis=0) - x[ranked[:half]].mean(axis=0)
        ranked = np.argsort(x @ direction, kind="stable")
    return ranked, direction


def checked_order(order: ArrayLike | Sequence[Any], vocab: int) -> np.ndarray:
    """Checks that an order holds every id once.

    Args:
      order: [V] ids.
      vocab: V, the number of words.

    Returns:
      The order as a numpy array.

    Raises:
      InputError: An id is missing, repeated or out of range, or the ids are not integers.
    """
    order = np.asarray(order)
    if order.shape != (vocab,) or order.dtype.kind not in "iu" or (np.sort(order) != np.arange(vocab)).any():
        raise InputError(f"order: {order.dtype} of shape {order.shape}: expected each of the ids 0 to {vocab - 1} once")
    return order
