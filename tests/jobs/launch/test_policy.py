"""Actions after an attempt: by exit code, by progress, and by repetition at a step."""

from hpnlp.jobs.launch.policy import ABORTED, KILLED, Action, AttemptOutcome, Policy, cause


def decide(*outcomes, max_restarts=2, counts=(4,), checkpoint=None):
    """`(action, code, delay, processes)` after the last outcome, and the reason; no jitter."""
    policy = Policy(max_restarts, counts, checkpoint)
    decisions = [policy.decide(outcome, 0.0) for outcome in outcomes]
    assert all(decision.action is Action.RESTART for decision in decisions[:-1]), decisions
    return decisions[-1]


def test_exit_codes_decide():
    for outcome, action, code in (
        (AttemptOutcome(0), Action.DONE, 0),
        (AttemptOutcome(2), Action.STOP, 2),
        (AttemptOutcome(130, stopped="SIGTERM"), Action.STOP, 130),
        (AttemptOutcome(KILLED, stopped="SIGINT"), Action.STOP, 130),
        *(
            (AttemptOutcome(code, phase="step", step=7), Action.RESTART, code)
            for code in (1, 75, 130, 134, 137, 139, 143)
        ),
    ):
        decision = decide(outcome)
        assert (decision.action, decision.code) == (action, code)


def test_attempts_without_a_newer_checkpoint_use_up_the_budget():
    killed = [AttemptOutcome(KILLED, step=3 * i, checkpoint=10) for i in range(1, 4)]
    decision = decide(*killed, checkpoint=10)
    assert decision.action is Action.STOP and decision.reason == "3 attempts in a row have saved no newer checkpoint"
    assert decide(*killed, checkpoint=None).action is Action.RESTART  # the first has saved step 10
    assert decide(*killed[:2], checkpoint=10).reason == "restart 2 of 2 without a newer checkpoint"
    assert decide(killed[0], max_restarts=0, checkpoint=10).action is Action.STOP


def test_attempts_that_save_are_restarted_without_limit():
    outcomes = [AttemptOutcome(KILLED, step=10 * i + 5, checkpoint=10 * i) for i in range(1, 30)]
    decision = decide(*outcomes)
    assert (
        decision.action is Action.RESTART
        and decision.delay == 1.0
        and decision.reason == "restart from a newer checkpoint"
    )


def test_delays_double_up_to_a_minute():
    killed = AttemptOutcome(KILLED)
    delays = [decide(*[killed] * count, max_restarts=10).delay for count in range(1, 9)]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
    assert Policy(2, [1], None).decide(killed, 1.0).delay == 0.5  # jitter


def test_step_that_fails_twice_in_the_same_way_is_given_up():
    for first, second, stops in (
        (AttemptOutcome(1, step=1234, checkpoint=1230), AttemptOutcome(1, step=1234, checkpoint=1230), True),
        (AttemptOutcome(139, step=1234), AttemptOutcome(139, step=1236), True),  # the host runs ahead of the devices
        (AttemptOutcome(1, step=1234), AttemptOutcome(1, step=1237), False),
        (AttemptOutcome(1, step=1234), AttemptOutcome(139, step=1234), False),
        (AttemptOutcome(ABORTED, step=7, is_stuck=True), AttemptOutcome(ABORTED, step=7, is_stuck=True), True),
        (AttemptOutcome(ABORTED, step=7, is_stuck=True), AttemptOutcome(ABORTED, step=8, is_stuck=True), False),
        (AttemptOutcome(1, step=7, checkpoint=6), AttemptOutcome(1, step=9, checkpoint=8), False),  # step 7 was passed
        (AttemptOutcome(KILLED, step=7), AttemptOutcome(KILLED, step=7), False),  # from outside
        (AttemptOutcome(75, step=7), AttemptOutcome(75, step=7), False),
    ):
        decision = decide(first, second)
        assert (decision.action is Action.STOP) == stops
        assert (decision.reason == f"step {second.step} fails every time") == stops


def test_preemptions_are_not_counted():
    decision = decide(*[AttemptOutcome(130, step=5)] * 20)
    assert decision.action is Action.RESTART and decision.reason == "a process was preempted"


def test_other_ports_are_tried_at_once_and_not_counted():
    failed = AttemptOutcome(75, phase="join", port_failed=True)
    decision = decide(*[failed] * 20)
    assert decision.action is Action.RESTART and decision.delay == 0.0
    assert decide(*[failed] * 21).reason == "restart 1 of 2 without a newer checkpoint"


def test_fewer_processes_follow_two_failures():
    killed = AttemptOutcome(KILLED, step=5)
    assert decide(killed, counts=(4, 2)).processes == 4
    decision = decide(killed, killed, counts=(4, 2))
    assert decision.processes == 2 and decision.reason == "4 processes have failed twice: 2 processes"
    assert decide(*[killed] * 4, counts=(4, 2)).processes == 2
    assert decide(*[killed] * 5, counts=(4, 2)).action is Action.STOP
    assert decide(*[killed] * 2, AttemptOutcome(0), counts=(4, 2)).action is Action.DONE


def test_cause_of_several_ends():
    for ends, expected in (
        ([(0, 75), (1, 137)], (1, 137)),
        ([(0, 134), (1, 75), (2, 1)], (2, 1)),
        ([(0, 1), (1, 2)], (1, 2)),
        ([(1, 139), (0, 1)], (1, 139)),
        ([(1, 75), (0, 75)], (1, 75)),
        ([(0, 75), (1, 130)], (1, 130)),
    ):
        assert cause(ends) == expected
