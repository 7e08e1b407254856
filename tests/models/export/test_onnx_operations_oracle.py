"""Operations of JAX as ONNX: results of onnxruntime equal those of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hpnlp.models.export import onnx_file, onnx_graph
from hpnlp.models.export.functions import ExportedFunction
from tests.messages import raises

pytestmark = pytest.mark.oracle

TOKENS = np.array([[0, 3, -1, 7], [5, 2, 9, 4]], np.int32)
TABLE = np.arange(15, dtype=np.float32).reshape(5, 3)


def scanned(tokens, length, reverse=False):
    """A loop of `length` iterations with a carry and stacked results."""
    carry, stacked = lax.scan(lambda c, x: (c + x, c * x), tokens, jnp.arange(length), reverse=reverse)
    return carry + stacked.sum(0)


def gathered(table, mode, fill_value=None):
    return lambda tokens: jnp.asarray(table).at[tokens].get(mode=mode, fill_value=fill_value)


def second_axis(tokens):
    return jnp.asarray(TABLE.T)[:2].at[:, tokens].get(mode="fill")


def booleans(dtype):
    return lambda tokens: lax.dot(tokens > 2, (tokens > 3).T, preferred_element_type=dtype)


def mixed_bits(tokens):
    """A wrapping product, shifts and logic of integers, of which some are negative."""
    x = (tokens * jnp.int32(-1640531527)) ^ lax.shift_right_logical(tokens, jnp.full_like(tokens, 3))
    return ((x & 0xFFFF) | 5) - (lax.shift_right_logical(x, jnp.full_like(x, 16)) & 0xFF)


CASES = {
    "bits of integers": mixed_bits,
    "scan of length 0": lambda tokens: scanned(tokens, 0),
    "scan": lambda tokens: scanned(tokens, 3),
    "reversed scan": lambda tokens: scanned(tokens, 3, reverse=True),
    "bool x bool -> int32": booleans(jnp.int32),
    "bool x bool -> bool": booleans(jnp.bool_),
    "sum over no axes": lambda tokens: lax.reduce_sum_p.bind(tokens, axes=(), out_sharding=None),
    "max over no axes": lambda tokens: jnp.max(tokens, axis=()),
    "any over no axes": lambda tokens: jnp.any(tokens > 2, axis=()),
    "choice of booleans": lambda tokens: jnp.where(tokens > 2, tokens > 4, tokens > 0),
    "gather, clip": gathered(TABLE, "clip"),
    "gather, fill": gathered(TABLE, "fill"),
    "gather, fill with 7": gathered(TABLE, "fill", 7.0),
    "gather, fill of integers": gathered(TABLE.astype(np.int32), "fill"),
    "gather, fill of bools": gathered(TABLE > 3, "fill"),
    "gather, fill of the second axis": second_axis,
    "top_k, equal values": lambda tokens: jnp.concatenate(lax.top_k(tokens // 3, 3), axis=1),
    "cumulative sum of rows": lambda tokens: lax.cumsum(tokens, axis=1),
    "cumulative sum of columns, reversed": lambda tokens: lax.cumsum(tokens, axis=0, reverse=True),
    "slice with steps": lambda tokens: lax.slice(tokens, (0, 1), (2, 4), (1, 2)),
    "padding on both sides": lambda tokens: lax.pad(tokens, jnp.int32(5), ((1, 0, 0), (0, 2, 0))),
    "argmin of columns": lambda tokens: lax.argmin(tokens, 0, jnp.int32),
    "take_along_axis": lambda tokens: jnp.take_along_axis(jnp.asarray(TABLE.T)[:2], tokens % 8, axis=1),
    "take_along_axis of integers": lambda tokens: jnp.take_along_axis(tokens, tokens, axis=0),
}


@pytest.mark.parametrize("name", CASES)
def test_results_equal_those_of_jax(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    call = jax.jit(lambda tokens: CASES[name](tokens).astype(jnp.float32))
    onnx_file.write(ExportedFunction(call, ("tokens",), 4), tmp_path / "x.onnx", batch=2)
    session = runtime.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(["logits"], {"tokens": TOKENS})[0], call(TOKENS))


def test_loops_of_many_iterations_raise(tmp_path, monkeypatch):
    pytest.importorskip("onnx")
    monkeypatch.setattr(onnx_graph, "MAX_NODES", 50)
    function = ExportedFunction(lambda tokens: scanned(tokens, 30).astype(jnp.float32), ("tokens",), 4)
    raises("over 50 operations, because ONNX files hold every", onnx_file.write, function, tmp_path / "x.onnx")
    monkeypatch.setattr(onnx_file, "_MAX_BYTES", 100)
    function = ExportedFunction(lambda tokens: gathered(TABLE, "clip")(tokens), ("tokens",), 4)
    raises("over 2 GB, which is the limit of the format: compress", onnx_file.write, function, tmp_path / "x.onnx")
    assert not (tmp_path / "x.onnx").exists()
