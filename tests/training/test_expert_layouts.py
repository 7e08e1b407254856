"""Mixtures of experts on every layout: losses, metrics, gradients and buffers are those of one device."""

import functools

import jax
import numpy as np
import optax
import pytest

from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.lm import LM, LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer

B, T, STEPS = 8, 16, 20
SIZES = {"layers": 2, "dim": 16, "heads": 2, "mlp_dim": 16, "vocab": 24, "max_len": T, "unroll": 1}
ROUTERS = {
    **{f"{name}(8)": LMConfig for name in ("top_k", "switch", "gshard", "st_moe", "noisy_top_k", "hash")},
    "bias_balanced(8,2,shared=1,shared_gate=True)": LMConfig,
    "top_k(8,3,gates=sigmoid,capacity=1.0)": LMConfig,
    "expert_choice(8)": EncoderConfig,
    "base(8)": EncoderConfig,
}
DRAWING = ("switch(8)", "gshard(8)", "st_moe(8)", "noisy_top_k(8)")
BIASED = "bias_balanced(8,2,shared=1,shared_gate=True)"
# Plan, devices, and changes of the model's and of the optimizer's fields.
LAYOUTS = {
    "expert 4 x data 2": (Plan("expert", expert=4, data=2), 8, {}, {}),
    "zero3 2 x expert 2 x tensor 2": (Plan("zero3", expert=2, tensor=2), 8, {}, {}),
    "pipeline 2 x expert 2 x zero2 2": (Plan("zero2", expert=2, pipeline=2, remat="full"), 8, {}, {}),
    "expert 2, two parts": (Plan("expert"), 2, {}, {"accumulate": 2}),
}
FURTHER = {
    "data 8": (Plan(), 8, {}, {}),
    "zero3 8": (Plan("zero3"), 8, {}, {}),
    "tensor 2 x data 4": (Plan(tensor=2), 8, {}, {}),
    "expert 8": (Plan("expert"), 8, {}, {}),
    "zero1 2 x expert 4, muon": (Plan("zero1", expert=4), 8, {}, {"name": "muon"}),
    "pipeline 2 x expert 4, two rounds": (Plan("expert", pipeline=2, rounds=2), 8, {"layers": 4}, {}),
    "sequence 2 x expert 4": (Plan("expert", sequence=2), 8, {}, {}),
    "expert 4, dense layers between": (Plan("expert"), 4, {"layers": 4, "form": "block(mlp=gelu),block"}, {}),
    "expert 2, parameters on the host": (Plan("expert", offload_parameters=True), 2, {}, {}),
}
FIRST = (BIASED, "zero3 2 x expert 2 x tensor 2")
# Each router on one layout; those that keep buffers, draw numbers, or choose among all tokens, on each of LAYOUTS.
ON_ALL = (BIASED, "noisy_top_k(8)", "expert_choice(8)")
CASES = [
    FIRST,
    *(
        pytest.param(router, layout, marks=pytest.mark.slow)
        for router in ROUTERS
        for layout in (LAYOUTS if router in ON_ALL else ["expert 4 x data 2"])
        if (router, layout) != FIRST
    ),
    *(pytest.param(BIASED, layout, marks=pytest.mark.slow) for layout in FURTHER),
]


def batch_of(seed, causal):
    """Sequences of two documents and padding, or of one text and padding with a label; the last one of padding only."""
    draw = np.random.default_rng(seed)
    segments = np.sort(draw.integers(0, 3, (B, T)), axis=1)[:, ::-1].astype(np.int32)
    segments[-1] = 0
    segments = segments if causal else np.minimum(segments, 1)
    starts = np.array([[np.argmax(row == number) for number in row] for row in segments])
    tokens = draw.integers(0, 24, (B, T + 1)).astype(np.int32)
    return {
        "tokens": tokens[:, :T],
        "labels": tokens[:, 1:] if causal else tokens[:, 0] // 2,
        "segment_ids": segments,
        "positions": (np.arange(T) - starts).astype(np.int32),
        "weights": ((segments if causal else segments[:, 0]) > 0).astype(np.float32),
    }


