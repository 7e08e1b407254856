"""Ranges of integers against searches in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.linear import linear
from hpnlp.ops.weights import quantize, ranges
from tests.messages import raises

RNG = np.random.default_rng(0)
W = (RNG.normal(size=(24, 10)) ** 3).astype(np.float32)  # a few large numbers
SHAPES = {
    "column": ({}, W[None]),
    "row": ({"by_row": True}, W[:, :, None]),
    "group": ({"group": 8}, W.reshape(3, 8, 10)),
}


def squared_error(groups, limits, top):
    step = limits[:, None] / top
    return ((groups - np.clip(np.round(groups / step), -top, top) * step) ** 2).sum(1)


@pytest.mark.parametrize("shared", SHAPES)
def test_limits_equal_numpy(shared):
    options, groups = SHAPES[shared]
    magnitudes = np.abs(groups).astype(np.float64)
    np.testing.assert_array_equal(ranges.limits(W, **options), np.abs(groups).max(1))
    found = ranges.limits(W, method="percentile", percentile=80.0, **options)
    np.testing.assert_allclose(found, np.percentile(magnitudes, 80, axis=1), rtol=1e-5)
    candidates = [share * magnitudes.max(1) for share in np.linspace(1, 0.3, 36)]
    errors = [squared_error(groups, limits, 7) for limits in candidates]
    found = ranges.limits(W, 4, "mse", **options)
    np.testing.assert_allclose(squared_error(groups, np.float64(found), 7), np.min(errors, axis=0), rtol=1e-4)
    assert found.shape == quantize(W, 4, **options).scales.shape


def test_columns_of_few_numbers_have_the_range_of_the_largest():
    w = np.zeros((2000, 2), np.float32)
    w[7, 0], w[:, 1] = 300.0, W[0, 0]
    np.testing.assert_allclose(quantize(w, limits="percentile").dense(), w, rtol=1e-6)


def test_searched_ranges_have_less_error_than_the_largest_magnitude():
    w = np.random.default_rng(1).normal(size=(400, 4)).astype(np.float32)
    largest, searched = (((quantize(w, 3, limits=name).dense() - w) ** 2).sum() for name in ("max", "mse"))
    assert searched < 0.8 * largest


def test_fixed_ranges_of_inputs():
    x = np.random.default_rng(1).normal(size=(50, 24)).astype(np.float32)
    limit = ranges.activation_limit(x, "percentile", percentile=95.0)
    np.testing.assert_allclose(limit, np.percentile(np.abs(x), 95), rtol=1e-5)
    weight = quantize(W, x_limit=limit)
    step = np.float32(limit) / np.float32(127)
    rounded = np.clip(np.round(x / step), -127, 127)
    np.testing.assert_allclose(
        linear(x, weight), (rounded * step) @ np.asarray(weight.dense(), np.float64), rtol=1e-4, atol=1e-4
    )
    dx = jax.grad(lambda x: linear(x, weight).sum())(jnp.asarray(x))
    inside = np.abs(x) <= 127 * step
    np.testing.assert_allclose(dx, inside * np.asarray(weight.dense()).sum(1), rtol=1e-4, atol=1e-4)
    special = jnp.asarray([[np.nan] * 24, [np.inf] * 24])
    expected = np.stack([np.zeros(10), float(limit) * np.asarray(weight.dense()).sum(0)])
    np.testing.assert_allclose(linear(special, weight), expected, rtol=1e-4, atol=1e-4)


def test_invalid_ranges_raise():
    for call, message in (
        (lambda: ranges.limits(W, method="mean"), "expected max, percentile, mse"),
        (lambda: ranges.limits(W, method="percentile", percentile=0.0), "over 0 and at most 100"),
        (lambda: ranges.limits(W, 9), "expected 2 to 8"),
        (lambda: ranges.limits(W, group=5), "divisor of the 24 rows"),
        (lambda: quantize(W, limits="mean"), "expected max, percentile, mse"),
    ):
        raises(message, call)
