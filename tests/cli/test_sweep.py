"""`hpnlp sweep`: members are validated first, train independently, and are resumed by the same command."""

import os
import signal
import subprocess
import time

import pytest

from hpnlp.cli import members
from hpnlp.training.config import resolve
from hpnlp.training.config_file import write_config
from tests import tiny

SWEEP = """
from tests.tiny import get_config as tiny

def get_config(steps="4"):
    config = tiny()
    config.train.update(steps=int(steps), log_every=1)
    return config

def get_sweep():
    return {members}
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """`sweep(members)` writes an experiment and returns the arguments of its sweep, in `tmp_path / "runs"`."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tiny.Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    # Members are processes, which start faster with one device. The last flag counts.
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1")

    def write(members, argument=""):
        (tmp_path / "sweep.py").write_text(SWEEP.replace("{members}", repr(members)))
        return "sweep", f"--config={tmp_path}/sweep.py{argument}", f"--workdir={tmp_path}/runs"

    return write


def test_failed_members_do_not_stop_the_others(sweep, run, members_here, tmp_path):
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "report.json").write_text("{}")  # another run, which is not a member
    command = sweep([{"data.seq_len": 100000}, {"train.seed": 1}], argument=":2")
    outcome = run(*command)
    assert outcome.code == 2
    assert outcome.err.endswith(
        "\nhpnlp: 1 of 2 members did not finish: seq_len=100000 (see the errors above, and fix them first)\n"
    )
    assert "[1/2] seq_len=100000: not finished (exit code 2)" in outcome.out
    table = (tmp_path / "runs" / "compare.md").read_text()
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    assert table in outcome.out and len(lines) == 3 and "seed=1" in lines[-1]
    assert (tmp_path / "runs" / "compare.png").read_bytes().startswith(b"\x89PNG")

    # The same command skips finished members.
    before = (tmp_path / "runs" / "seed=1" / "report.json").stat().st_mtime_ns
    outcome = run(*command)
    assert outcome.code == 2 and "[2/2] seed=1: finished before" in outcome.out
    assert (tmp_path / "runs" / "seed=1" / "report.json").stat().st_mtime_ns == before

    # The directory of the sweep's workdir stands for its finished members.
    (tmp_path / "runs" / "other" / "report.json").unlink()
    outcome = run("compare", str(tmp_path), f"--out={tmp_path}/all.png")
    assert outcome.code == 0 and "seed=1" in outcome.out

    # A directory with a run of another config is an error, before any member is started.
    finished = (tmp_path / "runs" / "seed=1" / "report.json").read_text()
    outcome = run(*sweep([{"data.seq_len": 100000}, {"train.seed": 1}], argument=":3"))
    assert outcome.code == 2 and "seed=1 holds a run of another config (train.steps: 2 -> 3)" in outcome.err
    assert not outcome.out
    assert (tmp_path / "runs" / "seed=1" / "report.json").read_text() == finished


def test_folds_train_resume_and_are_one_row(sweep, run, members_here, tmp_path):
    command = [*sweep([{"train.seed": 1}], argument=":1"), "--folds=2"]
    (tmp_path / "sweep.py").write_text((tmp_path / "sweep.py").read_text().partition("def get_sweep")[0])
    workdir = tmp_path / "runs"
    outcome = run(*command)
    assert outcome.code == 0, outcome.err
    assert sorted(path.parent.name for path in workdir.glob("*/report.json")) == ["fold=1", "fold=2"]
    (line,) = [line for line in outcome.out.splitlines() if line.startswith(f"| {workdir} |")]
    assert "| 2 of 2 |" in line and (workdir / "compare.md").read_text() in outcome.out
    (workdir / "fold=2" / "report.json").unlink()
    outcome = run(*command)
    assert outcome.code == 0 and "[1/2] fold=1: finished before" in outcome.out and "[2/2] fold=2\n" in outcome.out
    outcome = run("compare", workdir, "--each_fold", f"--out={tmp_path}/all.png")
    assert outcome.code == 0 and "fold=2 |" in outcome.out and "| fold 2 |" in outcome.out

    # What one fold holds out is training text of the other.
    outcome = run("evaluate", f"{workdir}@best1")
    assert outcome.code == 2 and "fold=1 holds out part 1 of 2 of data.path=" in outcome.err
    assert "fold=2 part 2 of 2: each was trained on what the other holds out" in outcome.err
    trained = os.environ["HPNLP_TEST_TEXT"]
    outcome = run("evaluate", f"{workdir}@best1", f"--data.heldout_path={trained}/00.txt")
    assert outcome.code == 2 and "00.txt is one of the files of data.path=" in outcome.err
    (tmp_path / "other.txt").write_text("the quick brown fox\n" * 20)
    outcome = run("evaluate", f"{workdir}@best1", f"--data.heldout_path={tmp_path}/other.txt")
    assert outcome.code == 0 and "fold=1, step 1; " in outcome.out and "bytes" in outcome.out, outcome.err
    outcome = run(*command, f"--train.init_from={workdir}/fold=2")
    assert outcome.code == 2 and "fold=2 holds out part 2 of 2 of data.path=" in outcome.err
    assert "and this run part 1 of 2, so that it would be scored on what that model was trained on" in outcome.err


