"""`hpnlp train`: its files, exit codes and help, and how it resumes after it was killed."""

import contextlib
import io
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
from hpnlp.cli import fields, named_experiments
from hpnlp.tasks import TASKS
from hpnlp.training import loop
from hpnlp.training.config import Config, flat
from hpnlp.types import InputError
from tests import tiny
from tests.cli.conftest import Outcome, run_here

ROOT = Path(__file__).parents[2]
INTERVAL, STEPS = 4, 30
# The intervals of logging, evaluation and checkpoints do not divide each other.
COMMAND = [
    "train",
    f"--config={tiny.EXPERIMENT}",
    "--config.plan.name=data",
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
    """Step of the last complete line of metrics; 0 without any."""
    path = workdir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_for_step(process, workdir, step):
    while last_step(workdir) < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


@pytest.fixture(scope="module")
def undisturbed(shared_trainers, quick_compiler, tmp_path_factory):
    workdir, out, err = tmp_path_factory.mktemp("runs") / "undisturbed", io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_here(*COMMAND, f"--workdir={workdir}")
    return workdir, Outcome(code, out.getvalue(), err.getvalue())


def test_training_finishes_and_reports(undisturbed):
    workdir, outcome = undisturbed
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("starting: 0.01M parameters, 8 cpu devices (data 8), 30 steps of 8 x 16 tokens, in ")
    assert re.search(r"^step 30/30: loss \d\.\d{4}, [\d,]+ tokens/s, 0:00 left$", outcome.out, re.MULTILINE)
    assert "gzip -9" in outcome.out and "xz -9e" in outcome.out and "hpnlp generate " in outcome.out

    report = json.loads((workdir / "report.json").read_text())
    assert report["steps"] == STEPS
    names = "heldout_bits_per_byte gzip_bits_per_byte xz_bits_per_byte tokens_per_second peak_memory_bytes seconds"
    assert all(report[name] > 0 for name in names.split())
    assert sum(report["phase_seconds"].values()) < report["seconds"] < 600
    assert (workdir / "report.md").read_text() in outcome.out
    assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((workdir / "config.json").read_text())["train"]["steps"] == STEPS
    assert (workdir / "tokenizer.json").exists()
    steps = [line["step"] for line in map(json.loads, metrics_of(workdir).splitlines()) if "loss" in line]
    assert steps == list(range(1, STEPS + 1))


def test_finished_run_is_not_trained_again(undisturbed, run):
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
    )  # scoring alone takes less memory than training


@pytest.mark.slow
def test_killed_and_interrupted_runs_resume_bit_for_bit(undisturbed, start, finish, run, tmp_path):
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
    message = "SIGTERM: saving after this step; Ctrl-C again, after 2 s, ends the run without saving\n"
    assert (ended.code, ended.err) == (130, message)
    assert re.search(rf"^going on from step {saved}: ", ended.out, re.MULTILINE)
    (step,) = re.findall(r"^SIGTERM: saved step (\d+); the same command goes on from there$", ended.out, re.MULTILINE)
    assert not (workdir / "report.json").exists()

    outcome = run(*command)
    assert (outcome.code, outcome.err) == (0, "")
    assert f"going on from step {step}: " in outcome.out
    assert metrics_of(workdir) == metrics_of(expected_dir)
    reports = [json.loads((path / "report.json").read_text()) for path in (workdir, expected_dir)]
    assert reports[0]["heldout_bits_per_byte"] == reports[1]["heldout_bits_per_byte"]


def wandb_records(path):
    """Records of a .wandb file.

    They are protocol buffers in the log format of LevelDB, which has blocks of 32 KiB, after a header of 7 bytes.
    """
    from wandb.proto import wandb_internal_pb2

    data, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # too little for the header of a fragment
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a complete record, or the last fragment of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


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
    lines = [line for line in outcome.out.splitlines() if "W&B" in line or line.startswith("wandb")]
    assert lines == [f"W&B: offline; to send this run: wandb sync {workdir / 'wandb' / 'latest-run'}"]

    (path,) = (workdir / "wandb" / "latest-run").glob("*.wandb")
    assert len(list((workdir / "wandb").glob("offline-run-*"))) == 2  # one of the killed process
    records = list(wandb_records(path))
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.project) == ((workdir / "wandb_id").read_text(), "trials")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["train"]["steps"] == STEPS
    expected, logged = {}, {}
    for line in map(json.loads, metrics_of(workdir).splitlines()):
        expected.setdefault(line.pop("step"), {}).update(line)
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            assert row["_step"] not in logged
            logged[row["_step"]] = {name: value for name, value in row.items() if not name.startswith("_")}
    assert logged == expected and list(logged) == list(range(1, STEPS + 1))
    assert set(ROOT.iterdir()) == tree
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "cache"}


