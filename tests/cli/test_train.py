"""`hpnlp train` as a process: what it leaves, how it ends, and what it makes of being killed."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hpnlp
from hpnlp.__main__ import COMMANDS, main, spare_threads
from hpnlp.cli import fields
from hpnlp.training.config import Config
from tests import tiny

ROOT = Path(__file__).parents[2]
INTERVAL, STEPS = 4, 30
# Shown, evaluated and saved after numbers of steps that do not divide each other.
COMMAND = [
    "train",
    f"--config={tiny.EXPERIMENT}",
    f"--config.train.steps={STEPS}",
    f"--config.train.checkpoint_every={INTERVAL}",
    "--config.train.log_every=3",
    "--config.train.eval_every=7",
    "--config.train.eval_batches=1",
    "--config.train.sample=8",
]


def metrics_of(workdir):
    return (workdir / "metrics.jsonl").read_bytes()


def last_step(workdir):
    """The step of the last whole line."""
    path = workdir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_for_step(process, workdir, step):
    while last_step(workdir) < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


@pytest.fixture(scope="module")
def undisturbed(start, finish, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "undisturbed"
    return workdir, finish(start(*COMMAND, f"--workdir={workdir}"))


def test_finishes_and_reports(undisturbed):
    workdir, outcome = undisturbed
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("starting: 0.01M parameters, 8 cpu devices (data 8), 30 steps of 8 x 16 tokens, in ")
    assert re.search(r"^step 30/30: loss \d\.\d{4}, [\d,]+ tokens/s, 0:00 left$", outcome.out, re.MULTILINE)
    assert "gzip -9" in outcome.out and "xz -9e" in outcome.out and "hpnlp generate --workdir=" in outcome.out

    report = json.loads((workdir / "report.json").read_text())
    assert report["steps"] == STEPS
    promised = "heldout_bits_per_byte gzip_bits_per_byte xz_bits_per_byte tokens_per_second peak_memory_bytes seconds"
    assert all(report[name] > 0 for name in promised.split())
    assert sum(report["phase_seconds"].values()) < report["seconds"] < 600
    assert (workdir / "report.md").read_text() in outcome.out
    assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((workdir / "config.json").read_text())["train"]["steps"] == STEPS
    assert (workdir / "tokenizer.json").exists()
    steps = [line["step"] for line in map(json.loads, metrics_of(workdir).splitlines()) if "loss" in line]
    assert steps == list(range(1, STEPS + 1))


def test_finished_run_is_quick_and_stays_as_it_is(undisturbed, run):
    workdir, _ = undisturbed
    before, report = metrics_of(workdir), json.loads((workdir / "report.json").read_text())
    outcome = run(*COMMAND, f"--workdir={workdir}")
    assert outcome.code == 0 and "going on from step 30" in outcome.out
    assert metrics_of(workdir) == before
    again = json.loads((workdir / "report.json").read_text())
    assert (again["steps"], again["heldout_bits_per_byte"]) == (STEPS, report["heldout_bits_per_byte"])
    assert again["tokens_per_second"] == pytest.approx(report["tokens_per_second"], rel=1e-3)
    assert (
        again["peak_memory_bytes"] >= 0.95 * report["peak_memory_bytes"]
    )  # scoring alone takes less than training did


@pytest.mark.slow
def test_killed_and_ended_runs_go_on_bit_for_bit(undisturbed, start, finish, tmp_path):
    expected_dir, _ = undisturbed
    workdir = tmp_path / "run"
    command = [*COMMAND, f"--workdir={workdir}"]
    process = start(*command)
    wait_for_step(process, workdir, INTERVAL + 2)
    process.kill()
    assert finish(process).code == -signal.SIGKILL
    shown = last_step(workdir)
    saved = max((int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()), default=0)
    assert shown - saved <= INTERVAL
    with open(workdir / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 99, "lo')

    process = start(*command)
    wait_for_step(process, workdir, 5 * INTERVAL)
    process.terminate()
    ended = finish(process)
    told = "SIGTERM: saving after this step; Ctrl-C again, after 2 s, ends the run without saving\n"
    assert (ended.code, ended.err) == (130, told)
    assert re.search(rf"^going on from step {saved}: ", ended.out, re.MULTILINE)
    (step,) = re.findall(r"^SIGTERM: saved step (\d+); the same command goes on from there$", ended.out, re.MULTILINE)
    assert not (workdir / "report.json").exists()

    outcome = finish(start(*command))
    assert (outcome.code, outcome.err) == (0, "")
    assert f"going on from step {step}: " in outcome.out
    assert metrics_of(workdir) == metrics_of(expected_dir)
    reports = [json.loads((path / "report.json").read_text()) for path in (workdir, expected_dir)]
    assert reports[0]["heldout_bits_per_byte"] == reports[1]["heldout_bits_per_byte"]


def wandb_records(path):
    """What a .wandb file holds: protocol buffers in the log format of LevelDB, blocks of 32 KiB, behind 7 bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # too little for a head
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last of several parts
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


