"""Adaptive softmax against its definition in float64 and against torch."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.softmax.structured import adaptive as module
from hpnlp.ops.softmax.structured.adaptive import (
    adaptive_log_probs,
    adaptive_nll,
    adaptive_sample,
    adaptive_shapes,
    adaptive_top_k,
)
from tests.contracts import ONCE, assert_close, once
from tests.messages import raises

N, D, V, CUTOFFS = 13, 16, 40, (7, 12)


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """A small width, so that tails take several products."""
    monkeypatch.setattr(module, "WIDTH", 5)


def parameters(dtype="float32", vocab=V, cutoffs=CUTOFFS, div_value=2.0):
    rng = np.random.default_rng(0)
    head, tails = jax.tree.map(
        lambda shape: jnp.asarray((rng.standard_normal(shape) / shape[1] ** 0.5).astype(dtype)),
        adaptive_shapes(D, vocab, cutoffs, div_value),
        is_leaf=lambda x: isinstance(x[0], int),
    )
    return head, tails, jnp.asarray(rng.standard_normal(head.shape[0]).astype(dtype))


def states(n=N, dtype="float32"):
    return jnp.asarray(np.random.default_rng(1).standard_normal((n, D)).astype(dtype))


def definition(h, head, tails, head_bias=0.0, cutoffs=CUTOFFS):
    """Log-probabilities [N, V], one token at a time, in float64."""
    h, head, head_bias = (np.asarray(x, np.float64) for x in (h, head, head_bias))
    log_softmax = lambda s: s - np.log(np.exp(s).sum())  # noqa: E731
    actual = []
    for x in h:
        entries = log_softmax(head @ x + head_bias)
        pieces = [entries[: cutoffs[0]]]
        for entry, (projection, words) in zip(entries[cutoffs[0] :], tails, strict=True):
            pieces.append(entry + log_softmax(np.asarray(words, np.float64) @ (np.asarray(projection, np.float64) @ x)))
        actual.append(np.concatenate(pieces))
    return np.stack(actual)


LABELS = {
    "all": np.arange(N) * 3 % V,
    "edges": np.array([0, 6, 7, 11, 12, 39, 0, 6, 7, 11, 12, 39, 0]),
    "head": np.arange(N) % 7,
    "one tail": 12 + np.arange(N),
    "one token in the last tail": np.where(np.arange(N) == 4, 39, 0),
}


def weighted_sum(losses):
    return jnp.sum(losses * jnp.cos(jnp.arange(losses.size, dtype=jnp.float32)))


@functools.cache
def program():
    """((loss, losses), gradients) of adaptive_nll, and ((loss, log_probs), gradients) of adaptive_log_probs."""

    def run(h, head, tails, bias, labels):
        def fast(h, head, tails, bias):
            losses = adaptive_nll(h, head, tails, labels, CUTOFFS, head_bias=bias, block=4)
            return weighted_sum(losses), losses

        def slow(h, head, tails, bias):
            log_probs = adaptive_log_probs(h, head, tails, CUTOFFS, head_bias=bias)
            return weighted_sum(-jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]), log_probs

        return tuple(jax.value_and_grad(f, (0, 1, 2, 3), has_aux=True)(h, head, tails, bias) for f in (fast, slow))

    return jax.jit(run, compiler_options=ONCE)


@functools.cache
def top(k):
    run = lambda h, head, tails, bias: adaptive_top_k(h, head, tails, CUTOFFS, k, head_bias=bias)  # noqa: E731
    return jax.jit(run, compiler_options=ONCE)


def test_losses_and_gradients_match_definition():
    h, (head, tails, bias) = states(), parameters()
    expected = definition(h, head, tails, bias)
    np.testing.assert_allclose(np.exp(expected).sum(axis=1), 1)
    for labels in LABELS.values():
        fast, slow = program()(h, head, tails, bias, jnp.asarray(labels, jnp.int32))
        np.testing.assert_allclose(fast[0][1], -expected[np.arange(N), labels], rtol=2e-6)
        np.testing.assert_allclose(slow[0][1], expected, rtol=2e-6)
        assert fast[0][1].dtype == slow[0][1].dtype == jnp.float32
        assert_close(fast[1], slow[1])


def test_one_token_and_one_cutoff_without_bias():
    head, tails, _ = parameters(cutoffs=(1,))
    h = states(1)
    losses = once(lambda *arguments: adaptive_nll(*arguments, (1,)), h, head, tails, jnp.array([V - 1]))
    np.testing.assert_allclose(losses, -definition(h, head, tails, cutoffs=(1,))[:, -1], rtol=2e-6)


def test_tails_without_labels_are_not_read():
    h, (head, tails, bias) = states(), parameters()
    labels = jnp.asarray(np.where(np.arange(N) % 2, 12 + np.arange(N), 3), jnp.int32)
    dirty = (jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tails[0]), tails[1])
    actual, expected = (program()(h, head, arguments, bias, labels)[0] for arguments in (dirty, tails))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bfloat16_matches_definition():
    """Projected states are rounded to bfloat16, as in torch."""
    h, (head, tails, _) = states(dtype="bfloat16"), parameters("bfloat16")
    labels = LABELS["all"]
    losses = once(lambda *arguments: adaptive_nll(*arguments, jnp.asarray(labels), CUTOFFS), h, head, tails)
    assert losses.dtype == jnp.float32
    expected = definition(h, head, tails)[np.arange(N), labels]
    np.testing.assert_allclose(losses[labels < 7], -expected[labels < 7], rtol=1e-5)
    np.testing.assert_allclose(losses, -expected, atol=2e-2)


def test_top_k_matches_sorting_all_words():
    h, (head, tails, bias) = states(), parameters()
    h = 2 * h  # so that some tokens visit a tail and others none
    expected = definition(h, head, tails, bias)
    best = np.argsort(-expected, axis=1)
    for k in (9, V):
        values, ids = top(k)(h, head, tails, bias)
        np.testing.assert_array_equal(ids, best[:, :k])
        np.testing.assert_allclose(values, np.take_along_axis(expected, best[:, :k], axis=1), rtol=5e-6)


def test_top_k_skips_tails_below_the_bound():
    h, (head, tails, bias) = states(), parameters()
    bias = jnp.where(jnp.arange(bias.size) < 8, 100.0, 0.0)  # the head's words and the first tail
    dirty = (tails[0], jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tails[1]))
    values, ids = top(9)(h, head, dirty, bias)
    assert np.isfinite(values).all() and (np.asarray(ids) < 12).all()


def test_samples_follow_the_distribution():
    h, (head, tails, bias) = states(1), parameters()
    p = np.exp(definition(h, head, tails, bias)[0])
    n = 20_000
    draw = functools.partial(adaptive_sample, cutoffs=CUTOFFS, key=jax.random.key(0), head_bias=bias)
    actual = np.bincount(once(draw, jnp.tile(h, (n, 1)), head, tails), minlength=V)
    assert actual.size == V
    # 39 degrees of freedom: 81 is passed once in 10,000 keys.
    assert ((actual - n * p) ** 2 / (n * p)).sum() < 81


def test_invalid_labels_give_nan_or_raise():
    """Traced labels give NaN and no gradient; known labels raise."""
    h, (head, tails, bias) = states(), parameters()
    wrong = np.isin(np.arange(N), [2, 5])
    labels = np.where(wrong, [-100, V] * 6 + [V], LABELS["all"])
    (_, losses), slopes = program()(h, head, tails, bias, jnp.asarray(labels, jnp.int32))[0]
    np.testing.assert_array_equal(np.isnan(losses), wrong)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))
    np.testing.assert_array_equal(np.asarray(slopes[0]).any(axis=1), ~wrong)
    for label in (-1, V):
        raises(f"label is {label}: expected 0 to 39", adaptive_nll, h, head, tails, jnp.full(N, label), CUTOFFS)


def test_invalid_cutoffs_raise():
    for call, message in (
        (lambda: adaptive_shapes(16, 40, (7, 7)), "rising"),
        (lambda: adaptive_shapes(16, 40, (9, 7)), "rising"),
        (lambda: adaptive_shapes(16, 40, (0, 7)), "from 1 on"),
        (lambda: adaptive_shapes(16, 40, ()), "cutoffs \\(\\)"),
        (lambda: adaptive_shapes(16, 40, (7, 40)), "last under the vocabulary of 40"),
        (lambda: adaptive_shapes(16, 40, CUTOFFS, 16.0), "\\[1, 0\\] wide"),
    ):
        raises(message, call)


def test_mismatched_shapes_raise():
    h, (head, tails, bias) = states(), parameters()
    labels = jnp.zeros(N, jnp.int32)
    wrong = {
        "2 tails, cutoffs .7,.": (head, tails, (7,), bias),
        "head has shape .9, 16.: expected .10, 16.": (head, tails, (8, 12), bias),
        "head_bias has shape .8,.: expected .9,.": (head, tails, CUTOFFS, bias[1:]),
        "tail 0 has shapes .8, 16., .5, 8.: expected .8, 16., .6, 8.": (head, tails, (7, 13), bias),
        "tail 1 has shapes": (head, (tails[0], (tails[0][0], tails[1][1])), CUTOFFS, bias),
    }
    unchecked = inspect.unwrap(adaptive_nll)  # beartype would raise first
    for message, (head, tails, cutoffs, head_bias) in wrong.items():
        raises(message, unchecked, h, head, tails, labels, cutoffs, head_bias=head_bias)
    raises("k 41: expected 1 to 40", lambda: adaptive_top_k(h, *parameters()[:2], CUTOFFS, 41))


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("vocab", "dim", "cutoffs", "div_value", "head_bias"),
    [(101, 32, (10, 40, 77), 2.0, True), (53, 16, (20,), 4.0, False)],
)
def test_matches_torch(vocab, dim, cutoffs, div_value, head_bias):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(dim, vocab, list(cutoffs), div_value, head_bias)
    head, tails = theirs.head.weight, [(tail[0].weight, tail[1].weight) for tail in theirs.tail]
    to_jax = lambda x: jnp.asarray(x.detach().numpy())  # noqa: E731
    to_jax_tails = [(to_jax(a), to_jax(b)) for a, b in tails]
    assert adaptive_shapes(dim, vocab, cutoffs, div_value) == (
        tuple(head.shape), tuple((tuple(a.shape), tuple(b.shape)) for a, b in tails)
    )  # fmt: skip
    bias = to_jax(theirs.head.bias) if head_bias else None
    h = torch.randn(67, dim, requires_grad=True)
    labels = torch.arange(67) * 7 % vocab
    output, loss = theirs(h, labels)
    output.backward(torch.cos(torch.arange(67.0)))

    def ours(h, head, tails, bias):
        return -adaptive_nll(h, head, tails, jnp.asarray(labels.numpy(), jnp.int32), cutoffs, head_bias=bias, block=8)

    losses, pull = jax.vjp(jax.jit(ours), to_jax(h), to_jax(head), to_jax_tails, bias)
    np.testing.assert_allclose(losses, output.detach().numpy(), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(-losses.mean(), loss.detach().numpy(), rtol=2e-6)
    expected = (h, head, tails, theirs.head.bias if head_bias else None)
    expected = jax.tree.leaves(jax.tree.map(lambda x: x.grad.numpy(), expected))
    for actual, reference in zip(jax.tree.leaves(pull(jnp.cos(jnp.arange(67.0)))), expected, strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-5)

    arguments = to_jax(h), to_jax(head), to_jax_tails, cutoffs
    log_probs = adaptive_log_probs(*arguments, head_bias=bias)
    np.testing.assert_allclose(log_probs, theirs.log_prob(h).detach().numpy(), rtol=2e-6, atol=2e-6)
    _, ids = adaptive_top_k(*arguments, 1, head_bias=bias)
    np.testing.assert_array_equal(ids[:, 0], theirs.predict(h).numpy())
