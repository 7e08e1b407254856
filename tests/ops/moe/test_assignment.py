"""Balanced assignment of tokens to experts: optimality, and scores for which an auction would not end."""

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from hpnlp.ops import moe
from tests.contracts import once

RNG = np.random.default_rng(0)


def assert_balanced(chosen, real, experts):
    assert np.all(chosen[~real] == experts) and np.all((chosen[real] >= 0) & (chosen[real] < experts))
    assert np.bincount(chosen[real], minlength=experts).max() <= -(-real.sum() // experts)


@pytest.mark.parametrize(("count", "experts"), [(16, 4), (37, 5), (5, 8), (1, 3), (6, 1)])
@pytest.mark.parametrize("offset", [0.0, 3e4])
def test_balanced_assignment_is_nearly_optimal(count, experts, offset):
    scores = RNG.normal(size=(count, experts)).astype(np.float32)
    scores += np.float32(offset) * np.sin(np.arange(count, dtype=np.float32))[:, None]  # another one for each token
    real = RNG.random(count) < 0.8
    real[0] = True
    chosen = np.asarray(once(moe.balanced_assignment, scores, real))
    assert_balanced(chosen, real, experts)
    total = scores[real, chosen[real]].sum(dtype=np.float64)
    best = np.repeat(scores[real], -(-real.sum() // experts), axis=1).astype(np.float64)
    best = best[linear_sum_assignment(-best)].sum()
    assert best - total < 1e-3 * np.ptp(scores, axis=1).max() * real.sum() + 1e-5


def with_values(*values):
    scores = RNG.normal(size=(12, 3)).astype(np.float32)
    scores[RNG.random(scores.shape) < 0.4] = RNG.choice(np.float32(values))
    scores[5], scores[7] = values[0], np.float32(values)[np.arange(3) % len(values)]
    return scores


# Scores for which bids would be NaN, or smaller than the resolution of the prices.
SCORES = {
    "NaN": with_values(np.nan),
    "inf": with_values(np.inf),
    "-inf": with_values(-np.inf),
    "all": with_values(np.nan, np.inf, -np.inf),
    "only NaN": np.full((12, 3), np.nan, np.float32),
    "0": np.zeros((12, 3), np.float32),
    "1e6": np.full((12, 3), 1e6, np.float32),
    "-1e30": np.full((12, 3), -1e30, np.float32),
    "range of float32": np.float32([[3e38, -3e38, 0.0]] * 12),
    "two good experts for more tokens": np.float32([[0.0, 0.0, -1.0]] * 12),
    "one token": np.float32([[1e6, np.nan, 1e6]]),
    "one expert": np.full((5, 1), 1e6, np.float32),
    "more experts than tokens": np.full((3, 9), 1e6, np.float32),
}


@pytest.mark.parametrize("name", SCORES)
def test_balanced_assignment_ends_and_is_balanced(name):
    """Trap: bids that are NaN or below the resolution of float32 make no progress."""
    scores = SCORES[name]
    real = np.arange(len(scores)) % 5 != 4
    assert_balanced(np.asarray(once(moe.balanced_assignment, scores, real)), real, scores.shape[1])


def test_tokens_that_are_left_after_the_last_round_get_free_places():
    scores = np.float32(np.tile([3.0, 2.0, 1.0, 0.0], (13, 1)))
    real = np.arange(13) != 2
    for rounds in (0, 1, 2):
        chosen = np.asarray(once(lambda *x, n=rounds: moe.balanced_assignment(*x, rounds=n), scores, real))
        assert_balanced(chosen, real, 4)


def test_infinite_scores_are_the_first_or_the_last_choice():
    scores = np.float32([[0.0, np.inf, 1.0], [0.0, 2.0, -np.inf], [1.0, 0.0, np.nan]])
    np.testing.assert_array_equal(once(moe.balanced_assignment, scores, np.ones(3, bool)), [2, 1, 0])
