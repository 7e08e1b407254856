"""Measures standard, depthwise-separable and inverted blocks of equal width: multiplications beside wall-clock time. Of each,
also the network without half of its filters, and without two thirds of its window positions (`hpnlp.compress`).

    python experiments/bench/convnets.py [--widths=16,32,64] [--batch=32] [--rounds=7]

For each network: the training step and the logits of a batch, through the trainer and the jitted model. For each shape of a
depthwise convolution: the implementations, forward and with gradients. All of one table are interleaved in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.models import variables
from hpnlp.models.convnet import ConvNet, ConvNetConfig
from hpnlp.ops.convolutions.image_convolution import depthwise_conv2d
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer

SIDE, CLASSES = 32, 10
# Blocks of a network by its name; W is the width.
NETWORKS = {
    "standard": "conv(W),conv(2W,stride=2),conv(2W),conv(4W,stride=2),conv(4W)",
    "separable": "conv(W),separable(2W,stride=2),separable(2W),separable(4W,stride=2),separable(4W)",
    "inverted": "conv(W),inverted(2W,2,expand=4),inverted(2W,expand=4),inverted(4W,2,expand=4),inverted(4W,expand=4)",
}
# Recipes that remove structure of a network, by the name of the result.
PRUNED = {"half the filters": "filters(0.5, by=magnitude)", "two thirds of the positions": "shapes(0.34, by=magnitude)"}
DEPTHWISE = [(32, 32, 1), (32, 64, 2), (16, 64, 1), (8, 128, 1)]  # side, channels, stride

FLAGS = flags.FLAGS
flags.DEFINE_list("widths", ["16", "32", "64"], "Filters of the first block.")
flags.DEFINE_integer("batch", 32, "Images of a batch.")
flags.DEFINE_integer("rounds", 7, "Measurements of each function.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")


def blocks_of(network: str, width: int) -> str:
    """The spec of a network of a width."""
    spec = NETWORKS[network]
    for factor in (4, 2):
        spec = spec.replace(f"{factor}W", str(factor * width))
    return spec.replace("W", str(width))


def pruned(config: ConvNetConfig, recipe: str) -> ConvNetConfig:
    """The config of a network after a recipe, with the weights that it starts from."""
    model = ConvNet(config)
    collections = nn.meta.unbox(model.init(jax.random.key(0), model.example_batch(1, SIDE**2)))
    weights = variables.join(collections["params"], collections["buffers"])
    *_, (_, small, _) = compress(config, weights, parse_recipe(recipe))
    return small


def functions_of(model: ConvNet, batch: dict[str, np.ndarray]) -> dict[str, Callable[[], Any]]:
    """The training step and the logits of a model."""
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup=0)
    trainer = make_trainer(model, optimizer, Plan("single"), steps=1000, devices=jax.devices()[:1])
    data, key = jax.device_put(batch, trainer.batch_sharding), jax.random.key(0)
    state = trainer.init(key)
    weights = jax.tree.map(jnp.copy, variables.join(state.params, state.buffers))  # steps donate the state
    logits = jax.jit(lambda weights, data: model.apply(variables.collections(weights), data, method="logits"))

    def step() -> Any:
        nonlocal state
        state, metrics = trainer.step(state, data, key)
        return metrics["loss"]

    return {"step": step, "logits": lambda: logits(weights, data)}


def network_rows(width: int) -> list[dict[str, Any]]:
    """Rows of all networks of one width."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (FLAGS.batch, SIDE**2)).astype(np.int32)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "positions": np.zeros_like(tokens)}
    batch |= {
        "labels": rng.integers(0, CLASSES, FLAGS.batch).astype(np.int32),
        "weights": np.ones(FLAGS.batch, np.float32),
    }
    configs = {name: ConvNetConfig(blocks=blocks_of(name, width), side=SIDE, classes=CLASSES) for name in NETWORKS}
    configs |= {
        f"{name}, {result}": pruned(config, recipe)
        for name, config in configs.items()
        for result, recipe in PRUNED.items()
    }
    original = {name: name.partition(",")[0] for name in configs}
    functions = {
        f"{name} {part}": function
        for name, config in configs.items()
        for part, function in functions_of(ConvNet(config), batch).items()
    }
    times = measure.timeit(functions, rounds=FLAGS.rounds, warmup=2)
    standard = sum(configs["standard"].multiply_adds())
    return [
        {
            "table": "networks",
            "network": name,
            "width": width,
            "batch": FLAGS.batch,
            "multiply_adds": sum(config.multiply_adds()),
            "multiply_adds_over_standard": sum(config.multiply_adds()) / standard,
            "multiply_adds_over_original": sum(config.multiply_adds()) / sum(configs[original[name]].multiply_adds()),
            **{
                f"{part}_{field}": value
                for part in ("step", "logits")
                for field, value in (
                    ("seconds", times[f"{name} {part}"].median),
                    ("over_standard", times[f"{name} {part}"].over(times[f"standard {part}"])),
                    ("over_original", times[f"{name} {part}"].over(times[f"{original[name]} {part}"])),
                )
            },
        }
        for name, config in configs.items()
    ]


def depthwise_rows(side: int, channels: int, stride: int) -> list[dict[str, Any]]:
    """Rows of the implementations of one depthwise convolution."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((FLAGS.batch, side, side, channels)), jnp.float32)
    kernel = jnp.asarray(rng.standard_normal((3, 3, channels)), jnp.float32)
    functions = {}
    for impl in ("shifts", "xla"):
        run = jax.jit(lambda x, k, impl=impl: depthwise_conv2d(x, k, stride=stride, impl=impl))
        gradients = jax.jit(jax.grad(lambda x, k, run=run: jnp.square(run(x, k)).sum(), argnums=(0, 1)))
        functions[f"{impl} forward"] = lambda run=run: run(x, kernel)
        functions[f"{impl} gradients"] = lambda gradients=gradients: gradients(x, kernel)
    times = measure.timeit(functions, rounds=FLAGS.rounds)
    shape = {"table": "depthwise", "side": side, "channels": channels, "stride": stride, "batch": FLAGS.batch}
    return [
        {**shape, "part": part, "impl": impl, "seconds": t.median, "over_xla": t.over(times[f"xla {part}"])}
        for name, t in times.items()
        for impl, part in [name.split()]
    ]


def main(_: list[str]) -> None:
    cli.prepare_jax()
    rows = [row for width in FLAGS.widths for row in network_rows(int(width))]
    rows += [row for shape in DEPTHWISE for row in depthwise_rows(*shape)]
    for row in rows:
        print(row, flush=True)
    print(measure.write_result("convnets", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
