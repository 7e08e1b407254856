"""Comparison of several runs: a table, best run first, and a plot of quality against time, memory and size."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpnlp.report import comparison_plots, folds, seeds
from hpnlp.report.entries import ComparedRun, read_entry
from hpnlp.report.files import replace_text, report_task
from hpnlp.report.paired_scores import NO_INTERVAL, NOTE, Difference, half_interval, ranked_difference
from hpnlp.tasks import Task
from hpnlp.tasks.reports.reporting import Ranking, Report, decimals
from hpnlp.types import InputError

TO_THE_BEST = "to the best"  # column of the differences to the first row
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
    has_folds = folds.fold_count(entry.report["config"] for entry in entries.values())
    made = _fold_table(entries, ranking, each_fold) if has_folds else _table(entries, ranking)
    notes = [*made.notes]
    if len(names) < len(workdirs):
        notes.append("- A run that was named more than once is listed once.")
    if has_folds or any(half is not None for half in made.halves.values()):
        notes.append(folds.NOTE if has_folds else NOTE)
    if any(difference is not None and difference.interval is None for difference in made.differences):
        notes.append(NO_INTERVAL)
    lines = [*made.lines, *([""] if notes else []), *notes]
    if ranking.remark:
        lines += ["", ranking.remark]
    table = "\n".join(lines) + "\n"
    show(table)
    _write(Path(out), table, made)
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


@dataclasses.dataclass(frozen=True)
class _ComparisonTable:
    """A table, best row first.

    Attributes:
      lines: Lines of the Markdown table.
      notes: Lines below it.
      entries: Row -> figures.
      ranking: Scores of the rows.
      halves: Row -> half of the 95 % interval of its score; None if it is unknown.
      differences: Differences in the table.
    """

    lines: Sequence[str]
    notes: Sequence[str]
    entries: Mapping[str, ComparedRun]
    ranking: Ranking
    halves: Mapping[str, float | None]
    differences: Sequence[Difference | None]


def _table(runs: Mapping[str, ComparedRun], ranking: Ranking) -> _ComparisonTable:
    """The table with a row for each run; configs and scores are compared with those of the first row."""
    scores, sign = ranking.scores, -1 if ranking.higher_is_better else 1
    order = sorted(runs, key=lambda name: sign * scores[name] if name in scores else math.inf)
    entries = {name: runs[name] for name in order}
    examples = {name: entry.examples for name, entry in entries.items()}
    differences = {name: ranked_difference(ranking, examples, name, order[0]) for name in order}
    halves = {name: _half(entries[name], ranking, name) for name in order}
    quality = {name: [_score(ranking, name, halves[name]), _text(differences[name], ranking)] for name in order}
    notes = [f"- {name}: {ranking.unscored[name]}." for name in order if name in ranking.unscored]
    trained = {name: entry for name, entry in entries.items() if "phase_seconds" in entry.report}
    notes += seeds.lines({name: entry.report["config"] for name, entry in trained.items()}, ranking)
    lines = _lines(entries, [ranking.label, TO_THE_BEST], quality)
    return _ComparisonTable(lines, notes, entries, ranking, halves, [*differences.values()])


def _fold_table(runs: Mapping[str, ComparedRun], ranking: Ranking, each_fold: bool) -> _ComparisonTable:
    """The table with a row for all folds of a member, also with the runs of each row.

    The difference of a run is that to the run of the same fold in the first row.
    """
    rows = folds.joined(runs, ranking)
    entries: dict[str, ComparedRun] = {}
    quality: dict[str, list[str]] = {}
    halves: dict[str, float | None] = {}
    differences: list[Difference | None] = []
    examples = {name: entry.examples for name, entry in runs.items()}
    first = next(iter(rows.scores.values()), None)
    for name, entry in rows.entries.items():
        entries[name] = entry
        if first is None or name not in rows.scores:  # an export
            quality[name] = ["-"] * 5
            continue
        row = rows.scores[name]
        score = decimals(rows.ranking.scores.get(name), ranking.digits)
        differences.append(row.difference(first))
        interval = row.interval()
        halves[name] = None if interval is None else (interval[1] - interval[0]) / 2
        quality[name] = [score, *row.cells(ranking.digits), _text(differences[-1], ranking)]
        for fold, run in row.runs.items() if each_fold and len(row.runs) > 1 else ():
            entries[run] = runs[run]
            differences.append(ranked_difference(ranking, examples, run, first.runs.get(fold, run)))
            score = _score(ranking, run, _half(runs[run], ranking, run))
            quality[run] = [score, "-", "-", f"fold {fold}", _text(differences[-1], ranking)]
    lines = _lines(entries, [ranking.label, *folds.HEADER, TO_THE_BEST], quality)
    return _ComparisonTable(lines, rows.notes, rows.entries, rows.ranking, halves, differences)


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


def _score(ranking: Ranking, name: str, half: float | None) -> str:
    """Score of an entry with half of its interval."""
    score = decimals(ranking.scores.get(name), ranking.digits)
    return score if half is None else f"{score} ± {half:{ranking.digits}}"


def _half(entry: ComparedRun, ranking: Ranking, name: str) -> float | None:
    """Half of the 95 % interval of the score of an entry; None if it has no score or its examples are unknown."""
    half = half_interval(entry.examples, ranking.metric) if name in ranking.scores else None
    return None if half is None else abs(ranking.slopes.get(name, 1.0)) * half


def _text(difference: Difference | None, ranking: Ranking) -> str:
    return "-" if difference is None else difference.text(ranking.digits)


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


def _write(path: Path, table: str, made: _ComparisonTable) -> None:
    """Writes the plot of the entries with a score, and the table beside it."""
    table_path, ranking = path.with_suffix(".md"), made.ranking
    scored = {name: entry for name, entry in made.entries.items() if name in ranking.scores}
    labels, title = _labels({name: entry.report for name, entry in scored.items()})
    costs = {
        axis: {labels[name]: value for name, entry in scored.items() if (value := cost(entry)) is not None}
        for axis, cost in COSTS.items()
    }
    costs = {axis: of_runs for axis, of_runs in costs.items() if of_runs} or costs
    try:
        if table_path.exists() and not table_path.read_bytes().startswith(b"| run |"):
            raise InputError(f"{table_path} is there and is no table of runs: name another plot than {path}")
        scores = {labels[name]: ranking.scores[name] for name in scored}
        halves = {labels[name]: half for name in scored if (half := made.halves.get(name)) is not None}
        comparison_plots.plot_tradeoff(scores, costs, ranking, path, title, halves)
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
