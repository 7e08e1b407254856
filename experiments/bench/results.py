"""Draws the README's results, table and plots, from experiments/results/*.json.

python experiments/bench/results.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

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


def loop(rows: Rows) -> list[tuple[str, str]]:
    row = rows[0]
    return [
        (f"{row['steps']} steps of the loop over bare jitted steps", f"{row['loop_over_bare']:.3f}"),
        ("`import hpnlp` beyond `import jax`", f"{1e3 * row['import_seconds']:.1f} ms"),
    ]


# result file (before the device) -> its lines of the table: (what was measured, the figure)
TABLE: dict[str, Callable[[Rows], list[tuple[str, str]]]] = {"demo": demo, "train_step": train_step, "loop": loop}


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


PLOTS: dict[str, Callable[[Rows, Path], None]] = {"train_step": plot_train_step}


def main() -> None:
    by_device: dict[str, list[tuple[str, str, str]]] = {}
    images = []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        where = result["environment"]
        cpu = f"{where['cores']} cores of {where['cpu']}"
        device = (cpu if where["backend"] == "cpu" else where["device"]) + f", jax {where['jax']}"
        if result["bench"] in TABLE:
            lines = TABLE[result["bench"]](result["rows"])
            by_device.setdefault(device, []).extend((what, figure, path.name) for what, figure in lines)
        if result["bench"] in PLOTS:
            image = path.with_suffix(".png")
            PLOTS[result["bench"]](result["rows"], image)
            images.append(f"![{result['bench']}](experiments/results/{image.name})")
    tables = [
        f"Measured on {device}:\n\n| what | measured | file |\n|---|---|---|\n"
        + "\n".join(f"| {what} | {figure} | `{name}` |" for what, figure, name in lines)
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
