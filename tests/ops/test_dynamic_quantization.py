"""Dynamic tree quantization: published levels, and rounding to the nearest level."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.dynamic_quantization import dequantize, levels, quantize

BOTH = pytest.mark.parametrize("signed", [True, False])


def published(signed):
    """Dettmers 2016, "dynamic tree": [sign,] zeros that count decades, an indicator bit, a linear fraction of the bits left.

    The levels of a fraction of k bits are the midpoints of 2^k intervals between 0.1 and 1. With 0 and 1 there are 256.
    """
    actual = []
    for zeros in range(7):
        bits = 8 - signed - zeros - 1  # sign and indicator
        bounds = [0.1 + 0.9 * i / 2**bits for i in range(2**bits + 1)]
        actual += [10.0**-zeros * (a + b) / 2 for a, b in zip(bounds, bounds[1:], strict=False)]
    return np.array(sorted([-x for x in actual if signed] + [0.0, *actual, 1.0]))


@BOTH
def test_levels_match_definition(signed):
    assert levels(signed).shape == (256,) and levels(signed).dtype == np.float32
    np.testing.assert_allclose(levels(signed), published(signed), rtol=1e-6)
    assert np.all(np.diff(levels(signed)) > 0)
    assert levels(signed)[0] == (np.float32(-0.99296875) if signed else 0.0) and levels(signed)[-1] == 1.0


def numbers(signed, rows=6, n=1000):
    """Numbers over nine decades, in rows of different scales."""
    draw = np.random.default_rng(0)
    x = 10.0 ** draw.uniform(-9, 0, (rows, n)) * 10.0 ** np.linspace(-12, 6, rows)[:, None]
    return (x * draw.choice([-1, 1], x.shape) if signed else x).astype(np.float32)


@BOTH
def test_numbers_are_rounded_to_the_nearest_level(signed):
    x = numbers(signed)
    quantized = jax.jit(quantize, static_argnames="signed")(x, signed=signed)
    assert (quantized.codes.dtype, quantized.codes.shape, quantized.scales.dtype, quantized.scales.shape) == (
        "uint8",
        x.shape,
        "float32",
        (6, 1),
    )
    top = np.abs(x).max(axis=1, keepdims=True)
    np.testing.assert_array_equal(quantized.scales, top)
    far = np.abs(x[..., None] / top[..., None] - levels(signed))
    actual = np.asarray(dequantize(quantized, signed=signed))
    least = np.where(x > 0, levels(signed)[1], 0.0) if not signed else -np.inf
    nearest = np.maximum(levels(signed)[far.argmin(-1)], least) * top
    assert np.mean(actual != nearest) < 2e-3  # numbers next to an edge, because of rounding
    share = np.abs(actual - x) / top
    bound = 0.0071 if signed else 0.0036
    assert share.max() <= bound
    for decade in range(3):
        inside = np.abs(x) > 0.1 ** (decade + 1) * top
        assert np.all(np.abs(actual - x)[inside] <= 2**decade * 10 * bound * np.abs(x)[inside])


@BOTH
def test_levels_are_represented_exactly(signed):
    x = jnp.asarray(levels(signed))[None] * jnp.float32(0.25)
    quantized = quantize(x, signed=signed)
    np.testing.assert_array_equal(quantized.codes[0], np.arange(256))
    np.testing.assert_array_equal(dequantize(quantized, signed=signed), x)


@BOTH
def test_rows_are_independent(signed):
    x = numbers(signed, rows=3)
    x[1], x[2, 5] = 0.0, np.nan
    actual = np.asarray(dequantize(quantize(jnp.asarray(x), signed=signed), signed=signed))
    np.testing.assert_array_equal(actual[1], 0.0)
    assert np.isfinite(actual[:2]).all() and np.isnan(actual[2]).all()


def test_unsigned_positive_numbers_do_not_round_to_zero():
    x = jnp.asarray([[1.0, 1e-12, 1e-37, 0.0]], jnp.float32)
    assert dequantize(quantize(x, signed=True), signed=True).tolist() == [[1.0, 0.0, 0.0, 0.0]]
    np.testing.assert_allclose(dequantize(quantize(x, signed=False), signed=False), [[1.0, 3.25e-7, 3.25e-7, 0.0]])
