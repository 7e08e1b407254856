"""Quality of word vectors on pairs of words of held-out sentences; see `word_embeddings.py`."""

from __future__ import annotations

import glob
from pathlib import Path

import numpy as np
import scipy.stats

from hpnlp.data.reading.stdlib import write_corpus

WINDOW = 5
LEAST = 3  # occurrences of a held-out pair whose mutual information is compared


def read_sentences(limit: int) -> list[list[str]]:
    """Words of each line of the corpus. limit: number of lines, 0 for all."""
    lines = []
    for name in sorted(glob.glob(write_corpus("docs").path)):
        lines += [line.split() for line in Path(name).read_text("utf-8").splitlines()]
    return lines[: limit or None]


def heldout_pairs(ids: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(first words, second words, occurrences)` of pairs of different words within windows."""
    sentences, keys = np.cumsum(ids < 0), []
    for distance in range(1, WINDOW + 1):
        a, b = ids[:-distance], ids[distance:]
        is_pair = (a >= 0) & (b >= 0) & (sentences[:-distance] == sentences[distance:]) & (a != b)
        keys.append(np.minimum(a, b)[is_pair].astype(np.int64) * vocab + np.maximum(a, b)[is_pair])
    pairs, counts = np.unique(np.concatenate(keys), return_counts=True)
    return pairs // vocab, pairs % vocab, counts


def quality(vectors: np.ndarray, pairs: tuple[np.ndarray, np.ndarray, np.ndarray]) -> dict[str, float]:
    """Similarity of held-out pairs."""
    first, second, counts = pairs
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
    cosines = (unit[first] * unit[second]).sum(axis=1)
    others = (unit[first] * unit[np.random.default_rng(0).permutation(second)]).sum(axis=1)
    words = np.bincount(first, counts, len(vectors)) + np.bincount(second, counts, len(vectors))
    often = counts >= LEAST
    information = np.log(counts / (words[first] * words[second]))  # up to a constant
    correlation = scipy.stats.spearmanr(cosines[often], information[often])[0]
    return {"spearman": float(correlation), "pair_accuracy": float((cosines > others).mean()), "pairs": len(first)}
