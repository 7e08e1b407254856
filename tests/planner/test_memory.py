"""Memory estimates of a training step, beside compiled programs and formulas."""

import dataclasses
import re

import jax
import pytest

from hpnlp.data.stream import DataConfig
from hpnlp.models.lm import LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.planner import DEVICES, costs
from hpnlp.planner.collectives import trace
from hpnlp.planner.estimate import planned_model, planned_trainer
from hpnlp.planner.jaxpr.jaxpr_cost import program_cost
from hpnlp.planner.memory import gradient_bytes, held_bytes, state_bytes, state_shards
from hpnlp.training.config import Config
from hpnlp.training.optim import OptimizerConfig
from tests.contracts import ONCE
from tests.planner.common import CONFIG, MODEL, planned

HYBRID = {"mixer": "conv,full", "form": "block,block(heads=2,mlp_dim=256)"}


@pytest.mark.parametrize(
    ("remat", "fields"),
    [
        ("none", {}),
        ("full", {}),
        pytest.param("dots", {}, marks=pytest.mark.slow),
        pytest.param("names(mixed)", {}, marks=pytest.mark.slow),
        pytest.param("none", HYBRID, marks=pytest.mark.slow),
        pytest.param("dots", HYBRID, marks=pytest.mark.slow),
        pytest.param("none", HYBRID | {"residual": "reversible"}, marks=pytest.mark.slow),
    ],
)
def test_temporaries_match_the_compiled_program(remat, fields):
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, **fields), plan=Plan("single", remat=remat))
    trainer = planned_trainer(config, jax.devices()[:1])
    traced = trace(trainer, 16, 128)
    with jax.set_mesh(trainer.layout.mesh):
        compiled_bytes = traced.lower().compile(ONCE).memory_analysis().temp_size_in_bytes
    planned_bytes = program_cost(traced.jaxpr, state_shards(trainer), donated=True).peak
    assert planned_bytes == pytest.approx(compiled_bytes, rel=0.2)


def test_each_remat_policy_stores_less():
    policies = ("none", "names(projected,hidden)", "full")
    activations = [planned(Plan("single", remat=remat), 1).memory["activations"] for remat in policies]
    assert activations == sorted(activations, reverse=True) and activations[-1] < activations[0] / 3


def test_zero3_divides_the_state():
    replicated, sharded = planned(Plan("data")), planned(Plan("zero3"))
    for name in ("parameters", "optimizer", "gradients"):
        assert sharded.memory[name] < replicated.memory[name] / 6
    assert sharded.memory["activations"] < 1.5 * replicated.memory["activations"]
    state = planned_trainer(dataclasses.replace(CONFIG, plan=Plan("zero3")), 8).state_shapes
    assert sharded.memory["parameters"] == held_bytes(state.params)


def test_optimizers_count_by_their_state():
    adamw, lion = (
        planned(Plan("single"), 1, optimizer=OptimizerConfig(name=name)).memory for name in ("adamw", "lion")
    )
    assert adamw["optimizer"] == pytest.approx(2 * lion["optimizer"], rel=0.01)


