"""Generates tables and plots of the documentation and the README from experiments/results/*.json.

python experiments/bench/results.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import claims
import claims_attention
import claims_compression
import claims_language
import claims_quantization
import claims_recurrent
import claims_training
import compression_tables
import embedding_tables
import scaling_tables
import speed_tables
from gpu_tables import gpu_section
from result_plots import CAPTIONS, CORPORA, PLOTS, plot_tradeoff
from result_tables import BAR, TABLE, Lines

from hpnlp.errors import plural
from hpnlp.lra.table import render_efficiency
from hpnlp.nn.mixers import MIXERS
from hpnlp.report.comparison_plots import plot_bubbles, plot_efficiency
from hpnlp.spec import build, parse_one

# Files whose results are in docs/guide/output_layers.md, efficient_attention.md, lra.md, compression.md, speed_tricks.md and
# scaling_laws.md.
# GPUs have a section of their own.
IN_OTHER_PAGES = (
    "softmax_steps_",
    "softmax_quality_",
    "mixers-",
    "arena",
    "compression-",
    "speed_tricks-",
    "scaling_",
    "gpu-",
)
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
IMAGES = ROOT / "docs" / "images"

# Sections of docs/results.md: heading -> names of result files without the device.
SECTIONS = {
    "Training": (
        "demo",
        "train_step",
        "encoder",
        "convnets",
        "loop",
        "resume",
        "resume-memory",
        "resume-experts",
        "launch",
        "large_batch",
        "precision",
        "adamw",
    ),
    "Tasks": ("task_runs", "pretrained_body", "pretrained_subwords"),
    "Attention": ("attention",),
    "Linear, bucketed and recurrent attention": (
        "linear_attention",
        "random_features",
        "bucketed",
        "memory_evaluation",
    ),
    "Recurrent layers": ("recurrent", "recurrent_tricks", "recurrent_sizes", "awd_lstm"),
    "Blocks": ("evolved_lite",),
    "Decoding": ("decode", "beam"),
    "Output layers and losses": ("softmax", "softmax_layers", "estimates"),
    "Mixture of experts": ("experts", "experts_quality"),
    "Search": ("search", "search_keys", "search_lsh", "search_pq", "search_pq_one_core", "search_scann"),
    "Text from the training text": ("demo_perl", "demo_documentation", "knn_lm", "realm", "realm_stdlib"),
    "Trees, lengths and projections": ("trees", "encoders", "projections"),
    "Embeddings and memory": (
        "word_embeddings",
        "word_codes",
        "rare_events",
        "labelled_bags",
        "bag_memory",
        "bag_positives",
    ),
    "Predictions": ("serving", "sentence_vectors", "nearest_pair", "pair_encoders", "docstring_search"),
    "Compression": ("containers", "quantized_products", "sparse_products", "second_order", "recipes", "recipe_times"),
    "Advice": ("advise", "advise_bert"),
    "Parallelism": ("parity", "tasks", "auxiliary", "bubble", "ring", "operations"),
    "Rematerialisation and reversible layers": ("remat", "reversible", "grad_cache"),
    "Planner": ("plan", "plan_tpu"),
    "Tests": ("suite", "faults"),
    "Changes": ("commits", "commits_tests"),
}

# Sections of docs/claims.md.
CLAIMS = {
    "Quantization": claims_quantization.CLAIMS,
    "Pruning, distillation and convolutions": claims_compression.CLAIMS,
    "Attention": claims_attention.ATTENTION,
    "Recurrent layers": claims_recurrent.RECURRENT,
    "Losses over a vocabulary": claims_language.LOSSES,
    "Embeddings and language models": claims_language.EMBEDDINGS,
    "Retrieval": claims_language.RETRIEVAL,
    "Memory and parallelism": claims_training.MEMORY,
    "Mixture of experts": claims_training.EXPERTS,
    "Scaling laws": claims_training.SCALING,
    "Speed tricks": claims_training.TRICKS,
}

# The figures of the README: (label, benchmark, beginning of the figure's label in the table of that benchmark).
HEADLINE = [
    ("byte-level language model after `make demo`: held-out bits per byte", "demo", "held-out bits per byte"),
    (
        "training step, 4 layers, D 192, T 256, B 16: time relative to torch eager",
        "train_step",
        "training step, 4 layers, D 192",
    ),
    (
        "dense attention, T 4096, forward and backward: time relative to torch SDPA",
        "attention",
        "attention, dense, T 4096: time relative to torch",
    ),
    (
        "strided attention, T 16,384: time relative to dense attention",
        "attention",
        "attention, causal strided, window 64, stride 64, T 16384",
    ),
    (
        "exact loss, V 262,144: temporary memory relative to naive JAX, which stores the logits",
        "softmax",
        "exact, V 262,144: temporary memory",
    ),
    (
        "`sampled(1024)` by rows, V 262,144: time of a step relative to the full softmax",
        "softmax_layers",
        "step of sampled(1024) by rows, V 262,144",
    ),
    ("decoding with a KV cache, 1 prompt: tokens/s relative to torch eager", "decode", "decoding, 1 prompt"),
    (
        "16 layouts of 8 devices and one device: largest relative difference of losses over 100 steps; of first gradients",
        "parity",
        "16 layouts of 8 devices (data",
    ),
]


def output_layers(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown tables of the output layers: time and memory of a training step, and perplexity, on each corpus.

    Args:
      results: The result files by the name of their benchmark.

    Returns:
      The tables.
    """
    steps: dict[str, dict[str, str]] = {}  # heading -> layer -> figure
    quality: dict[str, dict[str, str]] = {}
    environment: Mapping[str, Any] = {}
    for corpus, words in CORPORA.items():
        if measured := results.get(f"softmax_steps_{corpus}"):
            environment = measured["environment"]
            column = steps.setdefault(f"{words} words", {})
            for row in measured["rows"]:
                memory = sum(row["megabytes"].values())
                column[row["output"]] = f"{row['ratios']['time over full']:.2g} ({memory:,.0f} MB)"
    for corpus, words in CORPORA.items():
        for bench, budget in ((corpus, "steps"), (f"{corpus}_time", "time")):
            if measured := results.get(f"softmax_quality_{bench}"):
                column = quality.setdefault(f"{words} words, equal {budget}", {})
                column.update({row["output"]: f"{row['ratios']['over full']:.3f}" for row in measured["rows"]})
    return "\n\n".join(
        [
            f"Measured on {machine(environment)}. Time of a training step relative to `full`, and its memory:",
            table_of(steps),
            "Held-out perplexity relative to `full`, after equal numbers of steps and after equal training time:",
            table_of(quality),
        ]
    )


