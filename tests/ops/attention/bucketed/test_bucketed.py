"""Attention within buckets against dense attention, its hash, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.bucketed import (
    BucketSettings,
    attend,
    bucketed_attention,
    bucketed_reference,
    extend_bucket_cache,
    lsh_buckets,
    random_rotations,
    start_bucket_cache,
    tiles,
    unit_vectors,
    visible_pairs,
)
from hpnlp.ops.attention.bucketed.order import bucket_ranks, sort_by_bucket
from hpnlp.ops.dropout import keep_mask, seed_words
from tests.messages import raises

ONCE = {"xla_backend_optimization_level": 0}
B, T, N, K, H = 2, 37, 4, 2, 8


def arrays(rounds=3, buckets=4):
    """q, k, v, buckets and segment ids, which are not sorted."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((B, T, n, H)).astype(jnp.float32)) for n in (N, N, K))
    drawn = jnp.asarray(rng.integers(0, buckets, (B, T, N, rounds)).astype(jnp.int32))
    return q, k, v, drawn, jnp.asarray(rng.integers(0, 2, (B, T)).astype(jnp.int32))


def once(function, *args):
    return jax.jit(function, compiler_options=ONCE)(*args)


def assert_equal_with_gradients(functions, q, k, v):
    signs = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, N, H)).astype(jnp.float32))

    def both(*args):
        def score(function, *args):
            o = function(*args)
            return jnp.sum(o * signs), o

        return [jax.grad(lambda *a, f=f: score(f, *a), (0, 1, 2), has_aux=True)(*args) for f in functions]

    actual, expected = once(both, q, k, v)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize(("causal", "hides_self"), [(True, False), pytest.param(False, True, marks=pytest.mark.slow)])
def test_rounds_equal_dense_attention_over_the_union_of_their_pairs(causal, hides_self, monkeypatch):
    """Several blocks before each, several groups of tiles, and pairs of heads."""
    monkeypatch.setattr(tiles, "CPU_SCORES", 600)
    monkeypatch.setattr(attend, "CPU_TOKENS", 2 * T)
    q, k, v, buckets, segment_ids = arrays()
    settings = BucketSettings(11, causal, hides_self, scale=0.7)
    functions = (bucketed_attention, bucketed_reference)
    assert_equal_with_gradients(
        [lambda *a, f=f: f(*a, buckets, settings, segment_ids=segment_ids) for f in functions], q, k, v
    )


def test_padding_does_not_change_the_groups_of_tiles(monkeypatch):
    """490 tokens, padded to 512 in 2 groups of 16 times 2 blocks; 512 tokens alone would have groups of 17 times 2."""
    monkeypatch.setattr(tiles, "CPU_SCORES", 17 * 8 * 16)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((1, 490, 1, 4)).astype(jnp.float32)) for _ in range(3)]
    buckets = jnp.asarray(rng.integers(0, 3, (1, 490, 1, 1)).astype(jnp.int32))

    def of(function, *arrays):
        def score(*qkv):
            o = function(*qkv, buckets, BucketSettings(8, causal=True))
            return jnp.sum(o**2), o

        return jax.grad(score, (0, 1, 2), has_aux=True)(*arrays)

    functions = (bucketed_attention, bucketed_reference)
    actual, expected = once(lambda *arrays: [of(function, *arrays) for function in functions], *arrays)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


def test_weights_of_large_scores_are_exact_in_the_backward_pass():
    """Scores of 1e8, against the definition; gradients of values are sums of the weights."""
    q, k, v, buckets, _ = arrays()
    settings = BucketSettings(11, causal=False)
    functions = bucketed_attention, bucketed_reference
    signs = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, N, H)).astype(jnp.float32))

    def gradients(q, k):
        return [jax.grad(lambda v, f=f: jnp.sum(signs * f(q, k, v, buckets, settings)))(v) for f in functions]

    actual, expected = once(gradients, 1e4 * q, 1e4 * k)
    np.testing.assert_allclose(actual, expected, atol=5e-6, rtol=5e-6)


