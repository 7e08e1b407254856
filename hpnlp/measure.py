"""What a program costs: FLOPs from its jaxpr, seconds and bytes from its compiled form, and where it was measured."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import core

import hpnlp
from hpnlp.types import InputError

# Dense bf16 FLOP/s of one device by `device_kind`; the longest key that the kind contains counts.
# NVIDIA's data sheets (H100, H200, HGX B200, A100, L4) print most of these with 2:4 sparsity: halved here. TPUs: the
# "peak compute per chip (bf16)" of Google Cloud's TPU version pages; "lite" is the e of v5e and v6e.
PEAK_FLOPS = {
    "A100": 312e12,
    "B200": 2.25e15,
    "H100": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756.5e12,
    "H200": 989.4e12,
    "H200 NVL": 835.5e12,
    "L4": 121e12,
    "TPU v4": 275e12,
    "TPU v5": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


def count_flops(fn: Callable[..., Any], *args: Any, while_trips: int | None = None, **kwargs: Any) -> int:
    """FLOPs of the matrix products and convolutions of `fn(*args, **kwargs)`, two for each multiply-add.

    Loops count with their trips, a `cond` with its dearest branch, a `shard_map` with the work of all its devices, a
    Pallas kernel by its own cost estimate where it has one and else by its body times its grid. A convolution's taps on
    padding and on the zeros of dilation do not count. Counted as traced: products whose result is not used are in.
    Elementwise operations, reductions, factorizations and calls into libraries (cuDNN attention) are not.

    Args:
        fn: a function, jitted or not; args, kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        while_trips: how often each loop of unknown length is taken to run.

    Raises:
        InputError: a loop of unknown length holds products and `while_trips` is None.

    Cost: one trace; nothing is compiled.
    """
    return _count(_jitted(fn).trace(*args, **kwargs).jaxpr, while_trips)


def _jitted(fn: Callable[..., Any], **options: Any) -> Any:
    return fn if hasattr(fn, "trace") else jax.jit(fn, **options)


def _count(jaxpr: Any, while_trips: int | None) -> int:
    # A ClosedJaxpr holds the Jaxpr that has the equations; from jax 0.12 on the two are one.
    return sum(_count_equation(equation, while_trips) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _count_equation(equation: Any, while_trips: int | None) -> int:
    name, params = equation.primitive.name, equation.params
    if name in PRODUCTS:
        return PRODUCTS[name](equation)
    if name == "pallas_call" and params["cost_estimate"] is not None:
        return int(params["cost_estimate"].flops)
    if name == "cond":
        return max(_count(branch, while_trips) for branch in params["branches"])
    if name == "custom_linear_solve":  # its other jaxprs are for derivatives
        return _count(params["jaxprs"].solve, while_trips)

    inner = sum(_count(jaxpr, while_trips) for jaxpr in core.jaxprs_in_params(params))
    if inner == 0:
        return 0
    if name == "while":
        if while_trips is None:
            raise InputError(
                "count_flops met a while loop that multiplies matrices and whose length is known at run time only: "
                "pass while_trips=, or give lax.fori_loop Python ints as bounds"
            )
        return inner * while_trips
    return inner * _repeats(name, params)


def _repeats(name: str, params: Mapping[str, Any]) -> int:
    """How often the jaxprs among an equation's parameters run."""
    if name == "scan":
        return params["length"]
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid)
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1


def _dot_general(equation: Any) -> int:
    (contracting, _), _ = equation.params["dimension_numbers"]
    lhs = equation.invars[0].aval.shape
    return 2 * equation.outvars[0].aval.size * math.prod(lhs[i] for i in contracting)


