"""Models whose matrices are Weights: losses, logits and decoding equal those of the matrices that they represent."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.compress.matrices import is_table, map_matrices
from hpnlp.compress.recipe import Calibration, compress, parse_recipe
from hpnlp.models.convnet import ConvNet, ConvNetConfig
from hpnlp.models.decode import Generation
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.models.variables import collections, join, split
from hpnlp.ops.weights import dense_tree, keep_blocks, quantize
from tests.contracts import ONCE, once

FORMS = {
    "tied, one stack": {},
    "several stacks": {"mixer": "linear,full", "tied": False, "qkv_bias": True, "norm": "layer", "position": "learned"},
    "reversible": {"residual": "reversible"},
}


@functools.cache
def make(form):
    config = LMConfig(dim=16, heads=2, kv_heads=1, layers=2, vocab=40, max_len=16, mlp_dim=24, **FORMS[form])
    model = LM(config)
    params = nn.meta.unbox(once(model.init, jax.random.key(0), example_batch(1, 8))["params"])

    def to_integers(path, w):
        return quantize(w * 5, by_row=is_table(path), integer_products=False)

    return model, map_matrices(to_integers, params)


@pytest.mark.slow
@pytest.mark.parametrize("form", [*list(FORMS)[:2], "reversible"])
def test_weights_equal_their_dense_matrices(form):
    model, params = make(form)
    batch = {**example_batch(2, 12), "tokens": jnp.arange(24).reshape(2, 12) % 37}

    @functools.partial(jax.jit, compiler_options=ONCE)
    def results(params):
        out = model.apply({"params": params}, batch, method="loss")
        return out.sum, model.apply({"params": params}, batch["tokens"], method="logits")

    (loss, logits), (expected_loss, expected_logits) = results(params), results(dense_tree(params))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(logits, expected_logits, atol=2e-5)


@pytest.mark.slow
def test_decoding_reads_weights():
    model, params = make("tied, one stack")
    ids = [
        np.concatenate(list(Generation(model, weights, [np.arange(3), np.arange(5)], tokens=6)), axis=1)
        for weights in (params, dense_tree(params))
    ]
    np.testing.assert_array_equal(*ids)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["transformer_xl(8)", "full"])
def test_every_format_is_decoded(mixer):
    config = LMConfig(dim=16, heads=2, layers=1, vocab=40, max_len=16, mlp_dim=16, mixer=mixer)
    model = LM(config)
    params = nn.meta.unbox(once(model.init, jax.random.key(0), example_batch(1, 8))["params"])
    *_, (_, _, params) = compress(config, params, parse_recipe("int8(integer_products=False)"))
    ids = [
        np.concatenate(list(Generation(model, weights, [np.arange(3), np.arange(5)], tokens=4)), axis=1)
        for weights in (params, dense_tree(params))
    ]
    np.testing.assert_array_equal(*ids)


@pytest.mark.parametrize("recipe", ["int8", pytest.param("magnitude(0.5),factorize(rank=1)", marks=pytest.mark.slow)])
def test_convolutions_read_weights(recipe):
    model = ConvNet(ConvNetConfig(blocks="conv(4),separable(4)", side=5, classes=3))
    batch = model.example_batch(2, 25)
    variables = nn.meta.unbox(once(model.init, jax.random.key(0), batch))
    weights = join(variables["params"], variables.get("buffers"))

    def loss(config, weights):
        return model.apply(collections(weights), batch, method="loss").sum

    def gradients(config, weights):
        return jax.grad(lambda params: loss(config, join(params, split(weights)[1])))(split(weights)[0])

    *_, (config, small) = (
        (c, w) for _, c, w in compress(model.config, weights, parse_recipe(recipe), Calibration(gradients))
    )
    np.testing.assert_allclose(loss(config, small), loss(config, dense_tree(small)), rtol=1e-2)


def test_matrices_are_found_one_by_one():
    blocks = {"stack": {"kernel": jax.vmap(lambda w: keep_blocks(w, 0.5, 2))(jnp.ones((3, 4, 4)))}}
    blocks["single"] = {"kernel": keep_blocks(jnp.ones((4, 4)), 0.5, 2), "bias": jnp.zeros(4)}
    shapes = []
    map_matrices(lambda path, w: shapes.append((path, w.shape, w.dense().shape)) or w, blocks)
    assert shapes == [("single/kernel", (4, 4), (4, 4)), ("stack/kernel", (4, 4), (4, 4))]
