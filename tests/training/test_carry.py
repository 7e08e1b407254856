"""State that a model carries from batch to batch: layouts, accumulation, evaluation and refusals.

Runs and checkpoints with a carry are those of `test_buffers`.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.models.encoder import EncoderConfig
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.seq2seq import Seq2SeqModelConfig
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.segment_memory import SegmentMemoryMixer
from hpnlp.ops.attention import Full
from hpnlp.parallel.plan import Plan
from hpnlp.planner.collectives import trace
from hpnlp.planner.memory import memory_estimate
from hpnlp.tasks import TASKS
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training.evaluation import evaluate
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.run_directory import make_model
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits
from tests import tiny
from tests.drawn import drawn
from tests.messages import raises
from tests.traces import TRACES

B, T, STEPS, M = 8, 8, 3, 5
SIZES = {"dim": 16, "heads": 4, "kv_heads": 2, "mlp_dim": 32, "vocab": 24, "layers": 6}
# A stack with a carry, one whose carry is compressed, which gives an auxiliary loss, and one without.
MODEL = LMConfig(mixer=f"segment_memory({M}),compressive({M},4,2),full", **SIZES)
# Adam would divide differences of rounding in small gradients by the size of these gradients.
# With larger steps, rounding errors of one step grow in the next to more than the tolerance on some processors.
OPTIMIZER = OptimizerConfig("sgd", learning_rate=0.01, schedule="constant", warmup=0, skip_nonfinite=True)
LAYOUTS = {
    "zero3 x tensor": (Plan("zero3", tensor=2), 4, {}),
    "zero3 x tensor, accumulated": (Plan("zero3", tensor=2), 8, {"accumulate": 2}),
    "recomputed": (Plan(remat="full"), 1, {}),
}


def batch_of(number):
    """Batch of a stream of tokens whose documents have 13 tokens."""
    first = number * T + np.arange(T)[None] + 5 * np.arange(B)[:, None]
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab"], 100).astype(np.int32)
    batch = {
        "tokens": tokens[first],
        "labels": tokens[first + 1],
        "segment_ids": 1 + first // 13,
        "positions": first % 13,
    }
    batch = {name: x.astype(np.int32) for name, x in batch.items()}
    return {**batch, "weights": np.ones((B, T), np.float32)}


@functools.cache
def trainer_of(plan=Plan(), devices=1, mixer=MODEL.mixer, **changes):  # noqa: B008  (frozen)
    model = LM(dataclasses.replace(MODEL, mixer=mixer))
    config = dataclasses.replace(OPTIMIZER, **changes)
    return make_trainer(model, config, plan, devices=jax.devices()[:devices], steps=STEPS, batch_size=B)


@functools.cache
def initial_state(mixer=MODEL.mixer):
    return jax.device_get(trainer_of(mixer=mixer).init(jax.random.key(0)))


@functools.cache
def run(plan=Plan(), devices=1, **changes):  # noqa: B008  (frozen)
    """`(losses, last state)`."""
    trainer, losses = trainer_of(plan, devices, **changes), []
    shardings = jax.tree.map(lambda leaf: leaf.sharding, trainer.state_shapes)
    state, traces = jax.device_put(initial_state(changes.get("mixer", MODEL.mixer)), shardings), TRACES["step"]
    for number in range(STEPS):
        state, metrics = trainer.step(
            state, jax.device_put(batch_of(number), trainer.batch_sharding), jax.random.key(1)
        )
        losses.append(float(metrics["loss"]))
    assert TRACES["step"] == traces + 1
    return losses, jax.device_get(state)


def assert_runs_equal(actual, expected):
    np.testing.assert_allclose(actual[0], expected[0], rtol=2e-6)
    for a, b in zip(*(jax.tree.leaves(state.carry) for _, state in (actual, expected)), strict=True):
        assert a.dtype == b.dtype and np.linalg.norm(a - b) <= 5e-6 * np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_carry_do_not_depend_on_the_layout(layout):
    plan, devices, changes = LAYOUTS[layout]
    assert_runs_equal(run(plan, devices, **changes), run())


# Other mixers: (mixer, plan, devices, changes of the optimizer). "most_used" adds up over heads, which "tensor" would divide.
MIXER_LAYOUTS = {
    "transformer_xl": ("transformer_xl(5),full", Plan("zero3", tensor=2), 8, {"accumulate": 2}),
    "most used": ("compressive(5,4,2,most_used),full", Plan("zero3"), 4, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MIXER_LAYOUTS)
def test_losses_and_carry_of_other_mixers_do_not_depend_on_the_layout(case):
    mixer, plan, devices, changes = MIXER_LAYOUTS[case]
    one, several = run(mixer=mixer), run(plan, devices, mixer=mixer, **changes)
    assert_runs_equal(several, one)
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(one[1].carry))


@pytest.mark.slow
def test_carry_holds_the_last_tokens_of_the_layers_that_have_one():
    _, state = run()
    carry, last = state.carry["layers"]["0_segment_memory"], batch_of(STEPS - 1)
    assert carry.states.shape == (2, B, M, SIZES["dim"])
    assert state.carry["layers"].keys() == {"0_segment_memory", "1_compressive"}
    for layer in range(2):
        np.testing.assert_array_equal(carry.positions[layer], last["positions"][:, -M:])
        np.testing.assert_array_equal(carry.segment_ids[layer], last["segment_ids"][:, -M:])
    assert (np.abs(carry.states[0] - carry.states[1]) > 1e-3).any()


@pytest.mark.slow
def test_skipped_steps_keep_the_carry_and_new_states_begin_without():
    trainer, (_, state) = trainer_of(), run()
    broken = dataclasses.replace(state, params=jax.tree.map(lambda x: np.full_like(x, np.nan), state.params))
    skipped, metrics = trainer.step(jax.device_put(broken), batch_of(STEPS), jax.random.key(1))
    assert metrics["skipped"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(skipped.carry), state.carry)
    for started in (initial_state(), trainer.init(jax.random.key(0), state.best_params)):
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(started.carry))
    assert "carry" not in state.best_params


def test_planner_counts_the_carry():
    plan, devices, changes = LAYOUTS["zero3 x tensor"]
    sizes = [
        memory_estimate(trainer, 0, B, T)["carry"] for trainer in (trainer_of(), trainer_of(plan, devices, **changes))
    ]
    segment_memories = 2 * B * M * 4 * (SIZES["dim"] + 2)
    compressive = 2 * B * (M + 4) * 4 * (SIZES["dim"] + 2)
    assert sizes == [segment_memories + compressive, sizes[0] // 2]


# Forms of a carry.


class Previous(Mixer):
    """The hidden state of the token before, of any segment. The carry is that of the last token, as `form` has it."""

    needs: ClassVar = {}
    traits: ClassVar = MixerTraits(bidirectional=False, decodes=False)

    form: str
    dropout: float = 0.0

    def _formed(self, x: Any) -> Any:
        return (x, x) if self.form == "pair" else x

    def initial_carry(self, batch: int, dim: int, dtype: Any) -> Any:
        return self._formed(jnp.zeros((batch, dim), dtype))

    @property
    def carry_axes(self) -> Any:
        return self._formed(("batch", "embed"))

    def __call__(self, inputs: MixerInputs, mask: Any) -> MixerOutput:
        assert inputs.x is not None
        first = jnp.zeros_like(inputs.x[:, 0]) if inputs.carry is None else jax.tree.leaves(inputs.carry)[0]
        last = inputs.x[:, -1].astype("float16" if self.form == "half" else inputs.x.dtype)
        carry = None if inputs.carry is None or self.form == "none" else self._formed(last)
        return MixerOutput(jnp.concatenate([first[:, None], inputs.x[:, :-1]], axis=1), carry=carry)

    def within(self, mask: Any) -> Any:
        return mask


@pytest.fixture
def previous(monkeypatch):
    monkeypatch.setitem(MIXERS, "previous", Previous)


@pytest.mark.parametrize("form", [pytest.param("array", marks=pytest.mark.slow), "pair"])
def test_a_carry_is_any_tree_of_arrays(form, previous):
    model = LM(dataclasses.replace(MODEL, mixer=f"previous({form}),full"))
    assert trace(make_trainer(model, OPTIMIZER, Plan("zero3", tensor=2), steps=1, devices=8, batch_size=B), B, T)


def test_a_carry_of_two_arrays_reaches_the_next_batch(previous):
    """Two batches of a stream have the loss of one batch of the whole stream."""
    model = LM(dataclasses.replace(MODEL, mixer="previous(pair)", layers=2))
    trainer = make_trainer(model, OPTIMIZER, Plan(), steps=1, devices=jax.devices()[:1], batch_size=B)
    params, batches = trainer.init(jax.random.key(0)).params, [batch_of(0), batch_of(1)]
    first, carry = trainer.evaluate_next(params, batches[0], trainer.initial_carry())
    second, _ = trainer.evaluate_next(params, batches[1], carry)
    whole = {name: np.concatenate([batch[name] for batch in batches], axis=1) for name in batches[0]}
    expected, _ = trainer.evaluate(params, whole)["loss"]
    np.testing.assert_allclose(first["loss"][0] + second["loss"][0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("half", r"returns the carry\['layers'\] as float16\[6, 1, 16\] where it was float32\[6, 1, 16\]: return"),
        ("none", r"returns the carry\['layers'\] as nothing where it was float32"),
    ],
    ids=["half", "none"],
)
def test_a_carry_unlike_the_initial_one_raises(form, message, previous):
    with pytest.raises(InputError, match=message):
        make_trainer(
            LM(dataclasses.replace(MODEL, mixer=f"previous({form})")), OPTIMIZER, Plan(), steps=1, batch_size=B
        )


# Evaluation.


def test_evaluation_reads_the_text_as_one_stream():
    """The loss of one stream does not depend on where its sequences are cut, unless each begins with an empty carry."""
    totals, params = [], None
    for seq_len in (16, 48):
        overrides = {"data__order": "stream", "data__batch_size": 1, "data__seq_len": seq_len}
        config = tiny.make(model__mixer="segment_memory(20)", **overrides)
        dataset = TASKS["lm"].dataset(config.data, None)
        model = make_model(config, TASKS["lm"].vocabulary(dataset))
        trainer = make_trainer(model, OptimizerConfig(), Plan(), devices=jax.devices()[:1], steps=1, batch_size=1)
        params = params or drawn(trainer.state_shapes.params, 0.3)
        totals.append(evaluate(trainer, params, dataset, config).sums["loss"])
    np.testing.assert_allclose(*totals, rtol=1e-6)
    alone = sum(np.asarray(trainer.evaluate(params, batch)["loss"]) for batch in dataset.heldout(batch_size=1))
    assert alone[1] == totals[1][1] and abs(alone[0] - totals[1][0]) > 1e-4 * alone[0]


# Refusals.


def language_model(**overrides):
    config = tiny.make(**{"model__mixer": "segment_memory(4)", "data__order": "stream"} | overrides)
    return TASKS["lm"].model(config, Sizes(8))


REFUSALS = {
    "shuffled": (lambda: language_model(data__order="shuffle"), r"data.order='shuffle'"),
    "stride": (lambda: language_model(train__eval_stride=4), "train.eval_stride=4.*set train.eval_stride=0"),
    "learned positions": (lambda: language_model(model__position="learned"), "model.position='learned' ends"),
    "masked": (lambda: TASKS["masked_lm"].data_config(order="stream", packing="concat"), "data.order='stream' is for"),
    "encoder": (lambda: EncoderConfig(**SIZES, mixer="segment_memory"), "EncoderConfig does not keep: choose another"),
    "seq2seq": (
        lambda: Seq2SeqModelConfig(**SIZES, mixer="segment_memory"),
        "DecoderConfig does not keep: choose another",
    ),
    "reversible": (lambda: dataclasses.replace(MODEL, residual="reversible"), "set model.residual='plain'"),
    "pipeline": (lambda: trainer_of(Plan("pipeline"), 3, "segment_memory(5)"), "plan.pipeline=3: model.mixer=.*set"),
    "sequence": (lambda: trainer_of(Plan("sequence"), 2), "plan.sequence=2: model.mixer=.*set plan.sequence=1"),
    "length": (
        lambda: language_model(model__mixer="compressive(8,4,3)", train__sample=0),
        r"data.seq_len=16: model.mixer='compressive\(8,4,3\)' compresses .* 3 at a time: set it to a multiple of 3",
    ),
    "heads of several devices": (
        lambda: trainer_of(Plan("zero3", tensor=2), 2, "compressive(5,4,2,most_used)"),
        r"CompressiveMixer \(model.mixer\) adds up over all heads of a layer.*set plan.tensor=1",
    ),
    "mask": (lambda: SegmentMemoryMixer().within(Full()), "a segment memory cannot apply the mask Full"),
    "batch size": (lambda: step_of_half_a_batch(), "batch_size=8 of make_trainer.*has 4 sequences: pass batch_size=4"),
    "batch size of an evaluation": (
        lambda: trainer_of().evaluate_next(zeros().best_params, half_a_batch(), trainer_of().initial_carry()),
        "batch_size=8 of make_trainer.*has 4 sequences: pass batch_size=4",
    ),
}


def half_a_batch():
    return {name: x[:4] for name, x in batch_of(0).items()}


def zeros():
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), trainer_of().state_shapes)


def step_of_half_a_batch():
    trainer_of().step(zeros(), half_a_batch(), jax.random.key(1))


@pytest.mark.parametrize("case", REFUSALS)
def test_unsupported_combinations_raise(case):
    make, message = REFUSALS[case]
    raises(message, make)


def test_streams_train_models_without_a_carry():
    model = language_model(model__mixer="window(4,0)")
    assert model.initial_carry(2) is None
    assert make_trainer(model, OPTIMIZER, Plan(), steps=1, batch_size=8).state_shapes.carry is None
