"""Tasks that predict one of several labels, which the data name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpnlp.data import sources
from hpnlp.data.examples import Examples, prepare_examples
from hpnlp.data.examples.generated import GENERATED
from hpnlp.data.files import Progress
from hpnlp.models.encoder import Encoder
from hpnlp.tasks import vocabulary as vocabularies
from hpnlp.tasks.label_report import macro_f1
from hpnlp.tasks.task import Batch, RunConfig, Sums, Task
from hpnlp.tasks.vocabulary import Sizes, Vocabulary
from hpnlp.types import InputError

PLANNED_CLASSES = 2  # of data that are not read; the table of the classes is small beside the model


class LabelTask(Task):
    """A task that predicts labels of texts or of tokens by an encoder with an output layer over the labels.

    The data config is an `ExampleConfig` of a kind with labels, and the model config an `EncoderConfig`.
    """

    metric, higher_is_better = "accuracy", True

    def check_data(self, data: Any) -> None:
        for field in ("path", "heldout_path", "challenge_path"):
            paths = getattr(data, field)
            if paths and paths not in GENERATED:
                sources.find(paths, f"data.{field}")

    def dataset(self, data: Any, vocabulary: Vocabulary | None, progress: Progress | None = None) -> Examples:
        if vocabulary is None:
            return prepare_examples(data, progress=progress)
        return prepare_examples(data, vocabulary.labels, vocabulary.tokenizer, progress)

    def heldout(
        self, config: RunConfig, dataset: Examples, *, limit: int | None, process_index: int = 0, process_count: int = 1
    ) -> Iterator[Batch]:
        return dataset.heldout(
            batch_size=config.data.batch_size, limit=limit, process_index=process_index, process_count=process_count
        )

    def further_heldout(
        self, config: RunConfig, dataset: Examples, *, process_index: int = 0, process_count: int = 1
    ) -> dict[str, Iterator[Batch]]:
        options = {
            "batch_size": config.data.batch_size,
            "process_index": process_index,
            "process_count": process_count,
        }
        return {name: dataset.heldout(name=name, **options) for name in dataset.heldout_sets[1:]}

    def vocabulary(self, dataset: Examples) -> Vocabulary:
        return Vocabulary(dataset.tokenizer, dataset.labels)

    def load_vocabulary(self, workdir: Path) -> Vocabulary | None:
        return vocabularies.load(workdir, has_labels=True)

    def planned_sizes(self, config: RunConfig) -> Sizes:
        sizes = vocabularies.planned_sizes(config.data.tokenizer, config.model.vocab)
        return dataclasses.replace(sizes, classes=config.model.classes or PLANNED_CLASSES)

    def model(self, config: RunConfig, sizes: Sizes) -> Encoder:
        model = config.model
        self.check_no_stride(config)
        if model.classes not in (0, sizes.classes):
            raise InputError(f"model.classes={model.classes}, but the data have {sizes.classes} labels: set it to 0")
        filled = vocabularies.fill_sizes(model, sizes, config.data.seq_len)
        stats = sizes.stats and sizes.stats.padded(filled.vocab)
        return Encoder(dataclasses.replace(filled, classes=sizes.classes), stats)

    def scores(
        self, config: RunConfig, dataset: Examples, sums: Sums, *, is_complete: bool, gives_probabilities: bool
    ) -> dict[str, float]:
        """Mean loss in nats per label, accuracy, and the macro-averaged F1 score where there is a confusion matrix."""
        scores = {name: float(sums[name][0] / sums[name][1]) for name in ("loss", "accuracy")}
        if "confusion" in sums:
            scores["macro_f1"] = macro_f1(sums["confusion"][0])
        return scores
