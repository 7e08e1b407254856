"""Word vectors by their definition, in loops; and that words used alike stand side by side."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest

from hpnlp.data import tokenizers, word_similarity
from hpnlp.data.tokenizers import WordTokenizer

DOCUMENTS = [np.random.default_rng(seed).zipf(1.4, 60) % 30 for seed in range(5)]


def association(pairs):
    """{(word, neighbour): positive pointwise mutual information}, with neighbours smoothed."""
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
def test_vectors_are_those_of_the_definition(monkeypatch, contexts, dim):
    """By their products, for directions may turn."""
    monkeypatch.setattr(word_similarity, "CONTEXTS", contexts)
    got = word_similarity.word_vectors(DOCUMENTS, 33, dim)
    wanted = by_definition(DOCUMENTS, 33, contexts, dim)
    assert got.shape == (33, dim) and got.dtype == np.float32
    np.testing.assert_allclose(got @ got.T, wanted @ wanted.T, atol=2e-4 * np.abs(wanted @ wanted.T).max())
    np.testing.assert_allclose(got[30:], 0, atol=1e-5)  # words that the text has not


def test_words_used_alike_stand_side_by_side():
    rng = np.random.default_rng(0)
    kinds = {"the": range(2, 12), "to": range(12, 22), "of": range(22, 32)}  # which words follow which
    text = [f"{lead} w{rng.choice(list(words))} ." for _ in range(400) for lead, words in kinds.items()]
    tokenizer = WordTokenizer.train(100, [" ".join(text).encode()], by="whitespace")
    words = ["", "", "", "", *(tokenizer.decode([i]).decode() for i in range(4, tokenizer.vocab_size))]
    kind = [(int(word[1:]) - 2) // 10 for word in (words[i] for i in tokenizer.stats.order) if word[:1] == "w"]
    # A tree's halves fill exactly, so here and there a word stands among others.
    assert len(kind) == 30 and (np.diff(kind) != 0).sum() <= 8


def test_the_same_whatever_the_signs(monkeypatch):
    """Eigenvectors may come with either sign, by the machine."""
    wanted = word_similarity.similar_order(DOCUMENTS, 33)
    eigh = np.linalg.eigh

    def flipped(matrix):
        values, vectors = eigh(matrix)
        return values, -vectors

    monkeypatch.setattr(np.linalg, "eigh", flipped)
    np.testing.assert_array_equal(word_similarity.similar_order(DOCUMENTS, 33), wanted)


def test_all_of_a_text_is_seen_where_some_is(monkeypatch):
    """Of more documents than are compared, some from the end, too; of one that is too long, a part."""
    seen = []
    monkeypatch.setattr(tokenizers, "_COMPARED", 20)
    monkeypatch.setattr(
        tokenizers, "similar_order", lambda documents, vocab: seen.append(documents) or np.arange(vocab)
    )
    tokenizer = WordTokenizer.train(300, [f"a{i} b{i} c{i}".encode() for i in range(50)])
    (documents,) = seen
    assert [tokenizer.decode(document).decode() for document in documents] == [
        f"a{i} b{i} c{i}" for i in (0, 16, 32, 48)
    ]
    WordTokenizer.train(300, [b"a b " * 50])
    assert sum(map(len, seen[1])) == 20


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
def test_next_to_nothing_to_see(documents, vocab):
    np.testing.assert_array_equal(np.sort(word_similarity.similar_order(documents, vocab)), np.arange(vocab))


HUB = np.stack([np.zeros(3000, int), np.random.default_rng(0).integers(1, 600, 3000)], axis=1).ravel()


def test_the_same_where_words_have_little_that_tells_them_apart():
    """All stand beside one word, so that few directions are all that there is."""
    first, *others = (word_similarity.similar_order([HUB], 600) for _ in range(3))
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("text", [[0, 1, 2] * 50, [7, 1, 300, 1, 7]], ids=["a cycle", "a few"])
def test_few_words_of_many_have_vectors_and_always_the_same(text):
    first, *others = (word_similarity.word_vectors([np.array(text)], 500) for _ in range(4))
    assert first[sorted(set(text))].any(axis=1).all() and np.count_nonzero(first.any(axis=1)) == len(set(text))
    for other in others:
        np.testing.assert_array_equal(other, first)
