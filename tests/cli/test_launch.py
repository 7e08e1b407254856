"""`hpnlp launch`: invalid flags, manifests, and real processes that are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpnlp.jobs.launch import supervisor
from tests import tiny

ROOT = Path(__file__).parents[2]
TRAIN = ["--", "train", f"--config={tiny.EXPERIMENT}"]


def test_invalid_flags_raise(run, tmp_path):
    for argv, message in (
        ([*TRAIN, "--workdir={d}/x"], "--processes is required, for example --processes=2"),
        (["--processes=0", *TRAIN, "--workdir={d}/x"], "flag --processes=0: "),
        (["--processes=1000", *TRAIN, "--workdir={d}/x"], "--processes=1000 are too many for this machine: expected"),
        (["--processes=2", "train", "--workdir={d}/x"], "write -- before train, as in hpnlp launch --processes=2 -- "),
        (["--processes=2", "--min_processes=3", *TRAIN, "--workdir={d}/x"], "--min_processes=3 is more than"),
        (["--processes=2", "--hosts=3", *TRAIN, "--workdir={d}/x"], "--hosts=3 has no effect without --write"),
        (["--write=slurm", *TRAIN, "--workdir={d}/x"], "--write=slurm needs the number of hosts: add --hosts=4"),
        (["--write=slurm", "--hosts=2", "--processes=2", *TRAIN, "--workdir={d}/x"], "--processes=2 has no effect"),
        (["--write=ray", *TRAIN, "--workdir={d}/x"], "flag --write=ray: "),
        (["--processes=2", *TRAIN, "--workdir={d}/file"], "cannot write to {d}/file (File exists): choose another"),
    ):
        (tmp_path / "file").touch()
        outcome = run("launch", *(argument.replace("{d}", str(tmp_path)) for argument in argv))
        assert outcome.code == 2 and outcome.err.startswith(f"hpnlp: {message.replace('{d}', str(tmp_path))}"), outcome
        assert outcome.err.count("\n") == 1 and not (tmp_path / "x").exists()


def test_second_supervisor_is_refused(run, tmp_path):
    with supervisor.locked(tmp_path):
        outcome = run("launch", "--processes=2", *TRAIN, f"--workdir={tmp_path}")
    assert outcome.code == 75
    assert outcome.err.startswith(f"hpnlp: {tmp_path} is supervised already, by process {os.getpid()} on ")


def test_manifest_is_printed_and_nothing_is_started(run, tmp_path):
    outcome = run("launch", "--write=slurm", "--hosts=4", "--max_restarts=3", *TRAIN, f"--workdir={tmp_path}/x")
    assert outcome.code == 0 and not outcome.err
    assert "#SBATCH --nodes=4 " in outcome.out and '"$restarts" -lt 3' in outcome.out
    assert f"srun --kill-on-bad-exit=1 hpnlp train --config={tiny.EXPERIMENT} --workdir={tmp_path}/x" in outcome.out


def test_flags_of_launch_in_a_sweep_need_processes(run, tmp_path):
    (tmp_path / "sweep.py").write_text("from tests.tiny import get_config\ndef get_sweep():\n  return [{}]\n")
    outcome = run("sweep", f"--config={tmp_path}/sweep.py", f"--workdir={tmp_path}/x", "--max_restarts=2")
    assert outcome.code == 2 and "--max_restarts=2 has no effect without --processes: add it" in outcome.err


def lines_of(workdir):
    path = workdir / "metrics.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def events_of(workdir):
    return [json.loads(line) for line in (workdir / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_killed_process_is_restarted_without_a_change_of_losses(tmp_path):
    """The undisturbed run is the member of a sweep, which trains it under launch too."""
    flags = "--xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {flags}", "NPROC": "8", "JAX_PLATFORMS": "cpu"}
    hpnlp = [sys.executable, "-m", "hpnlp"]
    (tmp_path / "one.py").write_text("from tests.tiny import get_config\ndef get_sweep():\n    return [{}]\n")
    fields = ["--train.log_every=1", "--plan.name=data", "--train.steps=30"]
    sweep = ["sweep", f"--config={tmp_path / 'one.py'}", f"--workdir={tmp_path / 'sweep'}", "--processes=2", *fields]
    subprocess.run([*hpnlp, *sweep], cwd=ROOT, env=environment, check=True, capture_output=True, timeout=400)

    workdir = tmp_path / "run"
    train = [*TRAIN, f"--workdir={workdir}", *fields]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([*hpnlp, "launch", "--processes=2", *train], cwd=ROOT, env=environment, **output)
    deadline = time.monotonic() + 300
    while len(lines_of(workdir)) < 8:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    pids = events_of(workdir)[0]["pids"]
    os.kill(pids[1], signal.SIGKILL)
    shown, _ = process.communicate(timeout=400)
    assert process.returncode == 0, shown
    assert lines_of(workdir) == lines_of(tmp_path / "sweep" / "base")
    restart = next(event for event in events_of(workdir) if event["event"] == "restart")
    assert (restart["code"], restart["process"]) == (137, 1) and restart["steps_lost"] <= 5 + 1
    assert "launch: process 1 ended with SIGKILL at step" in shown and "going on from step" in shown
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
