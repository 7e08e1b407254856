"""Optimizers and schedules by name, compared with closed forms and with optax on single matrices."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from hpnlp.training.optim import OPTIMIZERS, SCHEDULES, OptimizerConfig, is_matrix, make_optimizer, make_schedule
from tests.messages import raises

CONSTANT = OptimizerConfig(schedule="constant", warmup=0, clip_norm=0.0)


@pytest.fixture(autouse=True)
def standard_promotion():
    """As in the training step: optax does not run under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def parameters():
    """Parameters as a model has: stacked matrices, tables, scales and biases."""
    draw = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(draw.normal(size=shape) / np.sqrt(shape[-1]), jnp.float32)

    return {
        "embed": {"table": array(12, 6)},
        "layers": {"up": {"kernel": array(3, 6, 8), "bias": array(3, 8)}, "norm": {"scale": 1.0 + array(3, 6)}},
        "head": array(12, 6),
    }


def update(config, grads, params, steps=1):
    """Parameters after `steps` updates with the same gradients."""
    optimizer = make_optimizer(config, steps=100)
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_lower_the_loss(name):
    target, inputs = jax.tree.map(lambda x: x[::-1], parameters()), np.random.default_rng(1).normal(size=(16, 6))

    def predict(params):
        h = jnp.asarray(inputs, jnp.float32) + params["embed"]["table"][:1]
        for i in range(3):
            layer = jax.tree.map(lambda x, i=i: x[i], params["layers"])
            h = h + jnp.tanh((h * layer["norm"]["scale"]) @ layer["up"]["kernel"] + layer["up"]["bias"])[:, :6]
        return h @ params["head"].T

    expected = predict(target)

    def loss(params):
        return jnp.mean((predict(params) - expected) ** 2)

    rate = {"sgd": 0.03, "lamb": 0.03, "lars": 1.0, "adagrad": 0.1}.get(name, 0.01)
    optimizer = make_optimizer(
        dataclasses.replace(CONSTANT, name=name, learning_rate=rate, weight_decay=1e-3), steps=60
    )

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    params = parameters()
    losses = jax.jit(lambda carry: jax.lax.scan(step, carry, length=60)[1])((params, optimizer.init(params)))
    assert losses[-1] < 0.3 * losses[0]


PEAK, FINAL, STEPS, WARMUP = 0.5, 0.2, 40, 10


