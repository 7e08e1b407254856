"""Table, verdict and chart of a compression: bytes, time and quality before and after each stage."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpnlp import measure
from hpnlp.cost.paired_times import described
from hpnlp.errors import plural
from hpnlp.report.paired_scores import NO_INTERVAL, Difference
from hpnlp.tasks.reports.reporting import three_digits
from hpnlp.training.files.evaluation_record import finite

NOTE = (
    'The difference to the original has a 95 % interval, paired over the held-out examples. "no difference": the interval '
    "contains 0."
)


def render(rows: Sequence[Any], metric: str, higher_is_better: bool) -> str:
    """The table and the verdict.

    Args:
      rows: Results of `jobs.compression.compress_run.compress_run`.
      metric: Name of the primary score.
      higher_is_better: Its direction.

    Returns:
      Markdown.
    """
    counts = list(rows[0].seconds)
    header = [
        "stage",
        "array elements",
        "disk MiB",
        "memory MiB",
        *(f"ms, {n} {plural(n, 'sequence')}" for n in counts),
        metric,
        "to the original",
    ]
    table = [header, ["---"] * len(header)]
    for row in rows:
        times = [three_digits(1e3 * row.seconds[n]) for n in counts]
        size = three_digits(row.disk_bytes / 2**20), three_digits(row.memory_bytes / 2**20)
        difference = "-" if row is rows[0] else _difference(rows[0], row, metric).text()
        table.append([f"`{row.stage}`", f"{row.parameters:,}", *size, *times, f"{row.scores[metric]:.4f}", difference])
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    note = NOTE if any(row.interval for row in rows) else NO_INTERVAL
    return "\n".join([*lines, "", verdict(rows, metric, higher_is_better), "", note, ""])


def verdict(rows: Sequence[Any], metric: str, higher_is_better: bool) -> str:
    """One sentence on the last row against the first one, which says where something became worse.

    Arguments: see `render`.

    Returns:
      The sentence.
    """
    first, last = rows[0], rows[-1]
    times = [f"{described(last.wall[n], last.cpu[n])} at {n} {plural(n, 'sequence')}" for n in last.wall]
    quality = _quality(first, last, metric, higher_is_better)
    size = _size(first.disk_bytes / last.disk_bytes) + _memory(last.memory_bytes / first.memory_bytes)
    return f"{size}; the loss of a batch is {', '.join(times)}; {quality}."


def _difference(first: Any, row: Any, metric: str) -> Difference:
    return Difference(row.scores[metric] - first.scores[metric], row.interval)


def _quality(first: Any, last: Any, metric: str, higher_is_better: bool) -> str:
    """The change of a score, with its interval."""
    before, after, difference = first.scores[metric], last.scores[metric], _difference(first, last, metric)
    if not math.isfinite(after):
        return f"{metric} becomes {after} (worse)"
    text = "" if difference.interval is None else f": {difference.text()}"
    if f"{after:.4f}" == f"{before:.4f}":
        return f"{metric} stays at {after:.4f}{text}"
    is_worse = (after < before) is higher_is_better and not difference.is_none
    change = f"{'falls' if after < before else 'rises'} from {before:.4f} to {after:.4f}"
    return f"{metric} {change}{' (worse)' * is_worse}{text}"


def to_json(rows: Sequence[Any], metric: str, source: str | Path, recipe: str) -> str:
    """The measurements as JSON.

    Args:
      rows: As for `render`.
      metric: As for `render`.
      source: The run that was compressed.
      recipe: The recipe.

    Returns:
      Text, in which scores that are not finite are null.
    """
    content = {
        "source": str(source),
        "recipe": recipe,
        "metric": metric,
        "rows": [finite(dataclasses.asdict(row)) for row in rows],
        "environment": measure.environment(),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def panels(rows: Sequence[Any], metric: str) -> dict[str, Mapping[str, float]]:
    """Values of the chart.

    Args:
      rows: As for `render`.
      metric: As for `render`.

    Returns:
      Title of a panel -> stage -> value.
    """
    counts, stages = list(rows[0].seconds), _names(rows)

    def by_stage(values: Sequence[float]) -> dict[str, float]:
        return dict(zip(stages, values, strict=True))

    return {
        "MiB on disk": by_stage([row.disk_bytes / 2**20 for row in rows]),
        **{f"ms, {n} {plural(n, 'sequence')}": by_stage([1e3 * row.seconds[n] for row in rows]) for n in counts},
        metric: by_stage([row.scores[metric] if math.isfinite(row.scores[metric]) else math.nan for row in rows]),
    }


def score_intervals(rows: Sequence[Any], metric: str) -> dict[str, Mapping[str, tuple[float, float]]]:
    """Intervals of the chart: those of the differences, from the score of the original.

    Args:
      rows: As for `render`.
      metric: As for `render`.

    Returns:
      Title of the panel -> stage -> ends of the interval.
    """
    original = rows[0].scores[metric]
    ends = {
        stage: (original + row.interval[0], original + row.interval[1])
        for stage, row in zip(_names(rows), rows, strict=True)
        if row.interval is not None and math.isfinite(row.scores[metric])
    }
    return {metric: ends}


def _names(rows: Sequence[Any]) -> list[str]:
    """Distinct names of the stages."""
    return [f"{index}. {row.stage}" if index else row.stage for index, row in enumerate(rows)]


def _memory(ratio: float) -> str:
    """The weights in memory, relative to those of the original; "" if they take as much."""
    return "" if abs(ratio - 1) < 0.01 else f", and the weights take {ratio:.2g} of the memory"


def _size(ratio: float) -> str:
    """The size of a file, by that of the original over it."""
    shown = f"{ratio:.3g}", f"{1 / ratio:.3g}"
    if "1" in shown:
        return "The file is as large as before"
    return f"The file is {shown[0]} times smaller" if ratio > 1 else f"The file is {shown[1]} times larger"
