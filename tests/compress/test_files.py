"""Weights of a model in a file: what is read equals what was written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.compress import container
from hpnlp.compress.files import read_weights, stored_bytes, write_weights
from hpnlp.ops.weights import LowRankWeight, quantize
from hpnlp.types import InputError

W = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def test_arrays_weights_and_tuples_are_read_as_written(tmp_path):
    stacked = jax.vmap(quantize)(np.stack([W, 2 * W]))
    layers = ({"kernel": quantize(W, 4)}, {"kernel": W, "bias": jnp.zeros(4)})
    factors = LowRankWeight(quantize(W), W[:4])
    params = {
        "embed": {"table": quantize(W, by_row=True)},
        "layers": layers,
        "stack": {"kernel": stacked},
        "x": factors,
    }
    write_weights(tmp_path / "x", params, {"note": 1})
    found, metadata = read_weights(tmp_path / "x")
    assert metadata == {"note": 1}
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


def test_memory_counts_half_a_byte_for_4_bits():
    assert stored_bytes({"a": quantize(W, 4), "b": W}) == 12 + 16 + 96


def test_unknown_kinds_raise(tmp_path):
    header = {"weights": {"a": {"kind": "Holographic"}}, "tuples": [], "metadata": None}
    container.write(tmp_path / "x", {"a": {"codes": W}}, header)
    with pytest.raises(InputError, match=r"a is a weight of kind 'Holographic'"):
        read_weights(tmp_path / "x")
