"""Contracts of all kinds of weights: their methods agree with the matrix that they represent, under all transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hpnlp.compress.files import KINDS
from hpnlp.ops.linear import linear
from hpnlp.ops.weight import dense_tree
from hpnlp.ops.weights import (
    LowRankWeight,
    binarize,
    cluster,
    factorize,
    keep_balanced,
    keep_blocks,
    keep_two_of_four,
    masked,
    pack,
    quantize,
    round_to_powers,
    ternarize,
    to_floats,
)
from tests.contracts import once

D, F = 16, 8
# Products of integers round x to 1/127 of its largest magnitude; bfloat16 to 1/256 of each number.
EXACT, INTEGERS, BFLOAT16, FLOAT8 = 1e-5, 0.01, 0.01, 0.1

# name -> (function of a matrix, error of products relative to the largest result, whether D and F may be 1).
CASES = {
    "int8": (quantize, INTEGERS, True),
    "int8 in all": (lambda w: quantize(w, limits=jnp.ones((1, 1))), INTEGERS, True),
    "int8 by row": (lambda w: quantize(w, by_row=True), INTEGERS, True),
    "int8 of floats": (lambda w: quantize(w, integer_products=False), EXACT, True),
    "int8, fixed range of x": (lambda w: quantize(w, x_limit=4.0), 0.02, True),
    "int8 percentile": (lambda w: quantize(w, limits="percentile"), INTEGERS, True),
    "int6 mse": (lambda w: quantize(w, 6, limits="mse"), INTEGERS, True),
    "int4": (lambda w: quantize(w, 4), INTEGERS, True),
    "int4 in groups": (lambda w: quantize(w, 4, group=max(1, w.shape[0] // 2)), BFLOAT16, True),
    "int4 packed in groups": (
        lambda w: pack(quantize(w, 4, group=max(1, w.shape[0] // 2)), "int4"), BFLOAT16, True
    ),
    "e4m3": (to_floats, BFLOAT16, True),
    "e5m2 by row": (lambda w: to_floats(w, "e5m2", by_row=True), BFLOAT16, True),
    "e4m3 of both": (lambda w: to_floats(w, round_inputs=True), FLOAT8, True),
    "bfloat16": (lambda w: to_floats(w, "bfloat16"), BFLOAT16, True),
    "float16": (lambda w: to_floats(w, "float16"), 1e-3, True),
    "ternary": (ternarize, INTEGERS, True),
    "ternary by row, int8": (lambda w: ternarize(w, "row", packed=False), INTEGERS, True),
    "binary": (binarize, INTEGERS, True),
    "powers by column": (lambda w: round_to_powers(w, "column"), INTEGERS, True),
    "low rank": (lambda w: factorize(w, 1), EXACT, True),
    "low rank of integers": (
        lambda w: LowRankWeight(*(quantize(f, integer_products=False) for f in (w[:, :1], w[:1]))), EXACT, True
    ),
    "masked": (lambda w: masked(w, 0.5), EXACT, True),
    "blocks": (lambda w: keep_blocks(w, 0.5, 4), EXACT, False),
    "balanced": (lambda w: keep_balanced(w, 0.4), EXACT, True),
    "two of four": (keep_two_of_four, EXACT, False),
    "codebook": (lambda w: cluster(w, 4), EXACT, True),
    "codebook with zeros": (lambda w: cluster(jnp.where(w > 1, 0.0, w), 4, keep_zeros=True), EXACT, True),
}  # fmt: skip


def results(weight, x, y, ids):
    """Products and rows of a weight, and the gradient of x and of the floating-point arrays of the weight."""
    leaves, structure = jax.tree.flatten(weight)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def value(x, values):
        replaced = [values[floats.index(i)] if i in floats else leaf for i, leaf in enumerate(leaves)]
        return linear(x, jax.tree.unflatten(structure, replaced)).astype(jnp.float32).sum()

    return {
        "dense": weight.dense(),
        "matmul": weight.matmul(x),
        "transposed": weight.matmul_transposed(y),
        "rows": weight.take(ids),
        "gradients": jax.grad(value, argnums=(0, 1))(x, [leaves[i] for i in floats]),
    }


def check(found, x, y, ids, tolerance):
    matrix = np.asarray(found["dense"], np.float64)
    for name, product in (("matmul", x @ matrix), ("transposed", y @ matrix.T)):
        error = np.abs(np.asarray(found[name]) - product).max()
        assert error <= tolerance * max(1.0, np.abs(product).max()), (name, error)
    np.testing.assert_allclose(found["rows"], matrix[ids], rtol=1e-5, atol=1e-6)
    dx = np.asarray(found["gradients"][0], np.float32)
    np.testing.assert_allclose(
        dx, np.broadcast_to(matrix.sum(1), dx.shape), atol=max(0.05 * np.abs(matrix).sum(1).max(), 1e-6)
    )
    assert all(
        leaf.dtype == jnp.float32 for leaf in (found["dense"], found["matmul"], found["transposed"], found["rows"])
    )


@pytest.mark.parametrize("name", CASES)
def test_methods_agree_with_the_matrix(name):
    make, tolerance, _ = CASES[name]
    rng = np.random.default_rng(0)
    w = rng.normal(size=(2, D, F)).astype(np.float32)
    x, y = rng.normal(size=(3, D)).astype(np.float32), rng.normal(size=(3, F)).astype(np.float32)
    ids = np.array([[3, 0], [D - 1, 3]])

    @jax.jit
    def program(w, x, y, ids):
        layers = jax.vmap(make)(w)
        single = make(w[0])
        scanned = jax.lax.scan(lambda _, layer: (None, results(layer, x, y, ids)), None, layers)[1]
        one_row = single.matmul(x[:1]), single.matmul_transposed(y[:1])
        zero = make(jnp.zeros_like(w[0])).dense()
        half = linear(x.astype(jnp.bfloat16), single)
        dirty = single.matmul(jnp.ones((2, D)).at[0, 3].set(jnp.nan))
        return layers, single, scanned, one_row, zero, half, dirty, dense_tree({"kernel": layers})["kernel"]

    layers, single, scanned, one_row, zero, half, dirty, trees = program(w, x, y, ids)
    assert type(single).__name__ in KINDS
    assert single.shape == layers.shape == (D, F)
    for i in range(2):
        found = jax.tree.map(lambda leaf: leaf[i], scanned)  # noqa: B023
        check(found, x, y, ids, tolerance)
        np.testing.assert_array_equal(trees[i], found["dense"])
    for row, product in zip(one_row, (scanned["matmul"][0], scanned["transposed"][0]), strict=True):
        np.testing.assert_allclose(row, product[:1], rtol=1e-5, atol=1e-5)
    assert not np.asarray(zero).any()
    is_partial = any(word in name for word in ("balanced", "blocks", "fixed"))
    assert np.isfinite(dirty[1]).all() and np.isnan(dirty[0]).all() == (not is_partial)  # NaN stays in its row
    assert half.dtype == jnp.bfloat16
    limit = 0.05 * np.abs(scanned["matmul"][0]).max()
    np.testing.assert_allclose(half.astype(jnp.float32), scanned["matmul"][0], atol=limit)
    for gradient, leaf in zip(
        scanned["gradients"][1],
        [x for x in jax.tree.leaves(layers) if jnp.issubdtype(x.dtype, jnp.floating)],
        strict=True,
    ):
        assert gradient.shape == leaf.shape
        assert gradient.dtype == leaf.dtype
    axes = jax.tree.leaves(layers.axes(("layers", "embed", "mlp")), is_leaf=lambda x: isinstance(x, tuple))
    assert [len(a) for a in axes] == [leaf.ndim for leaf in jax.tree.leaves(layers)]
    assert all(a[0] == "layers" for a in axes)


def test_products_inside_shard_map_agree_with_the_matrix():
    """Rows of x on two devices, as under data parallelism; JAX refuses loops whose state does not vary as x does."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, D)).astype(np.float32)
    made = {name: make(rng.normal(size=(D, F)).astype(np.float32)) for name, (make, *_) in CASES.items()}
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    def products(weights, x):
        return {name: linear(x, weight) for name, weight in weights.items()}

    for name, product in products(made, x).items():
        expected = x @ np.asarray(made[name].dense())
        np.testing.assert_allclose(product, expected, atol=CASES[name][1] * np.abs(expected).max(), err_msg=name)


def thin_cases():
    """Weights of one row or one column; the other of the two is slow."""
    names, shapes = [name for name, (*_, thin) in CASES.items() if thin], ((1, 3), (3, 1))
    marks = {True: [], False: [pytest.mark.slow]}
    return [
        pytest.param(name, shapes[k], marks=marks[k == number % 2]) for k in (0, 1) for number, name in enumerate(names)
    ]


@pytest.mark.parametrize(("name", "shape"), thin_cases())
def test_single_rows_and_columns(name, shape):
    rng = np.random.default_rng(0)
    w = rng.normal(size=shape).astype(np.float32)
    weight = CASES[name][0](w)  # outside jit, of a numpy array
    x, y = rng.normal(size=(1, shape[0])).astype(np.float32), rng.normal(size=(1, shape[1])).astype(np.float32)

    def products(x, y):
        return {
            "dense": weight.dense(),
            "matmul": linear(x, weight),
            "transposed": weight.matmul_transposed(y),
            "rows": weight[jnp.zeros(2, int)],
            "gradients": [jax.grad(lambda x: linear(x, weight).sum())(x)],
        }

    found = once(products, x, y)
    assert weight.shape == shape
    check(found, x, y, np.zeros(2, int), CASES[name][1])
