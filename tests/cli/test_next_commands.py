"""The commands that a report proposes run as printed, with a path in place of that of other data."""

import re
import shlex

import pytest

from tests import tiny

pytestmark = pytest.mark.slow  # several runs each


def commands_of(report):
    """Arguments of the commands under "Next:" in a report."""
    spans = re.findall(r"^- [^`\n]+: (`+)(hpnlp .*)\1$", report.partition("\nNext:\n")[2], re.MULTILINE)
    return [shlex.split(command)[1:] for _, command in spans]


def check(run, *argv):
    """Trains, and runs the proposed commands, the last one first. Yields each command and its outcome."""
    outcome = run("train", *argv, "--config.train.steps=2", "--config.data.heldout_bytes=500")
    assert outcome.code == 0, outcome
    commands = commands_of(outcome.out)
    assert [command[0] for command in commands] == ["generate", "train", "train", "compress", "compare"]
    path = next(flag for flag in argv if flag.startswith("--config.data.path="))
    for command in [commands[-1], *commands]:
        if command[0] == "compress" and "--config.train.sample=8" not in argv:
            continue  # compressed once, since it takes long
        outcome = run(*(path if argument == "--data.path=YOUR_FILES" else argument for argument in command))
        assert outcome.code == 0, (command, outcome)
        yield command, outcome


def test_commands_run_for_weighted_data_and_a_directory_with_spaces(run, text, tmp_path, monkeypatch):  # noqa: F811
    """Also with a vocabulary that lacks the prompt, and learned positions."""
    monkeypatch.chdir(tmp_path)
    paths = f"{text}/0*.txt,{text}/1*.txt"
    fields = [f"--config.data.path={paths}", "--config.data.weights=(1,3)", "--config.data.tokenizer=words(40)"]
    fields += ["--config.model.position=learned", "--config.train.sample=8"]
    outcomes = dict(
        (shlex.join(command), outcome.out)
        for command, outcome in check(run, f"--config={tiny.EXPERIMENT}", "--workdir=my runs/a 'b'", *fields)
    )
    assert any(out.startswith("starting from my runs/a 'b', step 2, with its tokenizer: ") for out in outcomes.values())
    assert any("going on from step 2: " in out and "step 4/4" in out for out in outcomes.values())
    assert (tmp_path / "my runs" / "a 'b'-tuned" / "report.json").exists()


def test_commands_run_for_a_fine_tuned_run_in_the_current_directory(run, tmp_path, monkeypatch):
    """With a config that takes an argument, and --workdir=. as the workdir."""
    experiment = tiny.EXPERIMENT.replace("tests/tiny.py", "experiments/lm/finetune.py")
    assert (
        run("train", f"--config={tiny.EXPERIMENT}", f"--workdir={tmp_path / 'a'}", "--config.train.steps=2").code == 0
    )
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    fields = [
        f"--config.data.path={tiny.get_config().data.path}",
        "--config.data.seq_len=16",
        "--config.train.sample=0",
    ]
    seen = [out.out for _, out in check(run, f"--config={experiment}:../a", "--workdir=.", *fields)]
    assert any(out.startswith("starting from ., step 2, with its tokenizer: ") for out in seen)
    assert (tmp_path / "b-tuned" / "report.json").exists()
