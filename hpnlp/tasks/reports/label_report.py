"""The part of reports of tasks that predict one of several classes: accuracy, confusion matrix, examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from hpnlp.data.examples.dataset import HELDOUT, Examples
from hpnlp.tasks.reports.reporting import (
    NOT_FINITE,
    Heatmap,
    Outcome,
    Ranking,
    Report,
    Section,
    TaskReport,
    code_cell,
    decimals,
    rank_on_same_examples,
)

CONFUSION = "confusion.png"
MAX_DRAWN = 40  # rows of the picture of the confusion matrix: the most frequent classes, and one row for the others
EXAMPLES = 4  # right predictions that are shown, and as many wrong ones
EXAMPLE_BATCHES = 4  # batches of held-out examples that predictions are chosen from
MAX_TEXT = 100  # characters of an example
MAX_LABEL = 40  # characters of a label
MARK = "\N{BLACK RIGHT-POINTING SMALL TRIANGLE}"


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a label among the held-out examples.

    Attributes:
      dataset: The data, an `Examples`.
      batch: A batch of held-out examples.
      number: Number of the example among the held-out ones.
      index: Index of the label in `batch["labels"]`: (example,), or (example, token).
    """

    dataset: Any
    batch: Mapping[str, np.ndarray]
    number: int
    index: tuple[int, ...]


class LabelReport(TaskReport):
    """The part of reports and comparisons of a task that predicts one of several classes."""

    numbers_compared: Mapping[str, bool] = {
        "heldout_accuracy": True,
        "heldout_loss": True,
        "heldout_examples": False,
    }

    def __init__(self, unit: str, baselines: Mapping[str, str], show: Callable[[Place], str], note: str = "") -> None:
        """Makes the report of a task.

        Args:
          unit: The objects that have labels, as "example".
          baselines: Field of report.json with the accuracy of a baseline -> name of the baseline.
          show: Returns the text that stands for the object with a label in the table of examples.
          note: Explanation of these texts for the reader of the report, as " (...)".
        """
        self.unit = unit
        self._baseline_names = baselines
        self._show = show
        self._note = note

    def numbers(self, dataset: Examples, scores: Mapping[str, float], baselines: Mapping[str, Any]) -> dict[str, Any]:
        """Scores, identity of the held-out examples, and accuracies of baselines on them."""
        return {
            **{f"heldout_{name}": value for name, value in scores.items()},
            "heldout_examples": dataset.heldout_examples,
            "heldout_digest": dataset.heldout_digest,
            "classes": len(dataset.labels),
            **baselines,
        }

    def verdict(self, report: Report) -> str:
        if report["heldout_loss"] is None:
            return NOT_FINITE
        count, accuracy = report["heldout_examples"], report["heldout_accuracy"]
        text = f"The model predicts {100 * accuracy:.1f} % of the labels of {count:,} held-out examples"
        others = [f"{name} {100 * value:.1f} %" for name, value in self._baselines(report)]
        return f"{text} ({', '.join(others)})." if others else f"{text}."

    def rows(self, report: Report) -> list[tuple[str, str]]:
        return [
            ("held-out examples, classes", f"{report['heldout_examples']:,}, {report['classes']:,}"),
            ("held-out accuracy", decimals(report["heldout_accuracy"])),
            ("held-out macro F1", decimals(report.get("heldout_macro_f1"))),
            *((f"{name}, accuracy", decimals(value)) for name, value in self._baselines(report)),
            *_further_rows(report),
            (f"held-out loss, nats per {self.unit}", decimals(report["heldout_loss"])),
        ]

    def section(self, outcome: Outcome) -> Section:
        """The confusion matrix, and examples of right and wrong predictions."""
        blocks, pictures = [], {}
        if "confusion" in outcome.sums:
            matrix = np.asarray(outcome.sums["confusion"][0])
            pictures[CONFUSION] = drawn_confusion(matrix, outcome.dataset.labels)
            blocks.append(
                f"Number of held-out labels (rows) by prediction (columns):\n\n![confusion matrix]({CONFUSION})"
            )
        if outcome.params is not None:
            blocks.append("\n".join(_examples(outcome, self._show, self._note)))
        return Section("\n\n".join(blocks), pictures)

    def _baselines(self, report: Report) -> list[tuple[str, float]]:
        """`(name, accuracy)` of each baseline that was measured."""
        return [(name, report[field]) for field, name in self._baseline_names.items() if report.get(field) is not None]

    def rank(self, reports: Mapping[str, Report]) -> Ranking:
        """Ranks runs by held-out accuracy on the same examples: those that most runs were scored on."""
        return rank_on_same_examples(reports, "accuracy", higher_is_better=True)


