"""Progress of processes: limits of phases, the process that holds up the others, and slow hosts."""

import pytest

from hpnlp.jobs.launch import liveness
from hpnlp.jobs.launch.liveness import Pace, Watch


def train(watch, first, last, now=0.0, *, data=0.01, step=1.0):
    """Steps from `first` to `last`; returns the time at which the line of the last one was written."""
    for number in range(first, last + 1):
        watch.line(f"data {number}", now)
        watch.line(f"step {number}", now + data)
        now += step
    return now - step + data


def test_limits_follow_known_durations():
    pace = Pace(wait=100.0, hang_seconds=30.0)
    assert pace.limit("start") == pace.limit("join") == 160.0
    assert (pace.limit("setup"), pace.limit("step"), pace.limit("other")) == (1800.0, 600.0, 1800.0)
    train(Watch(pace, 0.0), 1, 10)
    assert pace.limit("step") == pace.limit("data") == 30.0
    slow = Pace(wait=100.0, hang_seconds=30.0)
    train(Watch(slow, 0.0), 1, 10, step=7.0)
    assert slow.limit("step") == pytest.approx(70.0)
    slowest = Pace(wait=100.0, hang_seconds=30.0)
    train(Watch(slowest, 0.0), 1, 10, step=120.0)
    assert slowest.limit("step") == 600.0


def test_silent_process_is_overdue():
    watch = Watch(Pace(wait=100.0, hang_seconds=30.0), 0.0)
    assert not watch.is_overdue(160.0) and watch.is_overdue(161.0)
    now = train(watch, 1, 10)
    assert not watch.is_overdue(now + 30.0) and watch.is_overdue(now + 30.1)
    watch.line("checkpoint 10", now)
    assert not watch.is_overdue(now + 600.0)


def test_saves_evaluations_and_compilations_are_no_durations_of_steps():
    """The training loop waits for checkpoints after every step, mostly for no time."""
    pace = Pace(wait=100.0, hang_seconds=30.0)
    watch, now = Watch(pace, 0.0), 0.0
    for step in range(1, 40):
        watch.line(f"data {step}", now)
        watch.line(f"{'setup' if step in (1, 9) else 'step'} {step}", now + 0.5)
        now += 500.0 if step in (1, 9) else 2.5
        watch.line(f"checkpoint {step}", now)
        now += 500.0 if step % 10 == 0 else 0.0
        watch.line(f"step {step}", now)
        if step == 25:
            watch.line("eval 25", now)
            now += 500.0
    assert set(pace.seconds["step"]) == {2.5} and len(pace.seconds["step"]) == 36


def test_lines_that_are_read_late_show_no_durations():
    """After a pause of the supervisor, the lines of many steps arrive at once."""
    pace = Pace(wait=100.0, hang_seconds=30.0)
    watch = Watch(pace, 0.0)
    now = train(watch, 1, 10, step=7.0) + 7.0
    watch.set_late(600.0)
    now = train(watch, 11, 100, now + 600.0, step=0.0, data=0.0)
    watch.set_late(0.0)
    train(watch, 101, 110, now, step=7.0)
    assert set(pace.seconds["step"]) == {7.0} and pace.limit("step") == 70.0


def test_pauses_of_the_supervisor_are_no_silence():
    """A paused container pauses the processes too; the time before and after the pause counts."""
    watch = Watch(Pace(wait=100.0, hang_seconds=30.0), 0.0)
    now = train(watch, 1, 10) + 20.0
    watch.set_late(500.0)
    now += 500.0
    assert watch.silent(now) == pytest.approx(20.0) and not watch.is_overdue(now + 9.0) and watch.is_overdue(now + 11.0)


def test_evaluations_have_limits_by_batch():
    pace = Pace(wait=100.0, hang_seconds=30.0)
    watch = Watch(pace, 0.0)
    for batch in range(7):
        watch.line("eval 5", 20.0 * batch)
    assert pace.limit("eval") == 200.0
    watch.line("data 6", 200.0)
    watch.line("eval 6", 210.0)  # the next evaluation may compile
    assert pace.limit("eval") == 1800.0
    for batch in range(7):
        watch.line("eval 6", 210.0 + batch)
    assert pace.limit("eval") == 120.0


def test_malformed_lines_are_ignored():
    watch = Watch(Pace(1.0, 1.0), 0.0)
    for line in ("", "step", "step x", " 3"):
        watch.line(line, 5.0)
    assert (watch.phase, watch.step, watch.time) == ("start", 0, 0.0)


def test_culprit_holds_up_the_others():
    for lines, expected in (
        (["step 7", "step 6"], 1),  # the lowest step
        (["step 7", "data 7"], 1),  # the other computes, and waits for this one
        (["checkpoint 7", "step 7"], 0),
        (["step 7", "step 7"], 0),  # silent for longest
    ):
        pace = Pace(1.0, 1.0)
        watches = [Watch(pace, 0.0) for _ in lines]
        for time, (watch, line) in enumerate(zip(watches, lines, strict=True)):
            watch.line(line, float(time))
        assert liveness.culprit(watches) == expected


@pytest.mark.parametrize(("data", "expected"), [(0.3, 2), (0.11, None), (0.1, None)])
def test_slow_host_is_found(data, expected):
    """Three hosts of 0.1 s before each step of 1 s; 0.11 s is less than 1.5 times as much."""
    pace = Pace(1.0, 30.0)
    watches = [Watch(pace, 0.0) for _ in range(3)]
    for index, watch in enumerate(watches):
        train(watch, 1, 60, data=data if index == 2 else 0.1)
    assert liveness.straggler(watches) == expected
    assert liveness.straggler(watches[:1]) is None


@pytest.mark.parametrize(("step", "data"), [(1.0, 0.01), (0.02, 0.009)])
def test_short_host_times_are_no_stragglers(step, data):
    watches = [Watch(Pace(1.0, 30.0), 0.0) for _ in range(2)]
    train(watches[0], 1, 60, data=0.001, step=step)
    train(watches[1], 1, 60, data=data, step=step)
    assert liveness.straggler(watches) is None
