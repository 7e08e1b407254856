"""Distributions of scored words against loops: duplicates, entries without a word, large vocabularies."""

import numpy as np
import pytest

from hpnlp.ops.softmax.scored_words import interpolate, label_log_prob, word_distribution


@pytest.mark.parametrize(("rows", "entries", "vocab"), [(1, 1, 1), (7, 13, 5), (3, 5, 70_001)])
def test_words_match_a_loop(rows, entries, vocab):
    draw = np.random.default_rng(0)
    scores = (30 * draw.normal(size=(rows, entries)) - 200).astype(np.float32)  # underflows without the largest score
    scores[draw.random(scores.shape) < 0.3] = -np.inf
    words = draw.choice([0, vocab - 1, vocab // 2], (rows, entries)).astype(np.int32)
    expected = np.zeros((rows, vocab))
    for row in range(rows):
        found = np.isfinite(scores[row])
        if found.any():
            shares = np.exp(scores[row, found].astype(np.float64) - scores[row, found].max())
            np.add.at(expected[row], words[row, found], shares / shares.sum())
    shares = np.asarray(word_distribution(scores, words, vocab))
    np.testing.assert_allclose(shares, expected, rtol=2e-5, atol=1e-30)
    for label in (0, vocab - 1, vocab // 3):
        with np.errstate(divide="ignore"):
            logs = np.log(expected[:, label])
        found = np.asarray(label_log_prob(scores, words, np.full(rows, label, np.int32)))
        np.testing.assert_allclose(found, np.where(logs < -80, found, logs), rtol=1e-5, atol=1e-5)
        assert (np.isneginf(found) == np.isneginf(logs)).all() or (logs[np.isneginf(logs)] < -80).all()


def test_interpolation_with_weights_of_zero_is_the_model():
    np.testing.assert_array_equal(
        interpolate(np.float32([-2, -3]), np.float32([-np.inf, -1]), np.float32([0, 0])), np.float32([-2, -3])
    )