def test_dropout_depends_on_indices_in_the_sequence():
    """Dense weights with the same pattern; a token that sees only itself is dropped, too."""
    q, k, v, buckets, _ = arrays(rounds=2, buckets=12)
    rng, streams = jax.random.key(3), jnp.arange(7, 7 + B * N, dtype=jnp.int32).reshape(B, N)
    settings = BucketSettings(2, causal=True, hides_self=True)

    def dense(q, k, v):
        index = jnp.arange(T, dtype=jnp.int32)
        kept = keep_mask(
            seed_words(rng), streams[..., None, None], index[None, None, :, None], index[None, None, None], 0.3
        )
        eye = jnp.broadcast_to(jnp.eye(T, dtype=jnp.float32)[None, :, None], (B, T, N, T))
        weights = bucketed_reference(q, k, eye, buckets, settings).transpose(0, 2, 1, 3)
        values = jnp.repeat(v, N // K, axis=2)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(kept, weights / 0.7, 0.0), values)

    def sparse(q, k, v):
        return bucketed_attention(q, k, v, buckets, settings, dropout_rate=0.3, rng=rng, streams=streams)

    pairs = visible_pairs(buckets, BucketSettings(2, causal=True))
    assert (np.asarray(pairs).sum(axis=3) == 1).any(axis=2).all()
    assert_equal_with_gradients((sparse, dense), q, k, v)


def test_nan_reaches_only_tokens_that_see_it():
    """Across segments and across examples, in values and in gradients; NaN of the gradients shows who sees the token."""
    q, k, v, buckets, segment_ids = arrays()

    def of(value, hides_self):
        def score(q, k, v):
            settings = BucketSettings(3, causal=True, hides_self=hides_self)
            o = bucketed_attention(q, k, v, buckets, settings, segment_ids=segment_ids)
            return jnp.sum(o**2), o

        tensors = [x.at[0, 9].set(value) for x in (q, k, v)]
        gradients, o = jax.grad(score, (0, 1, 2), has_aux=True)(*tensors)
        return o, gradients

    alike = np.asarray(segment_ids == segment_ids[0, 9]) & (np.arange(B) == 0)[:, None]
    values = jnp.asarray([1.0, jnp.nan])
    for (o, gradients), (nan_o, nan_gradients) in [
        [jax.tree.map(np.asarray, x) for x in once(lambda x, h=hides_self: [of(x[0], h), of(x[1], h)], values)]
        for hides_self in (True, False)
    ]:
        for finite, x in zip((o, *gradients), (nan_o, *nan_gradients), strict=True):
            np.testing.assert_array_equal(x[~alike], finite[~alike])
        assert np.isnan(nan_o[0, 9:][alike[0, 9:]]).any() and not np.isnan(nan_o[0, :9]).any()


def test_order_and_ranks():
    """Tokens are sorted by segment, bucket and index; coordinates of a bucket differ by ranks, and of others by more."""
    buckets = jnp.asarray([1, 0, 1, 1, 0, 1], jnp.int32)
    segment_ids = jnp.asarray([5, 5, 5, -2, 5, 5], jnp.int32)
    (order, coordinates), ranks = once(lambda *x: (sort_by_bucket(*x, 3), bucket_ranks(*x)), buckets, segment_ids)
    np.testing.assert_array_equal(order, [3, 1, 4, 0, 2, 5])
    np.testing.assert_array_equal(np.diff(coordinates), [5, 1, 5, 1, 1])
    np.testing.assert_array_equal(ranks, [0, 0, 1, 0, 1, 2])
    for ids in (segment_ids, None):  # buckets that do not fit into one number together with the index
        for large, small in zip(sort_by_bucket(buckets * 2**30, ids, 3), sort_by_bucket(buckets, ids, 3), strict=True):
            np.testing.assert_array_equal(large, small)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int16])
def test_order_of_small_integers_is_that_of_int32(dtype):
    buckets = jnp.asarray(np.random.default_rng(0).integers(0, 120, 700).astype(dtype))
    results = (sort_by_bucket(x, None, 3) for x in (buckets, buckets.astype(jnp.int32)))
    for small, large in zip(*results, strict=True):
        np.testing.assert_array_equal(small, large)
    np.testing.assert_array_equal(bucket_ranks(buckets), bucket_ranks(buckets.astype(jnp.int32)))


def test_hash_is_a_function_of_the_direction():
    x, noise = np.random.default_rng(0).standard_normal((2, 500, 16)).astype(np.float32)

    def hashed(x, other):
        rotations = random_rotations(jax.random.key(1), 2, 16, 8)
        single = lsh_buckets(x, random_rotations(jax.random.key(1), 2, 16, 1))
        return [lsh_buckets(y, rotations) for y in (x, 5 * x, -x, other)], single, unit_vectors(x)

    (buckets, scaled, negative, near), single, unit = jax.device_get(once(hashed, x, x + 0.1 * noise))
    np.testing.assert_array_equal(scaled, buckets)
    np.testing.assert_array_equal(negative, (buckets + 4) % 8)
    assert np.bincount(buckets[:, 0]).min() > 30
    assert (near == buckets).mean() > 0.7
    assert not single.any()
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1.0, rtol=1e-5)


def test_invalid_arguments_raise():
    q, k, v, buckets, _ = arrays()
    settings = BucketSettings(3, causal=True)
    cases = (
        (lambda: bucketed_attention(q, k[:, 1:], v, buckets, settings), "k .* expected equal B and T"),
        (lambda: bucketed_attention(q, k, v[:, :, [0, 0, 0]], buckets, settings), "a number of heads that divides 4"),
        (lambda: bucketed_attention(q, k[..., 1:], v, buckets, settings), "expected the same head size"),
        (
            lambda: bucketed_attention(q, k, v, buckets, settings, segment_ids=jnp.ones((B, 3), jnp.int32)),
            "segment_ids has shape",
        ),
        (lambda: bucketed_attention(q, k, v, buckets[:, :, 1:], settings), "expected .* and at least one round"),
        (lambda: BucketSettings(-1, causal=True), "window is -1: expected 0 or more"),
        (lambda: bucketed_attention(q, k, v, buckets, settings, dropout_rate=0.1), "a key `rng`"),
        (lambda: sort_by_bucket(jnp.zeros(70000, jnp.int32), None, 70000), "window 70000 with 70000 tokens"),
        (
            lambda: random_rotations(jax.random.key(0), 1, 4, 3),
            "buckets=3: expected at least one round, and 1 or an even",
        ),
        (lambda: start_bucket_cache(k, v, buckets, jnp.full(B, T), 8), "capacity 8 for 37 tokens"),
        (
            lambda: extend_bucket_cache(q, k, v, buckets, None, BucketSettings(3, causal=False)),
            "expected causal=True, since a cache",
        ),
    )
    for call, message in cases:
        raises(message, call)
