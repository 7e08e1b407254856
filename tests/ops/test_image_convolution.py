"""Convolutions of images and normalisation of their channels, against their definitions, each other and torch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.convolutions.image_convolution import DEPTHWISE, conv2d, depthwise_conv2d, window_taps
from hpnlp.ops.norms import channel_moments, group_norm, normalize_channels
from tests.contracts import assert_close
from tests.messages import raises

# (height, width of the image, side of the kernel, stride)
SHAPES = [(5, 4, 3, 1), (6, 5, 3, 2), (3, 7, 5, 2), (4, 4, 1, 2), (1, 1, 3, 1)]


def arrays(height, width, side, dtype="float32", filters=(4,)):
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((2, height, width, 3)), rng.standard_normal((side, side, 3, *filters))
    return [jnp.asarray(array, dtype) for array in (x, kernel / (2 * side))]  # outputs of order 1


def windows(x, side, stride):
    """The definition: pixels `[B, Y2, X2, K, K, C]` around each position, 0 outside of the image."""
    border = side // 2
    padded = np.pad(np.asarray(x, np.float64), ((0, 0), (border, border), (border, border), (0, 0)))
    rows, columns = (range(0, n, stride) for n in x.shape[1:3])
    return np.stack([np.stack([padded[:, i : i + side, j : j + side] for j in columns], 1) for i in rows], 1)


@pytest.mark.parametrize(("height", "width", "side", "stride"), SHAPES)
def test_convolutions_match_their_definition(height, width, side, stride):
    x, kernel = arrays(height, width, side)
    expected = windows(x, side, stride)
    of_all = np.einsum("byxuvc,uvcf->byxf", expected, np.asarray(kernel, np.float64)).astype(np.float32)
    of_each = np.einsum("byxuvc,uvc->byxc", expected, np.asarray(kernel[..., 0], np.float64)).astype(np.float32)
    assert_close(conv2d(x, kernel, stride=stride), jnp.asarray(of_all))
    for impl in DEPTHWISE:
        actual = depthwise_conv2d(x, kernel[..., 0], stride=stride, impl=impl)
        assert_close(actual, jnp.asarray(of_each), name=impl)


@pytest.mark.parametrize(("height", "width", "side", "stride"), SHAPES)
def test_gradients_match_those_of_jax(height, width, side, stride):
    x, kernel = arrays(height, width, side)

    def plain(x, kernel, groups=1):
        border = side // 2
        options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), [(border, border)] * 2, **options)

    def gradients(function, kernel):
        return jax.grad(lambda x, k: jnp.sin(function(x, k)).sum(), argnums=(0, 1))(x, kernel)

    def run(kernel):
        by_impl = [
            gradients(partial(depthwise_conv2d, stride=stride, impl=i), kernel[..., 0]) for i in ("shifts", "xla")
        ]
        grouped = gradients(lambda x, k: plain(x, k[:, :, None], 3), kernel[..., 0])
        return (gradients(partial(conv2d, stride=stride), kernel), *by_impl), (
            gradients(plain, kernel),
            grouped,
            grouped,
        )

    assert_close(*jax.jit(run)(kernel))


# Taps of a window of 3 x 3: a row, two columns, a corner, a cross, and all but one.
TAPS = [(3, 4, 5), (1, 2, 4, 5, 7, 8), (8,), (1, 3, 4, 5, 7), (0, 1, 2, 3, 5, 6, 7, 8)]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kept", TAPS)
def test_kernels_with_few_taps_equal_kernels_with_zeros(kept, stride):
    x, kernel = arrays(6, 5, 3)
    index = np.array(kept)
    taps = [window_taps(3)[i] for i in kept]
    mask = jnp.asarray(np.isin(np.arange(9), index).reshape(3, 3, 1, 1), jnp.float32)

    def results(function, kernel):
        value, back = jax.vjp(lambda x, k: function(x, k, stride=stride), x, kernel)
        return value, *back(jnp.sin(value))

    @jax.jit
    def run(kernel):
        pairs = []
        for function, k, m in (
            (conv2d, kernel, mask),
            *((partial(depthwise_conv2d, impl=impl), kernel[..., 0], mask[..., 0]) for impl in ("shifts", "xla")),
        ):
            y, dx, dk = results(partial(function, taps=taps), k.reshape(9, *k.shape[2:])[index])
            zeroed = results(function, k * m)
            pairs.append(((y, dx, dk), (*zeroed[:2], zeroed[2].reshape(9, *k.shape[2:])[index])))
        return pairs

    for actual, expected in run(kernel):
        assert_close(actual, expected)


def test_gradients_of_single_taps_match_their_definition():
    """Where some or all pixels at the tap are outside of the image; XLA:CPU reads beyond arrays with negative borders."""
    x, kernel = arrays(4, 4, 1)
    pixels, taps = windows(x, 9, 1), [(0, column) for column in (-4, -1, 1, 2, 3, 4)] + [(1, 0), (2, 1), (4, 4)]

    def gradient(function, x, kernel, tap):
        y, back = jax.vjp(lambda k: function(x, k, taps=(tap,)), kernel)
        return back(jnp.cos(y))[0][0]

    @jax.jit
    def run(x, kernel):
        depthwise = partial(depthwise_conv2d, impl="xla")
        return [(gradient(conv2d, x, kernel, tap), gradient(depthwise, x, kernel[..., 0], tap)) for tap in taps]

    for (row, column), actual in zip(taps, run(x, kernel[0]), strict=True):
        at_tap, weights = pixels[:, :, :, row + 4, column + 4], np.asarray(kernel[0, 0], np.float64)
        of_all = np.einsum("byxc,byxf->cf", at_tap, np.cos(at_tap @ weights))
        of_each = (at_tap * np.cos(at_tap * weights[:, 0])).sum((0, 1, 2))
        assert_close(actual, (jnp.float32(of_all), jnp.float32(of_each)), name=f"{row} {column}")


@pytest.mark.parametrize(
    "function", [conv2d, partial(depthwise_conv2d, impl="shifts"), partial(depthwise_conv2d, impl="xla")]
)
def test_bfloat16_images_match_float32(function):
    x, kernel = arrays(5, 5, 3, "bfloat16")
    kernel = kernel.astype(jnp.float32) if function is conv2d else kernel[..., 0].astype(jnp.float32)

    def results(x):
        y, back = jax.vjp(lambda x, k: function(x, k, stride=2), x, kernel)
        return y, *back(y)

    actual, expected = jax.jit(results)(x), jax.jit(results)(x.astype(jnp.float32))
    assert actual[0].dtype == actual[1].dtype == x.dtype
    assert_close(actual, jax.tree.map(lambda a, b: a.astype(b.dtype), expected, actual), x.dtype)


def test_invalid_arguments_raise():
    for function, shape, options, message in (
        (conv2d, (2, 2, 3, 4), {}, r"kernel \(2, 2, 3, 4\): expected an odd side"),
        (conv2d, (3, 1, 3, 4), {}, "expected an odd side, twice"),
        (conv2d, (3, 3, 2, 4), {}, "the 3 channels of x"),
        (conv2d, (3, 3, 3), {}, "expected an odd side, twice"),
        (conv2d, (0, 3, 4), {"taps": ()}, "taps=.*: expected at least one position"),
        (conv2d, (3, 3, 3, 4), {"stride": 0}, "stride=0: expected at least 1"),
        (conv2d, (3, 3, 3, 4), {"taps": ((0, 0),)}, r"kernel \(3, 3, 3, 4\) with taps=.*: expected the number of taps"),
        (conv2d, (2, 3, 4), {"taps": ((0, 0), (0, 0))}, "taps, which differ"),
        (depthwise_conv2d, (2, 3), {"taps": ((0, 0),)}, r"as in \(1, 3, ...\)"),
        (depthwise_conv2d, (3, 3, 3), {"impl": "grouped"}, "impl='grouped': known: auto, shifts, xla"),
    ):
        raises(message, function, jnp.zeros((1, 4, 4, 3)), jnp.zeros(shape), **options)


def test_moments_leave_out_examples_of_weight_0():
    rng = np.random.default_rng(1)
    x = jnp.asarray((rng.standard_normal((4, 3, 2, 5)) + 7).astype(jnp.float32))
    mean, variance, count = channel_moments(x, jnp.float32([1, 0, 1, 1]))
    rows = np.asarray(x, np.float64)[[0, 2, 3]].reshape(-1, 5)
    assert count == len(rows)
    assert_close((mean, variance), (jnp.float32(rows.mean(0)), jnp.float32(rows.var(0))))
    empty = channel_moments(x, jnp.zeros(4))
    np.testing.assert_array_equal(np.concatenate(jax.tree.leaves(jax.tree.map(jnp.ravel, empty))), 0)


def test_factors_of_channels_may_be_powers_of_two():
    rng = np.random.default_rng(2)
    x, mean, bias = (jnp.float32(rng.normal(size=shape)) for shape in ((3, 4, 6), 6, 6))
    variance, scale = jnp.float32(rng.uniform(0.1, 9, 6)), jnp.float32(rng.normal(size=6)).at[2].set(0.0)

    def program(scale):
        _, plain = jax.vjp(lambda s: normalize_channels(x, mean, variance, s, bias, 1e-5), scale)
        rounded = jax.vjp(lambda s: normalize_channels(x, mean, variance, s, bias, 1e-5, powers=True), scale)
        return plain(x), rounded[0], rounded[1](x)

    plain_gradient, found, gradient = jax.jit(program)(scale)
    factor = np.asarray(scale) / np.sqrt(np.asarray(variance) + 1e-5)
    powers = np.sign(factor) * 2.0 ** np.round(np.log2(np.where(factor == 0, 1, np.abs(factor))))
    assert_close(found, jnp.float32((np.asarray(x) - np.asarray(mean)) * powers + np.asarray(bias)))
    assert_close(gradient, plain_gradient)


@pytest.mark.oracle
def test_normalisations_match_torch():
    rng = np.random.default_rng(1)
    torch = pytest.importorskip("torch")
    x, scale, bias = (
        jnp.asarray(rng.standard_normal(shape).astype(jnp.float32)) for shape in ((3, 4, 5, 6), (6,), (6,))
    )
    first, *vectors = (torch.from_numpy(np.array(a)) for a in (jnp.moveaxis(x, -1, 1), scale, bias))
    expected = torch.nn.functional.group_norm(first, 3, *vectors, eps=1e-5)
    assert_close(group_norm(x, scale, bias, 3, 1e-5), jnp.asarray(expected.movedim(1, -1).numpy()))
    expected = torch.nn.functional.batch_norm(first, None, None, *vectors, training=True, eps=1e-5)
    mean, variance, _ = channel_moments(x, jnp.ones(3))
    assert_close(normalize_channels(x, mean, variance, scale, bias, 1e-5), jnp.asarray(expected.movedim(1, -1).numpy()))
