"""Memory of the training step: parameters are gathered again, and offloading does not change results."""

import dataclasses

import jax
import pytest

from hpnlp.models.lm import LM
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.optimizers import loss_scale
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests.contracts import ONCE
from tests.training.test_step import KEY, MODEL, Run, assert_leaves_close, batch_of, host, put, trainer_of


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "reversible", "names(mixed)"])
def test_backward_pass_gathers_sharded_parameters_again(remat):
    """Parameters that ZeRO shards are not kept from the forward pass: memory falls with the number of devices."""
    wide = dataclasses.replace(MODEL, layers=8, mlp_dim=1024, unroll=0)
    if remat == "reversible":
        wide, remat = dataclasses.replace(wide, residual=remat), "none"

    def temp(name):
        trainer = trainer_of(Plan(name, remat=remat), 8, wide)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(0))
        with jax.set_mesh(trainer.layout.mesh):
            lowered = trainer.step.jitted.lower(trainer.state_shapes, batch, jax.eval_shape(lambda: KEY))
        return lowered.compile(ONCE).memory_analysis().temp_size_in_bytes

    layers = 8 * (3 if MODEL.mlp == "swiglu" else 2) * 32 * 1024 * 4
    # Kept, they would take 7/8 of `layers` more. With `dots`, zero2 only saves the parameters, which are arguments.
    assert temp("zero3") < temp("zero2") + (layers / 8 if remat == "dots" else -layers / 8)


def memory_kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize(
    ("plan", "devices"), [(Plan("single"), 1), pytest.param(Plan("zero3"), 8, marks=pytest.mark.slow)]
)
def test_offloaded_optimizer_matches(plan, devices):
    """The optimizer's state is in the host's memory between steps; results are those without offloading."""
    plain, offloaded = Run(trainer_of()), Run(trainer_of(dataclasses.replace(plan, offload_optimizer=True), devices))
    tolerance = 1e-6 if devices == 1 else 1e-5
    for seed in range(3):
        assert offloaded.step(batch_of(seed)) == pytest.approx(plain.step(batch_of(seed)), rel=tolerance)
    assert memory_kinds(offloaded.state.opt_state) == {"pinned_host"}
    assert memory_kinds(offloaded.state.params) == {"device"}
    assert_leaves_close(host(offloaded.state.opt_state), host(plain.state.opt_state), tolerance)


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        (Plan("single"), {}),
        pytest.param(Plan("zero2", offload_optimizer=True), {"accumulate": 2}, marks=pytest.mark.slow),
        pytest.param(Plan("zero1", remat="offload(mixed)"), {}, marks=pytest.mark.slow),
        pytest.param(Plan("zero3", tensor=2, fsdp=2), {}, marks=pytest.mark.slow),
        pytest.param(Plan("sequence", remat="full"), {"loss_scale": 64.0}, marks=pytest.mark.slow),
    ],
)
def test_offloaded_parameters_match(plan, changes):
    """Layers and their averages are in the host's memory between steps; results are those of the plan without offloading."""
    scale = jax.device_get(loss_scale.initial(changes.get("loss_scale"), "float32"))
    plain = Run(trainer_of(plan, 4, **changes), scale=scale)
    offloaded = Run(trainer_of(dataclasses.replace(plan, offload_parameters=True), 4, **changes), scale=scale)
    for seed in range(3):
        assert offloaded.step(batch_of(seed)) == pytest.approx(plain.step(batch_of(seed)), rel=1e-5)
        for tree in (offloaded.state.params, offloaded.state.ema):
            tree = dict(tree)
            assert memory_kinds(tree.pop("layers")) == {"pinned_host"} and memory_kinds(tree) == {"device"}
        expected_kind = "pinned_host" if plan.offload_optimizer else "device"
        assert memory_kinds(offloaded.state.opt_state) == {expected_kind}
    assert_leaves_close(host(offloaded.state), host(plain.state), 1e-5)
    assert offloaded.heldout(batch_of(3)) == pytest.approx(plain.heldout(batch_of(3)), rel=1e-5)
    scores = [
        run.trainer.evaluate(run.state.best_params, put(run, batch_of(3)))["loss"][0] for run in (plain, offloaded)
    ]
    assert float(scores[1]) == pytest.approx(float(scores[0]), rel=1e-5)


def test_offloading_parameters_raises_if_layers_cannot_run_one_by_one():
    for model, changes, plan, message in (
        ({"residual": "reversible"}, {}, Plan("single"), "takes each branch by itself: set model.residual='plain'"),
        ({"mixer": "window(3,0),full"}, {}, Plan("single"), "alternates several: name one mixer"),
        ({}, {"name": "adafactor"}, Plan("single"), "updates all layers at once: choose another"),
        ({}, {}, Plan(pipeline=2), "takes it for each microbatch: set plan.pipeline=1"),
    ):
        lm = LM(dataclasses.replace(MODEL, **model))
        with pytest.raises(InputError, match=message):
            make_trainer(lm, OptimizerConfig(**changes), dataclasses.replace(plan, offload_parameters=True), steps=10)


def test_rows_with_offloaded_optimizer_raise():
    with pytest.raises(InputError, match="optimizer.rows=True trains some of their rows: leave out one of the two"):
        make_trainer(
            LM(dataclasses.replace(MODEL, tied=False)),
            OptimizerConfig(rows=True),
            Plan("single", offload_optimizer=True),
            steps=10,
        )
