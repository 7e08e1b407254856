"""Statistics of layers, and auxiliary losses and buffers made from them, are the same numbers on every layout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.variables import collections
from hpnlp.nn.feed_forward import FEED_FORWARDS
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.ops.attention import Full
from hpnlp.parallel.plan import Plan
from hpnlp.planner.memory import memory_estimate
from hpnlp.spec import build, parse_one
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError, WithCarry
from tests.centered_columns import centered_columns
from tests.centered_keys import CenteredKeys, centered_keys, summed_keys
from tests.contracts import MIXER_SPECS, ONCE, TOLERANCE, one_of_each_kind
from tests.messages import raises

B, T, STEPS = 16, 8, 3
ONE = Plan()
SIZES = {"layers": 4, "dim": 16, "heads": 4, "kv_heads": 2, "mlp_dim": 32, "vocab": 24, "max_len": T, "unroll": 1}
MODEL = {"mixer": "centered,full", "mlp": "columns", **SIZES}
AUX = {"keys_loss": 3.0, "hidden_loss": 0.2, "columns_loss": 2.0}
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-3, schedule="constant", warmup=0, aux=", ".join(f"{name}({value})" for name, value in AUX.items())
)
SUMMED = (("mixer", "summed,full"), ("kv_heads", 4))
LAYOUTS = {
    "zero3 x tensor, accumulated": (Plan("zero3", tensor=2), 4, {"accumulate": 2}),
    "recomputed": (Plan(remat="full"), 1, {}),
    "zero2 x tensor x pipeline": (Plan("zero2", pipeline=2, tensor=2, microbatches=2), 8, {}),
    "ring x tensor, accumulated": (Plan("zero3", sequence=2, tensor=2), 8, {"accumulate": 2}),
    "heads x tensor": (Plan(sequence=2, tensor=2, exchange="heads"), 4, {}, SUMMED),
    "offloaded": (Plan(remat="full", offload_parameters=True), 1, {}, (("mixer", "centered"),)),
    "rounds": (Plan("zero3", pipeline=2, rounds=2, microbatches=2), 4, {}, (("mixer", "centered"),)),
    "reversible": (Plan(pipeline=2, microbatches=2), 4, {"accumulate": 2}, (("residual", "reversible"),)),
}


@pytest.fixture(scope="module", autouse=True)
def mixers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MIXERS, "centered", centered_keys)
        patch.setitem(MIXERS, "summed", summed_keys)
        patch.setitem(FEED_FORWARDS, "columns", centered_columns)
        yield


def batch_of(seed):
    """Sequences of different lengths; padding has weight 0."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, SIZES["vocab"], (B, T + 1)).astype(np.int32)
    real = np.arange(T)[None] < draw.integers(T // 2, T + 1, (B, 1))
    batch = {
        "tokens": tokens[:, :T],
        "labels": tokens[:, 1:],
        "segment_ids": real.astype(np.int32),
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "weights": real.astype(np.float32),
    }
    return jax.tree.map(jnp.asarray, batch)


def model_of(**fields):
    return LM(LMConfig(**MODEL | fields))


@functools.cache
def trainer_of(plan=Plan(), devices=1, fields=(), **changes):  # noqa: B008  (frozen)
    config = dataclasses.replace(OPTIMIZER, **changes)
    return make_trainer(model_of(**dict(fields)), config, plan, devices=jax.devices()[:devices], steps=STEPS)


@functools.cache
def initial_state(fields=(), aux=OPTIMIZER.aux):
    return jax.device_get(trainer_of(fields=fields, aux=aux).init(jax.random.key(0)))


@functools.cache
def run(plan=Plan(), devices=1, fields=(), **changes):  # noqa: B008  (frozen)
    """`(metrics of each step, first gradients, last state)`. fields: changes of the model, as pairs."""
    trainer = trainer_of(plan, devices, fields, **changes)
    initial = initial_state(fields, changes.get("aux", OPTIMIZER.aux))
    state = jax.device_put(initial, jax.tree.map(lambda leaf: leaf.sharding, trainer.state_shapes))
    metrics, gradients = [], None
    for seed in range(STEPS):
        batch = jax.device_put(batch_of(seed), trainer.batch_sharding)
        state, values = trainer.step(state, batch, jax.random.key(1))
        metrics.append({name: float(value) for name, value in values.items()})
        if gradients is None:
            gradients = jax.device_get(optax.tree.get(state.opt_state, "mu"))
    return metrics, gradients, jax.device_get(state)


def assert_runs_equal(actual, expected, of_gradients=1e-6):
    for values, references in zip(actual[0], expected[0], strict=True):
        assert values.keys() == references.keys()
        for name in [name for name in values if name.endswith("loss")]:
            assert values[name] == pytest.approx(references[name], rel=1e-6), name
    for buffers, references in zip(
        *(jax.tree.leaves(results[2].buffers) for results in (actual, expected)), strict=True
    ):
        assert np.linalg.norm(buffers - references) <= 1e-6 * np.linalg.norm(references)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual[1]), jax.tree.leaves(expected[1]), strict=True):
        assert np.linalg.norm(a - b) <= of_gradients * np.linalg.norm(b), path


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_auxiliary_losses_gradients_and_buffers_do_not_depend_on_the_layout(layout):
    plan, devices, changes, *fields = LAYOUTS[layout]
    assert_runs_equal(run(plan, devices, *fields, **changes), run(ONE, 1, *fields))