def _further_rows(report: Report) -> Iterator[tuple[str, str]]:
    """Rows with the accuracy on examples that are scored apart."""
    for field, value in report.items():
        name = field.removeprefix("heldout_").removesuffix("_accuracy")
        if field == f"heldout_{name}_accuracy":
            yield f"{name} examples, accuracy", decimals(value)


def macro_f1(confusion: np.ndarray) -> float:
    """Mean over classes of the harmonic mean of precision and recall.

    Args:
      confusion: `[C, C]`, counts of (label, prediction).

    Returns:
      The mean over the classes that are the label or the prediction of an example.
    """
    hits, actual, predicted = np.diag(confusion), confusion.sum(axis=1), confusion.sum(axis=0)
    present = actual + predicted > 0
    return float(np.mean(2 * hits[present] / (actual + predicted)[present])) if present.any() else float("nan")


def drawn_confusion(confusion: np.ndarray, labels: tuple[str, ...]) -> Heatmap:
    """The picture of a confusion matrix, whose classes are ordered by their frequency.

    Args:
      confusion: `[C, C]`, counts of (label, prediction).
      labels: Names of the classes.

    Returns:
      The picture, in which classes beyond the MAX_DRAWN most frequent ones are one row and column.
    """
    order = np.argsort(-confusion.sum(axis=1), kind="stable")
    names = [_shown(labels[index]) for index in order]
    matrix = confusion[np.ix_(order, order)]
    if len(names) > MAX_DRAWN:
        kept = MAX_DRAWN - 1
        matrix = np.vstack([matrix[:kept], matrix[kept:].sum(axis=0, keepdims=True)])
        matrix = np.hstack([matrix[:, :kept], matrix[:, kept:].sum(axis=1, keepdims=True)])
        names = [*names[:kept], f"{len(names) - kept} others"]
    return Heatmap(matrix, names, names, ylabel="label", xlabel="prediction")


def _examples(outcome: Outcome, show: Callable[[Place], str], note: str) -> Iterator[str]:
    """Lines of a table of held-out labels, spread over all examples: the most confident right and wrong ones."""
    dataset, labels = outcome.dataset, outcome.dataset.labels
    stored = dataset.stored[HELDOUT]
    numbers = stored.spread(outcome.config.data.batch_size * EXAMPLE_BATCHES).tolist()
    batch = dataset.kind.batch(stored, numbers, len(numbers), dataset.tokenizer, dataset.seq_len)
    probabilities = np.asarray(jax.nn.softmax(outcome.compiled("logits")(batch)))
    predicted, best = probabilities.argmax(axis=-1), probabilities.max(axis=-1)
    places = np.argwhere(batch["weights"] > 0)
    by_confidence = places[np.argsort(-best[tuple(places.T)], kind="stable")]
    yield f"The most confident right and wrong predictions among {len(numbers):,} held-out examples{note}:"
    yield ""
    yield "| label | prediction | probability | text |"
    yield "|---|---|---|---|"
    for is_right in (True, False):
        chosen = [
            at for at in map(tuple, by_confidence.tolist()) if (predicted[at] == batch["labels"][at]) == is_right
        ][:EXAMPLES]
        for at in chosen:
            text = " ".join(show(Place(dataset, batch, numbers[at[0]], at)).split())
            names = (_shown(labels[label[at]]).replace("|", r"\|") for label in (batch["labels"], predicted))
            yield "| " + " | ".join([*names, f"{best[at]:.2f}", code_cell(text)]) + " |"


def _shown(label: str) -> str:
    """A label in one line of limited length."""
    text = " ".join(label[: 4 * MAX_LABEL].split())
    return text if len(text) <= MAX_LABEL else f"{text[:MAX_LABEL]}..."


def whole_text(place: Place) -> str:
    """The beginning of the texts of an example.

    Args:
      place: The place of a label.

    Returns:
      At most MAX_TEXT characters.
    """
    stored = place.dataset.stored[HELDOUT]
    text = b" ".join(stored.text(place.number, part) for part in range(stored.parts)).decode()
    return f"{text[:MAX_TEXT]}{'...' * (len(text) > MAX_TEXT)}"


def text_around(place: Place) -> str:
    """The text around a token, with MARK before the token.

    Args:
      place: The place of a label.

    Returns:
      At most MAX_TEXT characters, and the mark.
    """
    row, column = place.index
    ids = place.batch["tokens"][row][: int(place.batch["segment_ids"][row].sum())]
    before, after = (
        place.dataset.tokenizer.decode(part).decode("utf-8", "replace") for part in (ids[:column], ids[column:])
    )
    return f"{before[-MAX_TEXT // 2 :]}{MARK}{after[: MAX_TEXT // 2]}"
