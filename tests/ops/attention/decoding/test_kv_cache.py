"""Caches and their rings against the reference over the whole sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Blockwise, Causal, Global, PerHead, Sinks, Window, reference
from hpnlp.ops.attention.decoding.kv_cache import MAX_SHARED_BEAMS, KVCache, extend_cache, start_cache
from tests.messages import raises

ONCE = {"xla_backend_optimization_level": 0}
LENGTH = 40
NEAR = Causal() & Window(3)
PINNED = Causal() & (Window(4) | Global(3))
HEADS = Causal() & PerHead((Window(2), Sinks(1) | Window(0), Blockwise(4), Window(5)))


def arrays(batch):
    """q, k, v of sequences of LENGTH tokens."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=(batch, LENGTH, *shape)).astype(np.float32)  # noqa: E731
    return draw(4, 6), draw(2, 6), draw(2, 5)


def attend_whole(q, k, v, mask):
    if not isinstance(mask, PerHead):
        return reference(q, k, v, mask)
    inputs = [(q[:, :, n : n + 1], *(x[:, :, n // 2 : n // 2 + 1] for x in (k, v)), mask.masks[n]) for n in range(4)]
    return jnp.concatenate([reference(*part) for part in inputs], axis=2)


@pytest.mark.parametrize("mask", [HEADS, Causal()], ids=["heads", "full"])
def test_reordered_beams_match_copied_caches(mask):
    """Three beams of two examples, whose order is random before each token."""
    beams, tokens, lengths = 3, 12, np.array([2, 9], np.int32)
    q, k, v = arrays(2 * beams)
    orders = jnp.asarray(np.random.default_rng(1).integers(0, beams, (tokens, 2, beams)).astype(jnp.int32))

    def run(q, k, v, orders):
        shared = start_cache(k[::beams, :9], v[::beams, :9], jnp.asarray(lengths), mask, LENGTH)
        copied = jax.tree.map(lambda x: jnp.repeat(x.reshape(2, -1, *x.shape[1:]), beams, axis=0), shared)

        def step(caches, inputs):
            (shared, copied), (order, *token) = caches, inputs
            rows = (order + beams * jnp.arange(2, dtype=jnp.int32)[:, None]).reshape(-1)
            copied = jax.tree.map(lambda x: x[rows], copied)
            o, shared = shared.reordered(order).extend(*token, mask)
            expected, extended = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), copied).extend(*token, mask)
            return (shared, jax.tree.map(lambda x, like: x.reshape(like.shape), extended, copied)), (o, expected)

        inputs = [jnp.moveaxis(x[:, 20 : 20 + tokens], 1, 0)[:, :, None] for x in (q, k, v)]
        return jax.lax.scan(step, (shared.for_beams(beams), copied), (orders, *inputs))[1]

    o, expected = jax.jit(run, compiler_options=ONCE)(q, k, v, orders)
    np.testing.assert_allclose(o, expected, atol=1e-6)


def test_many_beams_have_copies_of_the_cache():
    beams = MAX_SHARED_BEAMS + 1
    cache = KVCache(jnp.arange(24.0).reshape(4, 3, 2), jnp.zeros((4, 3, 1)), jnp.array([3, 2], jnp.int32), pinned=1)
    copies = cache.for_beams(beams)
    assert type(copies) is KVCache and copies.pinned == 1
    expected = np.repeat(cache.k.reshape(2, 1, 2, 3, 2), beams, axis=1)
    np.testing.assert_array_equal(copies.k.reshape(expected.shape), expected)
    np.testing.assert_array_equal(copies.lengths, np.repeat([3, 2], beams))


@pytest.mark.parametrize(
    ("mask", "slots", "lengths"),
    [
        (NEAR, 4, (1, 17, 4)),  # fewer tokens than the ring holds, four times as many, equally many
        (PINNED, 8, tuple(range(1, 10))),  # from nine examples on, slots are written by another operation
        (HEADS, 7, (3, 13, 6)),
        pytest.param(Causal() & Window(60), LENGTH, (1, 17, 4), marks=pytest.mark.slow),
    ],
    ids=["window", "rows", "heads", "wide"],
)
def test_prompts_then_tokens_match_the_whole_sequence(mask, slots, lengths):
    """Examples have different lengths; steps are of one token, of a few, and of more than a ring holds."""
    batch = len(lengths)
    q, k, v = arrays(batch)
    expected = np.asarray(jax.jit(attend_whole, static_argnums=3, compiler_options=ONCE)(q, k, v, mask))
    rows, lengths = np.arange(batch)[:, None], np.array(lengths, np.int32)
    width = int(lengths.max())
    start = jax.jit(start_cache, static_argnums=(3, 4), compiler_options=ONCE)
    extend = jax.jit(extend_cache, static_argnums=3, compiler_options=ONCE)
    cache = start(k[:, :width], v[:, :width], jnp.asarray(lengths), mask, LENGTH)
    assert cache.k.shape == (2 * batch, slots, 6) and cache.v.shape == (2 * batch, slots, 5)
    for count in (1, 1, 3, 1, 9, 1, 1):
        places = lengths[:, None] + np.arange(count)[None]
        o, cache = extend(*(x[rows, places] for x in (q, k, v)), mask, cache)
        np.testing.assert_allclose(o, expected[rows, places], atol=3e-6)
        lengths = lengths + count
        np.testing.assert_array_equal(cache.lengths, lengths)


def test_slots_hold_pinned_and_latest_positions():
    """Two pinned slots and a ring of three."""
    cache = KVCache(np.zeros((4, 5, 1)), np.zeros((4, 5, 1)), jnp.arange(9, dtype=jnp.int32), pinned=2)
    held = [[*range(n), *[-1] * (5 - n)] for n in range(6)]
    assert cache.positions().tolist() == [*held, [0, 1, 5, 3, 4], [0, 1, 5, 6, 4], [0, 1, 5, 6, 7]]


@pytest.mark.parametrize(("mask", "slots"), [(NEAR, 4), (PINNED, 8), (HEADS, 7)], ids=["window", "pinned", "heads"])
def test_memory_of_bounded_masks_does_not_depend_on_capacity(mask, slots):
    row = jax.ShapeDtypeStruct((1, 30, 2, 8), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    for capacity in (100, 1_000_000):
        cache = jax.eval_shape(lambda k, n: start_cache(k, k, n, mask, capacity), row, lengths)  # noqa: B023
        assert cache.k.shape == cache.v.shape == (2, slots, 8) and cache.k.dtype == jnp.bfloat16


def test_invalid_arguments_raise():
    q, k, v = (x[:, :6] for x in arrays(2))
    lengths = np.full((2,), 6, np.int32)
    raises("capacity 5 for 6 tokens", start_cache, k, v, lengths, NEAR, 5)
    cache = jax.jit(start_cache, static_argnums=(3, 4), compiler_options=ONCE)(k, v, lengths, NEAR, LENGTH)
    for mask in (Causal(), Causal() & Window(4), PINNED):
        raises("0 pinned keys and the last 4: make the cache with the mask", extend_cache, q, k, v, mask, cache)
    raises("PerHead of 3 masks for 4 query heads", lambda: extend_cache(q, k, v, PerHead((NEAR,) * 3), cache))
