"""Proposal distributions: frequencies of draws, expected counts, and TensorFlow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from hpnlp.ops.softmax.proposals import LearnedUnigram, LogUniform, Uniform, sample, unigram
from tests.contracts import once
from tests.messages import raises

LABELS = np.array([0, 0, 0, 3, 6], np.int32)
COUNTS = np.array([50.0, 1.0, 7.0, 30.0, 1e-3, 9.0, 2.0])
ALL = {
    "uniform": (Uniform(7), np.ones(7)),
    "log_uniform": (LogUniform(7), np.log1p(1 / np.arange(1.0, 8.0))),
    "unigram": (unigram(COUNTS), COUNTS),
    "power": (unigram(COUNTS, 0.75), COUNTS**0.75),
    "learned": (once(lambda ids: LearnedUnigram.start(7).seen(ids), LABELS), [4, 1, 1, 2, 1, 1, 2]),
}


@pytest.mark.parametrize("name", ALL)
def test_draws_and_log_probs_follow_the_distribution(name):
    sampler, unnormalized = ALL[name]
    q = np.asarray(unnormalized, np.float64) / np.sum(unnormalized)
    every = jnp.arange(7, dtype=jnp.int32)
    ids, log_q = once(lambda key: (sampler.draw(key, (20000,)), sampler.log_prob(every)), jax.random.key(1))
    np.testing.assert_allclose(np.exp(np.asarray(log_q, np.float64)), q, rtol=2e-6)
    actual = np.bincount(ids, minlength=7)
    is_frequent = q * 20000 >= 5
    assert (
        len(actual) == 7
        and stats.chisquare(
            actual[is_frequent], q[is_frequent] / q[is_frequent].sum() * actual[is_frequent].sum()
        ).pvalue
        > 1e-3
    )


def test_rarest_words_have_finite_expected_counts():
    table = unigram([1.0, 2.0**40])
    actual = once(lambda key: sample(table, key, 1, jnp.array([0, 1]), unique=True), jax.random.key(0))
    assert np.isfinite(actual.log_expected).all()
    np.testing.assert_allclose(np.exp(actual.labels_expected), [2.0**-40, 1.0], rtol=1e-4)


def test_log_uniform_matches_tensorflow():
    """Here q(k) = (log(k + 2) - log(k + 1)) / log(V + 1), for all words of a large vocabulary."""
    log_q = np.asarray(LogUniform(455_722).log_prob(jnp.arange(455_722, dtype=jnp.int32)), np.float64)
    k = np.arange(455_722.0)
    np.testing.assert_allclose(log_q, np.log(np.log1p(1 / (k + 1)) / np.log(455_723.0)), atol=2e-6)
    assert abs(np.exp(log_q).sum() - 1) < 1e-5
    ids = once(lambda key: LogUniform(455_722).draw(key, (4096,)), jax.random.key(0))
    assert ids.min() == 0 and 200_000 < ids.max() < 455_722


def test_log_uniform_reaches_all_words_of_a_large_vocabulary(monkeypatch):
    """Checks the last 2^17 ids, for all values of the fractional random number."""
    key = jax.random.key(0)
    monkeypatch.setattr(jax.random, "split", lambda key: (0, 1))

    @jax.jit
    def draw(values):
        at = lambda number, shape, dtype: values if number else jnp.full(shape, 0.95, dtype)  # noqa: E731  (2^17 to 2^18)
        monkeypatch.setattr(jax.random, "uniform", at)
        return LogUniform(2**18 - 1).draw(key, values.shape)

    ids = np.asarray(draw(jnp.arange(2**23, dtype=jnp.float32) / 2**23))
    actual = np.bincount(ids, minlength=2**18)[2**17 - 1 : 2**18 - 1]
    k = np.arange(2**17 - 1, 2**18 - 1)
    expected = np.log2((k + 2) / (k + 1)) * 2**23
    assert actual.sum() == 2**23 and abs(actual / expected - 1).max() < 0.05


@pytest.mark.parametrize("unique", [False, True])
def test_expected_counts_match_many_draws(unique):
    """With repetition the mean count; without, the probability that a word is drawn, given the number of tries."""
    vocab, count, times = 120, 40, 2000
    labels = jnp.arange(vocab, dtype=jnp.int32)
    draw = functools.partial(sample, LogUniform(vocab), count=count, labels=labels, unique=unique)
    ids, log_expected, of_labels = once(jax.vmap(draw), jax.random.split(jax.random.key(2), times))
    ids, expected = np.asarray(ids), np.exp(np.asarray(of_labels, np.float64))
    assert ids.shape == (times, count)
    actual = np.bincount(ids.ravel(), minlength=vocab) / times
    # The number of tries depends on the last word drawn, so that the estimate has an error of 1 %.
    error = 4 * np.sqrt(expected.mean(axis=0) / times) + 0.02 * unique
    assert (abs(actual - expected.mean(axis=0)) < error).all()
    np.testing.assert_allclose(np.exp(log_expected), np.take_along_axis(expected, ids, axis=1), rtol=1e-5)
    repeats = (np.diff(np.sort(ids, axis=1), axis=1) == 0).any(axis=1)
    assert repeats.all() if not unique else not repeats.any()


@pytest.mark.parametrize("unique", [pytest.param(False, marks=pytest.mark.slow), True])
def test_per_token_draws_are_independent(unique):
    labels = jnp.arange(5, dtype=jnp.int32)
    draw = functools.partial(sample, LogUniform(50), count=8, labels=labels, unique=unique, per_token=True)
    ids, log_expected, of_labels = once(draw, jax.random.key(0))
    assert ids.shape == log_expected.shape == (5, 8) and of_labels.shape == (5,)
    assert len({tuple(row) for row in np.asarray(ids).tolist()}) == 5
    if unique:
        tries = np.log1p(-np.exp(np.asarray(of_labels, np.float64))) / np.log1p(
            -np.exp(LogUniform(50).log_prob(labels))
        )
        np.testing.assert_allclose(tries, np.round(tries), atol=1e-3)  # the number of tries of each token
        assert (
            (np.diff(np.sort(ids, axis=1), axis=1) != 0).all() and (tries >= 8).all() and len(set(np.round(tries))) > 1
        )


@pytest.mark.parametrize(("vocab", "count"), [(1, 1), pytest.param(5, 5, marks=pytest.mark.slow), (300, 290)])
def test_unique_samples_can_be_the_whole_vocabulary(vocab, count):
    draw = lambda key: sample(Uniform(vocab), key, count, jnp.zeros(1, jnp.int32), unique=True)  # noqa: E731
    ids, log_expected, _ = once(draw, jax.random.key(0))
    assert len(set(np.asarray(ids).tolist())) == count
    assert (np.asarray(log_expected) <= 0).all()


def test_learned_unigram_counts_valid_labels_only():
    weights = jnp.array([1.0, 0.0, 0.5])
    counts = LearnedUnigram.start(4).seen(jnp.array([1, 2, 3]), weights).seen(jnp.array([3, 9])).counts
    np.testing.assert_array_equal(counts, [1, 2, 1, 3])
    np.testing.assert_array_equal(LearnedUnigram.start(4).seen(jnp.array([-1, -4, -100, 4, 2])).counts, [1, 1, 2, 1])
    np.testing.assert_array_equal(LearnedUnigram.start(4).seen(jnp.array([-1, 1, 2]), weights).counts, [1, 1, 2, 1])


def test_unigram_accepts_counts_near_the_largest_float():
    np.testing.assert_allclose(unigram([1e308, 1e308, 1e300]).log_q[:2], np.log(0.5), rtol=1e-6)


def test_learned_unigram_reaches_rare_words():
    """A float32 random number of 2^23 values would reach every 31st of the rare words only."""
    rare = 2**17
    sampler = LearnedUnigram(jnp.repeat(jnp.array([2000, 1], jnp.int32), rare))
    ids = np.asarray(jax.jit(lambda sampler, key: sampler.draw(key, (2**21,)))(sampler, jax.random.key(0)))
    actual = ids[ids >= rare]
    assert abs(len(actual) / (2**21 / 2001) - 1) < 0.15 and len(set(actual)) > 0.95 * len(actual)


def test_learned_unigram_halves_counts_before_overflow():
    counts = LearnedUnigram(jnp.array([2**30 - 3, 1, 2], jnp.int32)).seen(jnp.array([1, 0], jnp.int32)).counts
    np.testing.assert_array_equal(counts, [2**29 - 1, 1, 1])


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: unigram([1.0, 0.0, 3.0]), "1 counts .* word 1 .*: add 1 to all"),
        (lambda: unigram([1.0, np.nan]), "word 1"),
        (lambda: unigram([]), r"expected \[V\]"),
        (lambda: unigram([1e-50, 1.0, 1.0]), "1 words would never be drawn, the first is word 0"),
        (lambda: unigram([1.0, 10.0, 100.0], power=400.0), "2 words would never be drawn"),
        (lambda: unigram([1.0, 1e38]), r"1 words would never be drawn, the first is word 0 .count 1, power 1.*: add"),
        (lambda: unigram([1.0, 4e12]), "1 words would never be drawn"),
        (lambda: unigram([1e-300, 1.0], power=1e306), "words would never be drawn"),
        (lambda: unigram([1.0, 2.0], power=np.nan), "power nan: expected a finite number"),
        (lambda: unigram([1.0, 2.0], power=-np.inf), "power -inf: expected a finite number"),
        (
            lambda: sample(Uniform(5), jax.random.key(0), 6, jnp.zeros(1, jnp.int32), unique=True),
            "6 unique samples of 5",
        ),
        (lambda: sample(Uniform(5), jax.random.key(0), 0, jnp.zeros(1, jnp.int32)), "expected at least 1"),
    ):
        raises(message, call)
