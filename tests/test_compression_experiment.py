"""The experiment that compresses a small BERT: valid commands in an order that works, resumption, and the table."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from hpnlp.__main__ import HANDLES_SIGNALS
from hpnlp.cli import experiment
from hpnlp.compress.recipe import parse_recipe
from hpnlp.training.config import resolve
from tests.messages import raises

HERE = Path(__file__).parents[1] / "experiments" / "compression"


@pytest.fixture(scope="module")
def modules():
    """The modules `steps` and `runs` beside `bert.py`, which imports them as a script does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield importlib.import_module("steps"), importlib.import_module("runs")
    for name in ("steps", "runs"):  # other experiments have modules of these names
        del sys.modules[name]


def flags(step):
    named = [argument for argument in step.arguments[1:] if argument.startswith("--")]
    runs = [("from", argument) for argument in step.arguments[1:] if not argument.startswith("--")]
    return dict(runs) | dict(argument.lstrip("-").split("=", 1) for argument in named)


def test_commands_are_valid_and_follow_those_that_make_their_inputs(modules, tmp_path):
    steps = modules[0].all_steps(modules[0].Settings(tmp_path))
    done = set()
    for step in steps:
        values = flags(step)
        names = ("from", "train.init_from", "distill.teacher")
        paths = [Path(value) for name, value in values.items() if name in names]
        assert {path.relative_to(tmp_path).as_posix() for path in paths} <= set(step.inputs) <= done, step
        if step.arguments[0] == "train":
            _, overrides = experiment.split(["hpnlp", *step.arguments])
            resolve(experiment.read(values["config"], overrides))
        elif step.arguments[0] == "compress":
            parse_recipe(values["recipe"])
        assert step.name not in done
        done.add(step.name)
    like = {step.row["like"] for step in steps if "like" in step.row}
    assert like <= {step.name for step in steps if step.arguments[0] == "compress"}


def test_pretraining_holds_out_the_files_of_the_tasks():
    pretrain, finetune = (resolve(experiment.read(str(HERE / name))) for name in ("pretrain.py", "finetune.py"))
    assert pretrain.data.path == "stdlib" and finetune.data.path == "stdlib_functions"
    assert pretrain.data.heldout == finetune.data.heldout
    tagging = resolve(experiment.read(f"{HERE / 'finetune.py'}:tagging"))
    assert tagging.data.path == "stdlib_tokens" and tagging.data.heldout == finetune.data.heldout


def write_result(runs, step, workdir, score):
    """The result of a step as its command writes it."""
    seconds = {"1": 0.5, "8": 2.0}
    row = {"parameters": 4, "disk_bytes": 8, "memory_bytes": 8, "seconds": seconds, "scores": {"accuracy": score}}
    original = {**row, "disk_bytes": 16, "seconds": {count: 2 * time for count, time in seconds.items()}}
    content = {"rows": [original, row]} if step.result == "compress.json" else {"heldout_accuracy": score}
    (workdir / step.name).mkdir(parents=True)
    (workdir / step.name / "config.json").touch()
    (workdir / step.name / step.result).write_text(json.dumps(content))


def test_commands_of_the_script_react_to_signals(modules, tmp_path):
    """Commands that train inherit blocked signals from the script, and would block them to the end otherwise."""
    commands = {step.arguments[0] for step in modules[0].all_steps(modules[0].Settings(tmp_path))}
    assert commands - {"convert"} <= set(HANDLES_SIGNALS)


def test_results_of_other_settings_raise(modules, tmp_path):
    steps, runs = modules
    directory = tmp_path / "new" / "run"
    for tasks in (steps.TASKS, steps.TASKS[:1]):  # other tasks may be added
        runs.check_settings(steps.Settings(directory, trial=True, tasks=tasks))
    raises("holds results of --budget=1.0 --trial, .*: choose", lambda: runs.check_settings(steps.Settings(directory)))
    (tmp_path / "file").touch()
    raises("cannot write to --workdir=.*file", lambda: runs.check_settings(steps.Settings(tmp_path / "file")))


def test_finished_commands_are_skipped_and_seeds_share_a_row(modules, tmp_path, monkeypatch, capsys):
    steps, runs = modules
    members = steps.all_steps(steps.Settings(tmp_path, tasks=("classification",)))
    write_result(runs, members[0], tmp_path, 0.3)
    called = []

    def fake(step, workdir):
        called.append(step.name)
        if step.name in ("classification/fp8", "classification/movement_run"):
            return "the reason"
        write_result(runs, step, workdir, 0.9 if step.name.endswith("_2") else 0.6)
        return ""

    monkeypatch.setattr(runs, "run", fake)
    failed = ["classification/fp8", "classification/movement_run", "classification/movement"]
    assert runs.run_all(members, members, tmp_path) == failed
    assert called == [step.name for step in members[1:] if step.name != failed[-1]]
    out = capsys.readouterr().out
    assert "classification/movement is left out: classification/movement_run not finished" in out
    assert "classification/fp8 failed:\nthe reason" in out and "min remain" in out
    rows = {(row["task"], row["technique"]): row for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    student = rows["classification", steps.STUDENT]
    assert student["scores"] == [0.6, 0.6, 0.9] and student["score"] == pytest.approx(0.7) and student["seeds"] == 3
    assert student["disk_bytes"] == 8 and student["original_disk_bytes"] == 16 and student["teacher_score"] == 0.6
    assert rows["classification", "teacher"]["disk_bytes"] == 16
    assert ("classification", "fp8") not in rows
    # The stacked student was compressed from a student, which is half of the teacher, as its own result is half of it.
    assert rows["classification", "distilled, pruned, int8"]["original_seconds"]["8"] == pytest.approx(8.0)
    called.clear()
    runs.run_all(members, members, tmp_path)
    assert called == failed[:2]
