"""The training step: equal results on all layouts and with accumulation, skipped nonfinite steps, and its errors."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpnlp.models.lm import LM, LMConfig
from hpnlp.nn import output
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.parallel.plan import Plan
from hpnlp.planner.memory import held_bytes
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.optimizers import loss_scale
from hpnlp.training.trainer import check_batch, make_trainer
from hpnlp.types import InputError, LossOut, WordStats
from tests.drawn import drawn_state
from tests.messages import raises
from tests.traces import TRACES

B, T = 8, 16
KEY = jax.random.key(7)
STEPS = 30  # of one device, after which the loss has fallen by 1.16 nats; other layouts are compared over 6 steps
MODEL = LMConfig(layers=2, dim=32, heads=2, mlp_dim=64, vocab=264, max_len=T, unroll=1)
# Clips at every step (the norm is 1.5 at first), with a constant rate, so that Adam's first moment shows the gradient.
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup=0, clip_norm=0.5, ema=0.9)
ACCUMULATED = {"accumulate": 4, "skip_nonfinite": False}
ONE = (Plan(), 1)
LAYOUTS = {"fsdp 4 x tensor 2": (Plan(fsdp=4, tensor=2), 8), "3d": (Plan("3d"), 8), "sequence 8": (Plan("sequence"), 8)}
SLOW_LAYOUTS = {
    "zero1 8": (Plan("zero1"), 8),
    "data 8": (Plan(), 8),
    "fsdp 8": (Plan("zero3"), 8),
    "zero2 8": (Plan("zero2"), 8),
    "data 2 x sequence 4": (Plan(sequence=4), 8),
    "data 4 x sequence 2, by heads": (Plan(sequence=2, exchange="heads"), 8),
    "data 2 x zero2 2 x tensor 2": (Plan(data=2, fsdp=2, zero=2, tensor=2), 8),
    "pipeline 2 x zero3 2 x tensor 2": (Plan("zero3", pipeline=2, tensor=2), 8),
    "sequence 2 x pipeline 2 x zero3 2": (Plan("zero3", pipeline=2, sequence=2), 8),
    "pipeline 2 x zero2 2 x tensor 2": (Plan("zero2", pipeline=2, tensor=2), 8),
}


def batch_of(seed):
    """A batch of words from a vocabulary of twelve. Row i has i tokens that are no targets; the last row has no targets."""
    draw = np.random.default_rng(seed)
    words = [np.random.default_rng(i).integers(97, 123, 4) for i in range(12)]
    tokens = np.concatenate([words[i] for i in draw.integers(0, 12, B * (T + 4) // 4)]).reshape(B, T + 4)
    weights = np.arange(T)[None] >= np.arange(B)[:, None]
    weights[-1] = False
    ids = tokens.astype(np.int32)
    return {
        "tokens": ids[:, :T],
        "labels": ids[:, 1 : T + 1],
        "segment_ids": np.ones((B, T), np.int32),
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "weights": weights.astype(np.float32),
    }


class Run:
    """A trainer with its state. The initial state is the same on every layout; `scale` is its loss scale, or None."""

    def __init__(self, trainer, model=MODEL, scale=None, make=None):
        self.trainer = trainer
        shardings = jax.tree.map(lambda leaf: leaf.sharding, trainer.state_shapes)
        self.state = jax.device_put(dataclasses.replace((make or initial_state)(model), scale=scale), shardings)

    def step(self, batch):
        put = jax.device_put(batch, self.trainer.batch_sharding)
        self.state, metrics = self.trainer.step(self.state, put, KEY)
        return {name: float(value) for name, value in metrics.items()}

    def heldout(self, batch):
        put = jax.device_put(batch, self.trainer.batch_sharding)
        return float(self.trainer.evaluate(self.state.params, put)["loss"][0])

    def gradients(self):
        """Clipped gradients of the first step, from Adam's first moment."""
        moments = jax.device_get(optax.tree.get(self.state.opt_state, "mu"))
        return jax.tree.map(lambda m: m / (1 - OPTIMIZER.b1), moments)


