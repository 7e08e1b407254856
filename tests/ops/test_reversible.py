"""Reversible layers against a stack that keeps its activations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from hpnlp import measure
from hpnlp.ops.helpers.stacks import StackOrder
from hpnlp.ops.reversible import reversible
from tests.contracts import assert_close, once
from tests.messages import raises

D = 8


def mix(layer_params, x, context, key):
    """A branch with dropout, a reported loss, and a reported count without a gradient."""
    w, number = layer_params
    h = jnp.tanh(x @ w["a"] + context["shift"].astype(x.dtype) + number.astype(x.dtype))
    kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, x.shape)
    return jnp.where(kept, h @ w["b"], jnp.zeros_like(h)), {"h_loss": jnp.sum(h**2), "ids": context["ids"].sum()}


def feed(layer_params, x, context, key):
    w, _ = layer_params
    return jnp.sin(x @ w["b"].T) * context["shift"].astype(x.dtype), {}


def other(layer_params, x, context, key):
    return jnp.cos(x @ layer_params[0]["a"]), {"other_loss": jnp.mean(x**4)}


def constant(layer_params, x, context, key):
    return jnp.broadcast_to(jnp.sin(layer_params[0]["b"][:1]), x.shape), {}


def reference(layers, params, x1, x2, *operands):
    """The equations of the layers, with all activations kept."""
    reports = []
    for i in range(len(jax.tree.leaves(params)[0])):
        layer_params, (f, g) = jax.tree.map(lambda leaf, i=i: leaf[i], params), layers[i % len(layers)]
        gain, of_f = f(layer_params, x2, *operands)
        x1 = x1 + gain.astype(x1.dtype)
        gain, of_g = g(layer_params, x1, *operands)
        x2 = x2 + gain.astype(x2.dtype)
        reports.append((of_f, of_g))
    return x1, x2, reports


def by_form(layers, params, *arguments):
    """`reversible` over one stack for each pair of branches."""
    order = StackOrder(tuple(map(str, range(len(layers)))))
    stacks = {
        name: jax.tree.map(lambda leaf, i=i: leaf[i :: len(layers)], params) for i, name in enumerate(order.names)
    }
    return reversible(layers, stacks, *arguments, order=order)


def arrays(count, scale=0.5, dtype="float32"):
    draw = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(draw.standard_normal(shape).astype(dtype))  # noqa: E731
    w = {name: scale / D**0.5 * normal(count, D, D) for name in "ab"}
    return w, normal(3, D), normal(3, D), normal(3, D)


def loss_of(run, layers, key=None, ids=(1, 2)):
    """A function of all differentiable arguments: weights, streams and an operand."""
    key = jax.random.key(0) if key is None else key

    def loss(w, x1, x2, shift):
        params = w, jnp.arange(len(w["a"]), dtype=jnp.uint32)
        y1, y2, reports = run(layers, params, x1, x2, {"shift": shift, "ids": jnp.asarray(ids)}, key)
        losses = [leaf.sum() for leaf in jax.tree.leaves(reports) if leaf.dtype != jnp.int32]
        return jnp.sum(y1**2) + jnp.sum(y1 * y2) + sum(losses)

    return loss


@pytest.mark.parametrize(
    ("layers", "count", "key", "op"),
    [
        ([(mix, feed)], 1, jax.random.PRNGKey, reversible),
        ([(mix, feed)], 4, jax.random.key, reversible),
        ([(mix, feed), (other, feed)], 5, jax.random.PRNGKey, reversible),
        ([(mix, feed)] * 2 + [(other, mix)], 2, jax.random.key, reversible),
        ([(mix, feed), (other, feed)], 5, jax.random.key, by_form),
    ],
    ids=["one", "loop", "turns and a half", "less than a turn", "two stacks"],
)
def test_gradients_match_reference(layers, count, key, op):
    """Gradients by parameters, both streams, and an operand; dropout, layer numbers and reports are the same."""
    arguments = arrays(count)
    losses = [loss_of(run, layers, key(1)) for run in (op, reference)]
    actual, expected = once(lambda *a: [jax.value_and_grad(loss, (0, 1, 2, 3))(*a) for loss in losses], *arguments)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


def test_reports_are_stacked_by_layer_form():
    w, x1, x2, shift = arrays(5)
    arguments = [(mix, feed), (other, feed)], (w, jnp.arange(5, dtype=jnp.uint32)), x1, x2
    operands = {"shift": shift, "ids": jnp.asarray([4])}, jax.random.key(0)
    (*actual, stacked), (*expected, apart) = jax.device_get(
        once(lambda: [run(*arguments, *operands) for run in (reversible, reference)])
    )
    assert_close(actual, expected)
    undivided = [jax.tree.map(lambda *leaves: np.stack(leaves), apart[place], apart[place + 2]) for place in range(2)]
    assert_close(stacked, [*undivided, jax.tree.map(lambda leaf: leaf[None], apart[4])])


@pytest.mark.parametrize(
    ("dtype", "branches"), [("float32", "float32"), ("float64", "float64"), ("float32", "bfloat16")]
)
def test_recomputed_streams_are_bitwise_equal(dtype, branches):
    """Bitwise, from the end of 64 layers, although outputs of branches are much larger than the first streams.

    Each branch reports its input, and its input times a parameter of 0, whose gradient is the recomputed input.
    """

    def branch(layer_params, x):
        gain = jnp.tanh((x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True))).astype(branches) @ layer_params["w"])
        return gain, {"was": x, "again": jnp.sum(layer_params["probe"] * x)}

    def loss(probes, w, x):
        params = [{"w": w.astype(branches), "probe": probe} for probe in probes]
        layer = lambda layer_params, x: branch(layer_params[0], x), lambda layer_params, x: branch(layer_params[1], x)  # noqa: E731
        *_, ((of_f, of_g),) = reversible([layer], params, x, x)
        return jnp.sum(of_f["again"] + of_g["again"]), (of_f["was"], of_g["was"])

    with jax.enable_x64(dtype == "float64"):
        w, x, *_ = arrays(64, 1.0, dtype)
        probe = jnp.zeros((64, *x.shape), dtype)
        again, was = once(jax.grad(loss, has_aux=True), (probe, probe), w["a"], 0.02 * x)
        for actual, expected in zip(again, was, strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_branches_with_custom_vjp_are_recomputed_bitwise():
    """A branch with a custom derivative may be another program when it is differentiated."""

    @jax.custom_vjp
    def rough(x):
        return jnp.tanh(x) * 1.001

    rough.defvjp(lambda x: (jnp.tanh(x), x), lambda x, d: (d / jnp.cosh(x) ** 2,))

    def branch(layer_params, x):
        return rough(x @ layer_params["w"]), {"was": x, "again": jnp.sum(layer_params["probe"] * x)}

    def loss(probe):
        *_, ((of_f, _),) = reversible([(branch, branch)], {"w": w["a"], "probe": probe}, x, x)
        return of_f["again"].sum(), of_f["was"]

    w, x, *_ = arrays(8)
    again, was = once(jax.grad(loss, has_aux=True), jnp.zeros((8, *x.shape), jnp.float32))
    np.testing.assert_array_equal(again, was)


def test_memory_does_not_grow_with_depth():
    """Memory of activations; gradients of parameters are results."""
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)

    def branch(layer_params, x):
        return jnp.tanh(jnp.tanh(x @ layer_params) @ layer_params.T), {}

    def temp(run, count):
        loss = lambda w, x: jnp.sum(run([(branch, branch)], w, x, x)[0])  # noqa: E731
        return measure.compile(jax.grad(loss), jax.ShapeDtypeStruct((count, 64, 64), jnp.float32), x).memory.temp

    few, many = temp(reversible, 4), temp(reversible, 32)
    assert many <= 1.05 * few
    kept = 4 * 512 * 64 * 4  # bytes for each layer in a stack that keeps activations
    assert temp(reference, 8) - temp(reference, 4) >= 4 * kept > few / 2


def test_second_derivatives_match_reference():
    w, *arguments = arrays(3)

    def slope(run):
        gradients = jax.grad(loss_of(run, [(mix, feed)]))
        return jax.grad(lambda w: sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients(w, *arguments))))

    slopes = once(lambda w: [slope(run)(w) for run in (reversible, reference)], w)
    for a, b in zip(*map(jax.tree.leaves, slopes), strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b)


@pytest.mark.parametrize("alike", [True, False], ids=["both streams", "one stream"])
def test_sharded_gradients_match_reference(alike):
    """Rows are sharded; gradients of replicated arguments are summed over the devices."""
    w, *streams, shift = arrays(5)
    x1 = jnp.concatenate([streams[0], *streams])[:8]
    x2 = x1[::-1] if alike else x1[:1]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    rows, same = PartitionSpec("data"), PartitionSpec()

    def local(w, x1, x2, shift):
        x2 = jnp.broadcast_to(x2, x1.shape)
        value = loss_of(reversible, [(other, feed), (other, constant)])(w, x1, x2, shift)
        return jax.lax.psum(value, "data")

    def divided(*arguments):
        specs = (same, rows, rows if alike else same, same)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=same)(*arguments)

    def undivided(w, x1, x2, shift):
        row_pairs = [(x1[i : i + 2], x2[i : i + 2] if alike else x2) for i in range(0, 8, 2)]
        return sum(
            loss_of(reference, [(other, feed), (other, constant)])(w, a, jnp.broadcast_to(b, a.shape), shift)
            for a, b in row_pairs
        )

    arguments = w, x1, x2, shift[:1]
    actual, expected = (once(jax.grad(loss, (0, 1, 2, 3)), *arguments) for loss in (divided, undivided))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b)


def test_gradient_of_a_closed_over_value_raises():
    w, x1, x2, _ = arrays(2)

    def loss(scale):
        branch = lambda layer_params, x: (jnp.tanh(x @ layer_params["a"]) * scale, {})  # noqa: E731
        return jnp.sum(reversible([(branch, branch)], w, x1, x2)[0])

    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.grad(loss)(2.0)


def test_16_bit_streams_raise():
    w, x1, x2, _ = arrays(2)
    raises("x1 and x2 are bfloat16 and float32", reversible, [(feed, feed)], w, x1.astype(jnp.bfloat16), x2)
