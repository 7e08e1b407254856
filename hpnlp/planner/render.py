"""A plan as a table, and as bars."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpnlp.parallel.plan import AXES, PLANS, Plan
from hpnlp.planner.collectives import total
from hpnlp.planner.devices import USABLE, Device
from hpnlp.planner.estimate import Costs
from hpnlp.planner.search import flags, named
from hpnlp.spec import parse_one
from hpnlp.types import InputError

# Of the axes, over what is drawn.
SCALE = 1.15
SUFFIXES = (".png", ".pdf", ".svg", ".jpg")


def table(costs: Costs, device: Device, kind: str) -> str:
    """What one device holds, computes and sends in a step, and how long that takes at least."""
    config, seconds = costs.config, {name: value for name, value in costs.seconds(device).items() if value}
    step, room = sum(seconds.values()), USABLE * device.memory
    held, taken = (
        _waterfall([float(size) for size in costs.memory.values()], room),
        _waterfall(list(seconds.values()), step),
    )
    tokens = config.data.batch_size * config.data.seq_len
    lines = [
        f"{costs.parameters / 1e6:,.1f}M parameters, {tokens:,} tokens a step, {costs.devices} x {kind}: {named(costs)}",
        "",
        "Bytes on each device",
        *(
            f"  {name:28}{size / 1e9:12.3f} GB  {bar}"
            for (name, size), bar in zip(costs.memory.items(), held, strict=True)
        ),
        f"  {'together':28}{costs.bytes / 1e9:12.3f} GB of {room / 1e9:.1f} that can be used: "
        f"{'it fits' if costs.fits(device) else 'IT DOES NOT FIT'}{doubt(costs, device)}",
        *([f"  {'of the state, on the host':28}{costs.hosted / 1e9:12.3f} GB"] if costs.hosted else []),
        *([f"  no axis of the plan divides {', '.join(costs.undivided)}: whole on each"] if costs.undivided else []),
        "",
        "A step on each device, at least",
        *(
            f"  {'products, recomputed too':28}{flops / 1e12:12.3f} TFLOP in {dtype}"
            for dtype, flops in costs.program.flops_by_dtype.items()
        ),
        f"  sent                        {total(costs.sent) / 1e9:12.3f} GB",
    ]
    for one in sorted(costs.sent, key=lambda one: -one.bytes)[:12]:
        if one.bytes >= 1e-3 * total(costs.sent):
            where = f"{one.kind} over {' x '.join(one.axes)}"
            lines.append(f"    {where:38}{one.bytes / 1e9:10.3f} GB, {one.times} times {one.size / 1e6:.3f} MB")
    lines += [f"  {name:28}{1e3 * v:12.3f} ms  {bar}" for (name, v), bar in zip(seconds.items(), taken, strict=True)]
    if uncounted := _uncounted(costs):
        lines.append(f"  {uncounted}")
    if costs.microbatches > 1:
        lines.append(
            f"  of the pipeline's time {100 * costs.bubble:.1f} % is idle, with {costs.microbatches} microbatches"
        )
    mfu = f"MFU {100 * costs.mfu(device):.1f} % (of bfloat16's peak)"
    lines += [
        f"  {'together':28}{1e3 * step:12.3f} ms, {tokens / step:,.0f} tokens/s, {mfu}",
        f"  {'with all transfers hidden':28}{1e3 * (seconds['compute'] + seconds.get('bubble', 0.0)):12.3f} ms",
    ]
    return "\n".join(lines) + "\n"


def doubt(costs: Costs, device: Device) -> str:
    """What is to be said beside "it fits" where the plan is not exact enough to know."""
    if not costs.is_tight(device):
        return ""
    left = USABLE * device.memory - costs.bytes
    return (
        f"; {left / 1e9:.3g} GB are left, and temporaries may take {costs.unplanned(device) / 1e9:.3g} GB more than planned: "
        f"compile it first (--depth={device.depth})"
    )


def _waterfall(values: Sequence[float], room: float, width: int = 40) -> list[str]:
    """Bars that begin where the one before ends, over `room`, or over all of them where they take more."""
    ends = [width * end / (max(room, sum(values)) or 1) for end in itertools.accumulate(values)]
    starts = [0.0, *ends[:-1]]
    bars = [" " * int(start) + "#" * max(1, round(end) - int(start)) for start, end in zip(starts, ends, strict=True)]
    return [f"|{bar[:width]:{width}}|" for bar in bars]


def _uncounted(costs: Costs) -> str:
    """Says what is left to the compiler; nothing, where nothing is."""
    output = costs.config.model.output
    found = ["optimizer.rows"] if costs.config.optimizer.rows else []
    found += [f"the loss of {output}"] if parse_one(output, "model.output").name != "full" else []
    return f"not counted: what the compiler sends for {', '.join(found)}" if found and costs.devices > 1 else ""


def ranking(found: Sequence[Costs], device: Device, own: Plan) -> str:
    """Plans in the order in which they were given, and the flags that make the first of the config's own."""
    if not found:
        return "No plan fits: take more devices, a smaller batch or a smaller model."
    head = f"{'plan':58}{'GB':>9}{'ms a step':>12}{'MFU':>8}"
    lines = [
        f"{named(one):58}{one.bytes / 1e9:9.2f}{1e3 * one.total_seconds(device):12.2f}{100 * one.mfu(device):7.1f}%"
        f"{'  tight' * one.is_tight(device)}"
        for one in found[:20]
    ]
    if len(found) > len(lines):
        lines.append(f"and {len(found) - len(lines)} more that fit")
    if any(one.is_tight(device) for one in found[:20]):
        lines.append(
            f"tight: temporaries may take more beyond the plan than is left: compile it first (--depth={device.depth})"
        )
    if uncounted := _uncounted(found[0]):
        lines.append(uncounted)
    best = found[0].config.plan
    # What its name says where a config leaves it open; -1 is what the other sizes leave, which is its own.
    implied = {**dict.fromkeys(AXES, 1), "zero": 0, **PLANS[best.name]}
    change = {
        f"plan.{field.name}": getattr(best, field.name)
        for field in dataclasses.fields(Plan)
        if field.name == "name"
        or getattr(own, field.name) != field.default
        or implied.get(field.name, field.default) not in (-1, getattr(best, field.name))
    }
    return "\n".join([head, *lines, f"the first: {flags(change)}"])


