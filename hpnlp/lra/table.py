"""Tables of the Long Range Arena: accuracy, speed and memory of mixers, and their efficiency by length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hpnlp.report.paired_scores import (
    NO_INTERVAL,
    NOTE,
    Difference,
    half_interval,
    mean_difference,
    paired_interval,
)
from hpnlp.tasks.reports.reporting import decimals, three_digits
from hpnlp.training.files.example_scores import ExampleScores

METRIC = "accuracy"  # name of the score of examples


class Score(NamedTuple):
    """The result of a run.

    Attributes:
      accuracy: Held-out accuracy; None if the loss is not finite.
      steps_per_second: Speed of training.
      peak_bytes: Peak memory.
      steps: Number of training steps.
      examples: Scores of the held-out examples; None if they are unknown.
    """

    accuracy: float | None
    steps_per_second: float
    peak_bytes: float | int
    steps: int
    examples: ExampleScores | None = None

    @property
    def half(self) -> float | None:
        """Half the width of the 95 % interval of the accuracy; None if it is unknown."""
        return None if self.accuracy is None else half_interval(self.examples, METRIC)


def score(
    report: Mapping[str, Any], steps_per_second: float | None = None, examples: ExampleScores | None = None
) -> Score:
    """The score of a run.

    Args:
      report: Content of report.json.
      steps_per_second: Speed of training; None for that of the run.
      examples: Scores of the held-out examples; None if they are unknown.

    Returns:
      The score.
    """
    of_run = report["tokens_per_second"] * report["steps"] / max(1, report["tokens"])
    speed = of_run if steps_per_second is None else steps_per_second
    return Score(report["heldout_accuracy"], speed, report["peak_memory_bytes"], report["steps"], examples)


def describe_heldout(report: Mapping[str, Any]) -> str:
    """Describes the held-out examples, with which accuracies are to be compared.

    Args:
      report: Content of report.json of a run of the task.

    Returns:
      The number of held-out examples, the 95 % interval of an accuracy of 50 %, and the accuracy of the most frequent class.
    """
    count = report["heldout_examples"]
    return (
        f"{count:,} held-out examples (95 % interval of an accuracy: at most ± {98 / max(1, count) ** 0.5:.1f} points); the "
        f"most frequent class of the training examples has an accuracy of {report['majority_accuracy']:.3f}."
    )


def render_scores(scores: Mapping[str, Mapping[str, Score]]) -> str:
    """The table of runs, best mixer first.

    Args:
      scores: Task -> mixer -> score.

    Returns:
      Markdown, with the differences of accuracies to the most accurate mixer of the task. The mean is over the tasks that all
      mixers have finished; it stands there if these are several, and its differences are to the first row.
    """
    mixers = list(dict.fromkeys(mixer for of_task in scores.values() for mixer in of_task))
    shared = [task for task, of_task in scores.items() if len(of_task) == len(mixers)]
    means = {mixer: _mean(scores[task][mixer].accuracy for task in shared) for mixer in mixers}
    best = {mixer: max(_or_0(s[mixer].accuracy) for s in scores.values() if mixer in s) for mixer in mixers}
    order = sorted(mixers, key=lambda mixer: (_or_0(means[mixer]), best[mixer]), reverse=True)
    several = len(shared) > 1
    columns = ("accuracy", "to the best", "steps", "steps/s", "peak MiB")
    header = ["mixer", *(f"{task}: {name}" for task in scores for name in columns)]
    rows = [[*header, *(["mean accuracy", "mean: to the best"] if several else [])]]
    rows.append(["---"] * len(rows[0]))
    for mixer in order:
        cells = [cell for of_task in scores.values() for cell in _cells(of_task.get(mixer), of_task)]
        mean = [decimals(means[mixer]), _mean_difference([scores[task] for task in shared], mixer, order[0])]
        rows.append([mixer, *cells, *(mean if several else [])])
    return _markdown(rows)


def note(scores: Mapping[str, Mapping[str, Score]]) -> str:
    """The sentences on the intervals of a table of runs.

    Args:
      scores: As for `render_scores`.

    Returns:
      The sentences; "" if the table has no interval, and no two runs are compared.
    """
    compared = [(result, _best(of_task)) for of_task in scores.values() for result in of_task.values()]
    differences = [difference for pair in compared if (difference := _difference(*pair)) is not None]
    notes = [NOTE] if any(result.half is not None for result, _ in compared) else []
    return "\n".join([*notes, *([NO_INTERVAL] if any(d.interval is None for d in differences) else [])])


def _cells(result: Score | None, of_task: Mapping[str, Score]) -> list[str]:
    if result is None:
        return ["-"] * 5
    speed, memory = three_digits(result.steps_per_second), f"{result.peak_bytes / 2**20:,.0f}"
    difference = _difference(result, _best(of_task))
    half, text = result.half, decimals(result.accuracy)
    accuracy = text if half is None else f"{text} ± {half:.4f}"
    return [accuracy, "-" if difference is None else difference.text(), f"{result.steps:,}", speed, memory]


def _best(of_task: Mapping[str, Score]) -> Score:
    return max(of_task.values(), key=lambda result: _or_0(result.accuracy))


def _difference(result: Score, best: Score) -> Difference | None:
    """Difference of two accuracies; None if one is absent, or they are the same."""
    if result is best or result.accuracy is None or best.accuracy is None:
        return None
    return Difference(result.accuracy - best.accuracy, paired_interval(result.examples, best.examples, METRIC))


def _mean_difference(tasks: Sequence[Mapping[str, Score]], mixer: str, best: str) -> str:
    """Difference of the mean accuracies of two mixers, as text; "-" if a task lacks one of them."""
    differences = [_difference(of_task[mixer], of_task[best]) for of_task in tasks]
    known = [difference for difference in differences if difference is not None]
    return mean_difference(known).text() if known and len(known) == len(differences) else "-"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _or_0(value: float | None) -> float:
    return value or 0.0


def render_efficiency(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of speed and memory by length, in the order of the measurements.

    Args:
      rows: Results of `efficiency.measure_step`.

    Returns:
      Markdown: for each length steps per second, the speed relative to the mixer "full" where it was measured, and peak memory.
    """
    by_key = {(row["mixer"], row["length"]): row for row in rows}
    lengths = sorted({row["length"] for row in rows})
    mixers = list(dict.fromkeys(row["mixer"] for row in rows))
    table = [["mixer", *(f"{length}: {name}" for length in lengths for name in ("steps/s", "of full", "peak MiB"))]]
    table.append(["---"] * len(table[0]))
    for mixer in mixers:
        cells = []
        for length in lengths:
            row, full = by_key.get((mixer, length)), by_key.get(("full", length))
            if row is None:
                cells += ["-"] * 3
                continue
            ratio = f"{row['steps_per_second'] / full['steps_per_second']:.2f}" if full else "-"
            cells += [three_digits(row["steps_per_second"]), ratio, f"{row['peak_memory_bytes'] / 2**20:,.0f}"]
        table.append([mixer, *cells])
    return _markdown(table)


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows) + "\n"
