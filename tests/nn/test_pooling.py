"""Pooling of the hidden states of a sequence against the definitions in numpy."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.nn.pooling import POOLINGS, Pooling
from tests.contracts import once

B, T, D = 4, 7, 5
LENGTHS = (7, 3, 1, 0)


def numpy_pooling(kind, h, length, query):
    h = h[:length]
    if not length:
        return np.zeros(D)
    if kind == "attention":
        weights = np.exp(h @ query)
        return weights @ h / weights.sum()
    return {"mean": h.mean(axis=0), "first": h[0], "max": h.max(axis=0)}[kind]


@pytest.mark.parametrize("kind", POOLINGS)
def test_pooling_matches_numpy(kind):
    """Padding does not count, even if it holds infinity; nor does the order of the tokens. Padding has no gradient."""
    rng = np.random.default_rng(0)
    h = rng.standard_normal((B, T, D)).astype(np.float32)
    is_token = np.arange(T)[None] < np.array(LENGTHS)[:, None]
    padded = np.where(is_token[..., None], h, np.inf).astype(np.float32)
    order = rng.permutation(T)
    ids = np.arange(B * T, dtype=np.int32).reshape(B, T)
    pool = Pooling(kind)
    operands = [jnp.asarray(x[:, order]) for x in (padded, is_token.astype(np.int32), ids)]
    params = once(lambda: nn.meta.unbox(pool.init(jax.random.key(0), *operands)))
    direction = jnp.asarray(rng.standard_normal((B, D)).astype(jnp.float32))

    def pooled(h):
        y = pool.apply(params, h, *operands[1:])
        return (y * direction).sum(), y

    (_, y), gradient = once(jax.value_and_grad(pooled, has_aux=True), operands[0])
    query = np.asarray(params["params"]["query"]) if kind == "attention" else None
    expected = [numpy_pooling(kind, *row, query) for row in zip(h, LENGTHS, strict=True)]
    np.testing.assert_allclose(y, expected, atol=1e-6)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(np.asarray(gradient).any(axis=2) & ~is_token[:, order], False)
    assert np.asarray(gradient).any(axis=(1, 2)).tolist() == [True, True, True, False]
