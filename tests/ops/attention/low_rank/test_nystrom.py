"""Nystrom attention: exact cases, the pseudo-inverse, sequences without tokens, and dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import reference
from hpnlp.ops.attention.low_rank.nystrom import nystrom_attend, pseudo_inverse
from tests.contracts import assert_close, once
from tests.messages import raises


def make(batch=2, length=12, heads=2, width=4, scale=1.0):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray((scale * rng.standard_normal((batch, length, heads, width))).astype(jnp.float32)) for _ in range(3)
    ]


def test_approximation_tends_to_exact_attention():
    """It is exact with a landmark for each token, and for tokens that are equal within windows."""
    real = jnp.asarray([[1] * 12, [1] * 7 + [0] * 5], bool)
    q, k, v = make()
    ids = {"segment_ids": np.where(real, 1, 0), "kv_segment_ids": np.where(real, 1, 2)}

    def run(q, k, v):
        equal = *(jnp.repeat(x[:1, :3], 4, axis=1) for x in (2 * q, 2 * k)), v[:1]
        approximations = nystrom_attend(q, k, v, 12, real), nystrom_attend(*equal, 3)
        return approximations, (reference(q, k, v, **ids), reference(*equal))

    actual, expected = once(run, q, k, v)
    assert_close(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], atol=1e-3)


def test_pseudo_inverse_of_stochastic_matrices():
    """Rows and columns of zeros, as those of landmarks without tokens, stay zeros."""
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 5, 5)) + 4 * np.eye(5), jnp.float32)
    a = jax.nn.softmax(scores, axis=-1).at[1, :, 2:].set(0).at[1, :, :, 2:].set(0)
    inverse = np.asarray(once(lambda a: pseudo_inverse(a, 12), a))
    np.testing.assert_allclose(inverse, np.linalg.pinv(np.asarray(a)), atol=1e-5)
    assert not inverse[1, :, 2:].any() and not inverse[1, :, :, 2:].any()


def test_sequences_without_tokens_give_zeros_and_finite_gradients():
    real = jnp.zeros((2, 12), bool).at[0, :5].set(True)

    def score(arrays):
        o = nystrom_attend(*arrays, 4, real)
        return jnp.sum(o**2), o

    gradients, o = once(jax.grad(score, has_aux=True), make())
    assert not np.asarray(o)[1].any() and np.asarray(o)[0, :5].any()
    assert all(np.isfinite(x).all() and not np.asarray(x)[1].any() for x in gradients)


def test_weights_of_large_scores_are_the_same_in_both_passes():
    """Scores of 1e8: a value contributes to each of the 9 outputs with a weight of about 1 at most."""
    q, k, v = make(2, 9, 2, 8)

    def score(v):
        return jnp.sum(jnp.abs(nystrom_attend(1e4 * q, 1e4 * k, v, 3)))

    assert np.abs(np.asarray(once(jax.grad(score), v))).max() < 9.1


@pytest.mark.slow
def test_dropout_is_unbiased():
    q, k, v = make(1, 8, 2, 3)
    keys = jax.random.split(jax.random.key(0), 4000)

    def run(q, k, v):
        drawn = jax.lax.map(lambda key: nystrom_attend(q, k, v, 4, dropout_rate=0.2, rng=key), keys)
        return drawn.mean(axis=0), drawn.std(axis=0), nystrom_attend(q, k, v, 4)

    mean, deviation, exact = map(np.asarray, once(run, q, k, v))
    assert (np.abs(mean - exact) <= 4 * deviation / 4000**0.5).all() and deviation.any()


def test_invalid_arguments_raise():
    q, k, v = make()
    raises("0 landmarks, 12 queries, 12 keys", nystrom_attend, q, k, v, 0)
    raises("as many keys and values as queries", nystrom_attend, q, k[:, :5], v, 4)
