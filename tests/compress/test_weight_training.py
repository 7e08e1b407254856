"""Training with other weights: definitions in numpy, schedules, layouts, resumption and what is loaded afterwards."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.compress.training.techniques import cubic_share
from hpnlp.compress.weight_training import WeightTraining, quantile, with_own, with_weight_training
from hpnlp.models import variables
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.ops.linear import linear
from hpnlp.ops.weights import RoundedInputsWeight, binarize_products, dense_tree, quantize
from hpnlp.ops.weights.low_rank import rank_for_share
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig, is_matrix
from hpnlp.training.trainer import make_trainer
from tests.contracts import ONCE
from tests.messages import raises

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(2, 6, 4)), jnp.float32)
S = jnp.asarray(RNG.normal(size=(2, 6, 4)), jnp.float32)
G = jnp.asarray(RNG.normal(size=(2, 6, 4)), jnp.float32)
MODEL = LM(LMConfig(dim=16, heads=2, layers=2, vocab=40, max_len=16, mlp_dim=24))
IDS = np.arange(65, dtype=np.int32) % 40
BATCH = {
    **example_batch(8, 8),
    "tokens": jnp.asarray(IDS[:-1].reshape(8, 8)),
    "labels": jnp.asarray(IDS[1:].reshape(8, 8)),
}


def bound(text, w=W, scores=S, threshold=None, rng=None):
    """The matrix that layers read, and the gradients of (w, scores) for the gradient G of the matrix."""
    technique = with_weight_training(MODEL, text, 100).technique
    value, pull = jax.vjp(lambda w, s: technique.bind(w, s, threshold, rng), w, scores)
    return np.asarray(value), *map(np.asarray, pull(G))


def test_rounded_matrices_have_straight_through_gradients():
    w, g = np.asarray(W), np.asarray(G)
    scale = np.abs(w).max(1, keepdims=True) / 7
    value, dw, _ = bound("quantized(4)")
    np.testing.assert_allclose(value, np.round(w / scale) * scale, atol=1e-6)
    np.testing.assert_array_equal(dw, g)
    value, dw, _ = bound("ternary")
    kept = np.abs(w) > 0.7 * np.abs(w).mean((1, 2), keepdims=True)
    scale = (np.abs(w) * kept).sum((1, 2), keepdims=True) / kept.sum((1, 2), keepdims=True)
    np.testing.assert_allclose(value, np.sign(w) * kept * scale, atol=1e-6)
    np.testing.assert_array_equal(dw, g)
    value, dw, _ = bound("binary")
    clipped = np.clip(w, -1, 1)
    np.testing.assert_allclose(value, np.where(w >= 0, 1, -1) * np.abs(clipped).mean(1, keepdims=True), atol=1e-6)
    np.testing.assert_array_equal(dw, g * (np.abs(w) <= 1))


def test_rounded_inputs_are_those_of_integer_products():
    x, w = jnp.asarray(RNG.normal(size=(5, 6)), jnp.float32), W[0]
    technique = with_weight_training(MODEL, "quantized(8, inputs=True)", 1).technique
    assert technique.input_bits == 8 and with_weight_training(MODEL, "quantized(8)", 1).technique.input_bits == 0
    weight = RoundedInputsWeight(technique.bind(w, None, None, None))
    np.testing.assert_allclose(linear(x, weight), linear(x, quantize(w, 8)), rtol=1e-4, atol=1e-5)
    assert np.abs(linear(x, weight) - x @ weight.matrix).max() > 1e-4
    dx, dw = jax.grad(lambda x, w: linear(x, RoundedInputsWeight(w)).sum(), (0, 1))(x, w)
    limits = np.abs(x).max(1, keepdims=True)
    np.testing.assert_allclose(dx, np.tile(np.asarray(w).sum(1), (5, 1)), rtol=1e-4, atol=1e-5)
    rounded = np.round(x / limits * 127) * limits / 127
    np.testing.assert_allclose(dw, np.tile(rounded.sum(0)[:, None], 4), rtol=1e-4, atol=1e-5)


def test_binary_inputs_are_those_of_products_of_bits():
    x, w = jnp.asarray(RNG.normal(size=(5, 6)), jnp.float32), jnp.clip(W[0], -1, 1)
    technique = with_weight_training(MODEL, "binary(inputs=True)", 1).technique
    weight = RoundedInputsWeight(technique.bind(w, None, None, None), technique.input_bits)
    trained, stored = ((lambda x, w=w: linear(x, w).sum()) for w in (weight, binarize_products(w)))
    np.testing.assert_allclose(linear(x, weight), linear(x, binarize_products(w)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.grad(trained)(x), jax.grad(stored)(x), rtol=1e-5, atol=1e-5)


def test_pruned_matrices_have_gradients_of_their_definition():
    w, s, g = map(np.asarray, (W, S, G))
    threshold = jnp.asarray([0.5, 1.0])
    mask = np.abs(w) >= np.asarray(threshold)[:, None, None]
    value, dw, _ = bound("magnitude(0.5)", threshold=threshold)
    np.testing.assert_array_equal(value, w * mask)
    np.testing.assert_array_equal(dw, g * mask)
    mask = s >= np.asarray(threshold)[:, None, None]
    value, dw, ds = bound("movement(0.5)", threshold=threshold)
    np.testing.assert_array_equal(value, w * mask)
    np.testing.assert_array_equal(dw, g * mask)
    np.testing.assert_allclose(ds, g * w, rtol=1e-6)
    gate = 1 / (1 + np.exp(-3 * s))
    value, dw, ds = bound("soft_movement(0.4, rate=3.0)")
    np.testing.assert_array_equal(value, w * (gate > 0.4))
    np.testing.assert_allclose(ds, g * w * gate * (1 - gate) * 3, rtol=1e-4, atol=1e-6)
    for matrix in (1, 0):  # sigmoids over the threshold in no layer, and in one: the largest score of each stays
        over = s + 10 * (np.arange(len(s)) > matrix)[:, None, None]
        value, _, _ = bound("soft_movement(0.999, rate=1.0)", scores=jnp.asarray(over))
        kept = (over > np.log(999)) | (over == over.max((1, 2), keepdims=True))
        np.testing.assert_array_equal(value, w * kept)
    value, dw, _ = bound("masked", w=W.at[:, 2].set(0.0))
    assert np.all(dw[:, 2] == 0) and np.all(dw[:, 1] == g[:, 1])


def test_weight_drop_is_unbiased_and_off_in_evaluation():
    w = jnp.ones((1, 100, 100))
    technique = with_weight_training(MODEL, "weight_drop(0.25)", 1).technique
    dropped = technique.bind(w, None, None, jax.random.key(0))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    assert abs(float(dropped.mean()) - 1) < 4 * np.sqrt(0.25 / 0.75 / 10_000)
    np.testing.assert_array_equal(technique.bind(w, None, None, None), w)


def test_schedule_and_quantile():
    shares = [float(cubic_share(jnp.float32(p), 0.1, 0.2, 0.6)) for p in (0.0, 0.2, 0.4, 0.6, 1.0)]
    np.testing.assert_allclose(shares, [1, 1, 0.1 + 0.9 * 0.125, 0.1, 0.1], rtol=1e-6)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 10, 10)), jnp.float32)
    for share in (0.0, 0.25, 0.9):
        below = (x < quantile(x, jnp.float32(share))[:, None, None]).mean((1, 2))
        np.testing.assert_allclose(below, share, atol=1e-6)


def test_equal_numbers_have_equal_updates():
    draw = np.random.default_rng(0)
    w, update = draw.integers(-2, 3, (2, 6, 5)).astype(np.float32), draw.normal(size=(2, 6, 5)).astype(np.float32)
    actual = with_weight_training(MODEL, "shared", 1).technique.allowed(jnp.asarray(w), jnp.asarray(update))
    expected = np.zeros_like(w)
    for layer, value in itertools.product((0, 1), (-2, -1, 1, 2)):
        of_value = w[layer] == value
        expected[layer][of_value] = update[layer][of_value].mean()
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert all(len(np.unique(actual[layer])) == 5 for layer in (0, 1))


@functools.cache
def trained(text, plan, steps=6):
    model = with_weight_training(MODEL, text, steps)
    config = OptimizerConfig(warmup=0, learning_rate=0.01)
    trainer = make_trainer(
        model, config, plan, steps=steps, devices=None if plan.name != "single" else jax.devices()[:1]
    )
    state, losses = trainer.init(jax.random.key(0)), []
    for _ in range(steps):
        state, metrics = trainer.step(state, jax.device_put(BATCH, trainer.batch_sharding), jax.random.key(1))
        losses.append(float(metrics["loss"]))
    weights = jax.device_get(variables.join(state.params, state.buffers))
    return model, weights, losses


def test_masked_zeros_stay_with_an_optimizer_of_whole_matrices():
    model = with_weight_training(MODEL, "masked", 2)
    trainer = make_trainer(
        model, OptimizerConfig(name="muon", warmup=0), Plan("single"), steps=2, devices=jax.devices()[:1]
    )
    initial = trainer.init(jax.random.key(0)).params
    up = initial["layers"]["mlp"]["up"]["kernel"]
    up = jnp.where(jnp.abs(up) > jnp.median(jnp.abs(up)), up, 0)
    params = {**initial, "layers": {**initial["layers"], "mlp": {**initial["layers"]["mlp"], "up": {"kernel": up}}}}
    state, _ = trainer.step(trainer.init(jax.random.key(0), params), BATCH, jax.random.key(1))
    updated = np.asarray(state.params["layers"]["mlp"]["up"]["kernel"])
    np.testing.assert_array_equal(updated != 0, up != 0)
    assert np.all(updated[up != 0] != np.asarray(up)[up != 0])


@functools.cache
def loss_of(model):
    """A compiled `weights -> loss` of evaluation."""
    return jax.jit(lambda w: model.apply(variables.collections(w), BATCH, method="loss").sum, compiler_options=ONCE)


# The definitions of all techniques are tested above; models train with one that rounds and one that prunes.
SLOW = ("soft_movement()", "weight_drop(0.2)")
TEXTS = ["quantized(8)", "movement(0.25)", *(pytest.param(text, marks=pytest.mark.slow) for text in SLOW)]


@pytest.mark.parametrize("text", TEXTS)
def test_models_learn_and_finish_as_plain_models(text):
    model, weights, losses = trained(text, Plan("single"))
    weights = jax.tree.map(jnp.asarray, weights)
    assert losses[-1] < losses[0]
    plain = jax.jit(model.finished)(weights)
    np.testing.assert_allclose(loss_of(model)(weights), loss_of(MODEL)(plain), rtol=1e-6)
    assert jax.tree.structure(plain) == jax.tree.structure(variables.axes_and_shapes(MODEL)[1])
    kernel = np.asarray(plain["layers"]["mlp"]["up"]["kernel"])
    if text == "movement(0.25)":
        np.testing.assert_allclose((kernel != 0).mean((1, 2)), 0.25, atol=0.03)
    if text.startswith("quantized"):
        assert len(np.unique(kernel[0, :, 0])) <= 16


@pytest.mark.slow
def test_factors_are_trained_and_found_again():
    _, weights, losses = trained("low_rank(0.5)", Plan("single"))
    model = with_weight_training(MODEL, "low_rank(0.5)", 100)
    plain = jax.jit(model.finished)(jax.tree.map(jnp.asarray, weights))
    assert losses[-1] < losses[0]
    assert all(jax.tree.leaves(is_matrix(weights["weights"])))  # weight decay acts on factors
    np.testing.assert_allclose(loss_of(model)(weights), loss_of(MODEL)(plain), rtol=1e-5)
    kernel = plain["layers"]["mlp"]["up"]["kernel"]
    rank = rank_for_share(kernel.shape[-2:], 0.5)
    assert (np.linalg.matrix_rank(kernel, tol=1e-5) == rank).all()
    started = with_own(plain, jax.eval_shape(lambda: weights))["weights"]["layers"]["mlp"]["up"]["kernel"]
    np.testing.assert_allclose(started["left"] @ started["right"], kernel, atol=1e-5)
    stored = [*compress(MODEL.config, plain, parse_recipe("factorize(parameters=0.5, by=weights)"))][-1][2]
    np.testing.assert_allclose(loss_of(MODEL)(dense_tree(stored)), loss_of(MODEL)(plain), rtol=1e-5)


PLANS = [
    ("shared", Plan("zero3")),
    ("movement(0.25)", Plan("zero3", tensor=2)),
    ("low_rank(0.5)", Plan("tensor", tensor=2, data=4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "plan"), PLANS, ids=["shared", "movement", "low_rank"])
def test_layouts_match_one_device(text, plan):
    np.testing.assert_allclose(trained(text, plan)[2], trained(text, Plan("single"))[2], rtol=2e-5)


def test_invalid_specs_raise():
    for text, message in (
        ("quantised(8)", "did you mean 'quantized'"),
        ("movement(0.1, 0.7, 0.2)", "begin < end"),
    ):
        raises(message, with_weight_training, MODEL, text, 10)


def test_plans_without_whole_matrices_raise():
    model = with_weight_training(MODEL, "masked", 10)
    assert isinstance(model, WeightTraining)
    raises("plan.zero=2 does not keep", lambda: make_trainer(model, OptimizerConfig(), Plan("zero2"), steps=1))
