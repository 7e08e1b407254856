"""Intervals of differences of held-out scores: their definition, their coverage, and inputs that have none."""

import math

import numpy as np
import pytest
from scipy import stats

from hpnlp.report import paired_scores
from hpnlp.report.paired_scores import Difference, bootstrap_level, mean_difference, paired_interval, ranked_difference
from hpnlp.tasks.reports.reporting import Ranking
from hpnlp.training.files.example_scores import ExampleScores


def scored(values, weights=None, identity=None):
    weights = np.ones(len(values)) if weights is None else np.float64(weights)
    identity = np.arange(len(values), dtype=np.uint32) if identity is None else identity
    return ExampleScores({"score": (np.float64(values) * weights, weights)}, identity)


def interval(first, second, *weights):
    return paired_interval(scored(first, *weights), scored(second, *weights), "score")


@pytest.mark.parametrize("weights", ["equal", "different"])
def test_a_planted_difference_is_found_though_each_score_is_uncertain(weights):
    rng = np.random.default_rng(0)
    base = rng.normal(2, 1, 300)
    better = base - 0.05 + rng.normal(0, 0.1, 300)
    given = np.ones(300) if weights == "equal" else rng.integers(1, 30, 300)
    low, high = interval(better, base, given)
    assert -0.1 < low < -0.05 < high < 0
    assert not Difference(-0.05, (low, high)).is_none
    assert interval(better, base, 1000 * given) == pytest.approx((low, high))
    assert paired_scores.half_interval(scored(base, given), "score") > 0.1  # as wide as the difference, without pairs


@pytest.mark.parametrize("weights", ["equal", "different"])
def test_intervals_hold_the_true_difference_in_95_percent_of_samples(weights, monkeypatch):
    monkeypatch.setattr(paired_scores, "RESAMPLES", 400)
    rng = np.random.default_rng(0)
    count, samples = 20, 400
    is_held = []
    for _ in range(samples):
        given = np.ones(count) if weights == "equal" else rng.integers(1, 30, count)
        second = rng.normal(0, 1, count)
        low, high = interval(second + rng.normal(0.3, 0.5, count), second, given)
        is_held.append(low <= 0.3 <= high)
    assert np.mean(is_held) == pytest.approx(0.95, abs=0.03)


def test_few_examples_on_which_runs_differ_decide_nothing():
    """As in the exact test of McNemar: five examples that one run alone has right have a p-value of 0.0625, six 0.03125."""
    right = np.ones(1000)
    for count, is_none in ((5, True), (6, False)):
        other = np.where(np.arange(1000) < count, 0, 1)
        assert Difference(count / 1000, interval(right, other)).is_none is is_none
        assert (stats.binomtest(count, count).pvalue > 0.05) == is_none
    assert Difference(1.0, interval([1, 1], [0, 0])).is_none


@pytest.mark.parametrize("values", [[0, 1, 1, 0, 1], [0.5, 1.5, 2.5, 1.0, 0.1]])
def test_identical_runs_make_no_difference(values):
    for weights in (np.ones(5), np.arange(1, 6)):
        low, high = interval(values, values, weights)
        assert low <= 0 <= high and Difference(0.0, (low, high)).text().startswith("no difference, +0.0000 (")


def test_scores_that_cannot_be_paired_have_no_interval():
    values = np.array([1.0, 2.0, 4.0])
    known = scored(values)
    assert paired_interval(known, scored(values + 1, identity=np.uint32([7, 8, 9])), "score") is None
    assert paired_interval(known, scored(values[:2]), "score") is None
    assert paired_interval(known, known, "loss") is None
    assert paired_interval(known, None, "score") is None and paired_interval(None, known, "score") is None
    for value in (math.nan, math.inf):
        assert paired_interval(known, scored([1.0, value, 4.0]), "score") is None
    assert interval([1.0], [2.0]) is None
    assert interval([1.0, 5.0], [2.0, 6.0], [1.0, 0.0]) is None  # one example of the two counts
    assert paired_interval(known, scored(values, np.zeros(3)), "score") is None
    assert paired_scores.half_interval(None, "score") is None and paired_scores.half_interval(known, "loss") is None


