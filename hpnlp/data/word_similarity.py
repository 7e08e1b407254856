"""Which words of a text are like each other: those that stand beside the same words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpnlp.ops.softmax.word_order import similarity_order

# So many of the most frequent words are what words may stand beside.
CONTEXTS = 1000
# Features of a word.
DIM = 32


def similar_order(documents: Sequence[np.ndarray], vocab: int) -> np.ndarray:
    """The ids [V] of a vocabulary so that words that the documents use alike stand side by side.

    documents: ids, each int [length]. See `word_vectors` and `similarity_order`. The same for the same text on one machine;
    on another, its linear algebra may round otherwise.
    Cost: O(tokens + V) memory, and some 100 MB; some seconds for millions of tokens, and some 0.1 ms a word.
    """
    return similarity_order(word_vectors(documents, vocab))


def word_vectors(documents: Sequence[np.ndarray], vocab: int, dim: int = DIM) -> np.ndarray:
    """A vector, float32 [V, dim], for each word, near that of another with the same neighbours; 0 for one without.

    The pointwise mutual information of words with those right before, and right after them, where it is positive, the
    neighbours' counts smoothed by the power 0.75, in its first principal directions.
    Source: Levy, Goldberg and Dagan 2015, "Improving distributional similarity with lessons learned from word embeddings".
    """
    import scipy.sparse

    gap = np.array([-1])  # where a document ends
    tokens = np.concatenate([part for document in documents for part in (document, gap)] or [gap]).astype(np.int64)
    counts = np.bincount(tokens[tokens >= 0], minlength=vocab)
    column = np.full(vocab + 1, -1)  # the last is of a gap
    column[np.argsort(-counts, kind="stable")[:CONTEXTS]] = np.arange(min(CONTEXTS, vocab))
    before = _association(tokens[1:], column[tokens[:-1]], vocab)
    after = _association(tokens[:-1], column[tokens[1:]], vocab)
    return _principal(scipy.sparse.hstack([before, after]).tocsr(), dim)


def _association(words: np.ndarray, columns: np.ndarray, vocab: int) -> Any:
    """Positive pointwise mutual information of words with columns, sparse float32 [V, columns]; column -1 is none."""
    import scipy.sparse

    there = (words >= 0) & (columns >= 0)
    shape = (vocab, min(CONTEXTS, vocab))
    ones = np.ones(there.sum())
    pairs = scipy.sparse.coo_matrix((ones, (words[there], columns[there])), shape).tocsr().tocoo()  # which adds them up
    of_word = np.bincount(pairs.row, pairs.data, vocab)
    of_column = np.bincount(pairs.col, pairs.data, shape[1]) ** 0.75
    expected = of_word[pairs.row] * of_column[pairs.col] / of_column.sum()
    association = np.maximum(np.log(pairs.data / expected), 0).astype(np.float32)
    return scipy.sparse.coo_matrix((association, (pairs.row, pairs.col)), shape)


def _principal(features: Any, dim: int) -> np.ndarray:
    """U S of the largest `dim` singular values, falling, float32 [V, dim]; the largest entry of a column is positive."""
    wide = features.astype(np.float64)
    # Of the products of columns, of which there are few: a search for the largest alone, as ARPACK's, begins again somewhere at
    # random once it has found all that there is, and another order comes of it.
    right = np.linalg.eigh((wide.T @ wide).toarray())[1][:, ::-1][:, :dim]
    found = wide @ right
    found *= np.sign(found[np.abs(found).argmax(axis=0), np.arange(found.shape[1])])
    vectors = np.zeros((found.shape[0], dim), np.float32)
    vectors[:, : found.shape[1]] = found
    return vectors
