"""`hpnlp lra`: runs of mixers on tasks with one setting, their table and chart, and the efficiency of steps by length."""

import dataclasses
import json
import os

import numpy as np
import pytest

from hpnlp.data.examples.generated import list_ops
from hpnlp.lra import tasks
from hpnlp.lra.mixers import SPECS, all_specs
from hpnlp.lra.table import Score, note, render_efficiency, render_scores
from hpnlp.nn.mixers import MIXERS
from hpnlp.report.paired_scores import NO_INTERVAL, NOTE
from hpnlp.training.files.example_scores import ExampleScores
from tests import tiny

SMALL = (
    "--config.model.dim=16",
    "--config.model.layers=1",
    "--config.model.heads=2",
    "--config.model.mlp_dim=16",
    "--config.data.seq_len=64",
    "--config.data.batch_size=4",
    "--config.data.heldout_examples=8",
)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Arguments of a small suite in `tmp_path / "runs"`, whose examples are few."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tiny.Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    # Members are processes, which start faster with one device. The last flag counts.
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1")
    file = tmp_path / "few.py"
    file.write_text(
        "import dataclasses\nfrom hpnlp.data.examples.generated import list_ops\n"
        "list_ops.SHORT = dataclasses.replace(list_ops.SHORT, count=200)\n"
    )
    monkeypatch.setattr(list_ops, "SHORT", dataclasses.replace(list_ops.SHORT))  # restored after --register
    monkeypatch.setenv("HPNLP_CACHE", str(tmp_path / "cache"))
    return "lra", f"--workdir={tmp_path}/runs", f"--register={file}", *SMALL


@pytest.mark.slow
def test_runs_are_trained_tabulated_and_skipped(command, run, tmp_path):
    outcome = run(*command, "--mixers=fnet", "--budget=2")
    assert outcome.code == 0, outcome.err
    runs = tmp_path / "runs"
    table = (runs / "lra.md").read_text()
    assert table in outcome.out and table.startswith(
        "| mixer | listops_short: accuracy | listops_short: to the best | listops_short: steps |"
    )
    assert (runs / "lra.png").read_bytes().startswith(b"\x89PNG") and (runs / "listops_short" / "compare.md").exists()
    report = json.loads((runs / "listops_short" / "mixer=fnet" / "report.json").read_text())
    assert (report["steps"], report["config"]["model.mixer"], report["majority_accuracy"] > 0) == (2, "fnet", True)
    outcome = run(*command, "--mixers=fnet", "--budget=2")
    assert outcome.code == 0 and "[1/1] mixer=fnet: finished before" in outcome.out
    outcome = run(*command, "--mixers=fnet", "--budget=3")
    assert outcome.code == 2 and "fnet holds a run of another config (train.steps: 2 -> 3)" in outcome.err


@pytest.mark.slow
def test_efficiency_is_measured_once(command, run, tmp_path, members_here):
    flags = ("--efficiency", "--mixers=fnet", "--lengths=16", "--rounds=1")
    outcome = run(*command, *flags)
    assert outcome.code == 0, outcome.err
    (row,) = rows = json.loads((tmp_path / "runs" / "efficiency.json").read_text())["rows"]
    assert (row["mixer"], row["length"], row["batch_size"]) == ("fnet", 16, 4) and "backend" in row["environment"]
    assert row["steps_per_second"] > 0 and row["peak_memory_bytes"] > 1e6
    table = (tmp_path / "runs" / "efficiency.md").read_text()
    assert table in outcome.out and "| 16: steps/s | 16: of full |" in table
    outcome = run(*command, *flags)
    assert "[1/1] mixer=fnet,seq_len=16: measured before" in outcome.out
    assert json.loads((tmp_path / "runs" / "efficiency.json").read_text())["rows"] == rows


