"""Whether a changed model keeps the quality of the original one, from scores of the same held-out examples.

Quality is counted from a trivial score, such as that of the most frequent class: where that class has 93 % of the examples, a
constant would keep 97 % of an accuracy of 95.9 %.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import math
import statistics
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from hpnlp.errors import InputError
from hpnlp.report.paired_scores import is_right_or_wrong, linearised, resampled_sums, with_two_examples
from hpnlp.training.files.example_scores import LEAST_DOCUMENTS, ExampleScores, with_equal_documents

ERROR = 0.05  # probability that a model exactly at the limit is accepted
POWER = 0.8  # probability that an equally good model is accepted, for numbers of examples
RESAMPLES = 2000
FEWEST = 20  # fewer examples show nothing, and fewer documents are not resampled
FEW = 100  # from which the t distribution is a normal one
# Shares of examples on which only one of two models is right: assumptions, until a few examples have been compared.
DISCORDANT_INT8, DISCORDANT_PRUNED = 0.03, 0.1
_NORMAL = statistics.NormalDist()
_Z = _NORMAL.inv_cdf(1 - ERROR)
_Z_POWER = _NORMAL.inv_cdf(POWER)

Labels: TypeAlias = Sequence[int] | Sequence[str] | np.ndarray


class QualityVerdict(enum.StrEnum):
    """Result of a comparison of a changed model with the original one."""

    KEPT = "kept"
    LOST = "lost"
    NOT_SHOWN = "not shown"
    NOTHING_LEARNED = "nothing learned"


@dataclasses.dataclass(frozen=True)
class KeptQuality:
    """Quality of a changed model, relative to that of the original one.

    Attributes:
      retention: Share of the original's distance from the trivial score; nan if the original is not better than that.
      low: Lower limit of the retention, one-sided at 95 %; -inf if there is none.
      keep: Least retention that is accepted.
      p_value: Probability that a model exactly at the limit `keep` has at least this result.
      count: Number of examples.
      has_learned: Whether the original is better than the trivial score, one-sided at 95 %.
      discordant: Mean squared difference of the scores of an example: of right and wrong answers, the share of examples on
        which only one of the models is right. None if the examples have different weights.
      documents: Number of documents or groups that the examples belong to; 0 if each stands for itself.
      least_p_value: The lesser of the p-values over examples and over documents; None without documents.
    """

    retention: float
    low: float
    keep: float | int
    p_value: float
    count: int
    has_learned: bool
    discordant: float | None
    documents: int = 0
    least_p_value: float | None = None

    @property
    def verdict(self) -> QualityVerdict:
        """KEPT and LOST have at most 5 % of error each; of 5 to 20 documents of different lengths up to 8 and 11 %."""
        if not self.has_learned:
            return QualityVerdict.NOTHING_LEARNED
        if self.count < FEWEST:
            return QualityVerdict.NOT_SHOWN
        if self.p_value <= ERROR:
            return QualityVerdict.KEPT
        least = self.p_value if self.least_p_value is None else self.least_p_value
        return QualityVerdict.LOST if least >= 1 - ERROR else QualityVerdict.NOT_SHOWN

    @property
    def differing(self) -> float:
        """Share of examples on which only one of the models is right, with the two that `kept` adds; 0.1 if it is not known."""
        return DISCORDANT_PRUNED if self.discordant is None else (self.discordant * self.count + 2) / (self.count + 2)


@dataclasses.dataclass(frozen=True)
class EqualPredictions:
    """Equal predictions of two models.

    Attributes:
      share: Share of the predictions that are equal.
      low: Its lower limit, one-sided at 95 %.
      count: Number of predictions.
    """

    share: float
    low: float
    count: int


def retention(original: float | int, changed: float | int, trivial: float | int, higher_is_better: bool) -> float:
    """The share of the original's quality that a changed model has.

    Args:
      original: Score of the original model, of any sign.
      changed: Score of the changed model.
      trivial: Score of a predictor that knows no inputs, such as the most frequent class, or the frequencies of tokens; 0 for
        scores that have no such predictor, as F1 and BLEU. A loss has no natural zero. For perplexities pass losses: most of
        the distance between two perplexities is below the first percents of learning.
      higher_is_better: Direction of the score.

    Returns:
      1 for an equal score, 0 for the trivial one; nan if the original is not better than the trivial score.
    """
    gain = original - trivial if higher_is_better else trivial - original
    return (changed - trivial) / (original - trivial) if gain > 0 else math.nan


def kept(
    original: ExampleScores,
    changed: ExampleScores,
    name: str,
    *,
    keep: float | int,
    trivial: float | int,
    higher_is_better: bool,
    seed: int = 0,
) -> KeptQuality:
    """Tests whether a changed model keeps a share of the original's quality (non-inferiority).

    Examples of equal weight are compared by the mean of c - trivial - keep (b - trivial), as normally distributed. If all
    scores are right or wrong (1 or 0), two examples are added, of which each model has one right: otherwise, few examples
    without a difference would show that nothing is lost. Examples of different weights are resampled. Where examples share
    documents, these are compared too, as independent units, and both comparisons have to show that quality is kept, or lost.

    Args:
      original: Scores of the original model.
      changed: Scores of the changed model on the same examples.
      name: Name of the score. Its weights may differ between the models, as those of F1 do.
      keep: Least retention, such as 0.97.
      trivial: See `retention`.
      higher_is_better: Direction of the score.
      seed: Seed of the bootstrap.

    Returns:
      The comparison. A changed model whose scores are not finite has lost its quality.

    Raises:
      InputError: `keep` is not between 0 and 1, or the scores are of different examples, or of fewer than two.

    Cost:
      2,000 passes over the examples, if their weights differ.

    References:
      Bonett and Price 2012, "Adjusted Wald confidence interval for a difference of binomial proportions based on paired data".
      Fieller 1954, "Some problems in interval estimation", for the limit of a ratio.
    """
    _check_keep(keep)
    compare = functools.partial(
        _kept, name=name, keep=keep, trivial=trivial, higher_is_better=higher_is_better, seed=seed
    )
    result = compare(original, changed)
    first, second = with_equal_documents(original, changed)
    if not first.document_count:
        return result
    by_document = compare(first.by_document(), second.by_document())
    return dataclasses.replace(
        result,
        low=min(result.low, by_document.low),
        p_value=max(result.p_value, by_document.p_value),
        has_learned=result.has_learned and by_document.has_learned,
        documents=by_document.count,
        least_p_value=min(result.p_value, by_document.p_value),
    )


def _kept(
    original: ExampleScores,
    changed: ExampleScores,
    name: str,
    keep: float | int,
    trivial: float | int,
    higher_is_better: bool,
    seed: int,
) -> KeptQuality:
    """As `kept`, with one unit: examples or documents."""
    totals, weights = _pairs(original, changed, name)
    count = totals.shape[1]
    sign = 1 if higher_is_better else -1
    if not np.isfinite(totals[0]).all():
        return KeptQuality(math.nan, -math.inf, keep, 1.0, count, has_learned=False, discordant=None)
    if not np.isfinite(totals[1]).all():
        of_original = _kept(original, original, name, keep, trivial, higher_is_better, seed)
        return dataclasses.replace(of_original, retention=-math.inf, low=-math.inf, p_value=1.0, discordant=None)
    score = totals.sum(axis=1) / weights.sum(axis=1)
    share = retention(float(score[0]), float(score[1]), trivial, higher_is_better)
    if (weights != weights[0, 0]).any() and count >= FEWEST:
        low, p_value, has_learned = _by_bootstrap(sign * (totals - trivial * weights), weights, keep, seed)
        return KeptQuality(share, low, keep, p_value, count, has_learned, None)
    is_equal = bool((weights == weights[0, 0]).all())
    values = totals / weights if is_equal else linearised(totals, weights)
    discordant = float(((values[1] - values[0]) ** 2).mean()) if is_equal else None
    if is_right_or_wrong(values):
        values = with_two_examples(values)
    low, p_value, has_learned = _by_formula(sign * (values - trivial), keep)
    return KeptQuality(share, low, keep, p_value, count, has_learned, discordant)


def _pairs(original: ExampleScores, changed: ExampleScores, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Totals and weights `[2, n]` of both models."""
    if absent := [scores for scores in (original, changed) if name not in scores.sums]:
        raise InputError(f"name={name!r}: the examples have the scores {', '.join(absent[0].sums)}: name one of them")
    if not np.array_equal(original.identity, changed.identity):
        raise InputError("the two models were scored on different examples: score both on the same held-out data")
    if len(original.identity) < 2:
        raise InputError(f"{len(original.identity)} held-out examples or documents: expected at least 2")
    totals, weights = (np.stack([scores.sums[name][i] for scores in (original, changed)]) for i in (0, 1))
    return totals, weights


