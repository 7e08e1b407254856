"""Paired rounds: the interval, the error rates of the rule on simulated noise, the order of a round, and what ends it."""

import math
import re
import time

import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.cost.paired_times import LOOKS, Usage, Verdict, compare_times, described, judge, median_interval, used
from hpnlp.types import InputError


def test_interval_is_the_widest_whose_binomial_tail_is_below_the_error():
    for count, rank in zip(LOOKS, (1, 3, 9, 22), strict=True):  # of Bin(n, 1/2), by hand
        assert median_interval(range(1, count + 1)) == (rank, count + 1 - rank)
    assert median_interval(range(7)) == (-math.inf, math.inf)


class Machine:
    """A clock without time: a program is a pair of its seconds and the function of the round that disturbs it."""

    def __init__(self, seed, noise=0.0, bursts=0.0, drift=0.0):
        self.draw, self.order = np.random.default_rng(seed), []
        self.noise, self.bursts, self.drift = noise, bursts, drift

    def use(self, program, calls):
        self.order.append(program.__name__)
        factor = math.exp(self.noise * self.draw.standard_normal() + self.drift * len(self.order))
        wall = program() * factor * (2 if self.draw.random() < self.bursts else 1)
        return Usage(wall, program())


def named(name, seconds):
    def program():
        return seconds

    program.__name__ = name
    return program


def compare(machine, **seconds):
    programs = {name: named(name, s) for name, s in seconds.items()}
    return compare_times(named("base", 1.0), programs, use=machine.use)


def words(comparison, name):
    times = comparison.programs[name]
    return described(times.wall, times.cpu)


NOISE = ({"noise": 0.02}, {"noise": 0.06, "bursts": 0.2, "drift": 1e-3})


@pytest.mark.parametrize("noise", NOISE)
def test_equal_programs_are_called_different_in_at_most_five_percent_and_a_tenth_is_found(noise):
    equal = [compare(Machine(seed, **noise), a=1.0).programs["a"].wall.verdict for seed in range(300)]
    assert sum(verdict in (Verdict.FASTER, Verdict.SLOWER) for verdict in equal) <= 0.05 * len(equal)
    faster = [compare(Machine(seed, **noise), a=0.9).programs["a"].wall.verdict for seed in range(100)]
    assert faster.count(Verdict.FASTER) >= 90 and Verdict.SLOWER not in faster


def test_noise_that_only_adds_time_does_not_favour_a_program():
    verdicts, medians = [], []
    for seed in range(300):
        draw = np.random.default_rng(seed)
        use = lambda program, calls, draw=draw: Usage(program() * math.exp(draw.exponential(0.2)))  # noqa: E731
        times = compare_times(named("base", 1.0), {"a": named("a", 1.0)}, use=use).programs["a"]
        verdicts.append(times.wall.verdict)
        medians.append(math.log(times.wall.median))
    assert verdicts.count(Verdict.FASTER) <= 0.03 * 300 and verdicts.count(Verdict.SLOWER) <= 0.03 * 300
    assert abs(np.median(medians)) < 0.005


def test_rounds_reverse_their_order_and_programs_leave_with_their_verdict():
    machine = Machine(0, noise=0.001)
    result = compare(machine, twice=2.0, same=1.0)
    rounds = machine.order[-4 * LOOKS[0] :]
    assert rounds[:8] == ["base", "twice", "same", "base", "base", "same", "twice", "base"]
    assert {name: times.wall.verdict for name, times in result.programs.items()} == {
        "twice": Verdict.SLOWER, "same": Verdict.EQUAL,
    }  # fmt: skip
    assert len(result.programs["same"].program) == LOOKS[0]
    assert result.programs["twice"].wall.low < 2 < result.programs["twice"].wall.high
    assert words(result, "twice") == "2 times slower (2 to 2)"
    assert words(result, "same") == "as fast as before (between 0 % less and 0 % more time)"


def test_cold_caches_after_another_program_do_not_favour_the_baseline():
    """Two measurements of the baseline follow each other; a call after one of another program takes twice as long."""
    last, noise = [""], np.random.default_rng(0)

    def use(program, calls):
        cold, last[0] = last[0] != program.__name__, program.__name__
        return Usage(program() * (calls + cold) / calls * math.exp(0.01 * noise.standard_normal()))

    programs = {name: named(name, 0.002) for name in "abc"}
    result = compare_times(named("base", 0.002), programs, use=use)
    assert result.baseline == pytest.approx(0.002, rel=0.01) and not result.is_biased
    assert all(times.wall.median == pytest.approx(1.0, abs=0.01) for times in result.programs.values())


def test_more_programs_than_a_group_have_a_baseline_each_and_all_rounds_end_at_a_limit():
    machine = Machine(1, noise=0.3)
    result = compare(machine, **{f"p{i}": 1.0 for i in range(5)})
    assert len(result.programs) == 5 and not result.is_biased
    short = compare_times(named("base", 1.0), {"a": named("a", 1.0)}, use=machine.use, seconds=0)
    assert len(short.programs["a"].program) == LOOKS[0]
    few = compare_times(named("base", 1.0), {"a": named("a", 0.5)}, use=machine.use, rounds=3)
    assert few.programs["a"].wall.verdict is Verdict.UNRESOLVED and "too few rounds" in words(few, "a")
    alone = compare_times(named("base", 1.0), {}, use=machine.use)
    assert not alone.programs and alone.baseline > 0
    many = compare_times(named("base", 1.0), {"a": named("a", 1.0)}, use=Machine(5, noise=0.5).use, rounds=1000)
    assert len(many.programs["a"].program) <= LOOKS[-1]
    idle = compare_times(named("base", 0.0), {"a": named("a", 0.0)}, use=machine.use)
    assert idle.programs["a"].wall.verdict is Verdict.EQUAL
    with pytest.raises(InputError, match="rounds=0: expected at least 1"):
        compare_times(named("base", 1.0), {}, rounds=0)


def test_a_second_measurement_of_the_baseline_that_always_takes_longer_is_a_bias():
    machine, count = Machine(2, noise=0.001), 0

    def use(program, calls):
        nonlocal count
        usage = machine.use(program, calls)
        count += program.__name__ == "base"
        return Usage(usage.wall * (1.1 if count % 2 else 1.0))

    assert compare_times(named("base", 1.0), {"a": named("a", 1.0)}, use=use).is_biased


def test_less_work_is_named_where_the_wall_time_is_not_resolved():
    noisy = Machine(3, noise=0.5)

    def use(program, calls):
        return Usage(noisy.use(program, calls).wall, program())

    result = compare_times(named("base", 1.0), {"a": named("a", 0.95)}, use=use)
    assert re.fullmatch(
        r"not resolved in wall time \(.* less and .* more time\), at 0.95 of the CPU time", words(result, "a")
    )


def test_usage_counts_the_wall_and_the_processor():
    asleep, awake = used(lambda: time.sleep(0.02), 2), used(lambda: jnp.linalg.eigh(jnp.eye(200))[0], 2)
    assert asleep.wall >= 0.02 > 2 * asleep.user and awake.user > 0
    assert judge([0.5] * 8) is Verdict.SLOWER
