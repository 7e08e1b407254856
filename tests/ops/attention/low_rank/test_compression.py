"""Compression of tokens and convolution of values: values, gradients, padding and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.low_rank.compression import convolve_tokens, pool_tokens, project_tokens
from hpnlp.ops.attention.low_rank.value_conv import value_conv, value_conv_reference
from tests.contracts import assert_close, once
from tests.messages import raises


def test_padding_is_not_read():
    """NaN in padding changes no compressed token, and windows of padding alone are marked."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 7, 2, 3)).astype(jnp.float32))
    real = jnp.asarray([[1, 1, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1]], bool)
    matrix, taps = (jnp.asarray(rng.standard_normal(shape).astype(jnp.float32)) for shape in ((4, 7), (3, 2, 3)))

    def compressed(x):
        return project_tokens(x, matrix, real), pool_tokens(x, 3, real), convolve_tokens(x, taps, real)

    actual = once(lambda x: compressed(jnp.where(real[..., None, None], x, jnp.nan)), x)
    zeros = np.where(np.asarray(real)[..., None, None], x, 0)
    filled = np.array([[True, True, False], [False, True, True]])
    means = [[zeros[0, :2].sum(0) / 2, zeros[0, 3], zeros[0, 6]], [zeros[1, 0], zeros[1, 3:6].mean(0), zeros[1, 6]]]
    padded = np.pad(zeros, [(0, 0), (0, 2), (0, 0), (0, 0)]).reshape(2, 3, 3, 2, 3)
    expected = (
        np.einsum("rs,bskh->brkh", matrix, zeros),
        (np.array(means, np.float32), filled),
        (np.einsum("brwkh,wkh->brkh", padded, taps), filled),
    )
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("length", "width", "heads"), [(1, 5, 2), (70, 33, 4), pytest.param(200, 151, 2, marks=pytest.mark.slow)]
)
def test_convolution_by_bands_matches_one_term_for_each_tap(length, width, heads):
    """Sequences shorter than the filter, and longer than a block; values and gradients."""
    rng = np.random.default_rng(0)
    v, taps, signs = (
        jnp.asarray(rng.standard_normal(shape).astype(jnp.float32))
        for shape in ((2, length, 2, 3), (width, heads), (2, length, heads, 3))
    )

    def result(function, v, taps):
        score = lambda v, taps: (jnp.sum((o := function(v, taps / width)) * signs), o)  # noqa: E731
        return jax.grad(score, (0, 1), has_aux=True)(v, taps)

    actual, expected = once(lambda *xs: [result(f, *xs) for f in (value_conv, value_conv_reference)], v, taps)
    assert_close(actual, expected)


def test_invalid_arguments_raise():
    x = jnp.zeros((1, 4, 2, 3))
    for call, message in (
        (lambda: project_tokens(x, jnp.zeros((2, 5))), "projection .*expected matrices of 4 columns"),
        (lambda: pool_tokens(x, 0), "size 0: expected windows of at least 1 token"),
        (lambda: convolve_tokens(x, jnp.zeros((2, 1, 3))), r"taps .*expected \[W, 2, 3\]"),
        (lambda: value_conv(x, jnp.zeros((4, 2))), "expected an odd number of taps"),
        (lambda: value_conv(x, jnp.zeros((3, 3))), "a multiple of the 2 heads"),
    ):
        raises(message, call)
