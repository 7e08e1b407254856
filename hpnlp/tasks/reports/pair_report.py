"""The part of reports of dual encoders, by what their loss learns from: negatives, labels or grades of pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hpnlp.data.examples.dataset import HELDOUT, Examples
from hpnlp.data.examples.kinds.graded import read_graded
from hpnlp.data.examples.store import StoredExamples
from hpnlp.tasks.reports.dual_encoder_report import MAX_TEXT, RetrievalReport, pearson, spearman, vectors
from hpnlp.tasks.reports.label_report import LabelReport, whole_text
from hpnlp.tasks.reports.reporting import (
    NOT_FINITE,
    Outcome,
    Ranking,
    Report,
    Section,
    TaskReport,
    decimals,
    rank_on_same_examples,
    text_cell,
)

SPEARMAN, GRADED = "graded_spearman", "graded_pairs"  # fields of report.json, of the pairs of data.graded_path
MEAN_GRADE = "mean_grade_loss"  # field of report.json: the loss of the training examples' mean grade for every pair
MAJORITY = "majority_accuracy"
EXAMPLES = 4  # pairs that are shown whose similarity is too low, and as many whose similarity is too high


class SimilarityReport(TaskReport):
    """The part of reports on the loss of grades."""

    numbers_compared: Mapping[str, bool] = {
        "heldout_loss": True,
        "heldout_spearman": True,
        "heldout_examples": False,
    }
    unit = "pair"

    def numbers(self, dataset: Examples, scores: Mapping[str, float], baselines: Mapping[str, Any]) -> dict[str, Any]:
        """Scores and identity of the held-out pairs; correlations are None until `section` has computed them."""
        return {
            **{f"heldout_{name}": value for name, value in scores.items()},
            **dict.fromkeys(("heldout_spearman", "heldout_pearson")),
            "heldout_examples": dataset.heldout_examples,
            "heldout_digest": dataset.heldout_digest,
            **baselines,
        }

    def verdict(self, report: Report) -> str:
        if report["heldout_loss"] is None:
            return NOT_FINITE
        pairs, correlation = f"{report['heldout_examples']:,} held-out pairs", report["heldout_spearman"]
        if correlation is None:
            return f"The mean squared difference of similarity and grade of {pairs} is {report['heldout_loss']:.4f}."
        return f"The similarities of {pairs} and their grades have Spearman's correlation {correlation:.3f}."

    def rows(self, report: Report) -> list[tuple[str, str]]:
        return [
            ("held-out pairs", f"{report['heldout_examples']:,}"),
            ("Spearman's correlation with the grades", decimals(report["heldout_spearman"])),
            ("Pearson's correlation with the grades", decimals(report["heldout_pearson"])),
            ("held-out loss, mean squared difference to the grade", decimals(report["heldout_loss"])),
            *([("the mean training grade, loss", decimals(report[MEAN_GRADE]))] if MEAN_GRADE in report else []),
        ]

    def section(self, outcome: Outcome) -> Section:
        """Correlations of similarities and grades, and the pairs whose similarity differs most from the grade."""
        if outcome.params is None:
            return Section()
        stored = outcome.dataset.stored[HELDOUT]
        similarities, grades = _similarities(outcome, stored, stored.count), stored.all_grades()
        numbers = {"spearman": spearman(similarities, grades), "pearson": pearson(similarities, grades)}
        text = "\n".join(_examples(stored, similarities, grades))
        return Section(text, numbers={f"heldout_{name}": value for name, value in numbers.items()})

    def rank(self, reports: Mapping[str, Report]) -> Ranking:
        """Ranks runs by Spearman's correlation over the same held-out pairs: those that most runs were scored on."""
        return rank_on_same_examples(reports, "spearman", higher_is_better=True)


