"""Programs timed against a baseline in paired rounds, with a verdict for each."""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from hpnlp.errors import InputError

LOOKS = (8, 16, 32, 64)  # rounds after which a verdict may be given
ERROR = 0.05 / len(LOOKS)  # probability that an interval at one look misses the median
LEAST = 0.02  # smaller differences of the logarithm of a time do not matter
GROUP = 4  # programs that are measured beside one baseline
NOISY = 0.1  # half width of the interval of equal programs from which on measurements take twice as many calls
WARM_CALLS = 5  # most calls before the first measurement
WARM = 0.2  # two calls that differ by less are warm
WARMING = 1 / 3  # calls before a measurement, of the number that is measured
LONG = 0.1  # seconds of a call beside which cold caches do not matter


class Verdict(enum.StrEnum):
    """Result of a comparison of a program with the baseline."""

    FASTER = "faster"
    SLOWER = "slower"
    EQUAL = "no difference"
    UNRESOLVED = "not resolved"


@dataclasses.dataclass(frozen=True)
class Usage:
    """Means over the calls of one measurement.

    Attributes:
      wall: Seconds of a call.
      user: Seconds of all threads of the process outside the kernel.
      system: Seconds of all threads of the process in the kernel, as for page faults.
      switches: Involuntary context switches.
    """

    wall: float | int
    user: float | int = 0.0
    system: float | int = 0.0
    switches: float | int = 0.0


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Time of a program over that of the baseline.

    Attributes:
      median: Median of the rounds.
      low: Lower end of the interval of the median; 0 if the rounds are too few.
      high: Upper end; infinite if the rounds are too few.
      verdict: By the rule of `judge`.
    """

    median: float
    low: float
    high: float
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class PairedTimes:
    """A program and its baseline in the same rounds.

    Attributes:
      program: Usage in each round.
      baseline: Usage at the beginning and at the end of each round.
      amount: Work of a call of the program over that of the baseline, by which ratios are divided.
    """

    program: tuple[Usage, ...]
    baseline: tuple[tuple[Usage, Usage], ...]
    amount: float | int = 1.0

    @property
    def seconds(self) -> float:
        """Median wall time of a call of the program."""
        return statistics.median(usage.wall for usage in self.program)

    @property
    def wall(self) -> Ratio:
        """Ratio of wall times."""
        return ratio(self._log_ratios(lambda usage: usage.wall))

    @property
    def cpu(self) -> Ratio:
        """Ratio of CPU times, which vary less and do not show lost parallelism."""
        return ratio(self._log_ratios(lambda usage: usage.user + usage.system))

    def _log_ratios(self, value: Callable[[Usage], float | int]) -> list[float]:
        """One ratio for each round, to the two measurements of the baseline in turn.

        A mean of the two would have another distribution than one measurement: with noise that only adds time, equal programs
        would seem faster.
        """
        return [
            _log(value(usage)) - _log(value(pair[number % 2])) - math.log(self.amount)
            for number, (usage, pair) in enumerate(zip(self.program, self.baseline, strict=True))
        ]


@dataclasses.dataclass(frozen=True)
class TimeComparison:
    """Result of `compare_times`.

    Attributes:
      programs: Name -> times.
      baseline: Median wall time of a call of the baseline, in seconds.
      equal: Ratio of the two measurements of the baseline in each round: what this machine makes of equal programs.
    """

    programs: Mapping[str, PairedTimes]
    baseline: float
    equal: Ratio

    @property
    def is_biased(self) -> bool:
        """Whether the two measurements of the baseline differ, so that no ratio can be trusted."""
        return self.equal.low > math.exp(LEAST) or self.equal.high < math.exp(-LEAST)


def _log(seconds: float | int) -> float:
    """The logarithm of a time, which may be 0: the clock of CPU time has steps."""
    return math.log(max(seconds, 1e-12))


def median_interval(values: Iterable[float | int], error: float = ERROR) -> tuple[float | int, float | int]:
    """Interval of the median by order statistics, which holds for any distribution.

    Args:
      values: Independent measurements.
      error: Largest probability that the interval misses the median.

    Returns:
      (low, high); infinite if the values are too few.
    """
    ordered = sorted(values)
    count = len(ordered)
    tail, rank = 0.0, 0  # the interval leaves out rank - 1 values on each side
    while (tail := tail + math.comb(count, rank) * 0.5**count) <= error / 2:
        rank += 1
    return (ordered[rank - 1], ordered[count - rank]) if rank else (-math.inf, math.inf)


def judge(log_ratios: Sequence[float | int]) -> Verdict:
    """Verdict at one of LOOKS on the logarithms of paired ratios.

    Equal programs are called faster or slower in at most 5 % of comparisons that end at the first verdict.

    Args:
      log_ratios: log(time of the program / time of the baseline), one for each round.

    Returns:
      SLOWER or FASTER if the interval of the median excludes 0 and the median exceeds LEAST; EQUAL if the interval lies within
      LEAST on both sides; otherwise UNRESOLVED.
    """
    low, high = median_interval(log_ratios)
    median = statistics.median(log_ratios)
    if low > 0 and median > LEAST:
        return Verdict.SLOWER
    if high < 0 and median < -LEAST:
        return Verdict.FASTER
    return Verdict.EQUAL if low > -LEAST and high < LEAST else Verdict.UNRESOLVED


def ratio(log_ratios: Sequence[float | int]) -> Ratio:
    """The ratio of times, with its interval and verdict.

    Args:
      log_ratios: As for `judge`.

    Returns:
      The Ratio.
    """
    low, high = median_interval(log_ratios)
    return Ratio(math.exp(statistics.median(log_ratios)), math.exp(low), math.exp(high), judge(log_ratios))


def used(program: Callable[[], Any], calls: int) -> Usage:
    """Mean usage of some calls, each of which waits for the arrays that it returns.

    Args:
      program: Function without arguments.
      calls: Number of calls.

    Returns:
      The usage of one call.
    """
    import resource  # does not exist on Windows

    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(program())
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return Usage(
        wall / calls,
        (after.ru_utime - before.ru_utime) / calls,
        (after.ru_stime - before.ru_stime) / calls,
        (after.ru_nivcsw - before.ru_nivcsw) / calls,
    )


def compare_times(
    baseline: Callable[[], Any],
    programs: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = LOOKS[-1],
    seconds: float | int = math.inf,
    min_seconds: float | int = 0.01,
    amounts: Mapping[str, float | int] | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
    use: Callable[[Callable[[], Any], int], Usage] = used,
) -> TimeComparison:
    """Compares programs with a baseline by paired rounds, until each has a verdict.

    A round measures the baseline, up to four programs and the baseline again, the next round in the reverse order, so that a
    slow period of the machine and the position cancel. Some calls that do not count come before each measurement of a call of
    less than 0.1 s. Without them the baseline, measured last in one round and first in the next, would find its weights in the
    caches: equal programs of 1.6 ms seemed 6 % slower. Programs leave with their verdict at one of LOOKS. The best of many
    programs is a lucky one: compare it again before its ratio is quoted.

    Args:
      baseline: Function without arguments.
      programs: Name -> function without arguments.
      rounds: Most rounds of a program; those after the last of LOOKS are not run.
      seconds: Rounds of a group of four end at the first of LOOKS after so many seconds.
      min_seconds: A measurement repeats the call for about this long.
      amounts: Name of a program whose calls do more or less than those of the baseline, as more tokens -> by which factor.
      progress: Called with the number of measurements that are done, and the most that there can be.
      use: Measures some calls of a function.

    Returns:
      The times of each program; without any, of the baseline only.

    Raises:
      InputError: `rounds` below one.

    References:
      Kalibera and Jones 2013, "Rigorous benchmarking in reasonable time", for repetition where the variance arises.
    """
    if rounds < 1:
        raise InputError(f"rounds={rounds}: expected at least 1")
    rounds, names, amounts = min(rounds, LOOKS[-1]), list(programs), amounts or {}
    groups = [names[i : i + GROUP] for i in range(0, len(names), GROUP)] or [[]]
    total, done = rounds * (len(names) + 2 * len(groups)), 0
    results: dict[str, PairedTimes] = {}
    pairs: list[tuple[Usage, Usage]] = []

    for group in groups:
        functions = {"": baseline} | {name: programs[name] for name in group}
        calls = {name: _warm_calls(function, min_seconds, use) for name, function in functions.items()}
        times: dict[str, list[Usage]] = {name: [] for name in group}
        ends: list[tuple[Usage, Usage]] = []
        active, begun = group, time.monotonic()
        for number in range(1, rounds + 1):
            order = ["", *(active if number % 2 else active[::-1]), ""]
            measured = []
            for name in order:
                progress(done, total)
                untimed, timed = calls[name]
                if untimed:
                    use(functions[name], untimed)
                measured.append(use(functions[name], timed))
                done += 1
            for name, usage in zip(order[1:-1], measured[1:-1], strict=True):
                times[name].append(usage)
            ends.append((measured[0], measured[-1]))
            if number in LOOKS:
                active = [
                    name
                    for name in active
                    if _paired(times[name], ends, amounts.get(name, 1)).wall.verdict is Verdict.UNRESOLVED
                ]
                if group and not active or time.monotonic() - begun > seconds:
                    break
            if number == LOOKS[1] and _half_width(ends) > NOISY:
                calls = {name: (untimed, 2 * timed) for name, (untimed, timed) in calls.items()}
        results |= {name: _paired(times[name], ends, amounts.get(name, 1)) for name in group}
        pairs += ends
    equal = ratio([_log(second.wall) - _log(first.wall) for first, second in pairs])
    return TimeComparison(results, statistics.median(usage.wall for pair in pairs for usage in pair), equal)


def _paired(times: Sequence[Usage], baseline: Sequence[tuple[Usage, Usage]], amount: float | int) -> PairedTimes:
    """A program that was measured in the first rounds of a baseline."""
    return PairedTimes(tuple(times), tuple(baseline[: len(times)]), amount)


def _half_width(pairs: Sequence[tuple[Usage, Usage]]) -> float:
    """Half width of the interval of the two measurements of the baseline."""
    low, high = median_interval(_log(second.wall) - _log(first.wall) for first, second in pairs)
    return (high - low) / 2


def _warm_calls(function: Callable[[], Any], min_seconds: float | int, use: Callable[..., Usage]) -> tuple[int, int]:
    """Calls a function until it is compiled.

    Returns:
      Number of calls before a measurement, and of those in it, which take `min_seconds`.
    """
    use(function, 1)
    last = use(function, 1).wall
    for _ in range(WARM_CALLS - 2):
        before, last = last, use(function, 1).wall
        if abs(last - before) <= WARM * last:
            break
    timed = max(1, math.ceil(min_seconds / max(last, 1e-9)))
    return 0 if last > LONG else math.ceil(WARMING * timed), timed


def described(wall: Ratio, cpu: Ratio) -> str:
    """The verdict on a program in words, as "1.9 times faster (1.8 to 2.0)".

    Args:
      wall: Ratio of wall times.
      cpu: Ratio of CPU times.

    Returns:
      The words. Where the wall time is not resolved and CPU time is, both are named.
    """
    if wall.verdict is Verdict.FASTER:
        return f"{_factor(1 / wall.median)} times faster ({_factor(1 / wall.high)} to {_factor(1 / wall.low)})"
    if wall.verdict is Verdict.SLOWER:
        return f"{_factor(wall.median)} times slower ({_factor(wall.low)} to {_factor(wall.high)})"
    if not math.isfinite(wall.high):
        return f"at {_factor(wall.median)} of the time in too few rounds for an interval"
    between = f"between {_change(wall.low)} and {_change(wall.high)} time"
    if wall.verdict is Verdict.EQUAL:
        return f"as fast as before ({between})"
    if cpu.verdict in (Verdict.FASTER, Verdict.SLOWER):
        return f"not resolved in wall time ({between}), at {_factor(cpu.median)} of the CPU time"
    return f"not resolved ({between})"


def _factor(value: float) -> str:
    """Two significant digits, and two decimals near 1."""
    if 0.9 < value < 1.1:
        return f"{value:.2f}"
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _change(value: float) -> str:
    return f"{100 * (value - 1):.0f} % more" if value >= 1 else f"{100 * (1 - value):.0f} % less"
