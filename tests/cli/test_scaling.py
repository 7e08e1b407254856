"""`hpnlp scaling` plans studies and fits finished members; `hpnlp plan --budget` plans a run by their law."""

import dataclasses
import functools
import itertools
import json
import shutil

import numpy as np
import pytest

from hpnlp.planner import DEVICES, search
from hpnlp.scaling_laws import budget
from hpnlp.scaling_laws.flops import CONVENTIONS, model_size
from hpnlp.scaling_laws.recipe import Budget
from hpnlp.training.config import flat
from hpnlp.training.config_file import write_config
from tests import tiny

STUDY = """
from hpnlp.scaling_laws import Study
from tests.tiny import get_config

def get_study():
    return Study(budget={budget!r}, sizes=[{{"model.dim": 8}}, {{"model.dim": 16}}], tokens=[320, 640])

def get_sweep():
    return get_study().sweep(get_config())
"""
DIMS, TOKENS = (8, 16, 32, 64), (10_240, 20_480, 40_960, 81_920)


@functools.cache
def parameters(dim):
    return CONVENTIONS["porian"].parameters(model_size(tiny.make(model__dim=dim)))


def write_member(directory, dim, tokens, finished=True, fields=None, **numbers):
    """A run whose loss follows a law with 0.1 % noise, without its training."""
    config = tiny.make(**{"model__dim": dim, "train__steps": tokens // 128, **(fields or {})})
    directory.mkdir(parents=True)
    write_config(directory, config)
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0}) + "\n")
    n = parameters(dim)
    loss = (1.2 + 20 * n**-0.3 + 30 * tokens**-0.35) * np.exp(0.001 * np.sin(dim * tokens))
    report = {
        "config": flat(config), "steps": tokens // 128, "tokens": tokens, "heldout_loss": float(loss), "heldout_bytes": 1,
        "heldout_bits_per_byte": 1.0, "heldout_digest": "a", "phase_seconds": {"data": 0.0, "step": 1.0},
        "tokens_per_second": 1.0, "peak_memory_bytes": 1, "seconds": 1.0, "parameters": n,
    }  # fmt: skip
    if finished:
        (directory / "report.json").write_text(json.dumps(report | numbers))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("study")
    for dim, tokens in itertools.product(DIMS, TOKENS):
        write_member(directory / f"dim={dim},tokens={tokens}", dim, tokens)
    return directory


@pytest.fixture
def study(written, tmp_path):
    return shutil.copytree(written, tmp_path / "runs")


def test_finished_members_are_fitted_and_the_largest_is_predicted(run, study):
    write_member(study / "unfinished", 8, 1280, finished=False)
    outcome = run("scaling", "fit", study)
    assert outcome.code == 0, outcome.err
    record = json.loads((study / "scaling.json").read_text())
    assert len(record["points"]) == 16 and record["unfinished"] == ["unfinished"]
    (held_out,) = [point for point in record["points"] if point["held_out"]]
    assert held_out["run"] == "dim=64,tokens=81920"
    (prediction,) = record["predictions"]
    assert abs(prediction["error"]) < 0.01 and prediction["low"] < prediction["loss"] < prediction["high"]
    assert set(record["fits"]) == set(CONVENTIONS)
    page = (study / "scaling.md").read_text()
    assert page in outcome.out and "left out: unfinished" in page and all(name in page for name in CONVENTIONS)
    assert "inside the interval" in page
    assert (study / "scaling.png").read_bytes().startswith(b"\x89PNG")

    # The law plans a run, by the same constants.
    command = ("plan", "--budget=1e11", f"--law={study}", f"--config={tiny.EXPERIMENT}", "--devices=1", "--device=h100")
    outcome = run(*command)
    assert outcome.code == 0, outcome.err
    optimum = record["optima"][0]
    assert "Convention porian" in outcome.out and "hpnlp train --config=" in outcome.out
    assert optimum["n"]["low"] < optimum["n"]["value"] < optimum["n"]["high"]
    assert "Warning: " not in outcome.out
    record["points"] = [point for point in record["points"] if point["d"] in TOKENS[:2]]
    (study / "scaling.json").write_text(json.dumps(record))
    assert "Warning: each size was trained on at most 2 numbers of tokens" in run(*command).out


def test_budgets_are_planned_by_the_published_law(run):
    arguments = (f"--config={tiny.EXPERIMENT}", "--devices=1", "--device=h100")
    outcome = run("plan", "--budget=1e15", *arguments)
    assert outcome.code == 0, outcome.err
    words = " ".join(outcome.out.split())
    assert (
        "Hoffmann et al. 2022" in words
        and "The config reads bytes" in words
        and "steps of warm-up" in words
        and "at least" in words
    )
    experts = run("plan", "--budget=1e15", "--model.mlp=top_k(4,2)", *arguments)
    assert experts.code == 0 and "'--model.mlp=top_k(4,2)' --model.dim=" in experts.out
    assert "this law is of models without experts" in experts.out and "has experts" not in outcome.out
    timed = run("plan", "--budget=20s", *arguments)
    assert timed.code == 0 and "at least 20.0 s on 1 x h100" in timed.out


