"""Attention with synthesized scores against dense softmax of the sum of all terms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Causal, Full, Operands, Strided, Window, flash, reference
from hpnlp.ops.attention.block_sparse.decomposition import cost_model
from hpnlp.ops.attention.block_sparse.operands import Form
from hpnlp.ops.attention.pair_bias import BiasArrays
from hpnlp.ops.attention.reference import dense_attention
from hpnlp.ops.attention.synthetic.attend import synthetic_attend, synthetic_attend_reference, tiled_scores
from hpnlp.ops.attention.synthetic.factorized_dense import factorized_dense_attend
from tests.contracts import assert_close, executor_with, once
from tests.messages import raises


def test_sums_of_terms_match_dense_scores():
    """Factors of one sequence and of all, of key heads and of query heads, with scores; values and gradients."""
    rng = np.random.default_rng(0)
    shapes = {
        "v": (2, 9, 2, 4),
        "factors": [((2, 9, 4, 3), (2, 9, 2, 3)), ((1, 9, 4, 2), (1, 9, 4, 2))],
        "scores": [(1, 4, 9, 9), (2, 4, 9, 9), (1, 4, 1, 9)],
    }
    is_shape = lambda x: isinstance(x, tuple) and isinstance(x[0], int)  # noqa: E731
    arrays = jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s).astype(jnp.float32)), shapes, is_leaf=is_shape)
    ids = jnp.asarray([[1] * 9, [1, 1, 2, 2, 2, 2, 0, 0, 0]], jnp.int32)

    def result(function, arrays):
        def score(arrays):
            o = function(**arrays, mask=Causal(), segment_ids=ids, kv_segment_ids=ids)
            return jnp.sum(o**2), o

        return jax.grad(score, has_aux=True)(arrays)

    forms = (synthetic_attend, synthetic_attend_reference)
    assert_close(*once(lambda arrays: [result(f, arrays) for f in forms], arrays))
    one_row = {"v": arrays["v"], "factors": [], "scores": arrays["scores"][2:]}  # scores that all queries share
    assert_close(*once(lambda arrays: [result(f, arrays) for f in forms], one_row))


@pytest.mark.parametrize(
    ("step", "block"),
    [(1, 4), *(pytest.param(1 << 20, block, marks=pytest.mark.slow) for block in (4, 1))],
    ids=["chunks of heads", "all heads", "blocks of one token"],
)
def test_weighted_bias_arrays_in_tiles_match_their_sum(step, block):
    """Tiles of some of 11 tokens, in steps of several; shared axes of arrays; values and gradients of arrays and weights."""
    rng = np.random.default_rng(0)
    terms = [(2, 4, 11, 11), (1, 4, 11, 11), (1, 1, 1, 11), (2, 4, 11, 1)]
    tree = {
        "qkv": [
            jnp.asarray(rng.standard_normal(s).astype(jnp.float32))
            for s in ((2, 11, 4, 3), (2, 11, 2, 3), (2, 11, 2, 5))
        ],
        "terms": [jnp.asarray(rng.standard_normal(s).astype(jnp.float32)) for s in terms],
        "weights": [jnp.full((1, 1, 1, 1), w, jnp.float32) if w else None for w in (0.5, -1.5, None, 2.0)],
    }

    def result(attend, tree):
        def score(tree):
            bias = BiasArrays(tuple(tree["terms"]), tuple(tree["weights"]))
            o, lse = attend(*tree["qkv"], bias)
            # lse, because o is the same for all biases by query.
            return jnp.sum(o**2) + jnp.sum(lse**2), (o, lse)

        return jax.grad(score, has_aux=True)(tree)

    def in_tiles(q, k, v, bias):
        return flash(q, k, v, Causal(), Operands(bias=bias, return_lse=True), form=Form.SCAN, block_size=block)

    def dense(q, k, v, bias):
        return reference(q, k, v, Causal(), bias=bias.dense(), return_lse=True)

    with executor_with((cost_model, "STEP_SCORES", step)):
        assert_close(*once(lambda tree: [result(f, tree) for f in (in_tiles, dense)], tree))


def test_factorized_rows_that_see_nothing_have_no_gradients():
    """Gradients of all arrays where the factors of such a row are NaN, against those where they are 0."""
    rng = np.random.default_rng(0)
    v, a, b = (jnp.asarray(rng.standard_normal((1, 6, 1, size)).astype(jnp.float32)) for size in (2, 2, 3))
    ids = {"segment_ids": jnp.asarray([[1, 1, 1, 2, 1, 1]]), "kv_segment_ids": jnp.ones((1, 6), jnp.int32)}

    def of(value):
        def score(v, a, b):
            return jnp.sum(factorized_dense_attend(v, a, b, operands=Operands(**ids)) ** 2)

        return jax.grad(score, (0, 1, 2))(v, a.at[:, 3].set(value), b.at[:, 3].set(value))

    assert_close(*once(lambda values: [of(value) for value in values], jnp.asarray([jnp.nan, 0.0])))


def test_factorized_scores_by_blocks_match_all_scores():
    """The last block is cut; values and gradients, also with dropout, which drops the same pairs."""
    rng = np.random.default_rng(0)
    shapes = {"v": (2, 8, 2, 4), "a": (2, 8, 2, 3), "b": (2, 8, 2, 3)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape).astype(jnp.float32)) for name, shape in shapes.items()}
    ids = jnp.asarray([[1] * 8, [1, 1, 2, 2, 2, 0, 0, 0]], jnp.int32)
    signs = jnp.asarray(rng.standard_normal(shapes["v"]).astype(jnp.float32))

    def dense(v, a, b, mask, operands):
        operands = dataclasses.replace(operands, bias=tiled_scores(a, b, 8))
        o = dense_attention(*[jnp.zeros((2, 8, 2, 1))] * 2, v, mask, operands)
        assert isinstance(o, jax.Array)
        return o

    def result(function, arrays, mask, operands):
        def score(arrays):
            o = function(**arrays, mask=mask, operands=operands)
            return jnp.sum(o * signs), o

        return jax.grad(score, has_aux=True)(arrays)

    def both(arrays):
        segments = Operands(segment_ids=ids)
        dropout = dataclasses.replace(segments, dropout_rate=0.4, rng=jax.random.key(3))
        cases = ((Full(), segments), (Causal(), dropout), (Window(2, 0) & Strided(2), Operands()))
        return [[result(f, arrays, mask, x) for mask, x in cases] for f in (factorized_dense_attend, dense)]

    assert_close(*once(both, arrays))


def test_weights_of_large_factorized_scores_are_exact_in_the_backward_pass():
    """Scores of 1e8, of different and of equal keys; gradients of values are sums of the weights."""
    rng = np.random.default_rng(0)
    v, a, b, signs = (jnp.asarray(rng.standard_normal((2, 8, 2, n)).astype(jnp.float32)) for n in (4, 3, 3, 4))
    a, b = 1e4 * a, 1e4 * b
    equal = tuple(jnp.broadcast_to(jnp.abs(x[..., :1]), x.shape) for x in (a, b))

    def gradients(a, b):
        def dense(v):
            return reference(*[jnp.zeros((2, 8, 2, 1))] * 2, v, Causal(), bias=tiled_scores(a, b, 8))

        functions = (lambda v: factorized_dense_attend(v, a, b, Causal()), dense)
        return [jax.grad(lambda v, f=f: jnp.sum(f(v) * signs))(v) for f in functions]

    for actual, expected in once(lambda: (gradients(a, b), gradients(*equal))):
        assert_close(actual, expected)


def test_tiles_are_products_of_all_pairs_of_factors():
    a, b = np.arange(1, 4.0)[None, None, None], np.array([1.0, 10.0, 100.0])[None, None, None]
    scores = tiled_scores(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), 8)
    np.testing.assert_array_equal(scores[0, 0, 0], [1, 2, 3, 10, 20, 30, 100, 200])


def test_invalid_arguments_raise():
    v = jnp.zeros((1, 4, 1, 2))
    raises("no factors and no scores", synthetic_attend, v, [], [])
    raises(r"scores \(1, 1, 3, 4\) with 4", synthetic_attend, v, [], [jnp.zeros((1, 1, 1, 4)), jnp.zeros((1, 1, 3, 4))])
    a, ids = jnp.zeros((1, 4, 1, 3)), jnp.ones((1, 4), jnp.int32)
    for arguments, message in (
        ({"b": a[:, :2]}, "expected equal B and N, and equal T in a and b"),
        ({"dropout_rate": 0.5}, "dropout_rate 0.5 without rng"),
        ({"dropout_rate": 1.5, "rng": jax.random.key(0)}, "dropout_rate 1.5: expected"),
        ({"kv_segment_ids": ids}, "kv_segment_ids without segment_ids"),
        ({"positions": ids[:, :2]}, "positions has shape"),
        ({"return_lse": True}, "factorized_dense_attend does not support return_lse"),
    ):
        b = arguments.pop("b", a)
        raises(message, lambda b=b, x=arguments: factorized_dense_attend(v, a, b, operands=Operands(**x)))
    raises("4 keys: expected at most 3 x", factorized_dense_attend, v, jnp.zeros((1, 4, 1, 3)), jnp.zeros((1, 4, 1, 1)))
    raises("10 keys: expected at most 3 x 3", tiled_scores, jnp.zeros((1, 4, 1, 3)), jnp.zeros((1, 4, 1, 3)), 10)
