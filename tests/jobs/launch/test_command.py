"""The command after --, the GPUs of a process, and manifests."""

import subprocess
from pathlib import Path

import pytest

from hpnlp.jobs.launch import command, devices, manifests
from tests.messages import raises

ARGUMENTS = [
    "train",
    "--config=lm/bytes",
    "--workdir=runs/My Run",
    "--data.path=a b's.txt",
    "--train.steps=9",
    "--debug",
]
GOLDEN = Path(__file__).parent / "golden"


def test_command_of_each_process_has_its_place():
    parsed = command.parse([*ARGUMENTS, "--wait=20"])
    assert (parsed.workdir, parsed.wait) == (Path("runs/My Run"), 20)
    first, second = (parsed.process_command(process, 2, 1234)[4:] for process in range(2))
    assert first[:5] == ARGUMENTS[1:]
    assert second[6:] == ["--coordinator=127.0.0.1:1234", "--processes=2", "--process=1", "--heartbeat=15"]
    assert "--process=0" in first
    assert parsed.process_command(0, 1, 1234)[4:] == [*ARGUMENTS[1:], "--wait=20"]
    own = command.parse([*ARGUMENTS, "--heartbeat=50"]).process_command(0, 2, 1234)
    assert [argument for argument in own if "heartbeat" in argument] == ["--heartbeat=50"]
    assert parsed.config_arguments() == ["--config=lm/bytes", "--data.path=a b's.txt", "--train.steps=9"]
    apart = command.parse(["train", "--config", "lm/bytes", "--workdir", "x", "--train.steps=9"])
    assert apart.workdir == Path("x") and apart.config_arguments() == ["--config=lm/bytes", "--train.steps=9"]


def test_invalid_commands_raise():
    for arguments, message in (
        ([], "was given 'nothing': write hpnlp launch --processes=2 -- train"),
        (["sweep"], "launch starts hpnlp train, and was given 'sweep'"),
        (["train"], "launch needs the directory of the run: add --workdir=DIR after --"),
        (["train", "--config=lm/bytes"], "launch needs the directory of the run: add --workdir=DIR after --"),
        (["train", "--workdir=x", "--processes=2"], "--processes after --: it is a flag of launch: write it before --"),
        (["train", "--workdir=x", "--process=2"], "--process after --: launch numbers the processes"),
        (["train", "--workdir=x", "--coordinator=a:1"], "--coordinator after --: launch chooses it"),
        (["train", "--workdir=x", "--seeds=0,1"], "--seeds after --: several seeds train in one process"),
        (["train", "--workdir=x", "--wait=long"], "--wait=long: expected a whole number"),
    ):
        raises(message, command.parse, arguments)


def test_gpus_are_divided(monkeypatch):
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: [f"/dev/nvidia{number}" for number in (10, 1, 0, 2)])
    gpus = devices.visible_gpus({})
    assert gpus == ["0", "1", "2", "10"]
    assert devices.visible_gpus({"JAX_PLATFORMS": "cpu"}) == [] == devices.visible_gpus({"CUDA_VISIBLE_DEVICES": ""})
    assert devices.visible_gpus({"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": "3,1"}) == ["3", "1"]
    assert devices.share(gpus, 1, 2) == {"CUDA_VISIBLE_DEVICES": "2,10"}
    assert devices.share([], 1, 2) == {}
    raises("--processes=3 does not divide the 4 GPUs 0,1,2,10: choose a divisor", devices.share, gpus, 0, 3)


def test_processes_on_gpus_are_listed():
    def smi(*arguments, **options):
        return subprocess.CompletedProcess(arguments, 0, "12\n34\n[N/A]\n")

    def absent(*arguments, **options):
        raise FileNotFoundError

    assert devices.gpu_processes(smi) == {12, 34} and devices.gpu_processes(absent) == set()


def test_simulated_devices_are_counted():
    for variables, count in (
        ({}, 0),
        ({"XLA_FLAGS": "--a --xla_force_host_platform_device_count=4 --b"}, 4),
        ({"JAX_NUM_CPU_DEVICES": "3"}, 3),
    ):
        assert devices.simulated(variables) == count


@pytest.mark.parametrize(("engine", "file"), [("slurm", "slurm.sh"), ("jobset", "jobset.yaml"), ("xpk", "xpk.sh")])
def test_manifests_match_golden_files(engine, file):
    text = manifests.WRITERS[engine](command.parse(ARGUMENTS), 4, 10)
    assert text == (GOLDEN / file).read_text()
    if file.endswith(".sh"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("restarts", "code", "requeues"),
    [("0", 75, True), ("9", 137, True), ("10", 75, False), ("0", 2, False), ("0", 1, False)],
)
def test_slurm_script_requeues_by_exit_code(tmp_path, restarts, code, requeues):
    """srun and scontrol are stand-ins."""
    for name, body in (("srun", f"echo $HPNLP_ATTEMPT; exit {code}"), ("scontrol", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "SLURM_RESTART_COUNT": restarts,
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "5",
        "SLURM_ARRAY_TASK_ID": "2",
    }
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **variables}
    script = manifests.slurm(command.parse(ARGUMENTS), 4, 10)
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout.splitlines() == [f"{restarts}:5_2", *["requeue 5_2"] * requeues]


def test_jobset_is_valid_yaml_whose_processes_find_each_other():
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load(manifests.jobset(command.parse(ARGUMENTS), 4, 10))["spec"]
    (job,) = spec["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][:5] == ["hpnlp", *ARGUMENTS[:4]]
    assert container["command"][-3:] == [
        "--coordinator=my-run-workers-0-0.my-run:8476",
        "--processes=4",
        "--process=$(JOB_COMPLETION_INDEX)",
    ]
    assert spec["failurePolicy"]["maxRestarts"] == 10
    single = yaml.safe_load(manifests.jobset(command.parse(ARGUMENTS), 1, 0))["spec"]["replicatedJobs"][0]
    assert "coordinator" not in str(single)