def test_planned_runs_fit(monkeypatch):
    config, law, calls = tiny.make(), budget.published_law(), []

    def plan(memory):
        device = dataclasses.replace(DEVICES["h100"], memory=memory)
        planned = budget.plan_run(Budget(flops=1e13), config, law, device, 1, lambda *counts: calls.append(counts))
        return planned, budget.render(planned, law, device, "h100", "hpnlp train")

    large, text = plan(80e9)
    assert not calls and large.fix == "" and text.endswith(f"--optimizer.warmup={large.config.optimizer.warmup}")
    small, text = plan(0.9 * large.costs.bytes)
    assert small.costs.bytes < 0.9 * large.costs.bytes and small.fix and f", with {small.fix}" in text
    assert text.endswith(f" {small.fix}") and small.seconds > large.seconds
    monkeypatch.setattr(search, "_changes", lambda estimate: [])
    text = plan(0.9 * large.costs.bytes)[1]
    assert "hpnlp train" not in text and text.endswith("plan more devices, or a smaller budget.")


def test_invalid_budgets_raise(run):
    for argv, message in (
        (["--budget=1e3"], "are less than one step of"),
        (["--budget=1e300"], "expected at most 1e+28 FLOPs"),
        (["--budget=-1"], 'expected FLOPs over 0, as in "1e18"'),
        (["--budget=1e9", "--search"], "with --budget, which plans a whole run"),
        (["--budget=1e9", "--law=nowhere"], "--law: cannot read nowhere"),
        (["--law=nowhere"], "without --budget: add it"),
    ):
        outcome = run("plan", f"--config={tiny.EXPERIMENT}", *argv)
        assert outcome.code == 2 and message in outcome.err


def test_studies_without_points_are_named(run, tmp_path):
    (tmp_path / "scaling.json").write_text('{"convention": "porian", "delta": 0.001, "points": []}')
    outcome = run("plan", "--budget=1e9", f"--law={tmp_path}", f"--config={tiny.EXPERIMENT}")
    assert outcome.code == 2 and f"--law={tmp_path}: form additive: there are no points" in outcome.err


def test_studies_are_planned(run, tmp_path):
    (tmp_path / "study.py").write_text(STUDY.format(budget="1e12"))
    outcome = run("scaling", "plan", f"--config={tmp_path}/study.py", "--device=h100")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("dim=") == 4 and "the budget is 1e12" in outcome.out
    (tmp_path / "study.py").write_text(STUDY.format(budget="1e3"))
    outcome = run("scaling", "plan", f"--config={tmp_path}/study.py", "--device=h100")
    assert outcome.code == 2 and "more than Study.budget='1e3'" in outcome.err and outcome.out.count("dim=") == 4


def test_invalid_arguments_raise(run):
    for argv, message in (
        (["plan"], "--config is required"),
        (["plan", f"--config={tiny.EXPERIMENT}"], "has no get_study()"),
        (["plan", "--config=lm/bytes", "--held_out=2"], "--held_out=2 has no effect with hpnlp scaling plan"),
        (["plan", "--config=scaling/bytes", "--model.dim=64"], "--model.dim=64: get_study() sets model.dim="),
        (["fit"], "expected one directory"),
        (["fit", "nowhere"], "there is no directory nowhere"),
        (["fit", "x", "--config=lm/bytes"], "--config=lm/bytes has no effect with hpnlp scaling fit"),
        (["fit", "x", "--model.dim=3"], "configs of their own"),
    ):
        outcome = run("scaling", *argv)
        assert outcome.code == 2 and message in outcome.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 3}, "stopped at step 3 of 80"),
        ({"heldout_loss": None}, "no finite held-out loss"),
        ({"heldout_digest": "b"}, "have different held-out texts"),
        ({"fields": {"model__mlp": "top_k(4)"}}, "has experts and"),
        ({"fields": {"task": "masked_lm"}}, "z is of task='masked_lm', and scaling laws are of task='lm': move it"),
        ({"fields": {"model__output": "adaptive"}}, "z: task='lm' with model.output='adaptive'"),
        ({"fields": {"train__init_from": "runs/other"}}, "began from train.init_from='runs/other'"),
    ],
)
def test_members_that_do_not_compare_raise(run, study, change, message):
    write_member(study / "z", 8, 10_240, **change)
    outcome = run("scaling", "fit", study)
    assert outcome.code == 2 and message in outcome.err


def test_studies_without_finished_members_or_with_one_size_raise(run, tmp_path):
    write_member(tmp_path / "a" / "x", 8, 1280, finished=False)
    outcome = run("scaling", "fit", tmp_path / "a")
    assert outcome.code == 2 and "holds no finished run and 1 unfinished ones" in outcome.err
    for tokens in TOKENS:
        write_member(tmp_path / "b" / str(tokens), 8, tokens)
    outcome = run("scaling", "fit", tmp_path / "b", "--held_out=0")
    assert outcome.code == 2 and "its points (4) have one size only" in outcome.err
    outcome = run("scaling", "fit", tmp_path / "b", "--held_out=4")
    assert outcome.code == 2 and "less than the 4 finished runs" in outcome.err
