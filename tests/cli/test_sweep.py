"""`hpnlp sweep`: every member trains, whatever becomes of the others, and the same command goes on."""

import os
import signal
import time

import pytest

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
    """`sweep(members)` -> the arguments of a sweep of them, in `tmp_path / "runs"`."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tiny.Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    # One device: members are processes, and start quicker. The last flag counts.
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1")

    def write(members, argument=""):
        (tmp_path / "sweep.py").write_text(SWEEP.replace("{members}", repr(members)))
        return "sweep", f"--config={tmp_path}/sweep.py{argument}", f"--workdir={tmp_path}/runs"

    return write


def test_failed_members_do_not_stop_the_others(sweep, run, tmp_path):
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "report.json").write_text("{}")  # of another run, which is none of ours
    command = sweep([{"model.heads": 3}, {"train.seed": 1}], argument=":2")
    outcome = run(*command)
    assert outcome.code == 2
    assert "1 of 2 members did not finish (00-heads=3): run again" in outcome.err
    assert "[1/2] 00-heads=3: not finished (exit code 2)" in outcome.out
    table = [line for line in outcome.out.splitlines() if line.startswith("| ")]
    assert len(table) == 3 and "01-seed=1" in table[-1]
    assert (tmp_path / "runs" / "compare.png").read_bytes().startswith(b"\x89PNG")

    # The same command again: what is finished stays as it is.
    before = (tmp_path / "runs" / "01-seed=1" / "report.json").stat().st_mtime_ns
    outcome = run(*command)
    assert outcome.code == 2 and "[2/2] 01-seed=1: finished before" in outcome.out
    assert (tmp_path / "runs" / "01-seed=1" / "report.json").stat().st_mtime_ns == before

    # A finished member of another config is refused, and not taken for one of this command.
    finished = (tmp_path / "runs" / "01-seed=1" / "report.json").read_text()
    outcome = run(*sweep([{"model.heads": 3}, {"train.seed": 1}], argument=":3"))
    assert outcome.code == 2 and "(00-heads=3, 01-seed=1): run again" in outcome.err and "| " not in outcome.out
    assert (tmp_path / "runs" / "01-seed=1" / "report.json").read_text() == finished


@pytest.mark.slow
def test_signal_saves_the_member_and_ends_the_list(sweep, start, finish, tmp_path):
    command = [*sweep([{"train.seed": 1}, {"train.seed": 2}]), "--config.train.steps=1000000"]
    process = start(*command, start_new_session=True)
    lines = tmp_path / "runs" / "00-seed=1" / "metrics.jsonl"
    while not (lines.exists() and lines.stat().st_size):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    outcome = finish(process)
    assert outcome.code == 2
    assert outcome.err == "hpnlp: SIGINT: stopped in 00-seed=1; the same command goes on from there\n"
    assert "SIGTERM: saved step" in outcome.out and "[2/2]" not in outcome.out
    assert any(path.name.isdigit() for path in (lines.parent / "checkpoints").iterdir())


@pytest.mark.parametrize("members", [None, [], {}, "seeds", [1], [["train.seed"]]])
def test_what_is_no_sweep(sweep, run, members):
    outcome = run(*sweep(members))
    assert (outcome.code, outcome.out) == (2, "") and outcome.err.count("\n") == 1
    assert 'return a list as [{"model.dim": 64}, ...]' in outcome.err
