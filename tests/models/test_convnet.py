"""Convolutional networks: equality over devices, removal of filters, costs, errors; and torch's modules as an oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp import measure
from hpnlp.models import variables
from hpnlp.models.convnet import ConvNet, ConvNetConfig, filled
from hpnlp.nn.convnet import Inverted
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests.contracts import ONCE, assert_close, once
from tests.messages import raises

BLOCKS = "conv(4,kernel=1),separable(4,stride=2),inverted(4,expand=2)"
SIDE, CLASSES, B = 7, 3, 16


def make(blocks=BLOCKS, **fields):
    return ConvNet(ConvNetConfig(blocks=blocks, side=SIDE, classes=CLASSES, **fields))


def make_batch(count=B):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (count, SIDE**2)).astype(np.int32)
    ones = np.ones_like(tokens)
    labels = rng.integers(0, CLASSES, count).astype(np.int32)
    weights = (np.arange(count) % 5 != 4).astype(np.float32)
    arrays = {"tokens": tokens, "segment_ids": ones, "positions": ones, "labels": labels, "weights": weights}
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def weights_of(model, seed=0):
    """Weights with random scales, biases and moving averages."""
    initial = jax.jit(model.init, compiler_options=ONCE)(jax.random.key(seed), model.example_batch(1, 8))
    initial = jax.tree.map(
        lambda x: x.unbox() if hasattr(x, "unbox") else x, initial, is_leaf=lambda x: hasattr(x, "unbox")
    )
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda x: x + np.float32(0.3) * rng.standard_normal(x.shape).astype(np.float32), initial["params"]
    )
    buffers = jax.tree.map(lambda x: x + rng.uniform(0, 0.5, x.shape).astype(np.float32), initial.get("buffers"))
    return variables.join(params, buffers)


def run(model, plan, devices, accumulate=1, remat="none"):
    """Losses of three steps, that of the evaluation after them, and the buffers.

    Steps are those of SGD: AdamW divides gradients that are 0 but for rounding by their own size.
    """
    optimizer = OptimizerConfig("sgd", warmup=0, learning_rate=0.1, accumulate=accumulate)
    plan = dataclasses.replace(plan, remat=remat)
    trainer = make_trainer(model, optimizer, plan, steps=4, devices=jax.devices()[:devices])
    batch = jax.device_put(make_batch(), trainer.batch_sharding)
    state, losses = trainer.init(jax.random.key(0)), []
    for _ in range(3):
        state, metrics = trainer.step(state, batch, jax.random.key(1))
        losses.append(metrics["loss"])
    sums = trainer.evaluate(variables.join(state.params, state.buffers), batch)
    losses.append(sums["loss"][0] / sums["loss"][1])
    return np.array(losses), jax.device_get(state.buffers)


@pytest.fixture(scope="module")
def on_one_device():
    return run(make(), Plan("single"), 1)


@pytest.mark.slow
def test_recomputed_blocks_have_the_same_losses(on_one_device):
    np.testing.assert_allclose(run(make(), Plan("single"), 1, remat="full")[0], on_one_device[0], rtol=1e-5)


@pytest.mark.slow
def test_accumulation_with_group_norm_matches_the_whole_batch():
    """Groups are of one image; batch moments would be those of a part."""
    model = make("conv(4)", image_norm="group(2)")
    whole, parts = (run(model, Plan("single"), 1, accumulate=count) for count in (1, 2))
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    assert whole[1] is None


def test_moving_averages_are_those_of_all_parts():
    """Moments of sums over two parts are those of the whole batch, where both parts have been normalised alike."""
    model, batch = make("conv(4)"), make_batch()
    initial = weights_of(model)

    def statistics(weights, rows):
        part = {name: x[rows] for name, x in batch.items()}
        return model.apply(variables.collections(weights), part, False, method="loss").statistics

    def advanced(weights):
        both = jax.tree.map(jnp.add, statistics(weights, slice(0, 10)), statistics(weights, slice(10, B)))
        sums = both, statistics(weights, slice(0, B)), jax.tree.map(jnp.zeros_like, both)
        return [model.advance(weights["buffers"], x, jnp.int32(0), jax.random.key(0)) for x in sums]

    of_parts, of_whole, of_nothing = jax.jit(advanced, compiler_options=ONCE)(initial)
    assert_close(of_parts, of_whole)
    assert_close(of_nothing, initial["buffers"])


def test_filters_removed_from_arrays_equal_filters_set_to_0():
    """A network with fewer filters in a block and fewer channels in the next one computes what the zeroed network does."""
    full = make("conv(4),separable(6,stride=2),inverted(5,hidden=8)")
    small = make("conv(4),separable(4,stride=2),inverted(5,hidden=6)")
    weights = weights_of(full)
    kept, hidden = np.array([0, 2, 3, 5]), np.array([0, 1, 3, 4, 6, 7])

    def reduced(tree, block, names, index, axis):
        for name, array in names:
            tree[block][name] = {**tree[block][name], array: np.take(tree[block][name][array], index, axis)}

    params, buffers = variables.split(jax.tree.map(np.array, weights))
    for index, name in ((1, "norm"), (2, "expand_norm"), (2, "depthwise_norm")):  # zeroed filters
        gone = np.setdiff1d(np.arange(6 if index == 1 else 8), kept if index == 1 else hidden)
        for array in ("scale", "bias"):
            params[f"block_{index}"][name][array][gone] = 0
    zeroed = jax.tree.map(np.copy, (params, buffers))
    reduced(params, "block_1", [("pointwise", "kernel")], kept, 1)
    reduced(params, "block_2", [("expand", "kernel")], kept, 0)
    reduced(params, "block_2", [("expand", "kernel")], hidden, 1)
    reduced(params, "block_2", [("depthwise", "filters")], hidden, 2)
    reduced(params, "block_2", [("pointwise", "kernel")], hidden, 0)
    for tree, arrays in ((params, ("scale", "bias")), (buffers, ("mean", "variance"))):
        reduced(tree, "block_1", [("norm", array) for array in arrays], kept, 0)
        for name in ("expand_norm", "depthwise_norm"):
            reduced(tree, "block_2", [(name, array) for array in arrays], hidden, 0)

    def logits(model, params, buffers):
        return model.apply(variables.collections(variables.join(params, buffers)), make_batch(), method="logits")

    cases = (small, (params, buffers)), (full, zeroed)
    assert_close(*(once(functools.partial(logits, model), *arrays) for model, arrays in cases))


def test_padding_does_not_change_training():
    model = make()
    weights, batch = weights_of(model), make_batch()
    padding = batch["weights"] == 0
    other = {**batch, "tokens": jnp.where(padding[:, None], 255 - batch["tokens"], batch["tokens"])}

    def outputs(batch):
        return model.apply(variables.collections(weights), batch, False, method="loss")

    program = jax.jit(outputs, compiler_options=ONCE)
    first, second = program(batch), program(other)
    assert_close((first.sum, first.statistics), (second.sum, second.statistics))


def test_multiply_adds_are_those_of_the_program():
    """The program leaves out products with the border: 19 of 21 pixels along a row of 7 positions, 10 of 12 of 4 positions."""
    model, batch = make("conv(4),conv(6,stride=2),conv(5,kernel=1)"), make_batch()
    logits = lambda w: model.apply(variables.collections(w), batch, method="logits")  # noqa: E731
    flops = measure.count_flops(logits, weights_of(model))
    counts = model.config.multiply_adds()
    assert counts == [49 * 9 * 4, 16 * 9 * 4 * 6, 16 * 6 * 5]
    assert flops == 2 * B * (19**2 * 4 + 10**2 * 4 * 6 + counts[2] + 5 * CLASSES)
    separable = make("conv(4),separable(6),inverted(6,expand=2)").config.multiply_adds()
    assert separable[1:] == [49 * 4 * (9 + 6), 49 * (6 * 12 + 12 * (9 + 6))]
    assert make("conv(4),separable(6)", width=0.5).config.shapes()[1].filters == 3


def test_invalid_configs_raise():
    for fields, message in (
        ({"blocks": ""}, "expected 1 to 1000 blocks"),
        ({"blocks": "conv(4)*2000"}, "expected 1 to 1000 blocks"),
        ({"blocks": "conv"}, "model.blocks: conv: block 'conv' takes"),
        ({"blocks": "cov(4)"}, "unknown block 'cov': did you mean 'conv'?"),
        ({"blocks": "conv(1000000)"}, "block 1 has over"),
        ({"blocks": "conv(3),inverted(4,residual=True)"}, "block 2: residual=True adds 3 channels to 4 with stride=1"),
        ({"image_norm": "layer"}, "unknown model.image_norm 'layer'"),
        ({"dtype": "int8"}, "unknown model.dtype 'int8'"),
    ):
        raises(message.replace("?", r"\?").replace("(", r"\("), ConvNetConfig, **fields)


def test_unsupported_combinations_raise():
    for plan, message in (
        (Plan(tensor=2), "plan.tensor=2 divides heads and columns of layers, and the model has none"),
        (Plan(pipeline=2), "plan.pipeline=2: the model is a convolutional network, whose stages would differ"),
        (Plan(sequence=2), "plan.sequence=2: the model is a convolutional network, whose images are not divided"),
        (Plan("zero3", offload_parameters=True), "the model has several stacks"),
    ):
        raises(message, make_trainer, make(), OptimizerConfig(), plan, steps=1)
    raises("optimizer.rows=True", make_trainer, make(), OptimizerConfig(rows=True), Plan("single"), steps=1, devices=1)
    with pytest.raises(InputError, match=r"group\(4\)' does not divide 6 channels"):
        make_trainer(make("conv(6)", image_norm="group(4)"), OptimizerConfig(), Plan("single"), steps=1, devices=1)
    with pytest.raises(InputError, match="images of 48 pixels: model.side=7 expects 49"):
        batch = {name: x[:, :48] if x.ndim > 1 else x for name, x in make_batch().items()}
        jax.eval_shape(lambda: make().init(jax.random.key(0), batch))
    for seq_len, message in ((50, "data.seq_len=50 is no square number"), (64, "is an image of side 8")):
        raises(message, filled, make().config, CLASSES, seq_len)


@pytest.fixture(scope="module")
def torch():
    library = pytest.importorskip("torch")
    library.set_num_threads(1)
    return library


def torch_network(torch, config, params, buffers):
    """The same network from torch's modules, with copied weights: `(module, [its batch norms by our names])`."""
    nn, norms = torch.nn, {}

    def copied(parameter, value):
        parameter.data = torch.from_numpy(np.array(value))

    def convolution(kernel, inputs, side, stride, groups=1):
        kernel = np.asarray(kernel).reshape(side, side, inputs // groups, -1)
        layer = nn.Conv2d(inputs, kernel.shape[-1], side, stride, side // 2, groups=groups, bias=False)
        copied(layer.weight, kernel.transpose(3, 2, 0, 1))
        return layer

    def norm(block, name):
        values, moving = params[block][name], buffers[block][name]
        layer = nn.BatchNorm2d(len(values["scale"]), eps=1e-5, momentum=0.1)
        for parameter, value in ((layer.weight, values["scale"]), (layer.bias, values["bias"])):
            copied(parameter, value)
        layer.running_mean.copy_(torch.from_numpy(np.array(moving["mean"])))
        layer.running_var.copy_(torch.from_numpy(np.array(moving["variance"])))
        norms[block, name] = layer
        return layer

    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    blocks = []
    for index, (entry, shape) in enumerate(zip(config.entries, config.shapes(), strict=True)):
        name, layers, inputs = f"block_{index}", [], shape.inputs
        values = params[name]
        if "conv" in values:
            layers = [
                convolution(values["conv"]["kernel"], inputs, shape.kernel, shape.stride),
                norm(name, "norm"),
                nn.ReLU6(),
            ]
        else:
            if "expand" in values:
                layers += [convolution(values["expand"]["kernel"], inputs, 1, 1), norm(name, "expand_norm"), nn.ReLU6()]
            inner = shape.hidden or inputs
            filters = np.asarray(values["depthwise"]["filters"])[:, :, None]
            layers += [
                convolution(filters, inner, shape.kernel, shape.stride, inner),
                norm(name, "depthwise_norm"),
                nn.ReLU6(),
            ]
            layers += [convolution(values["pointwise"]["kernel"], inner, 1, 1), norm(name, "norm")]
            layers += [] if isinstance(entry, Inverted) else [nn.ReLU6()]
        blocks.append((Residual if shape.residual else nn.Sequential)(*layers))
    head = nn.Linear(*reversed(np.shape(params["head"])))
    copied(head.weight, params["head"])
    copied(head.bias, params["output"]["bias"])
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head), norms


@pytest.mark.oracle
def test_loss_gradients_and_moving_averages_match_torch(torch):
    model = make("conv(4),separable(6,stride=2),inverted(6,expand=2),inverted(8,stride=2,expand=1),conv(5,kernel=1)")
    weights, batch = weights_of(model), make_batch()
    batch["weights"] = jnp.ones(B)
    params, buffers = variables.split(weights)
    network, norms = torch_network(torch, model.config, params, buffers)
    x = torch.from_numpy(np.array(batch["tokens"], np.float32).reshape(B, 1, SIDE, SIDE) * np.float32(2 / 255) - 1)
    network.eval()
    logits = model.apply(variables.collections(weights), batch, method="logits")
    np.testing.assert_allclose(logits, network(x).detach().numpy(), atol=2e-5, rtol=2e-5)

    def loss(params):
        out = model.apply(variables.collections(variables.join(params, buffers)), batch, False, method="loss")
        return out.sum / out.weight, out.statistics

    (value, statistics), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    network.train()
    expected = torch.nn.functional.cross_entropy(network(x), torch.from_numpy(np.array(batch["labels"])).long())
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    advanced = model.advance(buffers, statistics, jnp.int32(0), jax.random.key(0))
    for (block, name), layer in norms.items():
        for ours, theirs in (("mean", layer.running_mean), ("variance", layer.running_var)):
            np.testing.assert_allclose(advanced[block][name][ours], theirs.numpy(), rtol=1e-5, atol=1e-6)
        for ours, theirs in (("scale", layer.weight.grad), ("bias", layer.bias.grad)):
            np.testing.assert_allclose(grads[block][name][ours], theirs.numpy(), rtol=2e-4, atol=2e-6)
    first, last = network[0][0].weight.grad.numpy(), network[-1].weight.grad.numpy()
    np.testing.assert_allclose(
        grads["block_0"]["conv"]["kernel"].reshape(3, 3, 1, 4), first.transpose(2, 3, 1, 0), rtol=2e-4, atol=2e-6
    )
    np.testing.assert_allclose(grads["head"], last, rtol=2e-4, atol=2e-6)
