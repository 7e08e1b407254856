"""Labelled bags: texts and labels that belong together, each compared with the others of its bag."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hpnlp.data.examples import BagExamples, BagsConfig, Examples, prepare_examples
from hpnlp.data.examples.baselines import tfidf_bag_accuracy
from hpnlp.data.examples.dataset import HELDOUT
from hpnlp.data.reading.files import Progress
from hpnlp.models.classifiers.labelled_bags import LabelledBagsConfig, LabelledBagsModel
from hpnlp.tasks.field_rules import only_with_loss
from hpnlp.tasks.labelled.labels import LabelTask
from hpnlp.tasks.reports.label_report import LabelReport, whole_text
from hpnlp.tasks.reports.reporting import Outcome, Report, Section, decimals
from hpnlp.tasks.task import RunConfig, Sums
from hpnlp.tasks.vocabulary import Sizes, Vocabulary
from hpnlp.types import InputError

BASELINES = {
    "majority_accuracy": "the most frequent training class",
    "tfidf_accuracy": "the mean TF-IDF vector of each class",
}
# Optimizers whose updates are proportional to the gradients of a row; the others divide a factor of the row out again.
PROPORTIONAL = ("sgd", "lars")
MAX_TEXTS = 10_000  # held-out texts that are ranked, the first ones


class BagReport(LabelReport):
    """The part of reports of labelled bags: that of classification, and the ranks of left-out texts."""

    def numbers(
        self, dataset: BagExamples, scores: Mapping[str, float], baselines: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Scores; the ranks are None until `section` has computed them."""
        return {
            **super().numbers(dataset, scores, baselines),
            "heldout_text_mrr": None,
            "heldout_text_median_rank": None,
        }

    def rows(self, report: Report) -> list[tuple[str, str]]:
        return [
            *super().rows(report),
            ("left-out texts, recall at 1 within batches", decimals(report.get("heldout_text_recall_at_1"))),
            ("left-out texts, mean reciprocal rank", decimals(report.get("heldout_text_mrr"))),
            ("left-out texts, median rank", decimals(report.get("heldout_text_median_rank"), ".0f")),
        ]

    def section(self, outcome: Outcome) -> Section:
        """The section of classification, with the ranks of held-out texts."""
        section = super().section(outcome)
        if outcome.params is None:
            return section
        ranks, _ = text_ranks(outcome.dataset, outcome.compiled("embed_bags"), outcome.config.data.batch_size)
        numbers = {"heldout_text_mrr": float(np.mean(1 / ranks)), "heldout_text_median_rank": float(np.median(ranks))}
        return dataclasses.replace(section, numbers={**section.numbers, **numbers})


