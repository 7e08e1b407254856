"""Weights of a model in a file: what is read equals what was written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.compress import container
from hpnlp.compress.files import encoding_of, read_weights, stored_bytes, write_weights
from hpnlp.ops.weights import LowRankWeight, quantize
from tests.messages import raises

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


@pytest.mark.parametrize(
    ("zeros", "distinct", "encoding", "size"),
    [
        (0.9, 0, "nonzeros", 0.15),  # pruned weights, of which nearly all differ
        (0.5, 0, "nonzeros", 0.54),
        (0.02, 0, "raw", 1.01),
        (0.3, 15, "sparse", 0.12),  # and with a codebook
        (0.9, 15, "sparse", 0.04),
        (1.0, 0, "sparse", 0.01),
    ],
)
def test_zeros_take_no_space(zeros, distinct, encoding, size, tmp_path):
    draw = np.random.default_rng(0)
    x = draw.normal(size=70_000).astype(np.float32)
    x = np.round(x * distinct / 6) + 0.5 if distinct else x
    x = np.where(draw.random(x.size) < zeros, 0, x).astype(np.float32).reshape(100, 700)
    assert encoding_of("x", x) == encoding
    write_weights(tmp_path / "x", {"x": x}, None, encoding_of)
    assert (tmp_path / "x").stat().st_size < size * x.nbytes
    np.testing.assert_array_equal(read_weights(tmp_path / "x")[0]["x"], x)


def test_containers_of_other_content_raise(tmp_path):
    for header in (
        None,
        {"weights": {"a": 3}, "tuples": [], "metadata": None},
        {"weights": {"a": {"kind": "IntegerWeight", "size": 3}}, "tuples": [], "metadata": None},
        {"weights": {}, "tuples": ["b"], "metadata": None},
        {"weights": {}, "tuples": []},
        {"weights": {"a/codes/x": {"kind": "LowRankWeight", "left": 1, "right": 1}}, "tuples": [], "metadata": None},
    ):
        container.write(tmp_path / "x", {"a": {"codes": W}}, header)
        raises(
            "x is a container, but its header does not describe the weights of a model", read_weights, tmp_path / "x"
        )


def test_trees_that_would_not_be_read_as_written_raise(tmp_path):
    for params, message in (
        ({"a/b": W, "a": {"b": 2 * W}}, "the name 'a/b': expected names without '/'"),
        ({"a": {"b/c": W}}, "the name 'b/c'"),
        ({"a": ()}, "the tuple a cannot be written"),
        ({"a": ({}, {"b": W})}, "the tuple a cannot be written"),
        ((W, W), "the tuple of all weights cannot be written"),
    ):
        raises(message, write_weights, tmp_path / "x", params)
        assert not (tmp_path / "x").exists()


def test_unknown_kinds_raise(tmp_path):
    header = {"weights": {"a": {"kind": "Holographic"}}, "tuples": [], "metadata": None}
    container.write(tmp_path / "x", {"a": {"codes": W}}, header)
    raises(r"a is a weight of kind 'Holographic'", read_weights, tmp_path / "x")
