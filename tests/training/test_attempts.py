"""Attempts of a run: names, order, and the refusal of stale processes and of processes beside a supervisor."""

import fcntl

import pytest

from hpnlp.errors import TemporaryError
from hpnlp.training.processes import attempts
from hpnlp.training.processes.attempts import Attempt
from tests.messages import raises


def test_attempts_are_read_from_the_environment():
    assert attempts.current({}) is None
    assert attempts.current({"HPNLP_ATTEMPT": "3:job17"}) == Attempt(3, "job17")
    raises("HPNLP_ATTEMPT=3: expected NUMBER:TOKEN", attempts.current, {"HPNLP_ATTEMPT": "3"})


def test_directories_without_attempts_have_no_fence(tmp_path):
    assert attempts.claim(tmp_path, None) is None and not list(tmp_path.iterdir())


def test_writer_of_an_earlier_attempt_is_refused(tmp_path):
    fence = attempts.claim(tmp_path, Attempt(1, "a"))
    fence.check()
    attempts.record(tmp_path, Attempt(2, "b"))
    with pytest.raises(
        TemporaryError, match="this process belongs to attempt 1:a of .*, and the newest is 2:b: it ends"
    ):
        fence.check()


def test_process_without_an_attempt_ends_earlier_attempts(tmp_path):
    fence = attempts.claim(tmp_path, Attempt(1, "a"))
    plain = attempts.claim(tmp_path, None)
    plain.check()
    with pytest.raises(TemporaryError, match="and the newest is 2:"):
        fence.check()


def test_earlier_restart_of_a_job_is_refused_and_another_job_is_not(tmp_path):
    attempts.claim(tmp_path, Attempt(3, "job17"))
    with pytest.raises(TemporaryError, match="attempt 2:job17 of .* is over: attempt 3:job17 has begun"):
        attempts.claim(tmp_path, Attempt(2, "job17"))
    attempts.claim(tmp_path, Attempt(0, "job18")).check()


@pytest.mark.parametrize("own", [None, Attempt(1, "a")])
def test_processes_beside_a_supervisor_are_refused(tmp_path, own):
    attempts.record(tmp_path, Attempt(2, "b"))
    with open(tmp_path / attempts.SUPERVISOR_LOCK, "w") as lock:
        lock.write("process 12 on here")
        lock.flush()
        attempts.claim(tmp_path, own)  # the supervisor has ended
        attempts.record(tmp_path, Attempt(2, "b"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            TemporaryError, match="is supervised by hpnlp launch, process 12 on here, whose attempt is 2:b"
        ):
            attempts.claim(tmp_path, own)
        attempts.claim(tmp_path, Attempt(2, "b")).check()
