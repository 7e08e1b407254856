"""What a run saw, as report.json, report.md and loss.png; and several runs beside each other."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hpnlp import measure
from hpnlp.nn.output import is_normalized
from hpnlp.training import decode, next_commands
from hpnlp.training.config import Config, flat
from hpnlp.training.loop import Result
from hpnlp.types import InputError

_LOADED = time.time()

# What runs are put beside each other by.
COMPARED = (
    "heldout_bits_per_byte",
    "heldout_loss",
    "heldout_bytes",
    "tokens_per_second",
    "peak_memory_bytes",
    "seconds",
)
COMPARED += ("phase_seconds", "parameters", "config")

PERPLEXITY = "held-out perplexity"

_COMPRESSORS = {"gzip -9": "gzip_bits_per_byte", "xz -9e": "xz_bits_per_byte"}

# Under so many bytes, compressors have seen too little to show what they can, and a score is mostly chance.
_FEW_BYTES = 10_000


def write(workdir: str | Path, config: Config, result: Result, flags: str = "--config=FILE") -> dict[str, Any]:
    """Writes the report of a finished run and prints it. Returns what report.json holds.

    flags: those of `hpnlp train` that gave the config, for the commands that the report proposes.
    Raises InputError where the disk does not take it; the run itself is saved, and a second call is quick.
    """
    workdir = Path(workdir)
    curve = read_metrics(workdir)
    params, sample = result.params, ""
    if all(leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in jax.tree.leaves(params)):
        # Those that lie on several hosts make no text here: `hpnlp generate` reads the checkpoint.
        params = params if jax.process_count() == 1 else jax.device_get(params)
        sample = decode.sample_text(result.model, params, result.corpus.tokenizer, config.train.sample)
    report = summarize(config, result) | {"skipped_steps": sum(line.get("skipped") or 0 for line in curve)}
    text = render(workdir, config, report, sample, flags)
    try:
        plot_curves({workdir.name: curve}, workdir / "loss.png", report)
        _replace(workdir / "report.md", text)
        _replace(
            workdir / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n"
        )  # the last, because it says: finished
    except OSError as error:
        raise InputError(
            f"cannot write the report to {workdir} ({error.strerror or error}): free some space there and run the same "
            "command again"
        ) from error
    print(text)
    return report


def summarize(config: Config, result: Result) -> dict[str, Any]:
    """The numbers of a run, those that are not finite None, as JSON has no word for them; so are the bits a byte of a
    tokenizer that loses text, and of an output layer that gives no probabilities."""
    raw = result.corpus.read_heldout()
    tokens = result.step * config.data.batch_size * config.data.seq_len
    busy, flops = result.seconds["data"] + result.seconds["step"], result.flops_per_step
    numbers = {
        "heldout_bits_per_byte": result.heldout.get("bits_per_byte"),
        "heldout_loss": result.heldout["loss"],
        "heldout_bytes": len(raw),
        "heldout_digest": result.corpus.heldout_digest,
        "gzip_bits_per_byte": 8 * len(gzip.compress(raw, 9)) / len(raw),
        "xz_bits_per_byte": 8 * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)) / len(raw),
        "tokens_per_second": tokens / busy if busy else 0.0,
        "flops_per_second": flops if flops is None else result.step * flops / busy if busy else 0.0,
        "flops_per_step": flops,
        "peak_memory_bytes": result.peak_memory_bytes,
        "devices": result.devices,
        "steps": result.step,
        "tokens": tokens,
        "parameters": result.parameters,
        "seconds": _process_seconds(),
        "phase_seconds": result.seconds,
        "environment": measure.environment(),
        "config": flat(config),
    }
    return _finite(numbers)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verdict(report: Mapping[str, Any]) -> str:
    """One sentence: who needs the fewest bits for the held-out text, or why that cannot be said."""
    if report["heldout_loss"] is None:
        return "The held-out loss is not finite: the model is of no use. Lower optimizer.learning_rate, and train anew."
    needs = {"the model": report["heldout_bits_per_byte"]}
    needs |= {name: report[field] for name, field in _COMPRESSORS.items()}
    if needs["the model"] is None:
        probable = is_normalized(report["config"]["model.output"])
        why = "The tokenizer does not keep every byte" if probable else "The output layer gives no probabilities"
        return f"{why}, so the loss cannot be put beside a compressor's."
    if report["heldout_bytes"] < _FEW_BYTES:
        return (
            f"{report['heldout_bytes']:,} bytes of held-out text are too few to put the model beside compressors: raise "
            "data.heldout or data.heldout_bytes, or pass data.heldout_path=PATH."
        )
    order = sorted(needs, key=lambda name: needs[name])
    (first, second, third), best = order, needs[order[0]]
    lead = 100 * (1 - best / needs[second])
    return (
        f"{first.replace('the', 'The')} won: {best:.3f} bits a byte of held-out text, {lead:.0f} % fewer than {second} "
        f"({needs[second]:.3f}); {third} needs {needs[third]:.3f}. (The model's own size is not counted.)"
    )


def render(workdir: Path, config: Config, report: Mapping[str, Any], sample: str, flags: str = "--config=FILE") -> str:
    """report.md."""
    phases = report["phase_seconds"]
    total = sum(phases.values()) or 1.0
    where = ", ".join(f"{name} {seconds:.1f} s ({100 * seconds / total:.0f} %)" for name, seconds in phases.items())
    probable, loss = is_normalized(config.model.output), report["heldout_loss"]
    perplexity = None  # said of words, where bits a byte are not
    if probable and report["heldout_bits_per_byte"] is None and loss is not None and loss < 100:
        perplexity = f"{math.exp(loss):.5g}"
    rows = [
        ("held-out bytes", f"{report['heldout_bytes']:,}"),
        ("held-out bits a byte", _decimals(report["heldout_bits_per_byte"])),
        ("gzip -9, the same bytes", f"{report['gzip_bits_per_byte']:.4f}"),
        ("xz -9e, the same bytes", f"{report['xz_bits_per_byte']:.4f}"),
        ("held-out loss, nats a token" if probable else "held-out loss", _decimals(loss)),
        *([(PERPLEXITY, perplexity)] if perplexity else []),
        ("parameters", f"{report['parameters']:,}"),
        ("devices", report["devices"]),
        ("steps, tokens", f"{report['steps']:,}, {report['tokens']:,}"),
        *([("steps skipped, not finite", f"{skipped:.0f}")] if (skipped := report.get("skipped_steps")) else []),
        ("tokens/s", f"{report['tokens_per_second']:,.0f}"),
        ("achieved GFLOP/s", _giga(report["flops_per_second"])),
        ("peak memory", f"{report['peak_memory_bytes'] / 2**20:,.0f} MiB"),
        ("wall time of the last process, s", f"{report['seconds']:.1f}"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    shown = f"\nA sample:\n\n```\n{sample.rstrip()}\n```\n" if sample else ""
    return f"""# {workdir.name}

