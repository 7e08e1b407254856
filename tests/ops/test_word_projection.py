"""Ternary features of words: equality with a loop over bits, memory of the product, and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops import word_projection
from hpnlp.ops.word_projection import projected_product, ternary_features
from tests import projection_reference as reference
from tests.contracts import assert_close, once
from tests.messages import raises


def drawn(batch, length, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-(2**31), 2**31, (batch, length, 4), dtype=np.int32))


def test_features_equal_a_loop_over_bits():
    hashes = drawn(2, 3)
    hashes = hashes.at[0, 0].set(0)
    result = np.asarray(ternary_features(hashes, 128))
    assert result.dtype == np.int8
    for place in np.ndindex(2, 3):
        np.testing.assert_array_equal(result[place], reference.features(np.asarray(hashes[place]).view(np.uint32), 128))


def test_features_have_the_stated_shares_and_no_correlation():
    x = np.asarray(ternary_features(drawn(1, 4000), 256))[0].astype(np.float64)
    shares = [np.mean(x == value) for value in (-1, 0, 1)]
    np.testing.assert_allclose(shares, [0.25, 0.5, 0.25], atol=4 * 0.5 / np.sqrt(x.size))
    correlation = np.corrcoef(x.T) - np.eye(256)
    assert np.abs(correlation).max() < 6 / np.sqrt(len(x))


def test_products_in_parts_equal_those_of_all_features(monkeypatch):
    hashes = drawn(3, 11)
    w = np.random.default_rng(1).standard_normal((64, 5)).astype(np.float32)

    def run(hashes, w):
        return jax.value_and_grad(lambda w: (projected_product(hashes, w) ** 2).sum())(w)

    expected = once(
        lambda h, w: jax.value_and_grad(lambda w: ((ternary_features(h, 64).astype(jnp.float32) @ w) ** 2).sum())(w),
        hashes,
        w,
    )
    monkeypatch.setattr(word_projection, "_ROWS", 12)
    assert_close(once(run, hashes, jnp.asarray(w)), expected)


def test_memory_of_a_product_does_not_grow_with_all_features():
    """The float32 features of 64 x 512 words alone would take 67 MB."""
    hashes = jax.ShapeDtypeStruct((64, 512, 4), jnp.int32)
    w = jax.ShapeDtypeStruct((512, 8), jnp.float32)
    step = jax.jit(jax.grad(lambda w, h: (projected_product(h, w) ** 2).sum()))
    memory: Any = step.lower(w, hashes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 40e6


@pytest.mark.parametrize("features", [0, 63, 100])
def test_other_numbers_of_features_raise(features):
    raises("pass a multiple of 64, such as", lambda: ternary_features(drawn(1, 2), features))
    raises("pass a multiple of 64", lambda: projected_product(drawn(1, 2), np.zeros((features, 3), np.float32)))


def test_other_shapes_raise():
    raises(r"expected \[B, T, 4\]", ternary_features, jnp.zeros((2, 3), jnp.int32), 64)
