"""Similarity of words by their neighbours in a text, for orders in which similar words are adjacent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpnlp.ops.softmax.structured.word_order import similarity_order

CONTEXTS = 1000  # number of the most frequent words that count as neighbours
DIM = 32  # features per word


def similar_order(documents: Sequence[np.ndarray], vocab: int) -> np.ndarray:
    """Orders a vocabulary so that words with similar neighbours are adjacent. See `word_vectors` and `similarity_order`.

    The order is deterministic on one machine; another machine may round its linear algebra differently.

    Args:
      documents: Token ids, integers [T] each.
      vocab: Number of ids, V.

    Returns:
      Every id once, integers [V].

    Cost: O(tokens + V) memory plus about 100 MB; seconds for millions of tokens, plus about 0.1 ms per word.
    """
    return similarity_order(word_vectors(documents, vocab))


def word_vectors(documents: Sequence[np.ndarray], vocab: int, dim: int = DIM) -> np.ndarray:
    """Computes word vectors that are close for words with the same neighbours.

    The features of a word are its positive pointwise mutual information with the words directly before and directly after it,
    with the neighbours' counts raised to the power 0.75, projected to the first principal directions.

    Args:
      documents: Token ids, integers [T] each.
      vocab: Number of ids, V.
      dim: Number of principal directions, M.

    Returns:
      Vectors float32 [V, M]; 0 for words without neighbours.

    References: Levy, Goldberg and Dagan 2015, "Improving distributional similarity with lessons learned from word embeddings".
    """
    import scipy.sparse

    end = np.array([-1])  # ends a document
    tokens = np.concatenate([ids for document in documents for ids in (document, end)] or [end]).astype(np.int64)
    counts = np.bincount(tokens[tokens >= 0], minlength=vocab)
    column = np.full(vocab + 1, -1)  # feature of each neighbour, -1 for none; the last entry is read for the token -1
    column[np.argsort(-counts, kind="stable")[:CONTEXTS]] = np.arange(min(CONTEXTS, vocab))
    before = _association(tokens[1:], column[tokens[:-1]], vocab)
    after = _association(tokens[:-1], column[tokens[1:]], vocab)
    return _principal(scipy.sparse.hstack([before, after]).tocsr(), dim)


def _association(words: np.ndarray, columns: np.ndarray, vocab: int) -> Any:
    """Positive pointwise mutual information of paired words and columns, sparse float32 [V, columns]; -1 is no pair."""
    import scipy.sparse

    is_pair = (words >= 0) & (columns >= 0)
    shape = (vocab, min(CONTEXTS, vocab))
    ones = np.ones(is_pair.sum())
    # The conversion to CSR adds up equal pairs.
    pairs = scipy.sparse.coo_matrix((ones, (words[is_pair], columns[is_pair])), shape).tocsr().tocoo()
    word_counts = np.bincount(pairs.row, pairs.data, vocab)
    column_weights = np.bincount(pairs.col, pairs.data, shape[1]) ** 0.75
    expected = word_counts[pairs.row] * column_weights[pairs.col] / column_weights.sum()
    association = np.maximum(np.log(pairs.data / expected), 0).astype(np.float32)
    return scipy.sparse.coo_matrix((association, (pairs.row, pairs.col)), shape)


def _principal(features: Any, dim: int) -> np.ndarray:
    """U S of the singular value decomposition for the largest `dim` singular values, falling, float32 [V, dim].

    The sign of each column makes its entry of the largest magnitude positive.
    """
    present = np.flatnonzero(features.getnnz(axis=0))  # the other columns are 0
    wide = features[:, present].astype(np.float64)
    # All eigenvectors of the small Gram matrix, not the largest alone: when ARPACK has found all nonzero ones it restarts from
    # a random vector, so its result is not deterministic.
    right = np.linalg.eigh((wide.T @ wide).toarray())[1][:, ::-1][:, :dim]
    projected = wide @ right
    projected *= np.sign(projected[np.abs(projected).argmax(axis=0), np.arange(projected.shape[1])])
    vectors = np.zeros((projected.shape[0], dim), np.float32)
    vectors[:, : projected.shape[1]] = projected
    return vectors
