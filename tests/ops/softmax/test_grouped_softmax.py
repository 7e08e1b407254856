"""Softmax over groups of words: many patterns of groups, by one compiled program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.softmax.structured.grouped_softmax import TileShape, grouped_nll
from tests.contracts import ONCE, assert_close, assert_float16_has_gradients, once

N, D, NARROW = 23, 6, 4
# Groups of one word, of several windows, of a few words, without tokens, and with a window that would pass the table's end.
STARTS = np.array([0, 1, 14, 17, 20, 29], np.int32)
COUNT = len(STARTS) - 1


def operands(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (N, D), (STARTS[-1], NARROW), (STARTS[-1],), (NARROW, D)
    scales = 1.0, 0.5, 1.0, D**-0.5  # so that logits are of order 1
    return tuple(
        jnp.asarray((rng.standard_normal(shape) * scale).astype(dtype))
        for shape, scale in zip(shapes, scales, strict=True)
    )


def tokens(groups, seed=0):
    rng = np.random.default_rng(seed)
    inside = np.clip(groups, 0, COUNT - 1)
    targets = rng.integers(STARTS[inside], STARTS[inside + 1])
    return jnp.asarray(groups, jnp.int32), jnp.asarray(targets, jnp.int32)


def group_patterns():
    rng = np.random.default_rng(1)
    random_groups = rng.integers(-1, COUNT + 1, N)
    yield "some", np.where(random_groups == 3, 1, random_groups)
    yield "skewed", np.where(np.arange(N) == 5, 4, 1)
    yield "one group", np.full(N, 4)
    yield "one word", np.zeros(N, int)
    yield "none", np.full(N, -1)
    yield "one token", np.where(np.arange(N) == 7, 2, COUNT)
    yield "in order", np.sort(rng.integers(0, COUNT, N))


def reference(h, w, bias, projection, groups, targets):
    """The losses from the logits of all words."""
    h, w, bias, projection = (x.astype(jnp.float32) for x in (h, w, bias, projection))
    s = h @ projection.T @ w.T + bias[None]
    member = jnp.asarray(np.repeat(np.arange(COUNT, dtype=np.int32), np.diff(STARTS)))
    inside = jnp.clip(groups, 0, COUNT - 1)
    s = jnp.where(member[None] == inside[:, None], s, -1e30)
    losses = jax.nn.logsumexp(s, axis=1) - jnp.take_along_axis(s, targets[:, None], axis=1)[:, 0]
    return jnp.where((groups >= 0) & (groups < COUNT), losses, 0.0)


def grouped(h, w, bias, projection, groups, targets, block=4, width=5):
    return grouped_nll(h, w, groups, targets, STARTS, bias=bias, projection=projection, tile=TileShape(block, width))


@functools.cache
def loss_and_gradients(block=None, width=None):
    """Compiled losses, weighted with both signs, and gradients of all operands; of the reference if there is no block."""

    def loss(*arguments):
        losses = grouped(*arguments, block, width) if block else reference(*arguments)
        return jnp.sum(losses * jnp.cos(jnp.arange(N, dtype=jnp.float32))), losses

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True), compiler_options=ONCE)


@pytest.mark.parametrize(("block", "width"), [(4, 5), (100, 100)])
def test_matches_all_logits_for_any_grouping(block, width):
    arguments = operands()
    for name, groups in group_patterns():
        actual, expected = (
            f(*arguments, *tokens(groups)) for f in (loss_and_gradients(block, width), loss_and_gradients())
        )
        assert_close(actual, expected)
        assert name != "none" or not any(np.asarray(x).any() for x in jax.tree.leaves(actual))


def test_no_tokens():
    h, w, bias, projection = operands()
    none = jnp.zeros(0, jnp.int32)
    loss = lambda h, w: grouped_nll(h, w, none, none, STARTS, bias=bias, projection=projection, tile=TileShape(4, 5))  # noqa: E731
    assert loss(h[:0], w).shape == (0,)
    assert not np.asarray(jax.grad(lambda w: loss(h[:0], w).sum())(w)).any()


def test_groups_without_tokens_are_not_read():
    """NaN in unused words changes nothing, nor does NaN in tokens without a group, which fill the last block."""
    h, w, bias, projection = operands()
    groups, targets = tokens(np.where(np.arange(N) % 4 == 0, 1, -1))
    clean = loss_and_gradients(4, 5)(h, w, bias, projection, groups, targets)
    read = (np.arange(STARTS[-1]) >= 1) & (np.arange(STARTS[-1]) < 16)  # three windows of five
    h = jnp.where((groups < 0)[:, None], jnp.nan, h)
    w, bias = jnp.where(jnp.asarray(read)[:, None], w, jnp.nan), jnp.where(jnp.asarray(read), bias, jnp.nan)
    dirty = loss_and_gradients(4, 5)(h, w, bias, projection, groups, targets)
    for a, b in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nan_stays_within_its_token():
    h, *other_groups = operands()
    groups, targets = tokens(np.arange(N) % COUNT)
    losses = once(grouped, h.at[7].set(jnp.nan), *other_groups, groups, targets)
    np.testing.assert_array_equal(np.isnan(losses), np.arange(N) == 7)


def test_confident_token_keeps_loss_and_gradient():
    """Values match float64; lse - logit and softmax - 1 would round to 0."""
    w = jnp.array([[1.0], [0.0], [-0.5]])

    def loss(h):
        zero = jnp.zeros(1, jnp.int32)
        return grouped_nll(h, w, zero, zero, np.array([0, 3], np.int32), tile=TileShape(1, 2))[0]

    actual, slope = once(jax.value_and_grad(loss), jnp.array([[30.0]]))
    others_sum = np.exp(-30.0) + np.exp(-45.0)
    np.testing.assert_allclose(actual, np.log1p(others_sum), rtol=1e-6)
    np.testing.assert_allclose(slope[0, 0], (-np.exp(-30.0) - 1.5 * np.exp(-45.0)) / (1 + others_sum), rtol=1e-6)


def test_sixteen_bits_accumulate_in_float32():
    """Blocks of one token: a sum of their gradients in 16 bits would stop growing."""
    n, ones = 2000, jnp.ones((2000, 1), jnp.bfloat16)
    zero, starts = jnp.zeros(n, jnp.int32), np.array([0, 2], np.int32)

    def loss(h, w):
        return grouped_nll(h, w, zero, zero, starts, tile=TileShape(1, 2)).sum()

    actual, (dh, dw) = once(jax.value_and_grad(loss, (0, 1)), ones, jnp.zeros((2, 1), jnp.bfloat16))
    assert (actual.dtype, dh.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_allclose(actual, n * np.log(2), rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(dw, np.float32)[:, 0], [-1000.0, 1000.0])


@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_small_gradients_do_not_underflow_in_float16(at):
    """Gradients of the words' vectors, and of the projection."""
    h, w, bias, projection = operands()
    groups, targets = tokens(next(group_patterns())[1])

    def loss(h, table):
        of = (table, projection) if at == 1 else (w, table)
        return grouped(h, 100 * of[0], bias, of[1], groups, targets).sum() * 1e-7

    assert_float16_has_gradients(loss, h / 100, w if at == 1 else projection)