def text_ranks(
    dataset: Examples, embed: Callable[[Mapping[str, np.ndarray]], Any], batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ranks each held-out text by its similarity to the others of its bag, among the held-out texts of other labels.

    Args:
      dataset: The data.
      embed: The model's method `embed_bags`, of a batch.
      batch_size: Bags of a batch.

    Returns:
      `(ranks, places)` of at most MAX_TEXTS texts: int [n], 1 for the best, ties count against the text; and int [n, 2], number
      of the example and of the text from 0 on.
    """
    stored, texts, contexts, labels, places = dataset.stored[HELDOUT], [], [], [], []
    for start in range(0, stored.count, batch_size):
        numbers = np.arange(start, min(start + batch_size, stored.count))
        batch = dataset.kind.batch(stored, numbers, batch_size, dataset.tokenizer, dataset.seq_len)
        x, context, exists = map(np.asarray, embed(batch))
        rows, columns = np.nonzero(exists)
        texts.append(x[rows, columns])
        contexts.append(context[rows, columns])
        labels.append(batch["labels"][rows])
        places.append(np.stack([start + rows, columns], axis=1))
    texts, contexts, labels, places = (np.concatenate(x)[:MAX_TEXTS] for x in (texts, contexts, labels, places))
    scores = contexts @ texts.T
    positives = np.diag(scores)[:, None]
    ranks = 1 + np.sum((scores >= positives) & (labels[:, None] != labels[None]), axis=1)
    return np.where(np.isfinite(positives[:, 0]), ranks, len(texts)), places


def _topics(config: RunConfig) -> str:
    data = config.data
    if data.kind().has_labels:
        return ""
    return f"data.positives={data.positives!r} takes topics in place of labels: leave it out, or set data.positives='labels'"


class LabelledBagsTask(LabelTask):
    """Labelled bags: texts and labels that belong together, each compared with the others of its bag.

    The primary metric is the accuracy of the label that is most similar to the texts of a held-out bag.
    """

    name = "labelled_bags"
    model_config = LabelledBagsConfig
    data_config = BagsConfig
    compares_as = "classification"
    report = BagReport("text or label", BASELINES, whole_text)
    unused_fields = (
        (("data.label_field",), _topics),
        (("model.margin", "model.hard_negatives"), only_with_loss("margin")),
        (("model.temperature",), only_with_loss("softmax")),
    )

    def dataset(self, data: BagsConfig, vocabulary: Vocabulary | None, progress: Progress | None = None) -> BagExamples:
        has_labels, labels, tokenizer = data.kind().has_labels, None, None
        if vocabulary is not None:
            labels, tokenizer = vocabulary.labels, vocabulary.tokenizer
        examples = prepare_examples(data, labels if has_labels else None, tokenizer, progress, BagExamples)
        if labels is not None and labels != examples.labels:
            raise InputError(
                f"data.positives={data.positives!r}: the topics of these training bags are {', '.join(examples.labels[:3])}, "
                f"..., and those of the run {', '.join(labels[:3])}, ...: keep the run's data.path and data.positives, and "
                "name other bags to score by data.heldout_path"
            )
        return examples

    def model(self, config: RunConfig, sizes: Sizes) -> LabelledBagsModel:
        self.check_no_stride(config)
        self.check_classes(config, sizes)
        model, data = config.model, config.data
        if model.vocab and model.vocab < sizes.ids:
            raise InputError(
                f"model.vocab={model.vocab} is less than the tokenizer's {sizes.ids}: set it to 0, or to at least {sizes.ids}"
            )
        if model.max_texts and model.max_texts < data.max_texts:
            raise InputError(
                f"model.max_texts={model.max_texts} is less than data.max_texts={data.max_texts}: set it to 0"
            )
        vocab = model.vocab or sizes.ids
        if model.frequency_power and config.optimizer.name not in PROPORTIONAL:
            raise InputError(
                f"model.frequency_power={model.frequency_power} scales the gradients of rows, and optimizer.name="
                f"{config.optimizer.name!r} divides them by their size, so that nothing would change: set "
                "optimizer.name=sgd, with a learning rate for it"
            )
        if model.frequency_power and sizes.stats is None:
            raise InputError(
                f"model.frequency_power={model.frequency_power} needs the counts of the words, which data.tokenizer="
                f"{data.tokenizer!r} does not have: set data.tokenizer='words(8192)'"
            )
        filled = dataclasses.replace(
            model, vocab=vocab, classes=sizes.classes, max_texts=model.max_texts or data.max_texts
        )
        return LabelledBagsModel(filled, sizes.stats and sizes.stats.padded(vocab))

    def scores(
        self, config: RunConfig, dataset: Examples, sums: Sums, *, is_complete: bool, gives_probabilities: bool
    ) -> dict[str, float]:
        """Scores of a classifier, and the share of texts that are more similar to their bag than all others of a batch."""
        options = {"is_complete": is_complete, "gives_probabilities": gives_probabilities}
        scores = super().scores(config, dataset, sums, **options)
        total, weight = sums["text_recall_at_1"]
        return scores | ({"text_recall_at_1": float(total / weight)} if weight else {})

    def baseline(self, dataset: Examples) -> BagBaselines:
        return BagBaselines(dataset)


class BagBaselines:
    """Accuracies of simple classifiers of the held-out bags."""

    def __init__(self, dataset: Examples) -> None:
        self._dataset = dataset

    def result(self, log: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Measures the accuracies.

        Args:
          log: Not called.

        Returns:
          `majority_accuracy`, of the most frequent training class; and `tfidf_accuracy` (`tfidf_bag_accuracy`), None if
          scikit-learn is not installed.
        """
        stored = self._dataset.stored[HELDOUT]
        labels = np.array([stored.labels(number)[0] for number in range(stored.count)])
        has_sklearn = importlib.util.find_spec("sklearn") is not None
        return {
            "majority_accuracy": float(np.mean(labels == self._dataset.class_counts.argmax())),
            "tfidf_accuracy": tfidf_bag_accuracy(self._dataset) if has_sklearn else None,
        }
