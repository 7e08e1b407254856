"""Plots of a run: loss and norms of gradients against steps, and matrices of counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpnlp.tasks.reports.reporting import Heatmap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = 10  # number of colours in matplotlib's cycle, C0 to C9


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
    plt = pyplot()
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
    plt = pyplot()
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


def plot_heatmap(heatmap: Heatmap, path: Path) -> None:
    """Plots a matrix of counts, coloured by the share of each count in its row.

    Args:
      heatmap: Counts and names.
      path: File to write; its extension decides the format.
    """
    plt = pyplot()
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


def pyplot() -> Any:
    """Imports matplotlib for drawing to files.

    Returns:
      The module matplotlib.pyplot.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
