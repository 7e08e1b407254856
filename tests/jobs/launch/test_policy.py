"""Actions after an attempt: by exit code, by progress, and by repetition at a step."""

import pytest

from hpnlp.jobs.launch.policy import ABORTED, KILLED, Action, Outcome, Policy, cause


def decide(*outcomes, max_restarts=2, counts=(4,), checkpoint=None):
    """`(action, code, delay, processes)` after the last outcome, and the reason; no jitter."""
    policy = Policy(max_restarts, counts, checkpoint)
    decisions = [policy.decide(outcome, 0.0) for outcome in outcomes]
    assert all(decision.action is Action.RESTART for decision in decisions[:-1]), decisions
    return decisions[-1]


@pytest.mark.parametrize(
    ("outcome", "action", "code"),
    [
        (Outcome(0), Action.DONE, 0),
        (Outcome(2), Action.STOP, 2),
        (Outcome(130, stopped="SIGTERM"), Action.STOP, 130),
        (Outcome(KILLED, stopped="SIGINT"), Action.STOP, 130),
        *((Outcome(code, phase="step", step=7), Action.RESTART, code) for code in (1, 75, 130, 134, 137, 139, 143)),
    ],
)
def test_exit_codes_decide(outcome, action, code):
    decision = decide(outcome)
    assert (decision.action, decision.code) == (action, code)


def test_attempts_without_a_newer_checkpoint_use_up_the_budget():
    killed = [Outcome(KILLED, step=3 * i, checkpoint=10) for i in range(1, 4)]
    decision = decide(*killed, checkpoint=10)
    assert decision.action is Action.STOP and decision.reason == "3 attempts in a row have saved no newer checkpoint"
    assert decide(*killed, checkpoint=None).action is Action.RESTART  # the first has saved step 10
    assert decide(*killed[:2], checkpoint=10).reason == "restart 2 of 2 without a newer checkpoint"
    assert decide(killed[0], max_restarts=0, checkpoint=10).action is Action.STOP


def test_attempts_that_save_are_restarted_without_limit():
    outcomes = [Outcome(KILLED, step=10 * i + 5, checkpoint=10 * i) for i in range(1, 30)]
    decision = decide(*outcomes)
    assert (
        decision.action is Action.RESTART
        and decision.delay == 1.0
        and decision.reason == "restart from a newer checkpoint"
    )


def test_delays_double_up_to_a_minute():
    killed = Outcome(KILLED)
    delays = [decide(*[killed] * count, max_restarts=10).delay for count in range(1, 9)]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
    assert Policy(2, [1], None).decide(killed, 1.0).delay == 0.5  # jitter


@pytest.mark.parametrize(
    ("first", "second", "stops"),
    [
        (Outcome(1, step=1234, checkpoint=1230), Outcome(1, step=1234, checkpoint=1230), True),
        (Outcome(139, step=1234), Outcome(139, step=1236), True),  # the host runs ahead of the devices
        (Outcome(1, step=1234), Outcome(1, step=1237), False),
        (Outcome(1, step=1234), Outcome(139, step=1234), False),
        (Outcome(ABORTED, step=7, is_stuck=True), Outcome(ABORTED, step=7, is_stuck=True), True),
        (Outcome(ABORTED, step=7, is_stuck=True), Outcome(ABORTED, step=8, is_stuck=True), False),
        (Outcome(1, step=7, checkpoint=6), Outcome(1, step=9, checkpoint=8), False),  # step 7 was passed
        (Outcome(KILLED, step=7), Outcome(KILLED, step=7), False),  # from outside
        (Outcome(75, step=7), Outcome(75, step=7), False),
    ],
)
def test_step_that_fails_twice_in_the_same_way_is_given_up(first, second, stops):
    decision = decide(first, second)
    assert (decision.action is Action.STOP) == stops
    assert (decision.reason == f"step {second.step} fails every time") == stops


def test_preemptions_are_not_counted():
    decision = decide(*[Outcome(130, step=5)] * 20)
    assert decision.action is Action.RESTART and decision.reason == "a process was preempted"


def test_other_ports_are_tried_at_once_and_not_counted():
    failed = Outcome(75, phase="join", port_failed=True)
    decision = decide(*[failed] * 20)
    assert decision.action is Action.RESTART and decision.delay == 0.0
    assert decide(*[failed] * 21).reason == "restart 1 of 2 without a newer checkpoint"


def test_fewer_processes_follow_two_failures():
    killed = Outcome(KILLED, step=5)
    assert decide(killed, counts=(4, 2)).processes == 4
    decision = decide(killed, killed, counts=(4, 2))
    assert decision.processes == 2 and decision.reason == "4 processes have failed twice: 2 processes"
    assert decide(*[killed] * 4, counts=(4, 2)).processes == 2
    assert decide(*[killed] * 5, counts=(4, 2)).action is Action.STOP
    assert decide(*[killed] * 2, Outcome(0), counts=(4, 2)).action is Action.DONE


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(0, 75), (1, 137)], (1, 137)),
        ([(0, 134), (1, 75), (2, 1)], (2, 1)),
        ([(0, 1), (1, 2)], (1, 2)),
        ([(1, 139), (0, 1)], (1, 139)),
        ([(1, 75), (0, 75)], (1, 75)),
        ([(0, 75), (1, 130)], (1, 130)),
    ],
)
def test_cause_of_several_ends(ends, expected):
    assert cause(ends) == expected
