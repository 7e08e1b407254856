"""Tasks that predict one of several labels, which the data name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.data.examples import Examples
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.tasks import vocabulary as vocabularies
from hpnlp.tasks.labelled.examples import ExampleTask
from hpnlp.tasks.predictions import LabelPrediction, Prediction, TrainedModel, label_predictions
from hpnlp.tasks.reports.label_report import macro_f1
from hpnlp.tasks.task import Batch, RunConfig, Sums
from hpnlp.tasks.vocabulary import Sizes, Vocabulary
from hpnlp.types import InputError

PLANNED_CLASSES = 2  # assumed where data are not read; the table of the classes is small beside the model


class LabelTask(ExampleTask):
    """A task that predicts labels of texts or of tokens by an encoder with an output layer over the labels.

    The data config is an `ExampleConfig` of a kind with labels, and the model config an `EncoderConfig`.
    """

    metric, higher_is_better = "accuracy", True
    prediction = LabelPrediction
    vocabulary_files = ("tokenizer.json", "labels.json")

    @property
    def is_served(self) -> bool:
        return issubclass(self.model_config, EncoderConfig)

    def vocabulary(self, dataset: Examples) -> Vocabulary:
        return Vocabulary(dataset.tokenizer, dataset.labels)

    def load_vocabulary(self, workdir: Path) -> Vocabulary | None:
        return vocabularies.load(workdir, has_labels=True)

    def planned_sizes(self, config: RunConfig) -> Sizes:
        sizes = super().planned_sizes(config)
        return dataclasses.replace(sizes, classes=config.model.classes or PLANNED_CLASSES)

    def model(self, config: RunConfig, sizes: Sizes) -> Encoder:
        self.check_no_stride(config)
        self.check_classes(config, sizes)
        filled = vocabularies.fill_sizes(config.model, sizes, config.data.seq_len)
        stats = sizes.stats and sizes.stats.padded(filled.vocab)
        return Encoder(dataclasses.replace(filled, classes=sizes.classes), stats)

    def predict(self, trained: TrainedModel, batch: Batch, values: Sequence[Mapping[str, Any]]) -> Sequence[Prediction]:
        return label_predictions(trained, batch, len(values))

    def encode(self, trained: TrainedModel, batch: Batch) -> np.ndarray:
        return trained.call("vectors", batch) if isinstance(trained.model, Encoder) else super().encode(trained, batch)

    def check_classes(self, config: RunConfig, sizes: Sizes) -> None:
        """Checks that a config has the classes of the data.

        Args:
          config: Config of the run.
          sizes: Sizes of the vocabulary.

        Raises:
          InputError: It sets another number of classes.
        """
        if config.model.classes not in (0, sizes.classes):
            raise InputError(
                f"model.classes={config.model.classes}, but the data have {sizes.classes} labels: set it to 0"
            )

    def scores(
        self, config: RunConfig, dataset: Examples, sums: Sums, *, is_complete: bool, gives_probabilities: bool
    ) -> dict[str, float]:
        """Mean loss in nats per label, accuracy, and the macro-averaged F1 score where there is a confusion matrix."""
        scores = {name: float(sums[name][0] / sums[name][1]) for name in ("loss", "accuracy")}
        if "confusion" in sums:
            scores["macro_f1"] = macro_f1(sums["confusion"][0])
        return scores
