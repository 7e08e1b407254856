"""The supervisor over shell scripts that stand for training processes: restarts, limits, logs, events, and no orphans."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpnlp.errors import TemporaryError
from hpnlp.jobs.launch import supervisor
from hpnlp.jobs.launch.supervisor import LaunchOptions, Supervisor
from hpnlp.training.processes import attempts
from hpnlp.training.processes.attempts import Attempt

# A script has the functions of a process: progress lines, a saved checkpoint. $I is the index, $A the number of the attempt.
PRELUDE = """
A=${HPNLP_ATTEMPT%%:*}
line() { echo "$1" >&$HPNLP_PROGRESS; }
steps() { for ((n = $1; n <= $2; n++)); do line "data $n"; line "step $n"; done; }
save() { mkdir -p "$W/checkpoints/$1"; }
"""
# hpnlp unblocks the signals that a supervisor blocks until its processes have set their handlers; bash does not.
UNBLOCK = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_SETMASK, []); os.execvp(sys.argv[1], sys.argv[1:])"
UNBLOCKED = (sys.executable, "-I", "-S", "-c", UNBLOCK)


class Lines(list):
    """Lines that a supervisor shows."""

    def text(self):
        return "\n".join(self)


@pytest.fixture
def supervise(tmp_path):
    """`supervise(script, **options)` runs a supervisor of two processes: `(exit code, lines, events)`."""

    def run(script, wake=None, **options):
        def start(process, processes, port):
            return [*UNBLOCKED, "bash", "-c", f"I={process}; N={processes}; P={port}; W={tmp_path}\n{PRELUDE}{script}"]

        settings = {"counts": (2,), "tick": 0.01, "settle": 0.1, "save": 5.0, "abort": 0.2, "backoff": 0.001} | options
        lines = Lines()
        made = Supervisor(
            tmp_path, start, LaunchOptions(**settings), environment={"PATH": os.environ["PATH"]}, show=lines.append
        )
        if wake is not None:
            threading.Thread(target=wake, args=(made, lines), daemon=True).start()
        code = made.run()
        events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        return code, lines, events

    return run


def kinds(events):
    return [event["event"] for event in events]


def test_processes_finish_with_logs_of_their_own(supervise, tmp_path):
    code, lines, events = supervise('echo "here is $I of $N"; save 3')
    assert code == 0 and kinds(events) == ["attempt", "end", "end", "done"]
    assert (tmp_path / "logs" / "attempt_1" / "process_1.log").read_text() == "here is 1 of 2\n"
    assert "here is 0 of 2" in lines and "here is 1 of 2" not in lines
    assert events[-1]["checkpoint"] == 3 and attempts.newest(tmp_path).number == 1


def test_death_of_a_process_restarts_all_with_another_token_and_port(supervise, tmp_path):
    script = """
    echo "$HPNLP_ATTEMPT $P" >> $W/$I.txt
    if [ $A = 1 ]; then steps 1 3; save 2
        if [ $I = 1 ]; then until [ -s $W/0.txt ]; do sleep 0.01; done; kill -9 $$; fi; sleep 60; fi
    steps 3 4"""
    begun = time.monotonic()
    code, lines, events = supervise(script)
    assert code == 0 and time.monotonic() - begun < 20
    assert kinds(events)[:4] == ["attempt", "end", "restart", "attempt"] and "resumed" in kinds(events)
    restart = events[2]
    assert (restart["code"], restart["process"], restart["step"], restart["checkpoint"], restart["steps_lost"]) == (
        137,
        1,
        3,
        2,
        0,
    )
    first, second = (tmp_path / "0.txt").read_text().split("\n")[:2]
    assert (tmp_path / "0.txt").read_text() == (tmp_path / "1.txt").read_text()
    assert len(set(first.split()) & set(second.split())) == 0
    assert "process 1 ended with SIGKILL at step 3 (step), newest checkpoint 2: restart from a newer" in lines.text()


def test_invalid_input_is_not_repeated(supervise):
    code, lines, events = supervise(
        '[ $I = 1 ] && echo "hpnlp: model.dims: did you mean model.dim?" && exit 2; sleep 60'
    )
    assert code == 2 and kinds(events).count("attempt") == 1
    assert "  hpnlp: model.dims: did you mean model.dim?" in lines
    assert lines[-1].endswith("no checkpoint: the input is invalid, and a restart would not change it")


def test_step_that_fails_every_time_is_tried_twice(supervise, tmp_path):
    (tmp_path / "config.json").write_text('{"data": {"batch_size": 16}}')
    code, lines, events = supervise('steps 1 6; [ $I = 1 ] && line "data 7" && exit 1; sleep 60')
    assert code == 1 and kinds(events).count("attempt") == 2
    assert lines[-1].endswith(
        "step 7 fails every time: it reads examples 96 to 111 of the training order, numbered from 0"
    )


def test_attempts_without_a_checkpoint_are_given_up(supervise):
    code, lines, events = supervise("kill -9 $$")
    assert code == 137 and kinds(events).count("attempt") == 3
    assert lines[-1].endswith("no checkpoint: 3 attempts in a row have saved no newer checkpoint")


def test_stuck_process_is_named_and_aborted(supervise, tmp_path):
    """Process 0 waits for process 1, as in a collective; process 1 ignores SIGTERM, and writes its stacks at SIGABRT."""
    script = """
    [ $A = 2 ] && exit 0
    steps 1 10
    if [ $I = 0 ]; then line "data 11"; line "step 11"; fi
    trap 'echo "the stacks of $I"; exit 134' ABRT
    trap '' TERM
    while true; do sleep 0.01; done"""
    code, lines, events = supervise(script, hang_seconds=0.2)
    assert code == 0
    stuck = next(event for event in events if event["event"] == "stuck")
    assert (stuck["process"], stuck["step"], stuck["phase"]) == (1, 10, "step") and stuck["seconds_to_notice"] > 0.2
    assert (tmp_path / "logs" / "attempt_1" / "process_1.log").read_text() == "the stacks of 1\n"
    assert (
        "  the stacks of 1" in lines and "launch: process 1 is stuck at step 10 (step), silent for 0 s" in lines.text()
    )


def test_processes_that_wait_for_one_that_compiles_are_not_stuck(supervise):
    script = """
    steps 1 10
    if [ $I = 1 ]; then line "data 11"; line "setup 11"; sleep 2; touch $W/compiled; exit 0; fi
    line "data 11"; line "step 11"; until [ -e $W/compiled ]; do sleep 0.01; done"""
    code, _, events = supervise(script, hang_seconds=1.0)  # more than a busy machine takes from one line to the next
    assert code == 0 and "stuck" not in kinds(events)


def test_stopped_process_is_stuck(supervise):
    script = "[ $A = 2 ] && exit 0; line 'setup 0'; [ $I = 1 ] && kill -STOP $$; sleep 60"
    code, lines, events = supervise(script, hang_seconds=0.2)
    assert code == 0 and next(event["process"] for event in events if event["event"] == "stuck") == 1
    assert "stopped by a signal such as SIGSTOP: its stacks are in" in lines.text()
    assert "launch: process 1 was stuck, and was aborted at step 0 (setup), no checkpoint: restart 1" in lines.text()


def test_peer_that_aborts_first_does_not_hide_a_stopped_process(supervise):
    """JAX aborts the others when it misses the heartbeats of a stopped process."""
    script = "[ $A = 2 ] && exit 0; steps 1 10; [ $I = 1 ] && kill -STOP $$; exit 134"
    code, _, events = supervise(script)
    restart = next(event for event in events if event["event"] == "restart")
    assert code == 0 and (restart["process"], restart["is_stuck"]) == (1, True)


# A supervisor of its own, whose process starts a process with another session, which only a subreaper can find.
ESCAPE = """
import sys
from pathlib import Path
from hpnlp.jobs.launch import processes
from hpnlp.jobs.launch.supervisor import LaunchOptions, Supervisor
processes.become_subreaper()
start = lambda process, processes, port: ["bash", "-c", "setsid sleep 1000 < /dev/null & echo $! > pid.txt; exit 2"]
sys.exit(Supervisor(Path("."), start, LaunchOptions(counts=(1,), tick=0.01), environment={"PATH": sys.argv[1]}).run())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_processes_that_leave_their_session_end_too(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(supervisor.__file__).parents[3])}
    command = [sys.executable, "-c", ESCAPE, os.environ["PATH"]]
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, check=False).returncode == 2
    assert not is_alive(int((tmp_path / "pid.txt").read_text()))


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_signal_saves_and_stops_without_a_restart(supervise, tmp_path):
    script = "trap 'save 5; exit 130' TERM; steps 1 5; touch $W/ready$I; while true; do sleep 0.01; done"

    def stop(made, _):
        wait_for(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
        made.stop(signal.SIGTERM)

    code, lines, events = supervise(script, wake=stop)
    assert code == 130 and kinds(events) == ["attempt", "end", "end", "stop"] and events[-1]["checkpoint"] == 5
    assert lines[-1].endswith("newest checkpoint 5: SIGTERM: stopped")
    assert any(line.startswith("launch: SIGTERM: the processes save a checkpoint") for line in lines)


def test_signal_between_attempts_stops(supervise):
    def stop(made, lines):
        wait_for(lambda: "restart 1 of 2" in lines.text())
        made.stop(signal.SIGINT)

    code, lines, events = supervise("exit 1", wake=stop, backoff=60.0)
    assert code == 130 and kinds(events).count("attempt") == 1
    assert (events[-1]["event"], events[-1]["code"], events[-1]["stopped"]) == ("stop", 130, "SIGINT")
    assert lines[-1] == "launch: SIGINT: stopped before the restart, no checkpoint"


def test_finished_process_sets_no_limit_for_the_others(supervise, tmp_path):
    """Process 0 writes the report after the others have finished."""
    script = '[ $I = 1 ] && exit 0; line "report 3"; sleep 0.5; touch $W/written'
    code, _, events = supervise(script, save=0.05)
    assert code == 0 and (tmp_path / "written").exists() and kinds(events).count("end") == 2
    assert (events[-1]["process"], events[-1]["phase"], events[-1]["step"]) == (0, "report", 3)


def test_deleted_directory_ends_the_supervisor(supervise, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "CHECK_SECONDS", 0.01)
    pids = tmp_path.parent / f"{tmp_path.name}-pids"
    with pytest.raises(TemporaryError, match="attempt is gone or damaged, as after .* was deleted, moved or unmounted"):
        supervise(f"echo $$ >> {pids}; [ $I = 1 ] && rm -r $W; sleep 60")
    assert not any(is_alive(int(pid)) for pid in pids.read_text().split())


def test_event_after_a_cut_line_has_a_line_of_its_own(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "x"}\n{"time": 12')
    made = Supervisor(tmp_path, lambda *_: [], LaunchOptions(counts=(1,)), environment={})
    made.event("a")
    made.event("b")
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert lines[1] == '{"time": 12' and [json.loads(lines[i])["event"] for i in (0, 2, 3)] == ["x", "a", "b"]


def test_output_without_line_ends_is_read_once(supervise, monkeypatch):
    monkeypatch.setattr(supervisor, "COPIED_BYTES", 1000)
    code, lines, _ = supervise("[ $I = 0 ] && head -c 2500 /dev/zero | tr '\\0' x; sleep 0.1; echo; echo end")
    shown = [line for line in lines if not line.startswith("launch")]
    assert code == 0 and [len(line) for line in shown] == [1000, 1000, 500, 3]


def test_attempts_with_a_damaged_record_follow_the_last_logs(supervise, tmp_path):
    (tmp_path / "attempt").write_bytes(b"\xff rubbish")
    (tmp_path / "logs" / "attempt_12").mkdir(parents=True)
    _, _, events = supervise("exit 0")
    assert events[0]["attempt"] == 13


def test_port_in_use_does_not_use_up_a_restart(supervise):
    code, _, events = supervise('line "join 0"; [ $A -lt 5 ] && exit 75; exit 0', max_restarts=1)
    ports = [event["port"] for event in events if event["event"] == "attempt"]
    assert (
        code == 0 and len(ports) == 5 and all(event["port_failed"] for event in events if event["event"] == "restart")
    )


def test_fewer_processes_go_on_after_two_failures(supervise):
    code, lines, events = supervise('[ $N = 2 ] && exit 1; echo "alone of $N"', counts=(2, 1))
    assert code == 0 and [event["processes"] for event in events if event["event"] == "attempt"] == [2, 2, 1]
    assert "alone of 1" in lines and "2 processes have failed twice: 1 processes" in lines.text()


def test_children_of_processes_end_with_them(supervise, tmp_path):
    supervise("sleep 1000 & echo $! >> $W/pids.txt; [ $A = 2 ] && exit 0; exit 1")
    for pid in (tmp_path / "pids.txt").read_text().split():
        wait_for(lambda: not is_alive(int(pid)))  # noqa: B023  (called at once)
        assert not is_alive(int(pid))


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_supervisor_ends_when_another_has_begun_an_attempt(supervise, tmp_path):
    with pytest.raises(TemporaryError, match="another supervisor has begun attempt 9:other of"):
        supervise("echo 9:other > $W/attempt; exit 1")


def test_second_supervisor_and_stale_process_are_refused_by_name(tmp_path):
    with (
        supervisor.locked(tmp_path),
        pytest.raises(TemporaryError, match=f"already, by process {os.getpid()} on .*, boot "),
        supervisor.locked(tmp_path),
    ):
        pass
    assert (tmp_path / "launch.lock").read_text() == ""
    with open(tmp_path / ".lock", "w") as lock:
        lock.write("process 7 on here")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with (
            pytest.raises(
                TemporaryError, match="a process of an earlier attempt writes to .*, process 7 on here: wait until"
            ),
            supervisor.locked(tmp_path),
        ):
            pass
    with supervisor.locked(tmp_path):
        pass


def test_attempts_are_numbered_on(supervise, tmp_path):
    attempts.record(tmp_path, Attempt(6, "a"))
    _, _, events = supervise("exit 0")
    assert events[0]["attempt"] == 7 and (tmp_path / "logs" / "attempt_7").is_dir()


def test_newest_checkpoint_is_a_complete_one(tmp_path):
    assert supervisor.newest_checkpoint(tmp_path) is None
    for name in ("9", "10", "11.orbax-checkpoint-tmp-12"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert supervisor.newest_checkpoint(tmp_path) == 10


def test_programs_that_cannot_be_started_raise(tmp_path):
    made = Supervisor(tmp_path, lambda *_: ["/no/such"], LaunchOptions(counts=(1,)), environment={})
    with pytest.raises(FileNotFoundError):
        made.run()
    assert not list(subprocess._active)
