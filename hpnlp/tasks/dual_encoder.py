"""Dual encoder: finding the text that belongs to another text by the similarity of their vectors."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpnlp.data import sources
from hpnlp.data.examples import Examples, PairsConfig
from hpnlp.data.examples.baselines import tfidf_recall
from hpnlp.data.examples.dataset import CHALLENGE, HELDOUT
from hpnlp.data.examples.graded import read_graded
from hpnlp.data.examples.kinds import Texts
from hpnlp.data.examples.rows import FORMATS
from hpnlp.data.files import Progress
from hpnlp.models.dual_encoder import DualEncoder, DualEncoderConfig
from hpnlp.tasks import vocabulary as vocabularies
from hpnlp.tasks.dual_encoder_report import MAX_PAIRS, TFIDF, TOP, RetrievalReport
from hpnlp.tasks.examples import ExampleTask
from hpnlp.tasks.predictions import SimilarityPrediction, TrainedModel, similarity_predictions
from hpnlp.tasks.task import Batch, RunConfig, Sums
from hpnlp.tasks.vocabulary import Sizes, Vocabulary
from hpnlp.types import InputError

# Set of examples -> the error if it is a single pair, whose partner is compared with no other text.
SINGLE_PAIR = {
    HELDOUT: "one pair is held out, and has no negatives: hold out more, by data.heldout, data.heldout_examples or "
    "data.heldout_path",
    CHALLENGE: "data.challenge_path holds one pair, which has no negatives: name more pairs, or set it to ''",
}


class DualEncoding(ExampleTask):
    """Dual encoder: finding the text that belongs to another text by the similarity of their vectors.

    Evaluations during training score a text's partner among those of its batch. The report ranks each held-out partner among
    all of them.
    """

    name = "dual_encoder"
    model_config = DualEncoderConfig
    data_config = PairsConfig
    prediction = SimilarityPrediction
    metric, higher_is_better = "accuracy", True
    report = RetrievalReport()

    def dataset(self, data: Any, vocabulary: Vocabulary | None, progress: Progress | None = None) -> Examples:
        examples = super().dataset(data, vocabulary, progress)
        for name, fault in SINGLE_PAIR.items():
            if examples.stored[name].count == 1 and not data.negative_fields:
                raise InputError(fault)
        if data.graded_path:
            read_graded(data, examples.tokenizer)  # raises errors before training
        return examples

    def check_data(self, data: Any) -> None:
        super().check_data(data)
        if data.graded_path:
            sources.find(data.graded_path, "data.graded_path", FORMATS)

    def model(self, config: RunConfig, sizes: Sizes) -> DualEncoder:
        self.check_no_stride(config)
        batch_size = config.data.batch_size
        parts = 1 if config.model.compares_examples else config.optimizer.accumulate
        if batch_size < 2 * parts and not config.data.negative_fields:
            accumulated = f", optimizer.accumulate={parts}" if parts > 1 else ""
            raise InputError(
                f"data.batch_size={batch_size}{accumulated}: a pair has no negatives: set data.batch_size to at least "
                f"{2 * parts}, better to {32 * parts} or more"
            )
        filled, count = vocabularies.fill_sizes(config.model, sizes, config.data.seq_len), len(config.data.negatives())
        if filled.negative_texts not in (0, count):
            raise InputError(
                f"model.negative_texts={filled.negative_texts}, and data.negative_fields={config.data.negative_fields!r} has "
                f"{count}: set it to 0"
            )
        return DualEncoder(dataclasses.replace(filled, negative_texts=count))

    def text_kind(self, data: PairsConfig) -> Texts:
        return Texts(data.text_field, data.distinct)

    def predict(
        self, trained: TrainedModel, batch: Batch, values: Sequence[Mapping[str, Any]]
    ) -> list[SimilarityPrediction]:
        return similarity_predictions(trained, batch, len(values))

    def encode(self, trained: TrainedModel, batch: Batch) -> np.ndarray:
        return trained.call("vectors", batch)

    def scores(
        self, config: RunConfig, dataset: Examples, sums: Sums, *, is_complete: bool, gives_probabilities: bool
    ) -> dict[str, float]:
        """Mean loss in nats per pair, and the share of texts whose partner is the most similar of its batch."""
        return {name: float(sums[name][0] / sums[name][1]) for name in ("loss", "accuracy")}

    def baseline(self, dataset: Examples) -> TfidfBaseline:
        return TfidfBaseline(dataset)


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