def test_invalid_members_raise_before_the_first_one_trains(sweep, run, tmp_path):
    for overrides, argv, message in (
        ([{"train.seed": 1}, {"data.fold": 3}], ["--folds=3"], "--folds=3, --data.fold=3: --folds sets data.folds"),
        ([{"train.seed": 1}], ["--folds=3", "--data.heldout_bytes=5"], "data.heldout_bytes=5, data.folds=3: all"),
        ([{"train.seed": 1}], ["--folds=3", "--data.heldout=0.5"], "data.heldout=0.5 has no effect, because one"),
        ([{"train.seed": 1}], ["--folds=99"], "data.folds=99: data.path="),
        ([{"train.seed": 1}, {"model.dims": 3}], [], "member dims=3 of get_sweep(): unknown config field 'model.dims'"),
        ([{"train.seed": 1}, {"model.heads": 3}], [], "member heads=3 of get_sweep(): model.dim=16 is not a multiple"),
        ([{"train.seed": 1}, {"model.dim": 16}, {"train.seed": 0}], [], "members dim=16 and seed=0 of get_sweep()"),
        ([{"train.seed": 1}], ["--config.train.seed=2"], "--train.seed=2: member seed=1 of get_sweep() sets"),
        ([{"train.seed": 1}, {"data.path": "/no/such"}], [], "member path=_no_such of get_sweep()"),
        ([{"task": "lm"}, {"task": "masked_lm"}], [], "members of get_sweep() have different tasks"),
        ([{"optimizer.momentum": 0.5}], [], "member momentum=0.5: optimizer.momentum=0.5 has no effect, because"),
        ([{"data.path": "a\0b"}], [], "member path=a_b of get_sweep(): a value has a NUL"),
    ):
        outcome = run(*sweep(overrides), *argv)
        assert (outcome.code, outcome.out) == (2, "") and outcome.err.count("\n") == 1
        assert message in outcome.err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("workdir", "message"),
    [("[proj]/runs", "checkpoints under a path with '[' could not be read back"), ("file/runs", "cannot write to ")],
)
def test_invalid_workdirs_raise_before_the_first_member_trains(sweep, run, tmp_path, workdir, message):
    (tmp_path / "file").write_text("")
    outcome = run(*sweep([{"train.seed": 1}])[:-1], f"--workdir={tmp_path / workdir}")
    assert (outcome.code, outcome.out) == (2, "") and outcome.err.count("\n") == 1
    assert message in outcome.err and not (tmp_path / "[proj]").exists()


def test_names_of_members_are_their_fields():
    fields = [{}, {"model.mixer": "window(8,0)"}, {"model.mixer": "window(8.0)"}, {"data.a": 1, "model.b": "x/y"}]
    assert members.name_members(fields) == ["base", "mixer=window_8,0", "mixer=window_8.0", "a=1,b=x_y"]
    assert members.name_members([{"model.mixer": "window(8, 0), full"}]) == ["mixer=window_8,0_,full"]
    collisions = [{"model.mixer": spec} for spec in ("conv(2)", "conv*2", "conv_2", "m" * 99, "m" * 98)]
    names = members.name_members(collisions)
    assert names[:3] == ["mixer=conv_2", "mixer=conv_2-2", "mixer=conv_2-3"] and len(set(names)) == 5
    assert members.name_members([{"a": 3}, {"a": 1}])[1] == members.name_members([{"a": 1}])[0] == "a=1"