def test_changed_config_raises_with_the_changes(undisturbed, run):
    workdir, _ = undisturbed
    before = metrics_of(workdir)
    outcome = run(*COMMAND, f"--workdir={workdir}", "--config.model.dim=32", "--config.train.seed=5")
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "(model.dim: 16 -> 32; train.seed: 0 -> 5), and its checkpoints do not fit this config (" in outcome.err
    assert outcome.err.endswith("): choose another workdir\n")
    outcome = run(*COMMAND, f"--workdir={workdir}", "--config.data.tokenizer=words(90)")
    assert outcome.err.endswith(", and a run that has begun keeps its tokenizer: choose another workdir\n"), outcome
    # Accepted changes that the checkpoint does not fit raise too, and leave the run unchanged.
    outcome = run(*COMMAND, f"--workdir={workdir}", "--config.model.dim=32", "--accept_changes")
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "checkpoint 30 in " in outcome.err and " does not fit this config: params['embed']['table']" in outcome.err
    assert "was saved as float32[264, 16], expected float32[264, 32]: give the run its old config back" in outcome.err
    outcome = run(*COMMAND, f"--workdir={workdir}", "--config.optimizer.name=lion", "--accept_changes")
    assert outcome.code == 2 and "does not fit this config: rest['opt_state']" in outcome.err
    outcome = run(*COMMAND, f"--workdir={workdir}", "--config.data.tokenizer=words(90)", "--accept_changes")
    assert outcome.code == 2 and "a run that has begun keeps its tokenizer (data.tokenizer: 'bytes' ->" in outcome.err
    assert metrics_of(workdir) == before


