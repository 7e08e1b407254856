"""Studies compute steps, batches and rates from tokens or FLOPs, and refuse runs that exceed a limit."""

import dataclasses

import pytest

from hpnlp.planner import DEVICES
from hpnlp.scaling_laws import Study, recipe
from hpnlp.scaling_laws.flops import CONVENTIONS
from hpnlp.scaling_laws.study import RunCosts, check_costs, duration, render, run_costs
from hpnlp.types import InputError
from tests import tiny
from tests.messages import raises
from tests.tiny import text  # noqa: F401  (fixture)

SIZES = [{"model.dim": 8}, {"model.dim": 16}]
STUDY = Study(
    budget="1e12",
    sizes=SIZES,
    tokens=[320, 640],
    held_out=[({"model.dim": 32}, 640)],
    repeats=[(0, 320)],
    learning_rate=0.01,
)


@pytest.fixture(scope="module")
def runs():
    return STUDY.runs(tiny.get_config())


def test_runs_are_whole_steps_with_recipes_and_repeated_and_held_out_ones_last(runs):
    assert [run.config.model.dim for run in runs] == [8, 8, 16, 16, 8, 32]
    assert [run.config.train.seed for run in runs] == [0, 0, 0, 0, 1, 0]
    for run in runs:
        config = run.config
        assert run.tokens == config.train.steps * config.data.batch_size * 16
        assert run.flops == run.tokens * CONVENTIONS["porian"].flops_per_token(run.size)
        assert config.data.batch_size == recipe.batch_size(run.tokens, 16)
    assert runs[0].config.optimizer.learning_rate == 0.01
    ratio = runs[3].config.optimizer.learning_rate / runs[0].config.optimizer.learning_rate
    assert ratio == pytest.approx((runs[3].size.layers / runs[0].size.layers) ** -0.713 * 2**0.307, rel=0.01)
    assert STUDY.sweep(tiny.get_config()) == [run.fields for run in runs]


def test_learning_rates_fall_inversely_to_the_width():
    runs = dataclasses.replace(STUDY, transfer="width").runs(tiny.get_config())
    assert [run.config.optimizer.learning_rate for run in runs] == [0.01, 0.01, 0.005, 0.005, 0.01, 0.0025]


def test_flops_give_every_size_the_same_budget():
    study = dataclasses.replace(STUDY, tokens=(), flops=[3e7], held_out=(), repeats=())
    runs = study.runs(tiny.get_config())
    assert [run.flops for run in runs] == pytest.approx([3e7, 3e7], rel=0.05)
    assert runs[0].tokens > runs[1].tokens


def test_recipes_match_the_step_law_and_keep_warm_up_short():
    assert [recipe.batch_size(d, 256) for d in (2e6, 16e6)] == [8, 32]
    assert recipe.learning_rate(1e9, 1e11) == pytest.approx(1.79 * 1e9**-0.713 * 1e11**0.307)
    assert recipe.warmup(68_000, 2048, 1000) == 20 and recipe.warmup(68_000, 8192, 1000) == 8


@pytest.mark.parametrize(
    ("text", "flops", "seconds"),
    [("1e18", 1e18, 0), (3e14, 3e14, 0), (5, 5, 0), ("2h", 0, 7200), ("1.5 d", 0, 129_600), ("90s", 0, 90)],
)
def test_budgets_are_flops_or_times(text, flops, seconds):  # noqa: F811
    assert recipe.parse_budget(text, "--budget") == recipe.Budget(flops, seconds)


def test_table_has_every_run_and_the_sum(runs):
    estimated = [run_costs(run, DEVICES["h100"]) for run in runs[:1]] * len(runs)
    assert estimated[0].seconds > 0 and estimated[0].fits
    lines = render(STUDY, runs, estimated).splitlines()
    assert len([line for line in lines if "dim=" in line]) == len(runs)
    assert "porian" in lines[0] and duration(sum(cost.seconds for cost in estimated)) in lines[-1]


def test_runs_that_cannot_be_trained_raise():
    for changes, message in (
        ({"sizes": SIZES[:1]}, "at least two sizes"),
        ({"tokens": ()}, "either tokens"),
        ({"flops": [1e9]}, "either tokens"),
        ({"budget": "much"}, "expected FLOPs over 0"),
        ({"convention": "kaplen"}, "did you mean 'kaplan'"),
        ({"tokens": [5]}, "dim=8: 5 tokens, .* are less than one step of 1 x 16 tokens: raise the budget"),
        ({"tokens": [10**9]}, "passes over the .* training tokens"),
    ):
        with pytest.raises(InputError, match=message):
            dataclasses.replace(STUDY, **changes).runs(tiny.get_config())


def test_costs_beyond_a_limit_raise(runs):
    for budget, cost, message in (
        ("1e3", RunCosts(1.0, 1, True), "FLOPs, more than Study.budget='1e3'"),
        ("30s", RunCosts(10.0, 1, True), "at least 60.0 s, more than Study.budget='30s'"),
        ("1e12", RunCosts(1.0, 10**12, False), "dim=8 needs 1000.0 GB"),
    ):
        raises(message, check_costs, dataclasses.replace(STUDY, budget=budget), runs, [cost] * len(runs))
