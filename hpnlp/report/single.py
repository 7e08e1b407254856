"""Report of one run: report.json, report.md, loss.png, gradient_norms.png and the scores of the held-out examples."""

from __future__ import annotations

import errno
import json
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from hpnlp import measure, tasks
from hpnlp.cost import parts
from hpnlp.report import next_commands, plots
from hpnlp.report.files import read_metrics, replace_text, report_task
from hpnlp.tasks.reports.reporting import Outcome
from hpnlp.training.config import Config, flat
from hpnlp.training.files.evaluation_record import finite, write_examples
from hpnlp.training.files.result import RunResult
from hpnlp.types import InputError

_LOADED = time.time()


def write(workdir: str | Path, config: Config, result: RunResult, flags: str = "--config=FILE") -> dict[str, Any]:
    """Writes and prints the report of a finished run.

    Args:
      workdir: The run directory.
      config: Config of the run.
      result: Result of the run.
      flags: Flags of `hpnlp train` that gave the config, for the commands that the report proposes.

    Returns:
      The content of report.json.

    Raises:
      InputError: The report cannot be written. The run itself is saved, and running the same command again is quick.
    """
    workdir = Path(workdir)
    curve, fault = read_metrics(workdir, result.step)
    part = tasks.find(config.task).report
    model, params = result.model, _local(result.params)
    if params is not None:
        model, params = model.plain(params)
    outcome = Outcome(config, result.dataset, model, params, result.sums)
    sections = [part.section(outcome)]
    if has_experts(outcome):
        from hpnlp.report import experts

        sections.append(experts.section(outcome, curve))
    report = summarize(config, result)
    for section in sections:
        report |= finite(dict(section.numbers))
    report |= {"skipped_steps": sum(line.get("skipped") or 0 for line in curve)}
    norms = [line["grad_norm"] for line in curve if line.get("grad_norm") is not None]
    report |= norm_numbers(norms, config.optimizer.clip_norm)
    text = render(workdir, config, report, "\n\n".join(s.text for s in sections if s.text), flags, fault)
    try:
        plots.plot_curves({workdir.name: curve}, workdir / "loss.png", report, part.levels(report), part.unit)
        if norms:
            plots.plot_norms(curve, workdir / "gradient_norms.png", config.optimizer.clip_norm)
        for name, picture in (item for section in sections for item in section.pictures.items()):
            plots.plot_heatmap(picture, workdir / name)
        for section in sections:
            if section.draw is not None:
                section.draw(workdir)
        write_examples(workdir, result.examples)
        replace_text(workdir / "report.md", text)
        # Written last, because its existence marks the run as finished.
        replace_text(workdir / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        fix = "move it away" if error.errno == errno.EISDIR else "free some space there"
        raise InputError(
            f"cannot write the report to {error.filename2 or error.filename or workdir} ({error.strerror or error}): {fix} and "
            "run the same command again"
        ) from error
    print(text)
    return report


def _local(params: PyTree) -> Any:
    """Parameters for the computations of a report; None if they are sharded over several hosts."""
    if not all(leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in jax.tree.leaves(params)):
        return None
    return params if jax.process_count() == 1 else jax.device_get(params)


def summarize(config: Config, result: RunResult) -> dict[str, Any]:
    """Numbers of a run.

    Args:
      config: Config of the run.
      result: Result of the run.

    Returns:
      Content of report.json. Numbers that are not finite are None.
    """
    busy, flops = result.seconds["data"] + result.seconds["step"], result.flops_per_step
    timed_steps = result.step * result.timed_tokens / max(1, result.tokens)
    numbers = {
        **tasks.find(config.task).report.numbers(result.dataset, result.heldout, result.baselines),
        **{f"teacher_{name}": value for name, value in (result.teacher or {}).items()},
        "scored_weight": float(result.sums["loss"][1]),
        "tokens_per_second": (1 - result.padding) * result.timed_tokens / busy if busy else 0.0,
        "flops_per_second": flops if flops is None else timed_steps * flops / busy if busy else 0.0,
        "flops_per_step": flops,
        "flops_shares": None if result.flops_by_part is None else parts.shares(result.flops_by_part),
        "peak_memory_bytes": result.peak_memory_bytes,
        "devices": result.devices,
        "steps": result.step,
        "scored_step": result.scored_step,
        "tokens": round((1 - result.padding) * result.tokens),
        "padding": result.padding,
        "parameters": result.parameters,
        "seconds": _process_seconds(),
        "phase_seconds": result.seconds,
        "environment": measure.environment(),
        "config": flat(config),
    }
    return finite(numbers)


def norm_numbers(norms: list[float], clip_norm: float) -> dict[str, float | None]:
    """Numbers of report.json on the norms of gradients.

    Args:
      norms: Global norm of the gradients of each step before clipping.
      clip_norm: Norm from which on gradients are clipped, 0 for no clipping.

    Returns:
      The median, and the share of steps whose gradients were clipped; None where there is none.
    """
    clipped = sum(norm > clip_norm for norm in norms) / len(norms) if norms and clip_norm else None
    return {"gradient_norm": statistics.median(norms) if norms else None, "clipped_share": clipped}


def verdict(report: Mapping[str, Any]) -> str:
    """The result of a run in a sentence or two: see `verdict` of the report of its task.

    Args:
      report: Content of report.json.

    Returns:
      The sentences.
    """
    return report_task(report).report.verdict(report)


def render(
    workdir: Path,
    config: Config,
    report: Mapping[str, Any],
    section: str,
    flags: str = "--config=FILE",
    fault: str = "",
) -> str:
    """Text of report.md.

    Args:
      workdir: The run directory.
      config: Config of the run.
      report: Content of report.json.
      section: The task's section, or "".
      flags: Flags of `hpnlp train` that gave the config.
      fault: A sentence on what is absent from metrics.jsonl, or "".

    Returns:
      The text, as Markdown.
    """
    phases = report["phase_seconds"]
    total = sum(phases.values()) or 1.0
    times = ", ".join(f"{name} {seconds:.1f} s ({100 * seconds / total:.0f} %)" for name, seconds in phases.items())
    rows = [*report_task(report).report.rows(report), *_teacher_rows(config, report), *_rows(report)]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    fault_text = f"\n{fault}\n" if fault else ""
    section_text = f"\n{section}\n" if section else ""
    norms_text = "\n\n![gradient norms](gradient_norms.png)" if report.get("gradient_norm") is not None else ""
    return f"""# {workdir.name}

{verdict(report)}

| | |
|---|---|
{table}

Where the time went, over all restarts: {times}.

![loss](loss.png){norms_text}
{fault_text}{section_text}
Next:

{next_commands.render(workdir, config, flags, jax.process_count())}
"""


def has_experts(outcome: Outcome) -> bool:
    """Whether a run has a section on experts: a language model or encoder with experts whose parameters this process has."""
    is_known = outcome.params is not None and outcome.model.has_taps
    return is_known and any(network.expert_count for network in outcome.model.config.networks())


def _teacher_rows(config: Config, report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows on the teacher of a run: its primary metric, and the student's in relation to it."""
    metric, _ = report_task(report).primary_metric(flat(config))
    teacher, student = (report.get(f"{who}_{metric}") for who in ("teacher", "heldout"))
    if not config.distill.teacher or teacher is None:
        return []
    rows = [(f"teacher {config.distill.teacher}, held-out {metric}", f"{teacher:.4f}")]
    if student is not None and teacher:
        rows.append((f"student / teacher, {metric}", f"{student / teacher:.4f}"))
    return [*rows, ("the same student without a teacher", "not measured by this run: see the command below")]


def _rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """`(name, value)` of each row of the table in report.md that all tasks have."""
    skipped, padding = report.get("skipped_steps"), report.get("padding", 0.0)  # absent from reports of early versions
    return [
        ("parameters", f"{report['parameters']:,}"),
        ("devices", report["devices"]),
        ("steps, tokens", f"{report['steps']:,}, {report['tokens']:,}"),
        ("scored checkpoint, which commands load", f"step {report['scored_step']:,}"),
        *([("steps skipped, not finite", f"{skipped:.0f}")] if skipped else []),
        *_norm_rows(report),
        *([("padding, share of computed tokens", f"{100 * padding:.0f} %")] if padding else []),
        ("tokens/s, without padding" if padding else "tokens/s", f"{report['tokens_per_second']:,.0f}"),
        ("achieved GFLOP/s", _giga(report["flops_per_second"])),
        *_share_rows(report),
        ("peak memory", f"{report['peak_memory_bytes'] / 2**20:,.0f} MiB"),
        ("wall time of the last process, s", f"{report['seconds']:.1f}"),
    ]


def _norm_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows on the norms of gradients, which reports of early versions lack."""
    norm, share = report.get("gradient_norm"), report.get("clipped_share")
    if norm is None:
        return []
    clip_norm = report["config"]["optimizer.clip_norm"]
    clipped = [] if share is None else [(f"steps clipped to optimizer.clip_norm={clip_norm:g}", f"{100 * share:.0f} %")]
    return [("gradient norm, median", f"{norm:.3g}"), *clipped]


def _share_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The row on the parts of a step, largest first, which reports of early versions lack."""
    if not (shares := report.get("flops_shares")):
        return []
    by_part = sorted(parts.percentages(shares).items(), key=lambda item: -item[1])
    text = ", ".join(f"{parts.label(name)} {percent:.1f} %" for name, percent in by_part if percent)
    return [("FLOPs of a step by part", text)] if text else []


def _giga(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:,.1f}"


def _process_seconds() -> float:
    """Wall time since this process started, from Linux's /proc; elsewhere, since this module was loaded."""
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - started
    except (OSError, ValueError, IndexError):
        return time.time() - _LOADED
