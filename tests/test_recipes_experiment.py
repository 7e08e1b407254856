"""The benchmark of compression recipes: valid steps in an order that works, paired intervals, and lines of tables."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from hpnlp.compress.recipe import parse_recipe
from hpnlp.training.files.example_scores import ExampleScores

HERE = Path(__file__).parents[1] / "experiments" / "bench"


@pytest.fixture(scope="module")
def modules():
    """Name -> module of experiments/bench."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield {
            name: importlib.import_module(name)
            for name in ("recipe_steps", "recipe_tables", "recipe_tasks", "small_runs")
        }
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(HERE)):
            del sys.modules[name]


def test_steps_are_valid_and_follow_those_that_make_their_inputs(modules):
    module = modules["recipe_steps"]
    steps, comparisons = module.entries([*module.GROUPS], tiny=False)
    done: set[str] = set()
    for step in steps:
        assert set(step.inputs) <= done, step.name
        assert step.name not in done
        done.add(step.name)
        values = [step.recipe, *step.fields.values()]
        recipe, *values = (v.text.format(path=v.run, share=0.5) if isinstance(v, module.OfRun) else v for v in values)
        if recipe:
            assert parse_recipe(recipe) and step.source
        elif not step.name.endswith(("-1", "-2")):
            fields = dict(zip(step.fields, values, strict=True))
            assert (
                modules["recipe_tasks"].config_of(step.task, {**fields, "train.steps": step.steps}, None).train.seed
                == 0
            )
    assert comparisons.keys() == module.GROUPS.keys()
    for comparison in (each for members in comparisons.values() for each in members):
        names = {
            f"{run}-{seed}" for run in (comparison.technique, comparison.control) for seed in module.seeds_of(False)
        }
        assert names <= done and (not comparison.teacher or comparison.teacher in done)


def scores_of(values):
    return ExampleScores({"accuracy": (values, np.ones_like(values))}, np.arange(len(values), dtype=np.uint32))


def test_paired_intervals_hold_the_difference_of_new_examples_and_seeds(modules):
    """Nominally 95 % of them; 8 seeds, whose variance is estimated, give a little less."""
    draw, hits = np.random.default_rng(0), 0
    for _ in range(200):
        easy = draw.normal(size=100)
        ours, theirs = (
            [scores_of(mean + easy + draw.normal(size=100) + 0.1 * draw.normal()) for _ in range(8)]
            for mean in (0.1, 0)
        )
        row = modules["small_runs"].paired(ours, theirs, "accuracy")
        assert row["difference"] == pytest.approx(np.mean(row["differences"]))
        hits += abs(row["difference"] - 0.1) <= row["half_interval"]
    assert hits >= 0.9 * 200


def test_runs_with_other_examples_are_not_compared(modules):
    first = scores_of(np.array([0.0, 1.0, 1.0]))
    other = ExampleScores(first.sums, first.identity + 1)
    with pytest.raises(SystemExit, match="different held-out examples"):
        modules["small_runs"].paired([first], [other], "accuracy")


def test_largest_batch_is_the_last_that_fits(modules):
    largest = modules["small_runs"].largest_batch
    assert largest(lambda batch: 100 + 3 * batch, 1000) == (296, 988)
    assert largest(lambda batch: 100 + 3 * batch, 123) == (0, 0)
