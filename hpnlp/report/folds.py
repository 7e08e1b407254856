"""Cross-validation in comparisons: runs that differ only in the fold that they hold out are one row of the table."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.measure import mean_interval
from hpnlp.report.entries import ComparedRun
from hpnlp.report.paired_scores import Difference, half_interval, paired_interval, scaled
from hpnlp.tasks.reports.reporting import Ranking, Report, TaskReport
from hpnlp.training.files.example_scores import ExampleScores
from hpnlp.types import InputError

FOLDS, FOLD = "data.folds", "data.fold"
BASE = "base"  # name of a member that changes no field, as in hpnlp.cli.members
NOTE = (
    "The score of a row is the mean over folds, each of which was held out from one training, and sd the standard deviation "
    "over folds. Intervals are over the examples of all folds where their scores are stored, else over the folds; those of "
    'differences are paired. "no difference": the interval contains 0, so that the order of such rows is not a ranking. '
    "Folds share training data, so that intervals are approximate."
)


def fold_count(configs: Iterable[Mapping[str, Any]]) -> int:
    """Number of folds of runs that are compared.

    Args:
      configs: Config of each run, "section.field" -> value; empty configs do not count.

    Returns:
      `data.folds` of all runs; 0 for runs without folds.

    Raises:
      InputError: The runs have different numbers of folds.
    """
    counts = sorted({config.get(FOLDS, 0) for config in configs if config})
    if len(counts) > 1:
        shown = ", ".join(map(str, counts))
        raise InputError(
            f"runs with data.folds of {shown} were scored on different examples, so that their scores do not compare: compare "
            "runs of one number of folds"
        )
    return counts[0] if counts else 0


def by_member(
    configs: Mapping[str, Mapping[str, Any]], alone: Iterable[str] = (), varied: str = FOLD
) -> list[dict[int, str]]:
    """Groups runs of one directory that differ only in their fold, or in another number.

    Args:
      configs: Run directory -> config.
      alone: Directories that are not trained runs, which are groups of their own.
      varied: Field of the config that differs.

    Returns:
      Fold -> run directory, of each group. A run of the same config and fold as an earlier one begins another group.
    """
    alone = set(alone)
    groups: dict[tuple[str, ...], dict[int, str]] = {}
    for name, config in configs.items():
        fields = json.dumps({field: value for field, value in config.items() if field != varied}, sort_keys=True)
        parent = os.path.dirname(os.path.abspath(name))
        key = (parent, fields, name if name in alone else "")
        while config.get(varied, 0) in groups.get(key, ()):
            key = (*key, "again")
        groups.setdefault(key, {})[config.get(varied, 0)] = name
    return [dict(sorted(group.items())) for group in groups.values()]


def rank(report: TaskReport, reports: Mapping[str, Report]) -> Ranking:
    """Ranks the runs of each fold among themselves, since runs of another fold were scored on other examples.

    Args:
      report: The `TaskReport` of their task.
      reports: Run -> content of report.json.

    Returns:
      The scores of all runs.
    """
    by_fold: dict[int, dict[str, Report]] = {}
    for name, content in reports.items():
        by_fold.setdefault(content["config"].get(FOLD, 0), {})[name] = content
    rankings: list[Ranking] = [report.rank(of_fold) for of_fold in by_fold.values()]
    first = next((ranking for ranking in rankings if ranking.scores), rankings[0])
    scores, slopes, unscored = {}, {}, {}
    for ranking in rankings:
        unscored |= ranking.unscored
        if ranking.label == first.label:
            scores |= ranking.scores
            slopes |= ranking.slopes
        else:
            unscored |= dict.fromkeys(ranking.scores, f"scored by {ranking.label} in its fold")
    remark = next((ranking.remark for ranking in rankings if ranking.remark), "")
    return dataclasses.replace(first, scores=scores, slopes=slopes, unscored=unscored, remark=remark)


@dataclasses.dataclass(frozen=True)
class FoldScores:
    """Scores of the runs of one row.

    Attributes:
      runs: Fold -> run, also of runs without a score.
      scores: Fold -> score.
      examples: Fold -> scores of its examples, whose mean is the score; empty if they are unknown for a fold.
      count: Number of all folds.
      metric: Name of the score of examples.
    """

    runs: Mapping[int, str]
    scores: Mapping[int, float]
    examples: Mapping[int, ExampleScores]
    count: int
    metric: str

    @property
    def is_complete(self) -> bool:
        """Whether each fold has a score."""
        return len(self.scores) == self.count

    @property
    def mean(self) -> float:
        """Mean of the scores; NaN without any."""
        return float(np.mean(list(self.scores.values()))) if self.scores else math.nan

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the scores over folds; None for fewer than two."""
        return float(np.std(list(self.scores.values()), ddof=1)) if len(self.scores) > 1 else None

    def interval(self) -> tuple[float, float] | None:
        """Confidence interval of the score.

        Returns:
          Its ends, from all examples where they are known, and else from the folds; None if there are fewer than two of either.
        """
        if self.examples and len(self.examples) == len(self.scores):
            pooled = _pooled(self.examples.values(), self.metric)
            half = half_interval(pooled, self.metric)
            total, weight = pooled.sums[self.metric]
            if half is not None:
                return float(total.sum() / weight.sum()) - half, float(total.sum() / weight.sum()) + half
        return interval_of_mean(list(self.scores.values()))

    def difference(self, first: FoldScores) -> Difference | None:
        """Difference to another row over the folds that both have.

        Args:
          first: The other row.

        Returns:
          The difference, whose interval is over the examples of these folds if they are known, and else over the folds; None
          without a common fold.
        """
        common = [fold for fold in self.scores if fold in first.scores]
        if not common or first is self:
            return None
        differences = [self.scores[fold] - first.scores[fold] for fold in common]
        interval = None
        if all(fold in self.examples and fold in first.examples for fold in common):
            compared, reference = (
                _pooled([row.examples[fold] for fold in common], self.metric) for row in (self, first)
            )
            interval = paired_interval(compared, reference, self.metric)
        return Difference(_mean(differences), interval or interval_of_mean(differences))

    def cells(self, digits: str) -> list[str]:
        """Cells of the table: standard deviation, interval, and number of folds.

        Args:
          digits: Format of the score.

        Returns:
          Cells for HEADER.
        """
        deviation, interval = self.deviation, self.interval()
        return [
            "-" if deviation is None else f"{deviation:{digits}}",
            "-" if interval is None else f"{interval[0]:{digits}} to {interval[1]:{digits}}",
            f"{len(self.scores)} of {self.count}",
        ]