def test_sparse_rows_have_gradients_of_the_rows_alone():
    model = dataclasses.replace(MODEL, layers=1, vocab=20000, tied=False, output="sampled(16)")
    config = dataclasses.replace(CONFIG, model=model, data=DataConfig(seq_len=16, batch_size=4))
    configs = [dataclasses.replace(config, optimizer=OptimizerConfig(rows=rows)) for rows in (False, True)]
    dense, sparse = (costs(config, 1) for config in configs)
    table, layers = 20000 * 64 * 4, 4 * model.non_embedding_parameters()
    # The embedding's rows of all tokens; the output's rows of all labels and 16 samples.
    assert sparse.memory["gradients"] == pytest.approx(layers + (64 + 64 + 16) * 64 * 4, rel=0.01)
    assert sparse.memory["gradients"] + sparse.memory["activations"] == sparse.program.peak < table
    assert dense.memory["gradients"] > 2 * table
    dense_state, sparse_state = (state_bytes(planned_trainer(config, 1), 4, 16) for config in configs)
    assert dense_state - sparse_state == dense.memory["gradients"] - sparse.memory["gradients"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "width"),
    [
        pytest.param(Plan("zero2"), 8, marks=pytest.mark.slow),
        (Plan("zero3"), 8),
        pytest.param(Plan(tensor=8), 64, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_rows_match_the_compiled_program(plan, width):
    """Each device holds its shard of the model dimension, of all rows, and no gradient of a table."""
    model = LMConfig(layers=1, dim=64, heads=8, mlp_dim=192, vocab=8000, unroll=1, tied=False, output="sampled(64)")
    config = Config(model, DataConfig(seq_len=32, batch_size=16), OptimizerConfig(rows=True), plan=plan)
    trainer = planned_trainer(config, jax.devices())
    tables = sum(trainer.rows_trained(16, 32).values()) * width * 4
    shapes = trainer.state_shapes.params if plan.name == "data" else trainer.gradient_shapes
    layers = {name: shape for name, shape in shapes.items() if name not in ("embed", "head")}
    assert gradient_bytes(trainer, 16, 32) == held_bytes(layers) + tables
    with jax.set_mesh(trainer.layout.mesh):
        text = trace(trainer, 16, 32).lower().compile(ONCE).as_text()
    sums = {(int(rows), int(columns)) for rows, columns in re.findall(r"= f32\[(\d+),(\d+)\]\S* add\(", text)}
    assert (32 * 16, width) in sums and (32 * 16 + 64, width) in sums
    assert not any(rows in (1000, 8000) for rows, _ in sums)


def test_accumulated_gradients_are_divided_like_gradients():
    """A microbatch needs no more memory than the batch, and the sums no more than the gradients."""
    config = dataclasses.replace(CONFIG, plan=Plan("zero3"), data=DataConfig(seq_len=16, batch_size=16))
    at_once, accumulated = (
        costs(dataclasses.replace(config, optimizer=OptimizerConfig(accumulate=count)), 8) for count in (1, 2)
    )
    assert accumulated.program.peak <= at_once.program.peak + at_once.memory["gradients"]


def test_offloaded_optimizer_state_counts_as_host_transfers():
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, layers=2))
    kept, offloaded = (
        costs(dataclasses.replace(config, plan=Plan("single", offload_optimizer=offload)), 1)
        for offload in (False, True)
    )
    assert kept.program.host_bytes == 0 and "host" not in kept.seconds(DEVICES["h100"])
    assert kept.memory["optimizer"] > 8 * kept.parameters and "optimizer" not in offloaded.memory
    assert offloaded.program.host_bytes == pytest.approx(kept.memory["optimizer"], rel=0.01)


def test_offloaded_activations_count_as_host_transfers():
    kept, offloaded = (planned(Plan("single", remat=remat), 1) for remat in ("names(hidden)", "offload(hidden)"))
    hidden = 6 * 16 * 128 * 2 * 192 * 4  # two products in float32, of each token and layer
    assert offloaded.program.host_bytes == pytest.approx(2 * hidden, rel=0.01)
    assert kept.memory["activations"] - offloaded.memory["activations"] == pytest.approx(hidden, rel=0.3)
    sharded = planned(Plan("zero3", remat="offload(hidden)"))
    assert sharded.program.host_bytes == pytest.approx(2 * hidden / 8, rel=0.01)


@pytest.mark.parametrize(("plan", "count"), [(Plan("single"), 1), (Plan("zero1"), 4)])
def test_offloaded_layers_count_as_host_transfers(plan, count):
    kept, offloaded = (
        costs(dataclasses.replace(CONFIG, plan=dataclasses.replace(plan, offload_parameters=offload)), count)
        for offload in (False, True)
    )
    size = 4 * planned_model(CONFIG).config.non_embedding_parameters()
    # Parameters are fetched for the forward pass, the backward pass and the update, and stored once. Gradients are stored once
    # and fetched for the norm and the update.
    assert offloaded.program.host_bytes == pytest.approx(7 * size, rel=0.01)
    assert kept.memory["parameters"] - offloaded.memory["parameters"] == pytest.approx(size, rel=0.01)
