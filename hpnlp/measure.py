"""Costs of a program (FLOPs, memory of its compiled form, time), and files of benchmark results."""

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

from hpnlp.atomic_file import replace_bytes
from hpnlp.cost.flop_count import count_flops as count_flops  # part of this module's interface
from hpnlp.cost.flop_count import jaxpr_flops, jitted
from hpnlp.types import InputError
from hpnlp.version import __version__

# Peak dense bf16 FLOP/s of one device by `device_kind`. A kind may contain several keys: the longest one applies.
# NVIDIA: data sheets (H100, H200, HGX B200, A100, L4), of which most give the figure with 2:4 sparsity, halved here. TPUs:
# "peak compute per chip (bf16)" of Google Cloud's pages on TPU versions. "lite" is the e of v5e and v6e.
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


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Memory of a compiled program on one device, in bytes.

    Attributes:
      argument: Arguments.
      output: Results.
      temp: Temporary buffers, which are allocated as one block for the whole run.
      alias: Results that reuse the memory of donated arguments.
    """

    argument: int
    output: int
    temp: int
    alias: int

    @property
    def peak(self) -> int:
        """Memory that must be free to run the program, with its arguments, in bytes."""
        return self.argument + self.output + self.temp - self.alias


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program, which is called like the function that it was made from, without static arguments.

    Attributes:
      executable: The compiled program of JAX.
      jaxpr: The traced function.
      trace_seconds: Duration of tracing.
      compile_seconds: Duration of lowering and compilation; little if a persistent cache holds the program.
      memory: Memory that the program needs on one device.
    """

    executable: Any
    jaxpr: Any
    trace_seconds: float
    compile_seconds: float
    memory: ProgramMemory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.executable(*args, **kwargs)

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs on all devices together, as `count_flops` counts them."""
        return jaxpr_flops(self.jaxpr, None)


def compile(
    fn: Callable[..., Any],
    *args: Any,
    jit_options: Mapping[str, Any] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Compiled:
    """Compiles a function for given arguments, so that time, memory and FLOPs are those of the same program.

    Args:
      fn: A function, jitted or not.
      *args: Arguments of the function, arrays or `jax.ShapeDtypeStruct`s.
      jit_options: Arguments of `jax.jit` (donate_argnums, static_argnames, in_shardings, ...), if `fn` is not jitted.
      compiler_options: Options of XLA for this program.
      **kwargs: Keyword arguments of the function.

    Returns:
      The compiled program.

    Raises:
      InputError: `jit_options` for a function that is jitted already.
    """
    if jit_options and isinstance(fn, jax.stages.Wrapped):
        raise InputError(f"jit_options={sorted(jit_options)}: fn is jitted already, pass the options to its jax.jit")
    start = time.perf_counter()
    traced = jitted(fn, **dict(jit_options or {})).trace(*args, **kwargs)
    traced_at = time.perf_counter()
    executable = traced.lower().compile(dict(compiler_options) if compiler_options else None)
    compiled_at = time.perf_counter()
    stats = executable.memory_analysis()
    sizes = (getattr(stats, f"{field.name}_size_in_bytes") for field in dataclasses.fields(ProgramMemory))
    return Compiled(executable, traced.jaxpr, traced_at - start, compiled_at - traced_at, ProgramMemory(*sizes))


@dataclasses.dataclass(frozen=True)
class Timing:
    """Duration of one call, in several rounds."""

    all: tuple[float | int, ...]  #: seconds of the call in each round

    @property
    def median(self) -> float:
        return statistics.median(self.all)

    @property
    def min(self) -> float:
        return min(self.all)

    def over(self, other: Timing) -> float:
        """Ratio to another function that was timed in the same rounds.

        Args:
          other: Timing of the other function.

        Returns:
          The median of the ratios of each round, in which a drift of the machine cancels.
        """
        return statistics.median(self.ratios(other))

    def ratios(self, other: Timing) -> tuple[float, ...]:
        """Ratio to another function in each round.

        Args:
          other: Timing of a function that was timed in the same rounds.

        Returns:
          One ratio for each round. With seven rounds, the least and the largest bound the median with a probability of 98 %.
        """
        return tuple(a / b for a, b in zip(self.all, other.all, strict=True))

    def interval(self, other: Timing) -> tuple[float, float]:
        """Interval of at least 95 % of `over`, by order statistics of the ratios of each round.

        Args:
          other: Timing of a function that was timed in the same rounds.

        Returns:
          `(low, high)`; the least and the largest ratio of fewer than nine rounds.
        """
        from hpnlp.cost.paired_times import median_interval  # no part of a training run

        ratios = self.ratios(other)
        low, high = median_interval(ratios, 0.05)
        return max(low, min(ratios)), min(high, max(ratios))


def timeit(
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 5,
    warmup: int = 1,
    min_seconds: float = 0.01,
    enqueue: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, Timing]:
    """Times functions side by side, interleaved: A B A B, so that a slow period of the machine affects all of them.

    Each call waits for the JAX arrays that it returns, and for other objects with a method `block_until_ready`.

    Args:
      functions: Name -> function without arguments.
      rounds: Number of measurements of each function.
      warmup: Number of calls before the first measurement, at least one. They compile, and fill caches.
      min_seconds: A measurement repeats the call for about this long, and is the mean.
      enqueue: Only the last call of a measurement waits, so that an accelerator is not idle between calls.
      progress: Called with the number of measurements that are done, and of all, before each of them.

    Returns:
      Name -> Timing.

    Raises:
      InputError: `rounds` or `warmup` below one.
    """
    for name, value in (("rounds", rounds), ("warmup", warmup)):
        if value < 1:
            raise InputError(f"{name}={value}: expected at least 1")
    calls = {}
    for name, function in functions.items():
        for _ in range(warmup):
            _seconds(function, 1, enqueue)
        calls[name] = max(1, math.ceil(min_seconds / max(_seconds(function, 1, enqueue), 1e-9)))
    measured: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds):
        for index, (name, function) in enumerate(functions.items()):
            progress(number * len(functions) + index, rounds * len(functions))
            measured[name].append(_seconds(function, calls[name], enqueue))
    return {name: Timing(tuple(seconds)) for name, seconds in measured.items()}


def _seconds(function: Callable[[], Any], calls: int, enqueue: bool) -> float:
    start = time.perf_counter()
    for call in range(calls):
        result = function()
        if not enqueue or call == calls - 1:
            jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def mean_interval(values: Sequence[float | int]) -> tuple[float, float | None]:
    """Mean of a few numbers, such as differences of paired runs, with its 95 % interval by Student's t distribution.

    Args:
      values: The numbers.

    Returns:
      `(mean, half of the interval)`; None for the half of a single number.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    return mean, t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def t_quantile(degrees: int) -> float:
    """Half the width of a 95 % interval of Student's t distribution, in standard errors.

    Args:
      degrees: Degrees of freedom, at least 1.

    Returns:
      The quantile at 0.975.
    """
    from scipy import special

    return float(special.stdtrit(degrees, 0.975))


