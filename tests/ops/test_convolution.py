"""Convolutions along the sequence, against its definition and torch."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.convolutions.convolution import causal_conv, depthwise_conv, dilated_conv, token_windows
from hpnlp.types import InputError
from tests.contracts import assert_close
from tests.messages import raises


def arrays(length, width, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (2, length, 3), (width, 3)
    return [jnp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def definition(x, kernel, segment_ids):
    """`y[b, t] = sum_j kernel[j] * x[b, t - j]` over tokens of the segment of t."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    y = np.zeros_like(x)
    for b, t, j in np.ndindex(*x.shape[:2], len(kernel)):
        if j <= t and segment_ids[b, t - j] == segment_ids[b, t]:
            y[b, t] += kernel[j] * x[b, t - j]
    return y


@pytest.mark.parametrize(("length", "width"), [(1, 1), (1, 4), (3, 4), (13, 4), (13, 2)])
def test_matches_definition(length, width):
    """Sequences may be shorter than the kernel."""
    rng = np.random.default_rng(1)
    x, kernel = arrays(length, width)
    ids = np.sort(rng.integers(0, 3, (2, length)), axis=1).astype(np.int32)
    run = jax.jit(lambda x: (causal_conv(x, kernel, ids), causal_conv(x, kernel)))
    for actual, segment_ids in zip(run(x), (ids, np.zeros_like(ids)), strict=True):
        assert_close(actual, jnp.asarray(definition(x, kernel, segment_ids), jnp.float32))


@pytest.mark.parametrize(("length", "width"), [(1, 4), (3, 5), (13, 5)])
def test_centred_convolutions_match_products_with_windows(length, width):
    rng = np.random.default_rng(1)
    x, kernel = arrays(length, width)
    ids = np.sort(rng.integers(0, 3, (2, length)), axis=1).astype(np.int32)

    def run(x):
        windows = token_windows(x, width, ids, ahead=width // 2).reshape(2, length, width, 3)
        return depthwise_conv(x, kernel, ids, ahead=width // 2), windows

    actual, windows = jax.jit(run)(x)
    expected = np.zeros((2, length, width, 3))
    for b, t, j in np.ndindex(2, length, width):
        s = t + width // 2 - j
        if 0 <= s < length and ids[b, s] == ids[b, t]:
            expected[b, t, j] = x[b, s]
    np.testing.assert_array_equal(windows, expected)
    assert_close(actual, jnp.asarray((expected * np.asarray(kernel)).sum(2), jnp.float32))


@pytest.mark.parametrize(
    ("length", "width", "dilation", "ahead"), [(13, 3, 4, 0), (13, 4, 2, 2), (3, 3, 5, 1), (1, 1, 1, 0)]
)
def test_dilated_convolutions_match_definition(length, width, dilation, ahead):
    """With segments; and without, in two parts of which the second reads the end of the first."""
    rng = np.random.default_rng(1)
    x, kernel = (rng.standard_normal(s).astype(np.float32) for s in ((2, length, 2, 3), (2, width, 3, 4)))
    ids = np.sort(rng.integers(0, 3, (2, length)), axis=1).astype(np.int32)
    run = jax.jit(lambda x, ids=None: dilated_conv(x, kernel, ids, ahead=ahead, dilation=dilation))
    for actual, segment_ids in ((run(x, ids), ids), (run(x), np.zeros_like(ids))):
        expected = np.zeros((2, length, 2, 4))
        for b, t, j in np.ndindex(2, length, width):
            s = t + dilation * (ahead - j)
            if 0 <= s < length and segment_ids[b, s] == segment_ids[b, t]:
                expected[b, t] += np.einsum("nh,nhf->nf", x[b, s], kernel[:, j])
        assert_close(actual, jnp.asarray(expected, jnp.float32))
    if ahead == 0 and length > 1:
        reach = dilation * (width - 1)
        before = np.concatenate([np.zeros((2, reach, 2, 3), np.float32), x[:, :9]], axis=1)[:, 9:]
        second = dilated_conv(x[:, 9:], kernel, dilation=dilation, preceding=before)
        assert_close(second, run(x)[:, 9:])


def test_invalid_arguments_of_dilated_convolutions_raise():
    for shape, options, message in (
        ((2, 3, 4, 4), {}, "expected .2, taps, 3, features. with at least one tap"),
        ((1, 3, 3, 4), {}, "expected .2, taps, 3, features. with at least one tap"),
        ((2, 0, 3, 4), {}, "at least one tap"),
        ((2, 3, 3, 4), {"ahead": 3}, "ahead=3: expected 0 to 2, since there are 3 taps"),
        ((2, 3, 3, 4), {"dilation": 0}, "dilation=0: expected at least 1"),
        ((2, 3, 3, 4), {"preceding": np.ones((1, 3, 2, 3))}, r"preceding \(1, 3, 2, 3\): expected \(1, 2, 2, 3\)"),
    ):
        raises(message, inspect.unwrap(dilated_conv), jnp.ones((1, 5, 2, 3)), jnp.ones(shape), **options)


def test_16_bit_sums_are_float32():
    x, kernel = arrays(9, 4, "bfloat16")
    expected = causal_conv(x.astype(jnp.float32), kernel.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(causal_conv(x, kernel), expected)


def test_nan_reaches_neither_other_segments_nor_their_gradients():
    x, kernel = arrays(8, 4)
    ids = jnp.asarray([[0] * 4 + [1] * 4] * 2, jnp.int32)

    @jax.jit
    def later_segment(x):
        """Its outputs, and their gradient by its inputs."""
        return jax.value_and_grad(lambda x: jnp.sin(causal_conv(x, kernel, ids)[:, 4:]).sum())(x)

    for value in (jnp.nan, jnp.inf):
        (dirty, gradient), (clean, expected) = later_segment(x.at[:, :4].set(value)), later_segment(x)
        assert dirty == clean
        np.testing.assert_array_equal(gradient, expected)


def test_invalid_kernels_raise():
    for shape in ((0, 3), (4, 2)):
        with pytest.raises(InputError, match="expected at least one weight for each of the 3 features"):
            inspect.unwrap(causal_conv)(jnp.ones((1, 2, 3)), jnp.ones(shape))