def test_vmap_checkpoint_and_hessian_products_match_reference():
    h, w, bias, projection = operands()
    (groups, targets), (other_groups, other_targets) = (tokens(groups) for _, groups in list(group_patterns())[:2])
    along = jax.tree.map(jnp.sin, (h, w, bias, projection))

    def everything(function):
        many = (
            jnp.stack([h, -h]),
            w,
            bias,
            projection,
            jnp.stack([groups, other_groups]),
            jnp.stack([targets, other_targets]),
        )
        losses = jax.vmap(jax.checkpoint(function), (0, None, None, None, 0, 0))
        slopes = jax.grad(lambda *arguments: jnp.sin(function(*arguments)).sum(), (0, 1, 2, 3))
        summed = jax.grad(lambda w: losses(many[0], w, *many[2:]).sum())(w)
        hessian = jax.jvp(lambda *arguments: slopes(*arguments, groups, targets), (h, w, bias, projection), along)[1]
        return jax.vmap(slopes, (0, None, None, None, 0, 0))(*many), summed, hessian

    for actual, expected in zip(*(once(lambda f=f: everything(f)) for f in (grouped, reference)), strict=True):
        assert_close(actual, expected)


def test_sharded_tokens_match_one_device():
    """Tokens are on a manual axis; gradients of replicated operands are summed over it."""
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    h, *shared = operands()
    groups, targets = tokens(next(group_patterns())[1])
    arguments = (h[:22], *shared, groups[:22], targets[:22])
    replicated, cut = jax.P(), jax.P("d")

    def apart(*arguments):
        return jax.lax.psum(grouped(*arguments).sum(), "d")

    apart = jax.shard_map(
        apart, mesh=mesh, in_specs=(cut, replicated, replicated, replicated, cut, cut), out_specs=replicated
    )
    slopes = [
        once(jax.value_and_grad(f, (0, 1, 2, 3)), *arguments)
        for f in (apart, lambda *arguments: reference(*arguments).sum())
    ]
    assert_close(*slopes)
