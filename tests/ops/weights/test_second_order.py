"""Rounding and pruning by input moments against a loop with inverse matrices in float64."""

import itertools
import math

import jax
import numpy as np
import pytest

from hpnlp.ops.linear import linear
from hpnlp.ops.softmax import logits
from hpnlp.ops.weights import (
    RowScaledWeight,
    balanced_by_moments,
    inverse_factor,
    keep_balanced,
    output_error,
    prune_by_moments,
    quantize,
    quantize_by_moments,
    search_row_factors,
    smoothing_factors,
    two_of_four_by_moments,
)
from hpnlp.ops.weights.calibrated.second_order import DAMPING
from tests.messages import raises


def drawn(rows, columns, inputs=200):
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(inputs, rows)) @ rng.normal(size=(rows, rows)) * np.geomspace(1, 5, rows)
    return rng.normal(size=(rows, columns)).astype(np.float32), (x.T @ x).astype(np.float32)


def damped(moments):
    h = moments.astype(np.float64)
    return h + DAMPING * np.trace(h) / len(h) * np.eye(len(h))


def surgeon(w, h, changed):
    """Changes each row, and all later ones by the step of least error (Hassibi and Stork 1993, eq. 5)."""
    w = w.astype(np.float64)
    for i in range(len(w)):
        inverse = np.linalg.inv(h[i:, i:])  # of the rows that are still free
        row = changed(i, w, inverse)
        w[i:] -= np.outer(inverse[:, 0] / inverse[0, 0], w[i] - row)
        w[i] = row
    return w


