"""`hpnlp plan`; its numbers are tested in tests/planner."""

import os
import re

import matplotlib.image
import pytest

from hpnlp.planner import search

FIELDS = (
    "--config.model.layers=2",
    "--config.model.dim=32",
    "--config.model.heads=2",
    "--config.model.unroll=1",
    "--config.data.path=nowhere",
    "--config.data.seq_len=32",
    "--config.data.batch_size=64",
    "--config.train.eval_stride=0",
)


@pytest.fixture
def plan(run, tmp_path, monkeypatch):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):  # restored afterwards; the command sets them
        monkeypatch.setenv(name, os.environ.get(name, ""))
    out = tmp_path / "plan.png"
    config = "--config=experiments/lm/bytes.py"

    def call(*argv):
        drawn = [] if any(flag.startswith("--recipe") for flag in argv) else [f"--out={out}"]
        return run("plan", config, *FIELDS, *drawn, *argv)

    return call, out


def test_plan_for_many_devices_is_printed_and_drawn(plan):
    call, out = plan
    outcome = call("--devices=64", "--device=v5e", "--config.plan.name=zero3")
    assert outcome.code == 0 and outcome.err == ""
    assert "64 x v5e: fsdp 64, zero 3" in outcome.out and "it fits" in outcome.out
    assert "all-gather over fsdp" in outcome.out and "MFU" in outcome.out
    assert matplotlib.image.imread(out).size


def test_smallest_change_is_printed_if_the_step_does_not_fit(plan):
    call, _ = plan
    large = ("--config.model.layers=32", "--config.model.dim=4096", "--config.model.heads=32")
    outcome = call(*large, "--devices=64", "--device=h100", "--config.plan.name=data")
    assert outcome.code == 0 and "IT DOES NOT FIT" in outcome.out
    assert "It fits with --plan.data=1 --plan.fsdp=64 --plan.zero=" in outcome.out
    assert all(line.endswith("changes tried") for line in outcome.err.splitlines())


def test_sizes_of_a_recipe_are_printed_without_weights(plan, run):
    call, _ = plan
    large = (
        "--config.model.layers=32",
        "--config.model.dim=4096",
        "--config.model.heads=32",
        "--config.model.mlp_dim=16384",
    )
    outcome = call(*large, "--recipe=heads(0.5),bf16")
    assert outcome.code == 0 and outcome.err == ""
    stages = [line.split()[0] for line in outcome.out.splitlines() if line]
    assert stages == ["stage", "original", "heads(0.5)", "bf16"]
    assert "1/2" in outcome.out.splitlines()[3]
    assert "as much memory" in call("--recipe=magnitude(0.5)").out.splitlines()[2]
    both = run("plan", "--from=nowhere", "--config=experiments/lm/bytes.py", "--recipe=int8")
    assert both.code == 2 and "leave out --config" in both.err


def test_settings_that_the_layers_work_with_are_printed(run):
    argv = ("plan", "--config=experiments/lm/bytes.py", *FIELDS, "--compatible")
    outcome = run(*argv, "--config.model.residual=reversible")
    assert outcome.code == 0 and outcome.err == ""
    lines = dict(re.split("  +", line, maxsplit=1) for line in outcome.out.splitlines())
    assert lines["--plan.tensor=2"] == "works"
    assert lines["--plan.remat=full"].startswith("plan.remat='full': reversible layers keep nothing that could be")
    outcome = run(*argv, "--devices=2")
    assert outcome.code == 2 and "--devices=2" in outcome.err and "--compatible" in outcome.err


@pytest.mark.slow
def test_a_directory_gets_a_picture_of_its_own_name(plan, tmp_path):
    call, _ = plan
    (tmp_path / "pictures").mkdir()
    assert call("--devices=8", f"--out={tmp_path / 'pictures'}").code == 0
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["plan.png"]
    assert not (tmp_path / "pictures.png").exists()


@pytest.mark.slow
def test_search_and_compiled_step_are_printed(plan):
    call, _ = plan
    outcome = call("--devices=2", "--search", "--depth=compiled")
    assert outcome.code == 0
    assert re.search(r"the first: --plan.name=(data|zero\d|tensor|pipeline|sequence)\b", outcome.out)
    assert "False" not in outcome.out and "microbatches=0" not in outcome.out
    counted = [line.split() for line in outcome.err.splitlines() if line.endswith("plans tried")]
    assert counted[-1][0] == counted[-1][2] and outcome.err.endswith("compiling for 2 devices\n")
    assert "communication, bytes" in outcome.out and "Compiled in" in outcome.out


def test_search_continues_after_an_invalid_plan(plan, monkeypatch):
    call, out = plan
    monkeypatch.setattr(search, "REMATS", ("none",))
    outcome = call("--devices=1", "--search", "--config.model.layers=1", "--config.plan.data=3")
    assert outcome.code == 0
    first, ranking = outcome.out.split("\n", 1)
    assert first.startswith("The plan of the config is not valid: plan (data=3) does not divide 1 device")
    assert "one device" in ranking and "the first: --plan.name=" in ranking
    assert matplotlib.image.imread(out).size


def test_invalid_arguments_raise(plan):
    for flags, message in (
        (("--device=h300",), "unknown --device 'h300': did you mean"),
        (("--devices=0",), "--devices"),
        (("--out=",), "--out is empty: use a file, for example plan.png, or a directory"),
        (("--depth=deep",), "--depth"),
        (("--devices=7", "--config.data.batch_size=64"), "data.batch_size=64 does not split into 7 devices' sequences"),
        (("--config.plan.data=3",), "choose sizes whose product is 8, or set plan.data to -1\n"),
        (("--out=nowhere/plan.png",), "--out=nowhere/plan.png cannot be written: use a file in an existing directory"),
        (("--out=plan.gif",), "--out=plan.gif: unknown image format; use .png"),
        (("--recipe=int8", "--devices=4"), "--recipe: the sizes of a model are printed, not those of a training step"),
        (("--depth=tpu", "--device=h100"), "--depth=tpu compiles for --device=v5e or v5p, not for h100"),
    ):
        outcome = plan[0](*flags)
        assert outcome.code == 2 and message in outcome.err and outcome.err.count("\n") == 1
