"""Ranking losses against their definitions and torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.softmax.margin import hardest, margin_loss, triplet_loss
from tests.contracts import assert_close, once
from tests.messages import raises


def test_hardest_are_the_best_candidates_except_the_label():
    rng = np.random.default_rng(0)
    scores, labels = rng.standard_normal((5, 9)).astype(np.float32), np.array([3, 0, 8, 4, 4], np.int32)
    ids = np.array([0, 1, 2, 3, 4, 5, 6, 7, -1], np.int32)  # the last is no candidate, so that label 8 is not excluded
    values, actual = once(
        functools.partial(hardest, count=8), jnp.asarray(scores), jnp.asarray(ids), jnp.asarray(labels)
    )
    for i, label in enumerate(labels):
        wrong = [j for j in np.argsort(-scores[i]) if ids[j] not in (label, -1)]
        expected = wrong + [-1] * (8 - len(wrong))
        np.testing.assert_array_equal(actual[i], expected)
        np.testing.assert_array_equal(values[i], [scores[i, j] if j >= 0 else -np.inf for j in expected])
    token_ids = jnp.broadcast_to(jnp.asarray(ids)[None], (5, 9))
    again = once(functools.partial(hardest, count=8), jnp.asarray(scores), token_ids, jnp.asarray(labels))
    assert_close(again, (values, actual))


def test_missing_negatives_do_not_contribute():
    target = jnp.array([1.0, 1.0, 3.0])
    negatives = jnp.array([[2.0, -jnp.inf], [-jnp.inf, -jnp.inf], [-5.0, 2.5]])
    run = jax.value_and_grad(lambda t, n: margin_loss(t, n, margin=1).sum(), (0, 1))
    losses = once(margin_loss, target, negatives)
    np.testing.assert_allclose(losses, [2.0, 0.0, 0.25])
    _, (dt, dn) = once(run, target, negatives)
    np.testing.assert_allclose(dt, [-1, 0, -0.5])
    np.testing.assert_allclose(dn, [[1, 0], [0, 0], [0, 0.5]])


def test_triplets_compare_squared_distances():
    rng = np.random.default_rng(1)
    h, label, negatives = (jnp.asarray(rng.standard_normal(s).astype(jnp.float32)) for s in ((4, 3), (4, 3), (4, 2, 3)))
    actual = once(functools.partial(triplet_loss, margin=0.5), h, label, negatives)
    for i in range(4):
        near = np.sum((h[i] - label[i]) ** 2)
        losses = [max(0, 0.5 + near - np.sum((h[i] - n) ** 2)) for n in negatives[i]]
        np.testing.assert_allclose(actual[i], np.mean(losses), rtol=1e-5)


def test_invalid_count_raises():
    for count in (0, 10):
        raises("expected 1 to 9", hardest, jnp.zeros((2, 9)), jnp.arange(9), jnp.zeros(2, jnp.int32), count)


@pytest.mark.oracle
def test_matches_torch():
    """multi_margin_loss of torch divides by the number of classes, margin_loss by one less."""
    import torch
    import torch.nn.functional as F

    rng = np.random.default_rng(2)
    scores, labels = rng.standard_normal((6, 7)).astype(np.float32), rng.integers(0, 7, 6)
    states = torch.from_numpy(scores).requires_grad_()
    theirs = F.multi_margin_loss(states, torch.from_numpy(labels), margin=0.7, reduction="sum") * 7 / 6
    theirs.backward()

    def ours(s):
        number = jnp.asarray(labels, jnp.int32)
        target = jnp.take_along_axis(s, number[:, None], axis=1)[:, 0]
        negatives, _ = hardest(s, jnp.arange(7, dtype=jnp.int32), number, 6)
        return margin_loss(target, negatives, margin=0.7).sum()

    loss, grad = once(jax.value_and_grad(ours), jnp.asarray(scores))
    np.testing.assert_allclose(loss, float(theirs.detach()), rtol=1e-6)
    np.testing.assert_allclose(grad, states.grad.numpy(), atol=1e-6)