def _by_formula(gains: np.ndarray, keep: float | int) -> tuple[float, float, bool]:
    """Lower limit of the ratio of two means `[2, n]`, the p-value of `keep`, and whether the first mean is above 0.

    The limit is the largest share that the test accepts, by solving its quadratic equation.
    """
    from scipy import special

    b, c = gains.mean(axis=1)
    freedom = gains.shape[1] - 1 if gains.shape[1] < FEW else math.inf
    quantile = float(special.stdtrit(freedom, 1 - ERROR))
    covariance = np.cov(gains) / gains.shape[1]
    margin, variance = c - keep * b, np.array([-keep, 1]) @ covariance @ np.array([-keep, 1])
    p_value = float(special.stdtr(freedom, -margin / math.sqrt(variance))) if variance > 0 else float(margin <= 0)
    (bb, bc), (_, cc) = np.outer([b, c], [b, c]) - quantile**2 * covariance
    if b <= 0 or bb <= 0:
        return -math.inf, p_value, False
    return float(bc - math.sqrt(max(bc**2 - bb * cc, 0.0))) / float(bb), p_value, True


def _by_bootstrap(gains: np.ndarray, weights: np.ndarray, keep: float | int, seed: int) -> tuple[float, float, bool]:
    """As `_by_formula`, for quotients of the sums of gains and of weights `[2, n]`."""
    sums = resampled_sums(np.concatenate([gains, weights]), RESAMPLES, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        b, c = sums[:2] / sums[2:]  # [RESAMPLES]
        shares = np.nan_to_num(np.where(b > 0, c / b, -np.inf), nan=-np.inf, neginf=-np.inf)
    low = np.sort(shares)[math.floor(ERROR * (RESAMPLES - 1))]
    return float(low), float((shares < keep).sum() + 1) / (RESAMPLES + 1), bool((b > 0).mean() > 1 - ERROR)


def confirmed(results: Sequence[KeptQuality]) -> tuple[bool, ...]:
    """The models that keep their quality, with at most 5 % of error for all of them together.

    Args:
      results: Comparisons with one original, on examples by which the models were not selected.

    Returns:
      Whether each is confirmed.

    References:
      Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    accepted = [False] * len(results)
    for rank, index in enumerate(sorted(range(len(results)), key=lambda i: results[i].p_value)):
        if results[index].p_value > ERROR / (len(results) - rank):
            break
        accepted[index] = results[index].verdict is QualityVerdict.KEPT
    return tuple(accepted)


def subset(scores: ExampleScores, is_in: np.ndarray) -> ExampleScores:
    """The scores of some of the examples.

    Args:
      scores: Scores of examples.
      is_in: bool `[n]`.

    Returns:
      Scores, in the same order.
    """
    return ExampleScores(
        {key: (pair[0][is_in], pair[1][is_in]) for key, pair in scores.sums.items()},
        scores.identity[is_in],
        None if scores.documents is None else scores.documents[is_in],
    )


def units(scores: ExampleScores) -> np.ndarray:
    """The units by which examples are divided into halves.

    Args:
      scores: Scores of the examples.

    Returns:
      The number of the document of each example, where there are enough for two halves; otherwise of each example.
    """
    is_enough = scores.document_count >= 2 * LEAST_DOCUMENTS
    return scores.documents if scores.documents is not None and is_enough else np.arange(len(scores.identity))


def is_for_selection(documents: Labels, seed: int = 0) -> np.ndarray:
    """Divides held-out examples into a half to select among models and a half to confirm the selected ones.

    The best of 10 equal models looks better than it is on the examples by which it was selected.

    Args:
      documents: Number or name of the document of each example, whose examples stay together.
      seed: Another seed gives other halves.

    Returns:
      bool `[n]`: True for selection, False for confirmation. Half of the documents each, by hashes of their numbers: the
      order of the examples has no influence.
    """
    numbers, index = np.unique(np.asarray(documents), return_inverse=True)
    digests = [hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest() for number in numbers.tolist()]
    order = sorted(range(len(numbers)), key=digests.__getitem__)
    return np.isin(index, order[: len(numbers) // 2])


def needed_examples(keep: float | int, gain: float | int, discordant: float | int) -> int:
    """The number of held-out examples on which an equally good model is accepted with a probability of 80 %.

    Args:
      keep: Least retention.
      gain: Score of the original above the trivial one, such as an accuracy of 0.72 above 0.
      discordant: Share of examples on which only one of the models is right, see `KeptQuality`.

    Returns:
      The number; four times as many if the changed model has truly lost half of what `keep` allows.

    Raises:
      InputError: `keep` is not between 0 and 1, or `gain` is not positive.
    """
    _check_keep(keep)
    if gain <= 0:
        raise InputError(f"gain={gain}: expected a score above the trivial one")
    return math.ceil((_Z + _Z_POWER) ** 2 * discordant / ((1 - keep) * gain) ** 2)


def excluded_loss(count: int, discordant: float | int) -> float:
    """The smallest loss that some examples exclude for an equally good model, with a probability of 80 %.

    Args:
      count: Number of examples.
      discordant: See `needed_examples`.

    Returns:
      The loss in units of the score.
    """
    return (_Z + _Z_POWER) * math.sqrt(discordant / count)


def agreement(first: Labels, second: Labels) -> EqualPredictions:
    """The share of equal predictions of two models, which needs no labels.

    Args:
      first: Predictions of one model, one for each example.
      second: Predictions of the other on the same examples.

    Returns:
      The share and its limit.

    Raises:
      InputError: There are no predictions, or not as many of both models.

    References:
      Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if len(first) != len(second) or not len(first):
        raise InputError(
            f"{len(first)} and {len(second)} predictions: expected as many of both models, and at least one"
        )
    count, share = len(first), float((np.asarray(first) == np.asarray(second)).mean())
    width = _Z * math.sqrt(share * (1 - share) / count + (_Z / (2 * count)) ** 2)
    return EqualPredictions(share, (share + _Z**2 / (2 * count) - width) / (1 + _Z**2 / count), count)


def percents(result: KeptQuality) -> tuple[str, str]:
    """The retention and its lower limit in words, with three digits.

    Args:
      result: The comparison.

    Returns:
      Such as ("99.1 %", "97.4 %"). The limit is rounded down, so that a limit in words is none that was not shown.
    """
    low = math.floor(1000 * result.low + 1e-9) / 1000 if math.isfinite(result.low) else result.low
    return _percent(result.retention), _percent(low)


def described(result: KeptQuality) -> str:
    """The verdict in words, as "keeps 99.1 % of the quality, at least 97.4 % with 95 % confidence".

    Args:
      result: The comparison.

    Returns:
      The words.
    """
    retained, low = percents(result)
    share, limit = f"keeps {retained} of the quality", f"at least {low} with 95 % confidence"
    match result.verdict:
        case QualityVerdict.NOTHING_LEARNED:
            return "the original has learned nothing on this data: quality cannot be judged"
        case QualityVerdict.KEPT:
            return f"{share}, {limit}"
        case QualityVerdict.LOST if not math.isfinite(result.retention):
            return "loses its quality: scores are not finite"
        case QualityVerdict.LOST:
            return f"{share}, less than {_percent(result.keep)} with 95 % confidence"
    unit = "documents" if result.documents else "examples"
    return f"{share}, {limit}: too few held-out {unit} to show that it keeps {_percent(result.keep)}"


def described_size(count: int, keep: float | int, gain: float | int, discordant: float | int, models: str) -> str:
    """The loss that held-out examples can exclude in words, for accuracies and other shares of right answers.

    Args:
      count: Number of held-out examples.
      keep: Least retention.
      gain: See `needed_examples`.
      discordant: See `needed_examples`, such as DISCORDANT_PRUNED.
      models: The changed models, such as "pruned models".

    Returns:
      A sentence without a period.
    """
    needed = needed_examples(keep, gain, discordant)
    about = f"about {float(f'{needed:.2g}'):,.0f}"
    if count >= needed:
        return f"{count:,} examples: enough to show --keep={keep:g} for {models}, which needs {about}"
    loss = f"losses under {100 * excluded_loss(count, discordant):.1f} points cannot be excluded for {models}"
    return f"{count:,} examples: {loss}; --keep={keep:g} needs {about}"


def _check_keep(keep: float | int) -> None:
    if not 0 < keep < 1:
        raise InputError(f"keep={keep}: expected a share between 0 and 1, such as 0.97")


def _percent(share: float | int) -> str:
    return f"{100 * share:.3g} %"
