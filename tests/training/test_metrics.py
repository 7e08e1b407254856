"""metrics.jsonl, further writers, the progress line and the clock."""

import contextlib
import io
import json
import sys

import numpy as np
import pytest
from rich.console import Console

from hpnlp.training.files import metrics
from hpnlp.training.files.metrics import Clock, Display, JsonlWriter, TensorBoardWriter, find_writers
from hpnlp.types import InputError
from tests.messages import raises


def lines(workdir):
    return (workdir / "metrics.jsonl").read_text("utf-8").splitlines()


def write(workdir, steps, last_step=0):
    writer = JsonlWriter(workdir, last_step)
    for step in steps:
        writer.write(step, {"loss": 1.0 / step})
    writer.close()


def test_lines_are_flushed_as_they_are_written(tmp_path):
    writer = JsonlWriter(tmp_path)
    for step in (1, 2):
        writer.write(step, {"loss": 0.5})
        assert lines(tmp_path)[-1] == json.dumps({"step": step, "loss": 0.5})
    writer.sync()
    writer.close()


def test_float32_values_round_trip(tmp_path):
    values = np.random.default_rng(0).normal(size=200).astype(np.float32)
    writer = JsonlWriter(tmp_path)
    for step, value in enumerate(values):
        writer.write(step, {"loss": float(value)})
    writer.close()
    read = np.array([json.loads(line)["loss"] for line in lines(tmp_path)], np.float32)
    assert read.tobytes() == values.tobytes()


def test_nonfinite_values_become_null(tmp_path):
    writer = JsonlWriter(tmp_path)
    writer.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "learning_rate": 0.1})
    writer.close()

    def reject(word):
        pytest.fail(f"{word} is no JSON")

    assert json.loads(lines(tmp_path)[0], parse_constant=reject) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "learning_rate": 0.1,
    }


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"step": 7, "lo',
        b"\xff\x00 no JSON\n",
        b'{"loss": 1}\n',
        pytest.param(b"[" * 200_000 + b"\n", id="deep"),
    ],
)
def test_lines_after_the_last_step_are_removed(tmp_path, tail):
    write(tmp_path, range(1, 7))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    write(tmp_path, range(5, 9), last_step=4)
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == list(range(1, 9))


def test_resuming_from_the_last_line_changes_nothing(tmp_path):
    write(tmp_path, range(1, 7))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    write(tmp_path, (), last_step=6)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_writers_are_found_by_name(monkeypatch):
    assert find_writers("") == []
    monkeypatch.setitem(sys.modules, "tensorboardX", sys)  # so that the package need not be installed
    assert len(find_writers(" tensorboard,tensorboard")) == 2
    raises("unknown train.writers 'tensorbord': did you mean 'tensorboard'?", find_writers, "tensorbord")