{verdict(report)}

| | |
|---|---|
{table}

Where the time went, over all restarts: {where}.

![loss](loss.png)
{shown}
Next:

{next_commands.render(workdir, config, flags)}
"""


def _giga(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:,.1f}"


def _decimals(value: float | None, digits: str = ".4f") -> str:
    return "-" if value is None else f"{value:{digits}}"


def read_metrics(workdir: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a value that was not finite is None."""
    path = Path(workdir) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_report(workdir: str | Path) -> dict[str, Any]:
    """report.json of a run; raises InputError where there is none."""
    path = Path(workdir) / "report.json"
    try:
        report = json.loads(path.read_text(), parse_constant=lambda word: None)
        lacking = [name for name in COMPARED if name not in report]
        if lacking:
            raise ValueError(f"it lacks {', '.join(lacking)}")
        return report
    except (FileNotFoundError, NotADirectoryError):
        if not Path(workdir).is_dir():
            raise InputError(f"there is no directory {str(workdir)!r}: name the workdir of a run") from None
        raise InputError(
            f"{workdir} has no report.json: finish the run first, with the command that began it"
        ) from None
    except ValueError as error:
        raise InputError(
            f"{path} is not a report ({error}): run the training command again to write it anew"
        ) from error


def plot_curves(
    curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, report: Mapping[str, Any] | None = None
) -> None:
    """Training loss (faint, and smoothed) and held-out loss against steps, one colour a run.

    report: of the only run, whose last score is drawn as well and, where tokens are bytes, what compressors need.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for index, (name, lines) in enumerate(curves.items()):
        color = f"C{index % 10}"
        shown = [line for line in lines if line.get("loss") is not None]
        steps, losses = [line["step"] for line in shown], [line["loss"] for line in shown]
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(losses), color=color, linewidth=1.6, label=f"{name}: training")
        heldout = [(line["step"], line["heldout_loss"]) for line in lines if "heldout_loss" in line]
        if report and report["heldout_loss"] is not None:
            heldout.append((report["steps"], report["heldout_loss"]))
        if heldout:
            axes.plot(*zip(*heldout, strict=True), "o--", color=color, markersize=4, label=f"{name}: held-out")
    if report and report["config"]["data.tokenizer"] == "bytes":
        low, high = axes.get_ylim()
        for style, (name, field) in zip((":", "-."), _COMPRESSORS.items(), strict=True):
            nats = report[field] * math.log(2)
            if low < nats < high:
                axes.axhline(nats, color="0.4", linestyle=style, linewidth=0.9, label=f"{name}, the held-out text")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _smooth(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """Exponential mean with Adam's correction for the start."""
    mean, weight, smoothed = 0.0, 0.0, []
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        smoothed.append(mean / weight)
    return smoothed