HEADER = ["sd", "95 % interval", "folds"]


def interval_of_mean(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean of the scores or differences of a few runs, by the t distribution.

    Args:
      values: The scores.

    Returns:
      The ends; None for fewer than two values.
    """
    if len(values) < 2:
        return None
    mean, half = mean_interval(values)
    return None if half is None else (mean - half, mean + half)


def _pooled(examples: Iterable[ExampleScores], metric: str) -> ExampleScores:
    """The scores of the examples of several folds."""
    scores = list(examples)
    sums = tuple(np.concatenate([part.sums[metric][i] for part in scores]) for i in (0, 1))
    documents, count = [], 0
    for part in scores:  # folds share no document
        numbers = np.arange(len(part.identity)) if part.documents is None else part.documents
        documents.append(numbers + count)
        count += int(numbers.max(initial=-1)) + 1
    return ExampleScores(
        {metric: (sums[0], sums[1])},
        np.concatenate([part.identity for part in scores]),
        None if all(part.documents is None for part in scores) else np.concatenate(documents),
    )


@dataclasses.dataclass(frozen=True)
class FoldRows:
    """The rows of a comparison of folds.

    Attributes:
      entries: Row -> figures of its runs: means, and the largest peak memory.
      scores: Row -> scores of its runs.
      ranking: Mean scores of the rows.
      notes: Lines on rows in which folds are missing.
    """

    entries: Mapping[str, ComparedRun]
    scores: Mapping[str, FoldScores]
    ranking: Ranking
    notes: Sequence[str]


def joined(entries: Mapping[str, ComparedRun], ranking: Ranking) -> FoldRows:
    """Joins the runs that differ only in their fold.

    Args:
      entries: Run -> entry, with folds but for exports, which have no config and stay as they are.
      ranking: Scores of the runs, see `rank`.

    Returns:
      The rows, best first; those in which folds are missing come after the others, and those without a score last.
    """
    configs = {name: entry.report["config"] for name, entry in entries.items() if entry.report["config"]}
    count = fold_count(configs.values())
    untrained = [name for name in configs if "phase_seconds" not in entries[name].report]
    rows, unscored = {}, {}
    groups = by_member(configs, untrained)
    for group in groups:
        name = _name(group, rows, is_alone=len(groups) == 1)
        rows[name] = _fold_scores(group, count, entries, ranking)
        if missing := [fold for fold in range(1, count + 1) if fold not in rows[name].scores]:
            absent = f"without a score of fold {', '.join(map(str, missing))}"
            reasons = [f"{run}: {ranking.unscored[run]}" for run in group.values() if run in ranking.unscored]
            unscored[name] = "; ".join([absent, *reasons])
    sign = -1 if ranking.higher_is_better else 1
    order = sorted(
        rows, key=lambda name: (not rows[name].is_complete, sign * rows[name].mean if rows[name].scores else math.inf)
    )
    means = {name: rows[name].mean for name in order if rows[name].scores}
    exports = {name: entry for name, entry in entries.items() if name not in configs}
    unscored |= {name: ranking.unscored[name] for name in exports if name in ranking.unscored}
    return FoldRows(
        {name: _mean_entry([entries[run] for run in rows[name].runs.values()]) for name in order} | exports,
        {name: rows[name] for name in order},
        dataclasses.replace(ranking, scores=means, slopes={}, unscored={}),
        [f"- {name}: {reason}." for name, reason in unscored.items()],
    )


def _name(runs: Mapping[int, str], taken: Iterable[str], is_alone: bool) -> str:
    """Name of a row: the directories of its runs without their fold, or the first of them.

    Runs that are named by their fold alone have the name of their sweep if there are no others.
    """
    if len(runs) == 1:
        return next(iter(runs.values()))
    shortened = {re.sub(r"(^|,)fold=\d+$", "", Path(run).name) for run in runs.values()}
    first = Path(next(iter(runs.values())))
    is_named_by_fold = len(shortened) == 1 and shortened != {first.name}
    member = next(iter(shortened)) or ("" if is_alone else BASE)
    name = str(first.parent / member) if is_named_by_fold else f"{first} and {len(runs) - 1} more"
    taken = set(taken)
    return name if name not in taken else f"{first} and {len(runs) - 1} more"


def _fold_scores(
    runs: Mapping[int, str], count: int, entries: Mapping[str, ComparedRun], ranking: Ranking
) -> FoldScores:
    """Scores of runs, and of their examples if these are known for each run with a score."""
    scores = {fold: ranking.scores[name] for fold, name in runs.items() if name in ranking.scores}
    examples = {fold: scaled(entries[runs[fold]].examples, runs[fold], ranking) for fold in scores}
    known = {fold: of_fold for fold, of_fold in examples.items() if of_fold is not None}
    return FoldScores(runs, scores, known if len(known) == len(scores) else {}, count, ranking.metric)


def _mean_entry(entries: Sequence[ComparedRun]) -> ComparedRun:
    """One entry with the figures of several: means, the largest peak memory and the sum of skipped steps."""
    if len(entries) == 1:
        return entries[0]
    reports = [entry.report for entry in entries]
    phases = [report["phase_seconds"] for report in reports]
    report = {
        "config": {field: value for field, value in reports[0]["config"].items() if field != FOLD},
        "tokens_per_second": _mean([report["tokens_per_second"] for report in reports]),
        "peak_memory_bytes": max(report["peak_memory_bytes"] for report in reports),
        "phase_seconds": {name: _mean([seconds[name] for seconds in phases]) for name in ("data", "step")},
        "parameters": round(_mean([report["parameters"] for report in reports])),
        "skipped_steps": sum(report.get("skipped_steps") or 0 for report in reports),
    }
    stored = [entry.stored_bytes for entry in entries if entry.stored_bytes is not None]
    return ComparedRun(report, stored_bytes=round(_mean(stored)) if stored else None)


def _mean(values: Sequence[float | int]) -> float:
    return sum(values) / len(values)
