"""Differences of held-out scores with 95 % intervals, paired over the examples that both runs were scored on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from hpnlp.measure import t_quantile
from hpnlp.tasks.reports.reporting import Ranking
from hpnlp.training.files.example_scores import ExampleScores, grouped, with_equal_documents

RESAMPLES = 2000
_TOLERANCE = 1e-3  # relative difference of a score to the mean over examples from which it is another function of them
MIN_RESAMPLED = 5  # resampling 2 to 4 examples gave intervals that contain the true difference in 50 to 83 % of cases
MAX_GROUPS = 4096  # more examples are resampled in groups of consecutive ones
NOTE = (
    "± and the values in brackets in the table are 95 % intervals over the held-out examples, or over documents where examples "
    'share them; those of differences are paired. "no difference": the interval contains 0, so that the order of such rows is '
    "not a ranking. The intervals leave out the variation between seeds."
)
NO_INTERVAL = (
    "A difference without an interval may be chance: there are no stored scores of the same held-out examples of both models, "
    "or the score is not a mean over examples."
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of two scores.

    Attributes:
      value: The difference.
      interval: Ends of its 95 % interval; None if it is unknown.
    """

    value: float
    interval: tuple[float, float] | None = None

    @property
    def is_none(self) -> bool:
        """Whether the interval contains 0."""
        return self.interval is not None and self.interval[0] <= 0 <= self.interval[1]

    def text(self, digits: str = ".4f") -> str:
        """The difference as text.

        Args:
          digits: Format of the score.

        Returns:
          Such as "+0.0102 (+0.0063 to +0.0141)", or "no difference, +0.0002 (-0.0037 to +0.0041)" if the interval contains 0 or
          both of its ends are 0 after rounding; "-" for NaN.
        """
        if math.isnan(self.value):
            return "-"
        value = f"{self.value:+{digits}}"
        if self.interval is None:
            return value
        low, high = self.interval
        # Two evaluations of the same weights may differ by rounding alone, by nearly the same amount on all examples.
        is_none = self.is_none or all(float(f"{end:{digits}}") == 0 for end in self.interval)
        return f"{'no difference, ' * is_none}{value} ({low:+{digits}} to {high:+{digits}})"


def paired_interval(
    first: ExampleScores | None, second: ExampleScores | None, metric: str
) -> tuple[float, float] | None:
    """95 % interval of the difference of two runs' scores over the same examples.

    Where examples share documents, it is the wider of two: that over examples, and that over documents, which are the unit of
    what is independent.

    Scores whose examples have equal weights, such as accuracies, have the interval of a paired t test. Where all of them are
    right or wrong, two examples are added, of which each run has one right: otherwise, few examples on which the runs differ
    would look certain. With different weights, as of documents, pairs of examples are resampled with a fixed seed; fewer than
    MIN_RESAMPLED have the t interval of a linearised ratio.

    Args:
      first: Scores of the examples of one run; None if they are unknown.
      second: Scores of the examples of the other run.
      metric: Name of the score.

    Returns:
      The ends of the interval of first - second; None if the examples are unknown, differ, are fewer than two, or have scores
      that are not finite.

    Cost:
      2,000 passes over at most 4,096 groups of examples, if their weights differ.

    References:
      Bonett and Price 2012, "Adjusted Wald confidence interval for a difference of binomial proportions based on paired data".
      Hesterberg 2015, "What teachers should know about the bootstrap", for percentiles that suit few examples.
    """
    if first is None or second is None or not np.array_equal(first.identity, second.identity):
        return None
    if metric not in first.sums or metric not in second.sums:
        return None
    first, second = with_equal_documents(first, second)
    intervals = [_interval(first, second, metric)]
    if first.document_count:
        intervals.append(_interval(first.by_document(), second.by_document(), metric))
    known = [interval for interval in intervals if interval is not None]
    return max(known, key=lambda ends: ends[1] - ends[0], default=None)


def _interval(first: ExampleScores, second: ExampleScores, metric: str) -> tuple[float, float] | None:
    """The interval of `paired_interval` with one unit, examples or documents."""
    totals, weights = (np.stack([scores.sums[metric][i] for scores in (first, second)]) for i in (0, 1))
    is_counted = (weights != 0).any(axis=0)
    totals, weights = totals[:, is_counted], weights[:, is_counted]
    if totals.shape[1] < 2 or not np.isfinite(totals).all() or (weights.sum(axis=1) <= 0).any():
        return None
    if (weights == weights[0, 0]).all():
        return _by_formula(totals / weights)
    if totals.shape[1] < MIN_RESAMPLED:
        return _by_formula(linearised(totals, weights))
    return _by_bootstrap(totals, weights)


def ranked_difference(
    ranking: Ranking, examples: Mapping[str, ExampleScores | None], name: str, first: str
) -> Difference | None:
    """Difference of the scores of two runs of a ranking.

    The interval of perplexities is that of their losses, as multiples of the perplexity of `first`.

    Args:
      ranking: Scores of the runs.
      examples: Run -> scores of its examples.
      name: A run.
      first: The run to which it is compared.

    Returns:
      The difference; None if one of them has no score, or they are the same.
    """
    scores = ranking.scores
    if name == first or name not in scores or first not in scores:
        return None
    value = scores[name] - scores[first]
    if not ranking.is_ratio:
        compared, reference = (scaled(examples[run], run, ranking) for run in (name, first))
        return Difference(value, paired_interval(compared, reference, ranking.metric))
    interval = paired_interval(examples[name], examples[first], ranking.metric)
    if interval is None:
        return Difference(value)
    low, high = (scores[first] * math.expm1(min(end, 700.0)) for end in interval)
    return Difference(value, (low, high))


