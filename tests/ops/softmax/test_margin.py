"""Ranking losses, against their definitions and torch's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.softmax.margin import hardest, margin_loss, triplet_loss
from hpnlp.types import InputError
from tests.contracts import assert_close, once


def test_the_hardest_are_the_best_that_are_wrong():
    rng = np.random.default_rng(0)
    scores, labels = rng.standard_normal((5, 9)).astype(np.float32), np.array([3, 0, 8, 4, 4], np.int32)
    ids = np.array([0, 1, 2, 3, 4, 5, 6, 7, -1], np.int32)  # the last is no candidate: label 8 has none
    values, found = once(
        functools.partial(hardest, count=8), jnp.asarray(scores), jnp.asarray(ids), jnp.asarray(labels)
    )
    for i, label in enumerate(labels):
        wrong = [j for j in np.argsort(-scores[i]) if ids[j] not in (label, -1)]
        expected = wrong + [-1] * (8 - len(wrong))
        np.testing.assert_array_equal(found[i], expected)
        np.testing.assert_array_equal(values[i], [scores[i, j] if j >= 0 else -np.inf for j in expected])
    own = jnp.broadcast_to(jnp.asarray(ids)[None], (5, 9))
    again = once(functools.partial(hardest, count=8), jnp.asarray(scores), own, jnp.asarray(labels))
    assert_close(again, (values, found))


def test_missing_negatives_count_for_nothing():
    target = jnp.array([1.0, 1.0, 3.0])
    negatives = jnp.array([[2.0, -jnp.inf], [-jnp.inf, -jnp.inf], [-5.0, 2.5]])
    run = jax.value_and_grad(lambda t, n: margin_loss(t, n, margin=1).sum(), (0, 1))
    each = once(margin_loss, target, negatives)
    np.testing.assert_allclose(each, [2.0, 0.0, 0.25])
    _, (dt, dn) = once(run, target, negatives)
    np.testing.assert_allclose(dt, [-1, 0, -0.5])
    np.testing.assert_allclose(dn, [[1, 0], [0, 0], [0, 0.5]])


def test_triplets_compare_squared_distances():
    rng = np.random.default_rng(1)
    h, label, negatives = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((4, 3), (4, 3), (4, 2, 3)))
    found = once(functools.partial(triplet_loss, margin=0.5), h, label, negatives)
    for i in range(4):
        near = np.sum((h[i] - label[i]) ** 2)
        each = [max(0, 0.5 + near - np.sum((h[i] - n) ** 2)) for n in negatives[i]]
        np.testing.assert_allclose(found[i], np.mean(each), rtol=1e-5)


@pytest.mark.parametrize("count", [0, 10])
def test_more_than_there_are(count):
    with pytest.raises(InputError, match="expected 1 to 9"):
        hardest(jnp.zeros((2, 9)), jnp.arange(9), jnp.zeros(2, jnp.int32), count)


@pytest.mark.oracle
def test_equals_torch():
    """torch's multi_margin_loss divides by the number of classes, of which ours has one less."""
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