def compare(workdirs: Sequence[str | Path], out: str | Path) -> str:
    """A table of runs, best first, and a plot of quality against time and memory at `out`; returns the table.

    Quality is held-out bits a byte; where a tokenizer loses text it is perplexity, e to the power of the loss, of the runs that
    were scored on the same tokens. Runs without it come last, and below the table it says why.
    """
    reports = {str(workdir): read_report(workdir) for workdir in workdirs}
    unscored = {name: why for name, report in reports.items() if (why := _why_unscored(report))}
    scored = {name: report for name, report in reports.items() if name not in unscored}
    if all(report["heldout_bits_per_byte"] is not None for report in scored.values()):
        label, digits = "held-out bits/byte", ".4f"
        scores = {name: report["heldout_bits_per_byte"] for name, report in scored.items()}
    else:
        label, digits = PERPLEXITY, ".5g"
        texts = [report.get("heldout_digest") for report in scored.values()]
        most = max(filter(None, texts), key=texts.count, default="")
        others = {name: report.get("heldout_digest") for name, report in scored.items()}
        others = {name: digest for name, digest in others.items() if digest != most}
        unknown = "its report does not say on which tokens it was scored: run its training command again"
        elsewhere = "scored on other tokens than the runs above, so that perplexities do not compare"
        unscored |= {name: elsewhere if digest else unknown for name, digest in others.items()}
        scores = {name: math.exp(min(scored[name]["heldout_loss"], 100.0)) for name in scored if name not in others}
    order = sorted(reports, key=lambda name: scores.get(name, math.inf))
    header = ["run", label, "tokens/s", "peak MiB", "training s", "parameters", "differs in"]
    rows = [
        [
            name,
            _decimals(scores.get(name), digits),
            f"{reports[name]['tokens_per_second']:,.0f}",
            f"{reports[name]['peak_memory_bytes'] / 2**20:,.0f}",
            f"{_training_seconds(reports[name]):.1f}",
            f"{reports[name]['parameters']:,}",
            _differs(reports[name]["config"], reports[order[0]]["config"]),
        ]
        for name in order
    ]
    try:
        _plot_tradeoff({name: (reports[name], scores[name]) for name in order if name in scores}, label, Path(out))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw {out} ({error}): name a file that can be written, as compare.png") from error
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows]]
    if unscored:
        lines += ["", *(f"- {name}: {unscored[name]}." for name in order if name in unscored)]
    if len({reports[name]["heldout_bytes"] for name in scores}) > 1:
        lines += ["", "The runs were scored on different held-out text: quality cannot be compared."]
    return "\n".join(lines) + "\n"


def _why_unscored(report: Mapping[str, Any]) -> str:
    """Why a run's loss cannot be put beside any other's; "" where it can."""
    if report["heldout_loss"] is None:
        return "its held-out loss is not finite"
    output = report["config"]["model.output"]
    try:
        normalized = is_normalized(output)
    except InputError as error:
        return str(error)
    if not normalized:
        return f"{output} gives no probabilities, and its loss is of a kind of its own"
    return ""


def _training_seconds(report: Mapping[str, Any]) -> float:
    return report["phase_seconds"]["data"] + report["phase_seconds"]["step"]


def _differs(config: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    changed = [f"{name}={config[name]}" for name in config if config.get(name) != first.get(name)]
    return ", ".join(changed) or "-"


def _plot_tradeoff(scored: Mapping[str, tuple[Mapping[str, Any], float]], label: str, path: Path) -> None:
    """scored: the runs, best first, with their quality."""
    plt = _pyplot()
    height = max(4.2, 0.24 * len(scored))
    figure, panels = plt.subplots(1, 2, figsize=(11, height), layout="constrained", sharey=True)
    scales = {
        "training seconds": _training_seconds,
        "peak memory, MiB": lambda r: r["peak_memory_bytes"] / 2**20,
    }
    for axes, (scale, of) in zip(panels, scales.items(), strict=True):
        for index, (name, (report, score)) in enumerate(scored.items()):
            marker = "osD^v"[index // 10 % 5]  # there are ten colours
            axes.plot(of(report), score, marker, color=f"C{index % 10}", label=Path(name).name)
        axes.set(xlabel=scale)
        if label == PERPLEXITY:  # in equal steps of nats
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,.4g}")
            axes.yaxis.set_minor_formatter("{x:,.4g}")
        axes.grid(alpha=0.3, which="both")
    panels[0].set(ylabel=label)
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _process_seconds() -> float:
    """Wall time since this process began, or since this module was loaded where the system does not tell."""
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - started
    except (OSError, ValueError, IndexError):
        return time.time() - _LOADED


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
