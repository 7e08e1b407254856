"""Attention with random features: limits with many features, inputs of any size, and keys in any order of segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Causal, Full, attend
from hpnlp.ops.attention.linear.random_attention import random_feature_attention, rfa_attention
from hpnlp.ops.attention.linear.random_features import KINDS, random_projections
from tests.contracts import ONCE, assert_close, once
from tests.messages import raises


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def inputs(length, scale, dim=4, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, length, heads, dim)) for heads in (4, 2, 2))
    return [jnp.asarray(x, jnp.float32) for x in (scale * q, scale * k, v)]


def distances(actual, expected):
    """Error of each output of a dict, relative to the norm of the expected ones."""
    return {name: np.linalg.norm(x - expected) / np.linalg.norm(expected) for name, x in actual.items()}


def test_positive_features_tend_to_softmax_attention():
    """The error of 16,384 features is small in every kind, and that of 64 features is several times as large."""
    q, k, v = inputs(12, 0.7)
    w = random_projections(jax.random.key(0), 16_384, 4)
    rho = jnp.asarray([0.5, 0.6], jnp.float32)

    def outputs(q, k, v):
        few = random_feature_attention(q, k, v, w[:64])
        many = {kind: random_feature_attention(q, k, v, w, kind=kind, rho=rho) for kind in KINDS}
        return many | {"few": few}, attend(q, k, v, Causal())

    errors = distances(*once(outputs, q, k, v))
    few = errors.pop("few")
    assert max(errors.values()) < 0.05 and few > 4 * max(errors.values())


def test_rfa_tends_to_attention_with_unit_queries_and_keys():
    """Softmax attention of normalised queries and keys, times their scales."""
    q, k, v = inputs(12, 1.0)
    w = random_projections(jax.random.key(0), 16_384, 4)
    scale = jnp.asarray([[1.0, 1.0, 1.0, 1.0], [1.5, 1.5, 1.5, 1.5]], jnp.float32)

    def outputs(q, k, v):
        unit_q, unit_k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        # `attend` divides the scores by sqrt(H).
        unit_q, unit_k = unit_q * 2 * jnp.repeat(scale, 2, axis=0)[None, None], unit_k * scale[None, None]
        actual = rfa_attention(q, k, v, w, scale=scale, causal=False)
        return {"rfa": actual}, attend(unit_q, unit_k, v, Full())

    assert distances(*once(outputs, q, k, v))["rfa"] < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_large_inputs_give_finite_outputs_and_gradients(kind):
    """Entries of up to 1e4, in single tokens and in all of them, also in bfloat16."""
    q, k, v = inputs(6, 1.0)
    w = random_projections(jax.random.key(0), 8, 4)
    factors = jnp.asarray([1, 1e4, 1, 1e3, 1e4, 1e2], jnp.float32)[None, :, None, None]

    def outputs(q, k, v):
        positive = random_feature_attention(q, k, v, w, kind=kind, rho=jnp.full(2, 0.5, jnp.float32))
        results = jnp.stack([positive, rfa_attention(q, k, v, w)]).astype(jnp.float32)
        return jnp.sum(results), results

    run = jax.jit(jax.grad(outputs, (0, 1), has_aux=True), compiler_options=ONCE)
    cases = (q * factors, k * factors), (1e4 * q, 1e4 * k), (q.astype(jnp.bfloat16), 1e4 * k.astype(jnp.bfloat16))
    for leaf in jax.tree.leaves([run(*case, v) for case in cases]):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


def test_tokens_of_a_segment_may_be_apart():
    """Alternating segments give what each segment gives by itself, in both directions."""
    q, k, v = inputs(8, 1.0)
    w = random_projections(jax.random.key(0), 8, 4)
    ids = jnp.asarray([[0, 1] * 4] * 2, jnp.int32)

    def outputs(causal, q, k, v):
        both = [lambda *x, **kw: random_feature_attention(*x, w, **kw), lambda *x, **kw: rfa_attention(*x, w, **kw)]
        return [
            (
                function(q, k, v, causal=causal, segment_ids=ids)[:, 1::2],
                function(*(x[:, 1::2] for x in (q, k, v)), causal=causal),
            )
            for function in both
        ]

    for actual, expected in once(lambda *x: [pair for c in (True, False) for pair in outputs(c, *x)], q, k, v):
        assert_close(actual, expected)


def test_invalid_heads_raise():
    q, k, v = inputs(3, 1.0)
    for function in (random_feature_attention, rfa_attention):
        raises("multiple of key heads", jax.eval_shape, function, q[:, :, :3], k, v, jnp.ones((2, 4)))
