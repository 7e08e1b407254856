"""`hpnlp launch`: invalid flags, manifests, and real processes that are killed."""

import os
from pathlib import Path

import pytest

from hpnlp.jobs.launch import supervisor
from tests import tiny

ROOT = Path(__file__).parents[2]
TRAIN = ["--", "train", f"--config={tiny.EXPERIMENT}"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--processes=2"], "no command to start: write it after --, as in hpnlp launch --processes=2 -- train"),
        (["--processes=2", "--", "sweep"], "launch starts hpnlp train, and was given 'sweep'"),
        ([*TRAIN, "--workdir={d}/x"], "--processes is required, for example --processes=2"),
        (["--processes=0", *TRAIN, "--workdir={d}/x"], "flag --processes=0: "),
        (["--processes=2", *TRAIN], "launch needs the directory of the run: add --workdir=DIR after --"),
        (
            ["--processes=2", "--min_processes=3", *TRAIN, "--workdir={d}/x"],
            "--min_processes=3 is more than --processes=2",
        ),
        (["--processes=2", "--hosts=3", *TRAIN, "--workdir={d}/x"], "--hosts=3 has no effect without --write"),
        (["--write=slurm", *TRAIN, "--workdir={d}/x"], "--write=slurm needs the number of hosts: add --hosts=4"),
        (
            ["--write=slurm", "--hosts=2", "--processes=2", *TRAIN, "--workdir={d}/x"],
            "--processes=2 has no effect with --write",
        ),
        (["--write=ray", *TRAIN, "--workdir={d}/x"], "flag --write=ray: "),
        (
            ["--processes=2", *TRAIN, "--workdir={d}/file"],
            "cannot write to {d}/file (File exists): choose another --workdir",
        ),
        (["--proceses=2", *TRAIN, "--workdir={d}/x"], "unknown flag --proceses: did you mean --processes?"),
    ],
)
def test_invalid_flags_raise(run, tmp_path, argv, message):
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