@functools.cache
def trainer_of(plan=ONE[0], devices=ONE[1], model=MODEL, **changes):
    optimizer = dataclasses.replace(OPTIMIZER, **changes)
    lm = LM(model, WordStats(np.arange(model.vocab, 0, -1)))
    return make_trainer(lm, optimizer, plan, devices=jax.devices()[:devices], steps=50)


@functools.cache
def initial_state(model=MODEL):
    return drawn_state(trainer_of(model=model, loss_scale=0.0).state_shapes)


@functools.cache
def initialised_state(model=MODEL):
    """The state of `Trainer.init`, whose values are more like those of trained models than drawn ones; slower to compile."""
    return jax.device_get(trainer_of(model=model, loss_scale=0.0).init(jax.random.key(0)))


PROGRAMS = {}  # (plan, devices) -> how often the step of a reference run was traced


@functools.cache
def reference_run(plan, devices):
    """`(losses of STEPS steps, or of 6 on several devices, first gradients, state)` of a layout."""
    run, before = Run(trainer_of(plan, devices)), TRACES["step"]
    losses = [run.step(batch_of(0))["loss"]]
    gradients = run.gradients()
    losses += [run.step(batch_of(seed))["loss"] for seed in range(1, STEPS if devices == 1 else 6)]
    PROGRAMS[plan, devices] = TRACES["step"] - before
    return np.array(losses), gradients, run.state


def assert_leaves_close(actual, expected, tolerance):
    """Compares each leaf's distance, relative to its norm."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), jax.tree_util.keystr(path)


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))


def host(tree):
    return [np.asarray(leaf).copy() for leaf in jax.tree.leaves(tree)]


# Layouts that are tested with reversible layers, or are parts of one of those.
COVERED = ("data 2 x sequence 4", "data 2 x zero2 2 x tensor 2", "pipeline 2 x zero2 2 x tensor 2")
FURTHER = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS if name not in COVERED]


@pytest.mark.parametrize("layout", [*LAYOUTS, *FURTHER])
def test_layouts_match_one_device(layout):
    losses, gradients, _ = reference_run(*(LAYOUTS | SLOW_LAYOUTS)[layout])
    expected, expected_gradients, _ = reference_run(*ONE)
    assert expected[0] - expected[-1] > 1.0
    np.testing.assert_allclose(losses, expected[:6], rtol=1e-5)
    assert_leaves_close(gradients, expected_gradients, 1e-5)


# Pipelines of two rounds and two stages, over four layers.
CIRCULAR = {
    "3d": Plan("3d"),
    "pipeline 2 x sequence 4": Plan("sequence", pipeline=2),
    "data 2 x pipeline 2 x sequence 2, by heads": Plan("data", pipeline=2, sequence=2, exchange="heads"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", CIRCULAR)
def test_rounds_match_one_device(layout):
    """Dropout follows the layer's index (there is none on a ring), and parameters keep their places in the stack."""
    ring = layout == "pipeline 2 x sequence 4"
    fields = {"layers": 4, "dropout": 0.0 if ring else 0.3, "norm": "layer"}
    model = dataclasses.replace(MODEL, **fields)
    plan = dataclasses.replace(CIRCULAR[layout], rounds=2)
    if layout == "3d":  # recomputation does not depend on what divides the other axes
        plan = dataclasses.replace(plan, recompute_stages=True, remat="full")
    single, parallel = (Run(trainer_of(*given, model), model) for given in (ONE, (plan, 8)))
    for seed in range(3):
        assert parallel.step(batch_of(seed)) == pytest.approx(single.step(batch_of(seed)), rel=1e-5)
        if seed == 0:
            assert_leaves_close(parallel.gradients(), single.gradients(), 1e-5)
    assert_leaves_close(host(parallel.state.params), host(single.state.params), 1e-5)
    assert parallel.heldout(batch_of(3)) == pytest.approx(single.heldout(batch_of(3)), rel=1e-5)


# Biases and grouped heads, which reversible layers have in the first tier.
BIASED = {"layers": 4, "heads": 4, "kv_heads": 2, "norm": "layer", "position": "learned", "tied": False}
BIASED |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
# Rounds have dropout on further layouts.
DROPOUT_CASES = [("fsdp 4 x tensor 2", "full"), ("pipeline 2 x zero3 2 x tensor 2", "window(5,0),full")]


