"""Signals that stop a run: at once before training, after saving in the loop; repeated signals are ignored."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from hpnlp.training.processes import distributed, signals

# C code that blocks the main thread for minutes, as compilation does.
BUSY = """
import hashlib
from hpnlp.training.processes import signals
with signals.watched():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


@contextlib.contextmanager
def busy(*wrapper):
    command, pipe = [*wrapper, sys.executable, "-c", BUSY], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signal_ends_a_process_in_c_code_at_once(number):
    with busy() as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    line = (
        f"hpnlp: {number.name}: ended at once; what was saved before stays, and the same command goes on from there\n"
    )
    assert (process.returncode, out, err) == (130, "", line)


def test_signal_ends_a_process_with_a_full_stderr():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))  # until the pipe is full
    os.set_blocking(writer, True)
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        try:
            assert process.wait(timeout=10) == 130
        finally:
            process.kill()
    os.close(reader)
    os.close(writer)


# A parent that ends at once, and its child, deaf to SIGTERM, in a session of its own.
ORPHAN = """
import os, signal, subprocess, sys
from hpnlp.training.processes import signals
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    os._exit(0)
signals.ORPHAN_SECONDS = 0.1
signals._react = lambda number: os.write(2, b"told to stop")
signals.follow(os.getppid())
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_stuck_child_of_a_killed_supervisor_ends(tmp_path):
    (tmp_path / "orphan.py").write_text(ORPHAN)
    command = [sys.executable, str(tmp_path / "orphan.py")]
    process = subprocess.run(command, stderr=subprocess.PIPE, timeout=20, check=True)  # until stderr has no writer
    assert process.stderr == b"told to stop"


def test_ignored_signals_stay_ignored():
    with busy("nohup") as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
        process.terminate()
        assert process.wait(timeout=10) == 130


def test_first_signal_stops_the_run_and_only_a_later_ctrl_c_ends_it(monkeypatch, capfd):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    before = {number: signal.getsignal(number) for number in signals.NUMBERS}
    stopping = distributed.Stopping()
    assert not stopping(1)
    stopping.begin()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stopping(2) and stopping.signal == "SIGHUP"
        os.kill(os.getpid(), signal.SIGHUP)  # sent to the process group, and passed on by the parent
        os.kill(os.getpid(), signal.SIGINT)
        now += 60.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping(3) and stopping.signal == "SIGHUP"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        stopping.end()
    assert {number: signal.getsignal(number) for number in signals.NUMBERS} == before
    assert (
        capfd.readouterr().err
        == "SIGHUP: saving after this step; Ctrl-C again, after 2 s, ends the run without saving\n"
    )
