"""Processes that a supervisor starts do not outlive it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpnlp.jobs.launch import processes

# A supervisor that starts a process which has imported nothing of hpnlp yet.
SUPERVISOR = """
import os, sys, time
from pathlib import Path
from hpnlp.jobs.launch import processes
from hpnlp.jobs.launch.liveness import Pace, Watch
command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
child = processes.start(0, command, os.environ, Path(sys.argv[1]) / "log", Watch(Pace(1.0, 1.0), 0.0))
print(child.popen.pid, flush=True)
time.sleep(60)
"""


def becomes(check):
    """Whether a condition holds within 10 s."""
    for _ in range(1000):
        if check():
            return True
        time.sleep(0.01)
    return False


def is_in_state(pid, letters):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in letters


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_is_stopped_before_its_first_import_goes_on_when_the_supervisor_is_killed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, tmp_path], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        try:
            command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
            assert becomes(lambda: Path(f"/proc/{child}/cmdline").read_text().split("\0")[:-1] == command)
            os.kill(child, signal.SIGSTOP)
            assert becomes(lambda: is_in_state(child, "T"))
            supervisor.kill()
            assert becomes(lambda: is_in_state(child, "RS"))
        finally:
            os.kill(child, signal.SIGKILL)


def test_tail_of_a_log_has_the_cause_of_an_abort(tmp_path):
    log, cause = tmp_path / "process_0.log", "F1129 01:03:13.793373   29868 client.h:80] Terminating process"
    frames = [f"  File {number}" for number in range(70)]
    log.write_text("\n".join(["step 3", cause, *frames]))
    assert processes.tail(log, 20) == [cause, *frames[-20:]]
    log.write_text("\n".join([cause, "a"]))
    assert processes.tail(log, 20) == [cause, "a"] and processes.tail(tmp_path / "absent") == []