def without_bias_of_keys(gradients):
    """A bias of keys shifts all scores of a query equally: its gradient is 0 up to rounding."""
    gradients["layers"]["attention"]["k"].pop("bias", None)
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "mixer"), DROPOUT_CASES)
def test_layouts_have_the_same_dropout(layout, mixer):
    model = dataclasses.replace(MODEL, **BIASED, dropout=0.3, mixer=mixer)
    single, parallel = (Run(trainer_of(*layout, model), model) for layout in (ONE, (LAYOUTS | SLOW_LAYOUTS)[layout]))
    for seed in range(3):
        expected, actual = single.step(batch_of(seed)), parallel.step(batch_of(seed))
        assert actual == pytest.approx(expected, rel=1e-5)
        if seed == 0:
            assert_leaves_close(*(without_bias_of_keys(run.gradients()) for run in (parallel, single)), 1e-5)


REGATHERED = ("pipeline 2 x zero3 2 x tensor 2", "sequence 2 x pipeline 2 x zero3 2")


class Doubled(ExactMixer):
    """Overrides `__call__` alone, which a ring does not call."""

    def __call__(self, inputs, mask):
        output = super().__call__(inputs, mask)
        return dataclasses.replace(output, o=2 * output.o)


def test_ring_raises_on_mixers_with_an_overridden_call(monkeypatch):
    monkeypatch.setitem(MIXERS, "doubled", Doubled)
    model = LM(LMConfig(vocab=16, dim=16, heads=2, layers=1, mixer="doubled"))
    with pytest.raises(InputError, match="Doubled takes `partial` from ExactMixer and `__call__` from Doubled"):
        make_trainer(model, OptimizerConfig(), Plan("sequence", exchange="ring"), steps=1)


def test_reversible_pipeline_that_gathers_parameters_again_raises():
    model = dataclasses.replace(MODEL, layers=4, residual="reversible")
    for plan in (*(SLOW_LAYOUTS[name] for name in REGATHERED), (Plan("3d", rounds=2), 8)):
        raises("are not reversible: set plan.zero=2 and plan.rounds=1, or model.residual='p", trainer_of, *plan, model)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("3d", marks=pytest.mark.slow),
        pytest.param("fsdp 4 x tensor 2", marks=pytest.mark.slow),
        pytest.param("zero2 8", marks=pytest.mark.slow),
        pytest.param("data 2 x sequence 4", marks=pytest.mark.slow),
        pytest.param("data 4 x sequence 2, by heads", marks=pytest.mark.slow),
        pytest.param("pipeline 2 x zero2 2 x tensor 2", marks=pytest.mark.slow),
    ],
)
def test_layouts_match_one_device_with_reversible_layers(layout):
    """With dropout, except on rings. Pipelines pass both streams on."""
    plan, devices = (LAYOUTS | SLOW_LAYOUTS)[layout]
    ringed = "sequence" in layout and plan.exchange == "ring"
    model = dataclasses.replace(MODEL, **BIASED, residual="reversible", dropout=0.0 if ringed else 0.3)
    single, parallel = (Run(trainer_of(*where, model), model) for where in (ONE, (plan, devices)))
    for seed in range(2):
        expected, actual = single.step(batch_of(seed)), parallel.step(batch_of(seed))
        assert actual == pytest.approx(expected, rel=1e-5)
        if seed == 0:
            assert_leaves_close(*(without_bias_of_keys(run.gradients()) for run in (parallel, single)), 1e-5)
    if layout != "3d":
        assert parallel.heldout(batch_of(2)) == pytest.approx(single.heldout(batch_of(2)), rel=1e-5)


def test_averaged_parameters_are_evaluated():
    """Averages are sharded like statistics, and resharded like parameters for evaluation."""
    scores = []
    for run in (Run(trainer_of()), Run(trainer_of(*LAYOUTS["fsdp 4 x tensor 2"]))):
        run.step(batch_of(0))
        scores.append(run.trainer.evaluate(run.state.best_params, put(run, batch_of(1)))["loss"][0])
    assert float(scores[1]) == pytest.approx(float(scores[0]), rel=1e-5)


def put(run, batch):
    return jax.device_put(batch, run.trainer.batch_sharding)


