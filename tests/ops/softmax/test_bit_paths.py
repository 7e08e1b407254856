"""Tokens as binary decisions: against sums over all tokens."""

import numpy as np
import pytest

from hpnlp.ops.softmax import bit_paths
from tests.contracts import assert_close

RNG = np.random.default_rng(0)


def log_odds_by_sums(probs, token, length):
    """Log-odds of each decision by sums over all ids, float64."""
    odds = []
    for shift in range(length - 1, -1, -1):
        mass = [
            sum(p for i, p in enumerate(probs) if i >> (shift + 1) == token >> (shift + 1) and (i >> shift) & 1 == bit)
            for bit in (0, 1)
        ]
        with np.errstate(divide="ignore"):
            odds.append(np.log(mass[1]) - np.log(mass[0]))
    return odds


@pytest.mark.parametrize("vocab", [2, 3, 8, 13, 264])
def test_log_odds_give_back_the_distribution(vocab):
    logits = 3.0 * RNG.normal(size=(2, vocab))
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    length = bit_paths.path_length(vocab)
    for row in log_probs:
        ids = np.arange(vocab)
        odds = np.asarray(bit_paths.path_log_odds(np.tile(row, (vocab, 1)), ids))
        expected = np.array([log_odds_by_sums(np.exp(row), i, length) for i in ids])
        decided = np.asarray(bit_paths.is_decided(ids, vocab))
        np.testing.assert_array_equal(decided, np.isneginf(expected))
        assert_close(odds[~decided], expected[~decided].astype(np.float32))
        assert_close(bit_paths.path_log_prob(odds, ids, vocab), row.astype(np.float32))


@pytest.mark.parametrize("vocab", [2, 5, 264])
def test_any_log_odds_of_nodes_are_a_distribution(vocab):
    length, ids = bit_paths.path_length(vocab), np.arange(vocab)
    nodes = 4.0 * RNG.normal(size=1 << length)
    prefixes = (1 << np.arange(length)) + (ids[:, None] >> np.arange(length, 0, -1))  # numbers of nodes of a full tree
    assert_close(np.exp(bit_paths.path_log_prob(nodes[prefixes], ids, vocab)).sum(), np.float32(1.0))


def test_votes_are_those_of_tokens_with_the_same_bits_before():
    found = np.array([[5, 4, -1, 5, 1]])  # of 3 bits: 101, 100, none, 101, 001
    counts, weights = bit_paths.vote_counts(found, np.array([4]), 0.5, 3)
    np.testing.assert_array_equal(counts[0], [[1, 3], [3, 0], [1, 2]])
    assert_close(weights[0], np.float32([[1 / 16, 1 + 1 / 2 + 1 / 8], [1.625, 0], [1 / 2, 1 + 1 / 8]]))
    assert np.asarray(bit_paths.path_bits(np.array([4]), 3)).tolist() == [[1, 0, 0]]
