"""Straight-through estimators: values and gradients by their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.weights import binarize, quantize, ternarize
from hpnlp.ops.weights import straight_through as through

RNG = np.random.default_rng(0)
W = (2 * RNG.normal(size=(8, 6))).astype(np.float32)
DY = RNG.normal(size=(8, 6)).astype(np.float32)


def pulled(function, x=W):
    """Value and gradient of a function."""
    value, pull = jax.vjp(function, jnp.asarray(x))
    return value, pull(jnp.asarray(DY, value.dtype))[0]


def test_rounding_passes_gradients_inside_its_range():
    value, gradient = pulled(lambda w: through.round_through(w, 1.0, 4))
    integers = np.round(W * 7)
    np.testing.assert_allclose(value, np.clip(integers, -7, 7) / 7, rtol=1e-6)
    np.testing.assert_array_equal(gradient, np.where(np.abs(integers) <= 7, DY, 0))


@pytest.mark.parametrize("options", [{}, {"by_row": True}, {"group": 4}])
def test_quantized_matrices_equal_quantize(options):
    value, gradient = pulled(lambda w: through.quantize_through(w, 3, **options))
    np.testing.assert_allclose(value, quantize(W, 3, **options).dense(), rtol=1e-6)
    np.testing.assert_array_equal(gradient, DY)
    limits = np.float32(quantize(W, 3, limits="mse").scales * 3)
    _, gradient = pulled(lambda w: through.quantize_through(w, 3, method="mse"))
    outside = np.abs(np.round(W / (limits / 3))) > 3
    assert outside.any()
    np.testing.assert_array_equal(gradient, np.where(outside, 0, DY))


def test_ternary_and_binary():
    value, gradient = pulled(through.ternary_through)
    np.testing.assert_array_equal(value, ternarize(W).dense())
    np.testing.assert_array_equal(gradient, np.where(np.abs(W) <= 2.5, DY, 0))
    value, gradient = pulled(lambda w: through.binary_through(w, None))
    np.testing.assert_array_equal(value, np.where(W < 0, -1, 1))
    np.testing.assert_array_equal(gradient, np.where(np.abs(W) <= 1, DY, 0))
    value, _ = pulled(through.binary_through)
    np.testing.assert_array_equal(value, binarize(W).dense())


def test_masks_pass_gradients_to_scores():
    scores = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    value, gradient = pulled(lambda s: W * through.top_through(s, 0.25), scores)
    mask = scores >= np.sort(scores.ravel())[-12]
    np.testing.assert_array_equal(value, W * mask)
    np.testing.assert_array_equal(gradient, DY * W)  # movement: dL/dS = dL/dW' W, for masked weights as well
    value, gradient = pulled(lambda s: W * through.threshold_through(s, 0.6), scores)
    np.testing.assert_array_equal(value, W * (1 / (1 + np.exp(-scores)) > 0.6))
    np.testing.assert_array_equal(gradient, DY * W)
    few, _ = pulled(lambda s: through.threshold_through(s, 0.999, floor=3 / 48), scores)
    np.testing.assert_array_equal(few, scores >= np.sort(scores.ravel())[-3])


def test_estimators_run_in_loops_over_layers_and_in_bfloat16():
    stacked = jnp.stack([W[:6], W[2:]])

    def loss(stacked):
        product = lambda x, w: (x @ through.quantize_through(w) + x @ through.ternary_through(w), None)  # noqa: E731
        return jax.lax.scan(product, jnp.ones((2, 6)), stacked)[0].sum()

    assert np.isfinite(jax.jit(jax.grad(loss))(stacked)).all()
    for function in (through.quantize_through, through.binary_through, through.top_through):
        arguments = (0.5,) if function is through.top_through else ()
        assert function(jnp.bfloat16(W), *arguments).dtype == jnp.bfloat16
    spoilt = jnp.asarray(W).at[0, 0].set(jnp.nan)
    assert np.isnan(through.quantize_through(spoilt)[:, 0]).all()
    assert np.isnan(through.binary_through(spoilt, None)[0, 0])