def test_unsupported_layouts_raise():
    for plan, fields, message in (
        (Plan(pipeline=2), {"mixer": "window(3,0),full"}, "periods of model.mixer=1 does not divide into"),
        (Plan(pipeline=2), {"mixer": "window(3,0)*2,full", "layers": 4}, "periods of model.mixer=1 does not divide"),
        (Plan(sequence=2), {"dropout": 0.1}, "model.dropout=0.1 is not dropped in attention on a ring: choose"),
        (Plan(sequence=2), {"mixer": "strided(4,heads=2)"}, "heads with masks of their own"),
        (Plan(tensor=2), {"mixer": "strided(4,heads=2)"}, "set plan.tensor=1 and plan.sequence=1, or choose a mixer"),
        (Plan(sequence=4, exchange="heads"), {}, "plan.exchange=heads deals model.heads=2 out over plan.sequence=4"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            trainer_of(plan, 8, dataclasses.replace(MODEL, **fields))


@pytest.mark.slow
def test_stages_hold_full_periods_of_mixers():
    model = dataclasses.replace(MODEL, layers=8, mixer="window(3,0),full")
    single, parallel = (Run(trainer_of(*layout, model), model) for layout in (ONE, (Plan(pipeline=4), 8)))
    assert parallel.step(batch_of(0)) == pytest.approx(single.step(batch_of(0)), rel=1e-5)
    assert_leaves_close(parallel.gradients(), single.gradients(), 1e-5)
    assert parallel.trainer.flops(B, T) == single.trainer.flops(B, T)


@pytest.mark.slow
def test_per_token_samples_match_on_a_ring():
    """Samples follow the token's place in the row, not its place on a device; learned positions need not divide."""
    model = dataclasses.replace(MODEL, output="nce(16,per_token=True)", tied=False, position="learned", max_len=T + 3)
    single, parallel = (Run(trainer_of(*layout, model), model) for layout in (ONE, (Plan(sequence=4), 8)))
    assert parallel.step(batch_of(0)) == pytest.approx(single.step(batch_of(0)), rel=1e-5)
    assert_leaves_close(parallel.gradients(), single.gradients(), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["sampled(16)", "adaptive((100,110),2)", "class", "hierarchical"])
def test_output_layers_match_one_device(output):
    """Random samples are the same, too, whatever the sharding of tokens and rows."""
    model = dataclasses.replace(MODEL, output=output, tied=False)
    single, parallel = (Run(trainer_of(*layout, model), model) for layout in (ONE, LAYOUTS["fsdp 4 x tensor 2"]))
    for seed in range(3):
        expected, actual = single.step(batch_of(seed)), parallel.step(batch_of(seed))
        assert actual == pytest.approx(expected, rel=1e-5)
        if seed == 0:
            assert_leaves_close(parallel.gradients(), single.gradients(), 1e-5)
            assert all(np.any(leaf) for leaf in jax.tree.leaves(single.gradients()))
    assert parallel.heldout(batch_of(3)) == pytest.approx(single.heldout(batch_of(3)), rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "params_share", "statistics_share"),
    [
        pytest.param("data 8", 1.0, 1.0, marks=pytest.mark.slow),
        pytest.param("zero1 8", 1.0, 1 / 7, marks=pytest.mark.slow),
        pytest.param("fsdp 8", 1 / 7, 1 / 7, marks=pytest.mark.slow),
        ("fsdp 4 x tensor 2", 1 / 7, 1 / 7),
        ("3d", 1 / 3.5, 1 / 3.5),
    ],
)
def test_state_is_sharded(layout, params_share, statistics_share):
    plan, devices = (LAYOUTS | SLOW_LAYOUTS)[layout]
    state = reference_run(plan, devices)[2]
    shards = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)]
    assert sum(shards) == held_bytes(trainer_of(plan, devices).state_shapes)
    for part, share in (
        (state.params, params_share),
        (state.opt_state, statistics_share),
        (state.ema, statistics_share),
    ):
        leaves = [leaf for leaf in jax.tree.leaves(part) if leaf.ndim]
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        assert held <= share * sum(leaf.nbytes for leaf in leaves)


