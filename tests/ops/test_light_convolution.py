"""Lightweight and dynamic convolutions, against their definition and torch."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.convolutions.light_convolution import dynamic_conv, light_conv
from tests.contracts import assert_close, once
from tests.messages import raises


def arrays(length, width, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (2, length, 2, 3), (2, width), (2, length, 2, width)
    return [jnp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def definition(x, scores, segment_ids, ahead):
    """`y[t] = sum_j softmax(scores[t])[j] * x[t + ahead - j]` over tokens of the segment of t; scores `[B, T, N, W]`."""
    x, weights = np.asarray(x, np.float64), np.exp(np.asarray(scores, np.float64))
    weights, y = weights / weights.sum(-1, keepdims=True), np.zeros_like(x)
    for b, t, n, j in np.ndindex(*weights.shape):
        s = t + ahead - j
        if 0 <= s < x.shape[1] and segment_ids[b, s] == segment_ids[b, t]:
            y[b, t, n] += weights[b, t, n, j] * x[b, s, n]
    return jnp.asarray(y, jnp.float32)


@pytest.mark.parametrize(("length", "width", "ahead"), [(1, 4, 0), (3, 4, 2), (11, 4, 0), (11, 5, 2), (6, 1, 0)])
def test_matches_definition(length, width, ahead):
    """Sequences may be shorter than the window."""
    rng = np.random.default_rng(1)
    x, fixed, scores = arrays(length, width)
    by_token = np.broadcast_to(fixed, scores.shape)
    ids = np.sort(rng.integers(0, 3, (2, length)), axis=1).astype(np.int32)
    no_ids = np.zeros_like(ids)
    expected = [definition(x, s, i, ahead) for s in (by_token, scores) for i in (ids, no_ids)]

    def run(x):
        pairs = ((light_conv, fixed), (dynamic_conv, scores))
        return [conv(x, s, i, ahead=ahead) for conv, s in pairs for i in (ids, None)]

    assert_close(once(run, x), expected)


def test_preceding_tokens_continue_a_sequence():
    x, fixed, scores = arrays(9, 4)

    def run(x):
        pairs = ((light_conv, fixed, fixed), (dynamic_conv, scores, scores[:, 7:]))
        return [(conv(x, a)[:, 7:], conv(x[:, 7:], b, preceding=x[:, 4:7])) for conv, a, b in pairs]

    for full, continued in once(run, x):
        assert_close(continued, full)


def test_16_bit_sums_are_float32():
    x, _, scores = arrays(9, 4, "bfloat16")
    expected = dynamic_conv(x.astype(jnp.float32), scores.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(dynamic_conv(x, scores), expected)


def test_nan_reaches_neither_other_segments_nor_their_gradients():
    x, fixed, _ = arrays(8, 5)
    ids = jnp.asarray([[0] * 4 + [1] * 4] * 2, jnp.int32)

    @jax.jit
    def later_segment(x):
        return jax.value_and_grad(lambda x: jnp.sin(light_conv(x, fixed, ids, ahead=2)[:, 4:]).sum())(x)

    (dirty, gradient), (clean, expected) = later_segment(x.at[:, :4].set(jnp.nan)), later_segment(x)
    assert dirty == clean
    np.testing.assert_array_equal(gradient, expected)


def test_dropout_drops_weights_of_each_token():
    """With values of 1, an output is the sum of the weights that are kept, scaled by 1 / (1 - rate)."""
    scores = jnp.zeros((2, 8), jnp.float32)
    streams = jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    ones = jnp.ones((2, 300, 2, 1), jnp.float32)
    kept = np.asarray(light_conv(ones, scores, rate=0.25, rng=jax.random.key(0), streams=streams))[:, 7:, :, 0] * 6
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-5)
    assert len(np.unique(np.round(kept))) > 4
    assert kept.mean() == pytest.approx(6, abs=0.2)
    assert np.any(kept[0, :, 0] != kept[1, :, 0]) and np.any(kept[0, :, 0] != kept[0, :, 1])


def test_invalid_arguments_raise():
    light, dynamic = inspect.unwrap(light_conv), inspect.unwrap(dynamic_conv)  # beartype would raise first
    x, fixed, scores = arrays(6, 3)
    for call, message in (
        (lambda: light(x, fixed[:1]), "expected .2, 'taps'. with at least one tap"),
        (lambda: light(x, fixed[:, :0]), "at least one tap"),
        (lambda: dynamic(x, scores[:, :4]), "expected .2, 6, 2, 'taps'."),
        (lambda: light(x, fixed, ahead=3), "ahead=3: expected 0 to 2"),
        (lambda: light(x, fixed, preceding=x), "preceding .2, 6, 2, 3.: expected .2, 2, 2, 3."),
        (lambda: light(x, fixed, rate=0.5, rng=jax.random.key(0)), "rate=0.5 without streams"),
        (lambda: light(x, fixed, rate=1.0), "rate=1.0: expected at least 0 and less than 1"),
    ):
        raises(message, call)
