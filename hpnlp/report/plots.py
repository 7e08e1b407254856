"""Plots of runs: loss against steps, and the quality of several runs against time and memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpnlp.tasks.reports.reporting import Heatmap, Ranking
from hpnlp.types import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = 10  # number of colours in matplotlib's cycle, C0 to C9
MARKERS = "osD^v"  # the next marker is used after all colours


def plot_curves(
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    path: Path,
    report: Mapping[str, Any] | None = None,
    levels: Mapping[str, float] | None = None,
    unit: str = "token",
) -> None:
    """Plots training loss (raw values faint, and smoothed) and held-out loss against steps, one colour for each run.

    Args:
      curves: Name of a run -> lines of its metrics.jsonl.
      path: File to write; its extension decides the format.
      report: Content of report.json, if there is one run only. Adds its last held-out loss.
      levels: Label -> loss of horizontal lines, at most three; those that are out of the range of the curves are left out.
      unit: The objects that a loss is the mean over, as "token".
    """
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for index, (name, lines) in enumerate(curves.items()):
        _plot_curve(axes, name, lines, f"C{index % COLORS}", report)
    low, high = axes.get_ylim()
    for style, (label, loss) in zip((":", "-.", "--"), (levels or {}).items(), strict=False):
        if low < loss < high:
            axes.axhline(loss, color="0.4", linestyle=style, linewidth=0.9, label=label)
    axes.set(xlabel="step", ylabel=f"loss, nats per {unit}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_curve(
    axes: Axes, name: str, lines: Sequence[Mapping[str, Any]], color: str, report: Mapping[str, Any] | None
) -> None:
    """Draws the training and held-out loss of a run."""
    training = [line for line in lines if line.get("loss") is not None]
    steps, losses = [line["step"] for line in training], [line["loss"] for line in training]
    axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
    marker = "o" if len(steps) == 1 else ""  # a line through one point is invisible
    label = drawable(f"{name}: training")
    axes.plot(steps, smooth(losses), marker=marker, color=color, linewidth=1.6, label=label)
    heldout = [(line["step"], line["heldout_loss"]) for line in lines if "heldout_loss" in line]
    if report and report["heldout_loss"] is not None:
        heldout.append((report["steps"], report["heldout_loss"]))
    if heldout:
        label = drawable(f"{name}: held-out")
        axes.plot(*zip(*heldout, strict=True), "o--", color=color, markersize=4, label=label)


def plot_norms(lines: Sequence[Mapping[str, Any]], path: Path, clip_norm: float) -> None:
    """Plots the global norms of gradients before clipping against steps; clipped steps have another colour.

    Args:
      lines: Lines of a run's metrics.jsonl, of which at least one has "grad_norm".
      path: File to write; its extension decides the format.
      clip_norm: Norm from which on gradients are clipped, 0 for no clipping.
    """
    plt = _pyplot()
    steps, norms = np.array(
        [(line["step"], line["grad_norm"]) for line in lines if line.get("grad_norm") is not None], np.float64
    ).T
    clipped = norms > clip_norm if clip_norm else np.zeros(len(norms), bool)
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for color, label, chosen in (
        ("C0", "not clipped" if clip_norm else "gradient norm", ~clipped),
        ("C3", f"clipped, {100 * clipped.mean():.0f} % of the steps", clipped),
    ):
        if chosen.any():
            axes.plot(steps[chosen], norms[chosen], ".", color=color, markersize=3, label=label)
    if clip_norm:
        axes.axhline(clip_norm, color="0.4", linewidth=0.9, label=f"optimizer.clip_norm={clip_norm:g}")
    if (norms > 0).all():
        logarithmic(axes, [*norms.tolist(), *([clip_norm] if clip_norm else [])])
    axes.set(xlabel="step", ylabel="global norm of the gradient")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def smooth(values: Sequence[float]) -> np.ndarray:
    """Centred moving average over 1/20 of a run.

    The window is symmetric around each step, so that the average of a falling loss does not lag behind as an exponential
    average does. It is narrower near the start, where losses fall fast. The last half of a window is a straight line that is
    fitted to the last window, so that the curve does not end at the loss of a single batch.

    Args:
      values: Losses of consecutive steps.

    Returns:
      Their averages, float64 of the same length.
    """
    count = len(values)
    index = np.arange(count)
    widest = max(1, count // 40)
    half = np.minimum(widest, np.minimum(index, count - 1 - index))
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    averages = (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)
    if count > 2 * widest:
        window = np.arange(-2 * widest, 1)
        slope, last = np.polyfit(window, np.asarray(values, np.float64)[window - 1], 1)
        averages[-widest:] = last + slope * window[-widest:]
    return averages


def plot_tradeoff(
    scores: Mapping[str, float], costs: Mapping[str, Mapping[str, float]], ranking: Ranking, path: Path, title: str = ""
) -> None:
    """Plots quality against costs, in one panel each.

    Args:
      scores: Label of a run -> its quality, best run first.
      costs: Name of a cost, which labels the axis -> label of a run -> cost. Runs without the cost are not in its panel.
      ranking: Name of the quality, and whether its axis is logarithmic.
      path: File to write; its extension decides the format.
      title: Title of the legend.
    """
    plt = _pyplot()
    size = (4 + 3.5 * len(costs), max(4.2, 0.24 * len(scores) + 0.6))
    figure, panels = plt.subplots(1, len(costs), figsize=size, layout="constrained", sharey=True, squeeze=False)
    handles: dict[str, Any] = {}
    for axes, (xlabel, of_runs) in zip(panels[0], costs.items(), strict=True):
        for index, (name, score) in enumerate(scores.items()):
            marker = MARKERS[index // COLORS % len(MARKERS)]
            if name in of_runs:
                (handles[name],) = axes.plot(of_runs[name], score, marker, color=f"C{index % COLORS}")
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


def plot_bubbles(scores: Mapping[str, Mapping[str, tuple[float | None, float, float | int]]], path: Path) -> None:
    """Plots accuracy against steps per second, with circles whose areas are proportional to peak memory.

    Args:
      scores: Title of a panel -> label of a run -> (accuracy or None, steps per second, bytes).
      path: File to write; its extension decides the format.
    """
    plt = _pyplot()
    labels = list(dict.fromkeys(label for panel in scores.values() for label in panel))
    largest = max((memory for panel in scores.values() for _, _, memory in panel.values()), default=1.0)
    size = (6.5 * len(scores) + 2.5, max(4.2, 0.24 * len(labels) + 0.6))
    figure, panels = plt.subplots(1, len(scores), figsize=size, layout="constrained", squeeze=False)
    for axes, (title, panel) in zip(panels[0], scores.items(), strict=True):
        for label, (accuracy, speed, memory) in panel.items():
            if accuracy is not None:
                color = f"C{labels.index(label) % COLORS}"
                axes.scatter(speed, accuracy, s=900 * memory / largest, color=color, alpha=0.4)
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

    plt = _pyplot()
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


def plot_compression(panels: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draws what each stage of a compression does, as bars.

    Args:
      panels: Title of a panel -> stage -> value.
      path: File to write; its extension decides the format.
    """
    plt = _pyplot()
    stages = list(next(iter(panels.values())))
    size = (2.2 + 2.3 * len(panels), 1.1 + 0.4 * len(stages))
    figure, row = plt.subplots(1, len(panels), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axes, (title, values) in zip(row[0], panels.items(), strict=True):
        bars = axes.barh(
            [drawable(stage) for stage in stages], [values[stage] for stage in stages], color="C0", alpha=0.7
        )
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
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
    plt = _pyplot()
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


def plot_heatmap(heatmap: Heatmap, path: Path) -> None:
    """Plots a matrix of counts, coloured by the share of each count in its row.

    Args:
      heatmap: Counts and names.
      path: File to write; its extension decides the format.
    """
    plt = _pyplot()
    counts = np.asarray(heatmap.counts, np.float64)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rows, columns = counts.shape
    figure, axes = plt.subplots(figsize=(3 + 0.28 * columns, 2 + 0.28 * rows), layout="constrained")
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set(xlabel=heatmap.xlabel, ylabel=heatmap.ylabel)
    axes.set_xticks(range(columns), [drawable(name) for name in heatmap.columns], rotation=90, fontsize=7)
    axes.set_yticks(range(rows), [drawable(name) for name in heatmap.rows], fontsize=7)
    for row, column in zip(*np.nonzero(counts), strict=True):
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", fontsize=6, color=color)
    figure.colorbar(image, label="share of the row")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_expert_loads(loads: Mapping[int, np.ndarray], lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plots the loads of experts over the mean load: by layer and expert, sorted, and during training.

    Args:
      loads: Index of a layer -> `[E]`, which may differ in E.
      lines: Lines of a run's metrics.jsonl, of which those of steps have "load_max" and "load_min".
      path: File to write; its extension decides the format.
    """
    plt = _pyplot()
    widest = max(map(len, loads.values()))
    grid = np.full((len(loads), widest), np.nan)
    for row, load in zip(grid, loads.values(), strict=True):
        row[: len(load)] = load
    size = (11 + min(0.08 * widest, 4), max(3.4, 1.4 + 0.25 * len(loads)))
    ratios = {"width_ratios": [1.3 + 0.01 * widest, 1, 1]}
    figure, (by_expert, by_rank, by_step) = plt.subplots(1, 3, figsize=size, layout="constrained", gridspec_kw=ratios)
    image = by_expert.imshow(grid, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    by_expert.set(
        title="load / mean load", xlabel="expert", ylabel="layer", yticks=range(len(loads)), yticklabels=loads
    )
    by_expert.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=by_expert, extend="max", label="load over the mean load")
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(loads)))
    for (layer, load), color in zip(loads.items(), colors, strict=True):
        label = f"layer {layer}" if layer in (min(loads), max(loads)) else None
        by_rank.plot(range(1, len(load) + 1), np.sort(load)[::-1], ".-", color=color, label=label, linewidth=0.9)
    by_rank.set(title="sorted", xlabel="rank of the expert", ylabel="load / mean load")
    by_rank.xaxis.get_major_locator().set_params(integer=True)
    for name, label in (("load_max", "largest"), ("load_min", "smallest")):
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if points:
            by_step.plot(*zip(*points, strict=True), linewidth=0.9, label=f"{label}, mean over layers")
    by_step.set(title="during training", xlabel="step", ylabel="load / mean load of a batch")
    for axes in (by_rank, by_step):
        axes.axhline(1, color="0.4", linewidth=0.9, linestyle=":")
        room = 1.0 if axes is by_rank else 1.25  # for the legend above the curves
        axes.set_ylim(0, room * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, loc="upper right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_expert_pairs(shares: Mapping[int, np.ndarray], path: Path) -> None:
    """Plots how often two experts serve the same token.

    Args:
      shares: Index of a layer -> `[E, E]`, the share of the tokens of expert i that also use expert j.
      path: File to write; its extension decides the format.
    """
    plt = _pyplot()
    figure, panels = plt.subplots(
        1, len(shares), figsize=(1 + 3.4 * len(shares), 3.6), layout="constrained", squeeze=False
    )
    highest = max(float(np.nanmax(share, initial=0.0)) for share in shares.values())
    for axes, (layer, share) in zip(panels[0], shares.items(), strict=True):
        image = axes.imshow(share, cmap="Blues", vmin=0, vmax=highest or 1, aspect="auto", interpolation="nearest")
        axes.set(title=f"layer {layer}", xlabel="also used expert")
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
    panels[0, 0].set(ylabel="expert")
    figure.colorbar(image, ax=panels[0].tolist(), label="share of the tokens of an expert")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_words(points: np.ndarray, words: Sequence[str], groups: Sequence[str], path: Path) -> None:
    """Plots words in the plane, with their texts, which are moved or left out where they would overlap.

    The picture shows the region of the coloured words, if there are any.

    Args:
      points: `[N, 2]` coordinates.
      words: N words.
      groups: Group of each word, which decides its colour; "" for frequent words, which are grey.
      path: File to write; its extension decides the format.

    Raises:
      InputError: The file cannot be written.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 7), layout="constrained")
    names = [name for name in dict.fromkeys(groups) if name]
    colors = {name: f"C{number % 10}" for number, name in enumerate(names)} | {"": "0.6"}
    shown = points[[bool(group) or not names for group in groups]]
    # Without coloured words, some words that are far from all others do not decide on the region.
    low, high = (shown.min(0), shown.max(0)) if names else np.percentile(shown, [2, 98], axis=0)
    margin = 0.12 * np.maximum(high - low, 1e-6)
    axes.set(xlim=(low[0] - margin[0], high[0] + 2 * margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
    texts = []
    for name, color in colors.items():
        chosen = [number for number, group in enumerate(groups) if group == name]
        chosen = [n for n in chosen if (abs(points[n] - (low + high) / 2) <= (high - low) / 2 + margin).all()]
        if chosen:
            label = drawable(name) if name else "frequent words"
            axes.scatter(points[chosen, 0], points[chosen, 1], s=8, color=color, label=label if names else None)
        style = {"fontsize": 7 if name else 6, "color": color, "textcoords": "offset points", "gid": name}
        texts += [axes.annotate(drawable(words[n]), points[n], xytext=(3, 2), **style) for n in chosen]
    if names:
        axes.legend(fontsize=8)
    axes.set(xlabel="first principal component", ylabel="second principal component")
    place_texts(figure, texts)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw {path} ({error}): name a file that can be written, as words.png") from error
    finally:
        plt.close(figure)


def place_texts(figure: Any, texts: Sequence[Any]) -> None:
    """Moves the texts of points to a side where they overlap no earlier one; those without a gid are left out if there is none.

    Args:
      figure: Figure of matplotlib, which keeps its layout from now on.
      texts: Annotations with offsets in points, the most important ones first.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    renderer, taken = figure.canvas.get_renderer(), []
    for text in texts:
        for x, y in itertools.product((3, -3), (2, -2)):
            text.set(ha="left" if x > 0 else "right", va="bottom" if y > 0 else "top")
            text.xyann = x, y
            box = text.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in taken):
                break
        else:
            if not text.get_gid():
                text.remove()
                continue
            text.set(ha="left", va="bottom")
            text.xyann = (3, 2)
        taken.append(text.get_window_extent(renderer))


def logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """Makes the y axis logarithmic, with ticks at decades, at 1-2-5 steps or at even steps, so that labels do not overlap.

    Args:
      axes: Axes of matplotlib.
      values: The values on the axis; their range determines the ticks.
    """
    from matplotlib import ticker

    axes.set_yscale("log")
    spread = math.log10(max(values) / min(values)) if values else 0.0
    if spread < 0.7:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    else:
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if spread < 3 else (1.0,), numticks=12))
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def drawable(text: str) -> str:
    """Escapes a text for matplotlib.

    Args:
      text: Any text.

    Returns:
      The text without formulas, with codes for characters that the font lacks, and with a space before a leading underscore.
    """
    from matplotlib import font_manager

    known = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()
    text = "".join(c if ord(c) in known else f"<U+{ord(c):04X}>" for c in text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # legends leave out labels that begin with an underscore


def _pyplot() -> Any:
    """matplotlib.pyplot, imported on first use, for drawing to files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
