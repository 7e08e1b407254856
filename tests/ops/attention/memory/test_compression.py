"""Compression of memories against loops over memories, and the loss of their reconstruction."""

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.ops.attention import reference
from hpnlp.ops.attention.memory.compression import most_used, pool_memories, reconstruction_errors
from tests.contracts import assert_close, once
from tests.messages import raises

B, D, RATE = 2, 4, 3
IDS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 3], [0, 0, 0, 5, 4, 5, 5, 5, 5]], np.int32)


def pooled(x, how, kernel):
    """One memory of each group from those of its group that are of the segment of the last."""
    results = np.zeros((B, 3, D), np.float32)
    for b, g in np.ndindex(B, 3):
        group, ids = x[b, g * RATE : g * RATE + RATE], IDS[b, g * RATE : g * RATE + RATE]
        kept = group[ids == ids[-1]]
        zeroed = np.where((ids == ids[-1])[:, None], group, 0)
        results[b, g] = {"mean": kept.mean(0), "max": kept.max(0), "conv": zeroed.reshape(-1) @ kernel}[how]
    return results


def test_pools_match_loops_and_keep_segments_apart():
    rng = np.random.default_rng(0)
    x, kernel = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, 9, D), (RATE * D, D)))
    hows = ("mean", "max", "conv")
    actual = once(lambda x: [pool_memories(x, IDS, RATE, how, kernel) for how in hows], x)
    for how, (states, ids) in zip(hows, actual, strict=True):
        np.testing.assert_allclose(states, pooled(x, how, kernel), atol=1e-6)
        np.testing.assert_array_equal(ids, IDS[:, RATE - 1 :: RATE])


def test_most_used_memories_are_those_of_the_last_segment_with_the_most_attention():
    usage = np.array([[9, 9, 9, 9, 0.1, 0.3, 0.2, 0.4, 0.0], [9, 9, 9, 0.5, 9, 0.5, 0.25, 0.5, 0.5]], np.float32)
    # Row 0: one memory of segment 3, then the newest others. Row 1: of four equal ones, the three newest.
    np.testing.assert_array_equal(most_used(usage, IDS, RATE), [[6, 7, 8], [5, 7, 8]])
    rounding = usage * np.float32(1 + 1e-7)
    np.testing.assert_array_equal(most_used(rounding, IDS, RATE), [[6, 7, 8], [5, 7, 8]])


def test_reconstruction_errors_match_dense_attention_and_train_the_compressed_memories_only():
    rng = np.random.default_rng(0)
    q, *old, k, v = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((B, 5, 4, 8), (B, 9, 2, 8), (B, 9, 2, 8), (B, 3, 2, 8), (B, 3, 2, 8))
    )
    queries = np.array([[2, 3, 3, 0, 1], [5, 5, 5, 0, 7]], np.int32)
    new_ids = IDS[:, RATE - 1 :: RATE]

    def errors(q, old, new):
        return reconstruction_errors(q, (*old, IDS), (*new, new_ids), queries)

    def expected(q, old, new):
        o, compressed = (
            reference(q, *pair, segment_ids=queries, kv_segment_ids=ids) for pair, ids in ((old, IDS), (new, new_ids))
        )
        sees = np.array([[True, True, True, False, True], [True] * 3 + [False] * 2])
        return jnp.where(sees[..., None], jnp.square(o - compressed).mean(-1), 0).sum((0, 1)), jnp.float32(sees.sum())

    def both(*arrays):
        gradient = jax.grad(lambda *arrays: errors(*arrays)[0].sum(), (0, 1, 2))(*arrays)
        of_new = jax.grad(lambda new: expected(*arrays[:2], new)[0].sum())(arrays[2])
        return errors(*arrays), expected(*arrays), gradient, of_new

    actual, dense, (by_q, by_old, by_new), of_new = once(both, q, tuple(old), (k, v))
    assert_close(actual, dense)
    assert_close(by_new, of_new)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves((by_q, by_old))) and actual[0].shape == (4,)


def test_invalid_arguments_raise():
    x = jnp.zeros((1, 4, 2)), jnp.zeros((1, 4), jnp.int32)
    raises("4 memories to compress at rate 0: expected", most_used, jnp.ones((1, 4)), jnp.ones((1, 4), jnp.int32), 0)
    raises("4 memories to compress at rate 3: expected a multiple of the rate", pool_memories, *x, 3, "mean")
    raises(r"how='average'\): expected 'mean', 'max', or 'conv' with a kernel", pool_memories, *x, 2, "average")