def test_runs_with_numbered_names_are_found_by_their_config(tmp_path):
    def member(seed):
        config = tiny.get_config()
        config.train.seed = seed
        return members.Member([], resolve(config))

    def begin(name, seed):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, member(seed).config)
        (tmp_path / name / "metrics.jsonl").write_text("{}\n")

    begin("00-seed=1", 1)
    begin("seed=2", 9)  # an error of check_directories
    begin("01-seed=2", 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("no config")
    (tmp_path / "other" / "metrics.jsonl").write_text("{}\n")
    found = members.in_old_directories({f"seed={seed}": member(seed) for seed in (1, 2, 3)}, tmp_path)
    assert list(found) == ["00-seed=1", "seed=2", "seed=3"]
    assert [member.config.train.seed for member in found.values()] == [1, 2, 3]


def wait_for_first_step(process, lines):
    while not (lines.exists() and lines.stat().st_size):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def saved_steps(directory):
    return [path.name for path in (directory / "checkpoints").iterdir() if path.name.isdigit()]


def test_signals_are_passed_on_and_a_second_ctrl_c_is_too(monkeypatch):
    sent = []

    class Member:
        send_signal = staticmethod(sent.append)

        def __init__(self, *args, **options):
            pass

        def wait(self):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            return 130

    monkeypatch.setattr(subprocess, "Popen", Member)
    assert members.Process().run([]) == (130, "SIGINT")
    assert sent == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]


@pytest.mark.slow
def test_signal_to_the_process_group_saves_the_member_and_ends_the_sweep(sweep, start, finish, tmp_path):
    """The signals that stop a process are those of `test_signals`."""
    command = [*sweep([{"train.seed": 1}, {"train.seed": 2}]), "--config.train.steps=1000000"]
    process = start(*command, start_new_session=True)
    wait_for_first_step(process, tmp_path / "runs" / "seed=1" / "metrics.jsonl")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does; the sweep passes the signal on too
    outcome = finish(process)
    assert outcome.code == 130
    lines = outcome.err.splitlines()
    assert (
        len(lines) == 2 and ": saving after this step; Ctrl-C again, after 2 s, ends the run without saving" in lines[0]
    )
    assert lines[1] == "hpnlp: SIGINT: stopped in seed=1; the same command resumes there"
    assert ": saved step" in outcome.out and "[2/2]" not in outcome.out
    assert saved_steps(tmp_path / "runs" / "seed=1")


@pytest.mark.slow
def test_member_saves_and_exits_when_the_sweep_is_killed(sweep, start, tmp_path):
    process = start(*sweep([{"train.seed": 1}]), "--config.train.steps=1000000")
    member = tmp_path / "runs" / "seed=1"
    wait_for_first_step(process, member / "metrics.jsonl")
    process.kill()
    out, err = process.communicate(timeout=60)  # the member holds the pipes until it exits
    assert process.returncode == -signal.SIGKILL
    assert "SIGTERM: saved step" in out and "SIGTERM: saving after this step" in err
    assert saved_steps(member)


def test_get_sweep_must_be_a_function(sweep, run, tmp_path):
    command = sweep([{"train.seed": 1}])
    (tmp_path / "sweep.py").write_text(
        (tmp_path / "sweep.py").read_text().replace("def get_sweep", "get_sweep = 3\ndef f")
    )
    outcome = run(*command)
    assert (outcome.code, outcome.out) == (2, "") and outcome.err.count("\n") == 1
    assert "get_sweep is not a function: define one that returns a list of overrides" in outcome.err


@pytest.mark.parametrize("members", [None, [], {}, "seeds", [1], [["train.seed"]]])
def test_invalid_results_of_get_sweep_raise(sweep, run, members):
    outcome = run(*sweep(members))
    assert (outcome.code, outcome.out) == (2, "") and outcome.err.count("\n") == 1
    assert 'return a list such as [{"model.dim": 64}, ...]' in outcome.err