def test_schedules_match_closed_forms():
    for schedule, half_way, end in (
        ("constant", PEAK, PEAK),
        ("linear", PEAK * (1 + FINAL) / 2, PEAK * FINAL),
        ("cosine", PEAK * (1 + FINAL) / 2, PEAK * FINAL),
        ("rsqrt(timescale=5)", PEAK / np.sqrt(1 + 15 / 5), PEAK / np.sqrt(1 + 30 / 5)),
        ("wsd", PEAK, PEAK * FINAL),
        ("wsd(decay=1.0)", PEAK * (1 + FINAL) / 2, PEAK * FINAL),
    ):
        config = OptimizerConfig(learning_rate=PEAK, schedule=schedule, warmup=WARMUP, final=FINAL)
        rate = make_schedule(config, STEPS)
        rise = [float(rate(jnp.int32(step))) for step in range(WARMUP)]
        np.testing.assert_allclose(rise, PEAK * np.arange(1, WARMUP + 1) / WARMUP, rtol=1e-6)
        rates = [float(rate(jnp.int32(step))) for step in (WARMUP, WARMUP + (STEPS - WARMUP) // 2, STEPS)]
        np.testing.assert_allclose(rates, [PEAK, half_way, end], rtol=1e-6)


def test_schedules_without_warmup_start_at_the_peak():
    for name in SCHEDULES:
        rate = make_schedule(OptimizerConfig(learning_rate=PEAK, schedule=name, warmup=0), STEPS)
        assert float(rate(jnp.int32(0))) == pytest.approx(PEAK)


def test_warmup_longer_than_the_run_never_reaches_the_peak():
    rate = make_schedule(OptimizerConfig(learning_rate=1.0, warmup=100), steps=10)
    assert float(rate(jnp.int32(9))) == pytest.approx(0.1)


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rates_scale_with_the_batch_size(scaling, factor):
    config = OptimizerConfig(learning_rate=0.01, adam_learning_rate=0.003, base_batch=64, scaling=scaling)
    for batch, by in [(64, 1.0), (256, factor), (16, 1 / factor)]:
        scaled = config.for_batch(batch)
        assert (scaled.learning_rate, scaled.adam_learning_rate) == pytest.approx((0.01 * by, 0.003 * by))
        peak = float(make_schedule(scaled, STEPS)(config.warmup - 1))
        assert peak == pytest.approx(0.01 * by) and scaled.for_batch(batch) == scaled
    raises("optimizer.base_batch=64 scales learning rates by the batch", make_optimizer, config, STEPS)


def test_learning_rates_do_not_scale_without_base_batch():
    assert OptimizerConfig(scaling="sqrt").for_batch(4096) == OptimizerConfig(scaling="sqrt")


def test_is_matrix_selects_kernels_and_tables():
    assert is_matrix(parameters()) == {
        "embed": {"table": True},
        "layers": {"up": {"kernel": True, "bias": False}, "norm": {"scale": False}},
        "head": True,
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_changes_matrices_only(name):
    # lamb and lars scale each array's update by its norm, so that rate and trust coefficient alone decide on the ratio.
    config = dataclasses.replace(CONSTANT, name=name, learning_rate=0.01, weight_decay=0.5, momentum=0.0)
    params = parameters()
    after = update(config, jax.tree.map(jnp.zeros_like, params), params)
    factor = 1 - 0.01 * {"lamb": 1.0, "lars": 0.001}.get(name, 0.5)
    for (path, old), new, decays in zip(
        jax.tree_util.tree_leaves_with_path(params),
        jax.tree.leaves(after),
        jax.tree.leaves(is_matrix(params)),
        strict=True,
    ):
        expected = old * factor if decays else old
        np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-7, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd", "lion", "muon"])
def test_weight_decay_follows_the_schedule(name):
    config = dataclasses.replace(
        CONSTANT, name=name, schedule="linear", warmup=10, learning_rate=0.01, weight_decay=0.5, momentum=0.0, final=0.0
    )
    params, rates = parameters(), make_schedule(config, 100)
    grads = jax.tree.map(jnp.zeros_like, params)
    expected = np.prod([1 - 0.5 * float(rates(step)) for step in range(12)])
    ratio = update(config, grads, params, steps=12)["layers"]["up"]["kernel"] / params["layers"]["up"]["kernel"]
    np.testing.assert_allclose(ratio, expected, rtol=1e-5)


def updates_of(name, steps=3, **fields):
    """Updates of one number with gradients 1, -2, 0.5, at rate 1 and without decay."""
    config = dataclasses.replace(CONSTANT, name=name, learning_rate=1.0, weight_decay=0.0, **fields)
    optimizer = make_optimizer(config, steps=100)
    params = {"bias": jnp.zeros(1)}
    state, moved = optimizer.init(params), []
    for gradient in (1.0, -2.0, 0.5)[:steps]:
        updates, state = optimizer.update({"bias": jnp.full(1, gradient)}, state, params)
        moved.append(float(updates["bias"][0]))
    return moved


def test_updates_match_closed_forms():
    """Kingma and Ba 2015, algorithm 1; Chen et al. 2023, algorithm 2 (lion); heavy-ball momentum."""
    assert updates_of("sgd", momentum=0.5) == pytest.approx([-1.0, -(0.5 - 2.0), -(0.25 - 1.0 + 0.5)])
    assert updates_of("sgd", momentum=0.0) == pytest.approx([-1.0, 2.0, -0.5])
    # lion: the sign of b1 m + (1 - b1) g, then m = b2 m + (1 - b2) g; b1 and b2 change places with the third sign
    assert updates_of("lion", b1=0.1, b2=0.9) == [-1.0, 1.0, -1.0]
    assert updates_of("lion", b1=0.9, b2=0.1) == [-1.0, -1.0, 1.0]
    m, v, expected = 0.0, 0.0, []
    for step, g in enumerate((1.0, -2.0, 0.5), 1):
        m, v = 0.6 * m + 0.4 * g, 0.7 * v + 0.3 * g * g
        expected.append(-(m / (1 - 0.6**step)) / (np.sqrt(v / (1 - 0.7**step)) + 1e-3))
    assert updates_of("adamw", b1=0.6, b2=0.7, eps=1e-3) == pytest.approx(expected, rel=1e-5)


def test_muon_treats_stacked_layers_separately():
    """Like optax's muon on each layer, with other gradients in each step."""
    params, draw = parameters(), np.random.default_rng(2)
    layers = params["layers"]["up"]["kernel"]
    gradients = [jnp.asarray(draw.normal(size=layers.shape), jnp.float32) for _ in range(3)]
    config = dataclasses.replace(CONSTANT, name="muon", learning_rate=0.02, weight_decay=0.1)

    def after(optimizer, params, gradients):
        state = optimizer.init(params)
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return params

    stacked = after(make_optimizer(config, steps=100), {"kernel": layers}, [{"kernel": g} for g in gradients])["kernel"]
    optimizer = contrib.muon(0.02, beta=config.momentum, weight_decay=0.1)
    for layer, actual in enumerate(stacked):
        expected = after(optimizer, layers[layer], [g[layer] for g in gradients])
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_trust_ratios_of_stacked_layers_are_separate():
    """A stack of layers is updated as optax's lamb and lars update separate layers."""
    options = {"weight_decay": 0.1, "momentum": 0.9, "learning_rate": 0.02}
    config = dataclasses.replace(CONSTANT, **options)
    theirs = {
        "lamb": optax.lamb(0.02, config.b1, config.b2, config.eps, weight_decay=0.1, mask=is_matrix),
        "lars": optax.lars(0.02, 0.1, is_matrix, trust_ratio_mask=is_matrix, momentum=0.9),
    }
    # Layers with norms of different sizes, and gradients of other sizes.
    sizes = jnp.asarray([0.1, 1.0, 10.0])
    params, draw = parameters(), np.random.default_rng(2)

    def resize(x, factors):
        return x * factors.reshape(-1, *[1] * (x.ndim - 1))

    params["layers"] = jax.tree.map(lambda x: resize(x, sizes), params["layers"])
    grads = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), jnp.float32), params)
    grads["layers"] = jax.tree.map(lambda x: resize(x, sizes[::-1] ** 2), grads["layers"])

    def unstack(tree):
        return tree | {"layers": [jax.tree.map(lambda x, i=i: x[i], tree["layers"]) for i in range(3)]}

    for name, optimizer in theirs.items():
        actual = update(dataclasses.replace(config, name=name), grads, params, steps=3)
        expected, state = unstack(params), optimizer.init(unstack(params))
        for _ in range(3):
            updates, state = optimizer.update(unstack(grads), state, expected)
            expected = optax.apply_updates(expected, updates)
        chex.assert_trees_all_close(unstack(actual), expected, rtol=1e-5, atol=1e-7)


