"""The part of reports of tasks that predict one of several classes: accuracy, confusion matrix, examples."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from hpnlp.data.examples.dataset import HELDOUT
from hpnlp.models.variables import collections
from hpnlp.tasks.reporting import Heatmap, Outcome, Ranking, Report, Section, TaskReport, decimals

CONFUSION = "confusion.png"
MAX_DRAWN = 40  # classes in the picture of the confusion matrix: the most frequent ones, and the others as one
EXAMPLES = 4  # shown of each kind, right and wrong
EXAMPLE_BATCHES = 4  # batches of held-out examples that these are chosen from
MAX_TEXT = 100  # characters of an example


class ClassificationReport(TaskReport):
    """The part of reports and comparisons of a task that predicts one of several classes."""

    numbers_compared: Mapping[str, bool] = {
        "heldout_accuracy": True,
        "heldout_loss": True,
        "heldout_examples": False,
    }
    unit = "an example"

    def numbers(self, dataset: Any, scores: Mapping[str, float], baselines: Mapping[str, Any]) -> dict[str, Any]:
        """Scores, identity of the held-out examples, and accuracies of baselines on them."""
        return {
            **{f"heldout_{name}": value for name, value in scores.items()},
            "heldout_examples": dataset.heldout_examples,
            "heldout_digest": dataset.heldout_digest,
            "classes": len(dataset.labels),
            **baselines,
        }

    def fault(self, report: Report) -> str:
        digest = report.get("heldout_digest")
        return "" if isinstance(digest, str) else f"heldout_digest is {digest!r:.40}"

    def verdict(self, report: Report) -> str:
        if report["heldout_loss"] is None:
            return "The held-out loss is not finite: the model is of no use. Lower optimizer.learning_rate, and train anew."
        count, accuracy = report["heldout_examples"], report["heldout_accuracy"]
        text = f"The model predicts {100 * accuracy:.1f} % of {count:,} held-out labels"
        others = [f"{name} {100 * value:.1f} %" for name, value in _baselines(report)]
        return f"{text} ({', '.join(others)})." if others else f"{text}."

    def rows(self, report: Report) -> list[tuple[str, str]]:
        return [
            ("held-out examples, classes", f"{report['heldout_examples']:,}, {report['classes']:,}"),
            ("held-out accuracy", decimals(report["heldout_accuracy"])),
            ("held-out macro F1", decimals(report.get("heldout_macro_f1"))),
            *((f"{name}, accuracy", decimals(value)) for name, value in _baselines(report)),
            ("held-out loss, nats an example", decimals(report["heldout_loss"])),
        ]

    def section(self, outcome: Outcome) -> Section:
        """The confusion matrix, and examples that are classified rightly and wrongly."""
        parts, pictures = [], {}
        if "confusion" in outcome.sums:
            matrix = np.asarray(outcome.sums["confusion"][0])
            pictures[CONFUSION] = drawn_confusion(matrix, outcome.dataset.labels)
            parts.append(f"Held-out labels, and the model's:\n\n![confusion matrix]({CONFUSION})")
        if outcome.params is not None:
            parts.append("\n".join(_examples(outcome)))
        return Section("\n\n".join(parts), pictures)

    def rank(self, reports: Mapping[str, Report]) -> Ranking:
        """Ranks runs by held-out accuracy on the same examples: those that most runs were scored on."""
        unscored = {
            name: "its held-out loss is not finite"
            for name, report in reports.items()
            if None in (report["heldout_loss"], report["heldout_accuracy"])
        }
        digests = {name: report["heldout_digest"] for name, report in reports.items() if name not in unscored}
        most_common = max(digests.values(), key=list(digests.values()).count, default="")
        elsewhere = "scored on other examples than the runs above, so that accuracies do not compare"
        unscored |= {name: elsewhere for name, digest in digests.items() if digest != most_common}
        scores = {name: reports[name]["heldout_accuracy"] for name in reports if name not in unscored}
        return Ranking("held-out accuracy", scores, unscored, higher_is_better=True)


def _baselines(report: Report) -> list[tuple[str, float]]:
    """`(name, accuracy)` of each baseline."""
    names = {
        "majority_accuracy": "the most frequent class",
        "words_accuracy": "a linear model of words",
        "characters_accuracy": "a linear model of characters",
    }
    return [(text, report[name]) for name, text in names.items() if report.get(name) is not None]


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
    names = [labels[index] for index in order]
    matrix = confusion[np.ix_(order, order)]
    if len(names) > MAX_DRAWN:
        kept = MAX_DRAWN - 1
        matrix = np.vstack([matrix[:kept], matrix[kept:].sum(axis=0, keepdims=True)])
        matrix = np.hstack([matrix[:, :kept], matrix[:, kept:].sum(axis=1, keepdims=True)])
        names = [*names[:kept], f"{len(names) - kept} others"]
    return Heatmap(matrix, names, names, ylabel="label", xlabel="prediction")


def _examples(outcome: Outcome) -> Iterator[str]:
    """Lines of a table of held-out examples, spread over all of them: the surest right ones and the surest wrong ones."""
    dataset, model = outcome.dataset, outcome.model
    stored, labels = dataset.stored[HELDOUT], dataset.labels
    count = min(stored.count, outcome.config.data.batch_size * EXAMPLE_BATCHES)
    numbers = np.arange(count) * stored.count // count
    batch = dataset.kind.batch(stored, numbers, count, dataset.tokenizer, dataset.seq_len)
    logits = jax.jit(functools.partial(model.apply, method="logits"))(
        collections(outcome.params), {name: batch[name] for name in model.batch_axes()}
    )
    probabilities = np.asarray(jax.nn.softmax(logits))
    predicted, best = probabilities.argmax(axis=1), probabilities.max(axis=1)
    surest = np.argsort(-best, kind="stable")
    yield "| label | prediction | probability | text |"
    yield "|---|---|---|---|"
    for is_right in (True, False):
        chosen = [i for i in surest if (predicted[i] == batch["labels"][i]) == is_right][:EXAMPLES]
        for i in chosen:
            text = " ".join(b" ".join(stored.text(numbers[i], part) for part in range(stored.parts)).decode().split())
            shown = f"`{text[:MAX_TEXT].replace('`', chr(39))}{'...' * (len(text) > MAX_TEXT)}`"
            cells = [labels[batch["labels"][i]], labels[predicted[i]], f"{best[i]:.2f}", shown]
            yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
