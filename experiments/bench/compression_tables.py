"""Tables and the plot of the results of `experiments/compression/bert.py`, for docs/guide/compression.md."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

Rows = Sequence[Mapping[str, Any]]
FAR_BELOW = 0.06  # a score that is lower than the teacher's by more is not drawn
PRODUCT, ROWS = "times w [384, 1536]", (1, 128, 1024)  # of the products in docs/results.md


def quantized_products(rows: Rows) -> list[tuple[str, str]]:
    """Lines of the encoders and of decoding, and of one product with several numbers of rows.

    Args:
      rows: Rows of the result file.

    Returns:
      Label and value of each line.
    """
    lines = [
        (f"{row['what']}: {name.replace(' over ', ' relative to ')}", f"{ratio:.3g}")
        for row in rows
        if row["what"].startswith(("encoder", "decoding"))
        for name, ratio in row["ratios"].items()
    ]
    products = [row["ratios"] for count in ROWS for row in rows if row["what"] == f"x [{count}, 384] {PRODUCT}"]
    lines += _by_rows(f"x [{', '.join(map(str, ROWS))}; 384] {PRODUCT}", products)
    bits = [row for row in rows if row["what"].startswith("bits: ")]
    counts = [row["what"].removeprefix("bits: x [").split(",")[0] for row in bits]
    return lines + _by_rows(f"x [{', '.join(counts)}; 1024] times w [1024, 1024]", [row["ratios"] for row in bits])


def _by_rows(what: str, products: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """A line for each kind of weight, with its ratios for all numbers of rows of x; shifts have some of them."""
    names = dict.fromkeys(name for ratios in products for name in ratios)
    return [
        (
            f"{what}: {name.replace(' over ', ' relative to ')}",
            "; ".join(f"{ratios[name]:.2f}" for ratios in products if name in ratios),
        )
        for name in names
    ]


def second_order(rows: Rows) -> list[tuple[str, str]]:
    """Increase of the loss by each stage, relative to rounding to the nearest or to the largest weights.

    Args:
      rows: Rows of the result file.

    Returns:
      Label and value of each line.
    """
    lines = []
    for row in rows:
        figure = f"{row['increase']:+.4f} nats per token"
        if "ratio" in row:
            low, high = row["interval"]
            figure += f"; {row['ratio']:.2f} ({low:.2f} to {high:.2f}) times that of `{row['compared_with']}`"
        lines.append((f"increase of the held-out loss by `{row['what']}`, without training", figure))
    return lines


def sparse_products(rows: Rows) -> list[tuple[str, str]]:
    """Time of each product with a sparse matrix relative to the dense one, over the shapes of the matrix.

    Args:
      rows: Rows of the result file.

    Returns:
      Label and value of each line.
    """
    lines = []
    for share in dict.fromkeys(row["share"] for row in rows):
        for count in dict.fromkeys(row["rows"] for row in rows):
            group = [row for row in rows if (row["share"], row["rows"]) == (share, count)]
            zeros = [row["zeros"]["blocks"] for row in group]
            # At least one block of each column of blocks stays.
            names = (
                {"blocks": f"blocks ({100 * min(zeros):.0f} to {100 * max(zeros):.0f} % zeros)"} if share < 0.5 else {}
            )
            figures = []
            for name in group[0]["over_dense"]:
                ratios = [row["over_dense"][name] for row in group]
                figures.append(f"{names.get(name, name)} {min(ratios):.2f} to {max(ratios):.2f}")
            inputs = "a row" if count == 1 else f"{count:,} rows"
            label = (
                f"{inputs} times a matrix with {100 - 100 * share:.0f} % zeros, three shapes: time relative to dense"
            )
            lines.append((label, "; ".join(figures)))
    return lines


def render(rows: Rows) -> str:
    """A table for each task: sizes, time relative to the original, and the held-out score of each technique.

    Args:
      rows: Rows of the result file.

    Returns:
      Markdown.
    """
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        members = [row for row in rows if row["task"] == task]
        counts = list(next((row["seconds"] for row in members if "seconds" in row), ()))
        times = [f"time, {count} sequence{'s' * (count != '1')}" for count in counts]
        header = ["technique", "recipe", members[0]["metric"], "disk KiB", "memory KiB", *times]
        lines = [header, ["---"] * len(header), *(_cells(row, counts) for row in members)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"{task[0].upper()}{task[1:]}:\n\n{table}")
    return "\n\n".join(parts)


def _cells(row: Mapping[str, Any], counts: Sequence[str]) -> list[str]:
    score = f"{100 * row['score']:.1f} %"
    if row["seeds"] > 1:
        score += f" ({', '.join(f'{100 * value:.1f}' for value in row['scores'])})"
    measured = ["", ""] + [""] * len(counts)
    if "seconds" in row:
        measured = [f"{row[name] / 1024:,.0f}" for name in ("disk_bytes", "memory_bytes")]
        measured += [f"{row['seconds'][count] / row['original_seconds'][count]:.2f}" for count in counts]
    return [row["technique"], f"`{row['recipe']}`" if row["recipe"] else "", score, *measured]


def labels(sizes: Sequence[float], scores: Sequence[float]) -> list[tuple[tuple[float, float], str]]:
    """Numbers of points, from 1 on; points that are so near that their labels would overlap have one label.

    Args:
      sizes: Positions on a logarithmic axis.
      scores: Positions on a linear axis.

    Returns:
      Position and text of each label.
    """
    xs, ys = np.log(sizes), np.asarray(scores)
    width, height = (max(np.ptp(x), 1e-9) if len(x) else 1.0 for x in (xs, ys))
    groups: list[list[int]] = []
    for index in range(len(xs)):
        near = [
            g for g in groups if abs(xs[index] - xs[g[0]]) < 0.04 * width and abs(ys[index] - ys[g[0]]) < 0.025 * height
        ]
        if near:
            near[0].append(index)
        else:
            groups.append([index])
    return [((sizes[g[0]], scores[g[0]]), ", ".join(str(index + 1) for index in g)) for g in groups]


def plot(rows: Rows, path: Path) -> None:
    """Scores against bytes on disk and against time, both relative to the original, of the task with the most techniques.

    Args:
      rows: Rows of the result file. Those without sizes and times, and those far below the teacher, are left out.
      path: The image to write.
    """
    task, _ = collections.Counter(row["task"] for row in rows).most_common(1)[0]
    members = [row for row in rows if row["task"] == task and "seconds" in row]
    teacher = max((row["score"] for row in members if row["technique"] == "teacher"), default=0.0)
    members = [row for row in members if row["score"] > teacher - FAR_BELOW]
    counts = list(members[0]["seconds"]) if members else ["1"]
    count = counts[len(counts) // 2]
    size = 11, max(4.8, 0.14 * len(members))  # inches; a line of the names takes 0.13
    figure, (left, right, names) = plt.subplots(1, 3, figsize=size, layout="constrained", width_ratios=(3, 3, 1.9))
    bytes_on_disk = [row["disk_bytes"] / row["original_disk_bytes"] for row in members]
    seconds = [row["seconds"][count] / row["original_seconds"][count] for row in members]
    scores = [100 * row["score"] for row in members]
    for axes, sizes in ((left, bytes_on_disk), (right, seconds)):
        for row, x, y in zip(members, sizes, scores, strict=True):
            axes.plot(x, y, "o", color="C3" if row["technique"] == "teacher" else "C0", markersize=4)
        for point, label in labels(sizes, scores):
            axes.annotate(label, point, xytext=(3, 3), textcoords="offset points", fontsize=7)
    plural = "s" * (count != "1")
    left.set(xlabel="bytes on disk relative to the teacher", ylabel=f"{task}: {rows[0]['metric']}, %")
    right.set_xlabel(f"time of the loss of {count} sequence{plural} relative to the teacher")
    for axes in (left, right):
        axes.set_xscale("log")
        lowest, highest = axes.get_xlim()
        axes.set_xticks([x for x in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5) if lowest <= x <= highest])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:g}")
        axes.tick_params(labelsize=7, which="both")
        axes.grid(alpha=0.3)
    names.axis("off")
    text = "\n".join(f"{number:2}  {row['technique']}" for number, row in enumerate(members, 1))
    names.text(0, 1, text, va="top", fontsize=7, transform=names.transAxes)
    figure.savefig(path, dpi=130)
    plt.close(figure)