@pytest.mark.slow
def test_minutes_become_steps_that_stay_the_same(command, run, tmp_path, members_here):
    flags = ("--mixers=window(4,4)", "--budget=0.001min", "--config.plan.name=single")
    outcome = run(*command, *flags)
    assert outcome.code == 0 and "steps in 0.001 minutes" in outcome.out, outcome.err
    report = json.loads((tmp_path / "runs" / "listops_short" / "mixer=window_4,4" / "report.json").read_text())
    assert report["steps"] >= 10
    outcome = run(*command, *flags)
    assert "mixer=window_4,4: measured before" in outcome.out and "mixer=window_4,4: finished before" in outcome.out


def test_runs_of_a_task_differ_in_the_mixer_only():
    from hpnlp.lra.experiment import get_sweep

    for name in tasks.TASKS:
        assert all(member.keys() == {"model.mixer"} for member in get_sweep(name))
    assert len(get_sweep("path_x")) < len(get_sweep("pathfinder"))


def test_invalid_arguments_raise_before_a_run_begins(run, tmp_path):
    for argv, message in (
        (["--tasks=listop"], "unknown task of the Long Range Arena 'listop': did you mean 'listops'?"),
        (["--tasks="], "unknown task of the Long Range Arena ''"),
        (["--mixers=nystrem"], "unknown mixer 'nystrem': did you mean 'nystrom'?"),
        (["--mixers="], "--mixers is empty: name mixers, as in --mixers=full,linear, or use --mixers=all"),
        (["--mixers=conv"], "task listops_short, mixer conv: model.mixer='conv': conv mixes with earlier tokens only"),
        (["--mixers=window(a)"], "task listops_short, mixer window('a'): "),
        (["--budget=long"], "--budget=long: expected a number of steps, as 1000, or minutes, as 10min"),
        (["--budget=0"], "--budget=0: expected a number of steps"),
        (["--budget=5", "--config.train.steps=5"], "--budget=5 and --train.steps both set the steps: remove one"),
        (["--tasks=language_model"], "task language_model is measured only: add --efficiency; hpnlp sweep"),
        (["--efficiency", "--lengths=1k"], "--lengths=1k: expected numbers of tokens, as --lengths=1024,2048"),
        (["--lengths=64"], "--lengths=64 has no effect without --efficiency: add it, or set --data.seq_len=N"),
        (["--rounds=2", "--budget=5"], "--rounds=2 has no effect without --efficiency or a --budget in minutes: leave"),
        (["--efficiency", "--budget=5"], "--budget=5 has no effect with --efficiency, which measures single steps"),
        (["--efficiency", "--tasks=image, listops"], "--efficiency measures one task: use --tasks=image, and another"),
        (["--tasks=text"], "task text reads published data: add --data=imdb:DIRECTORY, or use --tasks=text_stdlib"),
        (["--data=imdb"], "--data=imdb: expected NAME:DIRECTORY, as --data=imdb:aclImdb"),
        (["--data=imdbs:x"], "unknown published data set --data 'imdbs': did you mean 'imdb'?"),
        (["--tasks=text", "--data=imdb:/no/such"], "task text, mixer fnet: data.path='imdb:/no/such': '/no/such' does"),
        (["--tasks=text", f"--data=imdb:{tiny.Path(__file__).parent}"], "holds no train/pos/*.txt and train/neg/*.txt"),
        (["--config.model.dims=3"], "task listops_short, mixer fnet: unknown config field 'model.dims': did you mean"),
        (["--tasks=path_x", "--mixers=mixture"], "task path_x: no mixer is left: name others"),
        (["--config.model.mixer=full"], "--model.mixer=full: task listops_short, mixer fnet sets model.mixer=fnet"),
        (["--workdir="], "--workdir is required, for example --workdir=runs/lra"),
    ):
        outcome = run("lra", "--mixers=fnet", f"--workdir={tmp_path}/runs", *argv)
        assert outcome.code == 2 and outcome.err.count("\n") == 1 and not (tmp_path / "runs").exists()
        assert message in outcome.err


def test_damaged_measurements_raise(run, tmp_path):
    (tmp_path / "efficiency.json").write_text('{"rows": [{}]}')
    outcome = run("lra", "--mixers=fnet", f"--workdir={tmp_path}", "--efficiency", "--lengths=16")
    assert outcome.code == 2 and "efficiency.json holds no measurements (a row lacks a field): move it" in outcome.err


