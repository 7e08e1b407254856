"""Mixers that draw: their numbers depend on the step and the layer, and on nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.lm import LM, LMConfig
from hpnlp.nn.mixers import MIXERS
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests.contracts import ONCE
from tests.drawn import drawn, drawn_params, drawn_state
from tests.fixed_and_drawing_mixers import noisy_keys, token_mixer

B, T = 8, 8
SIZES = {"layers": 4, "dim": 16, "heads": 4, "mlp_dim": 32, "vocab": 24, "max_len": T, "unroll": 1}
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup=0)
# A hybrid of a mixer of a fixed length and one that draws.
MODEL = {"mixer": "tokens,noisy", "dropout": 0.1}
DRAWING = MODEL | {"mixer": "noisy", "layers": 2}
LAYOUTS = {
    "zero2 x tensor": (Plan("zero2", tensor=2), 4, DRAWING),
    "zero3 x pipeline, recomputed": (Plan("zero3", pipeline=2, microbatches=2, remat="full"), 4, DRAWING),
    "fixed length x tensor": (Plan("zero2", tensor=2), 4, DRAWING | {"mixer": "tokens"}),
    "rounds": (Plan("zero3", pipeline=2, rounds=2, microbatches=2), 4, DRAWING | {"layers": 4}),
    "heads": (Plan(sequence=2, exchange="heads"), 2, DRAWING),
    "reversible": (Plan("data", pipeline=2, microbatches=2), 4, MODEL | {"residual": "reversible"}),
}


@pytest.fixture(scope="module", autouse=True)
def mixers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MIXERS, "noisy", noisy_keys)
        patch.setitem(MIXERS, "tokens", token_mixer)
        yield


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, SIZES["vocab"], (B, T + 1)).astype(np.int32)
    positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    ids = np.ones((B, T), np.int32)
    arrays = {
        "tokens": tokens[:, :T],
        "labels": tokens[:, 1:],
        "segment_ids": ids,
        "positions": positions,
        "weights": ids.astype(np.float32),
    }
    with jax.ensure_compile_time_eval():  # constants of any program, also if one of them asks first
        return jax.tree.map(jnp.asarray, arrays)


def model_of(**fields):
    return LM(LMConfig(**SIZES | fields))


def first_step(plan, devices, fields):
    """Loss and norm of the gradients of the first step."""
    trainer = make_trainer(model_of(**fields), OPTIMIZER, plan, devices=jax.devices()[:devices], steps=1)
    state = jax.device_put(drawn_state(trainer.state_shapes), jax.tree.map(lambda x: x.sharding, trainer.state_shapes))
    inputs = jax.device_put(batch(), trainer.batch_sharding)
    _, metrics = trainer.step(state, inputs, jax.random.key(1))
    return [float(metrics[name]) for name in ("loss", "grad_norm")]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_draws_do_not_depend_on_the_layout(layout):
    plan, devices, fields = LAYOUTS[layout]
    np.testing.assert_allclose(first_step(plan, devices, fields), first_step(Plan(), 1, fields), rtol=1e-6)


def losses(mixer, dropout, keys):
    """Losses of training with each key, and of evaluation."""
    model = model_of(mixer=mixer, dropout=dropout, layers=2)
    params = drawn_params(model, 0.3)

    @functools.partial(jax.jit, static_argnums=1, compiler_options=ONCE)
    def run(key, deterministic):
        return model.apply(
            {"params": params}, batch(), deterministic, rngs={"dropout": key, "output": key}, method="loss"
        ).sum

    return [float(run(key, False)) for key in keys], float(run(keys[0], True))


def test_steps_draw_other_numbers_and_evaluation_the_same():
    first, second = jax.random.key(1), jax.random.key(2)
    (a, b, again), evaluated = losses("noisy", 0.0, [first, second, first])
    assert a == again and len({a, b, evaluated, losses("full", 0.0, [first])[1]}) == 4


def test_draws_change_no_bit_of_dropout():
    keys = [jax.random.key(1)]
    assert losses("noisy(0.0)", 0.2, keys) == losses("full", 0.2, keys)


def test_mixers_that_draw_are_refused_on_a_ring():
    with pytest.raises(InputError, match="NoisyKeys draws, which a ring does not support: choose plan.exchange=heads"):
        make_trainer(model_of(mixer="noisy"), OPTIMIZER, Plan("sequence"), steps=1)


def test_parts_of_an_accumulated_batch_draw_their_own_masks():
    """Parts of equal rows have the variance of the rows of one batch; with one key for all parts, it would be B times that."""
    rows = jax.tree.map(lambda x: jnp.repeat(x[:1], B, axis=0), batch())
    deviations = []
    for accumulate in (1, B):
        optimizer = dataclasses.replace(OPTIMIZER, accumulate=accumulate)
        trainer = make_trainer(
            model_of(mixer="full", dropout=0.5), optimizer, Plan(), devices=jax.devices()[:1], steps=1
        )
        losses = []
        for key in jax.random.split(jax.random.key(1), 24):
            state = jax.device_put(drawn_state(trainer.state_shapes))
            losses.append(float(trainer.step(state, rows, key)[1]["loss"]))
        deviations.append(np.std(losses))
    assert 0.5 < deviations[1] / deviations[0] < 0.7 * B**0.5, deviations


def test_layers_draw_new_features_of_their_own():
    model = model_of(mixer="performer(6,redraw=1)", layers=2)
    trainer = make_trainer(model, OPTIMIZER, Plan(), devices=jax.devices()[:1], steps=1)
    buffers = drawn(trainer.state_shapes.buffers, 1.0)
    for projections in jax.tree.leaves(model.advance(buffers, {}, jnp.int32(0), jax.random.key(1))):
        assert np.abs(projections[0] - projections[1]).max() > 0.1
