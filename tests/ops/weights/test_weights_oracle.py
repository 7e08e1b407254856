"""Kinds of weights and straight-through estimators against qwix and torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.linear import linear
from hpnlp.ops.weights import keep_two_of_four, masked, output_error, quantize, quantize_by_moments, to_floats
from hpnlp.ops.weights import straight_through as through

pytestmark = pytest.mark.oracle

RNG = np.random.default_rng(0)
W = RNG.normal(size=(64, 12)).astype(np.float32)
W[::16] = 5 + RNG.random(
    (4, 12)
)  # of each group: the largest magnitude is positive, since qwix rounds the smallest to -8
X = RNG.normal(size=(5, 64)).astype(np.float32)


@pytest.fixture
def qwix():
    return pytest.importorskip("qwix")


@pytest.mark.parametrize(
    ("bits", "options", "theirs"),
    [
        (8, {}, {"channelwise_axes": [1]}),
        (8, {"by_row": True}, {"channelwise_axes": [0]}),
        (4, {"group": 16}, {"channelwise_axes": [1], "tiled_axes": {0: 16}}),
        (3, {}, {"channelwise_axes": [1]}),
    ],
)
def test_integers_equal_qwix(qwix, bits, options, theirs):
    top = 2 ** (bits - 1) - 1
    w = np.abs(W) if options.get("by_row") else W
    kind = {8: jnp.int8, 4: jnp.int4}.get(bits, f"int{bits}")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        array = qwix.quantize(jnp.asarray(w), kind, **theirs)
        expected = qwix.dequantize(array)
    # qwix has steps of 1 / (top + 0.5) of the largest magnitude.
    mine = quantize(w, bits, limits=array.scale * top, **options)
    np.testing.assert_array_equal(mine.codes, array.qvalue)
    np.testing.assert_allclose(mine.dense(), expected, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 5])
def test_products_of_integers_equal_qwix(qwix, rows):
    x, w = X[:rows], quantize(W)
    steps = np.abs(x).max(1, keepdims=True) / np.float32(127)
    left = qwix.QArray(jnp.asarray(np.round(x / steps), jnp.int8), jnp.asarray(steps))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected = qwix.dot_general(left, qwix.QArray(w.codes, w.scales), (((1,), (0,)), ((), ())))
    np.testing.assert_allclose(linear(x, w), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_float8_equals_qwix(qwix, dtype):
    weight = to_floats(W, dtype, round_inputs=True)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        right = qwix.quantize(jnp.asarray(W), weight.codes.dtype, channelwise_axes=[1])
        left = qwix.quantize(jnp.asarray(X), weight.codes.dtype, channelwise_axes=[0])
        expected = qwix.dot_general(left, right, (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(weight.codes, right.qvalue)
    np.testing.assert_allclose(linear(X, weight), expected, rtol=1e-5, atol=1e-5)


def test_two_of_four_equals_qwix(qwix):
    from qwix._src.core import sparsity

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        mask = sparsity.get_sparsity_mask(jnp.asarray(W), 2, 4, order="C")
    np.testing.assert_array_equal(keep_two_of_four(W).dense(), np.where(mask, W, 0))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_fake_quantization_equals_torch(bits):
    torch = pytest.importorskip("torch")
    top = 2 ** (bits - 1) - 1
    w, dy = torch.tensor(W, requires_grad=True), RNG.normal(size=W.shape).astype(np.float32)
    limits = np.full((1, 12), 1.7, np.float32)
    value = torch.fake_quantize_per_channel_affine(
        w, torch.tensor(limits[0] / top), torch.zeros(12, dtype=torch.int32), 1, -top, top
    )
    value.backward(torch.tensor(dy))
    mine, pull = jax.vjp(lambda w: through.round_through(w, limits, bits), jnp.asarray(W))
    np.testing.assert_allclose(mine, value.detach().numpy(), rtol=1e-6)
    np.testing.assert_array_equal(pull(jnp.asarray(dy))[0], w.grad.numpy())


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_masks_equal_torch(share):
    torch = pytest.importorskip("torch")
    from torch.nn.utils import prune

    module = torch.nn.Linear(12, 64)
    module.weight.data = torch.tensor(W)
    prune.l1_unstructured(module, "weight", amount=W.size - round(share * W.size))
    np.testing.assert_array_equal(masked(W, share).dense(), module.weight.detach().numpy())


def test_rounding_by_moments_is_at_least_as_good_as_gptq_of_qwix(qwix):
    from qwix._src.core import qarray
    from qwix.contrib import gptq_core

    rng = np.random.default_rng(2)
    x = (rng.normal(size=(300, 48)) @ rng.normal(size=(48, 48))).astype(np.float32)
    w, moments = rng.normal(size=(48, 20)).astype(np.float32), x.T @ x
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        how = qarray.HowToQuantize(qtype=jnp.int4, channelwise_axes=[0], tiled_axes={1: 16})
        theirs, _ = gptq_core.quantize_weight(jnp.asarray(w.T), jnp.asarray(moments), how)
        expected = np.asarray(qarray.dequantize(theirs)).T
    ours = quantize_by_moments(w, moments, 4, group=16)
    assert output_error(ours.dense() - w, moments) < 1.02 * output_error(expected - w, moments)
