"""Comparison of several runs: a table, best run first, and a plot of quality against time and memory."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpnlp import plots
from hpnlp.nn.output import is_normalized
from hpnlp.report.files import decimals, read_report, replace_text
from hpnlp.types import InputError

BITS_PER_BYTE = "held-out bits/byte"
MAX_LABEL = 60  # characters of a run in the plot's legend
Report = Mapping[str, Any]


def compare(workdirs: Sequence[str | Path], out: str | Path) -> str:
    """Writes a table of runs, best first, and a plot of quality against time and memory.

    Quality is held-out bits per byte. If a tokenizer loses text, so that its run has none, quality is perplexity (e to the
    power of the held-out loss) of the runs that were scored on the same tokens. Runs without a score come last, and lines
    below the table give the reason.

    Args:
      workdirs: Directories of finished runs; a run that is named twice is listed once.
      out: File of the plot. The table is written beside it, with the extension .md.

    Returns:
      The table, as Markdown.

    Raises:
      InputError: A run has no valid report, or `out` cannot be written.
    """
    distinct = {os.path.realpath(workdir): str(workdir) for workdir in reversed(workdirs)}
    names = list(reversed(distinct.values()))
    reports = {name: read_report(name) for name in names}
    label, scores, unscored = _scores(reports)
    order = sorted(reports, key=lambda name: scores.get(name, math.inf))
    lines = _table({name: reports[name] for name in order}, label, scores)
    notes = [f"- {name}: {unscored[name]}." for name in order if name in unscored]
    if len(names) < len(workdirs):
        notes.append("- A run that was named more than once is listed once.")
    if notes:
        lines += ["", *notes]
    if texts := _different_texts({name: reports[name] for name in order if name in scores}):
        lines += ["", f"The runs were scored on different held-out text: quality cannot be compared ({texts})."]
    table = "\n".join(lines) + "\n"
    scored = {name: (reports[name], scores[name]) for name in order if name in scores}
    _write(Path(out), table, label, scored)
    return table


def _table(reports: Mapping[str, Report], label: str, scores: Mapping[str, float]) -> list[str]:
    """Lines of the Markdown table of `reports`, in their order; configs are compared with that of the first."""
    has_skipped = any(report.get("skipped_steps") for report in reports.values())
    header = ["run", label, "tokens/s", "peak MiB", "training s", "parameters"]
    header += [*(["skipped steps"] if has_skipped else []), "differs in"]
    first_config = next(iter(reports.values()))["config"]
    rows = [
        [
            name,
            decimals(scores.get(name), ".5g" if label == plots.PERPLEXITY else ".4f"),
            f"{report['tokens_per_second']:,.0f}",
            f"{report['peak_memory_bytes'] / 2**20:,.0f}",
            f"{plots.training_seconds(report):.1f}",
            f"{report['parameters']:,}",
            *([decimals(report.get("skipped_steps"), ".0f")] if has_skipped else []),
            _differences(report["config"], first_config),
        ]
        for name, report in reports.items()
    ]
    return [
        "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
        for cells in [header, ["---"] * len(header), *rows]
    ]


def _scores(reports: Mapping[str, Report]) -> tuple[str, dict[str, float], dict[str, str]]:
    """`(name of the measure of quality, run -> quality, run without a score -> reason)`."""
    unscored = {name: reason for name, report in reports.items() if (reason := _reason_unscored(report))}
    scored = {name: report for name, report in reports.items() if name not in unscored}
    if all(report["heldout_bits_per_byte"] is not None for report in scored.values()):
        return BITS_PER_BYTE, {name: report["heldout_bits_per_byte"] for name, report in scored.items()}, unscored
    # Perplexities compare on the same tokens only: those that most runs were scored on.
    digests = {name: report.get("heldout_digest") for name, report in scored.items()}
    most_common = max(filter(None, digests.values()), key=list(digests.values()).count, default="")
    unknown = "its report does not say on which tokens it was scored: run its training command again"
    elsewhere = "scored on other tokens than the runs above, so that perplexities do not compare"
    unscored |= {name: elsewhere if digest else unknown for name, digest in digests.items() if digest != most_common}
    scores = {
        name: math.exp(min(scored[name]["heldout_loss"], 100.0))
        for name, digest in digests.items()
        if digest == most_common
    }
    return plots.PERPLEXITY, scores, unscored


def _reason_unscored(report: Report) -> str:
    """Reason why a run's loss cannot be compared with that of any other run; "" if it can."""
    if report["heldout_loss"] is None:
        return "its held-out loss is not finite"
    output = report["config"]["model.output"]
    try:
        if is_normalized(output):
            return ""
    except InputError as error:
        return str(error)
    return f"{output} gives no probabilities of tokens, and its loss is of a kind of its own"