@functools.cache
def run(router, plan, devices, fields=(), options=(), steps=STEPS):
    """`(metrics of each step, first gradients, buffers)`."""
    kind = ROUTERS[router]
    head = {"pooling": "mean", "classes": 12} if kind is EncoderConfig else {}
    model = {LMConfig: LM, EncoderConfig: Encoder}[kind](kind(**SIZES | head | {"mlp": router} | dict(fields)))
    options = {"learning_rate": 3e-3, "schedule": "constant", "warmup": 0, **dict(options)}
    trainer = make_trainer(model, OptimizerConfig(**options), plan, steps=steps, devices=jax.devices()[:devices])
    state, metrics, gradients = trainer.init(jax.random.key(0)), [], None
    for seed in range(steps):
        batch = jax.device_put(batch_of(seed, kind is LMConfig), trainer.batch_sharding)
        state, values = trainer.step(state, batch, jax.random.key(7))
        metrics.append({name: float(value) for name, value in values.items()})
        if gradients is None:
            moments = optax.tree.get_all_with_path(state.opt_state, "mu")  # muon has those of Adam as well
            gradients = jax.device_get([moment for _, moment in moments])
    return metrics, gradients, jax.device_get(state.buffers)


def is_routed_alike(values, references):
    """Whether experts have equal loads in two runs."""
    return all(values[n] == pytest.approx(references[n], rel=1e-6) for n in values if n.startswith("load_"))


@pytest.mark.parametrize(("router", "layout"), CASES)
def test_layouts_match_one_device(router, layout):
    plan, devices, fields, options = (LAYOUTS | FURTHER)[layout]
    fields, options = tuple(fields.items()), tuple(options.items())
    metrics, gradients, buffers = run(router, plan, devices, fields, options)
    if router not in DRAWING:  # the reference computes the batch in one part; each part draws other random numbers
        options = tuple((name, value) for name, value in options if name != "accumulate")
    expected, expected_gradients, expected_buffers = run(router, Plan("single"), 1, fields, options)
    for step, (values, references) in enumerate(zip(metrics, expected, strict=True)):
        if step >= STEPS // 2 and not is_routed_alike(values, references):
            break  # rounding has decided between two experts of nearly equal scores; later steps differ by more than rounding
        # Adam amplifies the rounding of small gradients, which the norm of later gradients shows first.
        names = values if step == 0 else [name for name in values if name.endswith("loss")]
        for name in names:
            assert values[name] == pytest.approx(references[name], rel=1e-5, abs=1e-6), (step, name)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        assert np.linalg.norm(a - b) <= 5e-6 * np.linalg.norm(b), jax.tree_util.keystr(path)
    assert jax.tree.leaves(buffers) or router != BIASED
    for a, b in zip(jax.tree.leaves(buffers), jax.tree.leaves(expected_buffers), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_drops_of_a_limited_exchange_are_counted_in_training_only():
    """Loads count before drops, and evaluations drop nothing."""
    model = LM(LMConfig(**SIZES | {"layers": 1, "mlp": "top_k(8,2,exchange_capacity=1.0)"}))
    batch, metrics, losses = batch_of(0, True), [], []
    for plan, devices in ((Plan("expert"), 4), (Plan("single"), 1)):
        trainer = make_trainer(model, OptimizerConfig(warmup=0), plan, steps=1, devices=jax.devices()[:devices])
        state, put = trainer.init(jax.random.key(0)), jax.device_put(batch, trainer.batch_sharding)
        losses.append(float(trainer.evaluate(state.params, put)["loss"][0]))
        values = trainer.step(state, put, jax.random.key(1))[1]
        metrics.append({name: float(value) for name, value in values.items()})
    assert metrics[0]["dropped"] > 0.0 and metrics[1]["dropped"] == 0.0
    assert metrics[0]["balance_loss"] == pytest.approx(metrics[1]["balance_loss"], rel=1e-5)
    assert metrics[0]["loss"] != pytest.approx(metrics[1]["loss"], rel=1e-5)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
