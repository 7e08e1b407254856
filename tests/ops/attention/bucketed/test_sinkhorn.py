"""The soft permutation of Sinkhorn attention; its result is compared in the contracts of mixers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.bucketed import tiles
from hpnlp.ops.attention.bucketed.sinkhorn import SortSettings, balance, sinkhorn_attention
from hpnlp.ops.attention.bucketed.sinkhorn_cache import start_sinkhorn_cache
from tests.messages import raises

ONCE = {"xla_backend_optimization_level": 0}


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_many_iterations_give_a_doubly_stochastic_matrix():
    scores, allowed = normal(3, 6, 6), jnp.ones((1, 6, 6), bool)
    weights = jax.jit(lambda scores: balance(scores, allowed, 10, False), compiler_options=ONCE)(scores)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-4)
    np.testing.assert_allclose(weights.sum(axis=2), 1.0, atol=1e-4)


def test_causal_rows_are_functions_of_earlier_rows():
    scores, allowed = normal(6, 6), jnp.asarray(np.tri(6, k=-1, dtype=bool))

    @functools.partial(jax.jit, compiler_options=ONCE)
    def run(scores):
        gradient = jax.grad(lambda x: (balance(x, allowed, 3, True) ** 2).sum())(scores)
        return balance(scores, allowed, 3, True), balance(scores.at[4:].add(7.0), allowed, 3, True), gradient

    weights, changed, gradient = run(scores)
    np.testing.assert_array_equal(weights[:4], changed[:4])
    assert not np.asarray(weights)[~np.asarray(allowed)].any() and np.any(weights[4:] != changed[4:])
    assert np.isfinite(gradient).all()


def test_weights_of_large_scores_are_at_most_one():
    """Also where the compiler merges a factor of the scores with the subtraction of their sum."""
    scores = 1e8 * normal(200, 5, 5)
    allowed = jnp.asarray(np.tri(5, k=-1, dtype=bool))[None]
    # The default, which the tests switch off, and the only form of later releases.
    is_default = not jax.__version__.startswith("0.10.")
    options = ONCE if is_default else ONCE | {"xla_cpu_use_fusion_emitters": True}
    weights = jax.jit(lambda x: balance(0.7071 * x, allowed, 2, True), compiler_options=options)(scores)
    assert np.asarray(weights).max() == 1 and np.isfinite(weights).all()


def test_groups_of_tiles_do_not_change_the_result(monkeypatch):
    """Values and gradients of one group, and of 4 x 2 groups of three tiles, the last of which is cut."""

    def scored(q, k, v):
        o = sinkhorn_attention(q, k, v, SortSettings(4, 2, 0.5, True), segment_ids=ids)
        return jnp.sum(o**2), o

    ids = jnp.asarray(np.repeat([[1] * 14 + [2] * 9], 2, axis=0), jnp.int32)
    qkv = normal(3, 2, 23, 2, 4)
    results = []
    for scores in (tiles.CPU_SCORES, 50):
        monkeypatch.setattr(tiles, "CPU_SCORES", scores)
        # A new function for each, because traces are kept by function.
        run = jax.jit(jax.grad(lambda *x: scored(*x), (0, 1, 2), has_aux=True), compiler_options=ONCE)
        results.append(jax.tree.leaves(run(*qkv)))
    for one, several in zip(*results, strict=True):
        np.testing.assert_allclose(several, one, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("shape", [(0, 9, 2, 4), (2, 0, 2, 4)])
def test_empty_batches_and_sequences_have_empty_results(shape):
    def score(*qkv):
        o = sinkhorn_attention(*qkv, SortSettings(4, 2, 0.5, True))
        return o.sum(), o

    run = jax.jit(jax.grad(score, (0, 1, 2), has_aux=True), compiler_options=ONCE)
    gradients, o = run(*normal(3, *shape))
    assert o.shape == shape and all(x.shape == shape for x in gradients)


def test_dropout_drops_weights_and_keeps_their_mean():
    q, k, v = normal(3, 1, 24, 2, 4)
    settings = SortSettings(4, 2, 0.5, True)
    keys = jax.random.split(jax.random.key(1), 400)

    def run(keys):
        dropped = jax.vmap(lambda key: sinkhorn_attention(q, k, np.ones_like(v), settings, dropout_rate=0.5, rng=key))
        return dropped(keys), sinkhorn_attention(q, k, np.ones_like(v), settings)

    totals, weights = jax.device_get(jax.jit(run, compiler_options=ONCE)(keys))
    error = totals.std(axis=0) / len(keys) ** 0.5
    assert (np.abs(totals.mean(axis=0) - weights) <= 5 * error).all() and (error > 0).all()


def test_invalid_arguments_raise():
    q, k, v = normal(3, 1, 9, 4, 4)
    settings = SortSettings(4, 2, 0.5, True)
    raises("expected equal B, T and H, and K that divides N", sinkhorn_attention, q, k[:, :, :3], v[:, :, :3], settings)
    raises("dropout_rate 0.5: .* a key `rng`", sinkhorn_attention, q, k, v, settings, dropout_rate=0.5)
    raises("segment_ids has shape", sinkhorn_attention, q, k, v, settings, segment_ids=jnp.ones((1, 8), jnp.int32))
    raises("capacity 8 for 9 tokens", start_sinkhorn_cache, q, k, v, jnp.full(1, 9), settings, 8)
