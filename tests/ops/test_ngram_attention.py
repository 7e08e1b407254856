"""N-gram attention: equality with a loop over channels and positions, independence of padding, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.ngram_attention import NGRAMS, ngram_attention
from hpnlp.types import InputError
from tests import projection_reference as reference
from tests.contracts import assert_close, once

B, T, D, C = 4, 6, 3, 5
LENGTHS = np.array([6, 1, 3, 0])
IS_TOKEN = jnp.asarray(np.arange(T) < LENGTHS[:, None])


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


VALUES, LOGITS, BIAS = draw(B, T, D), draw(B, T, D, seed=1), draw(C, seed=2)


def kernels(offsets):
    return draw(len(offsets) * D, C, seed=3), draw(len(offsets) * D, C, seed=4)


def test_vectors_equal_a_loop_over_positions():
    def run(values, logits):
        return {
            name: ngram_attention(values, logits, *kernels(offsets), BIAS, IS_TOKEN, offsets=offsets)
            for name, offsets in NGRAMS.items()
        }

    for name, result in once(run, VALUES, LOGITS).items():
        assert not np.asarray(result[3]).any()
        value_kernel, logit_kernel = map(np.asarray, kernels(NGRAMS[name]))
        for row in range(3):
            arrays = (np.asarray(VALUES[row], np.float64), np.asarray(LOGITS[row], np.float64), int(LENGTHS[row]))
            expected = reference.ngram_attention(
                *arrays, NGRAMS[name], value_kernel, np.asarray(BIAS), logit_kernel, np.zeros(C)
            )
            assert_close(result[row], expected.astype(np.float32))


def test_padding_changes_neither_vectors_nor_gradients():
    offsets = NGRAMS["skip2bigram"]

    def run(values, logits, is_token):
        def loss(values, logits, kernel):
            y = ngram_attention(values, logits, kernel, kernels(offsets)[1], BIAS, is_token, offsets=offsets)
            return (y * y).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(values, logits, kernels(offsets)[0])

    value, (of_values, of_logits, of_kernel) = once(run, VALUES, LOGITS, IS_TOKEN)
    padded = [jnp.where(IS_TOKEN[..., None], x, jnp.nan) for x in (VALUES, LOGITS)]
    longer = [jnp.pad(x, ((0, 0), (0, 2), (0, 0)), constant_values=jnp.nan) for x in padded]
    other = once(run, *longer, jnp.pad(IS_TOKEN, ((0, 0), (0, 2))))
    assert not np.asarray(other[1][0])[:, T:].any()
    assert_close(
        (other[0], other[1][0][:, :T], other[1][1][:, :T], other[1][2]), (value, of_values, of_logits, of_kernel)
    )


def test_other_shapes_raise():
    with pytest.raises(InputError, match=r"two \[B, T, D\] and two \[2 D, C\]"):
        ngram_attention(VALUES, LOGITS, *kernels((0,)), BIAS, IS_TOKEN, offsets=(0, 1))
