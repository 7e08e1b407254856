"""Masks, blocks, two of four, and shared values, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.linear import linear
from hpnlp.ops.weights import MaskedWeight, cluster, keep_balanced, keep_blocks, keep_two_of_four, masked
from hpnlp.ops.weights.sparse import largest
from tests.messages import raises

RNG = np.random.default_rng(0)
W = RNG.normal(size=(20, 12)).astype(np.float32)
X = RNG.normal(size=(5, 20)).astype(np.float32)


def test_masks_keep_the_largest_magnitudes():
    weight = masked(W, 0.3)
    threshold = np.sort(np.abs(W).ravel())[-72]
    np.testing.assert_array_equal(weight.dense(), np.where(np.abs(W) >= threshold, W, 0))
    gradient = jax.grad(lambda values: linear(X, MaskedWeight(values, weight.mask)).sum())(jnp.asarray(W))
    np.testing.assert_allclose(gradient, np.where(weight.mask, X.sum(0)[:, None], 0), rtol=1e-5, atol=1e-6)
    hidden = MaskedWeight(np.where(weight.mask, W, np.nan), weight.mask)
    np.testing.assert_array_equal(linear(X, hidden), linear(X, weight))


@pytest.mark.parametrize(("share", "count"), [(0.0, 1), (0.5, 12), (1.0, 24)])
def test_the_first_of_equal_scores_are_in_the_mask(share, count):
    found = jax.jit(largest)(jnp.zeros((4, 6)), jnp.asarray(share))  # the share of a schedule is traced
    np.testing.assert_array_equal(found.ravel(), np.arange(24) < count)


@pytest.mark.parametrize("block", [1, 4])
def test_blocks_of_the_largest_norm_are_kept(block):
    weight = keep_blocks(W, 0.4, block)
    norms = (W.reshape(20 // block, block, 12 // block, block) ** 2).sum((1, 3))
    count = round(0.4 * (20 // block))
    kept = norms >= np.sort(norms, axis=0)[-count]
    expected = W * np.repeat(np.repeat(kept, block, 0), block, 1)
    np.testing.assert_array_equal(weight.dense(), expected)
    np.testing.assert_allclose(linear(X, weight), X @ expected, atol=1e-5)
    gradient = jax.grad(lambda weight: linear(X, weight).sum(), allow_int=True)(weight).blocks
    outer = np.tile(X.sum(0)[:, None], 12).reshape(20 // block, block, 12 // block, block).transpose(2, 0, 1, 3)
    taken = np.take_along_axis(outer, np.asarray(weight.indices)[:, :, None, None], axis=1)
    np.testing.assert_allclose(gradient, taken, rtol=1e-5, atol=1e-5)


def test_equally_many_numbers_of_each_column_are_kept():
    w = np.where(np.arange(12) == 3, 0.0, W).astype(np.float32)  # a column of zeros has its numbers, too
    weight = keep_balanced(w, 0.33)
    rank = np.argsort(np.argsort(-np.abs(w), axis=0, kind="stable"), axis=0)
    expected = np.where(rank < 8, w, 0)
    np.testing.assert_array_equal(weight.dense(), expected)
    assert weight.values.shape == (8, 12) and (np.diff(weight.indices.astype(int), axis=0) > 0).all()
    np.testing.assert_allclose(linear(X, weight), X @ expected, atol=1e-5)
    gradient = jax.grad(lambda weight: linear(X, weight).sum(), allow_int=True)(weight).values
    np.testing.assert_allclose(gradient, X.sum(0)[np.asarray(weight.indices)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [12, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (4, 20))])
def test_two_of_four_rows_are_kept(rows):
    w = W[:rows]
    groups = w.reshape(-1, 4, 12)
    kept = np.argsort(np.argsort(-np.abs(groups), axis=1), axis=1) < 2
    weight = keep_two_of_four(w)
    np.testing.assert_array_equal(weight.dense(), np.where(kept, groups, 0).reshape(rows, 12))
    assert weight.values.shape == (rows // 2, 12)
    assert weight.positions.shape == (-(-rows // 8), 12)
    gradient = jax.grad(lambda weight: linear(X[:, :rows], weight).sum(), allow_int=True)(weight).values
    outer = np.tile(X[:, :rows].sum(0)[:, None], 12).reshape(-1, 4, 12)
    expected = np.take_along_axis(outer, np.sort(np.argsort(-np.abs(groups), axis=1)[:, :2], axis=1), axis=1)
    np.testing.assert_allclose(gradient, expected.reshape(rows // 2, 12), rtol=1e-5)


def lloyd(w, centroids, counted, iterations):
    for _ in range(iterations):
        nearest = np.abs(w[:, None] - centroids).argmin(1)
        means = [w[counted & (nearest == k)] for k in range(len(centroids))]
        centroids = np.array([m.mean() if m.size else c for m, c in zip(means, centroids, strict=True)])
    return centroids


@pytest.mark.parametrize("keep_zeros", [False, True])
def test_shared_values_are_means_of_clusters(keep_zeros):
    w = np.where(np.abs(W) < 0.6, 0, W) if keep_zeros else W
    flat = w.ravel().astype(np.float64)
    counted = flat != 0 if keep_zeros else np.ones(flat.size, bool)
    centroids = lloyd(flat, np.linspace(flat.min(), flat.max(), 8 - keep_zeros), counted, 20)
    centroids = np.sort([*centroids, 0.0]) if keep_zeros else centroids
    weight = cluster(w, 8, keep_zeros=keep_zeros, iterations=20)
    np.testing.assert_allclose(np.sort(weight.values), centroids, rtol=1e-4, atol=1e-6)
    expected = centroids[np.abs(flat[:, None] - centroids).argmin(1)].reshape(w.shape)
    np.testing.assert_allclose(weight.dense(), expected, rtol=1e-4, atol=1e-6)
    if keep_zeros:
        assert (np.asarray(weight.codes)[w == 0] == 0).all() and weight.values[0] == 0
    gradient = jax.grad(lambda weight: linear(X, weight).sum(), allow_int=True)(weight).values
    outer = np.tile(X.sum(0)[:, None], 12).ravel()
    np.testing.assert_allclose(
        gradient, np.bincount(np.asarray(weight.codes).ravel(), outer, minlength=8), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("keep_zeros", [False, True])
def test_few_numbers_stay_as_they_are(keep_zeros):
    w = np.float32([-0.3, 0.0, 0.01, 0.011, 8.0])[np.random.default_rng(0).integers(0, 5, (6, 7))]
    np.testing.assert_array_equal(cluster(w, 5, keep_zeros=keep_zeros).dense(), w)


@pytest.mark.slow
def test_small_clusters_beside_millions_of_numbers_have_their_means():
    w = np.full((1500, 2000), 0.1234567, np.float32)
    w[0, :12] = np.linspace(0.9, 1.0, 12) ** 3
    values = np.sort(cluster(w, 8, iterations=3).values)
    centroids = np.linspace(w.min(), 1, 8)
    numbers, counts = np.unique(w.astype(np.float64), return_counts=True)
    for _ in range(3):
        nearest = np.abs(numbers[:, None] - centroids).argmin(1)
        sizes, sums = (np.bincount(nearest, x, minlength=8) for x in (counts, counts * numbers))
        centroids = np.where(sizes > 0, sums / np.maximum(sizes, 1), centroids)
    np.testing.assert_allclose(values, centroids, rtol=2e-5)


def test_nan_makes_shared_values_nan():
    w = W.copy()
    w[3, 3] = np.nan
    assert np.isnan(cluster(w, 4).dense()).all()


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: masked(W, 0.0), "over 0 and at most 1"),
        (lambda: keep_balanced(W, 0), "over 0 and at most 1"),
        (lambda: keep_blocks(W, 1.5), "over 0 and at most 1"),
        (lambda: keep_blocks(W, 0.5, 8), "common divisor of the 20 rows and 12 columns"),
        (lambda: keep_two_of_four(W[:6]), "a multiple of 4 rows, not 6"),
        (lambda: cluster(W, 1), "expected 2 to 256"),
        (lambda: cluster(W, 4, iterations=-1), "expected at least 0"),
    ):
        raises(message, call)
