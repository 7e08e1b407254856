"""Sampled losses against stored results of TensorFlow, the exact loss, and the claims of their papers."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.softmax import linear_cross_entropy
from hpnlp.ops.softmax.proposals import LogUniform, Samples, Uniform, sample, unigram
from hpnlp.ops.softmax.sampled_losses import (
    adaptive_importance_sampling,
    hits,
    importance_sampling,
    negative_sampling,
    noise_contrastive,
    sampled_softmax,
    scores,
)  # fmt: skip
from tests.contracts import assert_close, assert_float16_has_gradients, once

FROZEN = dict(np.load(Path(__file__).parent / "fixtures" / "tensorflow_losses.npz"))


def frozen(*names):
    return [jnp.asarray(FROZEN[name], jnp.int32 if FROZEN[name].dtype == np.int64 else None) for name in names]


@pytest.mark.parametrize("name", ["sampled_softmax", "nce"])
def test_matches_tensorflow(name):
    h, w, labels, ids, log_q = frozen("h", "w", "labels", "ids", "log_q")
    log_count = np.float32(np.log(len(ids)))
    samples = Samples(ids, log_q[ids] + log_count, log_q[labels] + log_count)

    def loss(h, w):
        target, noise = scores(h, w[labels], w[ids])
        if name == "nce":
            losses = noise_contrastive(target, noise, samples)
        else:
            losses = sampled_softmax(target, noise, samples, labels, correct_label=True)
        return (losses * jnp.cos(jnp.arange(len(losses), dtype=jnp.float32))).sum(), losses

    (_, losses), grads = once(jax.value_and_grad(loss, (0, 1), has_aux=True), h, w)
    assert hits(samples, labels).sum() >= 2
    np.testing.assert_allclose(losses, FROZEN[f"{name}_loss"], rtol=2e-6, atol=2e-6)
    for actual, side in zip(grads, ("dh", "dw"), strict=True):
        np.testing.assert_allclose(actual, FROZEN[f"{name}_{side}"], rtol=1e-5, atol=2e-6)


def test_expected_counts_match_tensorflow():
    """All expected counts are 1 - (1 - q)^tries; TensorFlow's number of tries follows from the count of one word."""
    from hpnlp.ops.softmax.proposals import _log_inclusion

    expected = FROZEN["unique_expected"].astype(np.float64)
    log_q = once(LogUniform(len(expected)).log_prob, jnp.arange(len(expected), dtype=jnp.int32))
    tries = np.round(np.log1p(-expected[9]) / np.log1p(-np.exp(float(log_q[9]))))
    assert tries > len(FROZEN["unique_ids"])
    np.testing.assert_allclose(np.exp(once(_log_inclusion, log_q, jnp.float32(tries))), expected, rtol=1e-5)