def has_state_of_its_own(spec):
    mixer = build(parse_one(spec, "mixer"), MIXERS, "mixer", dropout=0.0, name=None)
    return mixer.has_state and not isinstance(mixer, WithCarry)  # see test_carry.py


@pytest.mark.slow
def test_mixers_with_statistics_have_equal_states_on_one_and_four_devices():
    """Contract of every class of mixers that have statistics or buffers, each in one layer.

    Gradients of entries are compared as two forms of one result are: with these sizes, those of plain softmax attention differ
    by 1e-6, too.
    """
    specs = [spec for spec in one_of_each_kind(MIXER_SPECS) if has_state_of_its_own(spec)]
    fields = (("mixer", ",".join(specs)), ("layers", len(specs)), ("mlp", "swiglu"))
    plan, devices, accumulation = LAYOUTS["zero3 x tensor, accumulated"]
    several, one = run(plan, devices, fields, **accumulation, aux=""), run(ONE, 1, fields, aux="")
    assert len(specs) == len(one[2].buffers["layers"]) > 1
    assert_runs_equal(several, one, TOLERANCE[jnp.dtype("float32")])


@pytest.mark.slow
def test_factors_scale_the_gradients_of_auxiliary_losses():
    """The gradients are those of the mean loss plus the losses times their factors, by plain differentiation."""
    model, weights = model_of(), initial_state().best_params
    batch = batch_of(0)

    def objective(params):
        out = model.apply({"params": params, "buffers": weights["buffers"]}, batch, method="loss")
        losses = model.auxiliary_loss(out.statistics)
        return out.sum / out.weight + sum(AUX[name] * losses[name] for name in AUX), (out, losses)

    program = jax.jit(jax.grad(objective, has_aux=True), compiler_options=ONCE)
    grads, (out, losses) = jax.device_get(program(initial_state().params))
    metrics, gradients, _ = run()
    statistics = out.statistics["layers"]
    assert {stack: set(branches) for stack, branches in statistics.items()} == {
        "0_centered": {"attention", "mlp"},
        "1_full": {"mlp"},
    }
    assert statistics["0_centered"]["attention"]["keys"].shape == (2, 2, 4)
    assert statistics["1_full"]["mlp"]["columns"].shape == (2, 32)
    for branch in ("attention", "mlp"):
        np.testing.assert_array_equal(statistics["0_centered"][branch]["tokens"], batch["segment_ids"].sum())
    mean_columns = [stack["mlp"]["columns"] / stack["mlp"]["tokens"][:, None] for stack in statistics.values()]
    assert losses["columns_loss"] == pytest.approx(float(np.mean(np.square(mean_columns))), rel=1e-6)
    assert metrics_of_layers(out) == pytest.approx(run()[0][0]["input_square"], rel=1e-6)
    assert metrics[0]["loss"] == pytest.approx(float(out.sum / out.weight), rel=1e-6)
    for name, value in losses.items():
        assert metrics[0][name] == pytest.approx(float(value), rel=1e-6)
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(grads)))
    scale = min(1.0, OPTIMIZER.clip_norm / norm) * (1 - OPTIMIZER.b1)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(grads), strict=True):
        assert np.linalg.norm(a - scale * b) <= 2e-6 * np.linalg.norm(scale * b)


def metrics_of_layers(out):
    total, weight = out.aux["input_square"]
    return float(total / weight)


@pytest.mark.slow
def test_evaluation_reports_auxiliary_losses():
    trainer, state = trainer_of(), initial_state()
    values = trainer.evaluate(state.best_params, jax.device_put(batch_of(0), trainer.batch_sharding))
    for name in (*AUX, "input_square"):
        assert float(values[name][0] / values[name][1]) == pytest.approx(run()[0][0][name], rel=1e-6)


class PenalisedAttention(ExactMixer):
    """Attention with a loss of its own, which is not a function of statistics."""

    def __call__(self, inputs, mask):
        one = jnp.ones((), jnp.float32)
        return dataclasses.replace(super().__call__(inputs, mask), aux={"penalty_loss": (one, one)})

    def partial(self, inputs, mask):
        return super().partial(inputs, mask)


