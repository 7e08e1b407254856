"""Comparison of several runs: a table, best run first, and a plot of quality against time, memory and size."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpnlp.report import comparison_plots, folds
from hpnlp.report.differences import described_difference, with_error
from hpnlp.report.entries import ComparedRun, read_entry
from hpnlp.report.files import replace_text, report_task
from hpnlp.tasks import Task
from hpnlp.tasks.reports.reporting import Ranking, Report, decimals
from hpnlp.training.files.example_scores import error_of_difference
from hpnlp.types import InputError

ERRORS = (
    "± is a standard error over the held-out examples; a difference to the first run is taken example by example where both "
    "were scored on the same ones, and is called none up to two standard errors."
)
# Axis of a panel of the plot -> cost of a model; None where the model does not have the figure.
COSTS: Mapping[str, Callable[[ComparedRun], float | None]] = {
    "training seconds": lambda entry: entry.training_seconds,
    "peak memory, MiB": lambda entry: entry.peak_mib,
    "stored MB": lambda entry: entry.stored_mb,
}
MAX_LABEL = 60  # characters of a run in the plot's legend
# Names of the directories of members that set no field, and of all members (hpnlp.cli.members.name_members); earlier versions
# began them with numbers.
_BASE = re.compile(r"base|\d\d+-")
_MEMBER = re.compile(rf"(\d\d+-)?\w+=.*|{_BASE.pattern}")


def compare(
    workdirs: Sequence[str | Path],
    out: str | Path,
    show: Callable[[str], object] = lambda table: None,
    each_fold: bool = False,
) -> str:
    """Writes a table of runs, best first, and a plot of quality against time, memory and size.

    Quality is a score of the runs' task: see `rank` of its report, such as `tasks.reports.lm_report.LanguageModelReport`. Runs
    without a score come last, and lines below the table give the reason. Runs that differ only in `data.fold` are one row; see
    `report.folds`.

    Args:
      workdirs: Directories of finished runs; a run that is named twice is listed once.
      out: File of the plot. The table is written beside it, with the extension .md.
      show: Called with the table before anything is written, so that a directory without write access costs no result.
      each_fold: Whether the table has a row for each run of a fold as well, below the row of all folds.

    Returns:
      The table, as Markdown.

    Raises:
      InputError: A run has no valid report, the runs are of several tasks or numbers of folds, or `out` cannot be written.
    """
    distinct = {os.path.realpath(workdir): str(workdir) for workdir in reversed(workdirs)}
    names = list(reversed(distinct.values()))
    entries = {name: read_entry(name) for name in names}
    ranking = _ranked(entries)
    if folds.fold_count(entry.report["config"] for entry in entries.values()):
        rows = folds.joined(entries, ranking)
        lines, notes, explanation = _fold_table(rows, entries, ranking, each_fold), [*rows.notes], folds.NOTE
        entries, ranking = rows.entries, rows.ranking
    else:
        scores, sign = ranking.scores, -1 if ranking.higher_is_better else 1
        order = sorted(entries, key=lambda name: sign * scores[name] if name in scores else math.inf)
        entries = {name: entries[name] for name in order}
        lines = _table(entries, ranking)
        notes = [f"- {name}: {ranking.unscored[name]}." for name in order if name in ranking.unscored]
        explanation = ERRORS if any(_error(entries, ranking, name) is not None for name in order) else ""
    if len(names) < len(workdirs):
        notes.append("- A run that was named more than once is listed once.")
    if explanation:
        notes.append(explanation)
    if notes:
        lines += ["", *notes]
    if ranking.remark:
        lines += ["", ranking.remark]
    table = "\n".join(lines) + "\n"
    show(table)
    _write(Path(out), table, ranking, {name: entry for name, entry in entries.items() if name in ranking.scores})
    return table


def by_task(workdirs: Sequence[str | Path]) -> dict[str, list[str | Path]]:
    """Groups runs by their task, or by `Task.compares_as`, and their number of folds, since scores of others do not compare.

    Args:
      workdirs: Directories of finished runs.

    Returns:
      Name of a task, with "-5-folds" after it for runs with folds -> its runs, in their order.

    Raises:
      InputError: A run has no valid report.
    """
    groups: dict[str, list[str | Path]] = {}
    for workdir in workdirs:
        report = read_entry(workdir).report
        count = folds.fold_count([report["config"]])
        groups.setdefault(_compared_as(report) + (f"-{count}-folds" if count else ""), []).append(workdir)
    if exports := groups.pop("", []):  # exports do not name their task
        groups.setdefault(next(iter(groups), ""), []).extend(exports)
    return groups


def _ranked(entries: Mapping[str, ComparedRun]) -> Ranking:
    """Scores of the entries that have some, and the reasons of all others."""
    task = _task({name: entry.report for name, entry in entries.items()})
    unscored = {name: entry.unscored for name, entry in entries.items() if entry.unscored}
    reports = {name: entry.report for name, entry in entries.items() if name not in unscored}
    if task is None:
        return Ranking("score", {}, unscored)
    ranking = folds.rank(task.report, reports)
    return dataclasses.replace(ranking, unscored={**ranking.unscored, **unscored})


def _table(entries: Mapping[str, ComparedRun], ranking: Ranking) -> list[str]:
    """Lines of the Markdown table of `entries`, in their order; configs are compared with that of the first."""
    first = next(iter(entries))
    quality = {name: [_score(entries, ranking, name), _difference(entries, ranking, name, first)] for name in entries}
    return _lines(entries, [ranking.label, "difference"], quality)


def _fold_table(rows: folds.FoldRows, runs: Mapping[str, ComparedRun], ranking: Ranking, each_fold: bool) -> list[str]:
    """Lines of the Markdown table of rows of several folds, also with the runs of each row.

    The difference of a run is that to the run of the same fold in the first row.
    """
    entries: dict[str, ComparedRun] = {}
    quality: dict[str, list[str]] = {}
    first = next(iter(rows.scores.values()), None)
    for name, entry in rows.entries.items():
        entries[name] = entry
        if first is None or name not in rows.scores:  # an export
            quality[name] = ["-"] * 5
            continue
        row = rows.scores[name]
        score = decimals(rows.ranking.scores.get(name), ranking.digits)
        quality[name] = [score, *row.cells(ranking.digits), row.difference(first, ranking.digits)]
        for fold, run in row.runs.items() if each_fold and len(row.runs) > 1 else ():
            entries[run] = runs[run]
            difference = _difference(runs, ranking, run, first.runs.get(fold, run))
            quality[run] = [_score(runs, ranking, run), "-", "-", f"fold {fold}", difference]
    return _lines(entries, [ranking.label, *folds.HEADER, "difference"], quality)


def _lines(
    entries: Mapping[str, ComparedRun], columns: Sequence[str], quality: Mapping[str, Sequence[str]]
) -> list[str]:
    """Lines of the Markdown table of `entries`, with cells of their quality; configs are compared with that of the first."""
    has_skipped = any(entry.report.get("skipped_steps") for entry in entries.values())
    has_speed = any(entry.sequences_per_second for entry in entries.values())
    header = ["run", *columns, "stored MB", "tokens/s", *(["sequences/s"] if has_speed else [])]
    header += ["peak MiB", "training s", "parameters", *(["skipped steps"] if has_skipped else []), "differs in"]
    first_config = next(iter(entries.values())).report["config"]
    rows = [
        [
            name,
            *quality[name],
            decimals(entry.stored_mb, ".3g"),
            decimals(entry.report.get("tokens_per_second"), ",.0f"),
            *([decimals(entry.sequences_per_second, ",.4g")] if has_speed else []),
            decimals(entry.peak_mib, ",.0f"),
            decimals(entry.training_seconds, ".1f"),
            decimals(entry.report.get("parameters"), ","),
            *([decimals(entry.report.get("skipped_steps"), ".0f")] if has_skipped else []),
            _differences(entry.report["config"], first_config),
        ]
        for name, entry in entries.items()
    ]
    return [
        "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
        for cells in [header, ["---"] * len(header), *rows]
    ]


def _score(entries: Mapping[str, ComparedRun], ranking: Ranking, name: str) -> str:
    """Score of an entry with its standard error."""
    score = decimals(ranking.scores.get(name), ranking.digits)
    return with_error(score, _error(entries, ranking, name), ranking.digits)


def _error(entries: Mapping[str, ComparedRun], ranking: Ranking, name: str) -> float | None:
    """Standard error of the score of an entry; None if it has no score or its examples are unknown."""
    examples = entries[name].examples
    if name not in ranking.scores or examples is None:
        return None
    error = examples.standard_error(ranking.metric)
    return None if error is None else abs(ranking.slopes.get(name, 1.0)) * error


def _difference(entries: Mapping[str, ComparedRun], ranking: Ranking, name: str, first: str) -> str:
    """Difference of a score to that of another entry, with its standard error."""
    scores = ranking.scores
    if name == first or name not in scores or first not in scores:
        return "-"
    slopes = ranking.slopes.get(name, 1.0), ranking.slopes.get(first, 1.0)
    error = error_of_difference(entries[name].examples, entries[first].examples, ranking.metric, slopes)
    return described_difference(scores[name] - scores[first], error, ranking.digits)


def _task(reports: Mapping[str, Report]) -> Task | None:
    """The task of all runs, None if none names one; raises InputError if there are several."""
    names = {name: task for name, report in reports.items() if (task := _compared_as(report))}
    if len(set(names.values())) > 1:
        tasks = ", ".join(f"{name}: {task}" for name, task in names.items())
        raise InputError(f"runs of different tasks have no common score ({tasks}): compare runs of one task")
    return report_task(reports[next(iter(names))]) if names else None


def _compared_as(report: Report) -> str:
    """Name of the task whose scores those of a run compare with; "" for an export, which has no config."""
    if not report["config"]:
        return ""
    task = report_task(report)
    return task.compares_as or task.name


def _differences(config: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Fields in which `config` differs from `first`, as text."""
    changed = [f"{name}={config[name]}" for name in config if first and config.get(name) != first.get(name)]
    return ", ".join(changed) or "-"


