"""Fast training of word vectors: words of one topic become similar."""

import dataclasses

import numpy as np
import pytest

from hpnlp.training.word2vec import Word2VecConfig, sentence_ids, train_word_vectors
from tests.messages import raises

CONFIG = Word2VecConfig(dim=8, window=2, centres=8, noise=4, epochs=4, learning_rate=0.1, subsample=0.0, workers=1)


@pytest.fixture(scope="module")
def text():
    """Sentences of words of one of two topics, and the topic of each word."""
    rng = np.random.default_rng(0)
    sentences = [[f"{'ab'[topic]}{word}" for word in rng.integers(0, 6, 8)] for topic in rng.integers(0, 2, 400)]
    ids, words, counts = sentence_ids(sentences, least=1)
    return ids, counts, np.array([word[0] for word in words])


def margin(vectors, topics):
    """Mean cosine of words of one topic minus that of words of different topics."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines, same = unit @ unit.T, topics[:, None] == topics[None]
    return cosines[same & ~np.eye(len(topics), dtype=bool)].mean() - cosines[~same].mean()


@pytest.mark.parametrize("objective", ["skip_gram", "cbow"])
def test_words_of_one_topic_become_similar(text, objective):
    ids, counts, topics = text
    lines = []
    inputs, outputs = train_word_vectors(ids, counts, dataclasses.replace(CONFIG, objective=objective), lines.append)
    assert margin(inputs, topics) > 0.5 and inputs.shape == outputs.shape == (12, 8)
    assert len(lines) == 4 and lines[-1] == "epoch 4 of 4: 3,200 words, 3,200 kept"


def test_result_depends_on_the_seed_alone(text):
    ids, counts, topics = text
    config = dataclasses.replace(CONFIG, workers=2, subsample=0.05)
    first, again, other = (
        train_word_vectors(ids, counts, c)[0] for c in (config, config, dataclasses.replace(config, seed=1))
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01 and margin(first, topics) > 0.3


def test_vectors_that_are_not_finite_raise(text):
    config = dataclasses.replace(CONFIG, learning_rate=1e30)
    raises("not finite after epoch 1: lower learning_rate=1e[+]30 or centres=8", train_word_vectors, *text[:2], config)


def test_vocabulary_leaves_out_rare_words():
    ids, words, counts = sentence_ids([["b", "a", "b"], ["c", "a"], []], least=2)
    assert words == ["a", "b"] and counts.tolist() == [2, 2] and ids.tolist() == [1, 0, 1, -1, 0, -1, -1]
    assert sentence_ids([["b", "a", "b"]], least=1, vocab=1)[1] == ["b"]


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: sentence_ids([["a"]], least=2), "least=2: none of 1 words occurs as often: lower it, or add text"),
        (lambda: train_word_vectors(np.array([-1]), np.array([1])), "the text has no words"),
        (lambda: train_word_vectors(np.array([3]), np.array([1])), "the text has the id 3, and there are counts of 1"),
        (lambda: Word2VecConfig(learning_rate=1e-5), "min_learning_rate=0.0001: expected the first to be the larger"),
    ):
        raises(message, call)