def test_all_bidirectional_mixers_are_compared():
    specs, left_out = all_specs()
    names = [spec.partition("(")[0] for spec in specs]
    causal = {spec.partition("(")[0] for spec in all_specs(causal=True)[0]}
    assert {*names, *causal} == MIXERS.keys() and {"full", "conv", "nsa"} <= causal and "fnet" not in causal
    assert not left_out and len(set(names)) == len(names) and {"full", "linear", "fnet"} <= set(names)
    assert SPECS.keys() <= {*names, *causal} and "conv" not in names and set(names) <= MIXERS.keys()
    assert tasks.EXCEPTIONS.keys() <= MIXERS.keys()


@pytest.mark.parametrize("name", tasks.TASKS)
def test_configs_of_tasks_resolve(name):
    from hpnlp.training.config import resolve

    config = resolve(tasks.get_config(name))
    if name == "language_model":
        assert config.task == "lm" and config.data.order == "stream"
        return
    assert config.task == "classification" and config.model.token_types == 2 * (config.data.pair_field == "pair")
    stand_in = tasks.TASKS[name].stand_in
    assert not stand_in or not tasks.TASKS[stand_in].stand_in


def test_tables_order_mixers_by_mean_accuracy():
    scores = {
        "a": {"full": Score(0.5, 2.0, 2**20, 5), "fnet": Score(0.75, 4.0, 2**21, 9), "x|y": Score(None, 1.0, 2**20, 1)},
        "b": {"full": Score(0.75, 2.0, 2**20, 5), "fnet": Score(0.25, 4.0, 2**21, 9), "x|y": Score(0.2, 1.0, 2**20, 1)},
    }
    lines = render_scores(scores).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| full", "| fnet", r"| x\|y"]
    assert lines[2].endswith("| 0.6250 | - |") and "| 2 | 1 |" in lines[2]
    assert "mean" not in render_scores({"a": scores["a"]})
    assert lines[3].endswith("| 0.5000 | -0.1250 |") and "| 0.5000 | -0.2500 | 5 |" in lines[2]
    assert note(scores) == NO_INTERVAL and note({"a": {"full": scores["a"]["full"]}}) == ""
    assert "| - | - | - | - | - |" in render_scores({"a": scores["a"], "b": {"full": Score(0.1, 1.0, 1.0, 2)}})
    examples = {
        mixer: ExampleScores(
            {"accuracy": (np.repeat([1.0, 0.0], counts), np.ones(100))}, np.arange(100, dtype=np.uint32)
        )
        for mixer, counts in {"full": (75, 25), "fnet": (50, 50)}.items()
    }
    known = {
        "a": {
            mixer: Score(of_mixer.sums["accuracy"][0].mean(), 1.0, 1, 1, of_mixer)
            for mixer, of_mixer in examples.items()
        }
    }
    assert note({"a": {"full": known["a"]["full"]}}) == NOTE  # its accuracy has an interval
    lines = render_scores(known).splitlines()
    assert lines[2].startswith("| full | 0.7500 ± 0.0864 | - |") and note(known) == NOTE
    assert lines[3].startswith("| fnet | 0.5000 ± 0.0997 | -0.2500 (-0.3344 to -0.1558) |")
    assert (
        render_scores({**known, "b": known["a"]}).splitlines()[3].endswith("| 0.5000 | -0.2500 (-0.3082 to -0.1820) |")
    )
    rows = [
        {"mixer": "full", "length": 8, "steps_per_second": 2.0, "peak_memory_bytes": 2**20},
        {"mixer": "fnet", "length": 8, "steps_per_second": 3.0, "peak_memory_bytes": 2**20},
        {"mixer": "fnet", "length": 16, "steps_per_second": 1520.4, "peak_memory_bytes": 2**21},
    ]
    assert render_efficiency(rows).splitlines()[2:] == [
        "| full | 2 | 1.00 | 1 | - | - | - |",
        "| fnet | 3 | 1.50 | 1 | 1,520 | - | 2 |",
    ]