def test_initial_parameters_match_one_device():
    states = (trainer_of(*where).init(jax.random.key(0)) for where in (LAYOUTS["fsdp 4 x tensor 2"], ONE))
    for actual, expected in zip(*map(host, states), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


def test_steps_are_traced_once():
    for layout in (ONE, *LAYOUTS.values()):
        reference_run(*layout)
        assert PROGRAMS[layout] <= 1  # 0 if another test traced it before


def test_accumulation_changes_nothing():
    full, accumulated = Run(trainer_of()), Run(trainer_of(**ACCUMULATED))
    for seed in range(3):
        batch = batch_of(seed)
        expected, actual = full.step(batch), accumulated.step(batch)
        assert actual == pytest.approx(expected, rel=1e-5)
        if seed == 0:
            assert_leaves_close(accumulated.gradients(), full.gradients(), 1e-5)
    assert_leaves_close(host(accumulated.state.params), host(full.state.params), 1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_nonfinite_step_changes_nothing(poison):
    run, batch = Run(trainer_of()), batch_of(0)
    run.step(batch)
    before = host((run.state.params, run.state.opt_state, run.state.ema))
    metrics = run.step({**batch, "weights": np.where(batch["weights"], np.float32(poison), 0)})
    assert metrics["skipped"] == 1.0 and not np.isfinite(metrics["grad_norm"])
    for old, new in zip(before, host((run.state.params, run.state.opt_state, run.state.ema)), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(run.state.step) == 2
    assert run.step(batch)["skipped"] == 0.0


def test_nonfinite_step_is_applied_without_skip_nonfinite():
    run = Run(trainer_of(**ACCUMULATED))
    metrics = run.step({**batch_of(0), "weights": np.full((B, T), np.nan, np.float32)})
    assert metrics["skipped"] == 1.0  # which stops the run
    assert any(np.isnan(leaf).any() for leaf in host(run.state.params))


def test_average_follows_its_decay():
    run = Run(trainer_of())
    average = host(run.state.params)
    for step in range(3):
        run.step(batch_of(step))
        decay = min(OPTIMIZER.ema, (1 + step) / (10 + step))
        average = [decay * old + (1 - decay) * new for old, new in zip(average, host(run.state.params), strict=True)]
    assert run.state.best_params is run.state.ema
    for actual, expected in zip(host(run.state.ema), average, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


def test_loss_does_not_depend_on_the_scale_of_the_weights():
    """The loss and its gradient are means."""
    batch = batch_of(0)
    full, small = Run(trainer_of()), Run(trainer_of())
    expected, actual = full.step(batch), small.step({**batch, "weights": batch["weights"] * np.float32(1e-3)})
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_logged_learning_rate_is_the_applied_one():
    """A skipped step does not advance the schedule."""
    run, batch = Run(trainer_of(schedule="linear", warmup=8)), batch_of(0)
    bad = {**batch, "weights": np.full((B, T), np.nan, np.float32)}
    rates = [run.step(b)["learning_rate"] for b in (bad, bad, batch, batch)]
    assert rates == pytest.approx([1e-3 / 8, 1e-3 / 8, 1e-3 / 8, 2e-3 / 8], rel=1e-5)


def test_dropout_differs_between_steps_and_is_off_in_evaluation():
    model = dataclasses.replace(MODEL, dropout=0.3)
    frozen = {"learning_rate": 0.0, "weight_decay": 0.0}
    run, batch = Run(trainer_of(model=model, **frozen)), batch_of(0)
    losses = [run.step(batch)["loss"] for _ in range(2)]
    without = reference_run(*ONE)[0][0]
    assert losses[0] != losses[1] and min(abs(loss - without) for loss in losses) > 1e-4
    total, weight = run.trainer.evaluate(run.state.params, put(run, batch))["loss"]
    assert float(total / weight) == pytest.approx(without, rel=1e-6)
    again = Run(trainer_of(model=model, **frozen))
    assert [again.step(batch)["loss"] for _ in range(2)] == losses


def test_batch_without_a_target_token_only_decays_weights():
    run, batch = Run(trainer_of()), batch_of(0)
    before = host(run.state.params)
    metrics = run.step({**batch, "weights": np.zeros((B, T), np.float32)})
    assert metrics["loss"] == metrics["grad_norm"] == metrics["target_tokens"] == metrics["skipped"] == 0.0
    # Only weight decay changes the parameters.
    factor = 1 - OPTIMIZER.learning_rate * OPTIMIZER.weight_decay
    for old, new in zip(before, host(run.state.params), strict=True):
        assert np.allclose(new, old, rtol=1e-6) or np.allclose(new, factor * old, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains(dtype):
    run = Run(trainer_of(model=dataclasses.replace(MODEL, dtype=dtype)), scale=loss_scale.initial(None, dtype))
    losses = np.array([run.step(batch_of(seed))["loss"] for seed in range(STEPS)])
    assert {leaf.dtype for leaf in jax.tree.leaves(run.state.params)} == {jnp.dtype("float32")}
    expected = reference_run(*ONE)[0]
    assert expected[0] - expected[-1] > 0.5
    np.testing.assert_allclose(losses, expected, rtol=0.01)
    assert abs(losses - expected).max() > 1e-6  # it does compute in lower precision


class Decaying(output.OUTPUTS["full"]):
    """The full softmax, with an auxiliary loss (half the squared norm of its table) and a statistic."""

    def loss(self, table, h, labels, weights, rng):
        out = super().loss(table, h, labels, weights, rng)
        square = jnp.sum(table.astype(jnp.float32) ** 2)
        mean = (square, jnp.float32(2))
        return LossOut(out.sum, out.weight, {"decay_loss": mean, "square": mean})


@pytest.fixture(scope="module")
def with_decay():
    """`(metrics, gradients, table)` of a first step without clipping, with 0.5 times the decay loss."""
    model = dataclasses.replace(MODEL, output="decaying")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(output.OUTPUTS, "decaying", Decaying)
        run = Run(trainer_of(model=model, aux="decay_loss(0.5)", clip_norm=1e6))
        table = np.asarray(run.state.params["embed"]["table"]).copy()
        return run.step(batch_of(0)), run.gradients(), table


def test_auxiliary_loss_is_scaled_and_logged_separately(with_decay):
    metrics, gradients, table = with_decay
    assert metrics["loss"] == pytest.approx(reference_run(*ONE)[0][0], rel=1e-6)
    assert metrics["decay_loss"] == metrics["square"] == pytest.approx(float(np.sum(table**2)) / 2, rel=1e-5)
    gradients = gradients | {"embed": {"table": gradients["embed"]["table"] - 0.5 * table}}
    scale = OPTIMIZER.clip_norm / norm(gradients)
    assert_leaves_close(jax.tree.map(lambda g: g * scale, gradients), reference_run(*ONE)[1], 1e-5)


def test_logged_norm_is_that_before_clipping(with_decay):
    metrics, gradients, _ = with_decay
    assert metrics["grad_norm"] == pytest.approx(norm(gradients), rel=1e-5)
    run = Run(trainer_of())
    assert run.step(batch_of(0))["grad_norm"] > 2 * OPTIMIZER.clip_norm
    assert norm(run.gradients()) == pytest.approx(OPTIMIZER.clip_norm, rel=1e-5)


def test_batch_that_does_not_divide_raises():
    layout = Plan(data=4, fsdp=2).layout({})
    check_batch(layout, 32, 8, 2)
    raises(r"data.batch_size=24 does not split .* make it a multiple of 16", check_batch, layout, 24, 8, 2)


def test_flops_of_long_sequences_count_visible_blocks():
    """Block-sparse causal attention computes little more than half of the pairs."""
    trainer, length = trainer_of(model=dataclasses.replace(MODEL, max_len=3072)), 3072
    products = MODEL.non_embedding_parameters() + MODEL.vocab * MODEL.dim
    pairs = length**2 * MODEL.layers * MODEL.dim
    # Two products forward, five backward, of 2 operations a pair and feature; blocks of 512 in 3072 add a sixth.
    attention = 7 * 2 * pairs / 2
    assert attention <= trainer.flops(1, length) - 6 * products * length <= 1.2 * attention


def test_flops_match_the_formula():
    trainer = trainer_of()
    # Products with parameters, forward and backward: 6 operations per weight and token; attention adds 3 times 2 products.
    products = MODEL.non_embedding_parameters() + MODEL.vocab * MODEL.dim
    least = 6 * products * B * T
    assert least <= trainer.flops(B, T) <= 1.2 * least