def test_shared_and_per_token_samples_have_the_same_scores():
    h, w = frozen("h", "w")
    ids = jnp.array([[3, 1], [0, 0], [2, 39], [5, 5], [7, 8], [9, 1]])
    target, noise = once(lambda h, w: scores(h, w[:6], w[ids]), h, w)
    full = np.asarray(h, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(noise, np.take_along_axis(full, np.asarray(ids), axis=1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(target, full[np.arange(6), np.arange(6)], rtol=1e-5, atol=1e-6)
    assert scores(h.astype(jnp.bfloat16), w[:6], w[ids])[1].dtype == jnp.float32


@pytest.mark.parametrize(
    "form", ["shared", pytest.param("own", marks=pytest.mark.slow), pytest.param("adaptive", marks=pytest.mark.slow)]
)
def test_small_gradients_do_not_underflow_in_float16(form):
    h, w, labels = problem()
    samples = drawn(64, form == "own")

    def loss(h, w):
        target, noise = 100 * w[labels], 100 * w[samples.ids]
        if form == "adaptive":
            losses, *_ = adaptive_importance_sampling(h, target, noise, samples, effective=64.0, block=32)
        else:
            losses = sampled_softmax(*scores(h, target, noise), samples, labels)
        return losses.sum() * 1e-7

    assert_float16_has_gradients(loss, h / 100, w)


# Gradients of many draws against the exact one

VOCAB, TOKENS, DIM = 1000, 16, 8


def problem():
    """Frequent words are frequent labels; scores have a standard deviation of 1.5."""
    rng = np.random.default_rng(0)
    q = np.log1p(1 / np.arange(1.0, VOCAB + 1)) / np.log(VOCAB + 1)
    labels = jnp.asarray(rng.choice(VOCAB, TOKENS, p=q / q.sum()), jnp.int32)
    h, w = (jnp.asarray(rng.standard_normal((count, DIM)).astype(jnp.float32)) for count in (TOKENS, VOCAB))
    return 1.5 / DIM**0.5 * h, w, labels


@functools.cache
def drawn(count, per_token=False):
    """Samples for the labels of `problem`."""
    run = lambda labels: sample(LogUniform(VOCAB), jax.random.key(0), count, labels, per_token=per_token)  # noqa: E731
    return once(run, problem()[2])


def mean_gradient(loss, draws):
    """Norm of the error of the mean gradient by h over many draws, and its standard error, relative to the exact gradient."""
    h, w, labels = problem()
    exact = once(jax.grad(lambda h: linear_cross_entropy(h, w, labels, reduction="sum")), h)
    keys = jax.random.split(jax.random.key(4), draws)
    losses = once(jax.vmap(jax.grad(lambda h, key: loss(h, w, labels, key).sum()), (None, 0)), h, keys)
    norm = np.linalg.norm(exact)
    error = np.sqrt(np.asarray(losses).var(axis=0).sum() / draws) / norm
    return np.linalg.norm(np.asarray(losses).mean(axis=0) - exact) / norm, error


def softmax_of(count, unique=False, **options):
    def loss(h, w, labels, key):
        samples = sample(LogUniform(VOCAB), key, count, labels, unique=unique)

        return sampled_softmax(*scores(h, w[labels], w[samples.ids]), samples, labels, **options)

    return loss


def importance_of(count):
    def loss(h, w, labels, key):
        samples = sample(LogUniform(VOCAB), key, count, labels)
        return importance_sampling(*scores(h, w[labels], w[samples.ids]), samples)[0]

    return loss


@pytest.mark.parametrize("loss", [softmax_of, pytest.param(importance_of, marks=pytest.mark.slow)])
def test_gradient_bias_falls_with_the_number_of_samples(loss):
    """Nearly as 1 / S, the claimed rate, where the bias exceeds the standard error."""
    few, many = (mean_gradient(loss(count), draws) for count, draws in ((64, 300), (900, 300)))
    assert few[0] > 4 * few[1] and many[0] < 0.03
    assert many[0] < few[0] / 3


def test_gradient_bias_of_unique_samples_is_small():
    assert mean_gradient(softmax_of(VOCAB // 4, unique=True), 300)[0] < 0.04


def test_uncorrected_label_loss_approaches_the_exact_loss():
    """It approaches the exact loss from below as samples grow; TensorFlow's form does not."""
    h, w, labels = problem()
    exact = float(once(linear_cross_entropy, h, w, labels))
    keys = jax.random.split(jax.random.key(1), 100)
    loss = lambda count, **padded_h: np.mean(  # noqa: E731
        once(jax.vmap(lambda key: softmax_of(count, **padded_h)(h, w, labels, key).mean()), keys)
    )
    actual = [loss(count) for count in (8, 64, 900)]
    assert actual[0] < actual[1] < actual[2] < exact and exact - actual[2] < 0.03
    assert abs(loss(900, correct_label=True) - exact) > 0.3


def test_whole_vocabulary_as_samples_gives_the_exact_softmax():
    """With every word once and expected counts of 1, the loss is exact, with and without accidental hits."""
    h, w, labels = problem()
    every = Samples(jnp.arange(VOCAB, dtype=jnp.int32), jnp.zeros(VOCAB), jnp.zeros(TOKENS))
    exact = once(jax.value_and_grad(lambda h: linear_cross_entropy(h, w, labels, reduction="sum")), h)
    for loss in (
        sampled_softmax,
        lambda target, noise, samples, labels: importance_sampling(target, noise, samples)[0],
    ):
        run = jax.value_and_grad(lambda h: loss(*scores(h, w[labels], w), every, labels).sum())  # noqa: B023
        assert_close(once(run, h), exact)


def test_accidental_hits_only_give_zero_loss():
    samples = Samples(jnp.array([4]), jnp.zeros(1), jnp.zeros(2))
    run = lambda t, n: sampled_softmax(t, n, samples, jnp.array([4, 4])).sum()  # noqa: E731
    loss, grads = once(jax.value_and_grad(run, (0, 1)), jnp.array([1.0, -2.0]), jnp.array([[1.0], [-2.0]]))
    assert loss == 0 and not np.asarray(grads[0]).any() and not np.asarray(grads[1]).any()


def test_nan_scores_give_nan():
    samples = Samples(jnp.arange(4), jnp.zeros(4), jnp.zeros(2))
    losses = once(
        lambda t, n: sampled_softmax(t, n, samples, jnp.array([5, 5])), jnp.zeros(2), jnp.full((2, 4), jnp.nan)
    )
    assert np.isnan(losses).all()


def test_padding_does_not_change_the_number_of_samples_used():
    h, w, labels = problem()
    samples = drawn(256)
    options = {"effective": 30.0, "block": 32}
    run = lambda h, labels, weights: adaptive_importance_sampling(  # noqa: E731
        h, w[labels], w[samples.ids], samples, weights=weights, **options
    )
    h = 0.2 * np.asarray(h)
    losses, _, used = once(run, h, labels, np.ones(TOKENS, np.float32))
    padded_h = np.concatenate([h, np.zeros((3 * TOKENS, DIM), np.float32)])
    weights = np.repeat(np.float32([1, 0]), [TOKENS, 3 * TOKENS])
    padded, _, used_with_padding = once(run, padded_h, np.tile(labels, 4), weights)
    assert used_with_padding == used < 256
    np.testing.assert_allclose(padded[:TOKENS], losses, rtol=1e-6)


def test_effective_sample_size():
    samples = Samples(jnp.arange(4), jnp.zeros(4), jnp.zeros(3))
    noise = jnp.log(jnp.array([[1.0, 1.0, 1.0, 1.0], [1.0, 1e-9, 1e-9, 1e-9], [3.0, 1.0, 1e-9, 1e-9]]))
    _, size = once(importance_sampling, jnp.zeros(3), noise, samples)
    np.testing.assert_allclose(size, [4, 1, 16 / 10], rtol=1e-5)


@pytest.mark.parametrize(("effective", "used"), [(0.0, 32), (None, None)])
def test_samples_are_used_until_the_effective_size_is_reached(effective, used):
    """Loss and gradient are those of the samples that were used; the other samples are NaN."""
    h, w, labels = problem()
    h, samples = 0.2 * h, drawn(256)

    def loss(h, w, noise, effective):
        losses, size, used = adaptive_importance_sampling(h, w[labels], noise, samples, effective=effective, block=32)
        return losses.sum(), (size, used)

    def first(count):
        return Samples(
            samples.ids[:count], samples.log_expected[:count] + np.float32(np.log(count / 256)), samples.labels_expected
        )

    if effective is None:
        sizes = [
            once(lambda n=n: importance_sampling(*scores(h, w[labels], w[first(n).ids]), first(n))[1].mean())
            for n in (96, 128)
        ]
        effective, used = float(sizes[1]) * 0.999, 128
        assert sizes[0] < effective
    run = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    noise = w[samples.ids].at[used:].set(jnp.nan)
    (total, (size, actual)), grads = once(lambda *x: run(*x, effective), h, w, noise)
    assert actual == used and (size <= used).all() and (size >= 0.999).all()

    def reference(h, w, noise):
        return importance_sampling(*scores(h, w[labels], noise[:used]), first(used))[0].sum()

    expected = once(jax.value_and_grad(reference, (0, 1, 2)), h, w, noise)
    np.testing.assert_allclose(total, expected[0], rtol=2e-6)
    assert_close(grads, expected[1])


def optimum(loss, sampler, draws=64, steps=300):
    """(frequencies of four words, scores that minimise the loss for labels of these frequencies)."""
    p = jnp.array([0.5, 0.3, 0.15, 0.05])

    def total(z, key):
        keys = jax.random.split(key, draws)

        def one(key):
            samples = sample(sampler, key, 8, jnp.arange(4, dtype=jnp.int32))
            return loss(z, jnp.broadcast_to(z[samples.ids][None], (4, 8)), samples)

        return (p * jax.vmap(one)(keys).mean(axis=0)).sum()

    def step(state, key):
        z, mean = state
        z = z - 0.5 * jax.grad(total)(z, key)
        return (z, 0.97 * mean + 0.03 * z), None

    run = lambda keys: jax.lax.scan(step, (jnp.zeros(4), jnp.zeros(4)), keys)[0][1]  # noqa: E731
    return np.asarray(p, np.float64), np.asarray(once(run, jax.random.split(jax.random.key(5), steps)), np.float64)


def test_noise_contrastive_optimum_is_log_probabilities():
    p, z = optimum(noise_contrastive, unigram([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_allclose(z, np.log(p), atol=0.08)


def test_negative_sampling_optimum_is_shifted_mutual_information():
    """The optimum is log(p / (S q)), so that a perplexity of it would be meaningless (Levy and Goldberg 2014)."""
    p, z = optimum(lambda t, n, samples: negative_sampling(t, n), Uniform(4))
    np.testing.assert_allclose(z, np.log(p / (8 * 0.25)), atol=0.08)


def test_samples_of_negative_sampling_count_as_fewer_noise_words():
    target, noise = np.array([0.3, -0.2], np.float32), np.array([[0.1, 0.7], [-0.4, 0.0]], np.float32)
    of_label, of_noise = np.log1p(np.exp(-target)), np.log1p(np.exp(noise)).sum(axis=1)
    scores = jnp.asarray(target), jnp.asarray(noise)
    np.testing.assert_allclose(negative_sampling(*scores), of_label + of_noise, rtol=1e-6)
    np.testing.assert_allclose(negative_sampling(*scores, 0.5), of_label + 0.25 * of_noise, rtol=1e-6)