def draw(costs: Costs, device: Device, kind: str, path: Path) -> Path:
    """Bars of the bytes and of the time of a step. Raises InputError where `path` cannot be written."""
    from matplotlib.figure import Figure  # without pyplot, so that a notebook's backend stays as it is

    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    memory, time = figure.subplots(1, 2)
    _bar(memory, {name: size / 1e9 for name, size in costs.memory.items()})
    room = USABLE * device.memory  # as the table has it: over this line, it does not fit
    label = f"{kind} can hold: {room / 1e9:.4g}" + (" (above)" if room > SCALE * costs.bytes else "")
    memory.axhline(room / 1e9, color="black", linewidth=1, linestyle="--", label=label)
    memory.set(ylabel="GB", title="on each device")
    _bar(time, {name: 1e3 * value for name, value in costs.seconds(device).items() if value})
    time.set(ylabel="ms", title="a step, at least")
    for axes in (memory, time):
        axes.set_xticks([])
        axes.set_xlim(-0.5, 0.5)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"{costs.devices} x {kind}: {named(costs)}", fontsize=10)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise InputError(f"--out={path} cannot be written ({error}): name a file that can, as plan.png") from error
    return path


def writable(path: Path) -> Path:
    """Where a picture goes: path, as PNG where it says nothing else. Raises InputError where that cannot be."""
    path = path if path.suffix else path.with_suffix(".png")
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"--out={path}: no picture ends so; take {', '.join(SUFFIXES)}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"--out={path} cannot be written: name a file in a directory that is there, as plan.png")
    return path


def _bar(axes: Any, values: dict[str, float]) -> None:
    base = 0.0
    for name, value in values.items():
        axes.bar([0], [value], 0.6, bottom=base, label=f"{name}: {value:.4g}")
        base += value
    axes.set_ylim(0, SCALE * base or 1)