def _different_texts(reports: Mapping[str, Report]) -> str:
    """The held-out text of each run, or "" if it is the same for all. Reports of early versions have only its size."""
    digests = {report.get("heldout_text_digest") for report in reports.values()} - {None}
    sizes = {report["heldout_bytes"] for report in reports.values()}
    if len(digests) < 2 and len(sizes) < 2:
        return ""
    return "; ".join(
        f"{name}: {report['heldout_bytes']:,} bytes, digest {str(report.get('heldout_text_digest', 'unknown'))[:8]}"
        for name, report in reports.items()
    )


def _differences(config: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Fields in which `config` differs from `first`, as text."""
    changed = [f"{name}={config[name]}" for name in config if config.get(name) != first.get(name)]
    return ", ".join(changed) or "-"


def _write(path: Path, table: str, label: str, scored: Mapping[str, tuple[Report, float]]) -> None:
    """Writes the plot, and the table beside it."""
    table_path = path.with_suffix(".md")
    labels, title = _labels({name: report for name, (report, _) in scored.items()})
    try:
        if table_path.exists() and not table_path.read_bytes().startswith(b"| run |"):
            raise InputError(f"{table_path} is there and is no table of runs: name another plot than {path}")
        plots.plot_tradeoff({labels[name]: scored[name] for name in scored}, label, path, title)
        replace_text(table_path, table)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot draw {path} ({error}): name a file that can be written, as compare.png") from error


def _labels(reports: Mapping[str, Report]) -> tuple[dict[str, str], str]:
    """Distinct labels of runs in the legend, and the legend's title.

    A run's label is the name of its directory. In the directory names of a sweep's members, characters of specs are replaced,
    so that a member's label is the sweep's name and the fields in which the members differ. If all runs are members of one
    sweep, its name is the title, and is left out of the labels.
    """
    paths = {name: Path(os.path.abspath(name)) for name in reports}
    labels = {name: path.name for name, path in paths.items()}
    sweeps: dict[Path, list[str]] = {}
    for name, path in paths.items():
        if re.match(r"\d\d+-.*=", path.name):
            sweeps.setdefault(path.parent, []).append(name)
    is_one_sweep = len(sweeps) == 1 and len(next(iter(sweeps.values()))) == len(reports)
    for sweep, members in sweeps.items():
        for name, label in _member_labels({name: reports[name]["config"] for name in members}).items():
            labels[name] = label if is_one_sweep else f"{sweep.name}: {label}"
    shared = [label for label in labels.values() if list(labels.values()).count(label) > 1]
    distinct = {name: f"{label} ({name})" if label in shared else label for name, label in labels.items()}
    return distinct, next(iter(sweeps)).name if is_one_sweep else ""


def _member_labels(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Labels of a sweep's members: the fields in which their configs differ; {} if they do not differ."""
    first = next(iter(configs.values()))
    varied = [field for field in first if len({str(config.get(field)) for config in configs.values()}) > 1]
    if not varied:
        return {}
    labels = {}
    for name, config in configs.items():
        label = ", ".join(f"{field.rpartition('.')[2]}={config.get(field)}" for field in varied)
        labels[name] = label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}\u2026"
    return labels
