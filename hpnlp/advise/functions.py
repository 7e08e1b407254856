"""Changes of any function of JAX that may make it faster: compilation, dtypes of its arguments, batches, compiler options.

Only what needs no knowledge of a model is tried: units are not removed, and parts have no names. `advise` does that for runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp import measure
from hpnlp.cost.flop_count import count_flops, jitted
from hpnlp.cost.paired_times import LEAST, LOOKS, Ratio, Verdict, compare_times, described
from hpnlp.tasks.reports.reporting import three_digits
from hpnlp.types import InputError

# Backend -> options of XLA that a program may gain from, each with the value that is not the default.
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_enable_fast_math": True, "xla_cpu_use_onednn": False},
    "gpu": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_latency_hiding_scheduler": True},
}
BATCHES = (2, 4)  # factors of the batch
CONFIRMED = 3  # changes that are measured again


@dataclasses.dataclass(frozen=True)
class FunctionFinding:
    """A changed function.

    Attributes:
      name: The change.
      ratio: Time over that of the function as it is, for as many examples; None if it could not be measured.
      cpu: Ratio of CPU times.
      difference: Largest difference of the results relative to the largest number of each array; None for other batches.
      error: The reason why it could not be measured; "" if it was.
      is_confirmed: Whether the ratio is that of new rounds.
    """

    name: str
    ratio: Ratio | None
    cpu: Ratio | None = None
    difference: float | None = None
    error: str = ""
    is_confirmed: bool = False


@dataclasses.dataclass(frozen=True)
class FunctionAdvice:
    """Measurements of a function.

    Attributes:
      seconds: Median time of a call as it is.
      equal: Ratio of two equal calls in each round.
      flops: FLOPs of the products of a call; None where they depend on the data.
      peak_bytes: Memory that the compiled function needs.
      findings: The changes, the largest gain first.
    """

    seconds: float
    equal: Ratio
    flops: int | None
    peak_bytes: int
    findings: Sequence[FunctionFinding]

    def render(self) -> str:
        """The measurements as Markdown."""
        rate = f", {three_digits(self.flops / self.seconds / 1e9)} GFLOP/s" if self.flops else ""
        lines = [
            f"A call takes {three_digits(1e3 * self.seconds)} ms{rate} and {three_digits(self.peak_bytes / 1e6)} MB. "
            f"Two equal calls differ by {100 * (self.equal.low - 1):.0f} to {100 * (self.equal.high - 1):.0f} %.",
            "",
            "| change | time | results differ by | measured again |",
            "| --- | --- | ---: | --- |",
        ]
        for finding in self.findings:
            difference = "" if finding.difference is None else f"{finding.difference:.1g}"
            time = (
                described(finding.ratio, finding.cpu or finding.ratio) if finding.ratio else f"failed: {finding.error}"
            )
            lines.append(f"| {finding.name} | {time} | {difference} | {'yes' if finding.is_confirmed else ''} |")
        return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class _Change:
    call: Callable[[], Any]
    amount: int = 1  # examples, over those of the function as it is


def advise_function(
    function: Callable[..., Any], *arguments: Any, batched: Sequence[int] = (), rounds: int = LOOKS[-1]
) -> FunctionAdvice:
    """Measures which changes make a function faster on this machine.

    Args:
      function: A function of JAX arrays, jitted or not, without side effects. It must not donate its arguments.
      *arguments: Its arguments, trees of arrays.
      batched: Numbers of the arguments whose arrays have examples along the first axis; () to leave the batch as it is.
      rounds: Most paired rounds of each change.

    Returns:
      The measurements. Whether a difference of the results matters is for the caller to decide.

    Raises:
      InputError: `batched` names no argument, or the function cannot be compiled.

    Cost: a compilation and up to 3 x 64 calls for each change; some 10 changes.
    """
    if wrong := [number for number in batched if not 0 <= number < len(arguments)]:
        raise InputError(f"batched={wrong[0]}: the function has {len(arguments)} arguments, of numbers from 0 on")
    arguments = jax.tree.map(jnp.asarray, arguments)
    try:
        compiled = measure.compile(function, *arguments)
    except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise InputError(f"the function cannot be compiled: {str(error).splitlines()[0]:.300}") from error
    expected = jax.block_until_ready(function(*arguments))
    changes, failed, differences = {}, [], {}
    for name, make in _changes(function, arguments, batched):
        try:
            change = make()
            result = jax.block_until_ready(change.call())
        except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            failed.append(FunctionFinding(name, None, error=str(error).splitlines()[0][:200]))
            continue
        changes[name] = change
        differences[name] = _difference(expected, result) if change.amount == 1 else None

    def baseline() -> Any:
        return function(*arguments)

    measured = _measured(baseline, changes, rounds, differences)
    faster = [f for f in measured if f.ratio and f.ratio.verdict is Verdict.FASTER and f.ratio.median < 1 - LEAST]
    chosen = {f.name: changes[f.name] for f in sorted(faster, key=_median)[:CONFIRMED]}
    again = _measured(baseline, chosen, rounds, differences) if chosen else []
    confirmed = {f.name: dataclasses.replace(f, is_confirmed=True) for f in again}
    findings = sorted((confirmed.get(f.name, f) for f in measured), key=_median)
    times = compare_times(baseline, {}, rounds=rounds)
    assert times.equal is not None
    try:
        flops = count_flops(function, *arguments)
    except InputError:  # a loop whose length depends on the data
        flops = None
    return FunctionAdvice(times.baseline, times.equal, flops, compiled.memory.peak, [*findings, *failed])


def _changes(
    function: Callable[..., Any], arguments: Sequence[Any], batched: Sequence[int]
) -> Iterator[tuple[str, Callable[[], _Change]]]:
    """Name of each change, and a function that makes it."""
    compiled = jitted(function)
    if compiled is not function:
        yield "jax.jit", lambda: _Change(lambda: compiled(*arguments))
    if any(x.dtype == jnp.float32 for x in jax.tree.leaves(arguments)):
        for dtype in (jnp.bfloat16, jnp.float16):
            yield f"arguments of {jnp.dtype(dtype).name}", functools.partial(_cast, compiled, arguments, dtype)
    for factor in BATCHES if batched else ():
        yield f"{factor} times the batch", functools.partial(_enlarged, compiled, arguments, batched, factor)
    for option, value in OPTIONS.get(jax.default_backend(), {}).items():
        yield f"{option}={value}", functools.partial(_optioned, compiled, arguments, {option: value})


def _cast(function: Callable[..., Any], arguments: Sequence[Any], dtype: Any) -> _Change:
    changed = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, arguments)
    return _Change(lambda: function(*changed))


def _enlarged(function: Callable[..., Any], arguments: Sequence[Any], batched: Sequence[int], factor: int) -> _Change:
    def repeated(number: int, argument: Any) -> Any:
        return jax.tree.map(lambda x: jnp.concatenate([x] * factor), argument) if number in batched else argument

    changed = [repeated(number, argument) for number, argument in enumerate(arguments)]
    return _Change(lambda: function(*changed), factor)


def _optioned(function: Any, arguments: Sequence[Any], options: dict[str, Any]) -> _Change:
    compiled = function.lower(*arguments).compile(options)
    return _Change(lambda: compiled(*arguments))


def _measured(
    baseline: Callable[[], Any], changes: dict[str, _Change], rounds: int, differences: dict[str, float | None]
) -> list[FunctionFinding]:
    times = compare_times(
        baseline,
        {name: change.call for name, change in changes.items()},
        rounds=rounds,
        amounts={name: change.amount for name, change in changes.items()},
    )
    return [FunctionFinding(name, t.wall, t.cpu, differences[name]) for name, t in times.programs.items()]


def _median(finding: FunctionFinding) -> float:
    return finding.ratio.median if finding.ratio else float("inf")


def _difference(expected: Any, actual: Any) -> float:
    """The largest difference of two results, relative to the largest number of each array."""
    largest = 0.0
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        difference = np.abs(a - b).max(initial=0.0) / max(np.abs(a).max(initial=0.0), 1e-30)
        largest = max(largest, float(difference) if np.isfinite(difference) else float("inf"))
    return largest
