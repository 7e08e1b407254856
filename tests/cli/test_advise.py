"""`hpnlp advise`: the report of a run and of a Hugging Face checkpoint, from processes of their own, and errors."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from hpnlp.advise import report
from hpnlp.training.processes import signals
from tests.cli.test_convert import checkpoint, write_encoder  # noqa: F401  (fixture)
from tests.cli.test_predict import classifier  # noqa: F401  (fixture)

QUICK = ["--only=int8,bf16", "--budget=2min", "--batches=2"]


@pytest.mark.slow
def test_a_run_is_measured_verified_and_not_measured_twice(run, classifier, tmp_path):  # noqa: F811
    source = shutil.copytree(classifier, tmp_path / "run")
    outcome = run("advise", source, *QUICK)
    assert outcome.code == 0 and "labels of a held-out text of median length" in outcome.out, outcome
    content = json.loads((source / "advise" / report.FILES[1]).read_text())
    assert {finding["name"] for finding in content["findings"]} >= {"int8", "bf16"}
    assert not any(finding["error"] for finding in content["findings"]), content["findings"]
    assert (source / "advise" / report.FILES[0]).read_text().startswith("# Which technique for ")
    trials = sorted((source / "advise" / "trials").iterdir())
    assert run("advise", source, *QUICK).code == 0
    assert sorted((source / "advise" / "trials").iterdir()) == trials
    verified = run("advise", source, "--verify=int8")
    assert verified.code == 0 and "side the interval of the report" in verified.out, verified


@pytest.mark.slow
def test_a_checkpoint_is_converted_and_its_speed_measured_without_data(run, checkpoint, tmp_path):  # noqa: F811
    write_encoder(tmp_path / "bert", checkpoint, {"pooling": "first", "transform": "tanh"})
    outcome = run("advise", tmp_path / "bert", *QUICK, f"--out={tmp_path / 'advice'}")
    assert outcome.code == 0 and "has no examples: only times are measured" in outcome.out, outcome
    assert "quality cannot be compared" in outcome.out


@pytest.mark.slow
@pytest.mark.parametrize("module", ["trial", "arm"])
def test_a_process_ends_when_its_search_has_ended(module, tmp_path):
    program = f"import pathlib, hpnlp.advise.{module} as module; module.main(pathlib.Path({str(tmp_path)!r}))"
    os.mkfifo(tmp_path / f"{module}.json")  # which it would read forever
    environment = os.environ | {signals.PARENT: "1"}
    outcome = subprocess.run([sys.executable, "-c", program], env=environment, timeout=120, check=False)
    assert outcome.returncode == signals.INTERRUPTED


def test_wrong_flags_are_refused_before_anything_is_measured(run, classifier, tmp_path):  # noqa: F811
    for flags, message in {
        ("--budget=10",): "--budget=10: expected a time above 0, as 90s, 10min or 2h",
        ("--train=0min",): "--train=0min: expected a time above 0",
        ("--config=lm/bytes",): "RUN and --config both name a model",
        ("--only=int9",): "--only: unknown technique 'int9': did you mean 'int8'",
        ("--exclude=bf16,window(64,0)",): "--exclude: unknown technique 'window(64, 0)'",
        ("--verify=int8",): "run hpnlp advise without --verify first",
        ("--verify=int8", "--goal=disk"): "--goal=disk has no effect with --verify",
        ("--device=h300",): "did you mean 'h200'",
        ("--device=h200", "--keep=0.9"): "--keep=0.9 has no effect with --device",
        ("--device=h200", "--goal=disk"): "do not depend on the device",
        (f"--to={classifier}",): "already holds a run: choose a new directory",
    }.items():
        outcome = run("advise", classifier, *flags, f"--out={tmp_path / 'x'}")
        assert outcome.code == 2 and message in outcome.err, outcome
    (tmp_path / "empty").mkdir()
    outcome = run("advise", tmp_path / "empty")
    assert outcome.code == 2 and "holds no run and no Hugging Face checkpoint (it is empty)" in outcome.err, outcome
    outcome = run("advise", "--config=lm/bytes", "--goal=training")
    assert outcome.code == 2 and "add --out=DIR" in outcome.err, outcome


def test_estimates_for_a_device_need_no_accelerator(run, classifier, tmp_path):  # noqa: F811
    outcome = run("advise", classifier, "--device=h200", "--only=int8,bf16,model.dtype=bfloat16", f"--out={tmp_path}")
    assert outcome.code == 0 and "Estimates for one h200, which are no measurements" in outcome.out, outcome
    assert (tmp_path / "estimates-h200-latency.json").exists()
    training = ["--config=lm/bytes", "--device=v5e", "--goal=training", "--only=model.dtype=bfloat16"]
    outcome = run("advise", *training)
    assert outcome.code == 0 and "| model.dtype=bfloat16 |" in outcome.out, outcome
