"""Limits of kept quality and of agreement against scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from hpnlp.advise.kept_quality import agreement, kept
from hpnlp.training.files.example_scores import ExampleScores

pytestmark = pytest.mark.oracle


def scores(totals, weights):
    return ExampleScores({"score": (totals, weights)}, np.arange(len(totals), dtype=np.uint32))


def test_bootstrap_matches_scipy():
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 9, 40).astype(np.float64)
    b = rng.normal(2, 0.3, 40)
    c = b + rng.normal(0.05, 0.1, 40)

    def share(b, c, w, axis=-1):
        return (5 - (c * w).sum(axis) / w.sum(axis)) / (5 - (b * w).sum(axis) / w.sum(axis))

    expected = stats.bootstrap(
        (b, c, weights), share, paired=True, method="percentile", alternative="greater", n_resamples=20_000, rng=1
    )
    result = kept(
        scores(b * weights, weights),
        scores(c * weights, weights),
        "score",
        keep=0.97,
        trivial=5.0,
        higher_is_better=False,
    )
    assert result.low == pytest.approx(expected.confidence_interval.low, abs=0.001)
    assert result.p_value == pytest.approx((expected.bootstrap_distribution < 0.97).mean(), abs=0.02)


def test_formula_is_the_limit_of_student():
    rng = np.random.default_rng(0)
    b = rng.normal(2, 1, 5000)
    c = b - rng.normal(0.05, 0.4, 5000)
    result = kept(
        scores(b, np.ones(5000)), scores(c, np.ones(5000)), "score", keep=0.97, trivial=0.0, higher_is_better=True
    )
    expected = stats.ttest_1samp(c - 0.97 * b, 0, alternative="greater").pvalue
    assert result.p_value == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("equal", "count"), [(0, 5), (75, 100), (681, 681)])
def test_agreement_matches_scipy(equal, count):
    limit = stats.binomtest(equal, count, alternative="greater").proportion_ci(0.95, method="wilson").low
    result = agreement([1] * count, [1] * equal + [0] * (count - equal))
    assert math.isclose(result.low, limit, abs_tol=1e-9)
