"""Classification: the label of a text, or of a pair of texts."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hpnlp.data.examples import ClassificationConfig, Examples
from hpnlp.data.examples.baselines import MAX_TRAINED, linear_accuracy
from hpnlp.data.examples.checks.guess import guessed_fields
from hpnlp.data.examples.dataset import HELDOUT
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.tasks.labelled.labels import LabelTask
from hpnlp.tasks.reports.label_report import LabelReport, whole_text
from hpnlp.tasks.task import RunConfig
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.types import InputError, option

BASELINES = {
    "majority_accuracy": "the most frequent training class",
    "words_accuracy": "a linear model of words",
    "characters_accuracy": "a linear model of characters",
}


@dataclasses.dataclass(frozen=True)
class ClassifierConfig(EncoderConfig):
    """A bidirectional encoder with a label for each text or pair of texts."""

    pooling: str = option("mean", "An entry of POOLINGS: how the hidden states of a text become one vector.")
    classes: int = option(0, "Number of classes; 0 for the number of labels in the data.")


class ClassificationTask(LabelTask):
    """Classification: the label of a text, or of a pair of texts."""

    name = "classification"
    model_config = ClassifierConfig
    data_config = ClassificationConfig
    report = LabelReport("example", BASELINES, whole_text)

    def model(self, config: RunConfig, sizes: Sizes) -> Encoder:
        if config.model.pooling == "none":
            raise InputError("model.pooling='none' labels every token: choose another, such as 'mean'")
        if config.data.kind().parts == 2 and config.model.token_types == 1:
            raise InputError(
                "model.token_types=1 does not tell the texts of a pair (data.pair_field) apart: set it to 2, or to 0 for none"
            )
        return super().model(config, sizes)

    def guessed_fields(self, data: Mapping[str, Any]) -> dict[str, str]:
        if self.data_config is not ClassificationConfig or data["pair_field"] or not data["path"]:
            return {}
        names = ("path", "text_field", "label_field", "unlabelled")
        return guessed_fields(ClassificationConfig(**{name: data[name] for name in names}))

    def baseline(self, dataset: Examples) -> ClassificationBaselines:
        return ClassificationBaselines(dataset)


class ClassificationBaselines:
    """Accuracies of simple classifiers on the held-out examples."""

    def __init__(self, dataset: Examples) -> None:
        self._dataset = dataset

    def result(self, log: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Measures the accuracies.

        Args:
          log: Called with a message before a measurement that takes long.

        Returns:
          `majority_accuracy`, of the most frequent training class, which is None if no training example has a label; and
          `words_accuracy` and `characters_accuracy`, of linear models of bags of words and of characters, which are None if
          scikit-learn is not installed, there is nothing to fit, or data.linear_baselines is False.
        """
        labels, counts = self._dataset.stored[HELDOUT].all_labels(), self._dataset.class_counts
        majority = float(np.mean(labels == counts.argmax())) if counts.any() else None
        figures: dict[str, Any] = {"majority_accuracy": majority}
        linear: dict[str, Any] = {"words": None, "characters": None}
        if self._dataset.config.linear_baselines and importlib.util.find_spec("sklearn") is not None:
            if log is not None:
                count = min(self._dataset.train_examples, MAX_TRAINED)
                log(f"fitting linear models of words and of characters to {count:,} training examples, for comparison")
            linear = linear_accuracy(self._dataset)
        return figures | {f"{name}_accuracy": value for name, value in linear.items()}
