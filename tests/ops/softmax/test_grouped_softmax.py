"""Tokens against the words of their group: every way in which tokens may fall into groups, by one compiled program."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.softmax.grouped_softmax import grouped_nll
from tests.contracts import ONCE, assert_close, assert_float16_has_gradients, once

N, D, NARROW = 23, 6, 4
# Of one word, of several windows, of a few words, of no token, and of a window that would pass the table's end.
STARTS = np.array([0, 1, 14, 17, 20, 29], np.int32)
COUNT = len(STARTS) - 1


def operands(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (N, D), (STARTS[-1], NARROW), (STARTS[-1],), (NARROW, D)
    scales = 1.0, 0.5, 1.0, D**-0.5  # so that logits are of order 1
    return tuple(
        jnp.asarray(rng.standard_normal(shape) * scale, dtype) for shape, scale in zip(shapes, scales, strict=True)
    )


def tokens(groups, seed=0):
    rng = np.random.default_rng(seed)
    inside = np.clip(groups, 0, COUNT - 1)
    targets = rng.integers(STARTS[inside], STARTS[inside + 1])
    return jnp.asarray(groups, jnp.int32), jnp.asarray(targets, jnp.int32)


def falls():
    rng = np.random.default_rng(1)
    some = rng.integers(-1, COUNT + 1, N)
    yield "some", np.where(some == 3, 1, some)
    yield "skewed", np.where(np.arange(N) == 5, 4, 1)
    yield "one group", np.full(N, 4)
    yield "one word", np.zeros(N, int)
    yield "none", np.full(N, -1)
    yield "one token", np.where(np.arange(N) == 7, 2, COUNT)
    yield "in order", np.sort(rng.integers(0, COUNT, N))


def twin(h, w, bias, projection, groups, targets):
    """From the logits of all words."""
    h, w, bias, projection = (x.astype(jnp.float32) for x in (h, w, bias, projection))
    s = h @ projection.T @ w.T + bias[None]
    member = jnp.asarray(np.repeat(np.arange(COUNT, dtype=np.int32), np.diff(STARTS)))
    inside = jnp.clip(groups, 0, COUNT - 1)
    s = jnp.where(member[None] == inside[:, None], s, -1e30)
    each = jax.nn.logsumexp(s, axis=1) - jnp.take_along_axis(s, targets[:, None], axis=1)[:, 0]
    return jnp.where((groups >= 0) & (groups < COUNT), each, 0.0)


def ours(h, w, bias, projection, groups, targets, block=4, width=5):
    return grouped_nll(h, w, groups, targets, STARTS, bias=bias, projection=projection, block=block, width=width)


@functools.cache
def weighed(block=None, width=None):
    """The losses with weights of both signs, and gradients of all operands; compiled. Without a block, those of the twin."""

    def loss(*given):
        each = ours(*given, block, width) if block else twin(*given)
        return jnp.sum(each * jnp.cos(jnp.arange(N, dtype=jnp.float32))), each

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True), compiler_options=ONCE)


@pytest.mark.parametrize(("block", "width"), [(4, 5), (100, 100)])
def test_equals_all_logits_however_tokens_fall(block, width):
    given = operands()
    for name, groups in falls():
        found, expected = (f(*given, *tokens(groups)) for f in (weighed(block, width), weighed()))
        assert_close(found, expected)
        assert name != "none" or not any(np.asarray(x).any() for x in jax.tree.leaves(found))


def test_no_token():
    h, w, bias, projection = operands()
    none = jnp.zeros(0, jnp.int32)
    loss = lambda h, w: grouped_nll(h, w, none, none, STARTS, bias=bias, projection=projection, block=4, width=5)  # noqa: E731
    assert loss(h[:0], w).shape == (0,)
    assert not np.asarray(jax.grad(lambda w: loss(h[:0], w).sum())(w)).any()


def test_groups_without_tokens_are_not_read():
    """NaN there is nothing, and so is NaN in a token without a group, which fills up the last block."""
    h, w, bias, projection = operands()
    groups, targets = tokens(np.where(np.arange(N) % 4 == 0, 1, -1))
    clean = weighed(4, 5)(h, w, bias, projection, groups, targets)
    read = (np.arange(STARTS[-1]) >= 1) & (np.arange(STARTS[-1]) < 16)  # three windows of five
    h = jnp.where((groups < 0)[:, None], jnp.nan, h)
    w, bias = jnp.where(jnp.asarray(read)[:, None], w, jnp.nan), jnp.where(jnp.asarray(read), bias, jnp.nan)
    dirty = weighed(4, 5)(h, w, bias, projection, groups, targets)
    for a, b in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_token_that_is_nan_is_nan_alone():
    h, *others = operands()
    groups, targets = tokens(np.arange(N) % COUNT)
    each = once(ours, h.at[7].set(jnp.nan), *others, groups, targets)
    np.testing.assert_array_equal(np.isnan(each), np.arange(N) == 7)


def test_a_confident_token_has_a_loss_and_a_gradient():
    """As float64 has them: lse - logit and softmax - 1 would be 0."""
    w = jnp.array([[1.0], [0.0], [-0.5]])

    def loss(h):
        zero = jnp.zeros(1, jnp.int32)
        return grouped_nll(h, w, zero, zero, np.array([0, 3], np.int32), block=1, width=2)[0]

    found, slope = once(jax.value_and_grad(loss), jnp.array([[30.0]]))
    rest = np.exp(-30.0) + np.exp(-45.0)
    np.testing.assert_allclose(found, np.log1p(rest), rtol=1e-6)
    np.testing.assert_allclose(slope[0, 0], (-np.exp(-30.0) - 1.5 * np.exp(-45.0)) / (1 + rest), rtol=1e-6)


def test_sixteen_bits_accumulate_in_float32():
    """One token a block: a sum of the blocks' gradients in 16 bits would stop growing."""
    n, ones = 2000, jnp.ones((2000, 1), jnp.bfloat16)
    zero, starts = jnp.zeros(n, jnp.int32), np.array([0, 2], np.int32)

    def loss(h, w):
        return grouped_nll(h, w, zero, zero, starts, block=1, width=2).sum()

    found, (dh, dw) = once(jax.value_and_grad(loss, (0, 1)), ones, jnp.zeros((2, 1), jnp.bfloat16))
    assert (found.dtype, dh.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_allclose(found, n * np.log(2), rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(dw, np.float32)[:, 0], [-1000.0, 1000.0])


@pytest.mark.parametrize("at", [1, 2])
def test_gradients_of_small_parts_in_float16(at):
    """Of the words' vectors, and of the projection."""
    h, w, bias, projection = operands()
    groups, targets = tokens(next(falls())[1])

    def loss(h, table):
        of = (table, projection) if at == 1 else (w, table)
        return ours(h, 100 * of[0], bias, of[1], groups, targets).sum() * 1e-7

    assert_float16_has_gradients(loss, h / 100, w if at == 1 else projection)


def test_vmap_checkpoint_and_products_with_the_hessian():
    h, w, bias, projection = operands()
    (groups, targets), (others, theirs) = (tokens(groups) for _, groups in list(falls())[:2])
    along = jax.tree.map(jnp.sin, (h, w, bias, projection))

    def everything(function):
        many = (jnp.stack([h, -h]), w, bias, projection, jnp.stack([groups, others]), jnp.stack([targets, theirs]))
        each = jax.vmap(jax.checkpoint(function), (0, None, None, None, 0, 0))
        slopes = jax.grad(lambda *given: jnp.sin(function(*given)).sum(), (0, 1, 2, 3))
        summed = jax.grad(lambda w: each(many[0], w, *many[2:]).sum())(w)
        hessian = jax.jvp(lambda *given: slopes(*given, groups, targets), (h, w, bias, projection), along)[1]
        return jax.vmap(slopes, (0, None, None, None, 0, 0))(*many), summed, hessian

    for found, expected in zip(*(once(lambda f=f: everything(f)) for f in (ours, twin)), strict=True):
        assert_close(found, expected)


def test_over_devices():
    """Tokens on a manual axis: gradients of what all share are summed over it."""
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    h, *shared = operands()
    groups, targets = tokens(next(falls())[1])
    given = (h[:22], *shared, groups[:22], targets[:22])
    whole, cut = jax.P(), jax.P("d")

    def apart(*given):
        return jax.lax.psum(ours(*given).sum(), "d")

    apart = jax.shard_map(apart, mesh=mesh, in_specs=(cut, whole, whole, whole, cut, cut), out_specs=whole)
    slopes = [once(jax.value_and_grad(f, (0, 1, 2, 3)), *given) for f in (apart, lambda *given: twin(*given).sum())]
    assert_close(*slopes)