def test_unavailable_writers_raise(monkeypatch):
    raises(r"train.writers 'tensorboard' takes no arguments: too many positional", find_writers, "tensorboard(3)")
    raises(r"train.writers='tensorboard\*3': writers take no repeats: write tensorboard", find_writers, "tensorboard*3")
    for package, installed_by in (("tensorboardX", "tensorboardX"), ("wandb", r"'\.\[wandb\]' in the rep")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(InputError, match=f"needs {package}: pip install {installed_by}"):
            find_writers(package.removesuffix("X"))


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboardX")
    writer = TensorBoardWriter(workdir=tmp_path)
    writer.write(1, {"loss": 0.5})
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()


class FakeWandb:
    """The part of wandb that is used. `runs`: keyword arguments of init. `rows`: steps and values that its server has."""

    def __init__(self):
        self.runs, self.rows, self.exits, self.offline, self.disabled = [], [], [], False, False
        self.error, self.url, self.step = None, "https://wandb.test/hpnlp/x", 0

    def Settings(self, **values):  # noqa: N802
        return values

    def init(self, **arguments):
        if self.error:
            raise self.error
        self.runs.append(arguments)
        self.step = 0 if self.offline else max((step + 1 for step, _ in self.rows), default=0)
        return self

    def log(self, values, step):
        if self.error:
            raise self.error
        self.rows.append((step, values))

    def finish(self, exit_code):
        self.exits.append(exit_code)
        self.log({}, -1)
        self.rows.pop()


@pytest.fixture
def fake_wandb(monkeypatch, tmp_path):
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config.json").write_text('{"train": {"steps": 9}}')
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def log_to_wandb(workdir, steps, last_step=0, spec="wandb"):
    """Writes `steps` to both writers, as the loop does, without closing the W&B run."""
    with contextlib.closing(JsonlWriter(workdir, last_step)) as jsonl:
        (make,) = find_writers(spec)
        writer = make(workdir=workdir, last_step=last_step)
        for step in steps:
            for target in (jsonl, writer):
                target.write(step, {"loss": 1.0 / step})
    return writer


def test_wandb_gets_config_and_metrics(fake_wandb, tmp_path, monkeypatch, capsys):
    log_to_wandb(tmp_path, (1, 2), spec="wandb(mine)").close()
    (run,) = fake_wandb.runs
    assert run["config"] == {"train": {"steps": 9}} and run["dir"] == str(tmp_path)
    assert (run["project"], run["name"]) == ("mine", tmp_path.name)
    assert fake_wandb.rows == [(1, {"loss": 1.0}), (2, {"loss": 0.5})] and fake_wandb.exits == [0]
    assert capsys.readouterr().out == "W&B: https://wandb.test/hpnlp/x\n"
    monkeypatch.setenv("WANDB_PROJECT", "of the environment")
    fake_wandb.disabled = True
    log_to_wandb(tmp_path, (), last_step=2)
    assert fake_wandb.runs[1]["project"] == "of the environment" and len(fake_wandb.rows) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("known", [9, 7, 4, 2, 0])
@pytest.mark.parametrize("offline", [False, True])
def test_wandb_gets_each_step_once_after_a_kill(fake_wandb, tmp_path, capsys, known, offline):
    """A run that was killed at step 9, with a checkpoint of step 5; W&B has received `known` steps."""
    fake_wandb.offline = offline
    log_to_wandb(tmp_path, range(1, 10))
    del fake_wandb.rows[known:]
    before = len(fake_wandb.rows) if offline else 0  # an offline run starts another directory
    log_to_wandb(tmp_path, range(6, 13), last_step=5).close()
    assert fake_wandb.rows[before:] == [(step, {"loss": 1.0 / step}) for step in range(1, 13)]
    first, second = fake_wandb.runs
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert ("wandb sync" in capsys.readouterr().out) == offline


def test_wandb_gets_nonfinite_values_on_resuming(fake_wandb, tmp_path):
    jsonl = JsonlWriter(tmp_path)
    jsonl.write(1, {"loss": float("nan")})
    jsonl.close()
    log_to_wandb(tmp_path, (), last_step=1)
    ((step, values),) = fake_wandb.rows
    assert step == 1 and np.isnan(values["loss"])


def test_wandb_that_does_not_start_raises(fake_wandb, tmp_path):
    fake_wandb.error = RuntimeError("No API key configured.\nUse `wandb login`")
    raises(r"No API key configured. Use `wandb login`.*set WANDB_MODE=offline", log_to_wandb, tmp_path, ())
    raises("train.writers 'wandb' has no argument 'projcet': did", log_to_wandb, tmp_path, (), spec="wandb(projcet=x)")


def test_errors_of_wandb_do_not_stop_training(fake_wandb, tmp_path, capsys):
    writer = log_to_wandb(tmp_path, (1,))
    fake_wandb.error = ConnectionResetError("Connection lost")
    for step in (2, 3):
        writer.write(step, {"loss": 1.0})
    writer.close()
    error = capsys.readouterr().err
    assert error.startswith("W&B failed (ConnectionResetError: Connection lost)") and error.count("\n") == 1
    assert len(fake_wandb.rows) == 1 and not fake_wandb.exits
    fake_wandb.error = None
    writer = log_to_wandb(tmp_path, ())
    fake_wandb.error = TimeoutError("60 s")
    writer.close()
    assert capsys.readouterr().err.startswith("W&B failed (TimeoutError: 60 s)")


def test_wandb_gets_the_exit_code_of_a_failed_run(fake_wandb, tmp_path):
    with pytest.raises(KeyError), contextlib.ExitStack() as stack:
        stack.callback(log_to_wandb(tmp_path, ()).close)
        raise KeyError
    assert fake_wandb.exits == [1]


def test_clock_adds_to_earlier_seconds():
    clock = Clock({"step": 5.0, "data": 1.0})
    with clock("step"):
        pass
    assert 5.0 < clock.seconds["step"] < 6.0
    assert clock.seconds["data"] == 1.0 and clock.seconds["eval"] == 0.0


def display(monkeypatch, terminal, kind="xterm"):
    """Output of a display of 100 steps of 1000 tokens each, at 10 steps/s by the clock and 20 steps/s by `busy`."""
    out, now = io.StringIO(), [50.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    monkeypatch.setenv("TERM", kind)
    console = Console(file=out, force_terminal=terminal, width=120, highlight=False, soft_wrap=True)
    shown = Display(0, 100, console)
    for step in (10, 20, 30):
        now[0] = 50.0 + step / 10
        shown.step(step, 3.0 - step / 100, busy=step / 20, tokens=1000 * step)
    shown.print("a line [in brackets]")
    shown.close()
    return out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_plain_lines_without_a_terminal_and_on_a_dumb_one(monkeypatch, terminal):
    assert display(monkeypatch, terminal, kind="dumb").splitlines() == [
        "step 10/100: loss 2.9000",
        "step 20/100: loss 2.8000, 20,000 tokens/s, 0:08 left",
        "step 30/100: loss 2.7000, 20,000 tokens/s, 0:07 left",
        "a line [in brackets]",
    ]


def test_live_line_on_a_terminal(monkeypatch):
    shown = display(monkeypatch, terminal=True)
    assert "30/100 loss 2.7000, 20,000 tokens/s, 0:07 left" in shown
    assert "a line [in brackets]\n" in shown
    assert "\x1b[" in shown  # it moves the cursor


def test_plain_lines_in_a_file_where_color_is_forced(monkeypatch):
    out = io.StringIO()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(metrics.sys, "stdout", out)
    shown = Display(0, 100)
    shown.step(10, 2.0, 1.0, 1000)
    shown.close()
    assert out.getvalue() == "step 10/100: loss 2.0000\n"


def test_live_line_shows_the_status(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for terminal in (True, False):
        out = io.StringIO()
        shown = Display(0, 100, Console(file=out, force_terminal=terminal, width=120))
        shown.status("scoring held-out text")
        shown.close()
        assert ("0/100 scoring held-out text" in out.getvalue()) == terminal


def test_lines_of_progress_have_amount_and_time_left(monkeypatch):
    lines, now = [], [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    progress = metrics.ProgressLines(lines.append, "batches", every=10.0)
    for second in range(0, 25, 5):
        now[0] = float(second)
        progress("scoring a", second // 5, 4)
    for second in range(25, 50, 5):  # the time left is that of the new work
        now[0] = float(second)
        progress("scoring b", 2 * (second // 5 - 5), 100)
    progress("scoring b", 1, 0)
    assert lines == [
        "scoring a: 2 of 4 batches, 0:10 left",
        "scoring a: 4 of 4 batches, 0:00 left",
        "scoring b: 2 of 100 batches",
        "scoring b: 6 of 100 batches, 3:55 left",
    ]
    now[0] = 60.0
    progress("scoring c", 3, 0)
    assert lines[-1] == "scoring c: 3 batches"
