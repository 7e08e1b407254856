"""Every kind of directory, given to every command that reads a run or writes one: a message with the command to use instead."""

import os

import pytest

from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.training import config as configs
from hpnlp.training.files import contents
from tests import tiny

READERS = {
    "predict": "predict {d} text",
    "encode": "encode {d} {config} --to={new}.npy",
    "generate": "generate {d} --prompt=a --tokens=2",
    "evaluate": "evaluate {d}",
    "inspect": "inspect {d}",
    "profile": "profile {d}",
    "compress": "compress {d} --to={new} --recipe=int8",
    "convert": "convert {d} --to={new}",
    "export": "export {d} --to={new}",
    "neighbours": "neighbours {d} word",
    "index": "index build {d} --out={new}",
    "mix": "mix {d}",
    "compare": "compare {d}",
    "plan": "plan {d} --recipe=int8",
    "one step": "evaluate {d}@3",
    "warm start": "train --config={config} --workdir={new} --config.train.init_from={d}",
    "teacher": "train --config={config} --workdir={new} --config.distill.teacher={d}",
}
MESSAGES = {
    "absent": "absent holds no run (No such file or directory): train one first, or name another directory",
    "nothing": "nothing holds no run (it is empty): train one first, or name another directory",
    "file": "file holds no run (Not a directory): train one first, or name another directory",
    "other": "other holds no run (there is no config.json): train one first, or name another directory",
    "sweep": "sweep holds no run (there is no config.json): name one of the runs in it, such as {d}/a",
    "unfinished": "unfinished holds an unfinished compression: run its `hpnlp compress` command again",
    "checkpoint": "holds a Hugging Face checkpoint and no run: hpnlp convert {d} --to=runs/x makes one of it",
    "unconfigured": "unconfigured has metrics.jsonl and no config.json: restore it, the run cannot be read without it",
    "exported": "exported holds an exported model: name the run that it was made of",
    "begun": "begun has no tokenizer.json: put back the one that the run was trained with",
    "compressed": "compressed has no tokenizer.json: put back the one that the run was trained with",
}
# Messages of single commands, of which some read other directories too.
EXCEPTIONS = {
    **{
        ("convert", kind): MESSAGES[kind].replace("no run", "no run and no Hugging Face checkpoint")
        for kind in MESSAGES
    },
    ("convert", "checkpoint"): "hidden_size is missing: add it, or take the file",
    ("convert", "unfinished"): MESSAGES["unfinished"],
    ("convert", "unconfigured"): MESSAGES["unconfigured"],
    ("compare", "begun"): "begun has no report.json: finish the run first",
    ("compare", "unconfigured"): "unconfigured has no report.json: finish the run first",
    ("plan", "compressed"): "compressed is compressed already: plan the run that it was made of, with all stages",
    **{(name, "absent"): "is not a directory: name a run's workdir, or a" for name in ("warm start", "teacher")},
    **{(name, "file"): "is not a directory: name a run's workdir, or a" for name in ("warm start", "teacher")},
    **{(name, "checkpoint"): "hidden_size is missing: add it, or take the file" for name in ("warm start", "teacher")},
}
WRITERS = {
    "train": ("train --config={config} --workdir={d}", "which the run would overwrite: choose another workdir"),
    "sweep": ("sweep --config={sweep_file} --workdir={d}", "choose another directory, which holds the directories of"),
    "lra": ("lra --mixers=fnet --workdir={d}", "choose another directory, which holds the directories of all runs"),
    "compress": ("compress {begun} --to={d} --recipe=int8", "choose a new directory for the compressed model"),
    "convert": ("convert {begun} --to={d}", "use an empty directory"),
}


@pytest.fixture
def directories(tmp_path, monkeypatch):
    """Paths by name: a directory of each kind."""
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", ""))  # restored afterwards; plan sets it
    for name in (
        "nothing",
        "other",
        "sweep/a",
        "unfinished",
        "checkpoint",
        "unconfigured",
        "begun",
        "compressed",
        "exported",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "other" / "notes.txt").write_text("")
    (tmp_path / "unfinished" / contents.UNFINISHED_FILE).write_text("")
    (tmp_path / "checkpoint" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "exported" / contents.EXPORT_FILE).write_text("{}")
    (tmp_path / "compressed" / WEIGHTS_FILE).write_text("")
    for name in ("sweep/a", "begun", "compressed", "exported"):
        (tmp_path / name / "config.json").write_text(configs.to_json(tiny.make()))
    for name in ("unconfigured", "begun"):
        (tmp_path / name / "metrics.jsonl").write_text("{}\n")
    sweep_file = tmp_path / "sweep_file.py"
    sweep_file.write_text('from tests.tiny import get_config\ndef get_sweep():\n    return [{"train.seed": 1}]\n')
    names = {name: tmp_path / name for name in MESSAGES} | {"new": tmp_path / "new"}
    return names | {"config": tiny.EXPERIMENT, "sweep_file": sweep_file}


@pytest.mark.parametrize("command", READERS)
def test_commands_that_read_a_run_name_the_contents(run, directories, command):
    for kind, message in MESSAGES.items():
        if command == "compare" and kind in ("compressed", "exported"):
            continue  # listed beside runs
        paths = directories | {"d": directories[kind]}
        outcome = run(*READERS[command].format(**paths).split())
        assert outcome.code == 2 and outcome.err.startswith("hpnlp: ") and outcome.err.count("\n") == 1, (kind, outcome)
        assert EXCEPTIONS.get((command, kind), message).format(**paths) in outcome.err, (kind, outcome.err)
        assert not directories["new"].exists()


@pytest.mark.parametrize("command", WRITERS)
def test_commands_that_write_a_run_keep_other_contents(run, directories, command):
    argv, message = WRITERS[command]
    for kind in ("compressed", "unfinished", "checkpoint", "exported", "begun"):
        if (command, kind) in (("train", "begun"), ("compress", "unfinished")):
            continue  # the command goes on with it
        outcome = run(*argv.format(**directories, d=directories[kind]).split())
        held = contents.contents_of(directories[kind]).value
        assert outcome.code == 2 and outcome.err.count("\n") == 1, (kind, outcome)
        assert held in outcome.err and message in outcome.err, (kind, outcome.err)


@pytest.mark.parametrize("command", ["train", "sweep", "lra", "convert"])
def test_directories_that_another_process_writes_are_refused(run, directories, command):
    argv, _ = WRITERS[command]
    with contents.locked(directories["new"]):
        outcome = run(*argv.format(**directories, d=directories["new"]).split())
    assert (
        outcome.code == 75
        and f"another process writes to {directories['new']} (process {os.getpid()} on " in outcome.err
    ), outcome
