"""Decays and the delta rule in chunks and token by token equal their definitions."""

import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.linear import (
    LinearState,
    linear_attention,
    linear_attention_step,
    reference_linear_attention,
    reference_linear_recurrence,
    zero_state,
)
from hpnlp.ops.attention.linear.delta import unit_lower_inverse
from tests.contracts import assert_close, once
from tests.messages import raises

B, T, N, K, M, H = 2, 21, 4, 2, 8, 5
SEGMENTS = jnp.asarray(np.random.default_rng(0).integers(0, 2, (B, T)).astype(jnp.int32))


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def arrays():
    """q, keys of length 1, v, and a cotangent of o."""
    rng = np.random.default_rng(1)
    shapes = (N, M), (K, M), (K, H), (N, H)
    q, k, v, do = (rng.standard_normal((B, T, *shape)) for shape in shapes)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, do))


def gates():
    """Name -> (log_decay, beta)."""
    rng = np.random.default_rng(2)
    by_head, by_token, by_feature = (
        jnp.asarray(-0.5 * rng.random(shape), jnp.float32) for shape in ((K,), (B, T, K), (B, T, K, M))
    )
    beta = jnp.asarray(rng.random((B, T, K)).astype(jnp.float32))
    return {
        "head": (by_head, None),
        "token": (by_token, None),
        "feature": (by_feature, None),
        "delta": (None, beta),
        "delta, token": (by_token, beta),
        "delta, feature": (by_feature, beta),
    }


# The contracts of retention and of the gated delta rule compare the other cases with references, too.
FIRST = {"token", "delta, feature"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.slow]) for name in gates()]
)
def test_outputs_and_gradients_match_reference(name):
    """With segments whose tokens are apart; chunks of 16 are divided into halves for decays by feature."""
    *qkv, do = arrays()

    def results(function, **options):
        def score(qkv, gates):
            o = function(*qkv, log_decay=gates[0], beta=gates[1], segment_ids=SEGMENTS, **options)
            return jnp.sum(o * do), o

        return jax.grad(score, (0, 1), has_aux=True)(qkv, gates()[name])

    actual, expected = once(lambda: (results(linear_attention, chunk=16), results(reference_linear_attention)))
    assert_close(actual, expected)


def test_both_definitions_agree():
    """The recurrence and the matrix of all pairs, for all decays, consecutive segments and normalised outputs."""
    q, k, v, _ = arrays()
    segment_ids = jnp.sort(SEGMENTS, axis=1)

    def outputs(definition):
        decayed = [definition(q, k, v, log_decay=d, beta=b, segment_ids=segment_ids) for d, b in gates().values()]
        return [*decayed, definition(jnp.abs(q), jnp.abs(k), v, normalize=True, segment_ids=segment_ids)]

    assert_close(*once(lambda: [outputs(f) for f in (reference_linear_recurrence, reference_linear_attention)]))


@pytest.mark.parametrize("name", ["delta, token", "feature"])
def test_states_continue_sequences(name):
    """A sequence in two parts, and its last token by a step, against one pass."""
    *qkv, _ = arrays()
    log_decay, beta = gates()[name]
    inputs = (*qkv, log_decay, *([] if beta is None else [beta]))

    def run(start, end, state=None):
        q, k, v, log_decay, *beta = (x[:, start:end] for x in inputs)
        options = {"log_decay": log_decay, "beta": beta[0] if beta else None, "state": state, "return_state": True}
        return linear_attention(q, k, v, chunk=8, **options)

    def in_parts():
        first, state = run(0, 9)
        second, state = run(9, 20, state)
        q, k, v, log_decay, *beta = (x[:, 20] for x in inputs)
        last, state = linear_attention_step(q, k, v, state, log_decay=log_decay, beta=beta[0] if beta else None)
        return jnp.concatenate([first, second, last[:, None]], axis=1), state

    assert_close(*once(lambda: (in_parts(), run(0, T))))


