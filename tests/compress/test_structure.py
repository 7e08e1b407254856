"""Structured pruning: a smaller layer computes what the layer with zeros computes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.compress.layers import join_layers, split_layers
from hpnlp.compress.stages.structure import choose_units, importance, keep_units, unit_count
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.models.variables import collections
from tests.contracts import ONCE, once
from tests.messages import raises

FORMS = {
    "plain": {},
    "grouped": {
        "heads": 4,
        "kv_heads": 2,
        "qkv_bias": True,
        "qk_norm": True,
        "norm": "layer",
        "mlp": "gelu",
        "mlp_bias": True,
    },
    "two mixers": {"mixer": "linear,full"},
    "buffers": {"mixer": "routing(4, window=4)"},
    "hybrid": {"heads": 4, "mixer": "full,conv", "form": "block*2,block(heads=2,mlp_dim=4),block"},
}
TOKENS = jnp.arange(16).reshape(2, 8)


@functools.cache
def make(form):
    config = LMConfig(**{"dim": 16, "heads": 2, "layers": 4, "vocab": 40, "max_len": 16, "mlp_dim": 6} | FORMS[form])
    model = LM(config)
    variables = nn.meta.unbox(once(model.init, jax.random.key(0), example_batch(1, 8)))
    return config, {**variables["params"], **({"buffers": variables["buffers"]} if "buffers" in variables else {})}


@functools.cache
def program(config):
    return jax.jit(
        lambda weights: LM(config).apply(collections(weights), TOKENS, method="logits"), compiler_options=ONCE
    )


def logits(config, weights):
    return program(config)(weights)


@pytest.mark.parametrize("form", [*list(FORMS)[1:], pytest.param("plain", marks=pytest.mark.slow)])
def test_split_layers_join_to_the_same_model(form):
    config, weights = make(form)
    new_config, new_weights = join_layers(config, weights, split_layers(config, weights))
    np.testing.assert_array_equal(logits(config, weights), logits(new_config, new_weights))


@pytest.mark.parametrize("form", ["grouped", "two mixers", "hybrid"])
@pytest.mark.parametrize("unit", ["heads", "mlp"])
def test_removed_units_are_as_good_as_zeros(form, unit):
    config, weights = make(form)
    layers = split_layers(config, weights)

    def changed(change):
        counts = [unit_count(layer, unit) for layer in layers]
        return [
            change(layer, unit, np.arange(i % 2, count, 2)) if count else layer
            for i, (layer, count) in enumerate(zip(layers, counts, strict=True))
        ]

    smaller = join_layers(config, weights, changed(keep_units))
    zeroed = join_layers(config, weights, changed(silenced))
    np.testing.assert_allclose(logits(*smaller), logits(*zeroed), atol=1e-6)
    assert sum(x.size for x in jax.tree.leaves(smaller[1])) < sum(x.size for x in jax.tree.leaves(weights))


def silenced(layer, unit, kept):
    """The layer in which the rows of the last product that belong to other units are 0."""
    name, module = ("out", "attention") if unit == "heads" else ("down", "mlp")
    params = dict(layer.variables["params"])
    kernel = params[module][name]["kernel"]
    rows = np.isin(np.arange(kernel.shape[0]) // (kernel.shape[0] // unit_count(layer, unit)), kept)
    changed = {**params[module][name], "kernel": kernel * rows[:, None]}
    params[module] = {**params[module], name: changed}
    return type(layer)(layer.form, {**layer.variables, "params": params}, layer.axes)


def test_layers_may_be_left_out():
    config, weights = make("two mixers")
    layers = split_layers(config, weights)
    new_config, new_weights = join_layers(config, weights, [layers[0], layers[2], layers[3]])
    assert new_config.mixer == "linear*2,full" and new_config.layers == 3
    assert logits(new_config, new_weights).shape == (2, 8, 40)
    raises("all layers would be removed", join_layers, config, weights, [])


def test_importance_is_the_sum_over_a_units_weights():
    config, weights = make("grouped")
    layer = split_layers(config, weights)[0]
    params = layer.variables["params"]
    columns = np.asarray(params["mlp"]["up"]["kernel"]) ** 2
    expected = columns.sum(0) + np.asarray(params["mlp"]["up"]["bias"]) ** 2
    expected += (np.asarray(params["mlp"]["down"]["kernel"]) ** 2).sum(1)
    np.testing.assert_allclose(importance(layer, "mlp"), expected, rtol=1e-5)
    ones = jax.tree.map(jnp.ones_like, params)
    out = np.abs(params["attention"]["out"]["kernel"]).reshape(2, -1).sum(1)
    qkv = sum(
        np.abs(params["attention"][n][m]).reshape(-1, 2, w).sum((0, 2))
        for n, w in (("q", 8), ("k", 4), ("v", 4))
        for m in ("kernel", "bias")
    )
    np.testing.assert_allclose(importance(layer, "heads", ones), out + qkv, rtol=1e-5)


def test_units_are_chosen_by_layer_or_across_layers():
    scores = [np.array([1.0, 5.0, 2.0, 4.0]), np.array([0.1, 0.1, 9.0, 0.1])]
    assert [list(kept) for kept in choose_units(scores, 0.5, across_layers=False)] == [[1, 3], [0, 2]]
    assert [list(kept) for kept in choose_units(scores, 0.5, across_layers=True)] == [[1, 2, 3], [2]]
    scaled = [1e-3 * scores[0], scores[1]]  # the scale of a layer's weights says nothing on its units
    assert [list(kept) for kept in choose_units(scaled, 0.5, across_layers=True)] == [[1, 2, 3], [2]]
    raises("all heads of a layer would be removed", lambda: keep_units(split_layers(*make("plain"))[0], "heads", []))
