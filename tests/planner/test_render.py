"""Tables and plots of plans."""

import dataclasses
import re
import shlex

import pytest

from hpnlp.cli import experiment
from hpnlp.parallel.plan import AXES, Plan
from hpnlp.planner import DEVICES, costs, render, search
from hpnlp.planner.devices import USABLE
from hpnlp.training.config import resolve
from hpnlp.training.optim import OptimizerConfig
from tests.planner.common import CONFIG, MODEL, SMALL, planned


def test_ranking_names_what_it_leaves_out():
    model = dataclasses.replace(MODEL, layers=1, output="nce(16)", tied=False)
    estimate = dataclasses.replace(costs(dataclasses.replace(CONFIG, model=model), 1), devices=2)
    lines = render.ranking([estimate] * 23, DEVICES["h100"], estimate.config.plan).splitlines()
    assert lines[21:23] == [
        "and 3 more that fit",
        "not counted: communication that the compiler adds for the loss of nce(16)",
    ]


def test_uneven_loads_of_divided_experts_are_named():
    estimate = planned(Plan("data"))
    divided = dataclasses.replace(estimate, sizes={**estimate.sizes, "expert": 2})
    lines = [
        render.table(costs, SMALL, "small").count("experts count with equal loads") for costs in (estimate, divided)
    ]
    assert lines == [0, 1]


def test_shares_of_parts_sum_to_all():
    lines = render.table(planned(Plan("data")), SMALL, "small").splitlines()
    title = next(line for line in lines if line.startswith("Share of each part of the model, in %"))
    assert title.split()[-3:] == ["FLOPs", "bytes", "time"]
    rows = lines[lines.index(title) + 1 : -1]
    assert rows[0].startswith("  embedding") and any(row.startswith("  output layer") for row in rows)
    columns = zip(*(map(float, row.split()[-3:]) for row in rows), strict=True)
    assert [sum(column) for column in columns] == pytest.approx([100] * 3)


def test_tight_fits_are_marked():
    estimate = planned(Plan("data"))
    temporaries = estimate.bytes - sum(estimate.memory[name] for name in ("parameters", "optimizer"))

    def printed(spare):
        """The verdict and the ranking for a device with room for this share of the temporaries more."""
        device = dataclasses.replace(SMALL, memory=(estimate.bytes + spare * temporaries) / USABLE)
        table = render.table(estimate, device, "small").splitlines()
        verdict = next(line for line in table if " usable: " in line).partition(" usable: ")[2]
        return verdict, render.ranking([estimate], device, estimate.config.plan)

    assert printed(-0.01)[0] == "IT DOES NOT FIT" and printed(0.21)[0] == "it fits"
    verdict, ranking = printed(0.1)
    assert verdict.startswith(f"it fits; {0.1 * temporaries / 1e9:.3g} GB are left, and temporaries may take ")
    assert f"{0.2 * temporaries / 1e9:.3g} GB more than planned: compile the step first (--depth=compiled)" in verdict
    assert "%  tight\n" in ranking and "tight: " in ranking and "tight" not in printed(0.21)[1]


def test_plot_shows_usable_memory(tmp_path):
    estimate = planned(Plan("data"))
    for share, position in ((0.5, ""), (10, r" \(above\)")):
        device = dataclasses.replace(SMALL, memory=share * estimate.bytes / USABLE)
        drawn = render.draw(estimate, device, "small", tmp_path / "plan.svg").read_text("utf-8")
        assert re.search(f"<!-- usable on small: {share * estimate.bytes / 1e9:.4g}{position} -->", drawn)


@pytest.mark.parametrize(
    "config_plan",
    [
        Plan("3d", tensor=4, fsdp=-1, zero=2, rounds=2, microbatches=4, recompute_stages=True),
        Plan(sequence=2, exchange="heads", remat="full", offload_optimizer=True),
    ],
)
def test_flags_of_a_ranking_select_its_first_plan(config_plan):
    first = Plan("zero1", 1, 1, 2, 1, 1, 1, zero=1, exchange=config_plan.exchange, remat="names(mixed)")
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, layers=1), plan=first)
    flags = render.ranking([costs(config, 2)], DEVICES["h100"], config_plan).partition("the first: ")[2]
    fields = dataclasses.asdict(config_plan).items()
    config_flags = [f"--plan.{name}={value}" for name, value in fields if value is not None]
    resolved = resolve(experiment.read("experiments/lm/bytes.py", [*config_flags, *shlex.split(flags)]))
    assert costs(resolved, 2).zero == 1 and resolved.plan.sizes(2) == first.sizes(2)
    assert dataclasses.replace(resolved.plan, **first.sizes(2), zero=1) == first


@pytest.mark.parametrize(
    ("sizes", "zero", "flags"),
    [
        ({"fsdp": 8}, 2, "--plan.name=zero2"),
        pytest.param({"data": 8}, 0, "--plan.name=data", marks=pytest.mark.slow),
        ({"fsdp": 4, "tensor": 2}, 3, "--plan.name=zero3 --plan.tensor=2"),
        pytest.param({"tensor": 8}, 0, "--plan.name=tensor", marks=pytest.mark.slow),
        pytest.param(
            {"pipeline": 2, "sequence": 4}, 0, "--plan.name=pipeline --plan.sequence=4", marks=pytest.mark.slow
        ),
    ],
)
def test_flags_of_a_ranking_are_short(sizes, zero, flags):
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, layers=2, heads=8), plan=Plan("3d"))
    all_sizes = dict.fromkeys(AXES, 1) | sizes
    plan = next(plan for plan in search._plans(config, 8) if plan.sizes(8) == all_sizes and plan.zero == zero)
    estimate = costs(dataclasses.replace(config, plan=plan), 8)
    assert render.ranking([estimate], DEVICES["h100"], config.plan).partition("the first: ")[2] == flags
    resolved = resolve(experiment.read("experiments/lm/bytes.py", flags.split()))
    assert resolved.plan.sizes(8) == plan.sizes(8)


@pytest.mark.parametrize(
    ("plan", "optimizer", "uncounted"),
    [
        (Plan("zero3"), OptimizerConfig("muon"), ""),
        (Plan(), OptimizerConfig(rows=True), "optimizer.rows, the loss of nce(16)\n"),
    ],
)
def test_uncounted_communication_is_named(plan, optimizer, uncounted):
    fields = {"tied": False, "output": "nce(16)"} if optimizer.rows else {}
    model = dataclasses.replace(MODEL, layers=1, **fields)
    estimate = costs(dataclasses.replace(CONFIG, model=model, optimizer=optimizer, plan=plan), 8)
    table = render.table(estimate, DEVICES["h100"], "h100")
    assert table.partition("not counted: communication that the compiler adds for ")[2].partition("  ")[0] == uncounted