def test_losses_that_a_ring_would_drop_raise(monkeypatch):
    monkeypatch.setitem(MIXERS, "penalised", lambda **extra: PenalisedAttention(Full(), **extra))
    fields = (("mixer", "full,penalised"), ("mlp", "swiglu"))
    raises("PenalisedAttention returns penalty_loss", lambda: trainer_of(Plan(sequence=2), 2, fields, aux=""))
    trainer_of(Plan(sequence=2, exchange="heads"), 2, fields, aux="penalty_loss(2)")


def test_invalid_statistics_raise(monkeypatch):
    raises(r"weights z_loss, .* \(the model has columns_loss, hidden_loss, keys_loss\)", trainer_of, aux="z_loss(1)")
    with monkeypatch.context() as patch:
        patch.delattr(CenteredKeys, "prepare")
        raises("CenteredKeys has no `prepare`", lambda: trainer_of(Plan(sequence=2), 2, learning_rate=0.125))
    raises(r"plan.exchange=heads .* model.mixer has", lambda: trainer_of(Plan(sequence=2, exchange="heads"), 2))
    params = initial_state().best_params
    with monkeypatch.context() as patch:
        patch.setattr(CenteredKeys, "auxiliary_loss", lambda _, statistics: {"loss": statistics["tokens"]})
        trainer = trainer_of(learning_rate=0.25, aux="")
        raises("auxiliary_loss returns loss, the name of a metric", lambda: trainer.evaluate(params, batch_of(0)))
    with monkeypatch.context() as patch:
        patch.setattr(CenteredKeys, "advance", lambda _, buffers, *rest: {"average": buffers["average"][0]})
        raises(r"advance of .*'average'\] float32\[2, 4\] from float32\[2, 2, 4\]", trainer_of, learning_rate=0.5)
    monkeypatch.setattr(CenteredKeys, "statistic_axes", {"keys": (None,)})
    with pytest.raises(InputError, match="CenteredKeys returns the statistics hidden, tokens without their axes"):
        jax.eval_shape(lambda *operands: model_of().apply(*operands, method="loss"), collections(params), batch_of(0))


def test_buffers_are_the_average_of_the_keys_and_have_no_gradient():
    """Three steps against the recursion in numpy, from the keys' sums that the loss reports on the first batch."""
    trainer, states = trainer_of(skip_nonfinite=True), [initial_state()]
    for seed in range(2):
        batch = jax.device_put(batch_of(seed), trainer.batch_sharding)
        states.append(jax.device_get(trainer.step(jax.device_put(states[-1]), batch, jax.random.key(1))[0]))
    average = 0.0
    apply = jax.jit(lambda weights, batch: model_of().apply(collections(weights), batch, method="loss"))
    for seed, state in enumerate(states[:2]):
        statistics = apply(state.best_params, batch_of(seed)).statistics["layers"]["0_centered"]["attention"]
        average = 0.9 * average + 0.1 * np.asarray(statistics["keys"]) / statistics["tokens"][:, None, None]
    buffers = states[2].buffers["layers"]["0_centered"]["attention"]["mixer"]
    np.testing.assert_allclose(buffers["average"], average, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(buffers["updates"], [2.0, 2.0])
    assert states[0].buffers["layers"]["1_full"].keys() == {"mlp"}
    assert jax.tree.structure(optax.tree.get(states[2].opt_state, "mu")) == jax.tree.structure(states[2].params)

    broken = jax.tree.map(np.array, states[2])
    broken.params["embed"]["table"][:] = np.nan
    skipped = jax.device_get(trainer.step(jax.device_put(broken), batch, jax.random.key(1)))
    assert skipped[1]["skipped"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, skipped[0].buffers, states[2].buffers)


def test_initial_buffers_are_drawn_where_weights_have_none():
    trainer, state = trainer_of(), initial_state()
    for weights in (state.params, state.best_params):
        jax.tree.map(np.testing.assert_array_equal, trainer.init(jax.random.key(5), weights).buffers, state.buffers)


def test_planner_counts_buffers():
    one, several = (
        trainer_of(*LAYOUTS[name][:2]) if name else trainer_of() for name in ("", "zero3 x tensor, accumulated")
    )
    memory = [memory_estimate(trainer, 0, B, T)["buffers"] for trainer in (one, several)]
    # Layers x bytes x numbers: averages of heads and the counter, and averages of columns.
    assert memory[0] == 2 * 4 * (2 * 4 + 1) + 4 * 4 * 32
    assert memory[1] < memory[0]


def test_models_without_statistics_have_none():
    model = model_of(mixer="full", mlp="swiglu")
    assert model.auxiliary_loss({}) == {}

    def loss():
        out = model.init_with_output(jax.random.key(0), batch_of(0))[0]
        return out.sum, out.statistics

    total, statistics = jax.eval_shape(loss)
    assert statistics == {} and total.dtype == jnp.float32
    trainer = make_trainer(model, OptimizerConfig(), Plan(), devices=jax.devices()[:1], steps=1)
    assert trainer.state_shapes.buffers is None and trainer.state_shapes.best_params is trainer.state_shapes.params