def _ragged_dot(equation: Any) -> int:
    """Each row meets the matrix of its own group only."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracting, _), _ = numbers.dot_dimension_numbers
    lhs, _, groups = (operand.aval for operand in equation.invars)
    products = equation.outvars[0].aval.size * math.prod(lhs.shape[i] for i in contracting)
    # Where the groups split the contraction, each group has a result of its own, and its share of the products.
    ragged_contraction = set(numbers.lhs_ragged_dimensions) & set(contracting)
    return 2 * products // (groups.shape[-1] if ragged_contraction else 1)


def _conv_general_dilated(equation: Any) -> int:
    params = equation.params
    numbers = params["dimension_numbers"]
    lhs, rhs = (operand.aval.shape for operand in equation.invars)
    out = equation.outvars[0].aval.shape
    taps = 1
    for i, (before, _) in enumerate(params["padding"]):
        n, kernel, positions = lhs[numbers.lhs_spec[2 + i]], rhs[numbers.rhs_spec[2 + i]], out[numbers.out_spec[2 + i]]
        dilation = params["lhs_dilation"][i]
        # Where in the (dilated) input the kernel's taps fall, for each position of the output.
        at = np.arange(positions)[:, None] * params["window_strides"][i]
        at = at + np.arange(kernel) * params["rhs_dilation"][i] - before
        taps *= int(np.sum((at >= 0) & (at <= (n - 1) * dilation) & (at % dilation == 0)))
    in_features = rhs[numbers.rhs_spec[1]]  # of one feature group
    return 2 * out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * in_features * taps


PRODUCTS: dict[str, Callable[[Any], int]] = {
    "conv_general_dilated": _conv_general_dilated,
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device while a program runs, as the compiler has laid them out."""

    argument: int
    output: int
    temp: int
    alias: int  # output that reuses the place of a donated argument

    @property
    def peak(self) -> int:
        """What must be free to run the program: its temporaries are allocated as one block for the whole run."""
        return self.argument + self.output + self.temp - self.alias


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program, called like the function it was made from (static arguments left out)."""

    executable: Any
    jaxpr: Any
    trace_seconds: float
    compile_seconds: float  # lowering and compiling; little where a persistent cache knows the program
    memory: Memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.executable(*args, **kwargs)

    @functools.cached_property
    def flops(self) -> int:
        """As `count_flops`, of all devices together."""
        return _count(self.jaxpr, None)


def compile(
    fn: Callable[..., Any],
    *args: Any,
    jit_options: Mapping[str, Any] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Compiled:
    """Compiles `fn` for these arguments, so that time, bytes and FLOPs come from one and the same program.

    Args:
        fn: a function, jitted or not; args, kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        jit_options: for `jax.jit` (donate_argnums, static_argnames, in_shardings, ...), where `fn` is not yet jitted.
        compiler_options: XLA's, for this program only.

    Raises:
        InputError: `jit_options` for a function that is jitted already.
    """
    if jit_options and hasattr(fn, "trace"):
        raise InputError(f"jit_options {sorted(jit_options)} came with a jitted function: pass them to its jax.jit")
    start = time.perf_counter()
    traced = _jitted(fn, **dict(jit_options or {})).trace(*args, **kwargs)
    traced_at = time.perf_counter()
    executable = traced.lower().compile(dict(compiler_options) if compiler_options else None)
    compiled_at = time.perf_counter()
    stats = executable.memory_analysis()
    sizes = (getattr(stats, f"{field.name}_size_in_bytes") for field in dataclasses.fields(Memory))
    return Compiled(executable, traced.jaxpr, traced_at - start, compiled_at - traced_at, Memory(*sizes))


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call, one figure a round."""

    all: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.all)

    @property
    def min(self) -> float:
        return min(self.all)

    def over(self, other: Timing) -> float:
        """The median of the ratios to `other`, round by round: a drift of the machine that both saw cancels."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.all, other.all, strict=True))


def timeit(
    functions: Mapping[str, Callable[[], Any]], *, rounds: int = 5, warmup: int = 1, min_seconds: float = 0.01
) -> dict[str, Timing]:
    """Times functions of no arguments side by side: A B A B, not A A B B, so that a slow spell falls on all of them.

    Every call is waited for, in JAX's sense; a function of another library must do its own waiting.

    Args:
        functions: name -> function.
        rounds: measurements of each.
        warmup: calls before the first measurement, at least one; they compile, and fill caches.
        min_seconds: a measurement repeats its call until it lasts about this long, and gives the mean.

    Raises:
        InputError: `rounds` or `warmup` below one.
    """
    for name, value in (("rounds", rounds), ("warmup", warmup)):
        if value < 1:
            raise InputError(f"{name} is {value}: expected 1 or more")
    calls = {}
    for name, function in functions.items():
        for _ in range(warmup):
            _seconds(function, 1)
        calls[name] = max(1, math.ceil(min_seconds / max(_seconds(function, 1), 1e-9)))
    measured: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            measured[name].append(_seconds(function, calls[name]))
    return {name: Timing(tuple(seconds)) for name, seconds in measured.items()}


def _seconds(function: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(function())
    return (time.perf_counter() - start) / calls


def peak_memory_bytes() -> int:
    """The most bytes that one local device has held so far; on devices that do not say (CPU), that the process has."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks) if peaks else _process_peak_bytes()


