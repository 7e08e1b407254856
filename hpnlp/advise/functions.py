"""Changes of any function of JAX that may make it faster: compilation, dtypes of its arguments, batches, compiler options.

Only what needs no knowledge of a model is tried: units are not removed, and parts have no names. `advise` does that for runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp import measure
from hpnlp.advise.trial import first_line
from hpnlp.cost.flop_count import count_flops, jitted
from hpnlp.cost.paired_times import LEAST, LOOKS, Ratio, TimeComparison, Verdict, compare_times, described
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
        low, high = (f"{100 * (limit - 1):.0f}" for limit in (self.equal.low, self.equal.high))
        noise = f" Two equal calls differ by {low} to {high} %." if math.isfinite(self.equal.high) else ""
        lines = [
            f"A call takes {three_digits(1e3 * self.seconds)} ms{rate} and {three_digits(self.peak_bytes / 1e6)} MB.{noise}",
        ]
        if not self.findings:
            return f"{lines[0]} No change applies.\n"
        lines += [
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
      function: A function of JAX arrays, jitted or not, without side effects. If it is not jitted, all changes are made to the
        jitted function.
      *arguments: Its arguments, trees of arrays or numbers. Set static arguments by `functools.partial`.
      batched: Numbers of the arguments whose arrays have examples along the first axis; () to leave the batch as it is.
      rounds: Most paired rounds of each change.

    Returns:
      The measurements. Whether a difference of the results matters is for the caller to decide.

    Raises:
      InputError: `batched` names no argument, an argument is no array, or the function cannot be compiled or donates its
        arguments, which no later call could read.

    Cost: a compilation and up to 3 x 64 calls for each change; some 10 changes.
    """
    if wrong := [number for number in batched if not 0 <= number < len(arguments)]:
        raise InputError(f"batched={wrong[0]}: the function has {len(arguments)} arguments, of numbers from 0 on")
    try:
        arguments = jax.tree.map(jnp.asarray, arguments)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"an argument is no array (set static ones by functools.partial): {first_line(error)}"
        ) from error
    try:
        compiled = measure.compile(function, *arguments)
    except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise InputError(f"the function cannot be compiled: {first_line(error)}") from error
    if any(info.donated for info in jax.tree.leaves(compiled.executable.args_info)):
        raise InputError(
            "the function donates its arguments, which no second call could read: pass it without donate_argnums"
        )
    expected = jax.block_until_ready(function(*arguments))
    changes, failed, differences = {}, [], {}
    for name, make in _changes(function, arguments, batched):
        try:
            change = make()
            result = jax.block_until_ready(change.call())
            differences[name] = _difference(expected, result) if change.amount == 1 else None
        except Exception as error:  # such as an assertion of the function on dtypes or shapes
            failed.append(FunctionFinding(name, None, error=first_line(error)))
            continue
        changes[name] = change
    times = _compared(function, arguments, changes, rounds)
    measured = {name: FunctionFinding(name, t.wall, t.cpu, differences[name]) for name, t in times.programs.items()}
    faster = [
        f for f in measured.values() if f.ratio and f.ratio.verdict is Verdict.FASTER and f.ratio.median < 1 - LEAST
    ]
    chosen = {f.name: changes[f.name] for f in sorted(faster, key=_median)[:CONFIRMED]}
    for name, t in _compared(function, arguments, chosen, rounds).programs.items() if chosen else ():
        measured[name] = FunctionFinding(name, t.wall, t.cpu, differences[name], is_confirmed=True)
    findings = sorted(measured.values(), key=_median)
    try:
        flops = count_flops(function, *arguments)
    except InputError:  # a loop whose length depends on the data
        flops = None
    return FunctionAdvice(times.baseline, times.equal, flops, compiled.memory.peak, [*findings, *failed])


def _changes(
    function: Callable[..., Any], arguments: Sequence[Any], batched: Sequence[int]
) -> Iterator[tuple[str, Callable[[], _Change]]]:
    """Name of each change, and a function that makes it."""
    compiled, prefix = jitted(function), ""
    if compiled is not function:
        yield "jax.jit", lambda: _Change(lambda: compiled(*arguments))
        prefix = "jax.jit + "
    if any(x.dtype == jnp.float32 for x in jax.tree.leaves(arguments)):
        for dtype in (jnp.bfloat16, jnp.float16):
            yield f"{prefix}arguments of {jnp.dtype(dtype).name}", functools.partial(_cast, compiled, arguments, dtype)
    for factor in BATCHES if batched else ():
        yield f"{prefix}{factor} times the batch", functools.partial(_enlarged, compiled, arguments, batched, factor)
    for option, value in OPTIONS.get(jax.default_backend(), {}).items():
        yield f"{prefix}{option}={value}", functools.partial(_optioned, compiled, arguments, {option: value})


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


def _compared(
    function: Callable[..., Any], arguments: Sequence[Any], changes: Mapping[str, _Change], rounds: int
) -> TimeComparison:
    return compare_times(
        lambda: function(*arguments),
        {name: change.call for name, change in changes.items()},
        rounds=rounds,
        amounts={name: change.amount for name, change in changes.items()},
    )


def _median(finding: FunctionFinding) -> float:
    return finding.ratio.median if finding.ratio else float("inf")


def _difference(expected: Any, actual: Any) -> float:
    """The largest difference of two results, relative to the largest finite number of each array.

    Equal infinities and NaNs do not differ, and other ones, or numbers beside zeros, differ infinitely.
    """
    largest = 0.0
    for a, b in zip(map(_numbers, jax.tree.leaves(expected)), map(_numbers, jax.tree.leaves(actual)), strict=True):
        is_equal = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            difference = float(np.where(is_equal, 0.0, np.abs(a - b)).max(initial=0.0))
        scale = float(np.abs(a[np.isfinite(a)]).max(initial=0.0))
        if difference:
            largest = max(largest, difference / scale if scale and math.isfinite(difference) else math.inf)
    return largest


def _numbers(array: Any) -> np.ndarray:
    """An array in double precision; of keys of random numbers, their data."""
    array = jnp.asarray(array)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array, np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64)
