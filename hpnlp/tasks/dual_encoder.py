"""Dual encoder: vectors of texts, similar for texts that belong together, that have a label of a pair or a high grade."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.data.examples import Examples, PairsConfig
from hpnlp.data.examples.baselines import tfidf_recall
from hpnlp.data.examples.dataset import CHALLENGE, HELDOUT
from hpnlp.data.examples.kinds import Texts
from hpnlp.data.examples.kinds.graded import read_graded
from hpnlp.data.reading import sources
from hpnlp.data.reading.files import Progress
from hpnlp.data.reading.rows import FORMATS
from hpnlp.models.pairs.dual_encoder import LOSSES_OF_NEGATIVES, DualEncoder, DualEncoderConfig
from hpnlp.tasks import vocabulary as vocabularies
from hpnlp.tasks.field_rules import only_with_loss
from hpnlp.tasks.labelled.examples import ExampleTask
from hpnlp.tasks.labelled.labels import PLANNED_CLASSES
from hpnlp.tasks.predictions import SimilarityPrediction, TrainedModel, similarity_predictions
from hpnlp.tasks.reports.dual_encoder_report import MAX_PAIRS, TFIDF, TOP
from hpnlp.tasks.reports.label_report import macro_f1
from hpnlp.tasks.reports.pair_report import MeanBaseline, PairReport
from hpnlp.tasks.task import Baseline, Batch, RunConfig, Sums
from hpnlp.tasks.vocabulary import Sizes, Vocabulary
from hpnlp.types import InputError

# Set of examples -> the error if it is a single pair, whose partner is compared with no other text.
SINGLE_PAIR = {
    HELDOUT: "one pair is held out, and has no negatives: hold out more, by data.heldout, data.heldout_examples or "
    "data.heldout_path",
    CHALLENGE: "data.challenge_path holds one pair, which has no negatives: name more pairs, or set it to ''",
}


def _no_grades(config: RunConfig) -> str:
    if config.data.graded_path:
        return ""
    return "data.graded_path='' names no pairs with grades: leave it out, or set data.graded_path"


def _no_parts(config: RunConfig) -> str:
    if config.optimizer.accumulate > 1:
        return ""
    return "optimizer.accumulate=1 leaves batches as they are: leave it out, or set optimizer.accumulate"


class DualEncoding(ExampleTask):
    """Dual encoder: finding the text that belongs to another text by the similarity of their vectors.

    Evaluations during training score a text's partner among those of its batch, or the predicted label of each pair, or the
    similarity by its grade. The report ranks each held-out partner among all of them, shows the confusion of the labels, or
    correlates similarities with grades.
    """

    name = "dual_encoder"
    model_config = DualEncoderConfig
    data_config = PairsConfig
    prediction = SimilarityPrediction
    metric, higher_is_better = "accuracy", True
    report = PairReport()
    unused_fields = (
        (("data.grade_field",), _no_grades),
        (("model.margin",), only_with_loss("triplet")),
        (("model.temperature", "model.symmetric", "model.negatives"), only_with_loss("contrastive")),
        (("model.negatives",), _no_parts),
    )

    def primary_metric(self, fields: Mapping[str, Any]) -> tuple[str, bool]:
        return ("loss", False) if fields.get("model.loss") == "cosine" else (self.metric, self.higher_is_better)

    def vocabulary(self, dataset: Examples) -> Vocabulary:
        return Vocabulary(dataset.tokenizer, dataset.labels if dataset.kind.has_labels else None)

    def load_vocabulary(self, workdir: Path) -> Vocabulary | None:
        return vocabularies.load(workdir, has_labels=(workdir / "labels.json").exists())

    def planned_sizes(self, config: RunConfig) -> Sizes:
        sizes = super().planned_sizes(config)
        return dataclasses.replace(sizes, classes=config.model.classes or PLANNED_CLASSES)

    def dataset(self, data: PairsConfig, vocabulary: Vocabulary | None, progress: Progress | None = None) -> Examples:
        if vocabulary is not None and not data.kind().has_labels:  # training goes on from a run with labels
            vocabulary = dataclasses.replace(vocabulary, labels=None)
        examples = super().dataset(data, vocabulary, progress)
        for name, fault in SINGLE_PAIR.items():
            if examples.stored[name].count == 1 and examples.kind.compares_examples and not data.negative_fields:
                raise InputError(fault)
        if data.graded_path:
            read_graded(data, examples.tokenizer)  # raises errors before training
        return examples

    def check_data(self, data: PairsConfig) -> None:
        super().check_data(data)
        if data.graded_path:
            sources.find(data.graded_path, "data.graded_path", FORMATS)

    def model(self, config: RunConfig, sizes: Sizes) -> DualEncoder:
        self.check_no_stride(config)
        if config.model.loss not in LOSSES_OF_NEGATIVES:
            return self._model_of_pairs(config, sizes)
        if config.data.label_field:
            raise InputError(
                f"data.label_field={config.data.label_field!r} has no effect, because model.loss={config.model.loss!r} reads "
                "pairs without labels: leave it out, or set model.loss=softmax, or with data.label_range model.loss=cosine"
            )
        batch_size = config.data.batch_size
        accumulate = 1 if config.model.compares_examples else config.optimizer.accumulate
        if batch_size < 2 * accumulate and not config.data.negative_fields:
            accumulated = f", optimizer.accumulate={accumulate}" if accumulate > 1 else ""
            raise InputError(
                f"data.batch_size={batch_size}{accumulated}: a pair has no negatives: set data.batch_size to at least "
                f"{2 * accumulate}, better to {32 * accumulate} or more"
            )
        filled, count = vocabularies.fill_sizes(config.model, sizes, config.data.seq_len), len(config.data.negatives())
        if filled.negative_texts not in (0, count):
            raise InputError(
                f"model.negative_texts={filled.negative_texts}, and data.negative_fields={config.data.negative_fields!r} has "
                f"{count}: set it to 0"
            )
        return DualEncoder(dataclasses.replace(filled, negative_texts=count))

    def _model_of_pairs(self, config: RunConfig, sizes: Sizes) -> DualEncoder:
        """The model with a loss of single pairs, which have a label or a grade."""
        loss, data = config.model.loss, config.data
        if data.negative_fields:
            raise InputError(
                f"data.negative_fields={data.negative_fields!r} has no effect, because model.loss={loss!r} has no negatives: "
                "leave it out, or set model.loss=contrastive or triplet"
            )
        if loss == "softmax" and (data.label_range or not data.label_field):
            fix = "leave out data.label_range" if data.label_range else "set data.label_field"
            raise InputError(f"model.loss='softmax' needs pairs with labels: {fix}")
        if loss == "cosine" and not data.label_range:
            raise InputError(
                "model.loss='cosine' needs pairs with grades: set data.label_field to the field of the grade, and "
                "data.label_range to the lowest and the highest one, as 0,5"
            )
        filled = vocabularies.fill_sizes(config.model, sizes, data.seq_len)
        if loss == "cosine":
            return DualEncoder(filled)
        if not sizes.classes:
            raise InputError(
                "the run has no labels.json, which model.loss='softmax' needs: put back the one that the run was trained with"
            )
        if filled.classes not in (0, sizes.classes):
            raise InputError(f"model.classes={filled.classes}, but the data have {sizes.classes} labels: set it to 0")
        return DualEncoder(dataclasses.replace(filled, classes=sizes.classes))

    def text_kind(self, data: PairsConfig) -> Texts:
        return Texts(data.text_field, data.distinct)

    def predict(
        self, trained: TrainedModel, batch: Batch, values: Sequence[Mapping[str, Any]]
    ) -> list[SimilarityPrediction]:
        return similarity_predictions(trained, batch, len(values))

    def encode(self, trained: TrainedModel, batch: Batch) -> np.ndarray:
        return trained.call("vectors", batch)

    def encode_partners(self, trained: TrainedModel, batch: Batch) -> np.ndarray:
        return trained.call("partner_vectors", batch)

    def scores(
        self, config: RunConfig, dataset: Examples, sums: Sums, *, is_complete: bool, gives_probabilities: bool
    ) -> dict[str, float]:
        """Mean loss per pair; the share of texts whose partner is the most similar of its batch, or of predicted labels."""
        scores = {name: float(sums[name][0] / sums[name][1]) for name in ("loss", "accuracy") if name in sums}
        if "confusion" in sums:
            scores["macro_f1"] = macro_f1(sums["confusion"][0])
        return scores

    def baseline(self, dataset: Examples) -> Baseline:
        return TfidfBaseline(dataset) if dataset.kind.compares_examples else MeanBaseline(dataset)


class TfidfBaseline:
    """Recall of TF-IDF on the held-out pairs that the report ranks."""

    def __init__(self, dataset: Examples) -> None:
        self._dataset = dataset

    def result(self, log: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Measures it.

        Args:
          log: Called with a message before the measurement.

        Returns:
          `NAME_recall_at_K` for each name of TFIDF and K of TOP; None if scikit-learn is not installed.
        """
        recall: dict[str, Any] = {by: dict.fromkeys(TOP) for by in TFIDF.values()}
        if importlib.util.find_spec("sklearn") is not None:
            if log is not None:
                log("ranking held-out pairs by TF-IDF, for comparison")
            recall = {by: tfidf_recall(self._dataset, top=TOP, limit=MAX_PAIRS, by=by) for by in TFIDF.values()}
        return {f"{name}_recall_at_{k}": recall[by][k] for name, by in TFIDF.items() for k in TOP}