class PairReport(TaskReport):
    """The part of reports and comparisons of dual encoders: that of the loss, and the correlation with `data.graded_path`."""

    numbers_compared: Mapping[str, bool] = RetrievalReport.numbers_compared
    unit = RetrievalReport.unit

    def __init__(self) -> None:
        self._by_negatives = RetrievalReport()
        self._by_loss: Mapping[str, TaskReport] = {
            "softmax": LabelReport("pair", {MAJORITY: "the most frequent training class"}, whole_text),
            "cosine": SimilarityReport(),
        }

    def _part(self, config: Mapping[str, Any]) -> TaskReport:
        """The report of the loss of a config, "section.field" -> value."""
        return self._by_loss.get(config.get("model.loss", ""), self._by_negatives)

    def compared(self, config: Mapping[str, Any]) -> Mapping[str, bool]:
        return self._part(config).numbers_compared

    def numbers(self, dataset: Any, scores: Mapping[str, float], baselines: Mapping[str, Any]) -> dict[str, Any]:
        kind = dataset.kind
        loss = "softmax" if kind.has_labels else "cosine" if dataset.stored[HELDOUT].has_grades else ""
        graded = dict.fromkeys((SPEARMAN, GRADED)) if dataset.config.graded_path else {}
        return self._part({"model.loss": loss}).numbers(dataset, scores, baselines) | graded

    def verdict(self, report: Report) -> str:
        return self._part(report.get("config", {})).verdict(report)

    def rows(self, report: Report) -> list[tuple[str, str]]:
        name = f"Spearman's correlation with the grades of {report.get(GRADED) or 0:,} pairs of data.graded_path"
        graded = [(name, decimals(report[SPEARMAN]))] if report.get(GRADED) else []
        return [*self._part(report.get("config", {})).rows(report), *graded]

    def section(self, outcome: Outcome) -> Section:
        """The section of the loss, with the correlation of similarities with the grades of `data.graded_path`."""
        section = self._part({"model.loss": outcome.config.model.loss}).section(outcome)
        if outcome.params is None or not outcome.config.data.graded_path:
            return section
        pairs, grades = read_graded(outcome.dataset.config, outcome.dataset.tokenizer)
        correlation = spearman(_similarities(outcome, pairs, len(grades)), grades)
        return dataclasses.replace(section, numbers={**section.numbers, SPEARMAN: correlation, GRADED: len(grades)})

    def rank(self, reports: Mapping[str, Report]) -> Ranking:
        """Ranks the runs with the kind of loss that most runs have."""
        kinds = {name: self._part(report["config"]) for name, report in reports.items()}
        part = max(kinds.values(), key=list(kinds.values()).count, default=self._by_negatives)
        ranking = part.rank({name: report for name, report in reports.items() if kinds[name] is part})
        others = {
            name: f"model.loss={report['config'].get('model.loss')!r} has other scores than the runs above"
            for name, report in reports.items()
            if kinds[name] is not part
        }
        return dataclasses.replace(ranking, unscored={**ranking.unscored, **others})


def _similarities(outcome: Outcome, pairs: Any, count: int) -> np.ndarray:
    """Cosines `[count]` of the first pairs."""
    texts, partners = vectors(outcome, pairs, count)
    return (texts * partners).sum(axis=1)


def _examples(stored: StoredExamples, similarities: np.ndarray, grades: np.ndarray) -> Iterator[str]:
    """Lines of a table of the pairs whose similarity is lowest and highest in relation to the grade."""
    yield "Held-out pairs whose similarity is the lowest in relation to the grade, and the highest:"
    yield ""
    yield "| grade | similarity | text | its partner |"
    yield "|---|---|---|---|"
    order = np.argsort(similarities - grades, kind="stable")
    for i in dict.fromkeys((*order[:EXAMPLES].tolist(), *order[-EXAMPLES:].tolist())):
        texts = (text_cell(stored.text(i, part).decode(), MAX_TEXT) for part in range(2))
        yield "| " + " | ".join([f"{grades[i]:.2f}", f"{similarities[i]:.2f}", *texts]) + " |"


class MeanBaseline:
    """Scores of the most frequent class, or of the mean grade, of the training examples."""

    def __init__(self, dataset: Examples) -> None:
        self._dataset = dataset

    def result(self, log: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Measures the score.

        Args:
          log: Not called.

        Returns:
          `majority_accuracy` of pairs with labels, `mean_grade_loss` of pairs with grades.
        """
        heldout, train = (self._dataset.stored[name] for name in (HELDOUT, "train"))
        if self._dataset.kind.has_labels:
            return {MAJORITY: float(np.mean(heldout.all_labels() == self._dataset.class_counts.argmax()))}
        mean = train.all_grades().mean(dtype=np.float64)
        return {MEAN_GRADE: float(np.mean(np.square(heldout.all_grades() - mean)))}
