"""Word vectors against their definition in loops, and the order of similar words."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest

from hpnlp.data.tokenizers import word_similarity
from hpnlp.data.tokenizers.word_tokenizer import WordTokenizer

DOCUMENTS = [np.random.default_rng(seed).zipf(1.4, 60) % 30 for seed in range(5)]


def association(pairs):
    """{(word, neighbour): positive pointwise mutual information}, with smoothed counts of neighbours."""
    count = collections.Counter(pairs)
    of_word, of_neighbour = collections.Counter(), collections.Counter()
    for (word, neighbour), times in count.items():
        of_word[word] += times
        of_neighbour[neighbour] += times
    total = sum(times**0.75 for times in of_neighbour.values())
    return {
        (w, n): max(math.log(times / (of_word[w] * of_neighbour[n] ** 0.75 / total)), 0)
        for (w, n), times in count.items()
    }


def by_definition(documents, vocab, contexts, dim):
    counts = collections.Counter(int(word) for document in documents for word in document)
    column = {w: i for i, w in enumerate(sorted(range(vocab), key=lambda w: (-counts[w], w))[:contexts])}
    features = np.zeros((vocab, 2 * len(column)))
    for side, (a, b) in enumerate(((1, 0), (0, 1))):
        pairs = [
            (int(document[i + a]), int(document[i + b])) for document in documents for i in range(len(document) - 1)
        ]
        for (word, neighbour), value in association([pair for pair in pairs if pair[1] in column]).items():
            features[word, side * len(column) + column[neighbour]] = value
    left, values, _ = np.linalg.svd(features, full_matrices=False)
    return left[:, :dim] * values[:dim]


@pytest.mark.parametrize(("contexts", "dim"), [(4000, 16), (12, 16), (4000, 3), (12, 3)])
def test_vectors_match_the_definition(monkeypatch, contexts, dim):
    """Compares inner products, because the directions are determined only up to a rotation."""
    monkeypatch.setattr(word_similarity, "CONTEXTS", contexts)
    vectors = word_similarity.word_vectors(DOCUMENTS, 33, dim)
    expected = by_definition(DOCUMENTS, 33, contexts, dim)
    assert vectors.shape == (33, dim) and vectors.dtype == np.float32
    products = expected @ expected.T
    np.testing.assert_allclose(vectors @ vectors.T, products, atol=2e-4 * np.abs(products).max())
    np.testing.assert_allclose(vectors[30:], 0, atol=1e-5)  # words that do not occur


def test_similar_words_are_adjacent():
    rng = np.random.default_rng(0)
    kinds = {"the": range(2, 12), "to": range(12, 22), "of": range(22, 32)}  # word -> words that follow it
    text = [f"{lead} w{rng.choice(list(words))} ." for _ in range(400) for lead, words in kinds.items()]
    tokenizer = WordTokenizer.train(100, [" ".join(text).encode()], by="whitespace")
    words = ["", "", "", "", *(tokenizer.decode([i]).decode() for i in range(4, tokenizer.vocab_size))]
    kind = [(int(word[1:]) - 2) // 10 for word in (words[i] for i in tokenizer.stats.order) if word[:1] == "w"]
    # The order halves sets of words exactly, so some words are placed among those of another kind.
    assert len(kind) == 30 and (np.diff(kind) != 0).sum() <= 8


def test_order_does_not_depend_on_signs_of_eigenvectors(monkeypatch):
    expected = word_similarity.similar_order(DOCUMENTS, 33)
    eigh = np.linalg.eigh

    def flipped(matrix):
        values, vectors = eigh(matrix)
        return values, -vectors

    monkeypatch.setattr(np.linalg, "eigh", flipped)
    np.testing.assert_array_equal(word_similarity.similar_order(DOCUMENTS, 33), expected)


DEBRUIJN = [np.array([a, b]) for a in range(200) for b in range(200)]


@pytest.mark.parametrize(
    ("documents", "vocab"),
    [
        ([], 5),
        ([np.zeros(0, np.int32)], 5),
        ([np.array([3])], 5),
        ([np.array([2, 2, 2])], 5),
        ([np.array([3, 4])], 500),
        ([np.array([word]) for word in range(5000)], 5000),
        (DEBRUIJN, 200),
    ],
    ids=["no documents", "no words", "one word", "one word again", "one pair", "words alone", "all pairs"],
)
def test_order_of_degenerate_texts_has_every_id_once(documents, vocab):
    np.testing.assert_array_equal(np.sort(word_similarity.similar_order(documents, vocab)), np.arange(vocab))


HUB = np.stack([np.zeros(3000, int), np.random.default_rng(0).integers(1, 300, 3000)], axis=1).ravel()


def test_order_is_deterministic_for_few_directions():
    """All words have the same neighbour, so that the features have a low rank."""
    first, other = (word_similarity.similar_order([HUB], 300) for _ in range(2))
    np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("text", [[0, 1, 2] * 50, [7, 1, 300, 1, 7]], ids=["a cycle", "a few"])
def test_words_of_a_short_text_have_deterministic_vectors(text):
    first, *repeated = (word_similarity.word_vectors([np.array(text)], 500) for _ in range(4))
    assert first[sorted(set(text))].any(axis=1).all() and np.count_nonzero(first.any(axis=1)) == len(set(text))
    for other in repeated:
        np.testing.assert_array_equal(other, first)
