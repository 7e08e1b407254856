"""Products by the transpose of a matrix, against products with the matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.nn.layers import Dense, with_transposes
from hpnlp.ops.linear import linear, linear_by_transpose
from hpnlp.ops.weights import to_floats


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_by_the_transpose_equal_those_with_the_matrix(dtype):
    """Values, and gradients by the rows, the matrix and the bias."""
    rng = np.random.default_rng(0)
    x, w, b = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3, 5), (5, 7), (7,)))
    weights = jnp.asarray(rng.normal(size=(2, 3, 7)), jnp.float32)

    def score(product, x, w, b):
        y = product(x.astype(dtype), w, b)
        assert y.dtype == dtype
        return (y.astype(jnp.float32) * weights).sum(), y

    def results(product):
        return jax.jit(jax.grad(lambda *args: score(product, *args), argnums=(0, 1, 2), has_aux=True))(x, w, b)

    actual, expected = results(lambda x, w, b: linear_by_transpose(x, w.T, b)), results(linear)
    tolerance = {"float32": 1e-6, "bfloat16": 1e-2}[dtype]
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance), actual, expected)


@pytest.mark.parametrize("convert", [jnp.asarray, to_floats], ids=["array", "weight"])
def test_accelerators_round_products_of_16_bits_once(convert, monkeypatch):
    """Products return the dtype of their inputs on accelerators, with results and gradients as on a CPU."""
    rng = np.random.default_rng(0)
    x, w, b = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((6, 32), (32, 16), (16,)))
    w = w.astype(jnp.float32) if convert is jnp.asarray else convert(w.astype(jnp.float32), "bfloat16")

    def results(x, w, b):
        y, pull = jax.vjp(lambda x, w: linear(x, w, b), x, w)
        return y, pull(jnp.ones_like(y))

    def products():
        jaxpr = jax.make_jaxpr(lambda *arrays: results(*arrays))(x, w, b).jaxpr
        return [str(e.outvars[0].aval.dtype) for e in jaxpr.eqns if e.primitive.name == "dot_general"]

    expected = jax.jit(results)(x, w, b)
    assert set(products()) == {"float32"}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # The gradient by the matrix is a sum over all tokens, and stays in float32.
    assert products() == ["bfloat16", "bfloat16", "float32"]
    actual = jax.jit(lambda *arrays: results(*arrays))(x, w, b)
    assert jax.tree.map(lambda a: a.dtype, actual) == jax.tree.map(lambda a: a.dtype, expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(e, np.float32), rtol=1e-2, atol=2e-2)


def test_dense_layers_read_the_transpose_of_their_kernel():
    layer, x = Dense(7, ("embed", "mlp"), use_bias=True), np.random.default_rng(1).normal(size=(2, 3, 5))
    params = {"kernel": jnp.asarray(np.random.default_rng(2).normal(size=(5, 7)), jnp.float32), "bias": jnp.ones(7)}
    added = with_transposes({"up": params, "scale": jnp.ones(5)})
    assert added.keys() == {"up", "scale"} and added["up"].keys() == {"kernel", "bias", "kernel_transpose"}
    x = jnp.asarray(x, jnp.float32)
    expected = layer.apply({"params": params}, x)
    np.testing.assert_allclose(layer.apply({"params": added["up"]}, x), expected, rtol=1e-6, atol=1e-6)
    # The kernel itself is not read.
    other = dict(added["up"], kernel=jnp.zeros((5, 7)))
    np.testing.assert_allclose(layer.apply({"params": other}, x), expected, rtol=1e-6, atol=1e-6)
