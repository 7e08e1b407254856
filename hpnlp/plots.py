"""Plots of runs: the loss of one run against steps, and the quality of several against time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.data.baselines import NAMES

PERPLEXITY = "held-out perplexity"


def plot_curves(
    curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, report: Mapping[str, Any] | None = None
) -> None:
    """Plots training loss (raw values faint, and smoothed) and held-out loss against steps, one colour for each run.

    Args:
        curves: name of a run -> lines of its metrics.jsonl.
        path: file to write; its extension decides the format.
        report: of the only run. Its last held-out loss is added and, where tokens are bytes, lines at the bits per byte
            that compressors need.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for index, (name, lines) in enumerate(curves.items()):
        color = f"C{index % 10}"
        shown = [line for line in lines if line.get("loss") is not None]
        steps, losses = [line["step"] for line in shown], [line["loss"] for line in shown]
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        marker = "o" if len(steps) == 1 else ""  # a line through one point is not seen
        label = drawable(f"{name}: training")
        axes.plot(steps, smooth(losses), marker=marker, color=color, linewidth=1.6, label=label)
        heldout = [(line["step"], line["heldout_loss"]) for line in lines if "heldout_loss" in line]
        if report and report["heldout_loss"] is not None:
            heldout.append((report["steps"], report["heldout_loss"]))
        if heldout:
            label = drawable(f"{name}: held-out")
            axes.plot(*zip(*heldout, strict=True), "o--", color=color, markersize=4, label=label)
    if report and report["config"]["data.tokenizer"] == "bytes":
        low, high = axes.get_ylim()
        for style, (field, name) in zip((":", "-.", "--"), NAMES.items(), strict=True):
            nats = (report.get(field) or math.inf) * math.log(2)
            if low < nats < high:
                axes.axhline(nats, color="0.4", linestyle=style, linewidth=0.9, label=f"held-out: {name}")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def smooth(values: Sequence[float]) -> np.ndarray:
    """Returns the centred moving average over 1/20 of the run, narrower towards both ends.

    A window that is symmetric around each step does not lag behind a falling loss, unlike an exponential mean.
    """
    count = len(values)
    at = np.arange(count)
    half = np.minimum(max(1, count // 40), np.minimum(at, count - 1 - at))
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    return (sums[at + half + 1] - sums[at - half]) / (2 * half + 1)


def plot_tradeoff(
    scored: Mapping[str, tuple[Mapping[str, Any], float]], label: str, path: Path, title: str = ""
) -> None:
    """Plots quality against training time and against peak memory.

    Args:
        scored: text of the legend -> report and quality of a run, best first.
        label: of the axis of quality; PERPLEXITY makes it logarithmic.
        path: file to write; its extension decides the format.
        title: of the legend.
    """
    plt = _pyplot()
    height = max(4.2, 0.24 * len(scored) + 0.6)
    figure, panels = plt.subplots(1, 2, figsize=(11, height), layout="constrained", sharey=True)
    scales = {
        "training seconds": training_seconds,
        "peak memory, MiB": lambda r: r["peak_memory_bytes"] / 2**20,
    }
    for axes, (scale, of) in zip(panels, scales.items(), strict=True):
        for index, (name, (report, score)) in enumerate(scored.items()):
            marker = "osD^v"[index // 10 % 5]  # there are ten colours
            axes.plot(of(report), score, marker, color=f"C{index % 10}", label=drawable(name))
        axes.set(xlabel=scale)
        if label == PERPLEXITY:  # equal steps of nats
            logarithmic(axes, [score for _, score in scored.values()])
        axes.grid(alpha=0.3)
    panels[0].set(ylabel=label)
    handles, labels = panels[1].get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside right upper", frameon=False, fontsize=8, title=drawable(title) or None
        )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def logarithmic(axes: Any, values: Sequence[float]) -> None:
    """Makes the y axis logarithmic, with tick labels that do not overlap: decades, 1-2-5 or even steps, by the range."""
    from matplotlib import ticker

    axes.set_yscale("log")
    spread = math.log10(max(values) / min(values)) if values else 0.0
    if spread < 0.7:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    else:
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if spread < 3 else (1.0,), numticks=12))
    axes.yaxis.set_major_formatter("{x:,.4g}")
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def training_seconds(report: Mapping[str, Any]) -> float:
    """Returns the seconds that a run spent on steps and their data."""
    return report["phase_seconds"]["data"] + report["phase_seconds"]["step"]


def drawable(text: str) -> str:
    """Returns `text` as matplotlib draws it: no formulas, nothing hidden, and a code for what its font does not have."""
    from matplotlib import font_manager

    known = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()
    text = "".join(c if ord(c) in known else f"<U+{ord(c):04X}>" for c in text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # legends leave out what begins with an underscore


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