def _by_formula(values: np.ndarray) -> tuple[float, float]:
    """Interval of the mean difference of values `[2, n]`."""
    if is_right_or_wrong(values):
        values = with_two_examples(values)
    differences = values[0] - values[1]
    mean, count = float(differences.mean()), len(differences)
    half = t_quantile(count - 1) * float(differences.std(ddof=1)) / math.sqrt(count)
    return mean - half, mean + half


def linearised(totals: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Values whose mean is the quotient of two sums, with the variance of the quotient to first order.

    Args:
      totals: `[2, n]`.
      weights: `[2, n]`.

    Returns:
      `[2, n]`.
    """
    scores = totals.sum(axis=1, keepdims=True) / weights.sum(axis=1, keepdims=True)
    return scores + (totals - scores * weights) / weights.mean(axis=1, keepdims=True)


def _by_bootstrap(totals: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Interval of the difference of sum(totals) / sum(weights), `[2, n]` each."""
    columns = np.concatenate([totals, weights])
    columns = grouped(columns, -(-columns.shape[1] // MAX_GROUPS))
    sums = resampled_sums(columns, RESAMPLES, seed=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = sums[:2] / sums[2:]  # [2, RESAMPLES]
    level = bootstrap_level(columns.shape[1])
    low, high = np.nanquantile(scores[0] - scores[1], [level, 1 - level])
    return float(low), float(high)


def bootstrap_level(count: int) -> float:
    """The percentile at which an interval of resampled means begins: below 2.5 % for few examples, as of the t distribution.

    Args:
      count: Number of examples, at least 2.

    Returns:
      The percentile, from 0 to 0.025.
    """
    from scipy import special

    return float(special.ndtr(-math.sqrt(count / (count - 1)) * t_quantile(count - 1)))


def resampled_sums(columns: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Sums over examples that are drawn with replacement.

    Args:
      columns: `[k, n]`, values of n examples.
      resamples: Number of draws of n examples each.
      seed: Seed of the draws.

    Returns:
      `[k, resamples]`.
    """
    count, rng = columns.shape[1], np.random.default_rng(seed)
    draws = (np.bincount(rng.integers(0, count, count), minlength=count) for _ in range(resamples))
    return np.stack([columns @ times for times in draws], axis=1)


def is_right_or_wrong(values: np.ndarray) -> bool:
    """Whether all values are 0 or 1.

    Args:
      values: Scores of examples.

    Returns:
      True or False.
    """
    return bool(((values == 0) | (values == 1)).all())


def with_two_examples(values: np.ndarray) -> np.ndarray:
    """Adds two examples, of which each model has one right.

    Args:
      values: `[2, n]`, 0 or 1.

    Returns:
      `[2, n + 2]`.
    """
    return np.concatenate([values, np.eye(2)], axis=1)


def half_interval(examples: ExampleScores | None, metric: str) -> float | None:
    """Half the width of the 95 % interval of a run's score, by the t distribution.

    Args:
      examples: Scores of its examples; None if they are unknown.
      metric: Name of the score.

    Returns:
      Half the width; None if the examples are unknown, or fewer than two.
    """
    error = None if examples is None else examples.standard_error(metric)
    if examples is None or error is None:
        return None
    return error * t_quantile(int((examples.by_document().sums[metric][1] != 0).sum()) - 1)


def scaled(examples: ExampleScores | None, name: str, ranking: Ranking) -> ExampleScores | None:
    """Scales the scores of a run's examples so that their mean is the score of the run.

    Args:
      examples: Scores of the examples; None if they are unknown.
      name: The run.
      ranking: Scores of the runs.

    Returns:
      The scaled scores; None if the score of the run is not a multiple of their mean.
    """
    if examples is None or ranking.metric not in examples.sums:
        return None
    total, weight = examples.sums[ranking.metric]
    slope, score = ranking.slopes.get(name, 1.0), ranking.scores[name]
    if weight.sum() <= 0 or not math.isclose(slope * total.sum() / weight.sum(), score, rel_tol=_TOLERANCE):
        return None
    return dataclasses.replace(examples, sums={ranking.metric: (slope * total, weight)})


def mean_difference(differences: Sequence[Difference]) -> Difference:
    """Mean of differences over independent sets of examples.

    Args:
      differences: The differences, at least one.

    Returns:
      The mean, with an interval if all of them have one.
    """
    count = len(differences)
    value = sum(difference.value for difference in differences) / count
    intervals = [difference.interval for difference in differences if difference.interval is not None]
    if len(intervals) < count:
        return Difference(value)
    center = sum(low + high for low, high in intervals) / 2 / count
    half = math.sqrt(sum((high - low) ** 2 for low, high in intervals)) / 2 / count
    return Difference(value, (center - half, center + half))
