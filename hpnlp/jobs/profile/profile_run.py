"""Profile of a run: time of a training step or of the loss by part of the model, with padding, data and compilation."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp import measure, tasks
from hpnlp.cost import traced_time
from hpnlp.cost.ablation import without_part
from hpnlp.cost.flop_count import flops_by_part
from hpnlp.cost.paired_times import LOOKS, Ratio, compare_times
from hpnlp.cost.parts import OTHER, PARTS, label
from hpnlp.cost.traced_time import COPIES, TracedTime
from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.jobs.profile import plots
from hpnlp.parallel.plan import Plan
from hpnlp.planner.devices import Device, this_cpu
from hpnlp.planner.jaxpr.jaxpr_cost import program_cost
from hpnlp.report.files import replace_text
from hpnlp.tasks.reports.reporting import three_digits
from hpnlp.training import gradients, run_directory
from hpnlp.training.run_directory import Run
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError

FILE, CHART = "profile_{program}.json", "profile_{program}.png"
TRAINING, LOSS = "training", "loss"
PROGRAMS = {TRAINING: "a training step", LOSS: "the loss of a batch"}
# Options of XLA: command buffers of a GPU hide operations from the profiler.
GPU_OPTIONS = {"xla_gpu_enable_command_buffer": ""}
LEAST_COVERAGE = 0.85  # share of the time in operations; below, shares are those of the recorded time only
DATA_BATCHES = 16
ROUNDS = 7
ABLATION_ROUNDS, ABLATION_SECONDS = LOOKS[1], 20.0
FAR = 0.05  # difference of the shares of a part by trace and by ablation that is said
SLOW_TRACE = 1.2  # a traced call that takes this much longer gives shares only


@dataclasses.dataclass(frozen=True)
class ProfileSettings:
    """Program of a profile.

    Attributes:
      program: TRAINING for a step of the run's optimizer, or LOSS for the forward pass.
      batch_size: Sequences of a batch; 0 for those of the run.
      calls: Calls of the trace.
      ablations: Number of the largest parts whose share is checked by the time of a program without their operations.
    """

    program: str = TRAINING
    batch_size: int = 0
    calls: int = traced_time.CALLS
    ablations: int = 0


@dataclasses.dataclass(frozen=True)
class Profile:
    """Time of a program by part, and what lies outside of it.

    Attributes:
      program: TRAINING or LOSS.
      step: Step of the checkpoint.
      shape: Sequences and tokens of a batch.
      seconds: Wall time of a call without a trace, in each round.
      traced: Time of a traced call by part.
      flops: FLOPs of a call by part; None where they depend on the batch.
      rate: FLOP/s of a product of 1024 x 1024 in float32 on this machine; None on an accelerator.
      least: Part -> seconds that its products or its memory traffic take at the rates of this machine, whichever is longer;
        empty on an accelerator.
      data_seconds: Median time until the next batch is ready, without a step beside it.
      padding: Share of the batch's tokens that are padding.
      compile_seconds: Time of tracing and compilation.
      environment: Versions and machine.
      ablated: Part -> time of the program without its operations over that of the program, see `cost.ablation`.
    """

    program: str
    step: int
    shape: tuple[int, int]
    seconds: tuple[float, ...]
    traced: TracedTime
    flops: Mapping[str, float | int] | None
    rate: float | None
    least: Mapping[str, float]
    data_seconds: float
    padding: float
    compile_seconds: float
    environment: Mapping[str, Any]
    ablated: Mapping[str, Ratio]

    @property
    def median(self) -> float:
        """Median wall time of a call, in seconds."""
        return statistics.median(self.seconds)

    def share(self, part: str) -> float:
        """Share of a part of the time of a traced call."""
        return self.traced.seconds.get(part, 0.0) / self.traced.total

    def model_parts(self) -> list[str]:
        """The parts that take time, the largest first, with OTHER and COPIES at the end."""
        named = sorted((name for name in self.traced.seconds if name in PARTS), key=self.share, reverse=True)
        return named + [name for name in (OTHER, COPIES) if name in self.traced.seconds]


def profile_run(
    workdir: str | Path,
    step: int | None = None,
    settings: ProfileSettings = ProfileSettings(),  # noqa: B008  (frozen)
    progress: Progress = ignore_progress,
) -> Profile:
    """Profiles the model of a run on batches of its training data.

    A training step is that of the run's model and optimizer on one device, without a teacher or rounded weights.

    Args:
      workdir: The run directory.
      step: Step of the checkpoint; None for the best one.
      settings: See ProfileSettings.
      progress: Called while data are read.

    Returns:
      The profile.

    Raises:
      InputError: A setting or the run is invalid, or the profiler records no operation.

    Cost: a compilation and some 40 calls of the program; for each ablation a compilation and 16 to 32 calls more.
    """
    if settings.program not in PROGRAMS:
        raise InputError(f"program={settings.program!r}: expected {' or '.join(PROGRAMS)}")
    run = run_directory.load(workdir, step)
    size = settings.batch_size or run.config.data.batch_size
    data = dataclasses.replace(run.config.data, batch_size=size)
    dataset = tasks.find(run.config.task).dataset(data, run.vocabulary, progress)
    batches = iter(dataset.train(seed=0))
    batch = {name: np.asarray(array) for name, array in next(batches).items() if name in run.model.batch_axes()}
    make = training_step if settings.program == TRAINING else loss_of_batch
    profiled = make(run, batch)
    timing = measure.timeit({"call": profiled.call}, rounds=ROUNDS, warmup=2)["call"]
    traced = traced_time.trace(profiled.call, profiled.compiled.executable.as_text(), settings.calls)
    device = this_cpu(1) if jax.default_backend() == "cpu" else None
    named = [name for name in traced.seconds if name in PARTS]
    largest = sorted(named, key=lambda name: -traced.seconds[name])[: settings.ablations]
    return Profile(
        settings.program,
        run.step,
        _shape(batch),
        timing.all,
        traced,
        profiled.flops,
        device.flops["float32"] if device else None,
        _least_seconds(profiled.compiled, device) if device else {},
        _data_seconds(batches),
        float(np.mean(batch["segment_ids"] == 0)) if "segment_ids" in batch else 0.0,
        profiled.compiled.trace_seconds + profiled.compiled.compile_seconds,
        measure.environment(),
        _ablated(profiled, largest, progress),
    )


def _ablated(profiled: ProfiledProgram, names: Sequence[str], progress: Progress) -> dict[str, Ratio]:
    """Times without each of some parts, in paired rounds with the whole program."""
    programs = {name: profiled.without(name) for name in names}
    if not programs:
        return {}
    times = compare_times(
        profiled.call,
        programs,
        rounds=ABLATION_ROUNDS,
        seconds=ABLATION_SECONDS,
        progress=lambda done, total: progress("timing without a part", done, total),
    )
    return {name: paired.wall for name, paired in times.programs.items()}


def _least_seconds(program: measure.Compiled, device: Device) -> dict[str, float]:
    """Seconds of each part by the roofline of a device."""
    costs = program_cost(program.jaxpr).by_part()
    seconds = {
        name or OTHER: cost.seconds(device.flops, device.memory_bandwidth, False) for name, cost in costs.items()
    }
    return {name: value for name, value in seconds.items() if value}


def _shape(batch: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """Sequences and tokens of each; of other examples, one token."""
    shape = batch.get("tokens", next(iter(batch.values()))).shape
    return shape[0], shape[1] if len(shape) > 1 else 1


@dataclasses.dataclass(frozen=True)
class ProfiledProgram:
    """A compiled program with its arguments.

    Attributes:
      call: Calls it; each call of a training step continues with the state of the one before.
      compiled: The compiled program.
      flops: FLOPs of a call by part; None where they depend on the batch.
      start: Makes the state that a call replaces, () without one, and the other arguments, both as trees.
    """

    call: Callable[[], Any]
    compiled: measure.Compiled
    flops: Mapping[str, float | int] | None
    start: Callable[[], tuple[Any, Any]]

    def without(self, name: str) -> Callable[[], Any]:
        """A call of the program without the operations of a part, see `cost.ablation.without_part`.

        Args:
          name: Entry of `cost.parts.PARTS`.

        Returns:
          A function without arguments, whose results are wrong.
        """
        state, others = map(jax.tree.leaves, self.start())
        function = without_part(self.compiled.jaxpr, name)

        def split(state: Any, others: Any) -> tuple[Any, Any]:
            results = function(*state, *others)
            return results[: len(state)], results[len(state) :]

        program = jax.jit(split, donate_argnums=0, compiler_options=_options())

        def call() -> Any:
            nonlocal state
            state, results = program(state, others)
            return results

        return call


def training_step(run: Run, batch: Mapping[str, np.ndarray]) -> ProfiledProgram:
    """The training step of a run on one device, from new parameters.

    Args:
      run: The run, whose config has the optimizer and the rematerialisation.
      batch: Arrays that the model reads.

    Returns:
      The step.
    """
    examples, length = _shape(batch)
    optimizer = run.config.optimizer.for_batch(examples)
    trainer = make_trainer(
        run.model,
        optimizer,
        Plan("single", remat=run.config.plan.remat),
        steps=run.config.train.steps,
        devices=jax.devices()[:1],
        batch_size=examples,
    )
    key, data = jax.random.key(0), jax.device_put(batch, trainer.batch_sharding)
    with trainer.step.in_mesh():
        program = measure.compile(
            trainer.step.jitted, trainer.state_shapes, data, key, *trainer.step.frozen, compiler_options=_options()
        )
    state: Any = None

    def call() -> Any:
        nonlocal state
        state = trainer.init(key) if state is None else state
        state, metrics = program(state, data, key, *trainer.step.frozen)
        return metrics

    return ProfiledProgram(
        call,
        program,
        trainer.flops_by_part(examples, length),
        lambda: (trainer.init(key), (data, key, *trainer.step.frozen)),
    )


def loss_of_batch(run: Run, batch: Mapping[str, np.ndarray]) -> ProfiledProgram:
    """The loss of a batch without gradients.

    Args:
      run: The run.
      batch: Arrays that the model reads.

    Returns:
      The program.
    """
    data = {name: jnp.asarray(array) for name, array in batch.items()}

    def loss(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        return gradients.loss(run.model, params, batch, None).sum

    program = measure.compile(loss, run.params, data, compiler_options=_options())
    flops = flops_by_part(loss, run.params, data)
    return ProfiledProgram(lambda: program(run.params, data), program, flops, lambda: ((), (run.params, data)))


def _options() -> dict[str, Any] | None:
    """Options of the compiler."""
    return GPU_OPTIONS if jax.default_backend() == "gpu" else None


def _data_seconds(batches: Iterator[Any]) -> float:
    """Median time until the next batch is ready; 0 if the data end first."""
    seconds = []
    for _ in range(DATA_BATCHES):
        begun = time.perf_counter()
        if next(batches, None) is None:
            break
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds) if seconds else 0.0


def render(profile: Profile) -> str:
    """The profile as Markdown.

    Args:
      profile: The profile.

    Returns:
      A sentence, a table of the parts, and remarks.
    """
    examples, tokens = profile.shape
    traced = profile.traced
    has_saved = bool(profile.ablated)
    header = [
        "part",
        "ms",
        "share",
        *["saved without it"] * has_saved,
        "at most faster",
        "FLOPs",
        "GFLOP/s",
        "least ms",
    ]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    total = sum((profile.flops or {}).values())
    for part in profile.model_parts():
        seconds, work = profile.share(part) * profile.median, (profile.flops or {}).get(part, 0.0)
        bound = f"{traced.bound(part):.2f}" if part in PARTS else ""
        flops = [f"{100 * work / total:.0f} %", f"{work / seconds / 1e9:.0f}"] if work else ["", ""]
        name = part if part == COPIES else label(part)
        least = three_digits(1e3 * profile.least[part]) if part in profile.least else ""
        saved = [_saved(profile.ablated.get(part))] * has_saved
        share = f"{100 * profile.share(part):.0f} %"
        rows.append([name, three_digits(1e3 * seconds), share, *saved, bound, *flops, least])
    idle = traced.idle / traced.total
    blank = [""] * (len(header) - 3)
    rows.append(["not attributed", three_digits(1e3 * idle * profile.median), f"{100 * idle:.0f} %", *blank])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    median, least, most = (three_digits(1e3 * s) for s in (profile.median, min(profile.seconds), max(profile.seconds)))
    head = (
        f"{PROGRAMS[profile.program].capitalize()} of {examples:,} x {tokens:,} tokens takes {median} ms ({least} to {most}), "
        f"{three_digits(examples * tokens / profile.median)} tokens/s."
    )
    return "\n".join([head, "", table, "", *(f"- {line}" for line in _remarks(profile))]) + "\n"


def _saved(ratio: Ratio | None) -> str:
    """The share of the time that a program without a part saves, with its interval."""
    if ratio is None:
        return ""
    middle, low, high = (f"{100 * (1 - end):.0f}" for end in (ratio.median, ratio.high, ratio.low))
    return f"{middle} % ({low} to {high})" if math.isfinite(ratio.high) else f"{middle} %"


def _distance(ratio: Ratio, value: float) -> float:
    """Distance of a value from the interval of a ratio."""
    return max(ratio.low - value, value - ratio.high, 0.0)


def _remarks(profile: Profile) -> Iterator[str]:
    """Lines on what lies outside of the parts, and on what the figures allow."""
    traced, median = profile.traced, profile.median
    if profile.rate and profile.flops:
        achieved = sum(profile.flops.values()) / median
        yield (
            f"{achieved / 1e9:.0f} GFLOP/s, {100 * achieved / profile.rate:.0f} % of the {profile.rate / 1e9:.0f} that a "
            "product of 1024 x 1024 in float32 reached just now"
        )
    if profile.least:
        yield '"least ms" is the time of a part\'s products, or of its memory traffic if longer, at rates measured just now'
    waits = f"{three_digits(1e3 * profile.data_seconds)} ms"
    late = profile.data_seconds > median
    yield f"the next batch is ready after {waits}" + (": longer than the program, which waits for data" if late else "")
    if profile.padding:
        yield f"{100 * profile.padding:.0f} % of the tokens are padding"
    yield f"compilation took {profile.compile_seconds:.1f} s"
    if traced.coverage < LEAST_COVERAGE:
        yield (
            f"operations were recorded in {100 * traced.coverage:.0f} % of the time only: shares are uncertain by the rest, "
            "which may be work of the same operations in other threads"
        )
    if traced.total > SLOW_TRACE * median:
        yield f"the trace makes a call take {traced.total / median:.1f} times as long: use shares, not milliseconds"
    if profile.ablated:
        yield (
            '"saved without it" is the share of the time that a program without the operations of the part saves, by paired '
            "calls; it differs from the share of the trace where parts run side by side, or are fused with others"
        )
    far = [label(part) for part, ratio in profile.ablated.items() if _distance(ratio, 1 - profile.share(part)) > FAR]
    if far:
        yield f"trace and program without it differ by more than {100 * FAR:.0f} points: {', '.join(far)}"
    yield '"at most faster" is the factor if the part took no time at all; a change of dtype or batch size has no such bound'


def write(profile: Profile, directory: Path) -> list[Path]:
    """Writes the profile as JSON and as a picture.

    Args:
      profile: The profile.
      directory: The run directory.

    Returns:
      The files.
    """
    content = dataclasses.asdict(profile) | {"median": profile.median, "coverage": profile.traced.coverage}
    file, chart = (directory / name.format(program=profile.program) for name in (FILE, CHART))
    replace_text(file, json.dumps(content, indent=1) + "\n")
    names = {part: part if part == COPIES else label(part) for part in profile.model_parts()}
    shares = {names[part]: profile.share(part) for part in names}
    shares["not attributed"] = profile.traced.idle / profile.traced.total
    total = sum((profile.flops or {}).values())
    flops = {names[part]: (profile.flops or {}).get(part, 0.0) / total for part in names} if total else {}
    title = f"{PROGRAMS[profile.program]}, {three_digits(1e3 * profile.median)} ms"
    plots.plot_shares({"time": shares, "FLOPs": flops}, title, chart)
    return [file, chart]


def read_traced(directory: Path, program: str) -> TracedTime | None:
    """The traced time that `write` wrote.

    Args:
      directory: The run directory.
      program: TRAINING or LOSS.

    Returns:
      The time of a call by part; None if the run has no such profile.

    Raises:
      InputError: The file is damaged.
    """
    path = directory / FILE.format(program=program)
    if not path.exists():
        return None
    try:
        return TracedTime(**json.loads(path.read_text("utf-8"))["traced"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged: profile the run again") from error
