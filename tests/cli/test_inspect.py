"""`hpnlp inspect`: tables, inspect.json and pictures of a language model, and of models without attention matrices."""

import dataclasses
import json

import pytest

from hpnlp import report
from hpnlp.training import loop
from tests import tiny
from tests.tasks.test_contracts import EXAMPLES

PICTURES = {"inspect_spectra.png", "inspect_attention.png", "inspect_loss.png"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("inspected") / "run"
    config = tiny.make(train__steps=2, model__layers=3, model__mixer="window(4,0),full,conv")
    report.write(workdir, config, loop.train(config, workdir), "--config=tests/tiny.py")
    return workdir


def test_layers_and_losses_are_measured(run, trained):
    outcome = run("inspect", trained, "--windows=2")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    title, about, *lines = outcome.out.splitlines()
    assert title == f"{trained}, step 2" and about.startswith("Attention on 2 windows of 16 held-out tokens, ")
    rows = [line.split() for line in lines[2:4]]
    assert [row[:2] for row in rows] == [["0", "window(4,"], ["1", "full"]]
    reason = "no attention matrices in layers 2: conv does not multiply values by a softmax of"
    assert any(line.startswith(reason) for line in lines)
    assert lines[-1].startswith(f"written: {trained}/inspect.json, {trained}/inspect_")
    assert {path.name for path in trained.iterdir()} >= PICTURES

    written = json.loads((trained / "inspect.json").read_text())
    near, far = written["layers"]
    assert len(near["heads"]["rank"]) == 2 and len(near["even"]["curve"][0]) == 101
    assert max(near["heads"]["distance"]) <= 4 and max(far["heads"]["entropy"]) <= far["even"]["entropy"][0] + 1e-6
    assert written["window_tokens"] == [16, 16] and written["skipped"].keys() == {"2"}
    assert [(item["first"], item["last"]) for item in written["loss_by_context"]][-1] == (8, 15)
    heldout = json.loads((trained / "report.json").read_text())["heldout_loss"]
    assert written["loss"] == pytest.approx(heldout, rel=1e-5)
    assert any(line.split()[:2] == ["all", f"{heldout:.4f}"] for line in lines)


def test_layers_and_lengths_are_chosen(run, trained):
    assert run("inspect", trained, "--windows=1", "--layers=1", "--length=8", "--batches=1").code == 0
    written = json.loads((trained / "inspect.json").read_text())
    assert [layer["layer"] for layer in written["layers"]] == [1] and written["window_tokens"] == [8]
    assert written["loss_by_context"][-1]["last"] == 7
    outcome = run("inspect", trained, "--length=1", "--batches=1")
    reason = "no attention matrices in layers 0-1: no held-out sequence has at least two tokens, and one with a label"
    assert outcome.code == 0 and reason in outcome.out, outcome


def test_invalid_flags_raise(run, trained):
    for argv, message in (
        (["{run}", "--layers=0,x"], "--layers=0,x: expected numbers of layers, as --layers=0,5"),
        (["{run}", "--layers=3"], "--layers=3: the model has the layers 0 to 2: choose among these"),
        (["{run}", "--windows=0"], "windows"),
    ):
        outcome = run("inspect", *(argument.format(run=trained) for argument in argv))
        assert outcome.code == 2 and message in outcome.err


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("rnn_lm", "no attention matrices in layers 0-1: recurrent layers have no attention"),
        ("classification", "no loss by position: the labels of the task are those of whole sequences"),
        ("masked_lm", "Held-out loss of "),
    ],
)
def test_other_tasks_have_what_their_models_have(run, tmp_path, task, expected):
    config = EXAMPLES[task](tmp_path)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=1))
    report.write(tmp_path / "run", config, loop.train(config, tmp_path / "run"))
    outcome = run("inspect", tmp_path / "run", "--windows=1", "--batches=1")
    assert outcome.code == 0 and expected in outcome.out, outcome
    assert ("Attention on 1 windows" in outcome.out) == (task != "rnn_lm")
