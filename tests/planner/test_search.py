"""The smallest change that fits, and the ranking of plans."""

import dataclasses
import math

import jax
import pytest

from hpnlp.data.stream import DataConfig
from hpnlp.parallel.plan import Plan
from hpnlp.planner import DEVICES, costs, render, search
from hpnlp.planner.devices import USABLE
from hpnlp.planner.estimate import planned_trainer
from hpnlp.types import InputError
from tests.messages import raises
from tests.planner.common import CONFIG, MODEL, SMALL, planned


def no_progress(done, total):
    pass


@pytest.mark.slow
def test_smallest_change_fits(monkeypatch):
    estimate = planned(Plan("data"), data=DataConfig(seq_len=128, batch_size=256))
    assert not estimate.fits(SMALL)
    change = search.smallest_change(estimate, SMALL, no_progress)
    assert change is not None
    flags, fitting = change
    assert fitting.fits(SMALL) and flags == "'--plan.remat=names(mixed)'"
    monkeypatch.setattr(search, "REMATS", ("none",))  # fewer changes, since all of them will be tried
    small, calls = planned(Plan("data"), devices=1), []
    tiny = dataclasses.replace(SMALL, memory=1e5)
    assert search.smallest_change(small, tiny, lambda done, total: calls.append((done, total))) is None
    assert [done for done, _ in calls] == list(range(calls[0][1]))


@pytest.mark.slow
def test_smallest_change_offloads_last():
    config = dataclasses.replace(CONFIG, data=DataConfig(seq_len=16, batch_size=1))
    estimate = costs(config, 1)
    offloaded = Plan("single", remat="full", offload_optimizer=True, offload_parameters=True)
    smallest = costs(dataclasses.replace(config, plan=offloaded), 1)
    device = dataclasses.replace(SMALL, memory=1.01 * smallest.bytes / USABLE)
    change = search.smallest_change(estimate, device, no_progress)
    assert change is not None
    flags, fitting = change
    assert fitting.config.plan == offloaded and fitting.bytes == smallest.bytes
    assert all(f"--plan.{name}" in flags for name in ("remat=full", "offload_optimizer", "offload_parameters"))
    layers = sum(x.size * 4 for x in jax.tree.leaves(planned_trainer(config, 1).state_shapes.params["layers"]))
    assert estimate.host_bytes == 0
    assert smallest.host_bytes == pytest.approx(layers + estimate.memory["optimizer"], rel=0.01)
    printed = [
        render.table(costs, SMALL, "small").partition("state in host memory")[2].split()[:1]
        for costs in (estimate, smallest)
    ]
    assert printed == [[], [f"{smallest.host_bytes / 1e9:.3f}"]]


@pytest.fixture(scope="module")
def ranking():
    """The ranked plans of two devices, and the calls that report progress."""
    plan = Plan(pipeline=2, rounds=2, exchange="heads", offload_optimizer=True)
    model = dataclasses.replace(MODEL, layers=2, heads=2)
    config = dataclasses.replace(CONFIG, model=model, data=DataConfig(seq_len=32, batch_size=2), plan=plan)
    calls = []
    return search.rank_plans(config, 2, SMALL, lambda done, total: calls.append((done, total))), calls


def test_ranked_plans_fit_and_are_sorted(ranking):
    ranked, calls = ranking
    seconds = [estimate.total_seconds(SMALL) for estimate in ranked]
    assert seconds == sorted(seconds) and all(estimate.fits(SMALL) for estimate in ranked)
    names = {search.plan_name(estimate).split(",")[0] for estimate in ranked}
    assert names == {"data 2", "fsdp 2", "tensor 2", "pipeline 2", "sequence 2"}
    assert calls[-1] == (len(ranked), len(ranked))


def test_fields_that_are_not_searched_stay(ranking):
    plans = [estimate.config.plan for estimate in ranking[0]]
    assert {(plan.offload_optimizer, plan.exchange, plan.rounds) for plan in plans} == {(True, "heads", 1)}


@pytest.mark.slow
def test_errors_that_all_plans_share_raise():
    invalid = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, output="sampled(0)", tied=False))
    with pytest.raises(InputError) as of_costs:
        costs(invalid, 1)
    with pytest.raises(InputError) as of_search:
        search.rank_plans(invalid, 2, DEVICES["h100"], no_progress)
    assert str(of_search.value) == str(of_costs.value)


def test_experts_are_divided_where_a_layer_has_them():
    """Each size divides the experts, and with the replicas the batch."""
    model = dataclasses.replace(MODEL, mlp="top_k(12,2)")
    plans = list(search._plans(dataclasses.replace(CONFIG, model=model), 8))
    assert {plan.expert for plan in plans} == {1, 2, 4}
    assert all(math.prod(plan.requested_sizes().values()) == 8 for plan in plans)
    assert {plan.expert for plan in search._plans(CONFIG, 8)} == {1}


def test_batch_that_no_plan_divides_raises():
    config = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, accumulate=2))
    raises(r"no plan divides it over 14 devices; use", search.rank_plans, config, 14, DEVICES["h100"], no_progress)
