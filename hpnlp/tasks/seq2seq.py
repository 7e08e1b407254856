"""Sequence to sequence: a target text from a source text."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpnlp.data.examples import Examples, Seq2SeqConfig
from hpnlp.data.examples.baselines import linear_exact_match
from hpnlp.models.seq2seq import Seq2SeqModel, Seq2SeqModelConfig
from hpnlp.tasks import vocabulary as vocabularies
from hpnlp.tasks.field_rules import below_length
from hpnlp.tasks.labelled.examples import ExampleTask
from hpnlp.tasks.predictions import TextPrediction, TrainedModel
from hpnlp.tasks.reports.decoded_targets import text_predictions
from hpnlp.tasks.reports.seq2seq_report import LINEAR, Seq2SeqReport
from hpnlp.tasks.task import Batch, RunConfig, Sums
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.types import InputError


def _no_target_limit(config: RunConfig) -> str:
    return below_length(config, "target_len", "target_len")


class SequenceToSequence(ExampleTask):
    """Sequence to sequence: a target text from a source text."""

    name = "seq2seq"
    model_config = Seq2SeqModelConfig
    data_config = Seq2SeqConfig
    prediction = TextPrediction
    metric, higher_is_better = "exact_match", True
    report = Seq2SeqReport()
    unused_fields = ((("model.target_len",), _no_target_limit),)

    def model(self, config: RunConfig, sizes: Sizes) -> Seq2SeqModel:
        self.check_no_stride(config)
        filled = vocabularies.fill_sizes(config.model, sizes, config.data.seq_len)
        data_len, target_len = config.data.target_len, filled.target_len or config.data.target_len
        if filled.position == "learned" and data_len > target_len:
            raise InputError(
                f"data.target_len={data_len} is longer than model.target_len={target_len} learned positions: change one"
            )
        stats = sizes.stats and sizes.stats.padded(filled.vocab)
        return Seq2SeqModel(dataclasses.replace(filled, target_len=target_len), stats)

    def predict(self, trained: TrainedModel, batch: Batch, values: Sequence[Mapping[str, Any]]) -> list[TextPrediction]:
        return text_predictions(trained, batch, len(values))

    def scores(
        self, config: RunConfig, dataset: Examples, sums: Sums, *, is_complete: bool, gives_probabilities: bool
    ) -> dict[str, float]:
        """Mean loss in nats per target token, and the shares of tokens and of whole targets that are predicted."""
        return {name: float(sums[name][0] / sums[name][1]) for name in ("loss", "accuracy", "exact_match")}

    def baseline(self, dataset: Examples) -> LinearBaseline:
        return LinearBaseline(dataset)


class LinearBaseline:
    """Exact matches of a linear model of words and their places, see `linear_exact_match`."""

    def __init__(self, dataset: Examples) -> None:
        self._dataset = dataset

    def result(self, log: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Measures the exact matches.

        Args:
          log: Called with a message before the measurement.

        Returns:
          The fields of LINEAR, None for a set of examples that the data do not have and if scikit-learn is not installed.
        """
        matches: dict[str, float] = {}
        if importlib.util.find_spec("sklearn") is not None:
            if log is not None:
                log("fitting linear models of the words of targets, for comparison")
            matches = linear_exact_match(self._dataset, self._dataset.heldout_sets)
        return {field: matches.get(name) for name, field in LINEAR.items()}
