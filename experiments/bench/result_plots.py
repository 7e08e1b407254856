"""Plots of the documentation, drawn from the rows of result files. `results.py` calls them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.lines
import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np

from hpnlp.data.baselines import NAMES
from hpnlp.report.plots import smooth

Rows = Sequence[Mapping[str, Any]]
# Lines of the compressors.
STYLES: Any = (":", "-.", "--", (0, (1, 4)), (0, (5, 1)))
# Vocabulary sizes of the corpora of experiments/softmax/.
CORPORA = {"docs": "12,000", "code": "110,000", "whitespace": "400,000"}


def plot_demo(rows: Rows, path: Path) -> None:
    row, per_bit = rows[0], math.log(2)
    bits = np.array([loss for _, loss in row["curve"]]) / per_bit
    steps = np.array([step for step, _ in row["curve"]])
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    axes.plot(steps, bits, color="C0", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(bits.tolist()), color="C0", label="training, centred mean of 1/20 of the steps")
    axes.plot(steps[-1], row["heldout_bits_per_byte"], "o", color="C3", label="held-out")
    for (field, name), style in zip(NAMES.items(), STYLES, strict=True):
        if row.get(field) is not None:
            axes.axhline(row[field], color="gray", linestyle=style, label=f"held-out: {name}")
    axes.set(xlabel=f"step of {row['tokens'] // row['steps']:,} bytes", ylabel="bits per byte", ylim=(0.9, 5))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_train_step(rows: Rows, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    names = {"ours": "hpnlp", "torch": "torch eager", "flax": "plain Flax"}
    for offset, (key, label) in enumerate(names.items()):
        axes.bar(
            [i + 0.27 * (offset - 1) for i in range(len(rows))], [row[f"{key}_ms"] for row in rows], 0.25, label=label
        )
    labels = [f"{row['layers']} x D {row['dim']}\nT {row['length']}, B {row['batch']}" for row in rows]
    axes.set_xticks(range(len(rows)), labels)
    axes.set(ylabel="ms per step")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_attention(rows: Rows, path: Path) -> None:
    """Time relative to dense attention of hpnlp against the fraction of the pairs that a pattern allows."""
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    names = list(dict.fromkeys(row["what"].rpartition(", T ")[0] for row in rows if "density" in row))
    for row in rows:
        if "density" in row:
            name, _, length = row["what"].rpartition(", T ")
            color, marker = f"C{names.index(name)}", "o" if length == "4096" else "^"
            label = name.replace("+-", "\N{PLUS-MINUS SIGN}") if length == "4096" else None
            axes.plot(row["density"], next(iter(row["ratios"].values())), marker, color=color, label=label)
    low = min(row["density"] for row in rows if "density" in row)
    axes.plot([low, 1], [low, 1], ":", color="gray", label="time proportional to the pairs")
    axes.set(xscale="log", yscale="log", xlabel="fraction of the pairs that the pattern allows")
    axes.set_ylabel("time relative to dense attention")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_title(
        "forward and backward; circles T 4096, triangles T 16384 (dense: 16 times the time at T 4096)", fontsize=9
    )
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_softmax(rows: Rows, path: Path) -> None:
    """Time of a step of each output layer relative to the full softmax, for each vocabulary size."""
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    ratios_by_size: dict[str, dict[str, float]] = {}  # vocabulary size -> layer -> ratio
    for row in rows:
        if step := re.fullmatch(r"(?:training )?step of (.*), V ([\d,]+)", row["what"]):
            ratios_by_size.setdefault(step[2], {})[step[1]] = row["ratios"]["time over full"]
    names = list(dict.fromkeys(name for ratios in ratios_by_size.values() for name in ratios))
    height = 0.76 / len(ratios_by_size)
    for offset, (size, ratios) in enumerate(ratios_by_size.items()):
        heights = [names.index(name) + (height + 0.02) * offset for name in ratios]
        axes.barh(heights, list(ratios.values()), height, label=f"V {size}")
    axes.set_yticks([i + (height + 0.02) * (len(ratios_by_size) - 1) / 2 for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.axvline(1, color="gray", linestyle=":")
    axes.set(xscale="log", xlabel="time of a step, Adam included, relative to full (dotted)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(0.94, 0))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_tradeoff(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """For each corpus, perplexity against the time of a step, both relative to the full softmax."""
    corpora = []
    for corpus, words in CORPORA.items():
        if {f"softmax_steps_{corpus}", f"softmax_quality_{corpus}"} <= results.keys():
            steps, qualities = (results[f"softmax_{bench}_{corpus}"]["rows"] for bench in ("steps", "quality"))
            times = {row["output"]: row["ratios"]["time over full"] for row in steps}
            corpora.append(
                (words, [(row["output"], times[row["output"]], row["ratios"]["over full"]) for row in qualities])
            )
    if not corpora:
        return
    max_ratio = 1.25
    layers = list(dict.fromkeys(layer for _, points in corpora for layer, _, ratio in points if ratio <= max_ratio))
    styles = {layer: f"C{i % 10}{'os^'[i // 10]}" for i, layer in enumerate(layers)}
    figure, axes = plt.subplots(
        1, len(corpora), figsize=(2.2 + 3.2 * len(corpora), 3.8), layout="constrained", squeeze=False
    )
    for axis, (words, points) in zip(axes[0], corpora, strict=True):
        for layer, time, ratio in points:
            if ratio <= max_ratio:
                axis.plot(time, ratio, styles[layer], label=layer)
        axis.set(xscale="log", xlabel="time of a training step relative to full", title=f"{words} words")
        decade = min(time for _, time, _ in points) > 0.1
        axis.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 3, 5) if decade else (1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axis.grid(alpha=0.3)
        if omitted := sum(ratio > max_ratio for _, _, ratio in points):
            axis.text(
                0.98, 0.98, f"{omitted} above {max_ratio}", transform=axis.transAxes, ha="right", va="top", fontsize=8
            )
    handles = [
        matplotlib.lines.Line2D([], [], linestyle="", color=f[:-1], marker=f[-1], label=n) for n, f in styles.items()
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    figure.suptitle("after an equal number of steps", fontsize=10)
    axes[0, 0].set_ylabel("held-out perplexity relative to full")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_sizes(rows: Rows, path: Path) -> None:
    """Held-out loss of LSTMs and transformers by parameters, and by seconds of training."""
    figure, (by_size, by_time) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained", sharey=True)
    for number, form in enumerate(("LSTM", "transformer")):
        of_form = [row for row in rows if row["form"] == form]
        sizes, losses = [row["parameters"] for row in of_form], [row["steps"]["score"] for row in of_form]
        by_size.plot(sizes, losses, "o-", color=f"C{number}", label=f"{form}, equal steps")
        if form == "LSTM":  # the time is that of the transformer's steps
            timed = [row["time"]["score"] for row in of_form]
            by_size.plot(sizes, timed, "o:", color=f"C{number}", label="LSTM, the transformer's time")
        for row in of_form:
            steps = [step for step, _ in row["scores"]["0"]]
            curves = [[score for _, score in curve] for curve in row["scores"].values()]
            means = [sum(scores) / len(scores) for scores in zip(*curves, strict=True)]
            by_time.plot([step * row["step_seconds"] for step in steps], means, color=f"C{number}", linewidth=0.9)
    by_size.set(xscale="log", xlabel="parameters", ylabel="held-out loss, nats per byte")
    ticks = [row["parameters"] for row in rows if row["form"] == "LSTM"]
    by_size.set_xticks(ticks, [f"{tick / 1e3:.0f}k" for tick in ticks])
    by_size.minorticks_off()
    by_size.legend(frameon=False, fontsize=8)
    by_time.set(xscale="log", xlabel="seconds of training steps, a line for each size")
    by_time.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


PLOTS: dict[str, Callable[[Rows, Path], None]] = {
    "demo": plot_demo,
    "train_step": plot_train_step,
    "attention": plot_attention,
    "softmax_layers": plot_softmax,
    "recurrent_sizes": plot_sizes,
}
# Descriptions of the plots, by the name of the benchmark.
CAPTIONS = {
    "demo": "Bits per byte during the training of make demo, and those of compressors",
    "train_step": "Time of a training step of hpnlp, torch and plain Flax",
    "attention": "Time of attention patterns relative to dense attention",
    "softmax_layers": "Time of a training step of output layers relative to the full softmax",
    "recurrent_sizes": "Held-out loss of LSTMs and transformers by parameters and by seconds of training",
}
