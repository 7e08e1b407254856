"""Classification: the label of a text, or of a pair of texts."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.data import sources
from hpnlp.data.examples import ClassificationConfig, Examples, prepare_examples
from hpnlp.data.examples.baselines import linear_accuracy
from hpnlp.data.examples.dataset import HELDOUT
from hpnlp.data.examples.generated import GENERATED
from hpnlp.data.files import Progress
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.tasks import vocabulary as vocabularies
from hpnlp.tasks.classification_report import ClassificationReport, macro_f1
from hpnlp.tasks.task import Batch, RunConfig, Sums, Task
from hpnlp.tasks.vocabulary import Sizes, Vocabulary
from hpnlp.types import InputError, option

PLANNED_CLASSES = 2  # of data that are not read; the table of the classes is small beside the model


@dataclasses.dataclass(frozen=True)
class ClassifierConfig(EncoderConfig):
    """A bidirectional encoder with a label for each text or pair of texts."""

    pooling: str = option("mean", "An entry of POOLINGS: how the hidden states of a text become one vector.")
    classes: int = option(0, "Number of classes of a label, 0 for those of the data.")


class Classification(Task):
    """Classification: the label of a text, or of a pair of texts."""

    name = "classification"
    model_config = ClassifierConfig
    data_config = ClassificationConfig
    metric, higher_is_better = "accuracy", True
    report = ClassificationReport()

    def check_data(self, data: ClassificationConfig) -> None:
        for field in ("path", "heldout_path", "challenge_path"):
            paths = getattr(data, field)
            if paths and paths not in GENERATED:
                sources.find(paths, f"data.{field}")

    def dataset(
        self, data: ClassificationConfig, vocabulary: Vocabulary | None, progress: Progress | None = None
    ) -> Examples:
        if vocabulary is None:
            return prepare_examples(data, progress=progress)
        return prepare_examples(data, vocabulary.labels, vocabulary.tokenizer, progress)

    def heldout(
        self, config: RunConfig, dataset: Examples, *, limit: int | None, process_index: int = 0, process_count: int = 1
    ) -> Iterator[Batch]:
        return dataset.heldout(
            batch_size=config.data.batch_size, limit=limit, process_index=process_index, process_count=process_count
        )

    def vocabulary(self, dataset: Examples) -> Vocabulary:
        return Vocabulary(dataset.tokenizer, dataset.labels)

    def load_vocabulary(self, workdir: Path) -> Vocabulary | None:
        return vocabularies.load(workdir, has_labels=True)

    def planned_sizes(self, config: RunConfig) -> Sizes:
        sizes = vocabularies.planned_sizes(config.data.tokenizer, config.model.vocab)
        return dataclasses.replace(sizes, classes=config.model.classes or PLANNED_CLASSES)

    def model(self, config: RunConfig, sizes: Sizes) -> Encoder:
        model = config.model
        if model.pooling == "none":
            raise InputError("model.pooling='none' labels every token: choose another, such as 'mean'")
        self.check_no_stride(config)
        if model.classes not in (0, sizes.classes):
            raise InputError(f"model.classes={model.classes}, but the data have {sizes.classes} labels: set it to 0")
        filled = vocabularies.fill_sizes(model, sizes, config.data.seq_len)
        stats = sizes.stats and sizes.stats.padded(filled.vocab)
        return Encoder(dataclasses.replace(filled, classes=sizes.classes), stats)

    def scores(
        self, config: RunConfig, dataset: Examples, sums: Sums, *, is_complete: bool, gives_probabilities: bool
    ) -> dict[str, float]:
        """Mean loss in nats per example, accuracy, and the macro-averaged F1 score where there is a confusion matrix."""
        scores = {name: float(sums[name][0] / sums[name][1]) for name in ("loss", "accuracy")}
        if "confusion" in sums:
            scores["macro_f1"] = macro_f1(sums["confusion"][0])
        return scores

    def baseline(self, dataset: Examples) -> ClassificationBaselines:
        return ClassificationBaselines(dataset)


class ClassificationBaselines:
    """Accuracies of simple classifiers on the held-out examples."""

    def __init__(self, dataset: Examples) -> None:
        self._dataset = dataset

    def result(self, log: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Measures them.

        Args:
          log: Called with a message before a measurement that takes long.

        Returns:
          `majority_accuracy`, of the most frequent training class; and, if scikit-learn is installed, `words_accuracy` and
          `characters_accuracy`, of linear models of bags of words and of characters, otherwise None.
        """
        labels = self._dataset.stored[HELDOUT].all_labels()
        figures: dict[str, Any] = {"majority_accuracy": float(np.mean(labels == self._dataset.class_counts.argmax()))}
        linear: dict[str, Any] = {"words": None, "characters": None}
        if importlib.util.find_spec("sklearn") is not None:
            if log is not None:
                log("fitting linear models of words and of characters, for comparison")
            linear = linear_accuracy(self._dataset)
        return figures | {f"{name}_accuracy": value for name, value in linear.items()}
