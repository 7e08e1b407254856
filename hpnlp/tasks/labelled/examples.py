"""Tasks on labelled examples (`data.examples`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpnlp.data.examples import ExampleConfig, Examples, check_paths, generated, prepare_examples
from hpnlp.data.examples.kind import Kind
from hpnlp.data.reading.fields import LABEL_FIELDS
from hpnlp.data.reading.files import Progress
from hpnlp.tasks.task import Batch, RunConfig, Task
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.tasks.predictions import Prediction, TrainedModel


class ExampleTask(Task):
    """A task whose data config is an `ExampleConfig`.

    Its `input_kind` is the kind of its data: a subclass overrides `predict`, or `input_kind` for models that predict nothing.
    """

    reads_examples = True
    label_fields = LABEL_FIELDS

    def input_kind(self, data: ExampleConfig) -> Kind:
        return data.kind()

    def predict(self, trained: TrainedModel, batch: Batch, values: Sequence[Mapping[str, Any]]) -> Sequence[Prediction]:
        if self.input_kind(trained.config.data) is None:
            return super().predict(trained, batch, values)  # raises
        raise InputError(
            f"{type(self).__name__}, task={self.name!r}, has an `input_kind` and no `predict`: define predict(trained, batch, "
            "values), which returns a Prediction for each example, or let input_kind return None if models predict nothing"
        )

    def check_data(self, data: ExampleConfig) -> None:
        check_paths(data)

    def has_own_heldout(self, data: ExampleConfig) -> bool:
        return generated.has_heldout(data.path)

    def may_lack_labels(self, data: ExampleConfig) -> bool:
        return data.kind().unlabelled

    def batch_widths(self, data: ExampleConfig) -> int:
        return data.buckets

    def dataset(self, data: ExampleConfig, vocabulary: Vocabulary | None, progress: Progress | None = None) -> Examples:
        if vocabulary is None:
            return prepare_examples(data, progress=progress)
        return prepare_examples(data, vocabulary.labels, vocabulary.tokenizer, progress)

    def heldout(
        self, config: RunConfig, dataset: Examples, *, limit: int | None, process_index: int = 0, process_count: int = 1
    ) -> Iterator[Batch]:
        return dataset.heldout(
            batch_size=config.data.batch_size, limit=limit, process_index=process_index, process_count=process_count
        )

    def heldout_documents(self, config: RunConfig, dataset: Examples, limit: int | None) -> np.ndarray | None:
        return dataset.group_numbers(config.data.batch_size, limit)

    def further_heldout(
        self, config: RunConfig, dataset: Examples, *, process_index: int = 0, process_count: int = 1
    ) -> dict[str, Iterator[Batch]]:
        options = {
            "batch_size": config.data.batch_size,
            "process_index": process_index,
            "process_count": process_count,
        }
        return {name: dataset.heldout(name=name, **options) for name in dataset.heldout_sets[1:]}

    def scored_amounts(self, config: RunConfig, dataset: Examples, limit: int | None) -> dict[str, int]:
        count = dataset.heldout_examples
        amounts = {"examples": count if limit is None else min(count, limit * config.data.batch_size)}
        further = dataset.heldout_sets[1:] if limit is None else ()
        return amounts | {f"{name}_examples": dataset.stored[name].count for name in further}

    def unknown_labels(self, dataset: Examples) -> list[str]:
        return dataset.unknown_labels()

    def left_out(self, dataset: Examples) -> list[str]:
        return dataset.left_out()
