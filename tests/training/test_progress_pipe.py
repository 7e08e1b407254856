"""Lines that a process writes for its supervisor."""

import os
import time

import jax
import pytest

from hpnlp.training import loop
from hpnlp.training.files import metrics
from hpnlp.training.processes import progress_pipe
from hpnlp.training.processes.progress_pipe import ProgressPipe
from tests import tiny


@pytest.fixture
def piped(monkeypatch):
    """`(pipe, read)` where `read()` returns the lines that were written since the last call."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    monkeypatch.setenv(progress_pipe.VARIABLE, str(writer))
    pipe = ProgressPipe()
    pipe.open()
    yield pipe, lambda: os.read(reader, 1 << 20).decode().splitlines()
    for descriptor in (reader, writer):
        os.close(descriptor)


def test_lines_have_phase_and_step(piped, monkeypatch):
    pipe, read = piped
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert progress_pipe.VARIABLE not in os.environ  # processes that this one starts do not inherit it
    pipe.report("data", 7)
    pipe.report()  # too early
    now += 1.0
    pipe.report()
    pipe.report("step")
    assert read() == ["data 7", "data 7", "step 7"]


def test_full_and_closed_pipes_are_ignored(piped):
    pipe, read = piped
    for step in range(20_000):
        pipe.report("step", step)
    assert read()[0] == "step 0"
    ProgressPipe().report("step", 1)
    reader, writer = os.pipe()
    os.environ[progress_pipe.VARIABLE] = str(writer)
    pipe.open()
    os.close(reader)
    pipe.report("step", 1)
    pipe.report("step", 2)
    os.close(writer)


def test_pace_waits_for_the_step_before_the_last_two(piped, monkeypatch):
    pipe, _ = piped
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    results = [(1, "a"), (2, "b"), (3, "c")]
    pipe.pace(results[:2])
    assert waited == []
    pipe.pace(results)
    assert waited == ["a"]
    ProgressPipe().pace(results)
    assert waited == ["a"]


def test_run_reports_its_phases_in_order(piped, monkeypatch, tmp_path):
    pipe, read = piped
    for module in (loop, metrics):
        monkeypatch.setattr(module, "PIPE", pipe)
    loop.train(tiny.make(train__steps=4, train__eval_every=4, train__checkpoint_every=2, plan__name="data"), tmp_path)
    lines = read()
    order = (
        "setup 0, data 1, setup 1, data 2, step 2, checkpoint 2, step 2, data 3, step 3, data 4, step 4, eval 4, step 4"
    )
    position = -1
    for line in [*order.split(", "), "report 4"]:
        position = lines.index(line, position + 1)
