"""Draws the README's results, table and plots, from experiments/results/*.json.

python experiments/bench/results.py
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

BAR = r"\|"  # in a table of Markdown, a bar that is text
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
Rows = Sequence[Mapping[str, Any]]


def demo(rows: Rows) -> list[tuple[str, str]]:
    row = rows[0]
    bits = f"{row['heldout_bits_per_byte']:.3f} (gzip -9 {row['gzip_bits_per_byte']:.3f}, xz -9e {row['xz_bits_per_byte']:.3f})"
    return [
        ("held-out bits per byte after `make demo`", bits),
        ("its wall time, from process start to report", f"{row['seconds']:.0f} s"),
    ]


def train_step(rows: Rows) -> list[tuple[str, str]]:
    return [
        (
            f"step, {row['layers']} layers, D {row['dim']}, T {row['length']}, B {row['batch']}: time over torch eager's",
            f"{row['ours_over_torch']:.2f} ({row['ours_ms']:.0f} ms; plain Flax {row['flax_over_torch']:.2f})",
        )
        for row in rows
    ]


def attention(rows: Rows) -> list[tuple[str, str]]:
    return [
        (f"attention, {row['what']}: {name}", f"{ratio:.3g}") for row in rows for name, ratio in row["ratios"].items()
    ]


def softmax(rows: Rows) -> list[tuple[str, str]]:
    return [(f"{row['what']}: {name}", f"{ratio:.3g}") for row in rows for name, ratio in row["ratios"].items()]


def plot_softmax(rows: Rows, path: Path) -> None:
    """What a step of each output layer takes, beside the full one's, at each size of the vocabulary."""
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    found: dict[str, dict[str, float]] = {}  # size -> layer -> ratio
    for row in rows:
        if step := re.fullmatch(r"(?:training )?step of (.*), V ([\d,]+)", row["what"]):
            found.setdefault(step[2], {})[step[1]] = row["ratios"]["time over full"]
    names = list(dict.fromkeys(name for ratios in found.values() for name in ratios))
    height = 0.76 / len(found)
    for offset, (size, ratios) in enumerate(found.items()):
        places = [names.index(name) + (height + 0.02) * offset for name in ratios]
        axes.barh(places, list(ratios.values()), height, label=f"V {size}")
    axes.set_yticks([i + (height + 0.02) * (len(found) - 1) / 2 for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.axvline(1, color="gray", linestyle=":")
    axes.set(xscale="log", xlabel="time of a step over the full softmax's, Adam included")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_attention(rows: Rows, path: Path) -> None:
    """Time over our own dense against the share of the pairs that a pattern keeps."""
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    names = list(dict.fromkeys(row["what"].rpartition(", T ")[0] for row in rows if "density" in row))
    for row in rows:
        if "density" in row:
            name, _, length = row["what"].rpartition(", T ")
            color, marker = f"C{names.index(name)}", "o" if length == "4096" else "^"
            label = name if length == "4096" else None
            axes.plot(row["density"], next(iter(row["ratios"].values())), marker, color=color, label=label)
    low = min(row["density"] for row in rows if "density" in row)
    axes.plot([low, 1], [low, 1], ":", color="gray", label="what it keeps")
    axes.set(xscale="log", yscale="log", xlabel="share of the pairs that the pattern keeps", ylabel="time over dense")
    axes.set_title("forward and backward; circles T 4096, triangles T 16384", fontsize=9)
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def loop(rows: Rows) -> list[tuple[str, str]]:
    row = rows[0]
    return [
        (f"{row['steps']} steps of the loop over bare jitted steps", f"{row['loop_over_bare']:.3f}"),
        ("`import hpnlp` beyond `import jax`", f"{1e3 * row['import_seconds']:.1f} ms"),
    ]


def decode(rows: Rows) -> list[tuple[str, str]]:
    lines = []
    for row in rows:
        model = f"{row['layers']} layers, D {row['dim']}, {row['model']}"
        if row["what"] == "prefill":
            figure = f"{row['prefill_over_forward']:.2f} ({row['prefill_ms']:.0f} ms)"
            lines.append((f"prefill of {row['prompt']} tokens over one forward pass, {model}", figure))
        else:
            prompts = f"{row['batch']} prompt{'s' * (row['batch'] > 1)}"
            figure = f"{row['speedup']:.1f} ({row['ours_tokens_per_second']:,.0f} tokens/s)"
            lines.append((f"decoding, {prompts}, {model}: tokens/s over torch eager's with a cache", figure))
    return lines


def parity(rows: Rows) -> list[tuple[str, str]]:
    return [
        (
            f"{row['layout']} against one device: loss over {row['steps']} steps; first gradients, each leaf; relative",
            f"{row['loss_relative']:.1e}; {row['gradient_relative']:.1e}",
        )
        for row in rows[1:]
    ]


def resume(rows: Rows) -> list[tuple[str, str]]:
    row = rows[0]
    lost, lines = row["steps_lost_beyond_interval"], f"of {row['lines_of_each']} in each of {row['runs_compared']} runs"
    return [
        (f"{row['kills']} times kill -9: steps lost beyond one checkpoint interval", str(lost)),
        ("lines of metrics that differ in any bit from an undisturbed run's", f"{row['lines_that_differ']} {lines}"),
    ]


def suite(rows: Rows) -> list[tuple[str, str]]:
    return [("`make test`, after set-up", f"{rows[0]['seconds'] / 60:.1f} min ({rows[0]['passed']} tests)")]


def gpu_step(rows: Rows) -> list[tuple[str, str]]:
    best = max((row for row in rows if row.get("mfu")), key=lambda row: row["mfu"], default=None)
    if best is None:
        return []
    what = f"step of {best['parameters'] / 1e6:.0f}M parameters, bfloat16, T {best['length']}, B {best['batch']}: MFU"
    return [(what, f"{100 * best['mfu']:.0f} % ({best['step_ms']:.0f} ms, {best['tokens_per_second']:,.0f} tokens/s)")]


# One file a corpus, as each takes its time to measure.
TRAINING_STEPS = ("softmax_steps_docs", "softmax_steps_code", "softmax_steps_whitespace")
QUALITIES = ("softmax_quality_docs", "softmax_quality_docs_time", "softmax_quality_code", "softmax_quality_whitespace")

# result file (before the device) -> its lines of the table: (what was measured, the figure)
TABLE: dict[str, Callable[[Rows], list[tuple[str, str]]]] = {
    "demo": demo,
    "train_step": train_step,
    "attention": attention,
    **dict.fromkeys(("softmax", "softmax_layers", "search", *TRAINING_STEPS, *QUALITIES), softmax),
    "decode": decode,
    "loop": loop,
    "parity": parity,
    "resume": resume,
    "suite": suite,
    "gpu_step": gpu_step,
}


def plot_demo(rows: Rows, path: Path) -> None:
    row, per_bit = rows[0], math.log(2)
    bits = np.array([loss for _, loss in row["curve"]]) / per_bit
    steps, window = np.array([step for step, _ in row["curve"]]), 20
    smooth = np.convolve(bits, np.ones(window) / window, "valid")
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    axes.plot(steps, bits, color="C0", alpha=0.25, linewidth=0.8)
    axes.plot(steps[window - 1 :], smooth, color="C0", label=f"training, mean of {window} steps")
    axes.plot(steps[-1], row["heldout_bits_per_byte"], "o", color="C3", label="held-out")
    for name, key, style in (("gzip -9", "gzip_bits_per_byte", ":"), ("xz -9e", "xz_bits_per_byte", "--")):
        axes.axhline(row[key], color="gray", linestyle=style, label=f"{name}, held-out")
    axes.set(xlabel=f"step of {row['tokens'] // row['steps']:,} bytes", ylabel="bits a byte", ylim=(1, 5))
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
    axes.set(ylabel="ms a step")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


PLOTS: dict[str, Callable[[Rows, Path], None]] = {
    "demo": plot_demo,
    "train_step": plot_train_step,
    "attention": plot_attention,
    **dict.fromkeys(("softmax_layers", *TRAINING_STEPS), plot_softmax),
}


def main() -> None:
    by_device: dict[str, list[tuple[str, str, str]]] = {}
    images = []
    order = list(TABLE)
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: order.index(path.stem.split("-")[0])):
        result = json.loads(path.read_text())
        where = result["environment"]
        cpu = f"{where['cores']} cores of {where['cpu']}"
        device = (cpu if where["backend"] == "cpu" else where["device"]) + f", jax {where['jax']}"
        lines = TABLE[result["bench"]](result["rows"])
        by_device.setdefault(device, []).extend((what, figure, path.name) for what, figure in lines)
        if result["bench"] in PLOTS:
            image = path.with_suffix(".png")
            PLOTS[result["bench"]](result["rows"], image)
            images.append(f"![{result['bench']}](experiments/results/{image.name})")
    tables = [
        f"Measured on {device}:\n\n| what | measured | file |\n|---|---|---|\n"
        + "\n".join(f"| {what.replace('|', BAR)} | {figure} | `{name}` |" for what, figure, name in lines)
        for device, lines in by_device.items()
    ]
    readme = ROOT / "README.md"
    section = "\n\n".join(tables + images)
    text = re.sub(
        r"(<!-- results -->\n).*?(<!-- /results -->)",
        lambda m: f"{m[1]}{section}\n{m[2]}",
        readme.read_text(),
        flags=re.DOTALL,
    )
    readme.write_text(text)


if __name__ == "__main__":
    main()
