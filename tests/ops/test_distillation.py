"""Losses of distillation: the papers' formulas recomputed in numpy, and torch's divergence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops import distillation as ops
from hpnlp.ops.attention import Causal, Full, Window

RNG = np.random.default_rng(0)
S, T = (RNG.normal(size=(6, 9)).astype(np.float32) * 3 for _ in range(2))
SCORES = [RNG.normal(size=(2, 3, 5, 5)).astype(np.float32) for _ in range(2)]
VISIBLE = np.tril(np.ones((5, 5), bool))[None, None] & (RNG.random((2, 1, 5, 5)) < 0.8) & np.ones((1, 3, 1, 1), bool)
VISIBLE[0, :, 2] = False  # a query that sees nothing


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence_is_soft_cross_entropy_less_entropy_times_squared_temperature(temperature):
    p, q = softmax(T / temperature), softmax(S / temperature)
    cross, entropy = -(p * np.log(q)).sum(-1), -(p * np.log(p)).sum(-1)
    expected = temperature**2 * (cross - entropy)
    np.testing.assert_allclose(ops.logit_divergence(S, T, temperature), expected, rtol=1e-5)
    # Hinton et al. 2015, eq. 2: dC/dz = (q - p) / T for the loss without the factor.
    gradient = jax.grad(lambda s: ops.logit_divergence(s, T, temperature).sum())(jnp.asarray(S))
    np.testing.assert_allclose(gradient, temperature * (q - p), rtol=1e-4, atol=1e-6)


def test_divergence_of_the_largest_logits_tends_to_that_of_all():
    order = np.argsort(-T, axis=-1)
    values = np.take_along_axis(T, order, -1)
    top = [np.asarray(ops.top_logit_divergence(S, values[:, :k], order[:, :k], 2.0)) for k in (2, 9)]
    np.testing.assert_allclose(top[1], ops.logit_divergence(S, T, 2.0), rtol=1e-5)
    p, log_q = softmax(values[:, :2] / 2), np.log(np.take_along_axis(softmax(S / 2), order[:, :2], -1))
    np.testing.assert_allclose(top[0], 4 * (p * (np.log(p) - log_q)).sum(-1), rtol=1e-5)


def test_classes_that_the_teacher_excludes_add_nothing():
    student, teacher = jnp.asarray([0.5, -1.0, 2.0]), jnp.asarray([1.0, -jnp.inf, 0.0])

    def both(student):
        of_all = ops.logit_divergence(student, teacher)
        return of_all, ops.top_logit_divergence(student, teacher[jnp.asarray([0, 2, 1])], jnp.asarray([0, 2, 1]))

    for index in range(2):
        value, gradient = jax.value_and_grad(lambda x, i=index: both(x)[i])(student)
        p, q = jax.nn.softmax(teacher), jax.nn.softmax(student)
        assert float(value) == pytest.approx(float((p * jnp.log(p / q))[jnp.asarray([0, 2])].sum()), rel=1e-5)
        np.testing.assert_allclose(gradient, q - p, atol=1e-6)


def test_distances_match_their_formulas():
    np.testing.assert_allclose(ops.logit_regression(S, T), 0.5 * ((S - T) ** 2).sum(-1), rtol=1e-5)
    cosine = (S * T).sum(-1) / np.linalg.norm(S, axis=-1) / np.linalg.norm(T, axis=-1)
    np.testing.assert_allclose(ops.cosine_distance(S, T), 1 - cosine, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ops.squared_error(S, T), ((S - T) ** 2).mean(-1), rtol=1e-5)
    normed = [(x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) for x in (S, T)]
    np.testing.assert_allclose(ops.feature_map_error(S, T), ((normed[0] - normed[1]) ** 2).mean(-1), rtol=1e-4)
    zeros = np.zeros_like(S)
    for distance in (ops.cosine_distance, ops.feature_map_error):
        value, gradient = jax.value_and_grad(lambda s, f=distance: f(s, T).sum())(jnp.asarray(zeros))
        assert np.isfinite(value) and np.isfinite(gradient).all()


def test_attention_losses_leave_out_pairs_that_may_not_attend():
    student, teacher = SCORES
    total, count = ops.score_error(student, teacher, VISIBLE)
    np.testing.assert_allclose(total, ((student - teacher) ** 2)[VISIBLE].sum(), rtol=1e-5)
    assert float(count) == VISIBLE.sum()
    p, q = (softmax(np.where(VISIBLE, x, -1e30)) for x in (teacher, student))
    sees = VISIBLE.any(-1)
    terms = np.where(VISIBLE, p * (np.log(np.where(VISIBLE, p, 1)) - np.log(np.where(VISIBLE, q, 1))), 0).sum(-1)
    total, count = ops.attention_divergence(student, teacher, VISIBLE)
    np.testing.assert_allclose(total, terms[sees].sum(), rtol=1e-5)
    assert float(count) == sees.sum() < sees.size
    hidden = np.where(VISIBLE, student, np.float32(7e4))
    for loss in (ops.score_error, ops.attention_divergence):
        values = [loss(x, teacher, VISIBLE)[0] for x in (student, hidden)]
        np.testing.assert_array_equal(*values)
        gradient = jax.grad(lambda s, f=loss: f(s, teacher, VISIBLE)[0])(jnp.asarray(hidden))
        assert np.isfinite(gradient).all() and not np.any(np.asarray(gradient)[~VISIBLE])


def test_scores_are_scaled_products_of_grouped_heads():
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 5, 4, 3)).astype(np.float32), rng.normal(size=(2, 5, 2, 3)).astype(np.float32)
    segments = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 0, 0]])
    positions = np.array([[0, 1, 0, 1, 0], [0, 1, 2, 0, 0]])
    products = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, 2, axis=2))
    scores, visible = ops.attention_scores(q, k, Causal(), segments)
    np.testing.assert_allclose(scores, products / np.sqrt(3), rtol=1e-5, atol=1e-6)
    same = (segments[:, :, None] == segments[:, None]) & (segments > 0)[:, :, None]
    np.testing.assert_array_equal(visible, np.broadcast_to((same & np.tri(5, dtype=bool))[:, None], (2, 4, 5, 5)))
    capped, visible = ops.attention_scores(q, k, Full() & Window(1, 1), segments, positions, scale=0.5, soft_cap=2.0)
    np.testing.assert_allclose(capped, 2 * np.tanh(products / 4), rtol=1e-5, atol=1e-6)
    near = np.abs(positions[:, :, None] - positions[:, None]) <= 1
    np.testing.assert_array_equal(visible[:, 0], same & near)


@pytest.mark.oracle
def test_divergence_matches_torch():
    torch = pytest.importorskip("torch")
    s, t = (torch.tensor(x) for x in (S, T))
    loss = torch.nn.KLDivLoss(reduction="batchmean")
    expected = loss(torch.log_softmax(s / 2, -1), torch.softmax(t / 2, -1)) * 4
    np.testing.assert_allclose(ops.logit_divergence(S, T, 2.0).mean(), expected, rtol=1e-5)
    cosine = torch.nn.CosineEmbeddingLoss()(s, t, torch.ones(6))
    np.testing.assert_allclose(ops.cosine_distance(S, T).mean(), cosine, rtol=1e-5)
