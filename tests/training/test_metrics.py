"""metrics.jsonl, further writers, the progress line and the clock."""

import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from hpnlp.training import metrics
from hpnlp.training.metrics import Clock, Display, JsonlWriter, TensorBoardWriter, find_writers
from hpnlp.types import InputError


def lines(workdir):
    return (workdir / "metrics.jsonl").read_text("utf-8").splitlines()


def write(workdir, steps, last_step=0):
    writer = JsonlWriter(workdir, last_step)
    for step in steps:
        writer.write(step, {"loss": 1.0 / step})
    writer.close()


def test_lines_are_on_disk_as_they_are_written(tmp_path):
    writer = JsonlWriter(tmp_path)
    for step in (1, 2):
        writer.write(step, {"loss": 0.5})
        assert lines(tmp_path)[-1] == json.dumps({"step": step, "loss": 0.5})
    writer.sync()
    writer.close()


def test_no_digit_of_a_float32_is_lost(tmp_path):
    values = np.random.default_rng(0).normal(size=200).astype(np.float32)
    writer = JsonlWriter(tmp_path)
    for step, value in enumerate(values):
        writer.write(step, {"loss": float(value)})
    writer.close()
    found = np.array([json.loads(line)["loss"] for line in lines(tmp_path)], np.float32)
    assert found.tobytes() == values.tobytes()


def test_every_line_is_json_also_where_a_loss_is_not_finite(tmp_path):
    writer = JsonlWriter(tmp_path)
    writer.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "learning_rate": 0.1})
    writer.close()
    reject = lambda word: pytest.fail(f"{word} is no JSON")  # noqa: E731
    found = json.loads(lines(tmp_path)[0], parse_constant=reject)
    assert found == {"step": 1, "loss": None, "grad_norm": None, "learning_rate": 0.1}


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"step": 7, "lo',
        b'{"step": 7}',
        b"\xff\x00 no JSON\n",
        b"3\n",
        b'{"loss": 1}\n',
        pytest.param(b"[" * 200_000 + b"\n", id="deep"),
    ],
)
def test_lines_after_the_checkpoint_are_written_again(tmp_path, tail):
    write(tmp_path, range(1, 7))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    write(tmp_path, range(5, 9), last_step=4)
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == list(range(1, 9))


def test_going_on_from_the_last_line_changes_nothing(tmp_path):
    write(tmp_path, range(1, 7))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    write(tmp_path, (), last_step=6)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_writers_are_found_by_name():
    assert find_writers("") == []
    assert find_writers(" tensorboard,tensorboard") == [TensorBoardWriter] * 2
    with pytest.raises(InputError, match="unknown writer 'tensorbord': did you mean 'tensorboard'?"):
        find_writers("tensorbord")


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboardX")
    writer = TensorBoardWriter(tmp_path)
    writer.write(1, {"loss": 0.5})
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()


def test_missing_tensorboard_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(InputError, match=r"needs tensorboardX: pip install tensorboardX"):
        TensorBoardWriter(tmp_path)


def test_clock_adds_up_over_restarts():
    clock = Clock({"step": 5.0, "data": 1.0})
    with clock("step"):
        pass
    assert 5.0 < clock.seconds["step"] < 6.0
    assert clock.seconds["data"] == 1.0 and clock.seconds["eval"] == 0.0


def test_clock_counts_what_failed():
    clock = Clock()
    with pytest.raises(KeyError), clock("eval"):
        raise KeyError
    assert clock.seconds["eval"] > 0.0


def display(monkeypatch, terminal):
    """A display of a run of 100 steps of 1000 tokens each, 10 a second by the clock and 20 a second by `busy`."""
    out, now = io.StringIO(), [50.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    console = Console(file=out, force_terminal=terminal, width=120, highlight=False, soft_wrap=True)
    shown = Display(0, 100, 1000, console)
    for step in (10, 20, 30):
        now[0] = 50.0 + step / 10
        shown.step(step, 3.0 - step / 100, busy=step / 20)
    shown.say("a line [in brackets]")
    shown.close()
    return out.getvalue()


def test_plain_lines_without_a_terminal(monkeypatch):
    assert display(monkeypatch, terminal=False).splitlines() == [
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


def test_live_line_shows_what_takes_time_beside_steps():
    for terminal in (True, False):
        out = io.StringIO()
        shown = Display(0, 100, 1000, Console(file=out, force_terminal=terminal, width=120))
        shown.doing("scoring held-out text")
        shown.close()
        assert ("0/100 scoring held-out text" in out.getvalue()) == terminal


def test_reading_that_takes_long_is_shown_now_and_then(monkeypatch):
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    progress = metrics.now_and_then(5.0, Console(file=out, highlight=False))
    for second in range(12):
        now[0] = float(second)
        progress("tokenising", second << 20, 3 << 30)
    assert out.getvalue() == "tokenising: 5.0 of 3,072.0 MiB\ntokenising: 10.0 of 3,072.0 MiB\n"


PIPED = """
import sys
from hpnlp.training.metrics import Display
display = Display(0, 10, 1000)
for step in range(1, 1000):
    display.step(step, 1.0, 1.0)
display.close()
print("so does what is printed later")
print("went on", file=sys.stderr)
"""


def test_a_run_goes_on_when_nobody_reads_its_lines():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", PIPED], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "went on\n")
