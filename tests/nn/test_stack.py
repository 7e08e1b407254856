"""Stacks of layers of several forms against a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.nn.stack import run_layers
from hpnlp.ops.helpers.stacks import StackOrder, single_stack

COUNT = 7
ONCE = {"xla_backend_optimization_level": 0}


def layer(kind):
    """x -> x * w + (kind + 1) * index, with a cache that counts calls, whose size depends on the kind, and a report."""

    def apply(x, slices):
        params, index, cache = slices
        x = x * params["w"] + (kind + 1) * index.astype(jnp.float32)
        cache = jnp.zeros(kind + 1) if cache is None else cache + 1.0
        return x, (
            cache,
            LayerReport(
                {"all": (x, jnp.float32(1)), f"only{kind % 2}": (2 * x, jnp.float32(kind))}, {"x": x, "index": index}
            ),
        )

    return apply


def plain(kinds, x, w):
    aux, states = {}, []
    for i in range(COUNT):
        kind = i % kinds
        x = x * w[i] + (kind + 1) * i
        states.append(x)
        for name, pair in {"all": (x, 1), f"only{kind % 2}": (2 * x, kind)}.items():
            aux[name] = np.add(aux.get(name, (0, 0)), pair)
    return x, aux, np.array(states)


@pytest.mark.parametrize(("kinds", "unroll"), [(1, 1), (2, 4), (3, COUNT)])
def test_equals_a_plain_loop(kinds, unroll):
    w = np.linspace(0.5, 1.5, COUNT, dtype=np.float32)
    layers = [layer(kind) for kind in range(kinds)]
    expected, reports, states = plain(kinds, 2.0, w)
    stacked, order = {"w": jnp.asarray(w)}, StackOrder(tuple(f"remainder {kind % 2}" for kind in range(kinds)))
    stacks = {name: {"w": w[np.array(order.members(name, COUNT))]} for name in order.stack_names}
    for params in (stacked, tuple({"w": weight} for weight in stacked["w"]), *[stacks] * (kinds > 1)):
        chosen = order if params is stacks else None
        run = jax.jit(lambda *args: run_layers(layers, *args, unroll, order=chosen), compiler_options=ONCE)  # noqa: B023
        x, caches, report = run(jnp.float32(2), params, None)
        np.testing.assert_allclose(x, expected, rtol=1e-6)
        assert report.aux.keys() == reports.keys()
        for name, pair in report.aux.items():
            np.testing.assert_allclose(pair, reports[name], rtol=1e-6)
        names = chosen or single_stack(kinds)
        for name, statistics in report.statistics.items():
            members = names.members(name, COUNT)
            np.testing.assert_array_equal(statistics["index"], members)
            np.testing.assert_allclose(statistics["x"], states[np.array(members)], rtol=1e-6)
        assert list(report.statistics) == names.stack_names

        again, longer, _ = run(jnp.float32(2), params, caches)
        assert again == x and jax.tree.structure(longer) == jax.tree.structure(caches)
        sizes = [leaf.size for leaf in jax.tree.leaves(longer)]
        assert sum(sizes) == sum(i % kinds + 1 for i in range(COUNT))
        assert all(np.all(leaf == 1.0) for leaf in jax.tree.leaves(longer))
        assert isinstance(params, dict) or sizes == [i % kinds + 1 for i in range(COUNT)]


def test_layers_of_one_form_are_one_loop():
    """The program has only the scan over all layers: no slices, and no layers after it."""

    def run(x, w):
        return run_layers([layer(0)], x, {"w": w}, None, 1)[0]

    jaxpr = jax.make_jaxpr(run)(jnp.float32(2), jnp.ones(COUNT))
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert scan.params["length"] == COUNT
    assert not {"slice", "reshape", "dynamic_slice", "gather"} & {eqn.primitive.name for eqn in jaxpr.eqns}