def test_checkpoints_without_config_raise(undisturbed, run, tmp_path):
    shutil.copytree(undisturbed[0], tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    outcome = run(*COMMAND, f"--workdir={tmp_path / 'run'}")
    assert outcome.code == 2 and "has checkpoints and no config.json: restore it, choose another" in outcome.err
    outcome = run("generate", f"--workdir={tmp_path / 'run'}")
    assert outcome.code == 2 and "has checkpoints and no config.json: restore it" in outcome.err
    assert run(*COMMAND, f"--workdir={tmp_path / 'run'}", "--accept_changes").code == 0


@pytest.mark.parametrize("argv", [(), ("--help",), ("help",)])
def test_commands_are_listed(run, argv):
    outcome = run(*argv)
    assert outcome.code == 0 and all(command in outcome.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    outcome = run(command, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"hpnlp {command} ") and "Flags:" in outcome.out and "--debug" in outcome.out


def test_help_of_train_has_the_values_of_an_experiment(run, tmp_path):
    out = run("train", "--help", "--config=lm/bytes", "--model.dim=48").out
    assert "defaults in --config=lm/bytes:" in out and "--model.dim=48\n" in out and "--model.mlp='gelu'\n" in out
    out = run("train", "--help", "--task=classification").out
    assert "--task='classification'\n" in out and "--model.pooling='max'\n" in out


def test_runs_without_a_workdir_are_named_after_their_experiment_or_data(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    workdirs = []

    def train(config, workdir, **options):
        workdirs.append((str(workdir), config.task))
        raise InputError("stop")

    monkeypatch.setattr(loop, "train", train)
    (tmp_path / "my reviews.v2.csv").write_text("text,label\na,b\n")
    data = "--data.path=my reviews.v2.csv"
    for argv, workdir, task in (
        (["--config=classification/encoders:lstm"], "runs/encoders", "rnn_classification"),
        (["--task=classification", data], "runs/my_reviews", "classification"),
        (["--config=classification/texts", data], "runs/texts", "classification"),
        (["--config=lm/bytes"], "runs/bytes", "lm"),
        (["--task=lm", "--data.path=stdlib", "--workdir=a"], "a", "lm"),
        (["--task=lm", "--data.path=stdlib", "b"], "b", "lm"),
    ):
        outcome = run("train", *argv)
        assert outcome.err == "hpnlp: stop\n" and workdirs.pop() == (workdir, task), outcome
        assert outcome.out == (f"workdir: {workdir}\n" if workdir.startswith("runs/") else "")


def test_tasks_without_data_raise(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for task in ("classification", "lm"):
        message = (
            f"--task={task} names no data: add --data.path=FILE, or pass --config={named_experiments.STARTS[task]}"
        )
        outcome = run("train", f"--task={task}", "--workdir=a")
        assert outcome.code == 2 and message in outcome.err and not list(tmp_path.iterdir())


def test_length_of_the_training_texts_is_chosen(run, monkeypatch, tmp_path):
    configs = []
    monkeypatch.setattr(loop, "train", lambda config, *_, **__: configs.append(config) or stop())
    monkeypatch.setenv("HPNLP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def stop():
        raise InputError("stop")

    rows = [f"{'word ' * (i % 5)}last,{'ab'[i % 2]}" for i in range(60)]  # of 4 to 24 bytes
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *rows]))
    start = ["train", "--task=classification", "--data.path=a.csv", "--data.tokenizer=bytes"]
    for argv, length, line in (
        (["--data.seq_len=auto"], 32, "data.seq_len=32 holds 100 % of the training sequences\n"),
        (["--data.seq_len=16", "--data.seq_len=auto"], 16, " % of the training sequences; auto takes at most the"),
        (["--data.seq_len=auto", "--data.seq_len=24"], 24, "hpnlp: stop\n"),
    ):
        outcome = run(*start, *argv)
        assert configs.pop().data.seq_len == length and line in outcome.err, outcome
        assert ("hpnlp: training labels of each class: " in outcome.err) == (length == 32)  # of new examples
    outcome = run("train", "--config=lm/bytes", "--data.seq_len=auto")
    assert "data.seq_len=auto: sequences of task='lm' are filled with text of any length: pass a number" in outcome.err
    outcome = run("check-data", *start[1:], "--data.seq_len=auto")
    assert outcome.code == 0 and "tokens of training sequences: " in outcome.out


def test_every_field_has_help_and_names_belong_to_fields():
    described = {}
    for task in TASKS:
        of_task = {
            f"{title}.{name}".lstrip("."): text
            for title, _, rows in fields.described(Config(task=task))
            for name, _, text in rows
        }
        assert of_task.keys() == flat(Config(task=task)).keys()
        described |= of_task
    assert not [name for name, text in described.items() if not text.strip().endswith(".")]
    assert fields.tables().keys() <= described.keys()


def test_simulated_devices_have_spare_threads(monkeypatch):
    """Without them, independent collectives can wait for each other's threads forever."""
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
def test_threads_are_at_least_the_usable_cores(monkeypatch, linux, cores):
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
    assert run("help", "compare").out == run("compare", "--help").out != run("help").out


def test_defects_exit_with_a_traceback_and_1():
    program = (
        "from hpnlp import __main__ as m; m.COMMANDS['tain'] = ''; import sys; sys.argv = ['hpnlp', 'tain']; m.main()"
    )
    outcome = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 1
    assert "Traceback" in outcome.stderr and "No module named 'hpnlp.cli.tain'" in outcome.stderr


def test_ctrl_c_exits_with_one_line_and_130(monkeypatch, capsys):
    def interrupt(command):
        raise KeyboardInterrupt

    monkeypatch.setattr("hpnlp.__main__._run_command", interrupt)
    with pytest.raises(SystemExit) as exited:
        main()
    assert (exited.value.code, capsys.readouterr().err) == (130, "hpnlp: interrupted\n")


@pytest.mark.parametrize(
    ("command", "number", "message"),
    [
        ("train", signal.SIGTERM, "SIGTERM: ended at once; what was saved before stays"),
        ("generate", signal.SIGINT, "interrupted"),
    ],
)
def test_signal_during_imports_exits_with_one_line_and_130(
    start, finish, tmp_path, monkeypatch, command, number, message
):
    (tmp_path / "jax.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    process = start(command)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    outcome = finish(process, timeout=10)
    assert outcome.code == 130 and outcome.err.count("\n") == 1 and outcome.err.startswith(f"hpnlp: {message}")


@pytest.mark.slow
def test_closed_pipe_exits_without_output():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hpnlp", "train", "--help"]
    outcome = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (outcome.returncode, outcome.stderr) == (1, b"")


@pytest.mark.slow
def test_no_step_is_lost_in_three_kills(text, tmp_path, monkeypatch):
    """Kills at a random moment, while saving and during compilation; on one device, as in the benchmark."""
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1")
    bench = [sys.executable, "experiments/bench/resume.py", "--kills=3", "--steps=30", f"--path={text}"]
    subprocess.run([*bench, f"--out={tmp_path}"], cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("resume-*.json")
    summary = json.loads(path.read_text())["rows"][0]
    assert summary["kills"] == 3
    assert summary["steps_lost_beyond_interval"] == summary["lines_that_differ"] == 0
