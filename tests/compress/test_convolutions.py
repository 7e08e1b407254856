"""Structured pruning of convolutional networks: a smaller network computes what the network with zeros computes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.compress.files import read_weights, write_weights
from hpnlp.compress.recipe import Calibration, compress, parse_recipe
from hpnlp.compress.sizes import planned_sizes
from hpnlp.compress.stages.convolutions import channel_groups, channel_importance, keep_channels
from hpnlp.models.convnet import ConvNet, ConvNetConfig
from hpnlp.models.lm import LMConfig
from hpnlp.models.variables import collections, join, split
from hpnlp.ops.weight import dense_tree, parameter_count
from hpnlp.types import InputError
from tests.contracts import ONCE
from tests.drawn import drawn
from tests.messages import raises

SIDE, B = 7, 3
# Residual connections join blocks 0 and 1, and blocks 2, 3 and 4. Block 4 has no first product.
BLOCKS = (
    "conv(6),inverted(6,expand=2),separable(8,stride=2),inverted(8,hidden=10),inverted(8,expand=1),"
    "inverted(8,hidden=7,residual=False),conv(5,kernel=1)"
)
SHORT = "conv(4),inverted(4,expand=2),separable(6,stride=2)"
# Normalisations of the channels of each group: (block, name).
NORMS = {
    ("channels", 0): [(0, "norm"), (1, "norm"), (2, "depthwise_norm")],
    ("channels", 1): [(2, "norm"), (3, "norm"), (4, "norm"), (4, "depthwise_norm")],
    ("channels", 2): [(5, "norm")],
    ("channels", 3): [(6, "norm")],
    ("hidden", 0): [(1, "expand_norm"), (1, "depthwise_norm")],
    ("hidden", 1): [(3, "expand_norm"), (3, "depthwise_norm")],
    ("hidden", 2): [(5, "expand_norm"), (5, "depthwise_norm")],
}


@functools.cache
def make(blocks=BLOCKS, **fields):
    """The config, and weights with random scales, biases and moving averages."""
    config = ConvNetConfig(blocks=blocks, side=SIDE, classes=3, **fields)
    model = ConvNet(config)
    shapes = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), model.example_batch(1, SIDE**2)))
    params = drawn(shapes["params"], 0.4)
    buffers = drawn(shapes.get("buffers", {}), 0.1, means={"variance": 1.0})
    return config, join(params, buffers)


def batch_of(count=B):
    rng = np.random.default_rng(0)
    batch = ConvNet(make()[0]).example_batch(count, SIDE**2)
    tokens = jnp.asarray(rng.integers(0, 256, (count, SIDE**2)), jnp.int32)
    return {**batch, "tokens": tokens, "labels": jnp.arange(count, dtype=jnp.int32) % 3}


@functools.cache
def program(config):
    model = ConvNet(config)
    return jax.jit(lambda w: model.apply(collections(w), batch_of(), method="logits"), compiler_options=ONCE)


def logits(config, weights):
    return np.asarray(program(config)(weights))


def gradients(config, weights):
    params, buffers = split(weights)
    loss = lambda p: ConvNet(config).apply(collections(join(p, buffers)), batch_of(), method="loss").sum  # noqa: E731
    return jax.jit(jax.grad(loss), compiler_options=ONCE)(params)


def copied(weights):
    return jax.tree.map(np.array, weights)


def results(recipe, blocks=BLOCKS, **fields):
    config, weights = make(blocks, **fields)
    return [(c, w) for _, c, w in compress(config, weights, parse_recipe(recipe), Calibration(gradients))]


def test_removed_channels_are_as_good_as_zeros():
    config, weights = make()
    groups = channel_groups(config)
    assert [(g.unit, g.count) for g in groups] == [
        ("channels", 6), ("channels", 8), ("channels", 8), ("channels", 5), ("hidden", 12), ("hidden", 10), ("hidden", 7)
    ]  # fmt: skip
    rng = np.random.default_rng(1)
    kept = [np.sort(rng.choice(g.count, (g.count + 1) // 2, replace=False)) for g in groups]
    small_config, small = keep_channels(config, weights, list(zip(groups, kept, strict=True)))
    assert small_config.blocks == (
        "conv(3),inverted(3, hidden=6),separable(4, stride=2),inverted(4, hidden=5),inverted(4, expand=1),"
        "inverted(4, hidden=4, residual=False),conv(3, kernel=1)"
    )
    zeroed, number = copied(weights), {"channels": 0, "hidden": 0}
    for group, indices in zip(groups, kept, strict=True):
        for block, norm in NORMS[group.unit, number[group.unit]]:
            for array in ("scale", "bias"):
                gone = np.setdiff1d(np.arange(group.count), indices)
                zeroed[f"block_{block}"][norm][array][gone] = 0
        number[group.unit] += 1
    expected = logits(config, zeroed)
    np.testing.assert_allclose(logits(small_config, small), expected, atol=1e-6 * max(1, np.abs(expected).max()))
    shapes = nn.meta.unbox(jax.eval_shape(ConvNet(small_config).init, jax.random.key(0), batch_of(1)))
    assert jax.tree.map(np.shape, join(shapes["params"], shapes["buffers"])) == jax.tree.map(np.shape, small)


def test_importance_is_the_sum_over_a_channels_weights():
    config, weights = make("conv(4),conv(3)")
    first, last = channel_groups(config)
    params, _ = split(copied(weights))
    kernels = [params[f"block_{i}"]["conv"]["kernel"].astype(np.float64) for i in (0, 1)]
    norms = [(params[f"block_{i}"]["norm"]["scale"] ** 2 + params[f"block_{i}"]["norm"]["bias"] ** 2) for i in (0, 1)]
    expected = (kernels[0] ** 2).sum(0) + norms[0] + (kernels[1].reshape(9, 4, 3) ** 2).sum((0, 2))
    np.testing.assert_allclose(channel_importance(first, weights), expected, rtol=1e-5)
    expected = (kernels[1] ** 2).sum(0) + norms[1] + (params["head"] ** 2).sum(0)
    np.testing.assert_allclose(channel_importance(last, weights), expected, rtol=1e-5)
    slopes = jax.tree.map(lambda x: np.full_like(x, -2), params)
    expected = 2 * sum(np.abs(x).sum(0) for x in (kernels[1], params["head"], params["block_1"]["norm"]["scale"][None]))
    expected += 2 * np.abs(params["block_1"]["norm"]["bias"])
    np.testing.assert_allclose(channel_importance(last, weights, slopes), expected, rtol=1e-5)


@pytest.mark.parametrize("scattered", [False, True])
def test_removed_positions_are_as_good_as_zeros(scattered):
    """The magnitudes of two kernels decide: the last row of one, and the middle row of the other but for one position."""
    config, weights = make("conv(4),separable(6,stride=2),conv(5,kernel=1)")
    loud = copied(weights)
    loud["block_0"]["conv"]["kernel"][6:9] *= 10
    loud["block_1"]["depthwise"]["filters"][1] *= 10
    loud["block_1"]["depthwise"]["filters"][1, 2] /= 20
    loud["block_1"]["depthwise"]["filters"][2, 2] *= 5
    argument = ", scattered=True" if scattered else ""
    ((_, small_config, small),) = compress(config, loud, parse_recipe(f"shapes(0.34, by=magnitude{argument})"))
    taps = "3 4 8" if scattered else "3 4 5"
    assert small_config.blocks == f"conv(4, taps='6 7 8'),separable(6, stride=2, taps='{taps}'),conv(5, kernel=1)"
    zeroed = copied(loud)
    zeroed["block_0"]["conv"]["kernel"][:6] = 0
    gone = np.isin(np.arange(9), list(map(int, taps.split())), invert=True).reshape(3, 3)
    zeroed["block_1"]["depthwise"]["filters"][gone] = 0
    expected = logits(config, zeroed)
    np.testing.assert_allclose(logits(small_config, small), expected, atol=1e-6 * max(1, np.abs(expected).max()))
    counts = config.multiply_adds(), small_config.multiply_adds()
    assert counts[1] == [counts[0][0] // 3, counts[0][1] * (3 + 6) // (9 + 6), counts[0][2]]


def test_rectangles_have_the_largest_area_for_which_there_are_positions():
    for share, count in ((1.0, 9), (0.7, 6), (0.6, 4), (0.45, 4), (0.2, 2), (0.01, 1)):
        ((config, weights),) = results(f"shapes({share}, by=magnitude)", "conv(4)")
        assert config.shapes()[0].tap_count == count and weights["block_0"]["conv"]["kernel"].shape == (count, 4)
    (_, (config, _)) = results("shapes(0.6, by=magnitude, scattered=True),shapes(0.5, by=magnitude)", "conv(4)")
    assert config.shapes()[0].tap_count <= 2


@pytest.mark.slow
def test_stages_follow_each_other(tmp_path):
    by = "by=magnitude"
    recipe = f"filters(0.5),hidden(0.5, {by}),channels(0.75, {by}, across_layers=True),shapes(0.67, {by}),int8"
    *_, (pruned_config, _), (config, weights) = results(recipe, SHORT, width=2.0)
    original = make(SHORT, width=2.0)
    assert config.width == 1 and config == pruned_config
    assert parameter_count(weights) < 0.3 * parameter_count(original[1])
    assert sum(config.multiply_adds()) < 0.3 * sum(original[0].multiply_adds())
    np.testing.assert_allclose(logits(config, weights), logits(config, dense_tree(weights)), atol=0.1, rtol=0.1)
    write_weights(tmp_path / "weights", weights)
    read, _ = read_weights(tmp_path / "weights")
    np.testing.assert_array_equal(logits(config, read), logits(config, weights))


def test_planned_sizes_are_those_of_the_arrays():
    stages = "filters(0.5),channels(0.8),hidden(0.7),shapes(0.5),shapes(0.8, scattered=True)"
    recipe = (
        stages.replace(".5", ".5, by=magnitude").replace(".8", ".8, by=magnitude").replace(".7", ".7, by=magnitude")
    )
    config, weights = make(SHORT)
    planned = list(planned_sizes(config, weights, parse_recipe(recipe)))[1:]
    assert [size.parameters for size in planned] == [parameter_count(w) for _, w in results(recipe, SHORT)]
    with pytest.raises(InputError, match="plan without across_layers"):
        list(planned_sizes(config, weights, parse_recipe("filters(0.5, across_layers=True)")))


def test_invalid_recipes_raise():
    for recipe, fields, message in (
        ("hidden(0.5)", {"blocks": "conv(4)"}, "no hidden channels of inverted blocks that can be removed"),
        ("channels(0.5)", {"blocks": "inverted(1,expand=2)"}, "no channels between blocks that can be removed"),
        ("shapes(0.5)", {"blocks": "conv(4,kernel=1)"}, "single positions: leave the stage out"),
        ("filters(0.5)", {"blocks": "conv(4)", "image_norm": "group(2)"}, "train with model.image_norm=batch"),
        ("heads(0.5)", {"blocks": "conv(4)"}, "not one stack of layers"),
    ):
        raises(message, results, recipe, **fields)


def test_models_without_convolutions_and_empty_groups_raise():
    for stage in ("filters", "channels", "hidden", "shapes"):
        with pytest.raises(InputError, match="a model of LMConfig has no convolutions of images"):
            list(compress(LMConfig(dim=16, heads=2, layers=1, vocab=40), {}, parse_recipe(f"{stage}(0.5)")))
    config, weights = make("conv(4)")
    raises("all filters of a convolution", lambda: keep_channels(config, weights, [(channel_groups(config)[0], [])]))
    raises(r"filters\(by='gradient'\) needs", lambda: list(compress(config, weights, parse_recipe("filters(0.5)"))))
    for taps in ("9", "1 1", "2 1", "a"):
        raises("expected ascending indices of the 9 positions", ConvNetConfig, blocks=f"conv(4,taps='{taps}')")
