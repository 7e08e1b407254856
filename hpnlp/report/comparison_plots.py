"""Plots of several runs or measurements: quality against time and memory, and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpnlp.report.plots import COLORS, drawable, logarithmic, pyplot
from hpnlp.tasks.reports.reporting import Ranking

MARKERS = "osD^v"  # the next marker is used after all colours


def plot_tradeoff(
    scores: Mapping[str, float],
    costs: Mapping[str, Mapping[str, float]],
    ranking: Ranking,
    path: Path,
    title: str = "",
    halves: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Plots quality against costs, in one panel each, with 95 % intervals as error bars.

    Args:
      scores: Label of a run -> its quality, best run first.
      costs: Name of a cost, which labels the axis -> label of a run -> cost. Runs without the cost are not in its panel.
      ranking: Name of the quality, and whether its axis is logarithmic.
      path: File to write; its extension decides the format.
      title: Title of the legend.
      halves: Label of a run -> half of the interval of its quality, of those whose interval is known.
    """
    plt = pyplot()
    size = (4 + 3.5 * len(costs), max(4.2, 0.24 * len(scores) + 0.6))
    figure, panels = plt.subplots(1, len(costs), figsize=size, layout="constrained", sharey=True, squeeze=False)
    handles: dict[str, Any] = {}
    for axes, (xlabel, of_runs) in zip(panels[0], costs.items(), strict=True):
        for index, (name, score) in enumerate(scores.items()):
            marker = MARKERS[index // COLORS % len(MARKERS)]
            if name in of_runs:
                (handles[name],) = axes.plot(of_runs[name], score, marker, color=f"C{index % COLORS}")
                if name in halves:
                    axes.errorbar(of_runs[name], score, halves[name], color=f"C{index % COLORS}", alpha=0.5, capsize=2)
        axes.set(xlabel=xlabel)
        if ranking.is_ratio:
            logarithmic(axes, list(scores.values()))
        axes.grid(alpha=0.3)
    panels[0, 0].set(ylabel=ranking.label)
    if labels := [name for name in scores if name in handles]:
        figure.legend(
            [handles[name] for name in labels],
            list(map(drawable, labels)),
            loc="outside right upper",
            frameon=False,
            fontsize=8,
            title=drawable(title) or None,
        )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_bubbles(
    scores: Mapping[str, Mapping[str, tuple[float | None, float, float | int]]],
    path: Path,
    halves: Mapping[str, Mapping[str, float | None]] = MappingProxyType({}),
) -> None:
    """Plots accuracy against steps per second, with circles whose areas are proportional to peak memory.

    Args:
      scores: Title of a panel -> label of a run -> (accuracy or None, steps per second, bytes).
      path: File to write; its extension decides the format.
      halves: Title of a panel -> label of a run -> half of the 95 % interval of the accuracy, None if it is unknown, as error
        bars.
    """
    plt = pyplot()
    labels = list(dict.fromkeys(label for panel in scores.values() for label in panel))
    largest = max((memory for panel in scores.values() for _, _, memory in panel.values()), default=1.0)
    size = (6.5 * len(scores) + 2.5, max(4.2, 0.24 * len(labels) + 0.6))
    figure, panels = plt.subplots(1, len(scores), figsize=size, layout="constrained", squeeze=False)
    for axes, (title, panel) in zip(panels[0], scores.items(), strict=True):
        for label, (accuracy, speed, memory) in panel.items():
            if accuracy is not None:
                color = f"C{labels.index(label) % COLORS}"
                axes.scatter(speed, accuracy, s=900 * memory / largest, color=color, alpha=0.4)
                if (half := halves.get(title, {}).get(label)) is not None:
                    axes.errorbar(speed, accuracy, half, color=color, alpha=0.5, capsize=2)
                axes.plot(
                    speed, accuracy, MARKERS[labels.index(label) // COLORS % len(MARKERS)], color=color, label=label
                )
        axes.set(xlabel="steps per second", ylabel="held-out accuracy", title=drawable(title))
        axes.margins(0.15)
        axes.grid(alpha=0.3)
    handles = {
        label: handle for axes in panels[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    title = f"area: peak memory,\nat most {largest / 2**20:,.0f} MiB"
    figure.legend(
        handles.values(), map(drawable, handles), loc="outside right upper", frameon=False, fontsize=8, title=title
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_efficiency(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plots speed and peak memory of training steps: a line for each mixer, fastest first, and a point for each length.

    Values are relative to full attention at the lengths that it has, if any.

    Args:
      rows: Measurements with the fields "mixer", "length", "steps_per_second" and "peak_memory_bytes".
      path: File to write; its extension decides the format.
    """
    from matplotlib import ticker

    plt = pyplot()
    full = {row["length"]: row for row in rows if row["mixer"] == "full"}
    rows = [row for row in rows if not full or row["length"] in full]
    lengths = sorted({row["length"] for row in rows})
    # Speed at the longest length that the mixer has, relative to the one of full attention.
    speeds = {
        row["mixer"]: row["steps_per_second"] / (full[row["length"]]["steps_per_second"] if full else 1)
        for row in sorted(rows, key=lambda row: row["length"])
    }
    mixers = sorted(speeds, key=lambda mixer: speeds[mixer])
    figure, panels = plt.subplots(1, 2, figsize=(11, 1.6 + 0.2 * len(mixers)), layout="constrained", sharey=True)
    labels = {"steps_per_second": "steps per second", "peak_memory_bytes": "peak memory of the process"}
    for axes, (field, label) in zip(panels, labels.items(), strict=True):
        unit = 1 if full or field == "steps_per_second" else 2**20
        for index, length in enumerate(lengths):
            at = [row for row in rows if row["length"] == length]
            x = [row[field] / (full[length][field] if full else unit) for row in at]
            y = [mixers.index(row["mixer"]) for row in at]
            style = {"color": plt.get_cmap("viridis_r")((index + 0.5) / len(lengths)), "label": f"{length:,}"}
            axes.plot(x, y, MARKERS[index % len(MARKERS)], markersize=5, **style)
        axes.set(xlabel=f"{label}{', relative to full' if full else ', MiB' * (unit > 1)}", xscale="log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.grid(alpha=0.3)
        if full:
            axes.axvline(1, color="grey", linewidth=1)
    panels[0].set_yticks(range(len(mixers)), [drawable(mixer) for mixer in mixers], fontsize=8)
    panels[0].set_ylim(-0.7, len(mixers) - 0.3)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=8, title="tokens")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_compression(
    panels: Mapping[str, Mapping[str, float]],
    path: Path,
    intervals: Mapping[str, Mapping[str, tuple[float, float]]] = MappingProxyType({}),
) -> None:
    """Draws what each stage of a compression does, as bars.

    Args:
      panels: Title of a panel -> stage -> value.
      path: File to write; its extension decides the format.
      intervals: Title of a panel -> stage -> ends of an interval, which are drawn as an error bar.
    """
    plt = pyplot()
    stages = list(next(iter(panels.values())))
    size = (2.2 + 2.3 * len(panels), 1.1 + 0.4 * len(stages))
    figure, row = plt.subplots(1, len(panels), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axes, (title, values) in zip(row[0], panels.items(), strict=True):
        bars = axes.barh(
            [drawable(stage) for stage in stages], [values[stage] for stage in stages], color="C0", alpha=0.7
        )
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        for stage, (low, high) in intervals.get(title, {}).items():
            axes.hlines(drawable(stage), low, high, color="black", linewidth=1)
        axes.set_title(drawable(title), fontsize=9)
        axes.margins(x=0.25)
        axes.tick_params(labelsize=8)
        axes.grid(axis="x", alpha=0.3)
    row[0][0].invert_yaxis()  # shared by all panels
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_ladder(bits: Mapping[str, float], path: Path) -> None:
    """Draws bits per byte as bars, from top to bottom.

    Args:
      bits: Name -> bits per byte.
      path: File to write; its extension decides the format.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.5, 0.8 + 0.32 * len(bits)), layout="constrained")
    colours = ["C0" if "static" in name or "adaptive" in name else "0.6" for name in bits]
    bars = axes.barh([drawable(name) for name in bits], list(bits.values()), color=colours, alpha=0.8)
    axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
    axes.set_xlabel("bits per held-out byte")
    axes.margins(x=0.12)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()
    figure.savefig(path, dpi=130)
    plt.close(figure)
