"""The update of a step: layer by layer, it does the same as for all layers at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.parallel.memory.host_offload import HOST, by_layer
from hpnlp.training.optim import OPTIMIZERS, OptimizerConfig, make_optimizer, make_schedule
from hpnlp.training.optimizers.apply_updates import Update

LAYERS = 3
SHAPES = {"embed": {"table": (5, 8)}, "layers": {"mlp": {"kernel": (LAYERS, 64, 64)}, "norm": {"scale": (LAYERS, 8)}}}


def drawn(seed):
    draw = np.random.default_rng(seed)
    numbers = jax.tree.map(
        lambda s: draw.normal(size=s).astype(np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )
    return jax.tree.map(jnp.asarray, numbers)


def on_host(tree):
    return jax.device_put(tree, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=HOST))


FIRST = ("adamw", "lamb", "muon")


@pytest.mark.parametrize(
    ("name", "is_finite"),
    [
        *((name, None) for name in FIRST),
        ("adamw8bit", False),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in sorted(set(OPTIMIZERS) - {"adafactor", *FIRST})),
        pytest.param("adamw", False, marks=pytest.mark.slow),
    ],
)
def test_layerwise_update_matches_full_update(name, is_finite):
    """With clipping and an average; every array stays in its memory. adafactor cannot be updated by layer."""
    config = OptimizerConfig(name=name, clip_norm=0.5, ema=0.9, warmup=0)
    optimizer = make_optimizer(config, 10)
    results = {}
    for by_layers in (False, True):
        update = Update(config, optimizer, by_layers, LAYERS, make_schedule(config, 1))

        @jax.jit
        def step(old, grads, at, update=update):
            weight = jnp.float32(7)
            norm = update.norm(grads, weight)
            new = update(
                old,
                grads,
                weight=weight,
                norm=norm,
                step=at,
                is_finite=None if is_finite is None else jnp.array(is_finite),
            )
            return norm, new

        params = drawn(0)
        state = params, jax.jit(optimizer.init)(params), params
        for at in range(2):
            grads = drawn(at + 1)
            if by_layers:
                hosted = {**grads, "layers": on_host(grads["layers"])}
                params = {**state[0], "layers": on_host(state[0]["layers"])}
                norm, state = step((params, *state[1:]), hosted, jnp.int32(at))
                kinds = [
                    {x.sharding.memory_kind for x in jax.tree.leaves(tree)} for tree in (state[0]["layers"], state[1])
                ]
                assert kinds == [{HOST}, {"device"}]
            else:
                norm, state = step(state, grads, jnp.int32(at))
        results[by_layers] = jax.device_get((norm, state))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, results[True], results[False])
    if is_finite is not None:
        jax.tree.map(np.testing.assert_array_equal, results[True][1][0], drawn(0))


def test_state_outside_of_layers_is_updated_once():
    """A counter is increased once, whatever the number of layers."""
    state = {"layers": jnp.arange(4.0), "other": jnp.ones(2)}, jnp.int32(0)

    def double(old, by):
        return jax.tree.map(lambda x: x * by["factor"], old[0]), old[1] + 1

    made, count = by_layer(double, state, {"factor": jnp.float32(2)})
    np.testing.assert_array_equal(made["layers"], [0, 2, 4, 6])
    assert count == 1 and made["other"].tolist() == [2, 2]
