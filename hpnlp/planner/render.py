"""Text tables and plots of plans."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpnlp.cost import parts
from hpnlp.models.pairs.dual_encoder import LOSSES_OF_NEGATIVES
from hpnlp.parallel.plan import AXES, PLANS, Plan
from hpnlp.planner.collectives import total
from hpnlp.planner.devices import USABLE, Device
from hpnlp.planner.estimate import Costs
from hpnlp.planner.search import flags, plan_name
from hpnlp.spec import parse_one
from hpnlp.training.config import flat
from hpnlp.types import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADROOM = 1.15  # height of a plot's axis over the height of its bar
SUFFIXES = (".png", ".pdf", ".svg", ".jpg")
MAX_COLLECTIVES, MAX_PLANS = 12, 20  # rows of the tables


def table(costs: Costs, device: Device, kind: str) -> str:
    """Table of the memory, work, communication and time of a step.

    Args:
      costs: Costs of the step.
      device: The accelerator.
      kind: Name of the accelerator, an entry of `DEVICES` or "cpu".

    Returns:
      Lines of text.
    """
    tokens = costs.config.data.batch_size * costs.config.data.seq_len
    lines = [
        f"{costs.parameters / 1e6:,.1f}M parameters, {tokens:,} tokens per step, {costs.devices} x {kind}: {plan_name(costs)}",
        "",
        "Memory of each device",
        *_memory_rows(costs, device),
        "",
        "One step on each device, lower bounds",
        *_work_rows(costs),
        *_time_rows(costs, device, tokens),
        "",
        *_part_rows(costs, device),
    ]
    return "\n".join(lines) + "\n"


def _memory_rows(costs: Costs, device: Device) -> Iterator[str]:
    usable = USABLE * device.memory
    bars = _waterfall([float(size) for size in costs.memory.values()], usable)
    for (use, size), bar in zip(costs.memory.items(), bars, strict=True):
        yield f"  {use:28}{size / 1e9:12.3f} GB  {bar}"
    yield (
        f"  {'total':28}{costs.bytes / 1e9:12.3f} GB of {usable / 1e9:.1f} usable: "
        f"{'it fits' if costs.fits(device) else 'IT DOES NOT FIT'}{tightness_warning(costs, device)}"
    )
    if costs.host_bytes:
        yield f"  {'state in host memory':28}{costs.host_bytes / 1e9:12.3f} GB"
    if costs.undivided:
        yield f"  whole on each device, since no axis of the plan divides them: {', '.join(costs.undivided)}"


def _work_rows(costs: Costs) -> Iterator[str]:
    for dtype, flops in costs.program.flops_by_dtype.items():
        yield f"  {'products, with recomputation':28}{flops / 1e12:12.3f} TFLOP in {dtype}"
    sent = total(costs.collectives)
    yield f"  {'communication':28}{sent / 1e9:12.3f} GB"
    for collective in sorted(costs.collectives, key=lambda collective: -collective.bytes)[:MAX_COLLECTIVES]:
        if collective.bytes >= 1e-3 * sent:
            label = f"{collective.kind} over {' x '.join(collective.axes)}"
            size = f"{collective.times} times {collective.size / 1e6:.3f} MB"
            yield f"    {label:38}{collective.bytes / 1e9:10.3f} GB, {size}"


def _time_rows(costs: Costs, device: Device, tokens: int) -> Iterator[str]:
    """Lines of the table: seconds of each kind of work, with bars, and the totals."""
    seconds = {name: value for name, value in costs.seconds(device).items() if value}
    step = sum(seconds.values())
    for (name, value), bar in zip(seconds.items(), _waterfall(list(seconds.values()), step), strict=True):
        yield f"  {name:28}{1e3 * value:12.3f} ms  {bar}"
    if uncounted := _uncounted(costs):
        yield f"  {uncounted}"
    if costs.microbatches > 1:
        yield f"  the pipeline is idle for {100 * costs.bubble:.1f} % of its time, with {costs.microbatches} microbatches"
    if costs.sizes["expert"] > 1:
        yield "  experts count with equal loads: a step waits for the device whose experts have the most tokens (load_max)"
    mfu = f"MFU {100 * costs.mfu(device):.1f} % (of the bfloat16 peak)"
    yield f"  {'total':28}{1e3 * step:12.3f} ms, {tokens / step:,.0f} tokens/s, {mfu}"
    working = seconds["compute"] + seconds.get("bubble", 0.0)
    yield f"  {'with all transfers hidden':28}{1e3 * working:12.3f} ms"


def _part_rows(costs: Costs, device: Device) -> Iterator[str]:
    """Lines of the table: the share of each part of the model in the products, the memory traffic and the time."""
    by_part = costs.program.by_part()
    amounts = [
        {name: program.flops for name, program in by_part.items()},
        {name: program.moved_bytes(device.fuses_attention) for name, program in by_part.items()},
        {
            name: program.seconds(device.flops, device.memory_bandwidth, device.fuses_attention)
            for name, program in by_part.items()
        },
    ]
    columns = [parts.percentages(parts.shares(amount)) for amount in amounts]
    yield f"{'Share of each part of the model, in %':30}{'FLOPs':>12}{'bytes':>12}{'time':>12}"
    for name in columns[0]:
        if any(column[name] for column in columns):
            yield f"  {parts.label(name):28}" + "".join(f"{column[name]:12.1f}" for column in columns)
    yield "  bytes are those that kernels read and write, and time is the lower bound above, without communication"


def tightness_warning(costs: Costs, device: Device) -> str:
    """Warning that follows "it fits" where the estimate may be off by more than the memory that is left.

    Args:
      costs: Costs of the step.
      device: The accelerator.

    Returns:
      A clause, or an empty string where the step fits with enough to spare or does not fit.
    """
    if not costs.is_tight(device):
        return ""
    left = USABLE * device.memory - costs.bytes
    return (
        f"; {left / 1e9:.3g} GB are left, and temporaries may take {costs.error_bytes(device) / 1e9:.3g} GB more than planned: "
        f"compile the step first (--depth={device.depth})"
    )


def _waterfall(values: Sequence[float], scale: float, width: int = 40) -> list[str]:
    """Bars that begin where the previous one ends; the width stands for `scale`, or for the sum of the values if larger."""
    ends = [width * end / (max(scale, sum(values)) or 1) for end in itertools.accumulate(values)]
    starts = [0.0, *ends[:-1]]
    bars = [" " * int(start) + "#" * max(1, round(end) - int(start)) for start, end in zip(starts, ends, strict=True)]
    return [f"|{bar[:width]:{width}}|" for bar in bars]


def _uncounted(costs: Costs) -> str:
    """Names the collectives that the compiler chooses, which are not estimated; empty where there are none."""
    fields = flat(costs.config)
    output = fields.get("model.output", "full")  # a dual encoder has no output layer
    uncounted = ["optimizer.rows"] if costs.config.optimizer.rows else []
    uncounted += [f"the loss of {output}"] if parse_one(output, "model.output").name != "full" else []
    compares = "model.negatives" in fields and fields["model.loss"] in LOSSES_OF_NEGATIVES
    uncounted += ["the similarities of pairs"] if compares else []
    if not uncounted or costs.devices == 1:
        return ""
    return f"not counted: communication that the compiler adds for {', '.join(uncounted)}"


def ranking(estimates: Sequence[Costs], device: Device, config_plan: Plan) -> str:
    """Table of plans, with the flags that select the first.

    Args:
      estimates: Costs of a step under each plan, in the order of the table.
      device: The accelerator.
      config_plan: The plan of the config that the flags are added to.

    Returns:
      Lines of text.
    """
    if not estimates:
        return "No plan fits: use more devices, a smaller batch or a smaller model."
    shown = estimates[:MAX_PLANS]
    lines = [f"{'plan':58}{'GB':>9}{'ms per step':>12}{'MFU':>8}"]
    for costs in shown:
        lines.append(
            f"{plan_name(costs):58}{costs.bytes / 1e9:9.2f}{1e3 * costs.total_seconds(device):12.2f}"
            f"{100 * costs.mfu(device):7.1f}%{'  tight' * costs.is_tight(device)}"
        )
    if len(estimates) > MAX_PLANS:
        lines.append(f"and {len(estimates) - MAX_PLANS} more that fit")
    if any(costs.is_tight(device) for costs in shown):
        lines.append(
            "tight: temporaries may exceed the estimate by more than the memory that is left; compile the step first "
            f"(--depth={device.depth})"
        )
    if uncounted := _uncounted(estimates[0]):
        lines.append(uncounted)
    lines.append(f"flags of the first: {flags(_plan_changes(estimates[0].config.plan, config_plan))}")
    return "\n".join(lines)


def _plan_changes(plan: Plan, config_plan: Plan) -> dict[str, Any]:
    """The fields that turn a config's plan into another plan."""
    # Fields of the new plan that its name fills where a config leaves them open; -1 takes all devices that are left.
    implied = {**dict.fromkeys(AXES, 1), "zero": 0, **PLANS[plan.name]}
    return {
        f"plan.{field.name}": getattr(plan, field.name)
        for field in dataclasses.fields(Plan)
        if field.name == "name"
        or getattr(config_plan, field.name) != field.default
        or implied.get(field.name, field.default) not in (-1, getattr(plan, field.name))
    }