def test_muon_uses_adam_for_other_parameters():
    params = parameters()
    grads = jax.tree.map(jnp.ones_like, params)
    config = dataclasses.replace(CONSTANT, learning_rate=0.02, schedule="linear", warmup=2)
    after = update(dataclasses.replace(config, name="muon", adam_learning_rate=0.003), grads, params, steps=4)
    rate = make_schedule(dataclasses.replace(config, learning_rate=0.003), steps=100)
    adam = optax.adamw(
        rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=is_matrix, nesterov=True
    )
    expected, state = params, adam.init(params)
    for _ in range(4):
        updates, state = adam.update(grads, state, expected)
        expected = optax.apply_updates(expected, updates)
    for part in (lambda p: p["embed"], lambda p: p["head"], lambda p: p["layers"]["norm"]):
        chex.assert_trees_all_close(part(after), part(expected), rtol=1e-5)
    np.testing.assert_allclose(after["layers"]["up"]["bias"], expected["layers"]["up"]["bias"], rtol=1e-5)


def test_clipping_limits_the_global_norm():
    params = {"kernel": jnp.zeros((2, 2))}
    grads = {"kernel": jnp.asarray([[3.0, 0.0], [0.0, 4.0]])}
    sgd = dataclasses.replace(CONSTANT, name="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0)
    for clip_norm, factor in [(0.0, 1.0), (10.0, 1.0), (2.0, 0.4)]:
        after = update(dataclasses.replace(sgd, clip_norm=clip_norm), grads, params)["kernel"]
        np.testing.assert_allclose(after, -factor * grads["kernel"], rtol=1e-6)


def test_invalid_fields_raise():
    for fields, message in (
        ({"name": "adam"}, "unknown optimizer.name 'adam': did you mean 'adamw'?"),
        ({"schedule": "cosin"}, "unknown optimizer.schedule 'cosin': did you mean 'cosine'?"),
        ({"schedule": "wsd(decay=x)"}, r"optimizer.schedule 'wsd' has decay='x': expected int \| float"),
        ({"schedule": "wsd(5)"}, r"optimizer.schedule: wsd\(decay=5\): expected a fraction of the steps, over 0"),
        ({"schedule": "rsqrt(0)"}, r"optimizer.schedule: rsqrt\(timescale=0\): expected a number of steps over 0"),
        ({"scaling": "linaer"}, "unknown optimizer.scaling 'linaer': did you mean 'linear'?"),
    ):
        raises(message, OptimizerConfig, **fields)


def test_invalid_arguments_of_a_schedule_raise():
    raises("schedule 'wsd' has no argument", lambda: make_schedule(OptimizerConfig(schedule="wsd(decays=0.1)"), STEPS))