def memory_bytes() -> int:
    """Returns the bytes that one local device can hold; on devices that do not report it (CPU), an equal part of
    `machine_bytes`."""
    devices = jax.local_devices()
    limits = [s["bytes_limit"] for s in (device.memory_stats() for device in devices) if s and "bytes_limit" in s]
    return min(limits) if limits else machine_bytes() // len(devices)


def machine_bytes() -> int:
    """Returns the bytes of memory that this process may use: the machine's, or the limit of its control group."""
    groups = [Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory/memory.limit_in_bytes")]
    limits = [text for path in groups if path.exists() and (text := path.read_text().strip()).isdigit()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *map(int, limits)])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or this machine could not allocate an array."""
    exhausted = isinstance(error, jax.errors.JaxRuntimeError) and re.search(
        "RESOURCE_EXHAUSTED|Out of memory", str(error)
    )
    return bool(exhausted) or isinstance(error, MemoryError)


def _process_peak_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # not ru_maxrss, which on Linux starts from what the parent process held
        line = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if line:
            return int(line[1]) * 1024
    import resource  # where there is one: not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_flops(device_kind: str) -> float | None:
    """The data sheet's dense bf16 FLOP/s of one device, or None for one that PEAK_FLOPS does not know (any CPU)."""
    # Matched as whole words, so that an L40 is no L4.
    known = [key for key in PEAK_FLOPS if re.search(rf"\b{re.escape(key)}\b", device_kind, re.IGNORECASE)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def training_flops(parameters: int, tokens: int, *, layers: int, width: int, length: int, causal: bool = True) -> float:
    """FLOPs that a training step is credited with when its MFU is stated; recomputation earns nothing.

    6 x `parameters` x `tokens`, and for attention 12 x `width` x `length` for each token and layer (two products,
    forward and twice backward), of which a causal model needs half (Chowdhery et al. 2022, "PaLM", appendix B, which
    does not halve).

    Args:
        parameters: all but the embedding tables.
        tokens: in the step, over all devices.
        layers, width: attention layers, and heads x head dim of one.
        length: tokens in a sequence.
    """
    attention = 12 * layers * width * length * tokens
    return 6.0 * parameters * tokens + (attention / 2 if causal else attention)


def mfu(flops: float, seconds: float, *, devices: int = 1, device_kind: str | None = None) -> float | None:
    """Model FLOPs utilization: `flops` in `seconds` over the dense bf16 peak of `devices`, a fraction of 1.

    Args:
        flops: as `training_flops` counts them.
        device_kind: of the first local device where None.

    Returns:
        None where PEAK_FLOPS does not know the device.
    """
    peak = peak_flops(jax.local_devices()[0].device_kind if device_kind is None else device_kind)
    return None if peak is None else flops / (seconds * devices * peak)


def environment() -> dict[str, Any]:
    """Where a figure was measured: versions, devices, processor and commit; no host name, user name or path."""
    device = jax.local_devices()[0]
    commit, dirty = _commit()
    return {
        "hpnlp": hpnlp.__version__,
        "commit": commit,
        "dirty": dirty,  # whether a Python file differed from the commit
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "system": f"{platform.system()} {platform.machine()}",
        "backend": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    line = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    if line:
        return line[1]
    return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()


def _commit() -> tuple[str | None, bool | None]:
    """The commit that this file belongs to, and whether Python files differ from it; Nones outside a checkout."""
    here = Path(__file__).resolve()
    git = ("git", "-C", str(here.parent))
    # Asked of this very file: an installed package may lie inside a repository that is not its own.
    if _output(*git, "ls-files", "--error-unmatch", here.name) is None:
        return None, None
    commit = _output(*git, "rev-parse", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--", ":(top)*.py")
    return commit, None if commit is None or changed is None else bool(changed)


def _output(*command: str) -> str | None:
    """What a command prints, or None where it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_result(name: str, rows: Sequence[dict[str, Any]], directory: str | os.PathLike[str]) -> Path:
    """Writes `<name>-<device>.json`: the environment and every row of a benchmark; whole or not at all.

    Args:
        name: of the benchmark; rows: plain values and numpy scalars by name.

    Returns:
        The path written.

    Raises:
        ValueError: a value is NaN or infinite, which JSON has no word for.
    """
    where = environment()
    result = {"bench": name, "environment": where, "rows": rows}
    text = json.dumps(result, indent=2, allow_nan=False, default=lambda value: value.item()) + "\n"
    device = re.sub(r"[^a-z0-9]+", "-", where["device"].lower()).strip("-")
    path = Path(directory, f"{name}-{device}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, "utf-8")
    os.replace(part, path)
    return path