def draw(costs: Costs, device: Device, kind: str, path: Path) -> Path:
    """Draws the memory and the time of a step as stacked bars.

    Args:
      costs: Costs of the step.
      device: The accelerator.
      kind: Name of the accelerator.
      path: File of the plot.

    Returns:
      `path`.

    Raises:
      InputError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot, which would change a notebook's backend

    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    memory, time = figure.subplots(1, 2)
    _draw_bar(memory, {use: size / 1e9 for use, size in costs.memory.items()})
    usable = USABLE * device.memory  # the same limit as in the table
    label = f"usable on {kind}: {usable / 1e9:.4g}" + (" (above)" if usable > HEADROOM * costs.bytes else "")
    memory.axhline(usable / 1e9, color="black", linewidth=1, linestyle="--", label=label)
    memory.set(ylabel="GB", title="memory of each device")
    _draw_bar(time, {name: 1e3 * value for name, value in costs.seconds(device).items() if value})
    time.set(ylabel="ms", title="one step, lower bound")
    for axes in (memory, time):
        axes.set_xticks([])
        axes.set_xlim(-0.5, 0.5)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"{costs.devices} x {kind}: {plan_name(costs)}", fontsize=10)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise InputError(
            f"--out={path} cannot be written ({error}): use a writable file, for example plan.png"
        ) from error
    return path


def check_writable(path: Path) -> None:
    """Checks that a plot can be written, before the step is planned.

    Args:
      path: File of the plot.

    Raises:
      InputError: The image format is unknown, or the file cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"--out={path}: unknown image format; use {', '.join(SUFFIXES)}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"--out={path} cannot be written: use a file in an existing directory, for example plan.png")


def _draw_bar(axes: Axes, values: dict[str, float]) -> None:
    """One bar of stacked values, with a legend entry for each."""
    bottom = 0.0
    for name, value in values.items():
        axes.bar([0], [value], 0.6, bottom=bottom, label=f"{name}: {value:.4g}")
        bottom += value
    axes.set_ylim(0, HEADROOM * bottom or 1)