def test_few_examples_of_different_weights_have_a_t_interval():
    """Resamples of examples whose differences have one sign never hold 0."""
    low, high = interval([1.1, 2.3], [1, 2], [1, 2])
    assert low < 0 < high and low + high == pytest.approx(2 * (0.1 + 2 * 0.3) / 3)
    first, second = [1.1, 2.3, 0.4], [1, 2, 0.5]
    assert interval(first, second, [1, 1, 1 + 1e-9]) == pytest.approx(interval(first, second))


def test_weights_may_differ_between_the_runs():
    rng = np.random.default_rng(1)
    values, first, second = rng.normal(0, 1, 200), rng.integers(1, 9, 200), rng.integers(1, 9, 200)
    low, high = paired_interval(scored(values + 1, first), scored(values, second), "score")
    assert low < 1 < high and high - low < 0.5


def test_many_examples_are_resampled_in_groups(monkeypatch):
    rng = np.random.default_rng(2)
    weights = rng.integers(1, 9, 4000)
    second = rng.normal(0, 1, 4000)
    first = second + rng.normal(0.1, 0.3, 4000)
    single = interval(first, second, weights)
    monkeypatch.setattr(paired_scores, "MAX_GROUPS", 400)
    assert interval(first, second, weights) == pytest.approx(single, abs=0.002)


def test_differences_of_rankings_are_those_of_scores():
    first, second = scored([1.0, 2.0, 4.0, 3.0]), scored([1.1, 2.3, 4.1, 3.3])
    examples = {"a": first, "b": second, "unknown": None}
    ranking = Ranking("x", {"a": 5.0, "b": 5.4, "unknown": 6.0}, {}, metric="score", slopes={"a": 2.0, "b": 2.0})
    low, high = interval([2.2, 4.6, 8.2, 6.6], [2.0, 4.0, 8.0, 6.0])
    difference = ranked_difference(ranking, examples, "b", "a")
    assert difference.value == pytest.approx(0.4) and difference.interval == pytest.approx((low, high))
    assert ranked_difference(ranking, examples, "unknown", "a") == Difference(1.0)
    assert (
        ranked_difference(ranking, examples, "a", "a") is None
        and ranked_difference(ranking, examples, "c", "a") is None
    )
    other = Ranking("x", {"a": 5.0, "b": 5.5}, {}, metric="score", slopes={"a": 2.0, "b": 2.0})
    assert ranked_difference(other, examples, "b", "a") == Difference(0.5)  # 5.5 is not twice the mean


def test_text_of_differences():
    assert Difference(0.01, (0.002, 0.018)).text() == "+0.0100 (+0.0020 to +0.0180)"
    assert Difference(-0.01, (-0.03, 0.01)).text(".2f") == "no difference, -0.01 (-0.03 to +0.01)"
    assert Difference(1e-7, (9e-8, 2e-7)).text() == "no difference, +0.0000 (+0.0000 to +0.0000)"
    assert Difference(0.5).text() == "+0.5000" and Difference(math.nan).text() == "-"


def test_means_over_tasks_are_narrower_than_tasks():
    mean = mean_difference([Difference(1.0, (0.5, 1.5)), Difference(3.0, (2.5, 3.5))])
    assert mean.value == 2 and mean.interval == pytest.approx((2 - 0.5 / math.sqrt(2), 2 + 0.5 / math.sqrt(2)))
    assert mean_difference([Difference(1.0, (0.5, 1.5)), Difference(3.0)]) == Difference(2.0)


@pytest.mark.oracle
def test_interval_of_equal_weights_matches_scipy():
    first, second = np.random.default_rng(0).normal(0, 1, (2, 30))
    expected = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert interval(first, second) == pytest.approx((expected.low, expected.high))


@pytest.mark.oracle
def test_interval_of_different_weights_matches_scipy():
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 9, 40).astype(np.float64)
    second = rng.normal(2, 0.3, 40)
    first = second + rng.normal(0.05, 0.1, 40)

    def difference(first, second, weights, axis=-1):
        return ((first - second) * weights).sum(axis) / weights.sum(axis)

    expected = stats.bootstrap(
        (first, second, weights),
        difference,
        paired=True,
        method="percentile",
        confidence_level=1 - 2 * bootstrap_level(40),
        n_resamples=20_000,
        rng=1,
    ).confidence_interval
    assert interval(first, second, weights) == pytest.approx((expected.low, expected.high), abs=0.003)