def mixers(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown table of the mixers: what they can do, and their time and memory relative to exact attention.

    Args:
      results: The result files by the name of their benchmark.

    Returns:
      The table.
    """
    measured = results["mixers"]
    modules = {name: build(parse_one(name, "mixer"), MIXERS, "mixer", name=None) for name in MIXERS}
    columns = {
        heading: {name: "yes" if getattr(module.traits, trait) else "no" for name, module in modules.items()}
        for heading, trait in {"causal": "causal", "both directions": "bidirectional", "decodes": "decodes"}.items()
    }
    for row in measured["rows"]:
        pairs = {"full": "all pairs", "causal": "causal"}[row["mask"]]
        name, length = parse_one(row["mixer"], "mixer").name, f"T {row['length']:,}"
        columns.setdefault(f"time, {pairs}, {length}", {})[name] = f"{row['time_over_exact']:.2f}"
        columns.setdefault(f"memory, {pairs}, {length}", {})[name] = f"1 / {1 / row['temp_over_jax_nn']:.0f}"
    text = f"Measured on {machine(measured['environment'])}: B 1, N 8, H 64, float32."
    return f"{text}\n\n{table_of(columns, 'mixer')}"


def arena(result: Mapping[str, Any]) -> str:
    """Markdown table and chart of the runs of `hpnlp lra`.

    Args:
      result: The result file.

    Returns:
      The text.
    """
    rows = sorted(result["rows"], key=lambda row: -row["accuracy"])
    full = next(row for row in rows if row["mixer"] == "full")
    columns: dict[str, dict[str, str]] = {
        name: {} for name in ("accuracy", "points over `full`", "steps", "steps/s", "MiB")
    }
    for row in rows:
        figures = (
            f"{100 * row['accuracy']:.1f} %",
            f"{100 * (row['accuracy'] - full['accuracy']):+.1f}",
            f"{row['steps']:,}",
            f"{row['steps_per_second']:.1f}",
            f"{row['peak_memory_bytes'] / 2**20:,.0f}",
        )
        for column, figure in zip(columns.values(), figures, strict=True):
            column[row["mixer"]] = figure
    scores = {row["mixer"]: (row["accuracy"], row["steps_per_second"], row["peak_memory_bytes"]) for row in rows}
    plot_bubbles({f"ListOps, up to {full['length']} tokens": scores}, IMAGES / "arena-cpu.png")
    count = full["heldout_examples"]
    error = 100 * math.sqrt(full["accuracy"] * (1 - full["accuracy"]) / count)
    text = (
        f"Measured on {machine(result['environment'])}: task `{full['task']}`, as many steps as each mixer does in the time of "
        f"{full['steps']:,} steps of `full`, batches of {full['batch_size']}, {count:,} held-out examples (standard error "
        f"{error:.1f} points; the most frequent result has {100 * full['majority_accuracy']:.1f} %)."
    )
    return f"{text}\n\n{table_of(columns, 'mixer')}\n\n![Accuracy, speed and memory of mixers](../images/arena-cpu.png)"


def arena_efficiency(result: Mapping[str, Any]) -> str:
    """Markdown tables and plots of training steps by length, of encoders and of language models.

    Args:
      result: The result file.

    Returns:
      The text.
    """
    parts = [f"Measured on {machine(result['environment'])}, batches of {result['rows'][0]['batch_size']}."]
    for task in dict.fromkeys(row["task"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["task"] == task]
        kind, name = ("Language models", "causal") if task == "language_model" else ("Encoders", "encoders")
        picture = IMAGES / f"arena_efficiency_{name}-cpu.png"
        plot_efficiency(rows, picture)
        alt = f"Speed and memory of training steps of {kind.lower()} by length"
        parts += [f"{kind}:", render_efficiency(rows).rstrip(), f"![{alt}](../images/{picture.name})"]
    return "\n\n".join(parts)


def compression(result: Mapping[str, Any]) -> str:
    """Markdown tables and chart of the techniques of compression on a small BERT.

    Args:
      result: The result file.

    Returns:
      The text.
    """
    compression_tables.plot(result["rows"], IMAGES / "compression-cpu.png")
    text = (
        f"Measured on {machine(result['environment'])}: time is relative to the original in the same process, and scores of "
        "several seeds are means."
    )
    picture = "![Score, bytes and time of techniques of compression](../images/compression-cpu.png)"
    points = round(100 * compression_tables.FAR_BELOW)
    note = f"The plot leaves out scores of {points} points and more below the teacher's. Near points share a label."
    return f"{text}\n\n{compression_tables.render(result['rows'])}\n\n{picture}\n\n{note}"


def speed_tricks(result: Mapping[str, Any]) -> str:
    """Markdown tables and plot of the speed tricks.

    Args:
      result: The result file.

    Returns:
      The text.
    """
    speed_tables.plot_speed_tricks(result["rows"], IMAGES / "speed_tricks-cpu.png")
    picture = "![Time of each form of the ladder, and speed of products by size](../images/speed_tricks-cpu.png)"
    return f"Measured on {machine(result['environment'])}.\n\n{picture}\n\n{speed_tables.speed_tricks(result['rows'])}"


def table_of(columns: Mapping[str, Mapping[str, str]], entry: str = "output layer") -> str:
    """A Markdown table with a row for each entry of a table. columns: heading -> name of the entry -> figure."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    lines = [[entry, *columns], ["---"] * (len(columns) + 1)]
    lines += [[f"`{name}`", *(column.get(name, "") for column in columns.values())] for name in names]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(environment: Mapping[str, Any]) -> str:
    cpu = f"{environment['cores']} {plural(environment['cores'], 'core')} of {environment['cpu']}"
    return (cpu if environment["backend"] == "cpu" else environment["device"]) + f", jax {environment['jax']}"


def claims_page(results: claims.Results) -> str:
    """The tables of docs/claims.md. results: result files by benchmark."""
    machines = {name: machine(result["environment"]) for name, result in results.items()}
    return claims.render(results, machines, CLAIMS)


def headline(lines: Mapping[str, Lines]) -> str:
    """The table of HEADLINE. lines: the lines of each benchmark's table."""
    rows = []
    for label, bench, beginning in HEADLINE:
        figure = next(figure for text, figure in lines[bench] if text.startswith(beginning))
        rows.append(f"| {label} | {figure} |")
    return "\n".join(["| measured on two CPU cores | |", "|---|---|", *rows])


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def home(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The picture of the ladder and a measured compression, with a sentence each. results: result files by benchmark."""
    ladder = [row for row in results["speed_tricks"]["rows"] if row["table"] == "ladder" and not row["is_peer"]]
    first, last = (f"{speed_tables.time_text(row['seconds'])} ({row['form']})" for row in (ladder[0], ladder[-1]))
    factor = speed_tables.factor_text(ladder[-1]["over_first"])
    techniques = [row for row in results["compression"]["rows"] if row["task"] == "classification"]
    original, small = (next(row for row in techniques if row["technique"] == name) for name in ("teacher", "stack"))
    bytes_left = small["disk_bytes"] / small["original_disk_bytes"]
    time_left = small["seconds"]["8"] / small["original_seconds"]["8"]
    return "\n\n".join(
        [
            "![Time of each form of the ladder, and speed of products by size](images/speed_tricks-cpu.png)",
            f"**Faster.** One training step of the same small model, one change at a time, goes from {first} to {last}: "
            f"{factor} times as fast, with the same result ([Speed tricks](guide/speed_tricks.md)).",
            f"**Smaller.** The recipe `{small['recipe']}`, with 300 further steps, leaves {percent(bytes_left)} of the bytes "
            f"of a text classifier and {percent(time_left)} of its time: its accuracy is {percent(small['score'], 1)} in place "
            f"of {percent(original['score'], 1)} ([Compression](guide/compression.md#all-techniques-on-one-model)).",
        ]
    )


def replace_section(path: Path, name: str, text: str) -> None:
    """Replaces the text between `<!-- name -->` and `<!-- /name -->`. Raises ValueError if a marker is missing."""
    content, markers = path.read_text("utf-8"), (f"<!-- {name} -->\n", f"<!-- /{name} -->")
    before, _, remainder = content.partition(markers[0])
    _, closing, after = remainder.partition(markers[1])
    if not closing:
        raise ValueError(f"{path} has no section {markers[0].strip()} ... {markers[1]}")
    path.write_text(f"{before}{markers[0]}{text}\n{closing}{after}", "utf-8")


def section(heading: str, results: Mapping[Path, Mapping[str, Any]], lines: Mapping[str, Lines]) -> str:
    """A section of the page of results: machines, plots and table of some benchmarks.

    Args:
      heading: of the section.
      results: its result files.
      lines: the lines of each benchmark's table.

    Returns:
      Markdown.
    """
    files_by_machine: dict[str, list[str]] = {}
    for path, result in results.items():
        files_by_machine.setdefault(machine(result["environment"]), []).append(f"`{path.name}`")
    machines = [
        name + (f" ({', '.join(files)})" if len(files_by_machine) > 1 else "")
        for name, files in files_by_machine.items()
    ]
    parts = [f"## {heading}", f"Measured on {'; on '.join(machines)}."]
    for path, result in results.items():
        if (bench := result["bench"]) in PLOTS:
            PLOTS[bench](result["rows"], IMAGES / f"{path.stem}.png")
            parts.append(f"![{CAPTIONS[bench]}](images/{path.stem}.png)")
    rows = [
        f"| {label.replace('|', BAR)} | {figure} | `{path.name}` |"
        for path, result in results.items()
        for label, figure in lines[result["bench"]]
    ]
    parts.append("\n".join(["| measurement | result | file |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def main() -> None:
    results = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    by_bench = {path.stem.removesuffix("-cpu"): result for path, result in results.items()}
    listed = {path: result for path, result in results.items() if not path.stem.startswith(IN_OTHER_PAGES)}
    lines = {result["bench"]: TABLE[result["bench"]](result["rows"]) for result in listed.values()}
    order = [bench for benches in SECTIONS.values() for bench in benches]
    listed = dict(sorted(listed.items(), key=lambda item: order.index(item[0].stem.split("-")[0])))
    sections = []
    for heading, benches in SECTIONS.items():
        if members := {path: result for path, result in listed.items() if path.stem.split("-")[0] in benches}:
            sections.append(section(heading, members, lines))
    gpus = {r["environment"]["device"]: r["rows"] for path, r in results.items() if path.stem.startswith("gpu-")}
    sections.append(gpu_section(gpus))
    tradeoff = IMAGES / "softmax_tradeoff-cpu.png"
    plot_tradeoff(by_bench, tradeoff)
    outputs = output_layers(by_bench) + f"\n\n![Perplexity against time of a step](../images/{tradeoff.name})"
    replace_section(ROOT / "docs" / "results.md", "results", "\n\n".join(sections))
    replace_section(ROOT / "docs" / "guide" / "output_layers.md", "outputs", outputs)
    replace_section(ROOT / "docs" / "guide" / "efficient_attention.md", "mixers", mixers(by_bench))
    for name, render in {"arena": arena, "arena_efficiency": arena_efficiency}.items():
        if name in by_bench:
            replace_section(ROOT / "docs" / "guide" / "lra.md", name, render(by_bench[name]))
    if "speed_tricks" in by_bench:
        replace_section(ROOT / "docs" / "guide" / "speed_tricks.md", "tricks", speed_tricks(by_bench["speed_tricks"]))
    for name, render in {"laws": scaling_tables.checks, "study": scaling_tables.study}.items():
        if measured := by_bench.get(f"scaling_{name}"):
            text = f"Measured on {machine(measured['environment'])}.\n\n{render(measured['rows'])}"
            replace_section(ROOT / "docs" / "guide" / "scaling_laws.md", "fits" if name == "laws" else name, text)
    if "compression" in by_bench:
        page = ROOT / "docs" / "guide" / "compression.md"
        replace_section(page, "techniques", compression(by_bench["compression"]))
    if "rare_events" in by_bench:
        page = ROOT / "docs" / "guide" / "embedding_bags.md"
        replace_section(page, "questions", embedding_tables.memory_questions(by_bench["rare_events"]["rows"]))
    if {"speed_tricks", "compression"} <= by_bench.keys():
        replace_section(ROOT / "docs" / "index.md", "home", home(by_bench))
    replace_section(ROOT / "docs" / "claims.md", "claims", claims_page(by_bench))
    replace_section(ROOT / "README.md", "headline", headline(lines))


if __name__ == "__main__":
    main()
