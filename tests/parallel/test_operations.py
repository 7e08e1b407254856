"""Operation-wise parallelism: independent functions on devices of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.parallel.operations import divide_operations
from hpnlp.planner import collectives
from tests.messages import raises


def product(w, x):
    return x @ w


def tanh_with_index(w, x):
    return {"hidden": jnp.tanh(x @ w["kernel"] + w["bias"]), "first": jnp.argmax(x @ w["kernel"], axis=-1)}


def mean(w, x):
    return jnp.mean(x, axis=0)


def drawn_sum(w, inputs):
    x, key = inputs
    return w * jnp.sum(x * jax.random.normal(key, x.shape))


FUNCTIONS = (product, tanh_with_index, mean)


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    weights = (draw(8, 5), {"kernel": draw(8, 3), "bias": draw(3)}, ())
    return weights, draw(6, 8)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_results_and_gradients_equal_functions_run_one_after_the_other(operands, devices):
    weights, x = operands
    operations = divide_operations(FUNCTIONS, weights, x, jax.devices()[:devices])

    def loss(outputs):
        return jnp.sum(outputs[0] ** 2) + jnp.sum(outputs[1]["hidden"] ** 3) + jnp.sum(outputs[2] ** 2), outputs

    def run(weights, x):
        return loss([function(w, x) for function, w in zip(FUNCTIONS, weights, strict=True)])

    whole = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))
    (_, expected), expected_gradients = whole(weights, x)
    divided = jax.jit(jax.value_and_grad(lambda p, x: loss(operations(p, x)), argnums=(0, 1), has_aux=True))
    (_, outputs), gradients = divided(operations.pack(weights), x)
    jax.tree.map(np.testing.assert_array_equal, outputs[1]["first"], expected[1]["first"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), outputs, expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        (tuple(operations.unpack(gradients[0])), gradients[1]),
        expected_gradients,
    )


def test_device_holds_and_computes_only_its_functions(operands):
    weights, x = operands
    operations = divide_operations(FUNCTIONS, weights, x, jax.devices()[:2])
    assert operations.device_functions == ((1,), (0, 2))
    packed = operations.pack(weights)
    assert {shard.data.shape for shard in packed["float32"].addressable_shards} == {(1, 40)}
    text = str(jax.jit(operations.__call__).lower(packed, x).compile().as_text())
    assert "conditional" in text
    assert text.count(" all-gather(") + text.count(" all-gather-start(") == 2  # float32 and int32


def test_bytes_equal_those_of_the_compiled_program(operands):
    weights, x = operands
    operations = divide_operations(FUNCTIONS, weights, x, jax.devices()[:2])
    compiled = jax.jit(operations.__call__).lower(operations.pack(weights), x).compile()
    assert collectives.total(collectives.compiled_traffic(str(compiled.as_text()))) == operations.sent_bytes


def test_most_expensive_functions_are_divided_first(operands):
    _, x = operands
    weights = [jnp.zeros((8, columns), jnp.float32) for columns in (1, 2, 3, 4, 10)]
    operations = divide_operations([product] * 5, weights, x, jax.devices()[:2])
    assert operations.device_functions == ((4,), (3, 2, 1, 0))


def test_outputs_without_matrix_products_and_of_all_dtypes(operands):
    """Numbers and typed keys among the operands, and a loop of unknown length."""
    _, x = operands
    key = jax.random.key(0)

    def halved(w, inputs):
        return jax.lax.while_loop(lambda s: jnp.abs(s).max() > 1, lambda s: 0.5 * s @ w, inputs[0])

    functions = [
        lambda w, inputs: (inputs[0].astype(w.dtype) * w, inputs[0] > 0),
        halved,
        drawn_sum,
        lambda w, inputs: (),
    ]
    weights = [jnp.ones(8, jnp.bfloat16), np.eye(8), 2.0, ()]
    operations = divide_operations(functions, weights, (x, key), jax.devices()[:2])
    outputs = operations(operations.pack(weights), (x, key))  # outside of jit
    expected = [function(w, (x, key)) for function, w in zip(functions, weights, strict=True)]
    assert jax.tree.map(lambda a: a.dtype, outputs) == jax.tree.map(lambda a: a.dtype, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), outputs, expected)


def test_invalid_arguments_raise(operands):
    weights, x = operands
    operations = divide_operations(FUNCTIONS, weights, x, jax.devices()[:2])
    raises(r"inputs have .*shape=\(5, 8\).*: expected", lambda: operations(operations.pack(weights), x[:5]))
    raises("devices is empty", divide_operations, FUNCTIONS, weights, x, [])
    raises("2 functions and 3 weights", divide_operations, FUNCTIONS[:2], weights, x)
    raises("expected .* with which divide_operations was called", operations.pack, (weights[0].T, *weights[1:]))
