"""Generates tables and plots of the documentation and the README from experiments/results/*.json.

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
import matplotlib.lines
import matplotlib.pyplot as plt
import matplotlib.ticker
import numpy as np

from hpnlp.data.baselines import NAMES
from hpnlp.plots import smooth

BAR = r"\|"  # in a table of Markdown, a bar that is text
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
IMAGES = ROOT / "docs" / "images"
Rows = Sequence[Mapping[str, Any]]


def demo(rows: Rows) -> list[tuple[str, str]]:
    row = rows[0]
    compressors = [f"{name} {row[field]:.3f}" for field, name in NAMES.items() if row.get(field) is not None]
    return [
        ("held-out bits per byte after `make demo`", f"{row['heldout_bits_per_byte']:.3f} ({', '.join(compressors)})"),
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


def estimates(rows: Rows) -> list[tuple[str, str]]:
    """Biases with their standard errors, and errors."""
    lines = []
    for row in rows:
        (name, off), *error = row["ratios"].items()
        spread = "".join(f" (standard error of the measurement {x:.1g})" for _, x in error)
        lines.append((f"{row['what']}: {name}", f"{off:.2g}{spread}"))
    return lines


# How many words the corpora of experiments/softmax/ have.
CORPORA = {"docs": "12,000", "code": "110,000", "whitespace": "400,000"}


def output_layers(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of output layers, from what a training step takes and what perplexity it comes to over each corpus.

    results: by the name of their bench. Empty where nothing of it is measured.
    """
    columns: dict[str, dict[str, str]] = {}  # heading -> layer -> figure
    environment: Mapping[str, Any] = {}
    for corpus, words in CORPORA.items():
        if found := results.get(f"softmax_steps_{corpus}"):
            environment = found["environment"]
            column = columns.setdefault(f"step, {words} words", {})
            for row in found["rows"]:
                memory = sum(row["megabytes"].values())
                column[row["output"]] = f"{row['ratios']['time over full']:.2g} ({memory:,.0f} MB)"
    for corpus, words in CORPORA.items():
        for bench, what in ((corpus, "steps"), (f"{corpus}_time", "time")):
            if found := results.get(f"softmax_quality_{bench}"):
                column = columns.setdefault(f"perplexity, same {what}, {words}", {})
                column.update({row["output"]: f"{row['ratios']['over full']:.3f}" for row in found["rows"]})
    layers = list(dict.fromkeys(layer for column in columns.values() for layer in column))
    if not layers:
        return ""
    lines = [["output layer", *columns], ["---"] * (len(columns) + 1)]
    lines += [[f"`{layer}`", *(column.get(layer, "") for column in columns.values())] for layer in layers]
    return "\n".join([f"Over `full`, on {machine(environment)}:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def plot_tradeoff(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """For each corpus, perplexity against the time of a step, both over the full softmax's."""
    found = []
    for corpus, words in CORPORA.items():
        if {f"softmax_steps_{corpus}", f"softmax_quality_{corpus}"} <= results.keys():
            steps, qualities = (results[f"softmax_{what}_{corpus}"]["rows"] for what in ("steps", "quality"))
            times = {row["output"]: row["ratios"]["time over full"] for row in steps}
            found.append(
                (words, [(row["output"], times[row["output"]], row["ratios"]["over full"]) for row in qualities])
            )
    if not found:
        return
    worst = 1.25
    layers = list(dict.fromkeys(layer for _, points in found for layer, _, ratio in points if ratio <= worst))
    styles = {layer: f"C{i % 10}{'os^'[i // 10]}" for i, layer in enumerate(layers)}
    figure, axes = plt.subplots(
        1, len(found), figsize=(2.2 + 3.2 * len(found), 3.8), layout="constrained", squeeze=False
    )
    for axis, (words, points) in zip(axes[0], found, strict=True):
        for layer, time, ratio in points:
            if ratio <= worst:
                axis.plot(time, ratio, styles[layer], label=layer)
        axis.set(xscale="log", xlabel="time of a training step over full's", title=f"{words} words")
        decade = min(time for _, time, _ in points) > 0.1
        axis.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 3, 5) if decade else (1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axis.grid(alpha=0.3)
        if left := sum(ratio > worst for _, _, ratio in points):
            axis.text(0.98, 0.98, f"{left} above {worst}", transform=axis.transAxes, ha="right", va="top", fontsize=8)
    handles = [
        matplotlib.lines.Line2D([], [], linestyle="", color=f[:-1], marker=f[-1], label=n) for n, f in styles.items()
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    axes[0, 0].set_ylabel("held-out perplexity over full's, same steps")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def machine(environment: Mapping[str, Any]) -> str:
    cpu = f"{environment['cores']} cores of {environment['cpu']}"
    return (cpu if environment["backend"] == "cpu" else environment["device"]) + f", jax {environment['jax']}"


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
    """The worst of all layouts."""
    layouts, names = rows[1:], "; ".join(row["layout"] for row in rows[1:])
    worst = [max(row[name] for row in layouts) for name in ("loss_relative", "gradient_relative")]
    apart = [
        max(abs(row[f"{what}_bytes"] / row[f"{what}_bytes_planned"] - 1) for row in layouts)
        for what in ("state", "sent")
    ]
    many = f"{len(layouts)} layouts of 8 devices"
    return [
        (
            f"{many} ({names}) against one device: loss over {layouts[0]['steps']} steps; first gradients, each leaf; relative",
            f"at most {worst[0]:.1e}; {worst[1]:.1e}",
        ),
        (
            f"{many}: bytes that a device holds; and sends in a step; off those planned",
            f"at most {apart[0]:.2%}; {apart[1]:.2%}",
        ),
    ]


def bubble(rows: Rows) -> list[tuple[str, str]]:
    counted = [row for row in rows if "idle_counted" in row]
    apart = max(abs(row["idle_counted"] - row["idle_formula"]) for row in counted)
    idle = [row["idle_formula"] for row in counted]
    what = f"{len(counted)} schedules of {rows[0]['stages']} stages, 1 to 4 rounds: idle part of the time, as counted"
    return [(what, f"{max(idle):.3f} to {min(idle):.3f}, at most {apart:.1e} off the formula")]


def remat(rows: Rows) -> list[tuple[str, str]]:
    first = rows[0]
    size = f"{first['parameters'] / 1e6:.0f}M parameters, T {first['length']}"
    lines = [
        (
            f"`plan.remat={row['remat']}`, step of {size}, B {row['rows']}: temporaries; as planned",
            f"{row['temp_bytes'] / 2**20:,.0f} MiB; {row['temp_bytes_planned'] / row['temp_bytes'] - 1:+.1%}",
        )
        for row in rows
    ]
    return lines + [
        (
            f"`plan.remat={row['remat']}`, step of {size}, B {row['timed_rows']}: time over that of `{first['remat']}`",
            f"{row['time_over_first']:.2f} ({row['ms']:,.0f} ms)",
        )
        for row in rows
        if "timed_rows" in row
    ]


def ring(rows: Rows) -> list[tuple[str, str]]:
    lines = []
    for row in rows:
        what = f"`{row['mixer']}`, a row of {row['length']:,} tokens over {row['devices']} devices, {row['layout']}"
        if "over_one" in row:
            lines.append((f"{what}: activations over those of one device", f"1 / {1 / row['over_one']:.1f}"))
        if "pairs_done" in row:
            done = f"{row['pairs_done'] / row['pairs_possible']:.3f}; {row['rounds_done'] / row['rounds_possible']:.3f}"
            lines.append(
                (f"{what}: pairs of chunks done over all; rounds; the mask's share", f"{done}; {row['density']:.3f}")
            )
    return lines


def plan(rows: Rows) -> list[tuple[str, str]]:
    return [
        (
            f"`hpnlp plan` of {row['model']} parameters for {row['devices']} devices, {row['depth']}",
            f"{row['seconds']:.1f} s",
        )
        for row in rows
    ] + [
        (
            f"planned over compiled for {row['devices']} devices, {row['model']} parameters: state; temporaries; sent",
            "; ".join(f"{row[f'{what} off']:+.1%}" for what in ("state", "temporaries", "communication")),
        )
        for row in rows
        if "state off" in row
    ]


def plan_tpu(rows: Rows) -> list[tuple[str, str]]:
    found = [row["temporaries off"] for row in rows]
    what = f"{len(rows)} steps of 110M and 7B parameters on 1 to 512 TPUs: planned over compiled temporaries"
    return [(what, f"{min(found):+.0%} to {max(found):+.0%}")]


def resume(rows: Rows) -> list[tuple[str, str]]:
    row = rows[0]
    lost, lines = row["steps_lost_beyond_interval"], f"of {row['lines_of_each']} in each of {row['runs_compared']} runs"
    return [
        (f"{row['kills']} times kill -9: steps lost beyond one checkpoint interval", str(lost)),
        ("lines of metrics that differ in any bit from an undisturbed run's", f"{row['lines_that_differ']} {lines}"),
    ]


def reversible(rows: Rows) -> list[tuple[str, str]]:
    """Of the fewest and the most layers, and of each stack of the most."""
    deep = max(row["layers"] for row in rows)
    few, many = (
        {row["stack"]: row for row in rows if row["layers"] == n} for n in (min(r["layers"] for r in rows), deep)
    )
    plain, ours = many["plain"], many["reversible"]
    size = f"D {ours['dim']}, T {ours['length']}, B {ours['batch']}"
    lines = [
        (
            f"memory of reversible layers, {size}: {deep} layers over {few['reversible']['layers']}",
            f"{ours['temp_bytes'] / few['reversible']['temp_bytes']:.3f}",
        )
    ]
    lines += [
        (
            f"gradient, {deep} layers, {size}, {row['stack']}: memory; time over plain's",
            f"{row['temp_bytes'] / 2**20:,.0f} MiB; {row['time_over_plain']:.2f} ({row['ms']:.0f} ms)",
        )
        for row in (plain, many["remat"], ours)
    ]
    error = f"{ours['gradient_error']:.1e}"
    return [*lines, (f"gradients of {deep} reversible layers against the same ones kept: relative", error)]


def adamw(rows: Rows) -> list[tuple[str, str]]:
    """Each form of one update; the MiB are temporaries."""
    lines = []
    for row in rows:
        what = f"AdamW of {row['parameters'] / 1e6:.0f}M parameters, {row['form']} ({row['arrays']} arrays)"
        took = f"{row['ms']:.0f} ms, {row['gb_per_second']:.0f} GB/s, {row['temp_bytes'] >> 20} MiB"
        lines.append((f"{what}: time over stacks'", f"{row['time_over_stacks']:.2f} ({took})"))
    return lines


def large_batch(rows: Rows) -> list[tuple[str, str]]:
    """What the best recipe of the small batch comes to, and what others lose against it at the same number of tokens."""
    best = min((row for row in rows if row["rule"] == "small"), key=lambda row: row["loss"])
    rules = {"none": "as it was"}
    return [
        (
            f"{best['optimizer']}, batches of {best['batch'] * best['length']:,} bytes: held-out loss",
            f"{best['loss']:.3f} nats a byte ({best['steps']:,} steps)",
        )
    ] + [
        (
            f"{row['optimizer']}, batches of {row['batch'] * row['length']:,} bytes, rate "
            f"{rules.get(row['rule'], 'by ' + row['rule'])}: held-out loss over that",
            f"{row['over_small']:.3f} ({row['steps']:,} steps)",
        )
        for row in rows
        if row["rule"] != "small"
    ]


def suite(rows: Rows) -> list[tuple[str, str]]:
    return [("`make test`, after set-up", f"{rows[0]['seconds'] / 60:.1f} min ({rows[0]['passed']} tests)")]


def gpu_step(rows: Rows) -> list[tuple[str, str]]:
    timed = [row for row in rows if "step_ms" in row]
    lines = []
    if best := max((row for row in timed if row["mfu"]), key=lambda row: row["mfu"], default=None):
        what = f"step of {best['parameters'] / 1e6:.0f}M parameters, bfloat16, T {best['length']}, B {best['batch']}"
        figure = f"{100 * best['mfu']:.0f} % ({best['step_ms']:.0f} ms, {best['tokens_per_second']:,.0f} tokens/s)"
        lines.append((f"{what}, `{best['setting']}`: MFU", figure))
    if ratios := [row["planned_over_measured"] for row in timed]:
        what = f"{len(ratios)} of these by batch and recomputation: planned time over measured"
        lines.append((what, f"{min(ratios):.2f} to {max(ratios):.2f}"))
    return lines + [
        (
            f"the same with `{row['setting']}`, B {row['batch']}: memory freed; time over that without",
            f"{row['freed_bytes'] / 1e9:.2f} GB; {row['time_over_without']:.2f}",
        )
        for row in timed
        if "freed_bytes" in row
    ]


# result file (before the device) -> its lines of the table: (what was measured, the figure)
TABLE: dict[str, Callable[[Rows], list[tuple[str, str]]]] = {
    "demo": demo,
    "train_step": train_step,
    "attention": attention,
    **dict.fromkeys(("softmax", "softmax_layers", "gpu_softmax", "search"), softmax),
    "estimates": estimates,
    "reversible": reversible,
    "decode": decode,
    "loop": loop,
    "parity": parity,
    "bubble": bubble,
    "ring": ring,
    "remat": remat,
    "plan": plan,
    "plan_tpu": plan_tpu,
    "resume": resume,
    "adamw": adamw,
    "large_batch": large_batch,
    "suite": suite,
    "gpu_step": gpu_step,
}


def plot_demo(rows: Rows, path: Path) -> None:
    row, per_bit = rows[0], math.log(2)
    bits = np.array([loss for _, loss in row["curve"]]) / per_bit
    steps = np.array([step for step, _ in row["curve"]])
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    axes.plot(steps, bits, color="C0", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(bits.tolist()), color="C0", label="training, centred mean of 1/20 of the steps")
    axes.plot(steps[-1], row["heldout_bits_per_byte"], "o", color="C3", label="held-out")
    for (field, name), style in zip(NAMES.items(), (":", "-.", "--"), strict=True):
        if row.get(field) is not None:
            axes.axhline(row[field], color="gray", linestyle=style, label=f"held-out: {name}")
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
    "softmax_layers": plot_softmax,
}


# The figures of the README: (label, bench, beginning of the figure's name in that bench's table).
HEADLINE = [
    ("byte-level language model after `make demo`: held-out bits per byte", "demo", "held-out bits per byte"),
    ("training step, 4 layers, D 192, T 256, B 16: time over torch eager's", "train_step", "step, 4 layers, D 192"),
    (
        "dense attention, T 4096, forward and backward: time over torch SDPA's",
        "attention",
        "attention, dense, T 4096: over torch",
    ),
    (
        "strided attention, T 16,384: time over dense",
        "attention",
        "attention, causal strided, window 64, stride 64, T 16384",
    ),
    ("exact loss, V 262,144: temporary memory over that with logits", "softmax", "exact, V 262,144: temporary memory"),
    (
        "`sampled(1024)` by rows, V 262,144: time of a step over full softmax's",
        "softmax_layers",
        "step of sampled(1024) by rows, V 262,144",
    ),
    ("decoding with a KV cache, 1 prompt: tokens/s over torch eager's", "decode", "decoding, 1 prompt"),
    (
        "16 layouts of 8 devices: loss over 100 steps; first gradients; relative difference from one device",
        "parity",
        "16 layouts of 8 devices (data",
    ),
]


def headline(lines: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """The table of HEADLINE. lines: by bench, the lines of its table."""
    rows = []
    for label, bench, beginning in HEADLINE:
        figure = next(figure for what, figure in lines[bench] if what.startswith(beginning))
        rows.append(f"| {label} | {figure} |")
    return "\n".join(["| measured on two CPU cores | |", "|---|---|", *rows])


def replace_section(path: Path, name: str, text: str) -> None:
    """Replaces what stands between `<!-- name -->` and `<!-- /name -->`. Raises ValueError where a mark is missing."""
    content, marks = path.read_text("utf-8"), (f"<!-- {name} -->\n", f"<!-- /{name} -->")
    before, _, rest = content.partition(marks[0])
    _, closing, after = rest.partition(marks[1])
    if not closing:
        raise ValueError(f"{path} has no section {marks[0].strip()} ... {marks[1]}")
    path.write_text(f"{before}{marks[0]}{text}\n{closing}{after}", "utf-8")


def main() -> None:
    results = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    by_bench = {path.stem.removesuffix("-cpu"): result for path, result in results.items()}
    listed = [path for path in results if not path.stem.startswith(("softmax_steps_", "softmax_quality_"))]
    order = list(TABLE)
    by_device: dict[str, list[tuple[str, str, str]]] = {}
    lines: dict[str, list[tuple[str, str]]] = {}
    plots = []
    for path in sorted(listed, key=lambda path: order.index(path.stem.split("-")[0])):
        result = results[path]
        bench = result["bench"]
        lines[bench] = TABLE[bench](result["rows"])
        rows = by_device.setdefault(machine(result["environment"]), [])
        rows.extend((what, figure, path.name) for what, figure in lines[bench])
        if bench in PLOTS:
            PLOTS[bench](result["rows"], IMAGES / f"{path.stem}.png")
            plots.append(f"![{bench}](images/{path.stem}.png)")
    tables = [
        f"Measured on {device}:\n\n| what | measured | file |\n|---|---|---|\n"
        + "\n".join(f"| {what.replace('|', BAR)} | {figure} | `{name}` |" for what, figure, name in rows)
        for device, rows in by_device.items()
    ]
    tradeoff = IMAGES / "softmax_tradeoff-cpu.png"
    plot_tradeoff(by_bench, tradeoff)
    outputs = output_layers(by_bench) + f"\n\n![perplexity against time](../images/{tradeoff.name})"
    replace_section(ROOT / "docs" / "results.md", "results", "\n\n".join(tables + plots))
    replace_section(ROOT / "docs" / "guide" / "output_layers.md", "outputs", outputs)
    replace_section(ROOT / "README.md", "headline", headline(lines))


if __name__ == "__main__":
    main()