@pytest.mark.slow
def test_wandb_offline_has_each_step_of_a_killed_run_once(start, finish, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    workdir, tree = tmp_path / "run", set(ROOT.iterdir())
    command = [*COMMAND, f"--workdir={workdir}", "--config.train.writers=wandb(trials)"]
    process = start(*command)
    wait_for_step(process, workdir, INTERVAL + 2)
    process.kill()
    finish(process)
    outcome = finish(start(*command))
    assert (outcome.code, outcome.err) == (0, "")
    said = [line for line in outcome.out.splitlines() if "W&B" in line or line.startswith("wandb")]
    assert said == [f"W&B: offline; to send this run: wandb sync {workdir / 'wandb' / 'latest-run'}"]

    (path,) = (workdir / "wandb" / "latest-run").glob("*.wandb")
    assert len(list((workdir / "wandb").glob("offline-run-*"))) == 2  # of the killed run, too
    records = list(wandb_records(path))
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.project) == ((workdir / "wandb_id").read_text(), "trials")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["train"]["steps"] == STEPS
    expected, found = {}, {}
    for line in map(json.loads, metrics_of(workdir).splitlines()):
        expected.setdefault(line.pop("step"), {}).update(line)
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            assert row["_step"] not in found
            found[row["_step"]] = {name: value for name, value in row.items() if not name.startswith("_")}
    assert found == expected and list(found) == list(range(1, STEPS + 1))
    assert set(ROOT.iterdir()) == tree
    assert {one.name for one in tmp_path.iterdir()} <= {"run", "cache"}


def test_other_config_is_refused_with_what_differs(undisturbed, run):
    workdir, _ = undisturbed
    before = metrics_of(workdir)
    outcome = run(*COMMAND, f"--workdir={workdir}", "--config.model.dim=32", "--config.train.seed=5")
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "(model.dim: 16 -> 32; train.seed: 0 -> 5)" in outcome.err and "--accept_changes" in outcome.err
    # The parameters cannot follow, also where that is accepted; nothing is lost by trying.
    outcome = run(*COMMAND, f"--workdir={workdir}", "--config.model.dim=32", "--accept_changes")
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "checkpoint 30 in " in outcome.err and " does not fit this config: params['embed']['table']" in outcome.err
    assert "was saved as float32[264, 16], expected float32[264, 32]: give the run its old config back" in outcome.err
    outcome = run(*COMMAND, f"--workdir={workdir}", "--config.optimizer.name=lion", "--accept_changes")
    assert outcome.code == 2 and "does not fit this config: rest['opt_state']" in outcome.err
    outcome = run(*COMMAND, f"--workdir={workdir}", "--config.data.tokenizer=words(90)", "--accept_changes")
    assert outcome.code == 2 and "a run that has begun keeps its tokenizer (data.tokenizer: 'bytes' ->" in outcome.err
    assert metrics_of(workdir) == before


