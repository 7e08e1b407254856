"""Relative attention in blocks against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Operands
from hpnlp.ops.attention.block_sparse.decomposition import cost_model
from hpnlp.ops.attention.memory.relative import (
    distance_scores,
    received_attention,
    reference_relative_attention,
    relative_attention,
)
from hpnlp.types import InputError
from tests.contracts import ONCE, assert_close, executor_with, once
from tests.messages import raises

B, N, K, H, HV = 2, 4, 2, 8, 3


def operands(length, keys, distances, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = [(B, length, N, H), (B, keys, K, H), (B, keys, K, HV), (distances, N, H), (N, H), (N, H)]
    return [
        jnp.asarray(rng.standard_normal(shape).astype(dtype if i < 3 else "float32")) for i, shape in enumerate(shapes)
    ]


def segments(length, keys):
    """Ids that are not sorted; the last ones of the keys are those of the queries, and some queries see nothing."""
    ids = jnp.asarray(np.random.default_rng(1).integers(1, 4, (B, keys)).astype(jnp.int32))
    return {"segment_ids": ids[:, keys - length :].at[:, 3].set(9), "kv_segment_ids": ids}


@pytest.mark.parametrize(
    ("length", "keys", "distances", "block", "step"),
    [
        (19, 24, 6, 8, 1 << 20),
        (1, 3, 3, 8, 1),
        pytest.param(16, 40, 9, 4, 1, marks=pytest.mark.slow),
    ],
    ids=["memory", "one token", "memory longer than the window"],
)
def test_blocks_match_reference(length, keys, distances, block, step):
    """Values, gradients and rows that see nothing; with segments, and with a memory also without them."""
    arrays = operands(length, keys, distances)
    signs = jnp.asarray(np.random.default_rng(2).standard_normal((B, length, N, HV)).astype(jnp.float32))
    ids = segments(length, keys) if length > 3 else {}

    def of(function, **options):
        def score(*arrays):
            results = [function(*arrays, Operands(scale=0.5, **ids), **options)]
            results += [function(*arrays, **options)] if keys == 24 else []
            return sum(jnp.sum(o * signs) for o in results), results

        return jax.grad(score, tuple(range(6)), has_aux=True)(*arrays)

    with executor_with((cost_model, "STEP_SCORES", step)):
        actual, expected = once(lambda: (of(relative_attention, block_size=block), of(reference_relative_attention)))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)
    if ids:
        assert not np.asarray(actual[1][0])[:, 3].any()


def test_rows_that_see_nothing_have_no_gradients():
    """Gradients of all arrays where these rows are NaN, against those where the rows are 0."""
    q, *arrays = operands(8, 8, 5)
    ids = segments(8, 8)

    def of(value):
        def score(*arrays):
            return jnp.sum(relative_attention(*arrays, Operands(**ids), block_size=4) ** 2)

        return jax.grad(score, tuple(range(6)))(q.at[:, 3].set(value), *arrays)

    assert_close(*once(lambda values: [of(value) for value in values], jnp.asarray([jnp.nan, 0.0])))


def test_blocks_drop_different_entries_and_depend_on_the_key():
    arrays = operands(16, 16, 4)
    arrays[:2] = jnp.zeros_like(arrays[0]), jnp.zeros_like(arrays[1])
    arrays[3:] = [jnp.zeros_like(x) for x in arrays[3:]]
    arrays[2] = jnp.ones_like(arrays[2])

    def dropped(key):
        return relative_attention(*arrays, Operands(dropout_rate=0.5, rng=key), block_size=8)

    run = jax.jit(dropped, compiler_options=ONCE)
    first, again, other = (np.asarray(run(jax.random.key(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and (first[:, 3:8] != first[:, 11:]).any()
    assert float(first[:, 3:].mean()) == pytest.approx(1.0, abs=0.2)


def test_scores_of_distances_match_definition():
    q, _, _, r, _, bias = operands(3, 3, 5, "bfloat16")
    expected = np.einsum("btnh,rnh->btnr", np.asarray(q, np.float32) + np.asarray(bias), np.asarray(r)) * H**-0.5
    assert_close(distance_scores(q, r, bias), expected.astype(np.float32), "bfloat16")


def test_received_attention_is_the_sum_of_the_weights():
    """In blocks, against the weights of each query, which are its outputs for values that are unit vectors."""
    q, k, _, *learned = operands(10, 14, 20)
    unit = jnp.broadcast_to(jnp.eye(14)[None, :, None], (B, 14, K, 14))
    ids = Operands(**segments(10, 14))
    actual, weights = once(
        lambda: (
            received_attention(q, k, *learned, ids, block_size=4),
            reference_relative_attention(q, k, unit, *learned, ids),
        )
    )
    np.testing.assert_allclose(actual, np.asarray(weights).sum(axis=1).mean(axis=1), atol=1e-5)
    assert actual.dtype == jnp.float32


def test_invalid_arguments_raise():
    for size in (0, -4):
        with pytest.raises(InputError, match=f"block_size {size}: expected a positive number, or None"):
            relative_attention(*operands(4, 4, 4), block_size=size)
    raises("5 queries and 4 keys: expected at least one key per query", lambda: relative_attention(*operands(5, 4, 4)))
    raises(
        "relative_attention does not support sinks, soft_cap: expected only segment_ids, kv_segment_ids, scale, dropout_rate",
        lambda: relative_attention(*operands(4, 4, 4), Operands(soft_cap=2.0, sinks=jnp.zeros(N))),
    )
