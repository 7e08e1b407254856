"""Linear attention in chunks and token by token equals its definition."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.linear import linear_attention, linear_attention_step, reference_linear_attention, zero_state
from tests.contracts import assert_close, once
from tests.messages import raises

B, T, N, K, M, H = 2, 21, 4, 2, 8, 5
RNG = np.random.default_rng(0)
SEGMENTS = {"none": None, "apart": jnp.asarray(RNG.integers(0, 3, (B, T)).astype(jnp.int32))}


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def arrays():
    """Positive q [B, T, N, M] and k [B, T, K, M], v [B, T, K, H] and a cotangent of o."""
    rng = np.random.default_rng(1)
    shapes = (N, M), (K, M), (K, H), (N, H)
    q, k, v, do = (jnp.asarray((rng.standard_normal((B, T, *shape)) / M**0.5).astype(jnp.float32)) for shape in shapes)
    return jnp.abs(q), jnp.abs(k), v, do


@pytest.mark.parametrize(
    ("segments", "causal", "normalize"), [("apart", True, True), ("apart", False, False), ("none", False, True)]
)
def test_outputs_and_gradients_match_reference(segments, causal, normalize):
    """For chunks that do not divide the length."""
    *qkv, do = arrays()

    def results(function, **options):
        def score(q, k, v):
            o = function(q, k, v, causal=causal, normalize=normalize, segment_ids=SEGMENTS[segments], **options)
            return jnp.sum(o * do), o

        return jax.grad(score, (0, 1, 2), has_aux=True)(*qkv)

    actual, expected = once(lambda: (results(linear_attention, chunk=8), results(reference_linear_attention)))
    assert_close(actual, expected)


def test_states_continue_sequences():
    """A sequence in two parts, and token by token, against one pass; gradients pass through the state."""
    *qkv, do = arrays()

    def whole(qkv):
        return linear_attention(*qkv, normalize=True, return_state=True, chunk=8)

    def in_parts(qkv):
        parts = [[x[:, :9] for x in qkv], [x[:, 9:] for x in qkv]]
        first, state = linear_attention(*parts[0], normalize=True, return_state=True, chunk=4)
        second, state = linear_attention(*parts[1], normalize=True, state=state, return_state=True, chunk=8)
        return jnp.concatenate([first, second], axis=1), state

    def by_token(qkv):
        state, outputs = zero_state(B, K, M, H, normalize=True), []
        for t in range(T):
            o, state = linear_attention_step(*(x[:, t] for x in qkv), state)
            outputs.append(o)
        return jnp.stack(outputs, axis=1), state

    def with_gradients(function):
        def score(qkv):
            o, state = function(qkv)
            return jnp.sum(o * do) + jnp.sum(state.s) + jnp.sum(state.z), (o, state)

        return jax.grad(score, has_aux=True)(qkv)

    expected, *actual = once(lambda: [with_gradients(f) for f in (whole, in_parts, by_token)])
    for results in actual:
        assert_close(results, expected)


def test_keys_of_another_length_need_no_mask():
    q, k, v, _ = arrays()
    options = {"causal": False, "normalize": True}
    actual, expected = once(
        lambda: [f(q[:, :7], k, v, **options) for f in (linear_attention, reference_linear_attention)]
    )
    assert_close(actual, expected)


def invalid_calls():
    q, k, v, _ = arrays()
    segment_ids = jnp.zeros((B, T), jnp.int32)
    yield "expected .B, T, N, M.", (q, k, v[:, 1:]), {}
    yield "multiple of key heads", (q[:, :, :3], k, v), {}
    yield "as many queries as keys", (q[:, 1:], k, v), {}
    yield "as many queries as keys", (q[:, 1:], k, v), {"causal": False, "segment_ids": segment_ids[:, 1:]}
    yield "power of 2", (q, k, v), {"chunk": 0}
    yield "power of 2", (q, k, v), {"chunk": 48}
    yield "log_decay .2, 21.: expected .2,., .2, 21, 2. or", (q, k, v), {"log_decay": k[:, :, 0, 0]}
    yield "no normalisation", (q, k, v), {"beta": k[..., 0], "normalize": True}
    yield "causal=False and log_decay", (q, k, v), {"log_decay": k[..., 0], "causal": False}
    yield "one for each token", (q, k, v), {"segment_ids": segment_ids[:, 1:]}
    yield "causal=False and state", (q, k, v), {"causal": False, "state": zero_state(B, K, M, H)}
    yield "causal=False and return_state", (q, k, v), {"causal": False, "return_state": True}
    yield "state.s .1, 2, 8, 5.: expected .2, 2, 8, 5.", (q, k, v), {"state": zero_state(1, K, M, H)}
    yield "state with a normaliser", (q, k, v), {"state": zero_state(B, K, M, H), "normalize": True}


def test_invalid_arguments_raise():
    for message, args, options in invalid_calls():
        raises(message, inspect.unwrap(linear_attention), *args, **options)


def test_memory_is_linear_in_length():
    """No array of all pairs of tokens: temporary memory of a gradient grows with the length, not its square."""

    def bytes_of(length):
        q, k, v = (jax.ShapeDtypeStruct((1, length, 1, M), jnp.float32) for _ in range(3))

        def score(q, k, v, causal):
            return linear_attention(q, k, v, causal=causal, normalize=True, chunk=16).sum()

        gradients = lambda *qkv: [jax.grad(score, (0, 1, 2))(*qkv, causal) for causal in (True, False)]  # noqa: E731
        return jax.jit(gradients).lower(q, k, v).compile().memory_analysis().temp_size_in_bytes

    sizes = [bytes_of(length) for length in (256, 1024)]
    assert sizes[1] <= 4.5 * sizes[0]
