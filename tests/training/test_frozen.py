"""Frozen variables: a teacher whose hidden states a model learns, on every layout, in runs that resume, and in the planner."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpnlp import planner, tasks
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.variables import axes_and_shapes, collections, join
from hpnlp.nn.layers import frozen
from hpnlp.parallel.plan import Plan
from hpnlp.planner.memory import memory_estimate
from hpnlp.tasks.lm import LanguageModel
from hpnlp.tasks.task import Frozen
from hpnlp.training import loop
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.run_directory import load
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError, LossOut
from tests import tiny
from tests.messages import raises
from tests.training.test_statistics import B, T, assert_runs_equal, batch_of

CONFIG = LMConfig(layers=2, dim=16, heads=4, kv_heads=2, mlp_dim=32, vocab=24, max_len=T, unroll=1)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup=0, ema=0.9, aux="teacher_loss(2)")
# At most 4 devices: the collectives of the teacher and the student are independent, and each occupies a thread of XLA's pool
# until all devices have reached it; 8 simulated devices can run out of threads.
LAYOUTS = {
    "zero3 x tensor, accumulated": (Plan("zero3", tensor=2), 4, {"accumulate": 2}),
    "zero2": (Plan("zero2"), 4, {}),
    "zero3": (Plan("zero3"), 4, {}),
}


class Student(LM):
    """A language model whose hidden states approach those of a frozen one, of the config `teacher`."""

    teacher: LMConfig | None = None

    def setup(self):
        super().setup()
        self._teacher_params()

    @nn.nowrap
    def _teacher(self):
        return LM(self.teacher, model_parallel=self.model_parallel, parent=None)

    def _teacher_params(self):
        return frozen(self, "teacher", lambda rng: self._teacher().init(rng, self.example_batch(1, 8))["params"])

    def loss(self, batch, deterministic=True):
        h, inner, indices, report = self.states(batch, deterministic)
        out = self.output_loss(h, inner, indices, None if deterministic else self.make_rng("output"))
        target, *_ = self._teacher().apply({"params": self._teacher_params()}, batch, True, method="states")
        distances = jnp.square(h - target).mean(axis=-1) * batch["weights"]
        return LossOut(out.sum, out.weight, {**report.aux, "teacher_loss": (distances.sum(), batch["weights"].sum())})


def taught(config, stats=None):
    return Student(config, stats, teacher=dataclasses.replace(config, layers=1))


def values_of(model, seed=0):
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda x: draw.normal(0, 0.3, x.shape).astype(np.float32), axes_and_shapes(model)[1]["frozen"])


@functools.cache
def trainer_of(plan=Plan(), devices=1, **changes):  # noqa: B008  (frozen)
    optimizer = dataclasses.replace(OPTIMIZER, **changes)
    return make_trainer(taught(CONFIG), optimizer, plan, devices=jax.devices()[:devices], steps=3)


@functools.cache
def initial_state():
    return jax.device_get(trainer_of().init(jax.random.key(0)))


@functools.cache
def run(plan=Plan(), devices=1, **changes):  # noqa: B008  (frozen)
    """`(metrics of each step, first gradients, last state)`."""
    trainer = trainer_of(plan, devices, **changes).with_frozen(values_of(taught(CONFIG)))
    state = jax.device_put(initial_state(), jax.tree.map(lambda leaf: leaf.sharding, trainer.state_shapes))
    metrics, gradients = [], None
    for seed in range(3):
        batch = jax.device_put(batch_of(seed), trainer.batch_sharding)
        state, values = trainer.step(state, batch, jax.random.key(1))
        metrics.append({name: float(value) for name, value in values.items()})
        gradients = gradients or jax.device_get(optax.tree.get(state.opt_state, "mu"))
    return metrics, gradients, jax.device_get(state)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_with_a_teacher_does_not_depend_on_the_layout(layout):
    plan, devices, changes = LAYOUTS[layout]
    assert_runs_equal(run(plan, devices, **changes), run(), of_gradients=1e-5)


@pytest.mark.slow
def test_frozen_variables_are_read_and_have_no_gradient_statistics_or_average():
    model, state = taught(CONFIG), initial_state()
    values, batch = values_of(model), batch_of(0)
    apply = jax.jit(lambda weights: model.apply(collections(weights), batch, method="loss"))
    total, weight = apply(join(state.params, None, values)).aux["teacher_loss"]
    metrics, _, last = run()
    assert metrics[0]["teacher_loss"] == pytest.approx(float(total / weight), rel=1e-6)
    structure = jax.tree.structure(last.params)
    assert jax.tree.structure(optax.tree.get(last.opt_state, "mu")) == structure == jax.tree.structure(last.ema)
    assert "frozen" not in last.best_params

    trainer = trainer_of().with_frozen(values)  # not donated: `run` has made several steps with the same arrays
    evaluated = trainer.evaluate(state.params, jax.device_put(batch, trainer.batch_sharding))
    np.testing.assert_allclose(evaluated["teacher_loss"], (total, weight), rtol=1e-6)
    others = trainer_of().with_frozen(values_of(model, seed=1))
    other = others.evaluate(state.params, jax.device_put(batch, trainer.batch_sharding))
    assert abs(other["teacher_loss"][0] / total - 1) > 0.01


def test_values_that_do_not_fit_raise():
    values = values_of(taught(CONFIG))
    raises("the model has frozen variables", lambda: trainer_of().step(initial_state(), batch_of(0), jax.random.key(1)))
    with pytest.raises(
        InputError, match=r"the frozen variables\['teacher'\].* are float32\[24, 16\], and the .* nothing"
    ):
        trainer_of().with_frozen({"teacher": {k: v for k, v in values["teacher"].items() if k != "embed"}})
    with pytest.raises(
        InputError, match=r"\['teacher'\]\['embed'\]\['table'\] .* are nothing, and the values are float32"
    ):
        make_trainer(LM(CONFIG), OptimizerConfig(), Plan(), steps=1).with_frozen(values)


def test_planner_counts_frozen_variables():
    memory = [memory_estimate(trainer_of(*layout), 0, B, T)["frozen"] for layout in ((), (Plan("zero3", tensor=2), 8))]
    assert memory[0] == 4 * sum(x.size for x in jax.tree.leaves(values_of(taught(CONFIG)))) > 2 * memory[1]


def test_frozen_variables_that_devices_do_not_divide_are_replicated():
    """A teacher of one layer, for a student whose two layers are divided into stages."""
    model = taught(CONFIG)
    trainer = make_trainer(model, OPTIMIZER, Plan(pipeline=2), devices=jax.devices()[:2], steps=3)
    (held,) = trainer.with_frozen(values_of(model)).step.frozen
    kernel = held["teacher"]["layers"]["mlp"]["up"]["kernel"]
    assert kernel.shape[0] == 1 and kernel.is_fully_replicated


class Taught(LanguageModel):
    """Language modelling with a teacher of random parameters."""

    name, digest = "taught", "abc"

    def model(self, config, sizes):
        lm = super().model(config, sizes)
        self.student = taught(lm.config, lm.stats)
        return self.student

    def frozen(self, config):
        return Frozen("teacher.safetensors", self.digest, values_of(self.student))


@pytest.fixture
def task(monkeypatch):
    task = Taught()
    monkeypatch.setitem(tasks.TASKS, "taught", task)
    return task


@pytest.mark.slow  # test_teacher.py resumes a run with a teacher
def test_runs_resume_bit_for_bit_with_the_same_teacher_only(task, tmp_path, monkeypatch):
    config = dataclasses.replace(tiny.make(train__steps=6, plan__name="single", optimizer__ema=0.9), task="taught")

    expected = loop.train(config, tmp_path / "undisturbed")
    tiny.interrupt(config, tmp_path / "run", 3)
    with monkeypatch.context() as patch:
        patch.setattr(Taught, "digest", "xyz")
        raises(r"then teacher.safetensors \(digest abc\), now", loop.train, config, tmp_path / "run")
    result = loop.train(config, tmp_path / "run")
    lines = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "undisturbed")]
    assert lines[0] == lines[1] and b"teacher_loss" in lines[0]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(result.params), jax.device_get(expected.params))
    loaded = load(tmp_path / "run", step=6)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded.params), jax.device_get(result.params))
    assert not list((tmp_path / "run" / "checkpoints").rglob("*teacher*"))
    assert planner.costs(config, 1).memory["frozen"] > 0
