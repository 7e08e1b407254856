"""Low-rank matrices against numpy's singular value decomposition."""

import numpy as np

from hpnlp.ops.linear import linear
from hpnlp.ops.softmax import logits
from hpnlp.ops.weights import LowRankWeight, factorize, quantize
from hpnlp.ops.weights.low_rank import rank_by_energy, rank_for_share
from tests.messages import raises

RNG = np.random.default_rng(0)
W = RNG.normal(size=(12, 9)).astype(np.float32)


def truncated(w, rank):
    u, s, v = np.linalg.svd(np.float64(w), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


def test_factors_are_the_largest_singular_vectors():
    weight = factorize(W, 4)
    np.testing.assert_allclose(weight.dense(), truncated(W, 4), atol=1e-5)
    np.testing.assert_allclose(factorize(W, 9).dense(), W, atol=1e-5)
    x, ids = np.random.default_rng(1).normal(size=(5, 12)).astype(np.float32), np.array([[3, 0]])
    np.testing.assert_allclose(linear(x, weight), x @ truncated(W, 4), atol=1e-5)
    np.testing.assert_allclose(logits(x[:, :9], weight), x[:, :9] @ truncated(W, 4).T, atol=1e-5)
    np.testing.assert_allclose(weight[ids], truncated(W, 4)[ids], atol=1e-5)
    assert weight.axes(("layers", "embed", "mlp")).left == ("layers", "embed", None)


def test_factors_may_be_weights():
    weight = factorize(W, 4)
    small = LowRankWeight(quantize(weight.left, integer_products=False), quantize(weight.right, integer_products=False))
    x = np.random.default_rng(1).normal(size=(5, 12)).astype(np.float32)
    matrix = np.asarray(small.left.dense() @ small.right.dense())
    np.testing.assert_allclose(small.dense(), matrix, atol=1e-6)
    np.testing.assert_allclose(linear(x, small), x @ matrix, atol=1e-5)
    np.testing.assert_allclose(logits(x[:, :9], small), x[:, :9] @ matrix.T, atol=1e-5)
    np.testing.assert_allclose(small[np.array([1, 2])], matrix[1:3], atol=1e-6)
    assert small.axes(("embed", "mlp")).left.codes == ("embed", None)


def test_weighted_factors_have_the_least_error_on_the_inputs():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 12)) * np.geomspace(1, 0.01, 12)
    x = (x @ np.linalg.qr(rng.normal(size=(12, 12)))[0]).astype(np.float32)
    weight = factorize(W, 3, covariance=x.T @ x / len(x))
    error, plain = (np.linalg.norm(x @ W - x @ np.asarray(f.dense())) for f in (weight, factorize(W, 3)))
    best = np.linalg.norm(x @ W - truncated(x @ W, 3))  # no product of rank 3 is nearer
    assert error < 1.01 * best < plain


def test_matrices_without_inputs_have_the_factors_of_the_matrix():
    factors = factorize(W, 3, covariance=np.zeros((12, 12), np.float32))
    np.testing.assert_allclose(factors.dense(), factorize(W, 3).dense(), atol=1e-5)


def test_ranks():
    assert rank_for_share((100, 100), 0.5) == 25
    assert rank_for_share((2, 2), 0.01) == 1
    assert rank_by_energy(np.array([3.0, 1.0, 0.0]), 0.9) == 1
    assert rank_by_energy(np.array([3.0, 1.0, 0.0]), 0.91) == 2
    assert rank_by_energy(np.array([3.0, 1.0, 1.0]), 1.0) == 3
    raises("expected 1 to 9", factorize, W, 10)
