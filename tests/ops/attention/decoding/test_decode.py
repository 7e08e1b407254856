"""Attention over a cache against the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.decoding.decode import attend_cache
from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.masks.patterns import Causal
from hpnlp.ops.attention.reference import reference


@dataclasses.dataclass(frozen=True)
class Odd(Mask):
    """Odd positions see nothing, even ones all earlier positions."""

    def at(self, q, k):
        return (q % 2 == 0) & (k < q)

    def tile(self, q0, q1, k0, k1):
        return k0 < q1, False


@functools.partial(jax.jit, static_argnames="mask", compiler_options={"xla_backend_optimization_level": 0})
def attend(q, k, v, mask, positions, lengths):
    places = jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    return attend_cache(q, k, v, mask, positions, jnp.where(places < lengths[:, None], places, -1))


@functools.partial(jax.jit, static_argnames="mask", compiler_options={"xla_backend_optimization_level": 0})
def by_reference(q, k, v, mask, positions, lengths):
    """The same by the reference, with keys and values as `[B, S, K, H]`."""
    k, v = (x.reshape(q.shape[0], -1, *x.shape[1:]).transpose(0, 2, 1, 3) for x in (k, v))
    places = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32)[None], k.shape[:2])
    return reference(q, k, v, mask, positions=positions, kv_positions=places, kv_lengths=lengths)


def draw(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize(
    ("mask", "length", "heads", "kv_heads"),
    [(Causal(), 1, 4, 4), (Causal(), 3, 6, 2), (Full(), 1, 4, 2), (Odd(), 1, 3, 1), (Odd(), 2, 4, 2)],
    ids=str,
)
def test_results_match_reference(mask, length, heads, kv_heads):
    batch, capacity, size = 3, 13, 4
    lengths = jnp.asarray([length, 7, capacity], jnp.int32)
    positions = lengths[:, None] - length + jnp.arange(length, dtype=jnp.int32)[None]
    q, k = draw(batch, length, heads, size), draw(batch * kv_heads, capacity, size, seed=1)
    v = draw(batch * kv_heads, capacity, size + 1, seed=2)
    out, expected = (f(q, k, v, mask, positions, lengths) for f in (attend, by_reference))
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_hidden_keys_change_nothing_and_empty_rows_are_zero():
    q, k, v = draw(1, 1, 2, 4), draw(2, 5, 4, seed=1), draw(2, 5, 4, seed=2)
    positions, lengths = jnp.asarray([[2]], jnp.int32), jnp.asarray([3], jnp.int32)
    out = attend(q, k, v, Full(), positions, lengths)
    changed = attend(q, k.at[:, 3:].set(1e4), v.at[:, 3:].set(1e4), Full(), positions, lengths)
    np.testing.assert_array_equal(out, changed)
    assert np.all(np.asarray(attend(q, k, v, Odd(), positions - 1, lengths)) == 0.0)
    np.testing.assert_array_equal(attend(q, k[:, :0], v[:, :0], Full(), positions, lengths), np.zeros_like(out))


def test_sixteen_bits_accumulate_in_float32():
    q, k, v = (
        draw(*shape, dtype=jnp.bfloat16, seed=i) for i, shape in enumerate([(2, 1, 2, 8), (4, 64, 8), (4, 64, 8)])
    )
    args = jnp.full((2, 1), 63, jnp.int32), jnp.full((2,), 64, jnp.int32)
    out = attend(q, k, v, Causal(), *args)
    wide = attend(*(x.astype(jnp.float32) for x in (q, k, v)), Causal(), *args)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), wide, atol=2e-2)
