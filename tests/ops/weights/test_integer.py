"""Matrices of integers: rounding, products and rows against float64 arithmetic in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.linear import linear
from hpnlp.ops.softmax import logits
from hpnlp.ops.weights import IntegerWeight, quantize, to_floats
from tests.contracts import once
from tests.messages import raises

RNG = np.random.default_rng(0)
W = RNG.normal(size=(24, 10)).astype(np.float32)
X = RNG.normal(size=(3, 5, 24)).astype(np.float32)


@pytest.mark.parametrize(
    ("bits", "options", "scale_of"),
    [
        (8, {}, lambda w: np.abs(w).max(0, keepdims=True)),
        (8, {"by_row": True}, lambda w: np.abs(w).max(1, keepdims=True)),
        (4, {"group": 8}, lambda w: np.repeat(np.abs(w.reshape(3, 8, 10)).max(1), 8, axis=0)),
        (3, {}, lambda w: np.abs(w).max(0, keepdims=True)),
    ],
)
def test_numbers_are_rounded_to_the_nearest_level(bits, options, scale_of):
    top = 2 ** (bits - 1) - 1
    step = scale_of(W) / top
    weight = quantize(W, bits, **options)
    np.testing.assert_allclose(weight.dense(), np.round(W / step) * step, rtol=2e-6)
    ids = np.array([[3, 0], [23, 3]])
    np.testing.assert_array_equal(weight[ids], weight.dense()[ids])
    assert weight.shape == (24, 10)
    assert weight.codes.dtype == (jnp.int8 if bits > 4 else jnp.int4)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_integer_products_round_rows_of_x_as_well(rows):
    x, weight = np.random.default_rng(1).normal(size=(rows, 24)).astype(np.float32), quantize(W)
    step = np.abs(x).max(1, keepdims=True) / np.float32(127)
    expected = np.round(x / step).astype(np.float64) * step @ np.asarray(weight.dense(), np.float64)
    np.testing.assert_allclose(linear(x, weight), expected, atol=1e-5)
    table = quantize(W.T, by_row=True)
    np.testing.assert_allclose(logits(x, table), expected, atol=1e-5)


def test_products_of_floats_are_those_of_the_dense_matrix():
    weight = quantize(W, integer_products=False)
    np.testing.assert_allclose(linear(X, weight), X @ np.asarray(weight.dense()), atol=1e-5)
    np.testing.assert_allclose(linear(jnp.bfloat16(X), weight).astype(jnp.float32), X @ W, atol=0.2)


def test_gradients_are_those_of_the_dense_matrix():
    weight = quantize(W)

    def loss(x, weight):
        return (linear(x, weight) ** 2).sum()

    dx = jax.grad(loss)(jnp.asarray(X), weight)
    y = linear(X, weight)
    np.testing.assert_allclose(dx, 2 * y @ weight.dense().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "by_row", "rows"),
    [("float32", True, 0), ("float32", True, 1), ("bfloat16", True, 3), ("float16", False, 3)],
)
def test_products_with_the_transpose_match_the_dense_matrix(dtype, by_row, rows):
    limits = np.abs(W).max(1, keepdims=True) if by_row else np.full((1, 1), 3, np.float32)
    scales = limits / np.float32(127)
    codes = np.clip(np.round(W / scales), -127, 127)
    x = np.random.default_rng(1).normal(size=(rows, 10)).astype(dtype)
    dy = np.random.default_rng(2).normal(size=(rows, 24)).astype(np.float32)

    def products(x, dy, codes, scales):
        y, backward = jax.vjp(lambda x, scales: IntegerWeight(codes, scales).matmul_transposed(x), x, scales)
        return y, *backward(dy)

    y, dx, dscales = once(products, x, dy, codes.astype(np.int8), scales)
    assert y.shape == (rows, 24) and dx.dtype == x.dtype and dscales.shape == scales.shape
    numbers = x.astype(np.float64)
    np.testing.assert_allclose(y, numbers @ (codes * scales).T, atol=0.1)
    np.testing.assert_allclose(np.asarray(dx, np.float64), dy @ (codes * scales), rtol=0.01, atol=0.02)
    slopes = (dy * (numbers @ codes.T)).sum(0)
    expected = slopes[:, None] if by_row else slopes.sum(keepdims=True)[None]
    np.testing.assert_allclose(dscales, expected, rtol=0.01, atol=0.01 * np.abs(slopes).max(initial=0))


def test_groups_of_a_single_column_multiply_by_the_transpose():
    codes, scales = np.arange(-12, 12, dtype=np.int8)[:, None], np.array([[1], [2], [4]], np.float32)
    x = np.random.default_rng(1).normal(size=(3, 1)).astype(np.float32)
    y = once(lambda x, codes, scales: IntegerWeight(codes, scales).matmul_transposed(x), x, codes, scales)
    np.testing.assert_allclose(y, x @ (codes * np.repeat(scales, 8, axis=0)).T, rtol=1e-6)


@pytest.mark.parametrize("convert", [quantize, to_floats])
def test_numbers_near_the_smallest_float_are_not_lost(convert):
    """Scales below the smallest normal number would be flushed to 0, and codes would be NaN."""
    w = jnp.asarray([[1e-37, 1.0], [-4e-38, 2.0]], jnp.float32)
    dense = np.asarray(jax.jit(lambda w: convert(w).dense())(w))
    assert np.isfinite(dense).all() and np.abs(dense[:, 0] - w[:, 0]).max() < 1.2e-38
    y = jax.jit(lambda w: convert(w).matmul(jnp.full((3, 2), 1e-38)))(w)
    assert np.isfinite(y).all()


def test_zero_columns_and_clipping():
    w = np.concatenate([np.zeros((24, 1)), W], axis=1).astype(np.float32)
    assert np.all(np.asarray(quantize(w).dense())[:, 0] == 0)
    clipped = quantize(W, limits=np.full((1, 10), 0.5, np.float32))
    assert np.abs(clipped.dense()).max() <= 0.5


def test_weights_pass_through_loops_and_jit():
    stacked = jax.vmap(quantize)(np.stack([W[:10], W[10:20]]))
    out, _ = jax.lax.scan(lambda x, w: (linear(x, w), None), jnp.ones((2, 10)), stacked)
    layers = [quantize(w) for w in (W[:10], W[10:20])]
    np.testing.assert_allclose(out, linear(linear(jnp.ones((2, 10)), layers[0]), layers[1]), rtol=1e-6)


def test_axes_of_scales():
    assert quantize(W).axes(("layers", "embed", "mlp")).scales == ("layers", None, "mlp")
    assert quantize(W, by_row=True).axes(("vocab", "embed")).scales == ("vocab", None)
    assert isinstance(quantize(W).axes(("embed", "mlp")), IntegerWeight)


def test_invalid_options_raise():
    for options, message in (
        ({"bits": 9}, "expected 2 to 8"),
        ({"bits": 1}, "expected 2 to 8"),
        ({"group": 7}, "divisor of the 24 rows"),
    ):
        raises(message, quantize, W, **options)
