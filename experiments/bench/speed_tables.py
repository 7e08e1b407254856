"""Tables and plot of the speed tricks and of encoders, from the rows of their result files. `results.py` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Rows = Sequence[Mapping[str, Any]]
Lines = Sequence[tuple[str, str]]

# Tables of the page: heading -> (table, the fields that make a group).
TRICKS = {
    "Dot products of pairs of vectors": ("dots", ("pairs", "dim", "passes")),
    "Dot products of one vector with the rows of a matrix": ("vector", ("rows", "dim", "passes")),
    "Sums of the embeddings of bags of words": ("bags", ("lengths", "padding", "passes")),
    "Small operations": ("dispatch", ("operations",)),
    "Rows times a matrix": ("products", ("rows", "dim")),
    "Steps on batches from the host": ("data", ("batches", "batch")),
}


def time_text(seconds: float) -> str:
    """A duration in a unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def factor_text(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"


def table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table of a heading and rows."""
    heading, *rows = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, ["---"] * len(heading), *rows))


def ladder_table(rows: Rows) -> str:
    """The forms of the ladder, each with its factor over the one before."""
    lines = [["form", "time of a step", "factor over the form before", "factor over the first", "FLOPs of products"]]
    for row in rows:
        factor = "" if row["is_peer"] or row["over_first"] == 1 else factor_text(row["factor"])
        name = f"(peer) {row['form']}" if row["is_peer"] else row["form"]
        figures = [time_text(row["seconds"]), factor, factor_text(row["over_first"]), f"{row['flops']:,.0f}"]
        lines.append([name, *figures])
    return table(lines)


def trick_table(rows: Rows, group: Sequence[str]) -> str:
    """Forms of one trick, with the factor over the slow form and that of the literature."""
    has_claims = any("claimed" in row for row in rows)
    lines = [[*group, "form", "time", "factor over the first form", *["claimed"] * has_claims]]
    for row in rows:
        sizes = [f"{row[name]:.0%}" if name == "padding" else str(row[name]) for name in group]
        claimed = [factor_text(row["claimed"]) if "claimed" in row else ""] * has_claims
        lines.append([*sizes, row["form"], time_text(row["seconds"]), factor_text(row["factor"]), *claimed])
    return table(lines)


def size_table(rows: Rows) -> str:
    """Times of products by size, and the sizes from which each device is faster than numpy."""
    forms = list(dict.fromkeys(row["form"] for row in rows))
    sizes = sorted({row["size"] for row in rows})
    cells = {(row["form"], row["size"]): row for row in rows}
    lines = [["n", *forms]]
    for size in sizes:
        times = (cells[form, size] for form in forms)
        lines.append([str(size), *(f"{time_text(r['seconds'])} ({r['gflops']:.3g} GFLOP/s)" for r in times)])
    text = [table(lines)]
    for form in forms[1:]:
        # From the smallest size on, from which it is always faster.
        slower = [size for size in sizes if cells[form, size]["over_numpy"] >= 1]
        larger = [size for size in sizes if not slower or size > slower[-1]]
        place = f"from n = {larger[0]} on" if larger else "at none of these sizes"
        text.append(f"`{form}` is faster than numpy {place}.")
    on_cpu, *others = [form for form in forms if form.endswith("operands there")]
    for form in others:
        faster = [size for size in sizes if cells[form, size]["seconds"] < cells[on_cpu, size]["seconds"]]
        place = f"from n = {faster[0]} on" if faster else "at none of these sizes"
        text.append(f"`{form}` is faster than `{on_cpu}` {place}.")
    return f"{text[0]}\n\n{' '.join(text[1:])}"


def speed_tricks(rows: Rows) -> str:
    """The generated part of docs/guide/speed_tricks.md."""
    of_table = {name: [row for row in rows if row["table"] == name] for name in {row["table"] for row in rows}}
    parts = []
    if "ladder" in of_table:
        parts += ["### The ladder", ladder_table(of_table["ladder"])]
    for heading, (name, group) in TRICKS.items():
        if name in of_table:
            parts += [f"### {heading}", trick_table(of_table[name], group)]
    if "sizes" in of_table:
        parts += ["### Products of n x n matrices", size_table(of_table["sizes"])]
    return "\n\n".join(parts)


def plot_speed_tricks(rows: Rows, path: Path) -> None:
    """The steps of the ladder as bars, and the speed of products by their size."""
    figure, (bars, curves) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", width_ratios=(1.15, 1))
    ladder = [row for row in rows if row["table"] == "ladder"][::-1]
    colors = ["0.6" if row["is_peer"] else "C0" for row in ladder]
    bars.barh([row["form"] for row in ladder], [1e3 * row["seconds"] for row in ladder], color=colors)
    for index, row in enumerate(ladder):
        text = f" {factor_text(row['over_first'])} x" if row["over_first"] > 1 else ""
        bars.text(1e3 * row["seconds"], index, text, va="center", fontsize=8)
    bars.set(xscale="log", xlabel="ms per step; factor over the first form", title="The ladder")
    bars.margins(x=0.15)
    sizes = [row for row in rows if row["table"] == "sizes"]
    for form in dict.fromkeys(row["form"] for row in sizes):
        points = [(row["size"], row["gflops"]) for row in sizes if row["form"] == form]
        curves.plot(*zip(*points, strict=True), "o-", markersize=4, label=form)
    curves.set(xscale="log", yscale="log", xlabel="n", ylabel="GFLOP/s", title="Products of n x n matrices")
    ticks = sorted({row["size"] for row in sizes})
    curves.set_xticks(ticks, [str(size) for size in ticks], minor=False)
    curves.minorticks_off()
    curves.grid(alpha=0.3)
    curves.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# The encoders of encoders.py -> their description.
ENCODERS = {"convolution": "dilated convolutions", "attention": "self-attention", "lstm": "bidirectional LSTM"}


def encoders(rows: Rows) -> Lines:
    """Accuracy and speed of each encoder, and the gain of batches of similar lengths."""
    lines = [
        (
            f"{ENCODERS[row['encoder']]}, {row['parameters'] / 1e6:.2f}M parameters, packages of functions: held-out accuracy "
            f"after {row['seconds']:.0f} s of training; tokens/s without padding",
            f"{100 * row['accuracy']:.1f} %; {row['tokens_per_second']:,.0f} ({row['steps']:,} steps)",
        )
        for row in rows
    ]
    return lines + [
        (
            f"{ENCODERS[row['encoder']]}: time of a step on batches of similar lengths, relative to batches padded to 256 "
            "tokens; share of padding",
            f"{row['time_over_padded']:.2f}; {row['padding']:.2f}",
        )
        for row in rows
    ]
