"""Products of signs by bits of words, against products of floats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hpnlp.compress.files import read_weights, stages_of, write_weights
from hpnlp.ops.linear import linear
from hpnlp.ops.weight import dense_tree, parameter_count
from hpnlp.ops.weights import BinaryProductWeight, binarize, binarize_products, xnor
from tests.contracts import once

RNG = np.random.default_rng(0)


def signs(x):
    return np.where(x < 0, -1.0, 1.0)


def definition(x, w):
    """XNOR-Net's product of signs, one product after the other, with the scales of rows and columns."""
    result = np.zeros((len(x), w.shape[1]))
    for d in range(w.shape[0]):
        result += signs(x)[:, d, None] * signs(w)[d]
    return result * np.abs(x).mean(1, keepdims=True) * np.abs(w).mean(0)


# One word, part of a word, and words of which some rows are padding; columns in one block and in several of unequal width;
# words in several steps of unequal size; and many rows, with one step and with two steps of joined blocks.
MANY = xnor.MANY_ROWS
SHAPES = [(1, 1, 1), (3, 31, 5), (2, 33, 9), (2, 64, 130), (2, 1100, 7), (MANY, 3, 130), (MANY, 40, 1100)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_follow_the_definition(shape):
    m, d, f = shape
    x, w = RNG.normal(size=(m, d)).astype(np.float32), RNG.normal(size=(d, f)).astype(np.float32)
    x[0, 0], x[-1, -1], w[0, 0] = 0.0, -0.0, 0.0  # the sign of 0 is 1

    def program(x, w):
        weight = binarize_products(w)
        return weight, linear(x, weight), weight.dense(), xnor.binary_product_reference(x, w)

    weight, product, dense, reference = once(program, x, w)
    assert weight.shape == (d, f)
    np.testing.assert_array_equal(dense, binarize(w).dense())
    expected = definition(x.astype(np.float64), w.astype(np.float64))
    for found in (product, reference):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert weight.parameter_count() == d * f + f
    assert weight.codes.nbytes <= 4 * (-(-d // 32)) * (f if f < 8 else f + 8 * weight.codes.shape[0])


def test_gradients_pass_inputs_of_at_most_1():
    x, w = RNG.normal(size=(4, 37)).astype(np.float32), RNG.normal(size=(37, 6)).astype(np.float32)
    dy = RNG.normal(size=(4, 6)).astype(np.float32)
    x[0, :2] = 1.0, -1.0

    def program(x, w):
        weight = binarize_products(w)
        _, pull = jax.vjp(lambda x, scales: linear(x, BinaryProductWeight(weight.codes, scales, 37)), x, weight.scales)
        return pull(dy)

    dx, dscales = once(program, x, w)
    matrix = signs(w) * np.abs(w).mean(0)
    np.testing.assert_allclose(dx, np.where(np.abs(x) <= 1, dy @ matrix.T, 0), rtol=1e-4, atol=1e-5)
    column_sums = signs(x) @ signs(w) * np.abs(x).mean(1, keepdims=True)
    np.testing.assert_allclose(dscales, (dy * column_sums).sum(0, keepdims=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_stay_in_their_row_and_column(number):
    x, w = RNG.normal(size=(3, 40)).astype(np.float32), RNG.normal(size=(40, 5)).astype(np.float32)
    clean = np.asarray(linear(x, binarize_products(w)))
    dirty = np.asarray(linear(np.where(np.arange(3)[:, None] == 1, number, x), binarize_products(w)))
    assert np.isnan(dirty[1]).all()
    np.testing.assert_array_equal(dirty[[0, 2]], clean[[0, 2]])
    w[3, 2] = np.nan
    product = np.asarray(linear(x, binarize_products(w)))
    assert np.isnan(product[:, 2]).all()
    np.testing.assert_array_equal(product[:, [0, 1, 3, 4]], clean[:, [0, 1, 3, 4]])


def test_layers_run_in_loops_in_bfloat16_and_from_files(tmp_path):
    stacked = jax.vmap(binarize_products)(RNG.normal(size=(2, 20, 20)).astype(np.float32))
    x = RNG.normal(size=(3, 20)).astype(np.float32)
    out, _ = jax.lax.scan(lambda x, w: (linear(x, w), None), jnp.asarray(x), stacked)
    first, second = (jax.tree.map(lambda leaf: leaf[i], stacked) for i in range(2))  # noqa: B023
    np.testing.assert_allclose(out, linear(linear(x, first), second), rtol=1e-5)
    assert linear(jnp.asarray(x, jnp.bfloat16), first).dtype == jnp.bfloat16
    np.testing.assert_array_equal(dense_tree({"kernel": stacked})["kernel"][1], second.dense())
    np.testing.assert_array_equal(first.take(jnp.array([3, 0])), first.dense()[np.array([3, 0])])
    assert parameter_count({"kernel": stacked}) == 2 * (400 + 20)
    axes = stacked.axes(("layers", "embed", "mlp"))
    assert axes.codes == ("layers", None, None, None) and axes.scales == ("layers", None, "mlp")
    write_weights(tmp_path / "x", {"kernel": stacked})
    found = read_weights(tmp_path / "x")[0]["kernel"]
    assert jax.tree.structure(found) == jax.tree.structure(stacked) and stages_of(found) == {"binary"}
    np.testing.assert_array_equal(found.codes, stacked.codes)


def test_rows_on_eight_devices_equal_one():
    weight = binarize_products(RNG.normal(size=(1100, 9)).astype(np.float32))
    x = RNG.normal(size=(8, 1100)).astype(np.float32)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda x, w: (linear(x, w), jax.grad(lambda w: linear(x, w).sum(), allow_int=True)(w).scales),
        mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P()),
    )  # fmt: skip
    product, gradient = jax.jit(mapped)(x, weight)
    np.testing.assert_allclose(product, linear(x, weight), rtol=1e-6)
    expected = jax.grad(lambda w: linear(x, w).sum(), allow_int=True)(weight).scales
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)
