"""Exact search by blocks against sorting all scores and faiss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.search.exact import check_bias, exact_search, recall, top_k
from tests.contracts import once
from tests.messages import raises
from tests.ops.search.tables import by_sorting

# (V, k, block size, with a bias): V prime, one block, groups of columns with a remainder, blocks with a remainder, k over a
# block, k = V, a block over V, one row
SIZES = [
    (43, 5, 8, True), (43, 5, None, False), (331, 2, None, True), (331, 2, 130, False), (43, 12, 8, False),
    (43, 43, 8, True), (43, 43, None, False), (7, 3, 100, True), (1, 1, None, False),
]  # fmt: skip


def integer_arrays(vocab, count=5, dim=6, dtype="float32"):
    """Arrays of integers: many scores are equal, and all are exact for any order of summation."""
    rng = np.random.default_rng(vocab)
    shapes = (count, dim), (vocab, dim), (vocab,)
    return [jnp.asarray(rng.integers(-2, 3, shape).astype(dtype)) for shape in shapes]


def search(k, block=None):
    return lambda q, w, bias=None: exact_search(q, w, k, bias=bias, block_size=block)


@pytest.mark.parametrize(("vocab", "k", "block", "biased"), SIZES, ids=str)
def test_matches_sorting_with_ties_to_the_lower_id(vocab, k, block, biased):
    q, w, bias = integer_arrays(vocab)
    arguments = (q, w, bias) if biased else (q, w)
    scores, ids = once(search(k, block), *arguments)
    expected = by_sorting(q, w, k, bias if biased else None)
    assert (scores.dtype, ids.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_array_equal(scores, expected[0])
    np.testing.assert_array_equal(ids, expected[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_accumulate_in_float32(dtype):
    """Sums near 256.5 would be rounded to integers, and their order lost."""
    w = jnp.ones((67, 257), dtype).at[:, 0].set((jnp.arange(67, dtype=jnp.float32) / 128).astype(dtype))
    for q in (jnp.ones((1, 257), dtype), jnp.ones((1, 257), jnp.float32)):
        scores, ids = once(search(4, 16), q, w)
        np.testing.assert_array_equal(ids, [[66, 65, 64, 63]])
        np.testing.assert_array_equal(scores, 256 + np.arange(66, 62, -1)[None] / 128)


@pytest.mark.parametrize("block", [4, None])
def test_a_bias_of_minus_infinity_puts_rows_last_and_keeps_their_ids(block):
    q, w, bias = integer_arrays(11)
    bias = bias.at[jnp.array([0, 4, 10])].set(-jnp.inf)
    scores, ids = once(search(11, block), q, w, bias)
    expected = by_sorting(q, w, 11, bias)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_array_equal(scores, expected[0])


def test_wide_rows_match_lax_top_k():
    """The best columns are in one group, spread over all groups, in the remainder, or all equal."""
    rng = np.random.default_rng(0)
    s = rng.integers(0, 50, (6, 229)).astype(np.float32)
    s[0, 64:67], s[1, 5::37], s[2, -3:], s[3], s[4] = 99, 99, 99, 7, -np.inf
    for k in (1, 3):
        actual, expected = (once(functools.partial(f, k=k), jnp.asarray(s)) for f in (top_k, jax.lax.top_k))
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_gradients_match_lax_top_k():
    rng = np.random.default_rng(0)
    q, w, bias = (jnp.asarray(rng.standard_normal(x.shape).astype(jnp.float32)) for x in integer_arrays(37))
    weigh = lambda scores: jnp.sum(jnp.sin(jnp.arange(scores.size, dtype=jnp.float32)) * scores.ravel())  # noqa: E731
    ours = lambda *x: weigh(search(4, 8)(*x)[0])  # noqa: E731
    reference = lambda q, w, bias: weigh(jax.lax.top_k(q @ w.T + bias[None], 4)[0])  # noqa: E731
    for a, b in zip(*(once(jax.grad(f, (0, 1, 2)), q, w, bias) for f in (ours, reference)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_vmap_and_checkpoint():
    q, w, _ = integer_arrays(37)
    ids = once(jax.vmap(jax.checkpoint(lambda w: search(3, 8)(q, w)[1])), jnp.stack([w, -w]))
    np.testing.assert_array_equal(ids, [by_sorting(q, x, 3)[1] for x in (w, -w)])


def test_64_bit_inputs_give_32_bit_results():
    with jax.enable_x64(True):
        q, w, bias = integer_arrays(37, dtype="float64")
        scores, ids = once(search(3, 8), q, w, bias)
    assert (scores.dtype, ids.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_array_equal(ids, by_sorting(q, w, 3, bias)[1])


def test_memory_does_not_grow_with_the_table():
    def temporary(vocab, block):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (vocab, 32))]
        return jax.jit(search(10, block)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    block, vocab = 4096, 1 << 18
    scores_and_rows = 4 * block * (64 + 32)
    assert temporary(vocab, block) < 1.3 * scores_and_rows
    assert temporary(vocab, None) < 1.3 * 4 * (1 << 16) * (64 + 32) < 4 * 64 * vocab
    # The remainder after the last full block has separate scores, whose width is no multiple of a group.
    assert temporary(vocab - 1, block) < 4 * scores_and_rows


def test_bias_of_another_size_raises():
    """Calls the check itself, because beartype would raise first in the search functions."""
    raises(r"bias has shape \(3,\): expected \(4,\)", check_bias, np.zeros(3), 4)


def test_recall_is_the_share_of_true_ids():
    assert recall(jnp.array([[1, 2], [3, -1]]), jnp.array([[2, 5], [3, 4]])) == 0.5
    raises("same queries", recall, np.zeros((2, 3), np.int32), np.zeros((2, 0), np.int32))


def test_invalid_arguments_raise():
    q, w, _ = integer_arrays(9)
    for changes, message in (
        ({"k": 0}, "k is 0: expected 1 to 9"),
        ({"k": 10}, "k is 10: expected 1 to 9"),
        ({"w": jnp.ones((0, 6))}, "empty"),
        ({"block_size": 0}, "at least 1 row"),
    ):
        raises(message, exact_search, **{"q": q, "w": w, "k": 2} | changes)


@pytest.mark.oracle
@pytest.mark.parametrize(("vocab", "block"), [(5003, None), (5003, 1024)])
def test_matches_faiss(vocab, block):
    faiss = pytest.importorskip("faiss")
    rng = np.random.default_rng(0)
    q, w = (rng.standard_normal((n, 24)).astype(np.float32) for n in (33, vocab))
    flat = faiss.IndexFlatIP(24)
    flat.add(w)
    expected = flat.search(q, 10)
    scores, ids = exact_search(jnp.asarray(q), jnp.asarray(w), 10, block_size=block)
    np.testing.assert_allclose(scores, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ids, expected[1])