@pytest.mark.parametrize(("rows", "bits", "group"), [(37, 4, 0), (24, 3, 8), (150, 4, 0)])
def test_rounding_equals_the_surgeon(rows, bits, group):
    w, moments = drawn(rows, 5)
    weight = quantize_by_moments(w, moments, bits, group=group, limits="max")
    order = np.argsort(-np.diag(moments), kind="stable")
    steps = np.repeat(np.asarray(weight.scales), rows // len(weight.scales), axis=0)[order]
    top = 2 ** (bits - 1) - 1
    expected = surgeon(
        w[order],
        damped(moments)[order][:, order],
        lambda i, w, _: np.clip(np.round(w[i] / steps[i]), -top, top) * steps[i],
    )
    different = np.abs(np.asarray(weight.dense())[order] - expected) > 1e-4
    assert different.mean() < 0.01  # numbers halfway between two codes
    assert output_error(weight.dense() - w, moments) < 0.6 * output_error(
        quantize(w, bits, group=group).dense() - w, moments
    )


def test_pruning_equals_the_surgeon_with_a_mask_for_each_block():
    w, moments = drawn(60, 5)  # one block
    h = damped(moments)
    # The diagonal of the factor: the inverse of the rows that are free when a row is reached.
    scales = np.array([np.linalg.inv(h[i:, i:])[0, 0] for i in range(len(h))])
    increase = w.astype(np.float64) ** 2 / scales[:, None]
    mask = increase >= np.sort(increase.ravel())[-150]
    expected = surgeon(w, h, lambda i, w, _: np.where(mask[i], w[i], 0))
    pruned = prune_by_moments(w, moments, 0.5)
    np.testing.assert_allclose(pruned, expected, atol=2e-3)
    assert (np.asarray(pruned) != 0).sum() == 150
    by_magnitude = np.where(np.abs(w) >= np.sort(np.abs(w).ravel())[-150], w, 0)
    assert output_error(pruned - w, moments) < 0.7 * output_error(by_magnitude - w, moments)


@pytest.mark.parametrize(("rows", "share"), [(60, 0.3), (300, 0.3), (40, 0.02)])
def test_balanced_pruning_equals_the_surgeon(rows, share):
    w, moments = drawn(rows, 5)
    h = damped(moments)
    ends = [0, *range(128, rows, 128), rows]
    count = 4 * math.ceil(round(share * rows) / 4)
    counts = [round(count * last / rows) - round(count * first / rows) for first, last in itertools.pairwise(ends)]
    scales = np.array([np.linalg.inv(h[i:, i:])[0, 0] for i in range(rows)])
    masks = {}

    def changed(i, w, inverse):
        if i in ends:
            number = ends.index(i)
            increase = w[i : ends[number + 1]] ** 2 / scales[i : ends[number + 1], None]
            rank = np.argsort(np.argsort(-increase, axis=0, kind="stable"), axis=0)
            masks.update({i + j: rank[j] < counts[number] for j in range(len(increase))})
        return np.where(masks[i], w[i], 0)

    expected = surgeon(w, h, changed)
    weight = balanced_by_moments(w, moments, share)
    assert ((np.asarray(weight.dense()) != 0).sum(0) == count).all() and len(weight.values) == count
    different = np.abs(np.asarray(weight.dense()) - expected) > 5e-3 * np.abs(expected).max()
    assert different.mean() < 0.01  # numbers of nearly equal rank
    assert output_error(weight.dense() - w, moments) < 0.8 * output_error(keep_balanced(w, share).dense() - w, moments)


def test_each_block_keeps_its_share():
    w, moments = drawn(300, 4)  # two blocks of 128 rows and one of 44
    kept = np.asarray(prune_by_moments(w, moments, 0.25)) != 0
    assert [kept[i : i + 128].sum() for i in (0, 128, 256)] == [128, 128, 44]


def test_two_of_four_equals_the_surgeon():
    w, moments = drawn(24, 6)
    masks = {}

    def changed(i, w, inverse):
        if i % 4 == 0:
            free = [np.linalg.inv(np.linalg.inv(inverse)[j:, j:])[0, 0] for j in range(4)]
            increase = w[i : i + 4] ** 2 / np.array(free)[:, None]
            order = np.argsort(-increase, axis=0, kind="stable")
            masks[i] = np.argsort(order, axis=0) < 2
        return np.where(masks[i - i % 4][i % 4], w[i], 0)

    expected = surgeon(w, damped(moments), changed)
    np.testing.assert_allclose(two_of_four_by_moments(w, moments).dense(), expected, atol=2e-3)


def test_factor_is_that_of_the_inverse():
    moments = drawn(30, 1)[1]
    factor = np.asarray(inverse_factor(moments), np.float64)
    scaled = damped(moments) / np.trace(moments) * 30
    np.testing.assert_allclose(factor.T @ factor @ scaled, np.eye(30), atol=1e-4)
    assert not np.tril(factor, -1).any()


def test_matrices_without_inputs_are_rounded_to_the_nearest():
    w, zeros = drawn(12, 5)[0], np.zeros((12, 12), np.float32)
    np.testing.assert_array_equal(quantize_by_moments(w, zeros, 4, limits="max").codes, quantize(w, 4).codes)
    pruned = np.asarray(prune_by_moments(w, zeros, 0.5))
    assert (pruned[pruned != 0] == w[pruned != 0]).all()
    dead = drawn(12, 5)[1] * (np.arange(12) > 2)[:, None] * (np.arange(12) > 2)[None]
    assert np.isfinite(np.asarray(quantize_by_moments(w, dead, 4).dense())).all()
    assert np.isfinite(np.asarray(search_row_factors(w, dead, lambda w: quantize(w, 4).dense()))).all()


def test_layers_are_independent():
    (w, moments), (other, _) = drawn(20, 5), drawn(21, 5)
    together = jax.vmap(lambda w, m: prune_by_moments(w, m, 0.5))(np.stack([w, other[:20]]), np.stack([moments] * 2))
    np.testing.assert_allclose(together[0], prune_by_moments(w, moments, 0.5), atol=1e-5)


def test_scaled_rows_are_the_product_of_scaled_inputs():
    w, moments = drawn(16, 6)
    factors = np.asarray(smoothing_factors(w, moments, 0.5))
    weight = RowScaledWeight(quantize(w / factors[:, None], integer_products=False), factors)
    np.testing.assert_allclose(weight.dense(), w, atol=0.02)
    x, matrix = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32), np.asarray(weight.dense())
    np.testing.assert_allclose(linear(x, weight), x @ matrix, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits(x[:, :6], weight), x[:, :6] @ matrix.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(weight[np.array([3, 0])], matrix[[3, 0]], rtol=1e-5, atol=1e-6)
    assert weight.axes(("layers", "embed", "mlp")).factors == ("layers", "embed")
    np.testing.assert_allclose(np.prod(np.float64(factors)), 1, rtol=1e-4)


def test_inputs_of_rows_of_zeros_stay_small():
    w, moments = drawn(16, 6)
    w[3] = 0.0
    factors = np.asarray(smoothing_factors(0.1 * w, np.eye(16, dtype=np.float32)))
    assert factors[3] == factors.min()
    np.testing.assert_array_equal(smoothing_factors(0.0 * w, np.eye(16, dtype=np.float32)), np.ones(16))


def test_searched_factors_have_no_larger_error_than_none():
    w, moments = drawn(32, 6)

    def rounded(w):
        return quantize(w, 4, group=8).dense()

    factors = search_row_factors(w, moments, rounded)[:, None]
    error = output_error(rounded(w / factors) * factors - w, moments)
    assert error < output_error(rounded(w) - w, moments)


def test_invalid_arguments_raise():
    w, moments = drawn(12, 5)
    raises(r"moments is .3, 3.: expected .12, 12.", quantize_by_moments, w, moments[:3, :3])
    raises("share=0", prune_by_moments, w, moments, 0)
    raises("multiple of 4 rows, not 11", two_of_four_by_moments, w[:11], moments[:11, :11])