def peak_memory_bytes() -> int:
    """Peak memory so far.

    Returns:
      Bytes of the local device with the highest peak; where devices do not report it (CPU), of the process.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks) if peaks else _process_peak_bytes()


def memory_bytes() -> int:
    """Memory of one local device; where devices do not report it (CPU), an equal share of `machine_bytes`.

    Returns:
      Bytes.
    """
    devices = jax.local_devices()
    limits = [s["bytes_limit"] for s in (device.memory_stats() for device in devices) if s and "bytes_limit" in s]
    return min(limits) if limits else machine_bytes() // len(devices)


def machine_bytes() -> int:
    """Memory that this process may use: the machine's, or the limit of the control group if it is less.

    Returns:
      Bytes.
    """
    groups = [Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory/memory.limit_in_bytes")]
    limits = [text for path in groups if path.exists() and (text := path.read_text().strip()).isdigit()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *map(int, limits)])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device or the machine could not allocate an array.

    Args:
      error: Any exception.

    Returns:
      True for an out-of-memory error.
    """
    exhausted = isinstance(error, jax.errors.JaxRuntimeError) and re.search(
        "RESOURCE_EXHAUSTED|Out of memory", str(error)
    )
    return bool(exhausted) or isinstance(error, MemoryError)


def _process_peak_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # preferred because ru_maxrss on Linux starts at the memory of the parent process
        line = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if line:
            return int(line[1]) * 1024
    import resource  # does not exist on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of one device, from its data sheet.

    Args:
      device_kind: As JAX reports it.

    Returns:
      FLOP/s, or None for a device that is not in PEAK_FLOPS (such as any CPU).
    """
    # Only complete words match: an L40 is not an L4.
    known = [key for key in PEAK_FLOPS if re.search(rf"\b{re.escape(key)}\b", device_kind, re.IGNORECASE)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def training_flops(parameters: int, tokens: int, *, layers: int, width: int, length: int, causal: bool = True) -> float:
    """FLOPs of a training step that count for its MFU, without recomputation.

    6 x `parameters` x `tokens`, and for attention 12 x `width` x `length` per token and layer (two products, once forward and
    twice backward), of which a causal model needs half (Chowdhery et al. 2022, "PaLM", appendix B, which
    does not halve).

    Args:
      parameters: Number of parameters, without embedding tables.
      tokens: Tokens of the step, over all devices.
      layers: Number of attention layers.
      width: Heads x head size of one layer.
      length: Tokens per sequence.
      causal: Whether attention is causal.

    Returns:
      The number of FLOPs.
    """
    attention = 12 * layers * width * length * tokens
    return 6.0 * parameters * tokens + (attention / 2 if causal else attention)


def mfu(flops: float, seconds: float, *, devices: int = 1, device_kind: str | None = None) -> float | None:
    """Model FLOPs utilisation: the fraction of the peak dense bf16 FLOP/s that is used.

    Args:
      flops: FLOPs of a step, as `training_flops` counts them.
      seconds: Duration of the step.
      devices: Number of devices.
      device_kind: As JAX reports it; None for that of the first local device.

    Returns:
      A fraction of 1, or None for a device that is not in PEAK_FLOPS.
    """
    peak = peak_flops(jax.local_devices()[0].device_kind if device_kind is None else device_kind)
    return None if peak is None else flops / (seconds * devices * peak)


def environment() -> dict[str, Any]:
    """Environment of a measurement, without host name, user name and paths.

    Returns:
      Versions, devices, processor and commit. In a copy without the repository, the commit is the value of HPNLP_COMMIT.
    """
    device = jax.local_devices()[0]
    commit, dirty = _commit()
    driver = (
        _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if device.platform == "gpu"
        else None
    )
    return {
        "hpnlp": __version__,
        "commit": commit or os.environ.get("HPNLP_COMMIT"),
        "dirty": dirty,  # whether Python files differ from the commit
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "system": f"{platform.system()} {platform.machine()}",
        "backend": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        **({"driver": driver.splitlines()[0]} if driver else {}),
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
    """`(commit, dirty)`: the commit of this file, and whether Python files differ from it; Nones outside of a checkout."""
    file = Path(__file__).resolve()
    git = ("git", "-C", str(file.parent))
    # An installed package may be inside another project's repository, which then does not track this file.
    if _output(*git, "ls-files", "--error-unmatch", file.name) is None:
        return None, None
    commit = _output(*git, "rev-parse", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--", ":(top)*.py")
    return commit, None if commit is None or changed is None else bool(changed)


def _output(*command: str) -> str | None:
    """Output of a command, or None if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_result(
    name: str,
    rows: Sequence[dict[str, Any]],
    directory: str | os.PathLike[str],
    measured_in: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the environment and the rows of a benchmark to `<name>-<device>.json`, atomically.

    Args:
      name: Name of the benchmark.
      rows: Name -> plain value or numpy scalar, one dict per row.
      directory: Directory of the file; it is created if missing.
      measured_in: `environment()` of the process that measured; None for this process.

    Returns:
      The path of the file.

    Raises:
      ValueError: A value is NaN or infinite, which JSON cannot represent.
    """
    measured_in = measured_in or environment()
    result = {"bench": name, "environment": measured_in, "rows": rows}
    text = json.dumps(result, indent=2, allow_nan=False, default=lambda value: value.item()) + "\n"
    path = result_path(name, directory, measured_in["device"])
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, text.encode())
    return path


def result_path(name: str, directory: str | os.PathLike[str], device: str) -> Path:
    """The file that `write_result` writes.

    Args:
      name: Name of the benchmark.
      directory: Directory of the file.
      device: As JAX reports it.

    Returns:
      The path.
    """
    return Path(directory, f"{name}-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json")
