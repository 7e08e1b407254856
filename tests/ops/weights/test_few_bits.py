"""Floats of few bits, ternary, binary and powers of two, and packed codes, against their formulas in numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hpnlp.ops.linear import linear
from hpnlp.ops.weight import parameter_count
from hpnlp.ops.weights import (
    IntegerWeight,
    PackedWeight,
    binarize,
    pack,
    quantize,
    round_to_powers,
    ternarize,
    to_floats,
)
from hpnlp.ops.weights.packed import LEVELS
from tests.contracts import once
from tests.messages import raises

W = np.random.default_rng(0).normal(size=(13, 6)).astype(np.float32)
AXES = {"matrix": (0, 1), "column": 0, "row": 1}


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("dtype", "kind"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
def test_float8_rounds_in_the_range_of_the_format(dtype, kind, by_row):
    largest = np.float32(ml_dtypes.finfo(kind).max)
    scales = np.abs(W).max(1 if by_row else 0, keepdims=True) / largest
    expected = (W / scales).astype(kind).astype(np.float32) * scales
    weight = to_floats(W, dtype, by_row=by_row)
    np.testing.assert_allclose(weight.dense(), expected, rtol=1e-6)
    assert np.abs(expected - W).max() < 0.13 * np.abs(W).max()
    x = np.random.default_rng(1).normal(size=(3, 13)).astype(np.float32)
    both = to_floats(W, dtype, round_inputs=True)
    steps = np.abs(x).max(1, keepdims=True) / largest
    product = (x / steps).astype(kind).astype(np.float64) * steps @ np.asarray(both.dense(), np.float64)
    np.testing.assert_allclose(linear(x, both), product, rtol=1e-4, atol=1e-4)


def test_floats_of_16_bits():
    for dtype, kind in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        np.testing.assert_array_equal(to_floats(W, dtype).dense(), W.astype(kind).astype(np.float32))
    weight = to_floats(W, "bfloat16")
    gradient = jax.grad(lambda w: linear(jnp.ones((2, 13)), w).sum())(weight)
    np.testing.assert_array_equal(gradient.codes, jnp.full((13, 6), 2.0, jnp.bfloat16))


def ternary_formula(w, axes):
    kept = np.abs(w) > 0.7 * np.abs(w).mean(axes, keepdims=True)
    return np.sign(w) * kept * (np.abs(w) * kept).sum(axes, keepdims=True) / kept.sum(axes, keepdims=True)


def power_formula(w, axes):
    exponents = np.round(np.log2(np.abs(w)))
    largest = np.round(np.log2(np.abs(w).max(axes, keepdims=True)))
    return np.where(exponents > largest - 7, np.sign(w) * 2**exponents, 0)


FORMULAS = {
    ternarize: ternary_formula,
    binarize: lambda w, axes: np.where(w < 0, -1, 1) * np.abs(w).mean(axes, keepdims=True),
    round_to_powers: power_formula,
}


@pytest.mark.parametrize("scale", AXES)
@pytest.mark.parametrize("function", FORMULAS, ids=lambda f: f.__name__)
def test_few_values_follow_their_formulas(function, scale):
    w = W * np.geomspace(1, 1e-3, 13, dtype=np.float32)[:, None]
    w[2, 3] = 0.0
    expected = FORMULAS[function](np.where(w == 0, 1e-30, w).astype(np.float64), AXES[scale])
    packed, integers = function(w, scale), function(w, scale, packed=False)
    assert isinstance(packed, PackedWeight)
    assert isinstance(integers, IntegerWeight)
    np.testing.assert_allclose(integers.dense(), expected, rtol=1e-5)
    np.testing.assert_array_equal(packed.dense(), integers.dense())
    assert packed.codes.shape == (-(-13 * LEVELS[packed.levels] // 8), 6)


@pytest.mark.parametrize("function", FORMULAS, ids=lambda f: f.__name__)
def test_nan_makes_its_scale_nan(function):
    w = W.copy()
    w[0, 0] = np.nan
    found = np.asarray(function(w, "column").dense())
    assert np.isnan(found[:, 0]).all()
    assert np.isfinite(found[:, 1:]).all()


INTEGERS = {
    "binary": [-1, 1],
    "ternary": [-1, 0, 1],
    "int4": range(-8, 8),
    "powers": [0, *(s * 2**k for s in (-1, 1) for k in range(7))],
}


@pytest.mark.parametrize("rows", [1, 16, 19])
@pytest.mark.parametrize("levels", LEVELS)
def test_packing_is_undone(levels, rows):
    """Rows fill a part of a byte, all bytes, and all bytes but the last."""
    codes = np.random.default_rng(rows).choice(np.int8(INTEGERS[levels]), (rows, 3))

    def program(codes):
        packed = pack(IntegerWeight(codes, np.ones((rows, 1), np.float32)), levels)
        return packed.codes, packed.unpack().codes, packed.take(jnp.arange(rows)[::-1])

    packed, unpacked, reversed_rows = once(program, codes)
    np.testing.assert_array_equal(unpacked, codes)
    np.testing.assert_array_equal(reversed_rows, codes[::-1].astype(np.float32))
    assert packed.nbytes == -(-rows * LEVELS[levels] // 8) * 3


def test_packed_integers_equal_integers_of_4_bits():
    weight = quantize(W[:12], 4, group=4)
    x = np.random.default_rng(1).normal(size=(3, 12)).astype(np.float32)
    packed = pack(weight, "int4")
    np.testing.assert_allclose(linear(x, packed), linear(x, weight), rtol=1e-6)
    assert parameter_count({"a": packed}) == parameter_count({"a": weight}) == weight.codes.size + weight.scales.size


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: to_floats(W, "e3m4"), "expected e4m3, e5m2, bfloat16, float16"),
        (lambda: to_floats(W, "bfloat16", round_inputs=True), "expected e4m3 or e5m2"),
        (lambda: ternarize(W, "layer"), "expected matrix, column, row"),
        (lambda: pack(quantize(W), "int3"), "expected binary, ternary, int4, powers"),
    ):
        raises(message, call)