def _write(path: Path, table: str, ranking: Ranking, scored: Mapping[str, ComparedRun]) -> None:
    """Writes the plot of the entries with a score, and the table beside it."""
    table_path = path.with_suffix(".md")
    labels, title = _labels({name: entry.report for name, entry in scored.items()})
    costs = {
        axis: {labels[name]: value for name, entry in scored.items() if (value := cost(entry)) is not None}
        for axis, cost in COSTS.items()
    }
    costs = {axis: of_runs for axis, of_runs in costs.items() if of_runs} or costs
    try:
        if table_path.exists() and not table_path.read_bytes().startswith(b"| run |"):
            raise InputError(f"{table_path} is there and is no table of runs: name another plot than {path}")
        comparison_plots.plot_tradeoff(
            {labels[name]: ranking.scores[name] for name in scored}, costs, ranking, path, title
        )
        replace_text(table_path, table)
    except InputError:
        raise
    except (OSError, ValueError) as error:
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
        if _MEMBER.fullmatch(path.name):
            sweeps.setdefault(path.parent, []).append(name)
    is_one_sweep = len(sweeps) == 1 and len(next(iter(sweeps.values()))) == len(reports)
    for sweep, members in sweeps.items():
        for name, label in _member_labels({name: reports[name]["config"] for name in members}).items():
            labels[name] = label if is_one_sweep else f"{sweep.name}: {label}"
    shared = [label for label in labels.values() if list(labels.values()).count(label) > 1]
    distinct = {name: f"{label} ({name})" if label in shared else label for name, label in labels.items()}
    return distinct, next(iter(sweeps)).name if is_one_sweep else ""


def _member_labels(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Labels of a sweep's members: the fields in which their configs differ; {} if they do not differ.

    If a member sets no field, the labels of the others have only the fields in which they differ from it.
    """
    first = next(iter(configs.values()))
    varied = [field for field in first if len({str(config.get(field)) for config in configs.values()}) > 1]
    if not varied:
        return {}
    labels = {}
    base = next((config for name, config in configs.items() if _BASE.fullmatch(Path(name).name)), None)
    for name, config in configs.items():
        fields = [field for field in varied if base is None or config.get(field) != base.get(field)]
        label = ", ".join(f"{field.rpartition('.')[2]}={config.get(field)}" for field in fields) or "base"
        labels[name] = label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}\u2026"
    return labels