@pytest.mark.parametrize("segments", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["delta, token", pytest.param("feature", marks=pytest.mark.slow)])
def test_parts_on_a_cpu_match_the_whole(name, segments, monkeypatch):
    """Parts of 6 tokens, of which the last has 3, against all at once: outputs, states, gradients."""
    *qkv, do = arrays()
    ids = jnp.asarray(np.array([[0] * 6 + [1] * 15, [0] * 2 + [1] * 8 + [2] * 11], np.int32)) if segments else None
    state = LinearState(jnp.asarray(np.random.default_rng(3).standard_normal((B, K, M, H)), jnp.float32))

    def results():
        def score(qkv, gates, state):
            log_decay, beta = gates
            options = {"segment_ids": ids, "state": state, "return_state": True, "chunk": 4}
            o, last = linear_attention(*qkv, log_decay=log_decay, beta=beta, **options)
            return jnp.sum(o * do) + jnp.sum(jnp.sin(last.s)), (o, last)

        return jax.grad(score, (0, 1, 2), has_aux=True)(qkv, gates()[name], state)

    whole = once(lambda: results())  # a new function, so that it is compiled again
    module = importlib.import_module("hpnlp.ops.attention.linear.linear_attention")
    monkeypatch.setattr(module, "CPU_TOKENS", 6 * B * K)
    monkeypatch.setattr(module, "LEAST_TOKENS", 1)
    assert_close(once(lambda: results()), whole)


@pytest.mark.parametrize("features", [False, True])
def test_strong_decays_are_exact(features):
    """Decays of exp(-1000) beside weak ones give the outputs of single steps, and finite gradients."""
    q, k, v, do = arrays()
    strong = np.where(np.arange(T) % 3 == 0, -0.01, -1000.0)[None, :, None]
    log_decay = jnp.asarray(np.broadcast_to(strong, (B, T, K)), jnp.float32)
    log_decay = jnp.broadcast_to(log_decay[..., None], k.shape) if features else log_decay

    def score(q, k, v, log_decay):
        o = linear_attention(q, k, v, log_decay=log_decay, chunk=16)
        return jnp.sum(o * do), o

    def by_token(q, k, v, log_decay):
        def token(state, x):
            o, state = linear_attention_step(*x[:3], state, log_decay=x[3])
            return state, o

        tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay)]
        return jnp.moveaxis(jax.lax.scan(token, zero_state(B, K, M, H), tokens)[1], 0, 1)

    gradient = jax.grad(score, (0, 1, 2, 3), has_aux=True)
    (gradients, o), expected = once(lambda *x: (gradient(*x), by_token(*x)), q, k, v, log_decay)
    assert_close(o, expected)
    assert all(np.isfinite(x).all() for x in (*gradients, o))
    # A token whose own decay is exp(-1000) reads nothing but itself.
    grouped = np.asarray(q).reshape(B, T, K, N // K, M)
    alone = np.einsum("btkgm,btkm,btkh->btkgh", grouped, k, v).reshape(B, T, N, H)
    np.testing.assert_allclose(np.asarray(o)[:, 1::3], alone[:, 1::3], atol=1e-5)


def test_unit_lower_inverse_matches_inverse():
    lower = jnp.asarray(np.tril(np.random.default_rng(0).standard_normal((3, 16, 16)), -1) / 4, jnp.float32)

    def both(lower):
        return unit_lower_inverse(lower), jnp.linalg.inv(jnp.eye(16)[None] + lower)

    def gradient(index):
        strict = jnp.tri(16, k=-1, dtype=jnp.float32)[None]
        return jax.grad(lambda lower: jnp.sum(jnp.sin(both(lower * strict)[index])))

    values, actual, expected = once(lambda: (both(lower), gradient(0)(lower), gradient(1)(lower)))
    assert_close(values[0], values[1])
    assert_close(actual, expected)


def test_invalid_arguments_of_steps_raise():
    step = inspect.unwrap(linear_attention_step)  # beartype would raise first
    q, k, v, beta = (jnp.ones(shape, jnp.float32) for shape in ((B, N, M), (B, K, M), (B, K, H), (B, K)))
    state = zero_state(B, K, M, H)
    for message, args, options in (
        ("expected .B, N, M., .B, K, M. and .B, K, H.", (q, k, v[:1], state), {}),
        ("multiple of key heads", (q[:, :3], k, v, state), {}),
        ("state.s .2, 2, 8, 4.: expected .2, 2, 8, 5.", (q, k, v, zero_state(B, K, M, H - 1)), {}),
        ("state.z .2, 2, 7.: expected .2, 2, 8.", (q, k, v, LinearState(state.s, k[..., 1:])), {}),
        ("log_decay .2, 1.: expected .2,., .2, 2. or .2, 2, 8.", (q, k, v, state), {"log_decay": beta[:, :1]}),
        ("without a normaliser", (q, k, v, zero_state(B, K, M, H, normalize=True)), {"beta": beta}),
    ):
        raises(message, step, *args, **options)
