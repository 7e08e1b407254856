"""Retention and its tests: error rates on simulated models, exact resampling, signs, sizes, halves, and several models."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from hpnlp.advise import kept_quality
from hpnlp.advise.kept_quality import (
    DISCORDANT_PRUNED,
    EqualPredictions,
    KeptQuality,
    QualityVerdict,
    agreement,
    confirmed,
    described,
    described_size,
    excluded_loss,
    is_for_selection,
    kept,
    needed_examples,
    retention,
    subset,
    units,
)
from hpnlp.errors import InputError
from hpnlp.training.files.example_scores import ExampleScores

KEEP, ACCURACY = 0.97, 0.72


def scores(totals, weights=1.0):
    totals = np.asarray(totals, np.float64)
    return ExampleScores({"score": (totals, weights * np.ones(len(totals)))}, np.arange(len(totals), dtype=np.uint32))


def compare(b, c, trivial=0.0, higher_is_better=True, keep=KEEP, seed=0):
    return kept(b, c, "score", keep=keep, trivial=trivial, higher_is_better=higher_is_better, seed=seed)


def answers(rng, shape, loss, discordant):
    """Right and wrong answers of a model and of changed models, with this loss of accuracy and share of discordant answers."""
    b = rng.random(shape[-1]) < ACCURACY
    becomes_wrong, becomes_right = (discordant + loss) / 2 / ACCURACY, (discordant - loss) / 2 / (1 - ACCURACY)
    return b, b ^ (rng.random(shape) < np.where(b, becomes_wrong, becomes_right))


def test_retention_has_no_sign():
    assert retention(0.72, 0.71, 0.5, True) == pytest.approx(0.21 / 0.22)
    assert retention(2.0, 2.1, 7.0, False) == pytest.approx(4.9 / 5.0)  # a loss
    assert retention(-2.0, -2.1, -7.0, True) == pytest.approx(4.9 / 5.0)  # a log-likelihood
    assert retention(0.0, 0.1, 1.0, False) == pytest.approx(0.9)  # a score of zero
    assert math.isnan(retention(0.5, 0.9, 0.5, True)) and math.isnan(retention(7.0, 2.0, 6.9, False))


@pytest.mark.parametrize(
    ("accuracy", "keep", "sizes"),
    [  # For shares of discordant answers of 0.02, 0.05, 0.1 and 0.2, and of two independent sets of examples.
        (0.60, 0.97, (382, 955, 1909, 3817, 9160)),
        (0.72, 0.97, (266, 663, 1326, 2651, 5343)),
        (0.90, 0.97, (170, 425, 849, 1697, 1527)),
        (0.95, 0.97, (153, 381, 762, 1523, 724)),
        (0.72, 0.99, (2386, 5964, 11927, 23853, 48087)),
        (0.95, 0.99, (1371, 3426, 6851, 13701, 6508)),
    ],
)
def test_sizes_match_the_table(accuracy, keep, sizes):
    shares = (0.02, 0.05, 0.1, 0.2, 2 * accuracy * (1 - accuracy))
    assert tuple(needed_examples(keep, accuracy, share) for share in shares) == sizes
    for count, share in zip(sizes, shares, strict=True):
        margin = (1 - keep) * accuracy
        assert excluded_loss(count, share) <= margin < excluded_loss(count - 1, share)


def test_size_in_words():
    assert described_size(681, KEEP, ACCURACY, DISCORDANT_PRUNED, "pruned models") == (
        "681 examples: losses under 3.0 points cannot be excluded for pruned models; --keep=0.97 needs about 1,300"
    )
    assert described_size(681, KEEP, ACCURACY, 0.03, "int8 models") == (
        "681 examples: enough to show --keep=0.97 for int8 models, which needs about 400"
    )


@pytest.mark.parametrize(("count", "discordant"), [(681, 0.1), (2000, 0.1), (100, 0.0216)])
def test_model_at_the_limit_is_accepted_in_five_percent(count, discordant):
    rng = np.random.default_rng(count)
    drawn = (answers(rng, (count,), (1 - KEEP) * ACCURACY, discordant) for _ in range(1500))
    verdicts = [compare(scores(b), scores(c)).verdict for b, c in drawn]
    assert verdicts.count(QualityVerdict.KEPT) <= 0.065 * len(verdicts)
    assert verdicts.count(QualityVerdict.LOST) <= 0.065 * len(verdicts)


def test_equal_model_is_accepted_as_often_as_the_size_promises():
    rng = np.random.default_rng(0)
    count = needed_examples(KEEP, ACCURACY, 0.1)
    drawn = (answers(rng, (count,), 0.0, 0.1) for _ in range(500))
    share = np.mean([compare(scores(b), scores(c)).verdict is QualityVerdict.KEPT for b, c in drawn])
    assert share == pytest.approx(0.8, abs=0.05)


def test_best_of_ten_models_at_the_limit_is_confirmed_in_six_percent():
    rng = np.random.default_rng(0)
    selects = is_for_selection(np.arange(681))
    by_half, by_all = [], []
    for _ in range(1500):
        b, c = answers(rng, (10, 681), (1 - KEEP) * ACCURACY, 0.1)
        best = c[c[:, selects].mean(axis=1).argmax()]
        by_half.append(compare(scores(b[~selects]), scores(best[~selects])).verdict)
        by_all.append(compare(scores(b), scores(c[c.mean(axis=1).argmax()])).verdict)
    assert by_half.count(QualityVerdict.KEPT) <= 0.06 * len(by_half)
    assert by_all.count(QualityVerdict.KEPT) >= 0.2 * len(by_all)  # without halves


@pytest.mark.parametrize(("sign", "offset"), [(1, 0.0), (1, -9.0), (-1, 9.0), (-1, 0.0)])
def test_formula_matches_its_definition_for_both_directions(sign, offset):
    rng = np.random.default_rng(1)
    gains = rng.normal(2, 1, 200)  # above the trivial score, whatever the sign of the scores
    changed = gains - rng.normal(0.05, 0.2, 200)
    result = compare(scores(sign * gains + offset), scores(sign * changed + offset), offset, sign == 1)
    assert result.retention == pytest.approx(changed.mean() / gains.mean())
    assert result.count == 200 and result.has_learned
    for keep in (0.9, result.low - 1e-6, result.low + 1e-6, 0.99):
        y = changed - keep * gains
        is_accepted = y.mean() - 1.6448536 * y.std(ddof=1) / math.sqrt(200) > 0
        other = compare(scores(sign * gains + offset), scores(sign * changed + offset), offset, sign == 1, keep)
        assert is_accepted == (other.verdict is QualityVerdict.KEPT) == (other.low > keep)
    # The worse model would be accepted if the signs were those of another direction.
    worse = scores(sign * gains / 2 + offset)
    assert compare(scores(sign * gains + offset), worse, offset, sign == 1).verdict is QualityVerdict.LOST


def test_bootstrap_matches_all_resamples(monkeypatch):
    monkeypatch.setattr(kept_quality, "FEWEST", 5)
    weights = np.array([1.0, 2, 3, 5, 8])
    losses, changed = np.array([2.0, 2.3, 1.9, 2.6, 2.1]), np.array([2.2, 2.3, 2.2, 2.5, 2.3])
    b, c = scores(losses * weights, weights), scores(changed * weights, weights)
    result = compare(b, c, trivial=4.0, higher_is_better=False, keep=0.92)
    shares = []
    for drawn in itertools.product(range(5), repeat=5):
        w = weights[list(drawn)]
        means = [(x[list(drawn)] * w).sum() / w.sum() for x in (losses, changed)]
        shares.append((4.0 - means[1]) / (4.0 - means[0]))
    shares = np.array(shares)
    assert np.mean(shares < result.low - 1e-9) <= 0.065 and np.mean(shares <= result.low + 1e-9) >= 0.035
    assert result.p_value == pytest.approx(np.mean(shares < 0.92), abs=0.04)
    assert result.retention == pytest.approx(
        retention(*(np.average(x, weights=weights) for x in (losses, changed)), 4, False)
    )
    assert result == compare(b, c, trivial=4.0, higher_is_better=False, keep=0.92)
    assert result.has_learned and result.verdict is QualityVerdict.NOT_SHOWN  # five documents are too few


def test_documents_at_the_limit_are_accepted_in_five_percent(monkeypatch):
    monkeypatch.setattr(kept_quality, "RESAMPLES", 200)
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(150):
        weights = rng.integers(50, 400, 100)
        losses = rng.normal(3, 0.3, 100)
        changed = losses + (1 - KEEP) * 3 + rng.normal(0, 0.1, 100)  # 3 below the trivial loss
        verdicts.append(
            compare(scores(losses * weights, weights), scores(changed * weights, weights), 6.0, False).verdict
        )
    assert verdicts.count(QualityVerdict.KEPT) <= 0.1 * len(verdicts)  # 5 % and three standard errors


def test_weights_of_the_models_may_differ():
    rng = np.random.default_rng(0)  # F1: twice the true positives over the positives of labels and predictions
    label, b = rng.random(400) < 0.3, rng.random(400) < 0.05
    f1 = lambda wrong: scores(2.0 * (label & (label ^ wrong)), label + (label ^ wrong).astype(float))  # noqa: E731
    same, worse = (compare(f1(b), f1(wrong), keep=0.9) for wrong in (b, b | (rng.random(400) < 0.2)))
    assert same.retention == same.low == 1 and same.verdict is QualityVerdict.KEPT
    assert worse.verdict is QualityVerdict.LOST


def test_constant_predictor_has_learned_nothing():
    label = np.arange(400) % 100 < 93
    result = compare(scores(label), scores(label), trivial=0.93)
    assert result.verdict is QualityVerdict.NOTHING_LEARNED and math.isnan(result.retention) and result.low == -math.inf
    assert "learned nothing" in described(result)
    documents = scores(label.astype(float), 1 + np.arange(400) % 3)
    assert compare(documents, documents, trivial=0.9).verdict is QualityVerdict.NOTHING_LEARNED


def test_few_examples_without_a_difference_show_nothing():
    rng = np.random.default_rng(0)
    right = scores(rng.random(60) < ACCURACY)
    assert compare(right, right).verdict is QualityVerdict.NOT_SHOWN
    alike = scores(np.ones(19))
    assert compare(alike, alike, trivial=0.5, keep=0.01).verdict is QualityVerdict.NOT_SHOWN


def test_scores_that_are_not_finite_are_lost():
    good, bad = np.random.default_rng(0).normal(2, 0.1, 100), np.full(100, np.nan)
    result = compare(scores(good), scores(bad), 5.0, higher_is_better=False)
    assert result.verdict is QualityVerdict.LOST and described(result) == "loses its quality: scores are not finite"
    assert compare(scores(bad), scores(good), 5.0, False).verdict is QualityVerdict.NOTHING_LEARNED


def test_verdicts_in_words():
    result = KeptQuality(0.991, 0.974, KEEP, 0.01, 681, has_learned=True, discordant=0.1)
    assert described(result) == "keeps 99.1 % of the quality, at least 97.4 % with 95 % confidence"
    assert described(dataclasses.replace(result, low=0.9699, p_value=0.06)) == (
        "keeps 99.1 % of the quality, at least 96.9 % with 95 % confidence: "
        "too few held-out examples to show that it keeps 97 %"
    )
    assert described(dataclasses.replace(result, retention=0.8, p_value=0.99)) == (
        "keeps 80 % of the quality, less than 97 % with 95 % confidence"
    )


def test_several_models_are_confirmed_by_holm():
    def results(*p_values):
        return [KeptQuality(1.0, 0.98, KEEP, p, 681, has_learned=True, discordant=0.1) for p in p_values]

    assert confirmed(results(0.04)) == (True,)
    assert confirmed(results(0.02, 0.01, 0.04)) == (True, True, True)
    assert confirmed(results(0.03, 0.01, 0.04)) == (False, True, False)
    assert confirmed(results(0.02, 0.02)) == (True, True)
    assert confirmed(results(0.02, 0.03, 0.02)) == (False, False, False)
    assert confirmed([]) == ()


def test_halves_keep_documents_whole_in_any_order():
    documents = np.repeat(np.arange(101), 3)
    selects = is_for_selection(documents)
    assert selects.sum() == 150 and all(len(set(selects[documents == d])) == 1 for d in range(101))
    order = np.random.default_rng(0).permutation(len(documents))
    np.testing.assert_array_equal(is_for_selection(documents[order]), selects[order])
    assert (is_for_selection(documents, seed=1) != selects).any()
    assert list(is_for_selection(["a", "b", "a", "c", "d"])) != [True] * 5


def test_subsets_keep_their_documents():
    half = subset(
        dataclasses.replace(scores([1.0, 2, 3, 4]), documents=np.array([7, 3, 7, 7])),
        np.array([False, True, True, False]),
    )
    assert half.sums["score"][0].tolist() == [2, 3] and half.identity.tolist() == [1, 2]
    assert half.documents.tolist() == [3, 7]


def test_halves_of_few_documents_are_of_examples():
    for count, expected in ((10, np.repeat(np.arange(10), 3)), (9, np.arange(27))):
        examples = dataclasses.replace(scores(np.ones(3 * count)), documents=np.repeat(np.arange(count), 3))
        np.testing.assert_array_equal(units(examples), expected)
    np.testing.assert_array_equal(units(scores([1, 0, 1])), np.arange(3))


@pytest.mark.parametrize("count", [8, 30])
def test_models_at_the_limit_that_lose_by_document_are_accepted_in_five_percent(monkeypatch, count):
    """Where the loss is one of documents, examples would accept a third of such models."""
    monkeypatch.setattr(kept_quality, "RESAMPLES", 200)
    rng, accepted, lost = np.random.default_rng(0), {True: 0, False: 0}, 0
    for _ in range(150):
        document = np.repeat(np.arange(count), rng.integers(1, 40, count))
        weights = rng.integers(100, 256, len(document))
        losses = rng.normal(3, 0.2, len(document))
        changed = losses + (1 - KEEP) * 3 + rng.normal(0, 0.1, count)[document]  # 3 below the trivial loss
        pair = [scores(x * weights, weights) for x in (losses, changed)]
        for knows in accepted:
            b, c = (dataclasses.replace(x, documents=document) if knows else x for x in pair)
            result = compare(b, c, 6.0, False)
            accepted[knows] += result.verdict is QualityVerdict.KEPT
            assert result.documents == (count if knows else 0)
            lost += knows and result.verdict is QualityVerdict.LOST
    assert accepted[True] <= 15 and accepted[False] >= 30  # 5 % and three standard errors
    assert lost <= (15 if count == 30 else 25)  # 11 % of few documents of different lengths
    assert "too few held-out documents" in described(dataclasses.replace(result, documents=8, p_value=0.5, low=0.9))


def test_agreement_is_a_share_with_wilsons_limit():
    result = agreement(["a", "b", "c", "d"] * 25, ["a", "b", "c", "e"] * 25)
    assert result == EqualPredictions(0.75, result.low, 100) and result.low == pytest.approx(0.67283, abs=1e-5)
    assert agreement([1] * 30, [1] * 30).low == pytest.approx(1 / (1 + 1.6448536**2 / 30))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compare(scores([1, 0]), scores([1, 0]), keep=97), "keep=97: expected a share"),
        (lambda: compare(scores([1, 0]), scores([1, 0, 1])), "different examples"),
        (lambda: compare(scores([1]), scores([1])), "1 held-out examples"),
        (
            lambda: kept(scores([1]), scores([1]), "f1", keep=0.9, trivial=0, higher_is_better=True),
            "name='f1': .* score:",
        ),
        (lambda: needed_examples(0.97, 0.0, 0.1), "gain=0.0"),
        (lambda: agreement([1], [1, 2]), "1 and 2 predictions"),
    ],
)
def test_invalid_arguments_raise(call, message):
    with pytest.raises(InputError, match=message):
        call()