def test_checkpoints_without_their_config(undisturbed, run, tmp_path):
    shutil.copytree(undisturbed[0], tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    outcome = run(*COMMAND, f"--workdir={tmp_path / 'run'}")
    assert outcome.code == 2 and "has checkpoints and no config.json: restore it, choose another" in outcome.err
    outcome = run("generate", f"--workdir={tmp_path / 'run'}")
    assert outcome.code == 2 and "has checkpoints and no config.json: restore it" in outcome.err
    assert run(*COMMAND, f"--workdir={tmp_path / 'run'}", "--accept_changes").code == 0


def test_metrics_without_their_config(undisturbed, run, tmp_path):
    """Else the tokenizer that is there would be taken, whatever the config says."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    for name in ("metrics.jsonl", "tokenizer.json"):
        shutil.copy(undisturbed[0] / name, workdir)
    outcome = run(*COMMAND, f"--workdir={workdir}", "--config.data.tokenizer=words(90)")
    assert outcome.code == 2 and "has metrics.jsonl and no config.json: restore it, choose another" in outcome.err
    (workdir / "metrics.jsonl").write_text("")  # a run that stopped before its first step may come back as another
    assert run(*COMMAND, f"--workdir={workdir}", "--config.data.tokenizer=words(90)").code == 0


def test_config_may_be_changed_where_that_is_accepted(undisturbed, run, tmp_path):
    workdir, _ = undisturbed
    command = [*COMMAND, f"--workdir={workdir}", "--config.train.keep=5"]
    assert run(*command).code == 2
    assert run(*command, "--accept_changes").code == 0
    assert run(*command).code == 0
    assert run(*COMMAND, f"--workdir={workdir}", "--accept_changes").code == 0


@pytest.mark.parametrize("argv", [(), ("--help",), ("help",)])
def test_commands_are_listed(run, argv):
    outcome = run(*argv)
    assert outcome.code == 0 and all(command in outcome.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help(run, command):
    outcome = run(command, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"hpnlp {command} ") and "Flags:" in outcome.out and "--debug" in outcome.out


def test_help_of_train_names_every_field(run):
    out = run("train", "--help").out
    assert "--accept_changes" in out
    for meaning in (
        "--config.model.kv_heads=0\n      K, 0 for N.",
        "--config.model.rope_theta=10000.0\n      the base",
        "Names: adamw, adamw8bit,",
        "Names: constant, linear,",
        "--config.train.keep=2\n      see checkpoint_every.",
    ):
        assert meaning in out


@pytest.mark.parametrize("name", vars(Config()))
def test_help_explains_every_field_and_no_other(name):
    section = getattr(Config(), name)
    explained = fields.help_of(section)
    assert not [field for field, text in explained.items() if not text]
    assert not fields.explanations(section)[1].keys() - explained.keys()
    names = [field for field in fields.tables() if field.startswith(f"{name}.")]
    assert not {field.partition(".")[2] for field in names} - explained.keys()


def test_pretended_devices_get_threads_to_spare(monkeypatch):
    """Else collectives that do not depend on each other can wait for each other's threads for ever."""
    monkeypatch.setenv("XLA_FLAGS", "--a --xla_force_host_platform_device_count=1000 --b")
    monkeypatch.setenv("NPROC", "7")
    spare_threads()
    assert os.environ["NPROC"] == "7"
    monkeypatch.delenv("NPROC")
    spare_threads()
    assert os.environ["NPROC"] == "4000"
    monkeypatch.delenv("NPROC")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2000")
    spare_threads()
    assert os.environ["NPROC"] == "8000"


@pytest.mark.parametrize(("linux", "cores"), [(True, 30), (False, 500)])
def test_threads_are_no_fewer_than_the_cores_that_may_be_used(monkeypatch, linux, cores):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(os, "cpu_count", lambda: 500)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(30)), raising=False)
    if not linux:
        monkeypatch.delattr(os, "sched_getaffinity")
    spare_threads()
    assert os.environ["NPROC"] == str(cores)


def test_version(run):
    assert run("--version").out == f"{hpnlp.__version__}\n"


def test_other_errors_end_with_a_traceback_and_1():
    program = (
        "from hpnlp import __main__ as m; m.COMMANDS['tain'] = ''; import sys; sys.argv = ['hpnlp', 'tain']; m.main()"
    )
    outcome = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 1
    assert "Traceback" in outcome.stderr and "No module named 'hpnlp.cli.tain'" in outcome.stderr


def test_ctrl_c_ends_with_a_line_and_130(monkeypatch, capsys):
    def interrupted(command):
        raise KeyboardInterrupt

    monkeypatch.setattr("hpnlp.__main__._main", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "hpnlp: interrupted\n")


@pytest.mark.parametrize(
    ("command", "number", "said"),
    [
        ("train", signal.SIGTERM, "SIGTERM: ended at once; what was saved before stays"),
        ("sweep", signal.SIGINT, "SIGINT: ended at once; what was saved before stays"),
        ("generate", signal.SIGINT, "interrupted"),
    ],
)
def test_signal_while_modules_are_imported_ends_with_a_line_and_130(
    start, finish, tmp_path, monkeypatch, command, number, said
):
    (tmp_path / "jax.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    process = start(command)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    outcome = finish(process, timeout=10)
    assert outcome.code == 130 and outcome.err.count("\n") == 1 and outcome.err.startswith(f"hpnlp: {said}")


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"]])
def test_closed_pipe_ends_it_without_a_word(argv):
    reader, writer = os.pipe()
    os.close(reader)
    outcome = subprocess.run([sys.executable, "-m", "hpnlp", *argv], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (outcome.returncode, outcome.stderr) == (1, b"")


@pytest.mark.slow
def test_twenty_kills(text, tmp_path, monkeypatch):
    """Twenty kills at random moments, while compiling and while saving among them; on one device, as the bench has it."""
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1")
    bench = [sys.executable, "experiments/bench/resume.py", "--steps=60", f"--path={text}", f"--out={tmp_path}"]
    subprocess.run(bench, cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("resume-*.json")
    summary = json.loads(path.read_text())["rows"][0]
    assert summary["kills"] == 20
    assert summary["steps_lost_beyond_interval"] == summary["lines_that_differ"] == 0
